import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from crossbow.errors import InputError
from crossbow.monitor.log import RunLog


def lines(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of our own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_config_is_there_before_the_first_line(tmp_path: Path) -> None:
    with RunLog.create(tmp_path / "run", "task", {"lr": 0.5}):
        assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"lr": 0.5}
        assert (tmp_path / "run" / "log.jsonl").read_text() == ""


def test_a_line_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with RunLog.create(tmp_path / "run", "task", {}) as log:
        log.write("train", samples=16, loss=0.5)
        assert lines(log.path) == [{"event": "train", "samples": 16, "loss": 0.5}]
        log.write("end")
        assert [line["event"] for line in lines(log.path)] == ["train", "end"]


def test_an_error_closes_the_log_and_keeps_its_lines(tmp_path: Path) -> None:
    log = RunLog.create(tmp_path / "run", "task", {})
    log.write("start")
    with pytest.raises(RuntimeError), log:
        raise RuntimeError
    assert [line["event"] for line in lines(log.path)] == ["start"]
    with pytest.raises(ValueError, match="closed"):
        log.write("more")


def test_model_and_result_lie_beside_the_log_and_nothing_else_does(tmp_path: Path) -> None:
    with RunLog.create(tmp_path / "run", "task", {}) as log:
        log.save_model({"weight": torch.ones(2)})
        log.save_result({"metric": 0.5})
    assert sorted(path.name for path in log.path.iterdir()) == [
        "config.json",
        "log.jsonl",
        "model.safetensors",
        "result.json",
    ]
    assert torch.equal(load_file(log.path / "model.safetensors")["weight"], torch.ones(2))
    assert json.loads((log.path / "result.json").read_text()) == {"metric": 0.5}


def test_a_directory_that_holds_a_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    with RunLog.create(tmp_path, "task", {"lr": 1}) as log:
        log.write("start")
    with pytest.raises(InputError, match="already holds a run: name another --run-dir"):
        RunLog.create(tmp_path, "task", {"lr": 2})
    assert json.loads((tmp_path / "config.json").read_text()) == {"lr": 1}
    assert len(lines(tmp_path)) == 1


def test_a_directory_that_holds_other_things_is_taken(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with RunLog.create(str(tmp_path), "task", {}) as log:
        assert log.path == tmp_path
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_unnamed_runs_count_up_from_the_highest(elsewhere: Path) -> None:
    for taken in ("task-1", "task-7", "task-x", "other-9", "task-cifar10"):
        (elsewhere / "runs" / taken).mkdir(parents=True)
    with RunLog.create(None, "task", {}) as first, RunLog.create(None, "task", {}) as second:
        assert [first.path, second.path] == [Path("runs/task-8"), Path("runs/task-9")]


def test_two_runs_that_count_at_once_get_directories_of_their_own(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere / "runs" / "task-1").mkdir(parents=True)
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))  # the other run is not there yet
    with RunLog.create(None, "task", {}) as log:
        assert log.path == Path("runs/task-2")


@pytest.mark.parametrize("path", [None, "runs/mine"])
def test_a_directory_that_can_not_be_made_is_refused(path: str | None, elsewhere: Path) -> None:
    (elsewhere / "runs").touch()
    with pytest.raises(InputError, match=r"run directory runs/\w+ can't be made: "):
        RunLog.create(path, "task", {})
