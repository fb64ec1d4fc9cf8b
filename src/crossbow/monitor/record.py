"""Record: a run, read back from its directory, finished or not.

Nothing is needed but the log. Lines that are no JSON objects are passed over: the last one may be
half written. A run that went back to a checkpoint has read some samples twice; what it had logged
of them the first time is left out.
"""

import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from crossbow.errors import InputError

Event = dict[str, Any]

LARGEST = 1e100
"""Numbers beyond are mistakes, and would overflow when they are multiplied."""


@dataclass(frozen=True)
class Record:
    """What a run's directory says."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    """Empty as long as the run goes on."""
    events: list[Event] = field(default_factory=list)
    """In the order of the log."""

    def of(self, kind: str) -> list[Event]:
        """The events of a kind."""
        return self._by_kind.get(kind, [])

    @cached_property
    def _by_kind(self) -> dict[str, list[Event]]:
        kinds: dict[str, list[Event]] = {}
        for event in self.events:
            kinds.setdefault(event["event"], []).append(event)
        return kinds

    def first(self, kind: str) -> Event:
        """The first event of a kind, or nothing."""
        return next(iter(self.of(kind)), {})

    def seconds_at(self, samples: float) -> float:
        """When so many samples had been read, by the events that say so, and between them."""
        known, moments = self._moments
        after = bisect_left(known, max(samples, 0.0))
        if after == len(known):
            return moments[-1]
        if known[after] == max(samples, 0.0):
            return moments[after]
        share = (samples - known[after - 1]) / (known[after] - known[after - 1])
        return moments[after - 1] + share * (moments[after] - moments[after - 1])

    @cached_property
    def _moments(self) -> tuple[list[float], list[float]]:
        """Samples, and when each was first reached."""
        known, moments = [0.0], [0.0]
        for event in self.events:
            samples, seconds = number(event, "samples"), number(event, "seconds")
            if samples is not None and seconds is not None and samples > known[-1]:
                known.append(samples)
                moments.append(seconds)
        return known, moments


def read(path: Path) -> Record:
    """Read a run's directory."""
    log = path / "log.jsonl"
    if not log.is_file():
        raise InputError(f"{path} holds no run: {_advice(path)}")
    return Record(
        path, _read_object(path / "config.json"), _read_object(path / "result.json"), _events(log)
    )


def number(values: Event, name: str) -> float | None:
    """A number that can be computed with and drawn, or None for whatever else is there."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -LARGEST < value < LARGEST else None  # NaN is neither


def short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that tell them apart."""
    whole = [path.absolute().parts[1:] for path in paths]
    for length in range(1, max(map(len, whole), default=0) + 1):
        names = ["/".join(parts[-length:]) for parts in whole]
        if len(set(names)) == len(set(whole)):
            return names
    return [str(path) for path in paths]


def _advice(path: Path) -> str:
    found = sorted(log.parent for log in path.glob("*/log.jsonl"))[:3] if path.is_dir() else []
    names = ", ".join(map(str, found))
    return f"give one of those in it: {names}" if names else "give what `crossbow train` wrote"


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _events(log: Path) -> list[Event]:
    events: list[Event] = []
    reached = 0.0
    for event in _lines(log):
        samples = number(event, "samples")
        if samples is not None and event["event"] in ("train", "resume"):
            if samples < reached:
                events = [e for e in events if (number(e, "samples") or 0.0) <= samples]
            reached = samples
        events.append(event)
    return events


def _lines(log: Path) -> Iterator[Event]:
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                yield event
