"""The loop is free: the trainer keeps up with a loop written by hand.

Claim: on one thread, at batch 16, `crossbow.train` reaches at least this share of the samples/s
of the hand-written loop below, as the median of 7 or more interleaved rounds:

    0.97   MLP 784-256-256-10 on images of 28 x 28, normalized
    0.99   ResNet-8 on images of 3 x 32 x 32, normalized, padded and cropped, flipped

Both loops read the same uint8 images in memory, prepare them by the same function, and step the
same fused SGD. The hand-written one shuffles anew each epoch, evaluates and logs nothing, and looks
at no loss; the trainer checks, logs and times as it always does. Images are random: speed does not
depend on what they show. Timed from the end of one step to the end of another by a hook of the
optimizer, so set-up, first touches and the final evaluation are outside for both.

    python benchmarks/loop_overhead.py --json benchmarks/results/loop_overhead.json

Exit code 0 if the claim holds, 1 if not.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from crossbow import Config, Task, train
from crossbow.bench.measure import facts, interleave, ratio, write
from crossbow.data.augment import images
from crossbow.data.datasets import Arrays
from crossbow.zoo import models

BATCH, CLASSES = 16, 10
STEPS_UNIT = 16  # the trainer prepares 16 batches together: only whole groups are timed


@dataclass(frozen=True)
class Case:
    """A model, its data, and the share of the hand-written loop's speed that is claimed."""

    name: str
    task: Task
    augments: bool
    steps: int
    claimed: float


class Timed:
    """Makes an optimizer that notes when the first and the last of the timed steps ended."""

    def __init__(self, steps: int) -> None:
        self.begin, self.end = STEPS_UNIT, STEPS_UNIT + steps
        self.done, self.start, self.stop = 0, 0.0, 0.0

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Make one, for either loop."""
        optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True)
        optimizer.register_step_post_hook(self._count)
        return optimizer

    def _count(self, *_: Any) -> None:
        self.done += 1
        if self.done == self.begin:
            self.start = time.perf_counter()
        elif self.done == self.end:
            self.stop = time.perf_counter()

    def speed(self) -> float:
        """Samples a second."""
        assert self.done == self.end
        return (self.end - self.begin) * BATCH / (self.stop - self.start)


def by_trainer(case: Case, seed: int) -> float:
    """Train as users do; return the samples a second."""
    timed = Timed(case.steps)
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            batch_size=BATCH,
            epochs=timed.end * BATCH / len(case.task.train),
            optimizer=timed,
            eval_every=10**12,
            seed=seed,
            run_dir=Path(folder) / "run",
        )
        train(case.task, config, quiet=True)
    return timed.speed()


def by_hand(case: Case, seed: int) -> float:
    """Train by a loop with nothing in it that training does not need."""
    timed = Timed(case.steps)
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    model = case.task.build_model()
    optimizer = timed(model.parameters())
    inputs, targets, prepare = case.task.train.inputs, case.task.train.targets, case.task.prepare
    steps = 0
    model.train()
    while True:
        order = torch.randperm(len(inputs))
        for start in range(0, len(inputs), BATCH):
            batch = order[start : start + BATCH]
            keys = random.integers(0, 2**64, BATCH, np.uint64) if case.augments else None
            loss = F.cross_entropy(model(prepare(inputs[batch], keys)), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            if steps == timed.end:
                return timed.speed()


def random_task(
    model: Callable[[], nn.Module], samples: int, shape: tuple[int, int, int], **augment: Any
) -> Task:
    """Random images of the right shape."""
    channels = shape[0]
    pixels = torch.randint(0, 256, (samples, *shape), dtype=torch.uint8)
    data = Arrays(pixels, torch.randint(0, CLASSES, (samples,)), CLASSES)
    return Task(
        model=model,
        loss=F.cross_entropy,
        train=data,
        test=Arrays(data.inputs[:BATCH], data.targets[:BATCH], CLASSES),
        prepare=images((0.5,) * channels, (0.25,) * channels, **augment),
    )


def cases() -> list[Case]:
    """The two ends: a step of half a millisecond, and one of twenty."""
    mlp = random_task(models.mlp, 60_000, (1, 28, 28))
    resnet = random_task(partial(models.resnet_cifar, 8), 50_000, (3, 32, 32), pad=4, flip=True)
    return [
        Case("mlp, 28 x 28", mlp, augments=False, steps=4096, claimed=0.97),
        Case("resnet8, 3 x 32 x 32", resnet, augments=True, steps=192, claimed=0.99),
    ]


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """One case's line of the result."""
    contenders = {"trainer": partial(by_trainer, case), "by hand": partial(by_hand, case)}
    speeds = interleave(contenders, rounds, case.name)
    share = ratio(speeds, "trainer", "by hand")
    return {
        "case": case.name,
        "batch": BATCH,
        "steps": case.steps,
        "claimed": case.claimed,
        "ratio": share,
        "holds": share >= case.claimed,
        "median_samples_per_second": {name: median(values) for name, values in speeds.items()},
        "samples_per_second": speeds,
    }


def show(lines: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(f"{'':22}{'by hand':>12}{'trainer':>12}{'ratio':>9}{'claimed':>9}")
    for line in lines:
        medians = line["median_samples_per_second"]
        print(
            f"{line['case']:22}{medians['by hand']:>12,.0f}{medians['trainer']:>12,.0f}"
            f"{line['ratio']:>9.3f}{line['claimed']:>9.2f}"
            + ("" if line["holds"] else "   does not hold")
        )


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, help="timed steps a round, a multiple of 16")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.rounds < 1 or (args.steps is not None and (args.steps < 1 or args.steps % STEPS_UNIT)):
        parser.error("give at least one round, and a positive multiple of 16 as steps")
    torch.set_num_threads(1)
    where = facts()
    lines = []
    for case in cases():
        steps = args.steps or case.steps
        lines.append(measure(replace(case, steps=steps), args.rounds))
    show(lines)
    if args.json:
        seeds = list(range(args.rounds))
        write(args.json, {"claim": "loop_overhead", **where, "seeds": seeds, "cases": lines})
    return 0 if all(line["holds"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
