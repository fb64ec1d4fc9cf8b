import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.monitor.test_record import at, written

from crossbow.monitor.figures import figures, thin
from crossbow.monitor.record import read
from crossbow.monitor.report import page

START = {"event": "start", "task": "t", "learners": 2, "ranks": 1, "parameters": 10}


def chart(shown: dict[str, Any], key: str) -> dict[str, Any]:
    return next(chart for chart in shown["charts"] if chart["key"] == key)


def values(shown: dict[str, Any], key: str, label: str) -> list[float]:
    lines = [line for line in chart(shown, key)["lines"] if line["label"] == label]
    return [point[2] for line in lines for point in line["points"]]


def test_the_numbers_are_those_of_the_log(tmp_path: Path) -> None:
    train = [at(10 * i, seconds=i, loss=1 / i, lr=0.1, epoch=i / 4) for i in (1, 2, 3)]
    scores = at(30, "eval", seconds=4, loss=0.5, metric=0.75, metric_name="accuracy", epoch=0.75)
    shown = figures([read(written(tmp_path, START, *train, scores))])
    assert values(shown, "loss", "training") == [1, 1 / 2, 1 / 3]
    assert values(shown, "loss", "test") == [0.5]
    assert values(shown, "metric", "test") == [0.75]
    assert chart(shown, "metric")["unit"] == "share"
    assert shown["runs"][0]["epoch_samples"] == 40
    assert shown["runs"][0]["metric"] == 0.75


def test_each_metric_has_a_chart_of_its_own(tmp_path: Path) -> None:
    named = {"accuracy": 0.75, "loss": 3.5}
    runs = [
        written(tmp_path / name, at(8, "eval", seconds=1, metric=value, metric_name=name))
        for name, value in named.items()
    ]
    shown = figures([read(run) for run in runs])
    (first,), (second,) = chart(shown, "metric")["lines"], chart(shown, "metric-2")["lines"]
    assert (first["run"], first["points"][0][2], chart(shown, "metric")["unit"]) == (
        0,
        0.75,
        "share",
    )
    assert (second["run"], second["points"][0][2]) == (1, 3.5)


def test_a_log_that_says_little_shows_little(tmp_path: Path) -> None:
    logs = [(), (START,), (at(5),), (at(5, loss=None),), ({"event": "x", "y": {"z": [None, 1]}},)]
    records = [read(written(tmp_path / str(i), *lines)) for i, lines in enumerate(logs)]
    for shown in ([figures([record]) for record in records], figures(records)):
        json.dumps(shown, allow_nan=False)
    assert figures(records)["charts"] == []
    assert figures(records)["events"][0]["said"] == "y z -, 1"


def test_values_of_the_wrong_kind_are_left_out(tmp_path: Path) -> None:
    odd = [at(1, seconds=1, loss=value, samples_per_second=value) for value in ("a", [], {}, True)]
    wrong = {"event": "start", "task": ["t"], "learners": "many", "machine": 3}
    folder = written(tmp_path, wrong, *odd, '{"event": "train", "samples": 2, "loss": NaN}')
    (folder / "config.json").write_text('{"target": "high", "batch_size": {}}')
    (folder / "result.json").write_text('{"metric": "good", "target_median": 3, "learners": null}')
    assert figures([read(folder)])["charts"] == []


def test_learners_are_steps_from_the_start_to_the_end(tmp_path: Path) -> None:
    changes = [at(20, "learners", learners=4, reason="faster"), at(60, seconds=6, loss=1)]
    shown = figures([read(written(tmp_path, START, at(10, seconds=1, loss=2), *changes))])
    (line,) = chart(shown, "learners")["lines"]
    assert [(point[0], point[2]) for point in line["points"]] == [(0, 2), (20, 4), (60, 4)]
    assert line["style"] == "steps"
    assert "reason faster" in shown["events"][0]["said"]


def test_settings_that_differ_come_first_and_are_marked(tmp_path: Path) -> None:
    for name, rate in (("a", 0.1), ("b", 0.2)):
        folder = written(tmp_path / name)
        (folder / "config.json").write_text(json.dumps({"seed": 0, "lr": rate}))
    settings = figures([read(tmp_path / "a"), read(tmp_path / "b")])["tables"][0]["rows"]
    assert settings == [
        {"name": "lr", "values": ["0.1", "0.2"], "differs": True},
        {"name": "seed", "values": ["0", "0"], "differs": False},
    ]


@pytest.mark.parametrize("count", [0, 1, 2, 99, 100, 101, 12345])
def test_thinning_keeps_ends_extremes_and_order(count: int) -> None:
    draw = random.Random(count)
    points = [(float(i), i / 2, draw.gauss(0, 1), None) for i in range(count)]
    kept = thin(points, most=100)
    assert len(kept) <= 100
    assert kept == sorted(kept)
    assert set(kept) <= set(points)
    if points:
        assert {points[0], points[-1], min(points, key=lambda p: p[2])} <= set(kept)


def test_a_run_that_was_taken_up_again_is_running(tmp_path: Path) -> None:
    ended = [START, at(8, seconds=1, loss=1), {"event": "end", "stopped_by": "time limit"}]
    folder = written(tmp_path, *ended)
    (folder / "result.json").write_text('{"samples": 8, "learners": 2}')
    assert figures([read(folder)])["runs"][0]["status"] == "ended by time limit"
    written(tmp_path, *ended, at(8, "resume", learners=4), at(12, seconds=2, loss=1))
    run = figures([read(folder)])["runs"][0]
    assert (run["samples"], run["learners"], run["seconds"]) == (12, 4, 2)
    assert run["status"].startswith("no end in the log")


ODD = [
    *(None, True, -1, 0, 1e308, -1e308, 5e-324, float("nan"), float("inf"), 10**400),
    *("", "accuracy", "\ud800", "</script>", [], [[[]]], {}, {"a": {"b": None}}, {"seconds": 3}),
]
NAMES = (
    *("samples", "seconds", "epoch", "loss", "metric", "metric_name", "lr", "learners", "ranks"),
    *("samples_per_second", "critical_batch", "critical_batch_error", "machine", "task", "target"),
    *("compute_s", "waiting_s", "stopped_by", "message", "target_median", "batch_size"),
)
KINDS = (
    "start",
    "train",
    "eval",
    "divergence",
    "learners",
    "resume",
    "wire",
    "diverged",
    "end",
    "x",
)


@pytest.mark.parametrize("seed", range(30))
def test_any_log_makes_a_page(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)

    def values() -> dict[str, Any]:
        return {name: draw.choice(ODD) for name in draw.sample(NAMES, 8)}

    lines = [{"event": draw.choice(KINDS), **values()} for _ in range(40)]
    likely = [{**values(), **at(draw.randrange(99), draw.choice(KINDS))} for _ in range(40)]
    folder = written(tmp_path / "run", *lines, *likely, "[" * 100_000)
    for name in ("config.json", "result.json"):
        (folder / name).write_text(json.dumps(values()))
    text = page([folder, folder])
    assert text.encode()
    assert text.count("</script>") == 2
