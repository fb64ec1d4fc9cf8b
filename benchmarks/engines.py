"""Engines, precision and compilation: what makes a rank's learners faster on one core.

Claims, on one core:

- stacked: learners of an MLP at batch 4, stacked and compiled, take their steps (gradients, SGD,
  adaptive averaging) 1.5 times as fast as one after another, or faster. docs/log.md says why not.
- precision: one learner at batch 16 in bfloat16, channels-last and compiled trains 1.2 times as
  fast as in eager float32, or faster, for each of five models, and ends a short training as good.

    python benchmarks/engines.py stacked --json benchmarks/results/engines.json
    python benchmarks/engines.py precision --json benchmarks/results/precision.json

Contenders take turns, round by round; ratios are medians over the rounds.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import crossbow as xb
from crossbow.bench.measure import Contender, Speeds, facts, interleave, ratio, write
from crossbow.bench.throughput import CASES, READY_BATCHES
from crossbow.comm.world import World
from crossbow.config import Config, resolve
from crossbow.data.datasets import Arrays
from crossbow.fleet import Fleet
from crossbow.learner import Learner
from crossbow.task import Task
from crossbow.trainer import train
from crossbow.zoo import tasks

STACKED: Mapping[str, Mapping[str, Any]] = {
    "sequential": {},
    "sequential, compiled": {"compile": True},
    "stacked": {"engine": "stacked"},
    "stacked, compiled": {"engine": "stacked", "compile": True},
}
PRECISION: Mapping[str, Mapping[str, Any]] = {
    "float32": {},
    "float32, compiled": {"compile": True},
    "bf16, channels-last": {"precision": "bf16", "channels_last": True},
    "bf16, channels-last, compiled": {"precision": "bf16", "channels_last": True, "compile": True},
}
TRAININGS: Mapping[str, tuple[str, float]] = {  # of a model: its task, and epochs
    "mlp": ("mlp-fashion", 1.0),
    "lenet": ("lenet-fashion", 1.0),
    "resnet8": ("resnet8-cifar10", 1.0),
    "resnet32": ("resnet32-cifar10", 0.25),
    "gpt": ("gpt-text", 0.2),
}


def contender(
    stack: ExitStack,
    name: str,
    batch: int,
    learners: int,
    seconds: float,
    options: Mapping[str, Any],
) -> Contender:
    """Learners that are ready to step, on batches that are ready; a seed -> samples a second."""
    case = CASES[name]
    torch.manual_seed(0)
    inputs, targets = case.read(batch * learners * READY_BATCHES)
    data = Arrays(inputs, targets, 10)
    task = Task(model=case.build, loss=case.loss, train=data, test=data, name=name)
    config = Config(batch_size=batch, optimizer=case.optimizer, lr=1e-4, device="cpu", **options)
    learner = Learner(task, resolve(config, Config()), World())
    learner.model.train()
    fleet = stack.enter_context(
        Fleet(learner.model, learner.optimizer, xb.adaptive(), learners=learners)
    )
    told: list[str] = []
    learner.join(fleet, lambda *said: told.extend(said))
    batches = fleet.batches(data, batch, epochs=1e9)

    def steps(number: int) -> float:
        start = time.perf_counter()
        for inputs, targets in islice(batches, number * learners):
            learner.step(inputs, targets, 0)
        return time.perf_counter() - start

    steps(3)
    assert not told, told
    number = 2
    while (elapsed := steps(number)) < min(seconds, 0.1):
        number *= 2
    number = max(1, round(number * seconds / elapsed))
    return lambda _: number * learners * batch / steps(number)


def compare(
    name: str,
    batch: int,
    learners: int,
    rounds: int,
    seconds: float,
    ways: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """All ways of one model, in turn."""
    with ExitStack() as stack:
        contenders: dict[str, Contender] = {
            way: contender(stack, name, batch, learners, seconds, options)
            for way, options in ways.items()
        }
        speeds: Speeds = interleave(contenders, rounds, f"{name}, batch {batch}, {learners}")
    base = next(iter(ways))
    return {
        "model": name,
        "batch_size": batch,
        "learners": learners,
        "samples_per_second": {way: statistics.median(found) for way, found in speeds.items()},
        f"ratio_to_{base}": {way: ratio(speeds, way, base) for way in ways},
        "rounds": speeds,
    }


def accuracy(name: str, options: Mapping[str, Any], text: Path, epochs: float) -> dict[str, Any]:
    """What a short training of one learner ends with."""
    task_name, share = TRAININGS[name]
    task = tasks.get(task_name, text=text if task_name == "gpt-text" else None)
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            epochs=share * epochs,
            batch_size=16,
            device="cpu",
            run_dir=Path(folder, "run"),
            **options,
        )
        if task_name.endswith("cifar10"):  # the recipe's schedule is of 164 epochs, at batch 128
            config = replace(config, lr=0.02, schedule="cosine")
        result = train(task, config, quiet=True)
    return {"task": task_name, result.metric_name: result.metric, "epochs": result.epochs}


def main() -> None:
    """Compare what is asked for; what was found is written after every model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["stacked", "precision"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="+", choices=list(CASES))
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--learners", type=int, nargs="+", default=[4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a contender in a round")
    parser.add_argument("--ways", nargs="+", help="leave out the others")
    parser.add_argument("--accuracy", type=float, help="train, too: a share of the epochs")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what the GPT reads")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    ways = STACKED if args.what == "stacked" else PRECISION
    ways = {way: options for way, options in ways.items() if not args.ways or way in args.ways}
    names = args.models or (["mlp", "lenet", "gpt"] if args.what == "stacked" else list(CASES))
    batch = args.batch_size or (4 if args.what == "stacked" else 16)
    crews = args.learners if args.what == "stacked" else [1]
    found: dict[str, Any] = {"facts": facts(), "rows": []}
    measure: Callable[..., dict[str, Any]] = partial(
        compare, rounds=args.rounds, seconds=args.seconds, ways=ways
    )
    for name in names:
        for learners in crews:
            row = measure(name, batch, learners)
            if args.accuracy:
                row["trained"] = {
                    way: accuracy(name, options, args.text, args.accuracy)
                    for way, options in ways.items()
                }
            found["rows"].append(row)
            print({key: value for key, value in row.items() if key != "rounds"})
            if args.json:
                write(args.json, found)


if __name__ == "__main__":
    main()
