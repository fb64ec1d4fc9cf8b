"""The averaging hides in a step: a slow link costs DDP what it doesn't cost Crossbow.

Claim: for two hosts of one core each, joined by a link so slow that all-reducing n floats, n the
model's parameters, takes as long as a step's computation (within 5 %), as medians over the rounds:

    Crossbow (SMA)   keeps at least 0.9 of its samples/s of the unlimited link
    DDP over Gloo    keeps at most 2/3

for ResNet-8, batch 16. "ddp" has DDP's own bucket size, one bucket for such a model; "ddp, buckets"
reduces quarters of the gradient while it is computed and is shown beside it, without a claim.

The hosts are network namespaces of this machine, each with a rank on a core of its own; a veth
pair joins them, limited by a token bucket at both ends (src/crossbow/bench/link.py says with what
burst). The rate is found in three steps: the time of a step without any exchange; the
bytes that a host sends in an all-reduce, by its interface's counter, which give a first rate; and
bare all-reduces over the limited link, which correct it until they take as long as the step. Both
are timed again in each round. Steps are timed by the ranks, from the end of a step to the end of
another, after some that fill the queues and empty the buckets. Contenders take turns, round by
round, limited and not.

    sudo python benchmarks/links.py --json benchmarks/results/links.json

Needs Linux, root, `ip` and `tc`. Exit code 0 if the claim holds, 1 if not, 2 if it can't be tested.
"""

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from crossbow.bench.crew import Crew
from crossbow.bench.link import Link, linked_hosts, why_not
from crossbow.bench.measure import Speeds, facts, ratio, write
from crossbow.bench.throughput import CASES, WARM_UP_STEPS, run, set_up

SMA_KEEPS, DDP_KEEPS = 0.9, 2 / 3
TOLERANCE = 0.05
CONTENDERS = {"independent": "independent", "crossbow": "sma", "ddp": "ddp tuned"}
CONTENDERS["ddp, buckets"] = "ddp tuned"
BUCKETS = 4
FIRST_PORT = 29500  # the hosts are ours alone, so every port is free
UNTIMED_STEPS = 5
CORRECTIONS = 4


class Field:
    """Two linked hosts, and on them a crew of every contender."""

    def __init__(self, link: Link, stack: ExitStack, model: str, batch_size: int) -> None:
        self.link = link
        self.batch_size = batch_size
        self.parameters = sum(p.numel() for p in CASES[model].build().parameters())
        self.bytes_per_second: float | None = None
        cores = sorted(os.sched_getaffinity(0))
        own = [[cores[host % len(cores)]] for host in range(2)]
        self.crews = {
            name: stack.enter_context(Crew(2, cores=own, link=link)) for name in CONTENDERS
        }
        bucket_mb = 4 * self.parameters / BUCKETS / 2**20
        for number, (name, crew) in enumerate(self.crews.items()):
            bucket = bucket_mb if name == "ddp, buckets" else None
            crew.call(set_up, CONTENDERS[name], model, batch_size, FIRST_PORT + number, bucket)
            crew.call(run, WARM_UP_STEPS)

    def limit(self, bytes_per_second: float | None) -> None:
        """Limit the link; None is no limit."""
        self.link.limit(bytes_per_second)
        self.bytes_per_second = bytes_per_second

    def step_s(self, contender: str, steps: int) -> float:
        """Seconds of a step."""
        return statistics.fmean(self.crews[contender].call(timed_steps, steps))

    def reduction_s(self, times: int) -> float:
        """Seconds of a bare all-reduce of n floats."""
        return statistics.fmean(self.crews["ddp"].call(timed_reductions, self.parameters, times))

    def reduction_bytes(self, times: int) -> float:
        """Bytes that a host sends in one."""
        before = self.link.sent()
        self.crews["ddp"].call(reductions, self.parameters, times)
        return statistics.fmean(
            (b - a) / times for a, b in zip(before, self.link.sent(), strict=True)
        )


def timed_steps(memory: dict[str, Any], steps: int) -> float:
    """In a rank: train; return seconds a step."""
    run(memory, UNTIMED_STEPS)
    start = time.perf_counter()
    run(memory, steps)
    elapsed = time.perf_counter() - start
    if "fleet" in memory:  # let its last exchange end, which would be in the next contender's way
        with memory["fleet"].central():
            pass
    return elapsed / steps


def timed_reductions(memory: dict[str, Any], n: int, times: int) -> float:
    """In a rank: all-reduce; return seconds each."""
    reductions(memory, n, UNTIMED_STEPS)
    start = time.perf_counter()
    reductions(memory, n, times)
    return (time.perf_counter() - start) / times


def reductions(memory: dict[str, Any], n: int, times: int) -> None:
    """In a rank: all-reduce n floats."""
    numbers = torch.zeros(n)
    for _ in range(times):
        dist.all_reduce(numbers)


