"""Real data, really trained: what a first run of the published recipes reaches.

Claim: three epochs of `crossbow train resnet8-cifar10`, and of `lenet-fashion`, by one learner on
one core, end above these test accuracies, on sets that `crossbow data fetch` placed and verified:

    0.60   resnet8-cifar10: batch 128, learning rate 0.1, as in He et al., 2015
    0.88   lenet-fashion: batch 16, learning rate 0.01

    crossbow data fetch cifar10 && crossbow data fetch fashion-mnist
    python benchmarks/real_data.py --json benchmarks/results/real_data.json

Exit code 0 if the claim holds, 1 if not.
"""

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from crossbow import Config, tasks, train
from crossbow.bench.measure import facts, write

CLAIMED = {"resnet8-cifar10": 0.60, "lenet-fashion": 0.88}


def main() -> int:
    """Train both, and compare with the claim."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    machine, results, holds = facts(), [], True
    for name, claimed in CLAIMED.items():
        task = tasks.get(name, data_dir=args.data_dir)
        with tempfile.TemporaryDirectory() as folder:
            config = Config(epochs=args.epochs, seed=args.seed, run_dir=Path(folder) / "run")
            result = train(task, config)
        print(f"{name}: {result.metric:.2%}, {result.samples_per_second:,.0f} samples/s")
        results.append({**asdict(result), "claimed": claimed, "run_dir": None})
        holds &= result.metric >= claimed
    if args.json:
        write(args.json, {**machine, "seeds": [args.seed], "results": results})
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
