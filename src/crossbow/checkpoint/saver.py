"""Saver: when a run is saved, and where.

To disk now and then. Ranks that a launcher would start again are saved to its shared memory, too,
and much more often, for that costs a copy: so little is lost when one of them is killed.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from crossbow.checkpoint.folder import CHECKPOINTS
from crossbow.checkpoint.writer import Outcome, Snapshot, Writer
from crossbow.comm.world import World

MEMORY_SHARE = 0.01
"""Of the time, what saving to memory may take."""

MEMORY_ROOM = 0.1
"""Of the shared memory that is free, what a copy may take; for a moment there are two."""

SHORTEST_INTERVAL_S = 0.25
BEST_SHARE = 0.1
"""Of the interval: the time after which a new best model is saved."""


class Said(NamedTuple):
    """What a rank says about saving when all meet."""

    outcomes: list[Outcome | None]
    wanted: list[bool]
    """Where to save now: what the first rank says counts."""


class Saver(AbstractContextManager["Saver"]):
    """Saves a run to disk and to memory; the same on all ranks."""

    def __init__(
        self, world: World, run: Path, memory: Path | None, *, every_s: float, keep: int
    ) -> None:
        """Begin.

        Args:
            world: all ranks make one together.
            run: the directory of the run.
            memory: the folder in shared memory that outlives a rank, if there is one.
            every_s: seconds between two checkpoints on disk; 0 for none.
            keep: how many of them.
        """
        is_first = world.rank == 0
        self._world = world
        self._disk = Writer(run / CHECKPOINTS, is_first=is_first, keep=keep) if every_s else None
        self._memory = (
            Writer(memory / CHECKPOINTS, is_first=is_first, keep=1, durably=False)
            if memory
            else None
        )
        self._writers = [writer for writer in (self._disk, self._memory) if writer]
        self._every_s = every_s
        self._disk_at = self._memory_at = time.monotonic()
        self._memory_cost_s = self._capture_cost_s = 0.0
        self._has_no_memory = False
        self._wanted = [False for _ in self._writers]
        self.has_new_best = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for writer in self._writers:
            writer.close()

    def say(self) -> Said:
        """What to tell the other ranks."""
        wanted = [not writer.is_busy and self._is_due(writer) for writer in self._writers]
        return Said([writer.outcome() for writer in self._writers], wanted)

    def hear(self, said: Sequence[Said]) -> list[str]:
        """Hear what all ranks say; return what went wrong."""
        problems = []
        for number, writer in enumerate(self._writers):
            outcomes = [one.outcomes[number] for one in said]
            if writer is self._memory and all(outcomes):
                problems += self._weigh([outcome for outcome in outcomes if outcome])
            writer.hear(outcomes)
        self._wanted = said[0].wanted
        return problems + [problem for w in self._writers if (problem := w.problem())]

    def save(self, capture: Callable[[], Snapshot]) -> None:
        """Start to save where the first rank wants to; all ranks call this after the same round."""
        if not any(self._wanted):
            return
        began = time.monotonic()
        snapshot = capture()
        self._capture_cost_s = time.monotonic() - began
        for writer, is_wanted in zip(self._writers, self._wanted, strict=True):
            if is_wanted:
                writer.begin(snapshot)
                self._note(writer)
        self._wanted = [False for _ in self._writers]

    def save_now(self, capture: Callable[[], Snapshot]) -> list[str]:
        """Save to disk, and return when that is done, with what went wrong."""
        if not self._disk:
            return []
        if self._disk.is_busy:
            self._finish(self._disk)
        self._disk.begin(capture())
        self._finish(self._disk)
        return [problem for problem in [self._disk.problem()] if problem]

    def _weigh(self, outcomes: Sequence[Outcome]) -> list[str]:
        """Note what a copy in memory costs; make no more if it failed, or takes too much."""
        self._memory_cost_s = self._capture_cost_s + max(o.seconds for o in outcomes)
        size = sum(file.num_bytes for outcome in outcomes for file in outcome.files)
        self._has_no_memory = any(outcome.problem for outcome in outcomes)
        if self._memory and size > MEMORY_ROOM * shutil.disk_usage(self._memory.parent.parent).free:
            self._has_no_memory = True
            return [f"copies of {size:,} bytes are too large for shared memory: disk alone is used"]
        return []

    def _finish(self, writer: Writer) -> None:
        writer.wait()
        writer.hear(self._world.gather(writer.outcome()))
        writer.wait()

    def _is_due(self, writer: Writer) -> bool:
        if writer is self._memory:
            interval = max(self._memory_cost_s / MEMORY_SHARE, SHORTEST_INTERVAL_S)
            waited = time.monotonic() - self._memory_at
            return waited >= interval and not self._has_no_memory
        share = BEST_SHARE if self.has_new_best else 1.0
        return time.monotonic() - self._disk_at >= share * self._every_s

    def _note(self, writer: Writer) -> None:
        if writer is self._memory:
            self._memory_at = time.monotonic()
        else:
            self._disk_at, self.has_new_best = time.monotonic(), False
