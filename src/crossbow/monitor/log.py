"""Log: a run's directory.

    config.json         the resolved settings, written before the first step
    log.jsonl           one JSON object a line, only ever appended to
    model.safetensors   the final model, plain keys
    result.json         what was reached

    checkpoints/        what it takes to go on, see `checkpoint/folder.py`

The directory belongs to one run: it is refused if it already holds one, unless that goes on. Then
the log says `resume` with the samples read until there: what lines before it tell of later samples
was undone. `effective_lines` leaves it out.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from torch import Tensor

from crossbow.checkpoint.model import replace_durably, save_model
from crossbow.errors import InputError
from crossbow.monitor.sinks import Sink

RUNS = Path("runs")


class RunLog:
    """The open directory of a run."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self._write_json("config.json", config)
        self._lines: TextIO = (path / "log.jsonl").open("a", encoding="utf-8")
        self.sinks: list[Sink] = []
        """Hear what the log hears, and are closed with it."""
        self._is_broken = False

    @classmethod
    def create(
        cls,
        path: Path | str | None,
        name: str,
        config: Mapping[str, Any],
        claimed: Callable[[Path], None] = lambda path: None,
    ) -> Self:
        """Make the directory at `path`, or the next free runs/NAME-N.

        Args:
            path: wanted.
            name: of the run.
            config: the settings.
            claimed: told of the directory before anything is written to it.
        """
        wanted = RUNS / name if path is None else Path(path)
        try:
            directory = _next_free(wanted) if path is None else _claim(wanted)
            claimed(directory)
            return cls(directory, config)
        except OSError as error:
            raise InputError(f"run directory {wanted} can't be made: {error.strerror}") from error

    @classmethod
    def resume(cls, path: Path, config: Mapping[str, Any]) -> Self:
        """Go on in the directory of a run that was ended."""
        try:
            _end_last_line(path / "log.jsonl")
            return cls(path, config)
        except OSError as error:
            raise InputError(f"run directory {path} can't be used: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for sink in self.sinks:
            self._tell(sink, sink.close)
        self._lines.close()

    def write(self, event: str, **values: Any) -> None:
        """Append a line; it is on its way to disk when this returns.

        Where it can't be written (a full disk, say), training goes on without it.
        """
        self._append(event, values)
        for sink in list(self.sinks):
            if not self._tell(sink, partial(sink.write, event, values)):
                self.sinks.remove(sink)

    def _append(self, event: str, values: Mapping[str, Any]) -> None:
        try:
            self._lines.write(json.dumps({"event": event, **values}) + "\n")
            self._lines.flush()
        except OSError as error:
            if not self._is_broken:
                name = self.path / "log.jsonl"
                print(f"crossbow: {name} can't be written: {error.strerror}", file=sys.stderr)
            self._is_broken = True

    def _tell(self, sink: Sink, call: Callable[[], None]) -> bool:
        """Whether it worked: training goes on without a sink that fails, and the log says so."""
        try:
            call()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            self._append("sink_failed", {"sink": type(sink).__name__, "message": message})
            return False
        return True

    def save_model(self, state: Mapping[str, Tensor]) -> None:
        """Write the model."""
        save_model(state, self.path / "model.safetensors")

    def save_result(self, result: Mapping[str, Any]) -> None:
        """Write what was reached."""
        self._write_json("result.json", result)

    def _write_json(self, name: str, values: Mapping[str, Any]) -> None:
        draft = self.path / f".{name}.{os.getpid()}"
        draft.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        replace_durably(draft, self.path / name)


def effective_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a log that count: not what was undone when the run was resumed before it."""
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # a process was killed while it wrote
            continue
        if line["event"] == "resume":
            lines = [one for one in lines if one.get("samples", 0) <= line["samples"]]
        lines.append(line)
    return iter(lines)


def _end_last_line(path: Path) -> None:
    """Finish a line whose writer was killed, so that the next one stands by itself."""
    if path.exists() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


def learners_of(path: Path | str) -> tuple[int, dict[int, int]]:
    """How many learners a run began with; and after which samples, to how many that changed."""
    try:
        lines = (Path(path) / "log.jsonl").read_text(encoding="utf-8").splitlines()
        events = [json.loads(line) for line in lines]
        first = next(int(e["learners"]) for e in events if e["event"] == "start")
        changes = {
            int(e["samples"]): int(e["learners"]) for e in events if e["event"] == "learners"
        }
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise InputError(f"{path} can't be replayed: it holds no log of a run") from error
    return first, changes


def _claim(path: Path) -> Path:
    """Make the directory, unless it holds a run."""
    if (path / "log.jsonl").exists():
        raise InputError(f"{path} already holds a run: name another --run-dir, or remove it")
    path.mkdir(parents=True, exist_ok=True)
    return path


def _next_free(stem: Path) -> Path:
    """Make and return the first of stem-1, stem-2, ... that does not exist."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    taken = (
        entry.name.removeprefix(f"{stem.name}-") for entry in stem.parent.glob(f"{stem.name}-*")
    )
    highest = max((int(number) for number in taken if number.isdecimal()), default=0)
    for number in count(highest + 1):
        path = stem.with_name(f"{stem.name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:  # another run took it meanwhile
            continue
        return path
    raise AssertionError("unreachable")
