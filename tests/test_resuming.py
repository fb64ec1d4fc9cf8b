"""A run that was ended goes on as if it had not been."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.test_trainer import digits, events, gpt_task, lenet_task, resnet_task

import crossbow as xb
from crossbow.checkpoint.folder import Checkpoint, found_in, newest
from crossbow.config import Config
from crossbow.monitor.log import effective_lines
from crossbow.trainer import train

TASKS = {"lenet": lenet_task, "resnet": resnet_task, "gpt": gpt_task}
BATCH, ROUNDS = 4, 6


class Stopped(Exception):
    """What ends a run at a round of our choice."""


def run_of(task, learners, run_dir, stop_after=None, save_at=(), monkeypatch=None, **settings):
    """Train; save after these rounds, and end the process, so to speak, after one of them."""
    from crossbow import trainer

    class Run(trainer._Run):
        def _goes_on(self):
            goes_on = super()._goes_on()
            number = self.samples // (BATCH * self.fleet.learners)
            if number in save_at:
                self.saver.save_now(self._snapshot)
            if number == stop_after:
                raise Stopped
            return goes_on

    monkeypatch.setattr(trainer, "_Run", Run)
    config = Config(
        batch_size=BATCH,
        learners=learners,
        epochs=(ROUNDS * learners * BATCH - 1) / len(task.train),  # a last round that isn't whole
        eval_every=2 * learners * BATCH,
        seed=3,
        keep=99,
        run_dir=None if settings.get("resume") else run_dir,
        **settings,
    )
    return train(task, config, quiet=True)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("learners", "settings"),
    [
        (1, {"optimizer": "sgd:momentum=0.9", "ema": 16.0}),
        (2, {"optimizer": "adamw", "lr": 0.002}),
        (
            3,
            {
                "optimizer": "sgd:momentum=0.9",
                "sync": "sma:restart=true",
                "schedule": "step:every=0.3",
            },
        ),
    ],
    ids=["sgd", "adamw", "sma"],
)
def test_a_run_resumed_at_any_step_ends_in_the_same_bits(
    task, learners, settings, tmp_path, monkeypatch
):
    settings = {"lr": 0.05, **settings}
    make, whole = TASKS[task], tmp_path / "whole"
    common = {"monkeypatch": monkeypatch, **settings}
    torch.manual_seed(8)
    task = make()
    undisturbed = run_of(task, learners, tmp_path / "undisturbed", **common)
    expected = load_file(tmp_path / "undisturbed" / "model.safetensors")
    rounds = range(1, ROUNDS)
    run_of(task, learners, whole, save_at=rounds, **common)
    assert_same_models(load_file(whole / "model.safetensors"), expected)  # saving changes nothing
    scores = [(e["samples"], e["metric"]) for e in events(whole, "eval")]
    for number in rounds:
        run = cut_off(whole, tmp_path / str(number), number * BATCH * learners)
        result = run_of(task, learners, None, resume=run, monkeypatch=monkeypatch)
        assert_same_models(load_file(run / "model.safetensors"), expected)
        assert result.metric == undisturbed.metric
        assert result.critical_batch == undisturbed.critical_batch
        kept = [
            (e["samples"], e["metric"])
            for e in effective_lines(run / "log.jsonl")
            if e["event"] == "eval"
        ]
        assert kept == scores


def cut_off(whole: Path, run: Path, samples: int) -> Path:
    """A copy of a run as it was after so many samples."""
    import shutil

    shutil.copytree(whole, run)
    for path in found_in(run / "checkpoints"):
        if int(path.name) > samples:
            shutil.rmtree(path)
    (run / "model.safetensors").unlink()
    return run


def assert_same_models(actual, expected) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


def digits_run(run: Path, monkeypatch, **settings) -> xb.Result:
    """The beginning of a run, saved after rounds 2, 4 and 5."""
    from crossbow import trainer

    class Run(trainer._Run):
        def _goes_on(self):
            goes_on = super()._goes_on()
            number = self.samples // (16 * self.fleet.learners)
            if number in (2, 4, 5):
                self.saver.save_now(self._snapshot)
            if number == 5:
                raise Stopped
            return goes_on

    task, config = digits(**{"run_dir": run, "epochs": 1, **settings})
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_Run", Run)
        with pytest.raises(Stopped):
            train(task, config, quiet=True)


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, monkeypatch, capsys):
    digits_run(tmp_path / "run", monkeypatch)
    latest = found_in(tmp_path / "run" / "checkpoints")[0]
    content = bytearray((latest / "learners-0-0.safetensors").read_bytes())
    content[-1] ^= 1
    (latest / "learners-0-0.safetensors").write_bytes(content)
    task, config = digits(resume=tmp_path / "run", epochs=None)
    train(task, config, quiet=True)
    (line,) = events(tmp_path / "run", "resume")
    assert line["samples"] == 4 * 16
    assert "SHA-256 isn't what was written" in line["warnings"][0]
    assert "going on from the checkpoint before it" in capsys.readouterr().err


@pytest.mark.parametrize(("before", "after"), [(1, 3), (4, 2), (2, 1)])
def test_other_learners_go_on_from_the_central_model_at_the_very_sample(
    before, after, tmp_path, monkeypatch
):
    digits_run(tmp_path / "run", monkeypatch, learners=before)
    checkpoint, _ = newest(tmp_path / "run" / "checkpoints")
    task, config = digits(resume=tmp_path / "run", epochs=None, learners=after, eval_every=10**9)
    from crossbow import trainer

    seen = []

    class Run(trainer._Run):
        def train(self):
            seen.append((self.samples, self.fleet.state_dict()))
            return super().train()

    monkeypatch.setattr(trainer, "_Run", Run)
    result = train(task, config, quiet=True)
    samples, central = seen[0]
    assert samples == 5 * 16 * before
    assert_same_models(central, checkpoint.model())
    assert result.samples == len(task.train)
    (line,) = events(tmp_path / "run", "resume")
    assert "the gain" in line["anew"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 8}, "batch_size 8 can't be changed on the way: .* was begun with 16"),
        ({"seed": 5}, "seed 5 can't be changed"),
        ({"sync": "sma"}, "sync 'sma' can't be changed"),
    ],
)
def test_settings_that_conflict_are_refused_by_name(settings, message, tmp_path, monkeypatch):
    digits_run(tmp_path / "run", monkeypatch)
    task, _ = digits()
    with pytest.raises(xb.InputError, match=message):
        train(task, Config(resume=tmp_path / "run", **settings), quiet=True)


def test_another_task_or_no_run_is_refused(tmp_path, monkeypatch):
    digits_run(tmp_path / "run", monkeypatch)
    with pytest.raises(xb.InputError, match="is a run of mlp-digits, and not of custom"):
        train(lenet_task(), Config(resume=tmp_path / "run"), quiet=True)
    with pytest.raises(xb.InputError, match="has no checkpoints: name a run's directory"):
        train(lenet_task(), Config(resume=tmp_path / "elsewhere"), quiet=True)


def test_the_newest_few_are_kept_and_the_best(tmp_path, monkeypatch):
    scores = iter([0.1, 0.9, 0.2, 0.3, 0.4])
    from crossbow import trainer

    class Run(trainer._Run):
        def _goes_on(self):
            goes_on = super()._goes_on()
            if self.evaluations and self.evaluations[-1].samples == self.samples:
                score = next(scores)
                self.evaluations[-1] = self.evaluations[-1]._replace(metric=score)
                self.saver.save_now(self._snapshot)
            return goes_on

    monkeypatch.setattr(trainer, "_Run", Run)
    task, config = digits(run_dir=tmp_path / "run", keep=2, eval_every=320, bn_samples=0)
    train(task, config, quiet=True)
    kept = [Checkpoint.open(p).manifest.metric for p in found_in(tmp_path / "run" / "checkpoints")]
    assert kept[-1] == 0.9
    assert len(kept) == 3


def test_a_disk_that_cannot_be_written_costs_a_message_and_not_the_run(
    tmp_path, monkeypatch, capsys
):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("crossbow.checkpoint.writer.write_tree", fail)
    task, config = digits(run_dir=tmp_path / "run", checkpoint_every_s=1e-9, epochs=2)
    result = train(task, config, quiet=True)
    assert result.samples == 2 * len(task.train)
    assert "No space left on device" in events(tmp_path / "run", "checkpoint failed")[0]["message"]
    assert "no checkpoint: " in capsys.readouterr().err
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


SIGNALED = """
import sys, crossbow as xb
task = xb.tasks.get("mlp-digits")
config = xb.Config(epochs=1e6, run_dir=sys.argv[1], eval_every=10**9)
try:
    xb.train(task, config, quiet=True)
except KeyboardInterrupt as ended:
    print(ended.result.stopped_by, ended.result.samples)
"""


def test_sigterm_leaves_a_run_that_can_go_on_from_its_very_sample(tmp_path):
    from tests.test_trainer import wait_for_lines

    run = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", SIGNALED, str(run)], stdout=subprocess.PIPE, text=True
    ) as process:
        wait_for_lines(run / "log.jsonl", 3)
        os.kill(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    reason, samples = output.split()
    assert reason == "terminated"
    checkpoint, _ = newest(run / "checkpoints")
    assert checkpoint.manifest.samples == int(samples)
    assert json.loads((run / "result.json").read_text())["samples"] == int(samples)
