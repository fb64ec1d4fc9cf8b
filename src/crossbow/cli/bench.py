"""`crossbow bench`: ours and the peers, side by side, in one run."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossbow.cli.output import check_json_path, print_rows, write_json
from crossbow.errors import InputError, check_choice

if TYPE_CHECKING:
    from crossbow.bench.throughput import Row

THROUGHPUT = """\
Samples a second of a training step, for contenders that take turns in one run:

  adaptive      learners kept together by adaptive averaging, one a core
  sma           the same by synchronous model averaging as published
  independent   as many learners that never speak: the limit
  ddp           PyTorch DistributedDataParallel over Gloo, as many processes, the same batch each
  ddp tuned     the same with static graph, gradients as bucket views, and no syncing of buffers
  one process   plain PyTorch with as many threads
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Register the command and what it can measure."""
    parser = commands.add_parser(
        "bench", help="measure Crossbow and its peers side by side", allow_abbrev=False
    )
    kinds = parser.add_subparsers(title="what to measure", metavar="KIND", required=True)
    throughput = kinds.add_parser(
        "throughput",
        help="samples a second",
        description=THROUGHPUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    throughput.add_argument(
        "--models",
        default="resnet32,resnet8,gpt,lenet,mlp",
        metavar="NAMES",
        help="separated by commas; default %(default)s",
    )
    throughput.add_argument(
        "--batch-sizes", default="4,16,64", metavar="SIZES", help="default %(default)s"
    )
    throughput.add_argument("--ranks", type=int, metavar="N", help="default: one a core")
    throughput.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="of each contender; default 5"
    )
    throughput.add_argument(
        "--seconds", type=float, default=1.0, help="of each round; default %(default)s"
    )
    throughput.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    throughput.add_argument("--quiet", action="store_true", help="no progress")
    throughput.set_defaults(run=run_throughput)


def run_throughput(args: argparse.Namespace) -> int:
    """Measure, print a table, and write the file."""
    check_json_path(args.json)
    ranks = args.ranks or len(os.sched_getaffinity(0))
    for name, value in (("--ranks", ranks), ("--rounds", args.rounds)):
        if value < 1:
            raise InputError(f"{name} {value} is not possible: give 1 or more")
    if not 0 < args.seconds < float("inf"):
        raise InputError(f"--seconds {args.seconds} is not possible: give more than 0")
    sizes = [_batch_size(size) for size in args.batch_sizes.split(",")]

    from crossbow.bench.measure import facts
    from crossbow.bench.throughput import CASES, measure

    names = [check_choice("model", name, CASES) for name in args.models.split(",")]
    machine = facts()
    progress = _say_nothing if args.quiet else _Progress()
    rows = list(measure(names, sizes, ranks, args.rounds, args.seconds, progress))
    print_rows(_table(rows))
    if args.json:
        write_json(
            args.json,
            {
                "benchmark": "throughput",
                "machine": machine,
                "ranks": ranks,
                "rounds": args.rounds,
                "seconds": args.seconds,
                "rows": [row.to_json() for row in rows],
            },
        )
    return 0


def _batch_size(text: str) -> int:
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise InputError(f"batch size {text!r} is not possible: give whole numbers, 1 or more")


def _table(rows: "list[Row]") -> list[list[str]]:
    from crossbow.bench.throughput import CONTENDERS, OURS, PEERS

    lines = [["model", "batch", "contender", "samples/s", *(f"to {name}" for name in PEERS), ""]]
    for row in rows:
        for name in CONTENDERS:
            ratios = [f"{row.ratio(name, peer):.2f}" if name in OURS else "" for peer in PEERS]
            speed = f"{row.median(name):,.0f}"
            lines.append([row.model, str(row.batch_size), name, speed, *ratios, ""])
    return lines


def _say_nothing(what: str, done: int, total: int) -> None:
    """No progress."""


class _Progress:
    """A line on standard error: rewritten in place on a terminal, else one for every model."""

    def __init__(self) -> None:
        self._last = ""
        self._rewrites = sys.stderr.isatty()

    def __call__(self, what: str, done: int, total: int) -> None:
        line = f"{what}: round {done} of {total} done"
        if self._rewrites:
            end = "\n" if done == total else ""
            print(f"\r\x1b[K{line}", end=end, file=sys.stderr, flush=True)
        elif what != self._last:
            print(line, file=sys.stderr, flush=True)
        self._last = what
