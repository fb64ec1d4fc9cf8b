"""Unequal devices: a slow one adds its speed, and holds nobody back.

Claim: two ranks, a core each, the second one limited to a share of its core by a cgroup's quota.
Together they reach at least 0.93 of the sum of what each does alone, at shares of 1/2 and 1/4, for
ResNet-8, GPT and a translator, with

    allreduce, speed   one batch of 32 that is shared by speed, as it is measured
    adaptive           learners of batch 16 shared by speed: 2 + 1, or 4 + 1

Beside them, with equal batches of 16,

    allreduce, equal   the same all-reduce
    ddp                PyTorch's DistributedDataParallel over Gloo

and `followed`: the share goes from 1/2 to 1/4 while allreduce runs; how long it takes until the
sizes are within two samples of where they end.

The quota's period is 5 ms, so that the slow rank is slow evenly. Contenders take turns, round by
round. Needs root, or a cgroup to write to.

    sudo .venv/bin/python benchmarks/unequal.py --json benchmarks/results/unequal.json

Exit code 0 if the claim holds, 1 if not, 2 if no cgroup can be made.
"""

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from crossbow import allreduce
from crossbow.bench.crew import Crew, meeting_place
from crossbow.bench.measure import facts, write
from crossbow.bench.throughput import CASES, TUNED, Case
from crossbow.data.datasets import Arrays
from crossbow.data.loader import read, stretches
from crossbow.data.sentences import rows, told
from crossbow.fleet import Fleet
from crossbow.optim.build import build_optimizer
from crossbow.task import sentence_cross_entropy
from crossbow.zoo import models

BATCH, SAMPLES, ENDLESS = 16, 2048, 10**9
PERIOD_US = 5000
CLAIMED = 0.93
SHARES = (0.5, 0.25)
TOGETHER = ("allreduce, speed", "adaptive", "allreduce, equal", "ddp")
CONTENDERS = ("fast alone", "slow alone", *TOGETHER)


def _pairs(size: int) -> tuple[Tensor, Tensor]:
    """Sentences as long as those of the help texts: 3 to 47 tokens, 15 on average."""
    lengths = torch.empty(size).exponential_(1 / 12).add(3).clamp(max=47).int().tolist()
    sides = [rows([[7] * n for n in lengths], 48).long() for _ in range(2)]
    return torch.cat([sides[0], told(sides[1])], dim=1), sides[1]


MODELS = {
    "resnet8": CASES["resnet8"],
    "gpt": CASES["gpt"],
    "transformer": Case(
        partial(models.transformer, 4000), _pairs, "adamw:fused=true", sentence_cross_entropy
    ),
}


