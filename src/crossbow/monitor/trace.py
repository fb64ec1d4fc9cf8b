"""Trace: a timeline of steps, in the format that Chrome's tracing and Perfetto open.

A process of it is a rank, a track a learner. Times are microseconds since the first span. Clocks of
one host agree; those of others are set by the moment at which all ranks left a gathering.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crossbow.comm.world import World
from crossbow.stats.watch import Span

WARM_UP, ROUNDS = 10, 200
"""Rounds that are passed over, and that are kept after them."""

KEPT = range(WARM_UP, WARM_UP + ROUNDS)


def gather(spans: Sequence[Span], world: World) -> dict[int, list[Span]]:
    """The spans of all ranks, by the first host's clock; all ranks call this together."""
    world.gather(None)
    left: list[float] = world.gather(time.perf_counter())  # about the same moment for all
    offset = left[0] - left[world.first_local]
    moved = [s._replace(began=s.began + offset, ended=s.ended + offset) for s in spans]
    return dict(enumerate(world.gather(moved)))


def to_json(spans: Mapping[int, Sequence[Span]]) -> dict[str, Any]:
    """The trace of each rank's spans."""
    zero = min((span.began for own in spans.values() for span in own), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, own in spans.items():
        events.append(_name("process_name", f"rank {rank}", rank, 0))
        for learner in sorted({span.learner for span in own}):
            events.append(_name("thread_name", f"learner {learner}", rank, learner))
        events += [
            {
                "name": span.part,
                "cat": "step",
                "ph": "X",
                "ts": 1e6 * (span.began - zero),
                "dur": 1e6 * (span.ended - span.began),
                "pid": rank,
                "tid": span.learner,
                "args": {"round": span.round},
            }
            for span in own
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write(path: Path, spans: Mapping[int, Sequence[Span]]) -> None:
    """Write the trace of each rank's spans."""
    path.write_text(json.dumps(to_json(spans)) + "\n", encoding="utf-8")


def _name(kind: str, name: str, rank: int, learner: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": learner, "args": {"name": name}}
