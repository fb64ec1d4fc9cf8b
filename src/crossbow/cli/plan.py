"""`crossbow plan`: measure this machine, and say what to run on it."""

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossbow.cli.output import check_json_path, print_rows, write_json
from crossbow.config import DEFAULTS, Config, resolve
from crossbow.errors import InputError

if TYPE_CHECKING:
    from crossbow.tune.plan import Plan

DESCRIPTION = """\
Measure this machine for about a minute and say how to train a task on it: how many learners, on how
many ranks, with which precision, layout and compilation; or "use one process", or "use DDP".

Candidates take turns in short windows of real training. They are compared by goodput: samples a
second, counted less where the gradients' noise says that learners repeat each other. bf16 is
recommended only if a short training with it falls as float32's does.
"""

EPILOG = """\
A plan is kept in the user's cache, per model, batch size, machine and version of torch, and
`crossbow train --learners auto` starts from it.

examples:
  crossbow plan resnet8-digits --batch-size 16
  crossbow plan lenet-fashion --batch-size 4 --precision float32 --json plan.json
  crossbow plan resnet32-cifar10 --batch-size 16 --critical-batch 900 --refresh
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Register the command."""
    parser = commands.add_parser(
        "plan",
        help="measure this machine, and say what to run on it",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("task", metavar="TASK", help="`crossbow tasks` lists them")
    parser.add_argument("--batch-size", type=int, metavar="N", help="default: the recipe's")
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="N", help="to spend, about; default 60"
    )
    parser.add_argument(
        "--precision",
        choices=("auto", "float32", "any"),
        default="auto",
        help="auto recommends bf16 with evidence, any without, float32 never; default auto",
    )
    parser.add_argument(
        "--no-compile", action="store_false", dest="compiles", help="leave torch.compile out"
    )
    parser.add_argument("--sync", metavar="SPEC", help=f"as for train; default {DEFAULTS.sync}")
    parser.add_argument(
        "--critical-batch",
        type=float,
        metavar="SAMPLES",
        help="as the summary of an earlier run gives it; default: measured early in training, "
        "where it is smallest",
    )
    parser.add_argument("--refresh", action="store_true", help="measure again, whatever is kept")
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="where `data fetch` put the sets"
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="what the text tasks read")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here, too")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure or remember, then say it."""
    check_json_path(args.json)
    _check_number("--seconds", args.seconds)
    if args.critical_batch is not None:
        _check_number("--critical-batch", args.critical_batch)

    from crossbow.averaging.family import parse
    from crossbow.bench.measure import facts
    from crossbow.tune import cache
    from crossbow.tune.plan import Asked, Plan, make_plan
    from crossbow.tune.rehearsal import Source, Stage

    source = Source(args.task, args.data_dir, args.text)
    task = source.load()
    settings = resolve(Config(batch_size=args.batch_size, sync=args.sync), task.recipe)
    parse(settings.sync)
    if settings.batch_size > len(task.train):
        raise InputError(
            f"batch size {settings.batch_size} is above the {len(task.train)} training samples of "
            f"{task.name}: give 1 to {len(task.train)}"
        )
    cores = cache.rank_cores(settings.device)
    wish = args.precision if args.compiles else f"{args.precision}, eager"
    place = cache.place_of(task.name, task.build_model(), settings, len(cores), wish)
    kept = None if args.refresh or args.critical_batch else cache.load(place)
    if kept:
        plan = Plan.from_json(kept)
    else:
        known = (args.precision, args.critical_batch, args.seconds, args.compiles)
        asked = Asked(source, settings, *known)
        with _Progress(args.quiet) as progress, Stage(source, settings, cores) as stage:
            plan = make_plan(asked, task, stage, facts(), progress)
        cache.save(place, plan.to_json())
    show(plan, f"kept at {place}; --refresh measures again" if kept else f"now kept at {place}")
    if args.json:
        write_json(args.json, plan.to_json())
    return 0


def show(plan: "Plan", where: str) -> None:
    """Print what was found, and what it says."""
    print(
        f"{plan.task}, batch {plan.batch_size}, {plan.machine['cpu']}: {len(plan.found.trials)} "
        f"candidates in {plan.seconds:.0f} s ({where})\n"
    )
    print_rows([("SAMPLES/S", "GOODPUT", "CANDIDATE"), *_candidates(plan)])
    print()
    print_rows(_roofline(plan))
    print()
    print_rows(_closing(plan))


def _candidates(plan: "Plan") -> list[tuple[str, ...]]:
    return [
        (f"{t.samples_per_second:9,.0f}", f"{t.goodput:7,.0f}", f"{t.candidate}")
        for t in plan.found.trials
    ]


def _roofline(plan: "Plan") -> list[tuple[str, ...]]:
    roofline = plan.roofline
    one = roofline.one_rank
    rows: list[tuple[str, ...]] = [
        ("PASS", "MFLOP", "MB", "OPERATIONS", "MS", "OF LIMIT", "BOUND BY")
    ]
    rows += [
        (
            p.name,
            f"{p.flops / 1e6:,.2f}",
            f"{p.bytes / 1e6:,.2f}",
            f"{p.operations}",
            f"{p.seconds * 1e3:.3f}",
            f"{p.share(one):.0%}",
            p.bound_by(one),
        )
        for p in roofline.passes
    ]
    return rows


def _closing(plan: "Plan") -> list[tuple[str, str]]:
    machine = plan.roofline.machine
    rows = [
        (
            "machine",
            f"{machine.flops / 1e9:,.0f} GFLOP/s in float32, "
            f"{machine.memory_bytes / 1e9:,.0f} GB/s from memory, "
            f"{machine.cache_bytes / 1e9:,.0f} GB/s from caches",
        ),
        (
            "memory",
            f"{plan.footprint.learner_bytes / 1e6:,.1f} MB a learner and "
            f"{plan.footprint.rank_bytes / 1e6:,.1f} MB a rank: {plan.most_learners:,} learners "
            "at most, by memory and by the batches of an epoch",
        ),
        *(("note", note) for note in plan.found.notes),
        ("because", plan.reason()),
        ("predicted", f"{plan.samples_per_second:,.0f} samples/s"),
    ]
    advice = plan.command or (
        f"use DDP: torchrun --nproc-per-node {plan.found.chosen.ranks} with a program of yours"
    )
    return [*rows, ("run", advice)]


def _check_number(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InputError(f"{name} {value} is not possible: give a finite number above 0")


class _Progress:
    """A line on standard error: rewritten in place on a terminal, else one for every stage."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._last = quiet, ""
        self._rewrites = sys.stderr.isatty()

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._rewrites and not self._quiet:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def __call__(self, what: str, share: float) -> None:
        stage, share = what.partition(":")[0], min(max(share, 0.0), 1.0)
        if self._quiet:
            return
        if self._rewrites:
            print(f"\r\x1b[K{share:4.0%}  {what}", end="", file=sys.stderr, flush=True)
        elif stage != self._last:
            print(f"{share:4.0%}  {stage}", file=sys.stderr, flush=True)
        self._last = stage
