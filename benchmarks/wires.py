"""Compression buys time on a slow link: fewer bytes a step, and about as much learned.

Claim: for two hosts of one core each, joined by a link of 400 Mbit/s, learners of LeNet-5 that read
Fashion-MNIST in batches of 16 and meet in every step (adaptive averaging, lag 1) send and wait less

    onebit            at least 18 times fewer bytes, and a step takes at most half as long
    topk, 1 %         at least 25 times fewer bytes, and a step takes at most half as long
    powersgd, rank 2  at least 25 times fewer bytes, and a step takes at most half as long
    bf16              half of the bytes

than uncompressed, and each is within 1.5 points of its test accuracy after the same samples.

Averagings that meet seldom (local SGD, DiLoCo) are shown beside them, without a claim. The hosts
are network namespaces (src/crossbow/bench/link.py). Contenders run one after another in the same
two processes, from the same weights and over the same batches; the time of a step is the mean of a
run. Bytes are those of a host's interface, which counts headers and acknowledgements, too.

Then topologies, without a claim: two ranks on each of the two hosts, so that some neighbours are
near and others far, sum up rows of several sizes over several links; medians over the rounds.

    sudo python benchmarks/wires.py --json benchmarks/results/wires.json

Needs Linux, root, `ip` and `tc`, and `crossbow data fetch fashion-mnist`. Exit code 0 if the claim
holds, 1 if not, 2 if it can't be tested.
"""

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from crossbow.averaging.family import parse as parse_averaging
from crossbow.bench.crew import Crew
from crossbow.bench.link import Link, linked_hosts, why_not
from crossbow.bench.measure import facts, write
from crossbow.comm import topology
from crossbow.comm.world import World, join
from crossbow.config import Config, resolve
from crossbow.errors import InputError
from crossbow.evaluation import calibrate, evaluate
from crossbow.fleet import Fleet
from crossbow.optim.build import build_optimizer
from crossbow.zoo import tasks

TASK, BATCH_SIZE, SEED = "lenet-fashion", 16, 1
SYNC = "adaptive:lag=1"
SEEN = {
    "uncompressed": (SYNC, "none"),
    "bf16": (SYNC, "bf16"),
    "onebit": (SYNC, "onebit"),
    "topk, 1 %": (SYNC, "topk:share=0.01"),
    "powersgd, rank 2": (SYNC, "powersgd:rank=2"),
}
SELDOM = {
    "local SGD, period 16": ("local_sgd:period=16", "none"),
    "DiLoCo, period 64": ("diloco:period=64", "none"),
    "DiLoCo, period 64, onebit": ("diloco:period=64", "onebit"),
}
CLAIMED = {  # times fewer bytes, and share of the time of a step
    "bf16": (1.9, None),
    "onebit": (18, 0.5),
    "topk, 1 %": (25, 0.5),
    "powersgd, rank 2": (25, 0.5),
}
MOST_LOST = 0.015
WAYS = ("flat", "ring", "hierarchical:group=2", "torus:rows=2")
PORTS = (29500, 29501)  # the hosts are ours alone, so every port is free


def train(memory: dict[str, Any], sync: str, compress: str, samples: int) -> dict[str, Any]:
    """In a rank: train a contender from the start; return what it took and what it reached."""
    os.environ["MASTER_PORT"] = str(PORTS[0])
    world = World.from_environment()
    join(world)  # once for all contenders
    if "task" not in memory:
        memory["task"] = tasks.get(TASK)
    task = memory["task"]
    torch.manual_seed(SEED)
    model = task.build_model()
    recipe = resolve(Config(), task.recipe)
    assert isinstance(recipe.optimizer, str)
    optimizer = build_optimizer(recipe.optimizer, model.parameters(), recipe.lr)
    with Fleet(model, optimizer, parse_averaging(sync), compress=compress) as fleet:
        epochs = samples / len(task.train)
        batches = fleet.batches(
            task.train, BATCH_SIZE, epochs, seed=SEED, prepare=task.prepare, collate=task.collate
        )
        start, steps = time.perf_counter(), 0
        for inputs, targets in batches:
            optimizer.zero_grad()
            task.loss(model(inputs), targets).backward()
            optimizer.step()
            steps += 1
        elapsed = time.perf_counter() - start
        with fleet.central():
            calibrate(model, task, 2048, SEED)
            scores = evaluate(model, task)
    return {
        "steps": steps,
        "step_s": elapsed / steps,
        "accuracy": scores.metric,
        "loss": scores.loss,
        "traffic": asdict(fleet.traffic),
    }


def compare(link: Link, samples: int) -> dict[str, Any]:
    """Run every contender; return what each took and reached."""
    cores = sorted(os.sched_getaffinity(0))
    own = [[cores[host % len(cores)]] for host in range(2)]
    found: dict[str, Any] = {}
    with Crew(2, cores=own, link=link) as crew:
        crew.call(train, SYNC, "none", 20 * BATCH_SIZE)  # what is done once, and page faults
        for name, (sync, compress) in contenders().items():
            before = link.sent()
            first, second = crew.call(train, sync, compress, samples)
            sent = [b - a for a, b in zip(before, link.sent(), strict=True)]
            found[name] = {
                "sync": sync,
                "compress": compress,
                "steps": first["steps"],
                "step_s": statistics.fmean((first["step_s"], second["step_s"])),
                "wire_bytes_a_step": statistics.fmean(sent) / first["steps"],
                "sent_bytes_a_step": first["traffic"]["sent_bytes"] / first["steps"],
                "accuracy": first["accuracy"],
                "loss": first["loss"],
            }
            line = found[name]
            say(
                f"{name}: {line['step_s'] * 1e3:.2f} ms and {line['wire_bytes_a_step']:,.0f} bytes "
                f"a step, accuracy {line['accuracy']:.2%}"
            )
    return found