class Group:
    """A cgroup whose processes get a share of a core."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    @contextmanager
    def made(cls) -> Iterator["Group"]:
        """Make one, and remove it when nobody is in it any more."""
        root = Path("/sys/fs/cgroup/cpu")
        folder = (root if root.is_dir() else Path("/sys/fs/cgroup")) / f"crossbow-{os.getpid()}"
        folder.mkdir()
        try:
            yield cls(folder)
        finally:
            for _ in range(50):  # the kernel takes a moment to count the dead
                try:
                    folder.rmdir()
                    break
                except OSError:
                    time.sleep(0.1)

    def add(self, pid: int) -> None:
        """Limit a process."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def limit(self, share: float) -> None:
        """Give all processes together this share of a core."""
        quota = round(share * PERIOD_US)
        if (self._folder / "cpu.max").exists():
            (self._folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (self._folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._folder / "cpu.cfs_quota_us").write_text(str(quota))


def pid_of(memory: dict[str, Any]) -> int:
    """In a rank: who it is."""
    return os.getpid()


def set_up(memory: dict[str, Any], contender: str, name: str, share: float, port: int) -> None:
    """In a rank: make what the contender needs, and an endless stream of its batches."""
    os.environ["MASTER_PORT"] = str(port)
    case, rank = MODELS[name], int(os.environ["RANK"])
    torch.manual_seed(0)
    model, stack = case.build(), ExitStack()
    data = Arrays(*case.read(SAMPLES), classes=1)
    if contender == "ddp":
        dist.init_process_group("gloo")
        stack.callback(dist.destroy_process_group)
        tuned = {**TUNED, "static_graph": False} if name == "transformer" else TUNED
        with warnings.catch_warnings():  # torch 2.13 calls broadcast_buffers something else
            warnings.simplefilter("ignore", FutureWarning)
            model = nn.parallel.DistributedDataParallel(model, **tuned)
    optimizer = build_optimizer(case.optimizer, model.parameters(), lr=1e-4)
    if contender in ("allreduce, speed", "allreduce, equal", "adaptive"):
        is_adaptive = contender == "adaptive"
        fleet = Fleet(
            model,
            optimizer,
            None if is_adaptive else allreduce(),
            learners=round(1 / share) + 1 if is_adaptive else 2,
            speeds=[1, share] if is_adaptive else None,
        )
        stack.callback(fleet.close)
        way = "speed" if contender == "allreduce, speed" else "equal"
        batches = fleet.batches(data, BATCH, ENDLESS, partition=way)
        memory["learners"] = len(fleet.mine)
    else:
        wanted = stretches(rank * SAMPLES, ENDLESS, BATCH)
        batches = read(data, wanted, seed=0)
        memory["learners"] = 1
    memory |= {"stack": stack, "parts": (model, optimizer, case.loss, batches), "sizes": []}


class Done(NamedTuple):
    """What a rank did."""

    samples: int
    sizes: list[tuple[float, int]]
    """When it read, and how much."""


def run(memory: dict[str, Any], rounds: int, delay_s: Sequence[float] = ()) -> Done:
    """In a rank: train for so many rounds, each learner delayed as said."""
    model, optimizer, loss, batches = memory["parts"]
    sizes = []
    for step in range(rounds * memory["learners"]):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        if delay_s:
            time.sleep(delay_s[step % len(delay_s)])
        optimizer.step()
        sizes.append((time.monotonic(), len(inputs)))
    return Done(sum(size for _, size in sizes), sizes)


def put_away(memory: dict[str, Any]) -> None:
    """In a rank: forget the model."""
    memory["parts"] = ()
    memory.pop("stack").close()
    memory.clear()


def timed(crew: Crew, contender: str, rounds: int) -> float:
    """Samples a second."""
    runs = {"fast alone": (rounds, 0), "slow alone": (0, rounds)}.get(contender, (rounds, rounds))
    start = time.perf_counter()
    done: list[Done] = crew.call_each(run, [(own,) for own in runs])
    return sum(d.samples for d in done) / (time.perf_counter() - start)


def ready(crew: Crew, contender: str, name: str, share: float, seconds: float) -> int:
    """Set a contender up and warm it; return how many rounds take about so many seconds."""
    crew.call(set_up, contender, name, share, meeting_place())
    timed(crew, contender, 4)
    rounds, elapsed = 4, 0.0
    while elapsed < 0.4 * seconds:
        rounds *= 2
        start = time.perf_counter()
        timed(crew, contender, rounds)
        elapsed = time.perf_counter() - start
    rounds = max(1, round(rounds * seconds / elapsed))
    if contender == "allreduce, speed":
        timed(crew, contender, round(rounds * 6 / seconds))  # so that it has learned the speeds
    return rounds


def measure(name: str, share: float, rounds: int, seconds: float) -> dict[str, Any]:
    """Compare all contenders on one model."""
    cores = sorted(os.sched_getaffinity(0))
    own = [[cores[rank % len(cores)]] for rank in range(2)]
    speeds: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    with Group.made() as group, ExitStack() as stack:
        group.limit(share)
        crews = {c: stack.enter_context(Crew(2, cores=own)) for c in CONTENDERS}
        for crew in crews.values():
            group.add(crew.call(pid_of)[1])
        steps = {c: ready(crew, c, name, share, seconds) for c, crew in crews.items()}
        for number in range(rounds):
            first = number % len(CONTENDERS)
            for contender in CONTENDERS[first:] + CONTENDERS[:first]:
                crew = crews[contender]
                speeds[contender].append(timed(crew, contender, steps[contender]))
        for crew in crews.values():
            crew.call(put_away)
    alone = zip(speeds["fast alone"], speeds["slow alone"], strict=True)
    sums = [fast + slow for fast, slow in alone]
    of_sum = {
        c: statistics.median(s / t for s, t in zip(speeds[c], sums, strict=True)) for c in TOGETHER
    }
    told = ", ".join(f"{c} {value:.3f}" for c, value in of_sum.items())
    print(f"{name}, 1 + {share}: of the sum: {told}", flush=True)
    medians = {c: statistics.median(values) for c, values in speeds.items()}
    return {
        "model": name,
        "share": share,
        "of_sum": of_sum,
        "samples_per_second": medians,
        "rounds": speeds,
    }


def measure_following(seconds: float) -> dict[str, Any]:
    """Move the quota while all-reduce runs, and see how long sizes take to follow."""
    cores = sorted(os.sched_getaffinity(0))
    with Group.made() as group, Crew(2, cores=[[cores[0]], [cores[-1]]]) as crew:
        group.limit(0.5)
        group.add(crew.call(pid_of)[1])
        rounds = ready(crew, "allreduce, speed", "resnet8", 0.5, seconds)
        before = crew.call(run, rounds)[1].sizes[-1][1]
        group.limit(0.25)
        moved = time.monotonic()
        sizes: list[tuple[float, int]] = crew.call(run, rounds)[1].sizes
        crew.call(put_away)
    last = statistics.median(size for _, size in sizes[-len(sizes) // 5 :])
    late = [when for when, size in sizes if abs(size - last) > 2]
    took = max(late, default=moved) - moved
    print(f"followed: {before} of 32 samples before, {last:g} after, in {took:.1f} s", flush=True)
    return {"before": before, "after": last, "seconds": took, "watched_s": sizes[-1][0] - moved}


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a contender in a round")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    where = facts()
    try:
        with Group.made() as group:
            group.limit(0.5)
    except OSError as error:
        print(f"skipped: no cgroup with a quota can be made here: {error}", file=sys.stderr)
        return 2
    cases = [(name, share) for share in args.shares for name in args.models]
    results = [measure(name, share, args.rounds, args.seconds) for name, share in cases]
    followed = measure_following(10 * args.seconds)
    ours = [r["of_sum"][c] for r in results for c in ("allreduce, speed", "adaptive")]
    holds = min(ours) >= CLAIMED and followed["seconds"] <= 20
    if args.json:
        write(args.json, {**where, "holds": holds, "results": results, "followed": followed})
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
