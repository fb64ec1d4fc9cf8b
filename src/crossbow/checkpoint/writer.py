"""Writer: checkpoints written while training goes on, by all ranks together.

What is captured is a copy, which a thread of each rank then writes: its own learners, and the first
rank's thread what is common. Ranks tell each other how it went when they meet anyway; once all have
written, the first one gives the folder its name. If one of them can't write (a full disk, say), the
folder is removed, and training goes on.
"""

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from crossbow.checkpoint.files import Written, sync_folder, write_tensors, write_tree
from crossbow.checkpoint.folder import (
    MODEL,
    SHARED,
    Manifest,
    commit,
    part_name,
    partial_folder,
    prune,
    remove_partial,
)
from crossbow.checkpoint.tree import UnsavableError


class Snapshot(NamedTuple):
    """What one rank writes."""

    manifest: Manifest
    """Without the files."""
    learners: Mapping[int, Any]
    shared: Mapping[str, Any]
    """Of the first rank, as the model is."""
    model: Mapping[str, Tensor]


class Outcome(NamedTuple):
    """How a rank's part was written."""

    files: list[Written]
    problem: str | None
    seconds: float


class Writer:
    """One rank's part in the checkpoints of a run."""

    def __init__(self, parent: Path, *, is_first: bool, keep: int, durably: bool = True) -> None:
        """Begin; nothing is made before something is written.

        Args:
            parent: of all checkpoints of the run.
            is_first: whether this is the first rank.
            keep: how many of the newest ones to keep, besides the best.
            durably: whether they have to survive a power cut.
        """
        self.parent, self._is_first, self._keep, self._durably = parent, is_first, keep, durably
        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._problem: str | None = None
        if is_first:
            remove_partial(parent)

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is on its way, on some rank."""
        return self._snapshot is not None

    def begin(self, snapshot: Snapshot) -> None:
        """Start to write this rank's part; all ranks call this after the same round."""
        self._join()
        self._snapshot, self._outcome = snapshot, None
        self._start(lambda: self._write(snapshot))

    def outcome(self) -> Outcome | None:
        """How it went, to be told to the other ranks; None as long as it isn't known."""
        return self._outcome

    def wait(self) -> None:
        """Return when the outcome is known."""
        self._join()

    def hear(self, outcomes: Sequence[Outcome | None]) -> None:
        """Hear how it went on every rank: complete the checkpoint, or remove what was written."""
        said = [outcome for outcome in outcomes if outcome]
        if not self.is_busy or len(said) < len(outcomes):
            return
        self._join()
        snapshot, self._snapshot, self._outcome = self._snapshot, None, None
        problem = next((outcome.problem for outcome in said if outcome.problem), None)
        if not self._is_first or snapshot is None:
            return
        files = [file for outcome in said for file in outcome.files]
        if problem:
            self._give_up(snapshot.manifest.samples, problem)
        else:
            self._start(lambda: self._complete(replace(snapshot.manifest, files=files)))

    def problem(self) -> str | None:
        """What went wrong since this was asked last; the first rank knows."""
        problem, self._problem = self._problem, None
        return problem

    def close(self) -> None:
        """Return when nothing is being written any more; an incomplete checkpoint is removed."""
        self._join()
        if self._is_first and self._snapshot:
            remove_partial(self.parent)

    def _write(self, snapshot: Snapshot) -> None:
        began = time.perf_counter()
        folder = partial_folder(self.parent, snapshot.manifest.samples)
        files, problem = [], None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / part_name(sorted(snapshot.learners))
            states = {str(learner): state for learner, state in snapshot.learners.items()}
            files.append(write_tree(states, part, durably=self._durably))
            if self._is_first:
                shared, model = folder / SHARED, folder / MODEL
                files.append(write_tree(snapshot.shared, shared, durably=self._durably))
                files.append(write_tensors(snapshot.model, model, durably=self._durably))
        except (OSError, UnsavableError) as error:
            problem = _explained(error, self.parent)
        self._outcome = Outcome(files, problem, time.perf_counter() - began)

    def _complete(self, manifest: Manifest) -> None:
        try:
            commit(self.parent, manifest, durably=self._durably)
            if self._durably:
                sync_folder(self.parent.parent)
            prune(self.parent, self._keep)
        except OSError as error:
            self._give_up(manifest.samples, _explained(error, self.parent))

    def _give_up(self, samples: int, problem: str) -> None:
        shutil.rmtree(partial_folder(self.parent, samples), ignore_errors=True)
        self._problem = problem

    def _start(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work, name="crossbow-checkpoint")
        self._thread.start()

    def _join(self) -> None:
        if self._thread:
            self._thread.join()
            self._thread = None


def _explained(error: OSError | UnsavableError, parent: Path) -> str:
    if isinstance(error, UnsavableError):
        return str(error)
    free = _free_bytes(parent)
    room = f", {free:,} bytes are free" if free is not None else ""
    return f"{error.filename or parent} can't be written: {error.strerror}{room}"


def _free_bytes(parent: Path) -> int | None:
    for folder in (parent, *parent.parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return None