def contenders() -> dict[str, tuple[str, str]]:
    """Those that this version has."""
    there = dict(SEEN)
    for name, (sync, compress) in SELDOM.items():
        try:
            parse_averaging(sync)
        except InputError:
            continue
        there[name] = (sync, compress)
    return there


def timed_sums(memory: dict[str, Any], spec: str, numbers: int, times: int) -> float:
    """In a rank: sum up a row; return seconds each."""
    os.environ["MASTER_PORT"] = str(PORTS[1])
    world = World.from_environment()
    join(world)
    if "group" not in memory:
        memory["group"] = dist.new_group(range(world.size))
    row = torch.zeros(numbers)
    add_up, _ = topology.parse(spec).bind(memory["group"], row)
    add_up(row)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        add_up(row)
    return (time.perf_counter() - start) / times


def compare_topologies(
    link: Link, sizes: Sequence[int], rates: Sequence[float | None], rounds: int
) -> list[dict[str, Any]]:
    """Time every way at every size over every link."""
    found = []
    cores = sorted(os.sched_getaffinity(0))
    own = [[cores[rank // 2 % len(cores)]] for rank in range(4)]
    with Crew(4, cores=own, link=Link(link.namespaces, ranks_each=2)) as crew:
        for rate in rates:
            link.limit(rate)
            for size in sizes:
                times: dict[str, list[float]] = {way: [] for way in WAYS}
                for number in range(rounds):
                    for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                        times[way].append(max(crew.call(timed_sums, way, size // 4, 3)))
                medians = {way: statistics.median(values) for way, values in times.items()}
                found.append({"bytes": size, "bytes_per_second": rate, "seconds": medians})
                told = ", ".join(f"{way} {s * 1e3:.2f}" for way, s in medians.items())
                say(f"{size:,} bytes over {describe(rate)}: {told} ms")
    return found


def conclude(found: dict[str, Any]) -> dict[str, Any]:
    """What the figures say of the claim."""
    base = found["uncompressed"]
    holds, ratios = {}, {}
    for name, line in found.items():
        fewer = base["wire_bytes_a_step"] / line["wire_bytes_a_step"]
        share = line["step_s"] / base["step_s"]
        lost = base["accuracy"] - line["accuracy"]
        ratios[name] = {"times_fewer_bytes": fewer, "step_to_uncompressed": share, "lost": lost}
        if name in CLAIMED:
            least, most = CLAIMED[name]
            holds[f"{name}: at least {least} times fewer bytes"] = fewer >= least
            if most is not None:
                holds[f"{name}: a step takes at most {most} of the time"] = share <= most
            holds[f"{name}: loses at most {MOST_LOST:.1%}"] = lost <= MOST_LOST
    return {"compared": ratios, "holds": holds}


def show(found: dict[str, Any], said: dict[str, Any], topologies: list[dict[str, Any]]) -> None:
    """Print the tables."""
    print(f"{'':28}{'bytes a step':>14}{'fewer':>8}{'ms a step':>11}{'accuracy':>10}")
    for name, line in found.items():
        fewer = said["compared"][name]["times_fewer_bytes"]
        print(
            f"{name:28}{line['wire_bytes_a_step']:>14,.0f}{fewer:>8.1f}"
            f"{line['step_s'] * 1e3:>11.2f}{line['accuracy']:>10.2%}"
        )
    print(f"\n{'milliseconds a sum':34}" + "".join(f"{way:>22}" for way in WAYS))
    for line in topologies:
        what = f"{line['bytes']:,} bytes, {describe(line['bytes_per_second'])}"
        print(f"{what:34}" + "".join(f"{line['seconds'][way] * 1e3:>22.2f}" for way in WAYS))
    print()
    for line, holds in said["holds"].items():
        print(f"{line}: {'holds' if holds else 'does not hold'}")


def describe(rate: float | None) -> str:
    """A link's rate, for people."""
    return "no limit" if rate is None else f"{rate * 8 / 1e6:,.0f} Mbit/s"


def say(line: str) -> None:
    """Tell on standard error how it goes."""
    print(line, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=24000, help="that a contender reads")
    parser.add_argument("--mbit", type=float, default=400, help="rate of the link, contenders")
    parser.add_argument("--sizes", type=int, nargs="*", default=[10**4, 10**5, 10**6, 4 * 10**6])
    parser.add_argument(
        "--mbits", type=float, nargs="*", default=[0, 1000, 100], help="topologies; 0: no limit"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of topologies")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    if min(args.samples, args.rounds, *args.sizes) < 1 or args.mbit <= 0:
        parser.error("give at least one sample, one round and one byte, and a rate above 0")
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
        with linked_hosts() as link:
            link.limit(args.mbit * 1e6 / 8)
            found = compare(link, args.samples)
            rates = [mbit * 1e6 / 8 or None for mbit in args.mbits]
            topologies = compare_topologies(link, args.sizes, rates, args.rounds)
            dropped = link.dropped()
    except KeyboardInterrupt:
        return 130
    said = conclude(found)
    show(found, said, topologies)
    if args.json:
        settings = {"task": TASK, "batch": BATCH_SIZE, "samples": args.samples, "seed": SEED}
        settings |= {"mbit_per_second": args.mbit, "rounds": args.rounds, "dropped": dropped}
        write(
            args.json,
            {"claim": "wires", **where, **settings, "contenders": found, **said}
            | {"topologies": topologies},
        )
    return 0 if all(said["holds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