def calibrate(field: Field, steps: int) -> dict[str, Any]:
    """Limit the link so that an all-reduce takes as long as a step; return how it was found."""
    step_s = statistics.median(field.step_s("independent", steps) for _ in range(3))
    unlimited_s = field.reduction_s(steps)
    num_bytes = field.reduction_bytes(steps)
    rate, tried = num_bytes / step_s, {}
    for _ in range(CORRECTIONS):
        field.limit(rate)
        tried[rate] = statistics.median(field.reduction_s(steps) for _ in range(3)) / step_s
        say(f"link at {rate * 8 / 1e6:,.1f} Mbit/s: all-reduce takes {tried[rate]:.3f} steps")
        if abs(tried[rate] - 1) < TOLERANCE / 5:
            break
        rate *= tried[rate]
    field.limit(min(tried, key=lambda rate: abs(tried[rate] - 1)))
    return {
        "step_s": step_s,
        "allreduce_unlimited_s": unlimited_s,
        "allreduce_payload_bytes": 4 * field.parameters,
        "allreduce_wire_bytes": num_bytes,
        "bytes_per_second": field.bytes_per_second,
        "tried": [{"bytes_per_second": r, "allreduce_to_step": t} for r, t in tried.items()],
    }


def measure(field: Field, rounds: int, steps: int) -> dict[str, Any]:
    """Run all rounds; return what was measured."""
    limited = field.bytes_per_second
    speeds: Speeds = {f"{name}{link}": [] for name in CONTENDERS for link in ("", ", limited")}
    reductions_to_step = []
    for number in range(rounds):
        first = number % len(CONTENDERS)
        names = [*CONTENDERS][first:] + [*CONTENDERS][:first]
        states = [None, limited] if number % 2 == 0 else [limited, None]
        for state in states:
            field.limit(state)
            for name in names:
                samples = len(field.crews[name]) * field.batch_size
                key = name if state is None else f"{name}, limited"
                speeds[key].append(samples / field.step_s(name, steps))
            if state is not None:
                step_s = 2 * field.batch_size / speeds["independent, limited"][-1]
                reductions_to_step.append(field.reduction_s(steps) / step_s)
        told = ", ".join(f"{n} {s[-1]:,.0f}" for n, s in speeds.items())
        say(f"round {number + 1} of {rounds}: {told} samples/s")
    field.limit(limited)
    return {
        "speeds": speeds,
        "reductions_to_step": reductions_to_step,
        "dropped": field.link.dropped(),
    }


def conclude(measured: dict[str, Any]) -> dict[str, Any]:
    """What the figures say of the claim."""
    speeds = measured["speeds"]
    keeps = {name: ratio(speeds, f"{name}, limited", name) for name in CONTENDERS}
    reduction = statistics.median(measured["reductions_to_step"])
    return {
        "allreduce_to_step": reduction,
        "keeps": keeps,
        "crossbow_to_ddp": {
            "unlimited": ratio(speeds, "crossbow", "ddp"),
            "limited": ratio(speeds, "crossbow, limited", "ddp, limited"),
        },
        "holds": {
            f"all-reduce / step within {TOLERANCE:.0%} of 1": abs(reduction - 1) <= TOLERANCE,
            f"crossbow keeps at least {SMA_KEEPS:.2f}": keeps["crossbow"] >= SMA_KEEPS,
            f"ddp keeps at most {DDP_KEEPS:.2f}": keeps["ddp"] <= DDP_KEEPS,
        },
    }


def show(title: str, found: dict[str, Any], measured: dict[str, Any], said: dict[str, Any]) -> None:
    """Print the table."""
    print(
        f"{title}: a step computes for {found['step_s'] * 1e3:.2f} ms; an all-reduce sends "
        f"{found['allreduce_wire_bytes']:,.0f} bytes a host\nand takes "
        f"{found['allreduce_unlimited_s'] * 1e3:.2f} ms unlimited, {said['allreduce_to_step']:.3f} "
        f"steps at {found['bytes_per_second'] * 8 / 1e6:,.1f} Mbit/s\n"
    )
    print(f"{'samples/s':16}{'unlimited':>12}{'limited':>12}{'keeps':>9}")
    for name in CONTENDERS:
        medians = [statistics.median(measured["speeds"][key]) for key in (name, f"{name}, limited")]
        print(f"{name:16}{medians[0]:>12,.0f}{medians[1]:>12,.0f}{said['keeps'][name]:>9.3f}")
    print()
    for line, holds in said["holds"].items():
        print(f"{line}: {'holds' if holds else 'does not hold'}")


def say(line: str) -> None:
    """Tell on standard error how it goes."""
    print(line, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=list(CASES), default="resnet8")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100, help="timed, of a contender in a round")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    if min(args.batch_size, args.rounds, args.steps) < 1:
        parser.error("give at least one sample, one round and one step")
    return args


def main() -> int:
    """Measure, print, write."""
    args = parse()
    obstacle = why_not()
    if obstacle:
        say(f"skipped: {obstacle}")
        return 2
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # so that the hosts are removed then too
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # for ranks: our hosts have no names to look up
    where = facts()
    try:
        with linked_hosts() as link, ExitStack() as stack:
            say(f"{args.model}, batch {args.batch_size}: setting up")
            field = Field(link, stack, args.model, args.batch_size)
            found = calibrate(field, args.steps)
            measured = measure(field, args.rounds, args.steps)
    except KeyboardInterrupt:
        return 130
    said = conclude(measured)
    show(f"{args.model}, batch {args.batch_size}", found, measured, said)
    if args.json:
        settings = {"model": args.model, "batch": args.batch_size, "rounds": args.rounds}
        settings |= {"steps": args.steps}
        write(args.json, {"claim": "links", **where, **settings, **found, **said, **measured})
    return 0 if all(said["holds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
