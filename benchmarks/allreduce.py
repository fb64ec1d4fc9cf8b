"""All-reduce over shared memory against DistributedDataParallel over Gloo.

Claim: two ranks of one host, each on a core of its own with batches of 16, train ResNet-8, LeNet-5
and a perceptron at least 1.2 times as fast by all-reduce as by DDP over Gloo, both as DDP is and
with the settings under which it is fastest here: the median over the rounds of the ratio within a
round. Same models, batches, optimizers and flags (bench/throughput.py); 2 cores, CPU, float32.

    python benchmarks/allreduce.py --json benchmarks/results/allreduce.json

Exit code 0 if the claim holds, 1 if not.
"""

import argparse
import sys
from pathlib import Path

from crossbow.bench.measure import facts, write
from crossbow.bench.throughput import Row, measure

MODELS = ("resnet8", "lenet", "mlp")
PEERS = ("ddp", "ddp tuned")
RANKS, BATCH_SIZE = 2, 16
CLAIMED = 1.2


def say(row: Row) -> None:
    """A line on standard output."""
    ratios = "  ".join(f"{row.ratio('allreduce', peer):.2f} of {peer}" for peer in PEERS)
    print(f"{row.model:8} {row.median('allreduce'):9,.0f} samples/s   {ratios}", flush=True)


def main() -> int:
    """Measure, print, write; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a contender in a round")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.rounds < 1 or args.seconds <= 0:
        parser.error("give 1 round or more, of more than 0 seconds")
    machine, rows = facts(), []
    for row in measure(
        args.models, [BATCH_SIZE], RANKS, args.rounds, args.seconds, lambda *_: None
    ):
        say(row)
        rows.append(row)
    lines = [
        {**row.to_json(), "holds": all(row.ratio("allreduce", p) >= CLAIMED for p in PEERS)}
        for row in rows
    ]
    if args.json:
        result = {"benchmark": "allreduce", "claimed": CLAIMED, "ranks": RANKS}
        write(args.json, {**result, "machine": machine, "rounds": args.rounds, "rows": lines})
    return 0 if all(line["holds"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
