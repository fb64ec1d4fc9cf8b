import json
import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import crossbow as xb
from crossbow.cli import main
from crossbow.config import SINKS
from crossbow.errors import InputError
from crossbow.monitor import sinks
from crossbow.monitor.log import RunLog
from crossbow.monitor.record import read
from crossbow.monitor.sinks import scalars


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(SINKS[name]) is None, reason=f"{name} is not installed")


def trained(folder: Path, sink: str) -> list[dict[str, Any]]:
    """The events of a run that was logged there, too."""
    config = xb.Config(learners=2, epochs=1, log_to=sink, run_dir=folder)
    xb.train(xb.tasks.get("mlp-digits"), config, quiet=True)
    return read(folder).events


def numbers(events: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """What a sink should have got, by name and step."""
    return {
        (name, event.get("samples", 0)): value
        for event in events
        for name, value in scalars(event["event"], event).items()
    }


@needs("tensorboard")
def test_tensorboard_has_the_numbers_of_the_log(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    wanted = numbers(trained(tmp_path / "run", "tensorboard"))
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    got = {(tag, e.step): e.value for tag in found.Tags()["scalars"] for e in found.Scalars(tag)}
    assert got == pytest.approx(wanted)
    assert ("eval/accuracy", 1437) in got


@needs("mlflow")
@pytest.mark.slow
def test_mlflow_has_the_numbers_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the small package has no other store
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        monkeypatch.setenv(name, (tmp_path / "store").as_uri())
    wanted = numbers(trained(tmp_path / "run", "mlflow"))
    client = MlflowClient()
    experiment = client.get_experiment_by_name("mlp-digits")
    (run,) = client.search_runs([experiment.experiment_id])
    got = {
        (name, metric.step): metric.value
        for name in run.data.metrics
        for metric in client.get_metric_history(run.info.run_id, name)
    }
    assert got == wanted
    assert (run.info.status, run.data.params["learners"]) == ("FINISHED", "2")
    assert "eval/accuracy" in run.data.metrics


@needs("mlflow")
@pytest.mark.slow
def test_a_server_that_is_not_there_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://nowhere")
    where = str(tmp_path / "run")
    assert main(["train", "mlp-digits", "--quiet", "--run-dir", where, "--log-to", "mlflow"]) == 2
    assert "log to 'mlflow' is not possible" in capsys.readouterr().err
    assert main(["train", "mlp-digits", "--quiet", "--run-dir", where, "--epochs", "1"]) == 0


@needs("wandb")
@pytest.mark.slow
def test_wandb_takes_a_run_offline(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    events = trained(tmp_path / "run", "wandb")
    assert not [event for event in events if event["event"] == "sink_failed"]
    files = list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 1
    deadline = time.monotonic() + 30  # its own process writes the file, and may be behind
    while b"eval/accuracy" not in files[0].read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.1)


class Broken:
    """Fails at the second event."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def write(self, event: str, values: Any) -> None:
        self.heard.append(event)
        if len(self.heard) == 2:
            raise OSError("no more paper")

    def close(self) -> None:
        self.heard.append("closed")


def test_training_goes_on_without_a_sink_that_fails(tmp_path: Path) -> None:
    broken = Broken()
    with RunLog.create(tmp_path / "run", "task", {}) as log:
        log.sinks = [broken]
        for event in ("a", "b", "c"):
            log.write(event, samples=1)
    assert broken.heard == ["a", "b"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["a", "b", "sink_failed", "c"]
    assert (lines[2]["sink"], lines[2]["message"]) == ("Broken", "OSError: no more paper")


def test_a_missing_package_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    where = str(tmp_path / "run")
    assert main(["train", "mlp-digits", "--quiet", "--run-dir", where, "--log-to", "wandb"]) == 2
    assert "pip install 'crossbow[wandb]'" in capsys.readouterr().err
    assert not os.path.exists(where)


def test_an_unknown_sink_is_refused() -> None:
    with pytest.raises(InputError, match="did you mean 'tensorboard'"):
        xb.Config(log_to="wandb,tensorbord")


def test_what_is_no_number_is_no_scalar() -> None:
    values = {"samples": 8, "a": None, "b": float("nan"), "c": "3", "d": True, "e": [1], "f": 2}
    assert scalars("train", values) == {"train/f": 2.0}
