"""A timeline of a real run on two ranks: valid, complete, and true to the order of things."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from tests.ranks import run_ranks

import crossbow as xb
from crossbow.monitor.trace import ROUNDS, WARM_UP
from crossbow.stats.watch import PARTS

ROUNDS_RUN = 30


def profiled(folder: str) -> str:
    config = xb.Config(
        learners=4, batch_size=8, epochs=ROUNDS_RUN * 32 / 1437, run_dir=folder, profile=True
    )
    xb.train(xb.tasks.get("mlp-digits"), config, quiet=True)
    return "done"


def test_a_timeline_shows_each_learners_steps(tmp_path: Path) -> None:
    assert run_ranks(profiled, 2, str(tmp_path / "run")) == ["done", "done"]
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    names = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"
    }
    tracks = {(0, 0): "learner 0", (0, 1): "learner 1", (1, 2): "learner 2", (1, 3): "learner 3"}
    assert tracks.items() <= names.items()
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {span["name"] for span in spans} - {"waiting"} == set(PARTS) - {"waiting"}
    assert min(span["ts"] for span in spans) == 0
    for track in tracks:
        own = [s for s in spans if (s["pid"], s["tid"]) == track and s["name"] != "waiting"]
        assert {span["args"]["round"] for span in own} == set(range(WARM_UP, ROUNDS_RUN))
        assert ROUNDS_RUN < WARM_UP + ROUNDS
        for before, after in pairwise(own):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.01  # rounding
    waits = [span for span in spans if span["name"] == "waiting"]
    for wait in waits:
        assert any(
            s["name"] == "averaging"
            and (s["pid"], s["tid"]) == (wait["pid"], wait["tid"])
            and s["ts"] - 0.01 <= wait["ts"]
            and wait["ts"] + wait["dur"] <= s["ts"] + s["dur"] + 0.01
            for s in spans
        )
    reports = [
        json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    ]
    parts = [event for event in reports if event.get("compute_s") is not None]
    assert parts
    for event in parts:
        step_s = sum(event[f"{part}_s"] for part in PARTS)
        assert event["compute_s"] > 0
        assert step_s < 1
    assert reports[0]["machine"]["cores"] >= 1


def test_without_profile_there_is_no_timeline(tmp_path: Path) -> None:
    config = xb.Config(epochs=0.1, run_dir=tmp_path / "run")
    xb.train(xb.tasks.get("mlp-digits"), config, quiet=True)
    assert not (tmp_path / "run" / "trace.json").exists()


@pytest.mark.parametrize("learners", [1, 3])
def test_one_process_has_a_timeline_too(tmp_path: Path, learners: int) -> None:
    config = xb.Config(learners=learners, epochs=1, run_dir=tmp_path / "run", profile=True)
    xb.train(xb.tasks.get("mlp-digits"), config, quiet=True)
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    assert {e["tid"] for e in events if e["ph"] == "X"} == set(range(learners))
