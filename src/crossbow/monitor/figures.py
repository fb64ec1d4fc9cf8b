"""Figures: what a report shows of runs, as plain values that a page draws.

A chart is lines over samples or seconds, of one run or of several. Its numbers are those of the
log; of very long runs a line keeps, of each stretch, the lowest and the highest.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from crossbow.monitor.record import Event, Record, number, short_names
from crossbow.stats.watch import PARTS

MOST_POINTS = 2000
"""Of a line: more than a screen has columns."""

DRAWN = frozenset({"start", "train", "eval", "divergence", "wire", "end"})
"""Events that charts and cards show; the others are told in words."""

SHORTEST_EPOCH = 1e-12

Point = tuple[float, float, float, float | None]
"""Samples, seconds, value, and the error of that, if one is known."""


@dataclass(frozen=True)
class Line:
    """What a run says of one quantity."""

    run: int
    label: str
    points: list[Point]
    style: str = "solid"
    """solid, faint, dashed, dotted or steps."""


@dataclass(frozen=True)
class Level:
    """A value that a chart shows all along."""

    run: int
    label: str
    value: float


@dataclass(frozen=True)
class Chart:
    """Lines that share a vertical axis."""

    key: str
    title: str
    about: str
    unit: str = "number"
    """number, share (of one) or count."""
    is_log: bool = False
    """Whether a logarithmic axis may help."""
    has_close_up: bool = False
    """Whether it helps to look at the later part alone."""
    has_zero: bool = False
    """Whether the axis begins at zero."""
    lines: list[Line] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)


def figures(records: Sequence[Record]) -> dict[str, Any]:
    """All that a page shows of these runs."""
    names = short_names([record.path for record in records])
    charts = [_drawn(chart) for chart in _charts(records)]
    return {
        "runs": [_run(name, record) for name, record in zip(names, records, strict=True)],
        "charts": [asdict(chart) for chart in charts if chart.lines],
        "parts": _parts(records),
        "events": [
            {"run": run, **_told(record, event)}
            for run, record in enumerate(records)
            for event in record.events
            if event["event"] not in DRAWN
        ],
        "tables": [
            _table("Settings", [record.config for record in records], marks=True),
            _table("Machine", [_machine(record) for record in records], marks=True),
            _table("Result", [record.result for record in records], marks=False),
        ],
    }


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Keep of each stretch the lowest and the highest point, and both ends of the line."""
    if len(points) <= most:
        return list(points)
    stretches = max(1, most // 2 - 1)
    edges = [1 + (len(points) - 2) * i // stretches for i in range(stretches + 1)]
    kept = [points[0]]
    for start, stop in pairwise(edges):
        places = range(start, stop)
        ends = {min(places, key=lambda i: points[i][2]), max(places, key=lambda i: points[i][2])}
        kept += [points[i] for i in sorted(ends)]
    return [*kept, points[-1]]


def _drawn(chart: Chart) -> Chart:
    lines = [line for line in chart.lines if line.points]
    thinned = [Line(x.run, x.label, thin(x.points), x.style) for x in lines]
    return Chart(**{**vars(chart), "lines": thinned})


def _run(name: str, record: Record) -> dict[str, Any]:
    """What a run's card says."""
    start, result = record.first("start"), {} if _goes_on(record) else record.result
    last = (record.of("eval") or [{}])[-1]
    train = (record.of("train") or [{}])[-1]
    return {
        "name": name,
        "task": str(start.get("task") or result.get("task") or "a run without a start"),
        "metric_name": _metric_name(record),
        "metric": number(result, "metric") if result else number(last, "metric"),
        "best": _best(record),
        "final": _numbers(result.get("final_metrics")),
        "loss": number(result, "loss") if result else number(last, "loss"),
        "seconds": number(result, "seconds") if result else number(train, "seconds"),
        "samples": number(result, "samples") if result else number(train, "samples"),
        "epochs": number(result, "epochs") if result else number(train, "epoch"),
        "samples_per_second": _speed(record),
        "learners": number(result, "learners") if result else _last_learners(record),
        "ranks": number(result or start, "ranks"),
        "parameters": number(start, "parameters"),
        "target": number(record.config, "target"),
        "target_seconds": _target_seconds(result),
        "epoch_samples": _epoch_samples(record),
        "status": _status(record),
    }


def _best(record: Record) -> float | None:
    """The best score, for a metric of which we know what is good."""
    found = [number(event, "metric") for event in record.of("eval")]
    scores = [score for score in found if score is not None]
    is_share = record.first("eval").get("metric_name") == "accuracy"
    return max(scores) if scores and is_share else None


def _numbers(values: Any) -> dict[str, float]:
    """Those of an object's values that are numbers."""
    found = values if isinstance(values, dict) else {}
    return {str(k): value for k in found if (value := number(found, k)) is not None}


def _speed(record: Record) -> float | None:
    if record.result:
        return number(record.result, "samples_per_second")
    speeds = [number(event, "samples_per_second") for event in record.of("train")]
    return next((speed for speed in reversed(speeds) if speed), None)


def _target_seconds(result: dict[str, Any]) -> float | None:
    reached = result.get("target_median")
    return number(reached, "seconds") if isinstance(reached, dict) else None


def _epoch_samples(record: Record) -> float | None:
    """Samples of an epoch, by the last event that gives both."""
    for event in reversed(record.events):
        samples, epoch = number(event, "samples"), number(event, "epoch")
        if samples and epoch and epoch > SHORTEST_EPOCH:
            return samples / epoch
    return None


def _goes_on(record: Record) -> bool:
    """Whether the run was taken up again after its end, and has not ended since."""
    return _turns(record)[-1:] == ["resume"]


def _turns(record: Record) -> list[str]:
    turns = ("start", "resume", "end", "diverged")
    return [event["event"] for event in record.events if event["event"] in turns]


def _status(record: Record) -> str:
    match _turns(record)[-1:]:
        case ["diverged"]:
            return f"diverged: {record.of('diverged')[-1].get('message', '')}"
        case ["end"]:
            return f"ended by {record.of('end')[-1].get('stopped_by', 'itself')}"
    return "no end in the log: it is running, or was killed"


def _last_learners(record: Record) -> float | None:
    told = [e for e in record.events if e["event"] in ("start", "learners", "resume")]
    found = [count for event in told if (count := number(event, "learners")) is not None]
    return found[-1] if found else None


def _charts(records: Sequence[Record]) -> list[Chart]:
    return [
        *_metrics(records),
        Chart(
            "loss",
            "Loss",
            "Of the training batches, as they were read, and of the test set.",
            is_log=True,
            has_close_up=True,
            lines=_lines(
                records, ("train", "loss", "training", "faint"), ("eval", "loss", "test", "solid")
            ),
        ),
        Chart(
            "speed",
            "Throughput",
            "Samples a second of all learners together, evaluations left out.",
            unit="count",
            has_zero=True,
            lines=_lines(records, ("train", "samples_per_second", "samples/s", "solid")),
        ),
        Chart(
            "rate",
            "Learning rate",
            "Of one learner; the schedule decides.",
            is_log=True,
            lines=_lines(records, ("train", "lr", "learning rate", "solid")),
        ),
        Chart(
            "learners",
            "Learners",
            "How many there were, and when that changed.",
            unit="count",
            has_zero=True,
            lines=_learners(records),
        ),
        Chart(
            "gain",
            "Gain",
            "How many steps of one learner a common step is worth: 1 to the number of learners.",
            lines=_lines(records, ("train", "gain", "gain", "solid")),
        ),
        Chart(
            "critical",
            "Critical batch",
            "Samples a step, by the gradient noise, beyond which larger batches are mostly waste.",
            unit="count",
            is_log=True,
            lines=_lines(records, ("train", "critical_batch", "critical batch", "solid")),
            levels=_levels(records, "batch of all learners", _whole_batch),
        ),
        Chart(
            "noise",
            "Gradient noise",
            "Variance of one small batch's gradient, and the squared length of the true gradient.",
            is_log=True,
            lines=_lines(
                records,
                ("train", "variance", "variance", "solid"),
                ("train", "signal", "signal", "dashed"),
            ),
        ),
        Chart(
            "distance",
            "Distance of learners",
            "Root mean square of their distances to their mean, over the length of the mean.",
            has_zero=True,
            lines=_lines(records, ("divergence", "relative_distance", "distance", "solid")),
        ),
        Chart(
            "cosine",
            "Agreement of learners",
            "Cosine of their last moves, averaged over pairs: 1 if all go the same way.",
            lines=_lines(records, ("divergence", "cosine", "cosine", "solid")),
        ),
        Chart(
            "wire",
            "Bytes sent to other hosts",
            "By the first host; and what it would have sent without compression.",
            unit="count",
            has_zero=True,
            lines=_lines(
                records,
                ("wire", "sent_bytes", "sent", "solid"),
                ("wire", "whole_bytes", "without compression", "dashed"),
            ),
        ),
    ]


def _metrics(records: Sequence[Record]) -> list[Chart]:
    """A chart for each metric that the runs are scored by."""
    names = list(dict.fromkeys(_metric_name(record) for record in records))
    charts = []
    for place, name in enumerate(names):
        # a run of another metric keeps its place among the runs, and draws nothing
        of_it = [r if _metric_name(r) == name else Record(r.path) for r in records]
        charts.append(
            Chart(
                f"metric-{place + 1}" if place else "metric",
                f"Test {name}",
                "Of the model that is kept: the central model, or its moving average.",
                unit="share" if name == "accuracy" else "number",
                has_close_up=True,
                lines=_lines(
                    of_it,
                    ("eval", "metric", "test", "solid"),
                    ("eval", "last_metric", "without the moving average", "dashed"),
                    ("divergence", "learner_metric", "one learner alone", "dotted"),
                ),
                levels=_levels(of_it, "target", lambda record: number(record.config, "target")),
            )
        )
    return charts


def _metric_name(record: Record) -> str:
    name = record.first("eval").get("metric_name") or record.result.get("metric_name")
    return name if isinstance(name, str) else "metric"


def _lines(records: Sequence[Record], *wanted: tuple[str, str, str, str]) -> list[Line]:
    return [
        Line(run, label, _points(record, kind, name), style)
        for run, record in enumerate(records)
        for kind, name, label, style in wanted
    ]


def _points(record: Record, kind: str, name: str) -> list[Point]:
    """The values of a name; a rate of nothing, before the first lap, is none."""
    points = []
    for event in record.of(kind):
        samples, value = number(event, "samples"), number(event, name)
        if samples is None or value is None or (name == "samples_per_second" and not value):
            continue
        seconds = number(event, "seconds")
        when = record.seconds_at(samples) if seconds is None else seconds
        points.append((samples, when, value, number(event, f"{name}_error")))
    return points


def _learners(records: Sequence[Record]) -> list[Line]:
    """From what a run began with to what it ended with; nothing if no run changed it."""
    if not any(record.of("learners") or record.of("resume") for record in records):
        return []
    lines = []
    for run, record in enumerate(records):
        count = number(record.first("start"), "learners")
        points: list[Point] = [] if count is None else [(0.0, 0.0, count, None)]
        points += sorted(
            point for kind in ("learners", "resume") for point in _points(record, kind, "learners")
        )
        if points:
            end = max((number(event, "samples") or 0.0 for event in record.events), default=0.0)
            points.append((end, record.seconds_at(end), points[-1][2], None))
        lines.append(Line(run, "learners", points, "steps"))
    return lines


def _levels(
    records: Sequence[Record], label: str, value_of: Callable[[Record], float | None]
) -> list[Level]:
    values = ((run, value_of(record)) for run, record in enumerate(records))
    return [Level(run, label, value) for run, value in values if value is not None]


def _whole_batch(record: Record) -> float | None:
    learners, size = _last_learners(record), number(record.config, "batch_size")
    shown = any(number(event, "critical_batch") for event in record.of("train"))
    return learners * size if learners and size and shown else None


def _parts(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Where the time of a step went, of each run that says so."""
    found = []
    for run, record in enumerate(records):
        reports = [event for event in record.of("train") if number(event, "compute_s") is not None]
        means = {part: _mean(reports, f"{part}_s") for part in PARTS}
        if reports:
            found.append({"run": run, "seconds": means})
    return found


def _mean(events: Sequence[Event], name: str) -> float:
    """Over the events that say so: they come at even intervals."""
    values = [value for event in events if (value := number(event, name)) is not None]
    return sum(values) / len(values) if values else 0.0


def _told(record: Record, event: Event) -> dict[str, Any]:
    """An event that no chart shows, in words."""
    samples, seconds = number(event, "samples"), number(event, "seconds")
    if seconds is None and samples is not None:
        seconds = record.seconds_at(samples)
    left_out = ("event", "samples", "seconds")
    said = ", ".join(f"{k} {_plain(v)}" for k, v in event.items() if k not in left_out)
    return {"event": event["event"], "samples": samples, "seconds": seconds, "said": said}


def _machine(record: Record) -> dict[str, Any]:
    start = record.first("start")
    machine = start.get("machine")
    facts = machine if isinstance(machine, dict) else {}
    return {**facts, **{key: start[key] for key in ("torch", "ranks") if key in start}}


def _table(title: str, columns: Sequence[dict[str, Any]], *, marks: bool) -> dict[str, Any]:
    """A row for each name, with what each run says of it; if asked, those that differ first."""
    names = dict.fromkeys(name for column in columns for name in column)
    rows = []
    for name in names:
        values = [_plain(column.get(name)) for column in columns]
        differs = marks and name != "run_dir" and len(set(values)) > 1
        rows.append({"name": name, "values": values, "differs": differs})
    return {"title": title, "rows": sorted(rows, key=lambda row: not row["differs"])}


def _plain(value: Any) -> str:
    """A value as a person would write it."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.6g}"
        case int():
            return str(value)
        case dict():
            return _joined(f"{key} {_plain(item)}" for key, item in value.items())
        case list():
            return _joined(map(_plain, value))
    return str(value)


def _joined(parts: Iterable[str]) -> str:
    return ", ".join(parts) or "-"
