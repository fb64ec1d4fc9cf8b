"""Contest: Crossbow untuned against peers at their best, interleaved, over several seeds.

First every peer is tuned: it may try so many settings of batch size and learning rate, and keeps
the one that reaches the target in the least time. Crossbow isn't tuned: it runs at the settings of
one learner, which is what it claims. Then all run once a seed, in turn, beside each peer at
settings that need no tuning. What has been run is kept, so a contest can be interrupted.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from crossbow.bench.accuracy import Entrant, Goal, run
from crossbow.bench.measure import facts, write

TUNING_SEED = 1000
"""Settings aren't chosen by the seeds they are judged by."""

Runs = dict[str, dict[str, Any]]
"""Entrant's label and seed -> how it finished, and where."""


@dataclass(frozen=True)
class Line:
    """What an entrant reached over all seeds."""

    entrant: Entrant
    is_tuned: bool
    seconds: tuple[float, ...]
    """To the target, of each seed; infinite where it wasn't reached."""
    epochs: float
    """Median."""
    speed: float
    """Samples a second, median."""

    @property
    def median(self) -> float:
        """Of the seconds."""
        return statistics.median(self.seconds)


def tries(kind: str, batch: int, lr: float, ranks: int) -> list[Entrant]:
    """What a peer may be tried with, the most promising first; the first needs no tuning.

    DDP's batches grow with the ranks: linear scaling with a warm-up (Goyal et al., 2017), then less
    and more of it, then other batches.
    """
    if kind == "one process":
        one = Entrant("one process", batch, lr)
        pairs = ((1, 1), (2, 2), (4, 4), (1, 2), (2, 1), (4, 2), (1, 0.5), (8, 4))
        return [replace(one, batch_size=b * batch, lr=r * lr) for b, r in pairs]
    ddp = Entrant("ddp", batch, lr, warmup=1.0)
    smaller = max(1, batch // 2)
    return [
        replace(ddp, lr=ranks * lr),
        replace(ddp, warmup=0.0),
        replace(ddp, lr=ranks * lr, warmup=0.0),
        replace(ddp, batch_size=smaller, lr=ranks * lr * smaller / batch, warmup=0.0),
        replace(ddp, lr=2 * ranks * lr, warmup=0.5),
        replace(ddp, batch_size=2 * batch, lr=2 * ranks * lr),
        replace(ddp, batch_size=4 * batch, lr=4 * ranks * lr),
        replace(ddp, batch_size=2 * batch, lr=ranks * lr, warmup=0.0),
    ]


def contest(
    goal: Goal,
    ours: Sequence[Entrant],
    peers: Mapping[str, Sequence[Entrant]],
    ranks: int,
    seeds: int,
    path: Path | None,
    say: Callable[[str, int, int], None],
) -> list[Line]:
    """Tune, then run all; return a line for each entrant, the fastest first.

    Args:
        goal: the task and its target.
        ours: run untuned.
        peers: what each may be tried with; one that may try one thing only isn't tuned.
        ranks: processes, or threads of the one process.
        seeds: of the contest.
        path: where runs are kept, and found again.
        say: told what runs now, and how many of how many runs are done.
    """
    book = _Book(goal, ranks, path)
    total = sum(len(found) for found in peers.values()) + seeds * (len(ours) + 2 * len(peers))
    done = 0

    def finish(entrant: Entrant, seed: int) -> dict[str, Any]:
        nonlocal done
        say(f"{goal.task}: {entrant.label}, seed {seed}", done, total)
        done += 1
        return book.run(entrant, seed)

    field: dict[Entrant, bool] = dict.fromkeys(ours, False)
    for found in peers.values():
        times = {entrant: _seconds(finish(entrant, TUNING_SEED)) for entrant in found}
        field.setdefault(found[0], False)
        field[min(times, key=lambda entrant: times[entrant])] = len(found) > 1
    entrants = list(field)
    ends: dict[Entrant, list[dict[str, Any]]] = {entrant: [] for entrant in entrants}
    for seed in range(seeds):
        first = seed % len(entrants)
        for entrant in entrants[first:] + entrants[:first]:
            ends[entrant].append(finish(entrant, seed))
    say(f"{goal.task}: done", total, total)
    lines = [_line(entrant, field[entrant], runs) for entrant, runs in ends.items()]
    book.conclude(lines)
    return sorted(lines, key=lambda line: line.median)


def advantage(lines: Sequence[Line]) -> float:
    """How many times faster the best of ours reaches the target than the best peer."""
    ours = min(line.median for line in lines if line.entrant.kind == "crossbow")
    theirs = min(line.median for line in lines if line.entrant.kind != "crossbow")
    return theirs / ours if math.isfinite(ours) else 0.0


def _seconds(finish: Mapping[str, Any]) -> float:
    return float(finish["seconds"]) if finish["reached"] else math.inf


def _line(entrant: Entrant, is_tuned: bool, runs: Sequence[Mapping[str, Any]]) -> Line:
    return Line(
        entrant,
        is_tuned,
        tuple(_seconds(finish) for finish in runs),
        statistics.median(finish["epochs"] for finish in runs),
        statistics.median(finish["samples"] / finish["seconds"] for finish in runs),
    )


class _Book:
    """What has been run, on disk if there is a place for it."""

    def __init__(self, goal: Goal, ranks: int, path: Path | None) -> None:
        self._goal, self._ranks, self._path = goal, ranks, path
        self._all: dict[str, Any] = {}
        if path and path.exists():
            self._all = json.loads(path.read_text(encoding="utf-8"))
        key = f"{goal.task} to {goal.target:g} on {ranks}"
        self._page: dict[str, Any] = self._all.setdefault(key, {"goal": _plain(goal), "runs": {}})

    def run(self, entrant: Entrant, seed: int) -> dict[str, Any]:
        runs: Runs = self._page["runs"]
        key = f"{entrant.label}, seed {seed}"
        if key not in runs:
            where = facts()
            finish = run(entrant, self._goal, self._ranks, seed)
            runs[key] = finish.to_json() | {"machine": where}
            self._write()
        return runs[key]

    def conclude(self, lines: Sequence[Line]) -> None:
        self._page["lines"] = [
            {
                "entrant": line.entrant.label,
                "tuned": line.is_tuned,
                "seconds": [s if math.isfinite(s) else None for s in line.seconds],
                "median_seconds": line.median if math.isfinite(line.median) else None,
                "epochs": line.epochs,
                "samples_per_second": line.speed,
            }
            for line in lines
        ]
        self._page["advantage"] = advantage(lines)
        self._write()

    def _write(self) -> None:
        if self._path:
            write(self._path, self._all)


def _plain(goal: Goal) -> dict[str, Any]:
    """The goal, without where this machine keeps its data."""
    return {k: v for k, v in asdict(goal).items() if k not in ("data_dir", "text")}
