"""`crossbow bench`: ours and the peers, side by side, in one run."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossbow.cli.output import check_json_path, print_rows, write_json
from crossbow.errors import InputError, check_choice

if TYPE_CHECKING:
    from crossbow.bench.contest import Line
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


ACCURACY = """\
Seconds of training, samples and epochs to a target, Crossbow at the task's own settings against
peers that were tuned, interleaved over several seeds:

  crossbow      a learner a core, nothing retuned
  one process   plain PyTorch on all cores, at the best of so many batch sizes and rates
  ddp           DistributedDataParallel over Gloo, a process a core, likewise

Each peer is shown at settings that need no tuning, too. All score their last and their averaged
weights, whichever is better. With --json, what has been run is kept and not run again.
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
    _add_accuracy(kinds)


def _add_accuracy(kinds: "argparse._SubParsersAction[Any]") -> None:
    accuracy = kinds.add_parser(
        "accuracy",
        help="time to a target",
        description=ACCURACY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    accuracy.add_argument("task", nargs="?", default="resnet8-digits", metavar="TASK")
    accuracy.add_argument("--target", type=float, help="of the task's metric")
    accuracy.add_argument("--batch-size", type=int, metavar="N", help="default: the recipe's")
    accuracy.add_argument("--lr", type=float, metavar="RATE", help="default: the recipe's")
    accuracy.add_argument("--epochs", type=float, metavar="N", help="given up after; default 10")
    accuracy.add_argument("--sync", default="adaptive", metavar="SPECS", help="separated by spaces")
    accuracy.add_argument("--ranks", type=int, metavar="N", help="default: one a core")
    accuracy.add_argument("--seeds", type=int, default=3, metavar="N", help="default 3")
    accuracy.add_argument(
        "--tuning", type=int, default=8, metavar="N", help="settings a peer may try; default 8"
    )
    accuracy.add_argument("--quick", action="store_true", help="digits, in two minutes")
    accuracy.add_argument("--data-dir", type=Path, metavar="DIR")
    accuracy.add_argument("--text", type=Path, metavar="FILE", help="what the text tasks read")
    accuracy.add_argument("--json", type=Path, metavar="FILE", help="keep all runs here")
    accuracy.add_argument("--quiet", action="store_true", help="no progress")
    accuracy.set_defaults(run=run_accuracy)


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


QUICK = {"task": "mlp-digits", "target": 0.95, "seeds": 1, "tuning": 2}


def run_accuracy(args: argparse.Namespace) -> int:
    """Hold the contest, and print who was there when."""
    check_json_path(args.json)
    if args.quick:
        vars(args).update(QUICK)
    ranks = args.ranks or len(os.sched_getaffinity(0))
    for name, value in (("--ranks", ranks), ("--seeds", args.seeds), ("--tuning", args.tuning)):
        if value < 1:
            raise InputError(f"{name} {value} is not possible: give 1 or more")
    if args.target is None:
        raise InputError("a contest needs a target: give --target VALUE, or --quick")

    from crossbow.bench.accuracy import Entrant, Goal
    from crossbow.bench.contest import advantage, contest, tries
    from crossbow.config import Config, resolve
    from crossbow.zoo import tasks

    task = tasks.get(args.task, data_dir=args.data_dir, text=args.text)
    asked = Config(batch_size=args.batch_size, lr=args.lr, epochs=args.epochs)
    settings = resolve(asked, task.recipe)
    if not isinstance(settings.optimizer, str):
        raise InputError(f"the optimizer of {args.task} has no name that all contenders can use")
    epochs, batch, lr = args.epochs or 10.0, settings.batch_size, settings.lr
    goal = Goal(
        args.task, args.target, epochs, settings.optimizer, data_dir=args.data_dir, text=args.text
    )
    ours = [Entrant("crossbow", batch, lr, sync=sync) for sync in args.sync.split()]
    peers = {kind: tries(kind, batch, lr, ranks)[: args.tuning] for kind in ("one process", "ddp")}
    progress = _say_nothing if args.quiet else _Progress()
    lines = contest(goal, ours, peers, ranks, args.seeds, args.json, progress)
    print_rows(_ranking(lines))
    print(f"Crossbow is there {advantage(lines):.2f} times as fast as the best peer")
    return 0


def _ranking(lines: "list[Line]") -> list[list[str]]:
    rows = [["seconds", "(all seeds)", "epochs", "samples/s", "who"]]
    for line in lines:
        each = " ".join(f"{second:.1f}" for second in line.seconds)
        who = line.entrant.label + (" (tuned)" if line.is_tuned else "")
        rows.append([f"{line.median:.1f}", each, f"{line.epochs:.2f}", f"{line.speed:,.0f}", who])
    return rows


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
    """A line on standard error: rewritten in place on a terminal, else one for all that is new."""

    def __init__(self) -> None:
        self._last = ""
        self._rewrites = sys.stderr.isatty()

    def __call__(self, what: str, done: int, total: int) -> None:
        line = f"{what}: {done} of {total} rounds done"
        if self._rewrites:
            end = "\n" if done == total else ""
            print(f"\r\x1b[K{line}", end=end, file=sys.stderr, flush=True)
        elif what != self._last:
            print(line, file=sys.stderr, flush=True)
        self._last = what
