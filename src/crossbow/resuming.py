"""Resuming: where a run goes on, and with which settings.

With as many learners as before, a run goes on bit for bit, on any number of ranks. With another
number it goes on from the central model, at the very sample, and says what begins anew.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from crossbow.checkpoint.files import DamagedError
from crossbow.checkpoint.folder import CHECKPOINTS, Checkpoint, find, newest
from crossbow.comm.world import World
from crossbow.config import Config
from crossbow.errors import InputError
from crossbow.fleet import Captured

FREE = frozenset(
    {
        "checkpoint_every_s",
        "compile",
        "device",
        "epochs",
        "eval_every",
        "keep",
        "learners",
        "log_to",
        "profile",
        "resume",
        "run_dir",
        "target",
        "time_limit_s",
    }
)
"""Settings that may change when a run goes on: they don't say what was learned until then."""

_NAME = "run"  # the file of a refuge that says where its run writes to


@dataclass(frozen=True)
class Start:
    """Where a run goes on."""

    run: Path
    """The directory that it goes on writing to."""
    checkpoint: Checkpoint | None
    """None if it was ended before the first one: it begins again."""
    warnings: list[str]
    """What is wrong with newer checkpoints."""

    @property
    def samples(self) -> int:
        """Read so far, by all learners together."""
        return self.checkpoint.manifest.samples if self.checkpoint else 0


def remember_run(refuge: Path, run: Path) -> None:
    """Note where a run writes to, for the ranks that may be started again."""
    partial = refuge / f".{_NAME}"
    partial.write_text(str(run.absolute()), encoding="utf-8")
    partial.rename(refuge / _NAME)


def find_start(said: Config, task: str, world: World, refuge: Path | None) -> Start | None:
    """Return where to go on, if anywhere; all ranks call this together.

    Args:
        said: names the run to go on with.
        task: what it has to be a run of.
        world: this rank's place.
        refuge: where ranks that were started again find what they were.
    """

    def look() -> Start | None:
        if world.rank:
            return None
        if refuge and (refuge / _NAME).exists():
            return _find_in_refuge(refuge)
        if said.resume:
            return _find(Path(said.resume), task)
        if said.run_dir and _was_restarted() and (Path(said.run_dir) / "log.jsonl").exists():
            checkpoint, warnings = newest(Path(said.run_dir) / CHECKPOINTS)
            return Start(Path(said.run_dir), checkpoint, warnings)
        return None

    start: Start | None = world.broadcast(world.agree(look))
    return start


def settle(said: Config, start: Start | None) -> Config:
    """The settings to go on with: those of the run, but for what is said and may change."""
    if not start or not start.checkpoint:
        return said
    saved = start.checkpoint.manifest.settings
    names = {field.name for field in fields(Config)}
    for name in sorted(names - FREE):
        new, old = getattr(said, name), saved.get(name)
        if new is not None and not callable(new) and new != old:
            raise InputError(
                f"{name} {new!r} can't be changed on the way: {start.run} was begun with {old!r}; "
                "leave it out, or begin another run"
            )
    if not said.optimizer and str(saved.get("optimizer")).startswith("<"):
        raise InputError(f"{start.run} has an optimizer made by a function: give it again")
    kept = {k: v for k, v in saved.items() if k in names - {"resume", "run_dir"}}
    settings = said.over(Config(**kept))
    if said.run_dir is not None and Path(said.run_dir).absolute() != start.run.absolute():
        raise InputError(
            f"run directory {said.run_dir} can't be used: {start.run} goes on in its own"
        )
    return settings


def load_model(start: Start | None, model: nn.Module) -> None:
    """Put a model where the central model was."""
    if not start or not start.checkpoint:
        return
    try:
        model.load_state_dict(start.checkpoint.model())
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{start.checkpoint.path} doesn't fit this model: {reason}") from error


def read_state(
    checkpoint: Checkpoint, learners: Sequence[int]
) -> tuple[Captured, Mapping[str, Any]]:
    """What these learners were, and what the run had seen."""
    match checkpoint.shared():
        case {"fleet": dict(fleet), "run": dict(run)}:
            return Captured(fleet, checkpoint.learners(learners)), run
    raise DamagedError(f"{checkpoint.path} is damaged: it says nothing of a run")


def _was_restarted() -> bool:
    """Whether torchrun started this rank again, after it or another one had failed."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _find(run: Path, task: str) -> Start:
    checkpoint, warnings = find(run)
    if checkpoint.manifest.task != task:
        raise InputError(
            f"{run} is a run of {checkpoint.manifest.task}, and not of {task}: name its task"
        )
    return Start(run, checkpoint, warnings)


def _find_in_refuge(refuge: Path) -> Start:
    """What ranks that are started again go on from: their memory, else the disk, else nothing."""
    run = Path((refuge / _NAME).read_text(encoding="utf-8"))
    in_memory, _ = newest(refuge / CHECKPOINTS)
    on_disk, warnings = newest(run / CHECKPOINTS)
    found = [checkpoint for checkpoint in (on_disk, in_memory) if checkpoint]
    return Start(run, max(found, key=lambda c: c.manifest.samples, default=None), warnings)
