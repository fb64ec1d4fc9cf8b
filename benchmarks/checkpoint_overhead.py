"""Overhead: what checkpoints in the background cost, at one a minute.

Claim: under 1 % of throughput, for LeNet-5 and ResNet-32 on one core.

    python benchmarks/checkpoint_overhead.py --json benchmarks/results/checkpoint_overhead.json

Runs with and without checkpoints take turns. Those with have one a second, so that a short run
shows
what one costs; a sixtieth of that is what one a minute costs.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from crossbow.bench.measure import facts
from crossbow.checkpoint.folder import CHECKPOINTS, Checkpoint, found_in
from crossbow.config import Config
from crossbow.trainer import train
from crossbow.zoo import tasks

EVERY_S = 1.0
TASKS = {"lenet-fashion": 16, "resnet32-cifar10": 16}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=6.0, help="of a run")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    before = facts()
    found = {name: measure(name, args.rounds, args.seconds) for name in args.tasks}
    print(json.dumps(found, indent=2))
    if args.json:
        args.json.write_text(json.dumps({"facts": before, "tasks": found}, indent=2) + "\n")


def measure(name: str, rounds: int, seconds: float) -> dict:
    """Compare the speeds of runs with and without."""
    ratios, size = [], 0
    for number in range(rounds):
        speeds = {}
        for every in (0.0, EVERY_S) if number % 2 else (EVERY_S, 0.0):
            speeds[every], found = speed(name, every, seconds)
            size = found or size
        ratios.append(speeds[EVERY_S] / speeds[0.0])
    slower = 1 - statistics.median(ratios)
    return {
        "checkpoint_bytes": size,
        "share_at_one_a_second": slower,
        "share_at_one_a_minute": slower * EVERY_S / 60,
        "ratios": ratios,
    }


def speed(name: str, every_s: float, seconds: float) -> tuple[float, int]:
    """Samples a second of a run, and the bytes of a checkpoint."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # a disk, where /tmp may be memory
        run = Path(folder) / "run"
        config = Config(
            batch_size=TASKS.get(name, 16),
            epochs=1e6,
            eval_every=10**12,
            time_limit_s=seconds,
            checkpoint_every_s=every_s,
            bn_samples=0,
            run_dir=run,
        )
        result = train(tasks.get(name), config, quiet=True)
        paths = found_in(run / CHECKPOINTS)
        files = Checkpoint.open(paths[0]).manifest.files if paths else []
        return result.samples_per_second, sum(file.num_bytes for file in files)


if __name__ == "__main__":
    main()
