"""Log: a run's directory.

    config.json         the resolved settings, written before the first step
    log.jsonl           one JSON object a line, only ever appended to
    model.safetensors   the final model, plain keys
    result.json         what was reached

The directory belongs to one run: it is refused if it already holds one.
"""

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from torch import Tensor

from crossbow.checkpoint import replace_durably, save_model
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

    @classmethod
    def create(cls, path: Path | str | None, name: str, config: Mapping[str, Any]) -> Self:
        """Make the directory at `path`, or the next free runs/NAME-N."""
        wanted = RUNS / name if path is None else Path(path)
        try:
            return cls(_next_free(wanted) if path is None else _claim(wanted), config)
        except OSError as error:
            raise InputError(f"run directory {wanted} can't be made: {error.strerror}") from error

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
        """Append a line; it is on its way to disk when this returns."""
        self._append(event, values)
        for sink in list(self.sinks):
            if not self._tell(sink, partial(sink.write, event, values)):
                self.sinks.remove(sink)

    def _append(self, event: str, values: Mapping[str, Any]) -> None:
        self._lines.write(json.dumps({"event": event, **values}) + "\n")
        self._lines.flush()

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
