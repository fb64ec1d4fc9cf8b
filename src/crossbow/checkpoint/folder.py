"""Folders: the checkpoints of a run, each a folder that is whole or not there.

    runs/NAME/checkpoints/000123456/    after so many samples
        manifest.json                   what this is, for people; sizes and SHA-256 of the files
        shared.safetensors              what is common to all learners, and where training stands
        model.safetensors               the central model, plain keys
        learners-0-3.safetensors        what these learners have to themselves

Files are written to a folder whose name begins with a dot, which gets its name when all are on
disk. The newest few are kept, and the one whose evaluation was best.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from crossbow.checkpoint.files import (
    DamagedError,
    Written,
    check_file,
    read_tensors,
    read_tree,
    sync_folder,
)
from crossbow.errors import InputError

CHECKPOINTS = "checkpoints"
MANIFEST, SHARED, MODEL = "manifest.json", "shared.safetensors", "model.safetensors"
FORMAT = 1
MOST_MANIFEST_BYTES = 1 << 24
_DIGITS = 9


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint is; the content of manifest.json."""

    task: str
    samples: int
    """Read by all learners together: where in the stream to go on."""
    epoch: float
    learners: int
    ranks: int
    parts: list[list[int]]
    """The learners that each file of learners holds: first and last one."""
    metric_name: str | None
    metric: float | None
    """Of the last evaluation before."""
    higher_is_better: bool
    written: str
    """When."""
    versions: dict[str, str]
    settings: dict[str, Any]
    files: list[Written] = field(default_factory=list)
    format: int = FORMAT

    def to_text(self) -> str:
        """As JSON that ends with a checksum of the rest."""
        values = asdict(self) | {"files": [file._asdict() for file in self.files]}
        return json.dumps({**values, "checksum": _checksum(values)}, indent=2) + "\n"

    @classmethod
    def parse(cls, path: Path, text: str) -> "Manifest":
        """Read what `to_text` wrote; refuse anything else."""
        try:
            values = json.loads(text)
            checksum = values.pop("checksum")
            if values["format"] != FORMAT:
                raise DamagedError(
                    f"{path} has format {values['format']!r}; this version reads {FORMAT}"
                )
            if checksum != _checksum(values):
                raise DamagedError(f"{path} is damaged: its checksum is another one")
            values["files"] = [Written(**file) for file in values["files"]]
            manifest = cls(**values)
            manifest._check(path)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{path} is damaged: it is no manifest") from error
        return manifest

    def _check(self, path: Path) -> None:
        """Refuse values that nobody wrote: a checksum is no proof against intent."""
        counts = (self.samples, self.learners, self.ranks, *(n for p in self.parts for n in p))
        is_sound = (
            all(type(count) is int and 0 <= count < 2**63 for count in counts)
            and all(len(part) == 2 for part in self.parts)
            and isinstance(self.settings, dict)
            and all(isinstance(key, str) for key in (self.task, self.written))
        )
        learners = [n for first, last in self.parts for n in range(first, min(last, 2**20) + 1)]
        if not is_sound or learners != list(range(self.learners)):
            raise DamagedError(f"{path} is damaged: its learners don't add up")
        names = {SHARED, MODEL, *map(part_name, self.parts)}
        if {file.name for file in self.files} != names or len(self.files) != len(names):
            raise DamagedError(f"{path} is damaged: its files aren't those of its learners")
        for file in self.files:
            if type(file.num_bytes) is not int or not isinstance(file.sha256, str):
                raise DamagedError(f"{path} is damaged: {file.name} has no size and checksum")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, whose manifest was read and is sound."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Path) -> "Checkpoint":
        """Read the manifest; its files are checked when they are read, or by `verify`."""
        manifest = path / MANIFEST
        try:
            if manifest.stat().st_size > MOST_MANIFEST_BYTES:
                raise DamagedError(f"{manifest} is larger than any manifest")
            return cls(path, Manifest.parse(manifest, manifest.read_text(encoding="utf-8")))
        except OSError as error:
            raise DamagedError(f"{manifest} can't be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise DamagedError(f"{manifest} is damaged: it is no text") from error

    def verify(self) -> None:
        """Refuse files that aren't what was written."""
        for file in self.manifest.files:
            check_file(self.path / file.name, file)

    def shared(self) -> dict[str, Any]:
        """What is common to all learners, and where training stands."""
        return self._tree(SHARED)

    def model(self) -> dict[str, Tensor]:
        """The central model."""
        return read_tensors(self.path / MODEL, self._file(MODEL))

    def learners(self, wanted: Sequence[int]) -> dict[int, dict[str, Any]]:
        """What these learners have to themselves; those that were not there are left out."""
        found: dict[int, dict[str, Any]] = {}
        for part in self.manifest.parts:
            if any(part[0] <= learner <= part[1] for learner in wanted):
                states = self._tree(part_name(part))
                found |= {int(n): state for n, state in states.items() if int(n) in wanted}
        return found

    def _tree(self, name: str) -> dict[str, Any]:
        tree = read_tree(self.path / name, self._file(name))
        if not isinstance(tree, dict):
            raise DamagedError(f"{self.path / name} is damaged: it holds no state")
        return tree

    def _file(self, name: str) -> Written:
        return next(file for file in self.manifest.files if file.name == name)


def part_name(learners: Sequence[int]) -> str:
    """The file of these learners: from the first to the last one."""
    return f"learners-{learners[0]}-{learners[-1]}.safetensors"


def folder_of(parent: Path, samples: int) -> Path:
    """Where the checkpoint after so many samples lies."""
    return parent / f"{samples:0{_DIGITS}}"


def partial_folder(parent: Path, samples: int) -> Path:
    """Where it lies until it is whole."""
    return parent / f".{samples:0{_DIGITS}}.partial"


def commit(parent: Path, manifest: Manifest, *, durably: bool = True) -> Path:
    """Give the folder its name, now that all files are written."""
    partial, path = (f(parent, manifest.samples) for f in (partial_folder, folder_of))
    with (partial / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(manifest.to_text())
        file.flush()
        if durably:
            os.fsync(file.fileno())
    if durably:
        sync_folder(partial)
    aside = parent / f".{path.name}.before.partial"
    if path.exists():  # of a run that came by here before a crash
        path.rename(aside)
    partial.rename(path)
    if durably:
        sync_folder(parent)
    shutil.rmtree(aside, ignore_errors=True)
    return path


def found_in(parent: Path) -> list[Path]:
    """The folders of checkpoints, newest first, damaged ones too."""
    names = (entry for entry in parent.glob("[0-9]*") if entry.name.isdecimal())
    return sorted(names, key=lambda entry: int(entry.name), reverse=True)


def newest(parent: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and what is wrong with newer ones."""
    warnings = []
    for path in found_in(parent):
        try:
            checkpoint = Checkpoint.open(path)
            checkpoint.verify()
        except DamagedError as error:
            warnings.append(str(error))
        else:
            return checkpoint, warnings
    return None, warnings


def remove_partial(parent: Path) -> None:
    """Remove what a run left that was killed while it wrote."""
    for path in parent.glob(".[0-9]*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def prune(parent: Path, keep: int) -> None:
    """Remove all but the newest few and the best."""
    newest_first = found_in(parent)
    best = _best(newest_first)
    for path in newest_first[keep:]:
        if path != best:
            shutil.rmtree(path, ignore_errors=True)


def export(checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    """The central model, each file of the checkpoint checked."""
    checkpoint.verify()
    return checkpoint.model()


def _best(paths: Sequence[Path]) -> Path | None:
    """The checkpoint whose last evaluation was best."""
    scores = {checkpoint.path: score for checkpoint, score in _scored(paths)}
    return max(scores, key=scores.__getitem__) if scores else None


def _scored(paths: Sequence[Path]) -> Iterator[tuple[Checkpoint, float]]:
    for path in paths:
        try:
            checkpoint = Checkpoint.open(path)
        except DamagedError:
            continue
        metric, rises = checkpoint.manifest.metric, checkpoint.manifest.higher_is_better
        if metric is not None:
            yield checkpoint, metric if rises else -metric


def find(run: Path) -> tuple[Checkpoint, list[str]]:
    """The newest whole checkpoint of a run; refuse a run that has none."""
    parent = run / CHECKPOINTS
    if not parent.is_dir():
        raise InputError(f"{run} has no checkpoints: name a run's directory, such as runs/TASK-1")
    checkpoint, warnings = newest(parent)
    if not checkpoint:
        found = f": {warnings[0]}" if warnings else ""
        raise InputError(f"{run} has no whole checkpoint{found}")
    return checkpoint, warnings


def _checksum(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
