"""Sinks: other places that hear what the log hears.

Each is one module with a function `open_sink(path, name, config)`, which imports its package, so
that nobody needs the packages of others.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from crossbow.config import SINKS
from crossbow.errors import InputError
from crossbow.monitor.record import number

_NO_SCALARS = ("samples", "seconds", "epoch")


class Sink(Protocol):
    """Somebody who is told each event of a run."""

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        """Hear of an event."""

    def close(self) -> None:
        """The run is over, well or not."""


Open = Callable[[Path, str, Mapping[str, Any]], Sink]
"""From a run's directory, its task and its settings."""


def names_in(text: str | None) -> list[str]:
    """The sinks named in `tensorboard,wandb`, each once."""
    return list(dict.fromkeys(text.split(","))) if text else []


def check_installed(names: Sequence[str]) -> None:
    """Refuse a sink whose package isn't here."""
    for name in names:
        if find_spec(SINKS[name]) is None:
            raise InputError(
                f"log to {name!r} needs a package that is not installed: "
                f"pip install 'crossbow[{name}]'"
            )


def open_sinks(
    names: Sequence[str], path: Path, task: str, config: Mapping[str, Any]
) -> list[Sink]:
    """Open them all.

    Args:
        names: of sinks.
        path: the run's directory.
        task: the run's.
        config: its settings.
    """
    return [_open(name, path, task, config) for name in names]


def _open(name: str, path: Path, task: str, config: Mapping[str, Any]) -> Sink:
    open_sink: Open = import_module(f"crossbow.monitor.{name}").open_sink
    try:
        return open_sink(path, task, config)
    except Exception as error:  # a server that isn't there, say
        log = path / "log.jsonl"
        if not log.stat().st_size:  # so that the directory can be used once this is set right
            log.unlink()
        raise InputError(f"log to {name!r} is not possible: {error}") from error


def scalars(event: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an event under names of their own: `train/loss`, `eval/accuracy`.

    >>> scalars("eval", {"samples": 8, "loss": 0.5, "metric_name": "accuracy", "metric": 1})
    {'eval/loss': 0.5, 'eval/accuracy': 1.0}
    """
    found = {}
    for name in values:
        value = number(dict(values), name)
        if value is not None and name not in _NO_SCALARS:
            shown = values.get("metric_name", name) if name == "metric" else name
            found[f"{event}/{shown}"] = value
    return found
