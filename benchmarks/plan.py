"""The plan's choice is the best there is, and trains as fast as it predicts.

Claim, for each model and batch size: the goodput of what `crossbow plan` chooses is within 5 % of
the best of all candidates, and the samples a second that it predicts are within 10 % of what
training then measures.

All candidates of the plan's space run for a few windows, whatever the search would drop;
the best three and the plan's choice then meet in more windows, so that the best is not merely the
luckiest. Both are compared at the critical batch size that the plan measured, without asking bf16
for evidence. Compilation is left out: it takes longer than all the rest. Training is the trainer
itself, with a test set of a few samples.

    python benchmarks/plan.py --json benchmarks/results/plan.json

Cases that the file holds are not measured again, and none is begun after --within seconds: run it
until it says that all are there. Exit code 0 if the claim holds for all cases measured, 1 if not.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from crossbow.bench.measure import facts, interleave, write
from crossbow.config import Config, resolve
from crossbow.data.datasets import Arrays
from crossbow.trainer import train
from crossbow.tune.goodput import goodput
from crossbow.tune.plan import Asked, make_plan, space_of
from crossbow.tune.rehearsal import Candidate, Source, Stage

TASKS = {
    "mlp": "mlp-fashion",
    "lenet": "lenet-fashion",
    "resnet8": "resnet8-cifar10",
    "gpt": "gpt-text",
}
BATCH_SIZES = (4, 16, 64)
CLAIMED = {"choice_to_best": 0.95, "prediction_error": 0.1}
TEST_SAMPLES = 64
TEXT_BYTES = 2**20


def train_for(memory: dict[str, Any], candidate: Candidate, base: Config, seconds: float) -> float:
    """In a rank: train for so many seconds; return the samples a second that the result tells."""
    task = memory["task"]
    inputs, targets = task.test.inputs[:TEST_SAMPLES], task.test.targets[:TEST_SAMPLES]
    test = Arrays(inputs, targets, task.test.classes)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = f"{folder}/run"
        settings = replace(
            candidate.settings(base),
            epochs=1e6,
            time_limit_s=seconds,
            run_dir=run_dir,
            bn_samples=0,
        )
        return train(replace(task, test=test), settings, quiet=True).samples_per_second


def measure(source: Source, batch_size: int, seconds: float) -> dict[str, Any]:
    """Plan, try everything, and train, for so many seconds each, about."""
    task = source.load()
    settings = resolve(Config(batch_size=batch_size, schedule="constant"), task.recipe)
    asked = Asked(source, settings, "any", seconds=seconds, compiles=False)
    cores = sorted(os.sched_getaffinity(0))
    with Stage(source, settings, cores) as stage:
        plan = make_plan(asked, task, stage, {}, lambda *_: None)
        space, window_s = space_of(asked, task, len(cores)), seconds / 60
        ways = space.ways()
        everything = dict.fromkeys(ways)
        for way in ways:
            if way.kind == "learners":
                everything |= dict.fromkeys(space.crowds(way, plan.most_learners))
        tried = {one: _score(stage, one, window_s, plan) for one in everything}
        ranked = sorted(tried, key=lambda one: tried[one], reverse=True)
        chosen = plan.found.chosen
        for one in ranked[3:]:
            if one != chosen:
                stage.drop(one)
        duel = {
            f"{one}": lambda _, one=one: _score(stage, one, 2 * window_s, plan, windows=1)
            for one in dict.fromkeys([chosen, *ranked[:3]])
        }
        scores = interleave(duel, 5, f"{source.name}, batch {batch_size}")
        trained = _trained(stage, chosen, settings, seconds / 3)
    medians = {name: statistics.median(values) for name, values in scores.items()}
    mine, predicted = medians[f"{chosen}"], plan.samples_per_second
    return {
        "chosen": f"{chosen}",
        "best": max(medians, key=lambda name: medians[name]),
        "choice_to_best": mine / max(medians.values()),
        "predicted": predicted,
        "trained": trained,
        "prediction_error": abs(predicted / trained - 1) if trained else None,
        "critical_batch": plan.found.critical_batch,
        "goodput_of_finalists": scores,
        "goodput_of_all": {f"{one}": score for one, score in tried.items()},
        "plan_seconds": plan.seconds,
        "choice": asdict(chosen),
    }


def _score(stage: Stage, one: Candidate, window_s: float, plan: Any, windows: int = 2) -> float:
    speed = statistics.median(stage.speed(one, window_s) for _ in range(windows))
    return goodput(speed, one.learners, plan.batch_size, plan.found.critical_batch)


def _trained(stage: Stage, chosen: Candidate, base: Config, seconds: float) -> float | None:
    """What training measures; None if PyTorch's data parallelism was chosen."""
    if chosen.is_ddp:
        return None
    speeds = stage.crew(chosen.ranks).call(train_for, chosen, base, seconds)
    return float(speeds[0])


def holds(case: dict[str, Any]) -> bool:
    """Whether a case is as claimed."""
    error = case["prediction_error"]
    near = error is None or error <= CLAIMED["prediction_error"]
    return near and case["choice_to_best"] >= CLAIMED["choice_to_best"]


def show(name: str, case: dict[str, Any]) -> None:
    """Print a case on a line."""
    error = case["prediction_error"]
    print(
        f"{name}: {case['chosen']}: {case['choice_to_best']:.3f} of the best ({case['best']}), "
        f"predicted {case['predicted']:,.0f} samples/s"
        + (f", off by {error:.1%}" if error is not None else "")
        + f": {'holds' if holds(case) else 'FAILS'}",
        flush=True,
    )


def main() -> int:
    """Measure the cases that are missing, as long as there is time."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", default="", help="of all, such as mlp-4,gpt-64")
    parser.add_argument("--seconds", type=float, default=15, help="of a plan; default 15")
    parser.add_argument("--within", type=float, default=1e9, help="seconds to begin cases in")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--json", type=Path, help="results, and what is not measured again")
    args = parser.parse_args()
    end = time.monotonic() + args.within
    names = [f"{model}-{batch}" for batch in BATCH_SIZES for model in TASKS]
    wanted = args.cases.split(",") if args.cases else names
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"unknown case {unknown[0]} (legal: {', '.join(names)})")
    result: dict[str, Any] = {"benchmark": "plan", "claimed": CLAIMED, "cases": {}}
    if args.json and args.json.exists():
        result = json.loads(args.json.read_text())
    cases = result["cases"]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text")
        sources = sorted(Path(torch.__file__).parent.glob("nn/**/*.py"))
        text.write_text("".join(p.read_text("utf-8") for p in sources)[:TEXT_BYTES], "utf-8")
        for name in wanted:
            if name in cases or time.monotonic() > end:
                continue
            model, _, batch = name.partition("-")
            source = Source(TASKS[model], args.data_dir, text if model == "gpt" else None)
            machine = facts()
            cases[name] = measure(source, int(batch), args.seconds) | {"machine": machine}
            show(name, cases[name])
            if args.json:
                write(args.json, result)
    left = [name for name in wanted if name not in cases]
    print(f"{len(left)} cases left" if left else "all cases measured", file=sys.stderr)
    return 0 if all(holds(case) for case in cases.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
