"""Never unstable: adaptive averaging diverges nowhere that one learner does not.

Claim: over rates from a quarter of the recipe's to far beyond what one learner bears, and 2 to 64
learners, on digits (an MLP and ResNet-8, batch 16, momentum 0.9, constant rate), wherever one
learner ends with a test loss no worse than knowing nothing, log(10), so do they all.

Each cell is the worst of the seeds. The loss is that of the central model, its batch-norm
statistics estimated anew.

    python benchmarks/stability.py --json benchmarks/results/stability.json

Exit code 0 if the claim holds, 1 if not.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from crossbow.averaging.family import parse
from crossbow.bench.measure import facts, write
from crossbow.evaluation import calibrate, evaluate
from crossbow.fleet import Fleet
from crossbow.optim.build import build_optimizer
from crossbow.zoo import tasks

RATES = {"mlp-digits": 0.05, "resnet8-digits": 0.05}
MULTIPLES = (0.25, 0.5, 1, 2, 4, 8, 16)
LEARNERS = (1, 2, 4, 5, 8, 16, 64)
KNOWS_NOTHING = math.log(10)


def train(name: str, lr: float, learners: int, epochs: float, seed: int, sync: str) -> float:
    """The test loss at the end; infinite if it is no number."""
    task = tasks.get(name)
    torch.manual_seed(seed)
    model = task.build_model()
    optimizer = build_optimizer("sgd:momentum=0.9", model.parameters(), lr)
    with Fleet(model, optimizer, parse(sync), learners=learners) as fleet:
        model.train()
        for inputs, targets in fleet.batches(
            task.train, 16, epochs, seed=seed, prepare=task.prepare
        ):
            optimizer.zero_grad()
            task.loss(model(inputs), targets).backward()
            optimizer.step()
        with fleet.central():
            if learners > 1:
                calibrate(model, task, 1024)
            loss = evaluate(model, task).loss
    return loss if math.isfinite(loss) else math.inf


def measure(epochs: float, seeds: int, learners: Sequence[int], sync: str) -> list[dict[str, Any]]:
    """A line a task and rate."""
    lines = []
    for name, base in RATES.items():
        for multiple in MULTIPLES:
            losses = {
                k: max(train(name, multiple * base, k, epochs, seed, sync) for seed in range(seeds))
                for k in learners
            }
            bears = losses[1] <= KNOWS_NOTHING
            holds = not bears or max(losses.values()) <= KNOWS_NOTHING
            lines.append({"task": name, "multiple": multiple, "losses": losses, "holds": holds})
            told = ", ".join(f"{k}: {loss:.3f}" for k, loss in losses.items())
            print(f"{name}, rate x {multiple:g}: {told}", file=sys.stderr, flush=True)
    return lines


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--learners", default=",".join(map(str, LEARNERS)), metavar="NUMBERS")
    parser.add_argument("--sync", default="adaptive", metavar="SPEC")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    where = facts()
    learners = [int(k) for k in args.learners.split(",")]
    lines = measure(args.epochs, args.seeds, learners, args.sync)
    print(f"{'test loss':24}" + "".join(f"{f'k = {k}':>10}" for k in learners))
    for line in lines:
        cells = "".join(f"{loss:>10.3f}" for loss in line["losses"].values())
        verdict = "" if line["holds"] else "   does not hold"
        print(f"{line['task']:16}{line['multiple']:>8g}{cells}{verdict}")
    holds = all(line["holds"] for line in lines)
    if args.json:
        settings = {"epochs": args.epochs, "seeds": list(range(args.seeds)), "sync": args.sync}
        write(
            args.json, {"claim": "stability", **where, **settings, "holds": holds, "lines": lines}
        )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
