"""The trainer: one learner is plain PyTorch, and a run ends as it should."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import crossbow as xb
from crossbow import trainer
from crossbow.config import Config, resolve
from crossbow.data.augment import images, tokens
from crossbow.data.datasets import Arrays
from crossbow.data.order import sample_indices, sample_keys
from crossbow.task import TOKEN_LOSS, Metric, Task, token_cross_entropy
from crossbow.trainer import train
from crossbow.tune import cache
from crossbow.tune.learners import Move
from crossbow.zoo import models, tasks

STEPS, BATCH, SEED = 50, 4, 3


def random_images(n: int, channels: int, side: int) -> Arrays:
    pixels = torch.randint(0, 256, (n, channels, side, side), dtype=torch.uint8)
    return Arrays(pixels, torch.randint(0, 10, (n,)), classes=10)


def random_text(n: int, length: int) -> Arrays:
    text = torch.randint(0, 30, (n * length + 1,), dtype=torch.uint8)
    return Arrays(text[:-1].unfold(0, length, length), text[1:].unfold(0, length, length), 30)


def lenet_task() -> Task:
    data = random_images(70, 1, 28)
    return Task(
        model=models.lenet5,
        loss=F.cross_entropy,
        train=data,
        test=data,
        prepare=images((0.5,), (0.25,)),
    )


def resnet_task() -> Task:
    data = random_images(70, 3, 32)
    return Task(
        model=partial(models.resnet_cifar, 8),
        loss=F.cross_entropy,
        train=data,
        test=data,
        prepare=images((0.5,) * 3, (0.25,) * 3, pad=4, flip=True),
    )


def gpt_task() -> Task:
    data = random_text(70, 16)
    return Task(
        model=partial(models.gpt, 30, 16, num_layers=2, width=32, dropout=0.1),
        loss=token_cross_entropy,
        train=data,
        test=data,
        metric=TOKEN_LOSS,
        prepare=tokens(),
    )


OPTIMIZERS = {
    "sgd:momentum=0.9,weight_decay=1e-4": partial(
        torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=1e-4
    ),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "sgd:momentum=0.9,fused=true": partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("make_task", [lenet_task, resnet_task, gpt_task])
@pytest.mark.parametrize("spec", OPTIMIZERS)
def test_one_learner_is_plain_pytorch(make_task, spec, tmp_path, one_thread):
    task = make_task()
    config = Config(
        batch_size=BATCH,
        lr=0.01,
        optimizer=spec,
        epochs=STEPS * BATCH / len(task.train),
        eval_every=STEPS * BATCH,
        seed=SEED,
        run_dir=tmp_path / "run",
    )
    train(task, config, quiet=True)
    ours = load_file(tmp_path / "run" / "model.safetensors")

    torch.manual_seed(SEED)
    model = task.model()
    optimizer = OPTIMIZERS[spec](model.parameters())
    model.train()
    for step in range(STEPS):
        positions = torch.arange(step * BATCH, (step + 1) * BATCH).numpy()
        indices = torch.from_numpy(sample_indices(SEED, len(task.train), positions))
        inputs = task.prepare(task.train.inputs[indices], sample_keys(SEED, positions))
        loss = task.loss(model(inputs), task.train.targets[indices].long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    theirs = model.state_dict()
    assert ours.keys() == theirs.keys()
    for key in theirs:
        assert torch.equal(ours[key], theirs[key]), key


def digits(**changes: object) -> tuple[Task, Config]:
    settings = {"epochs": 1, "seed": 0, **changes}
    return tasks.get("mlp-digits"), Config(**settings)


def events(run_dir: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (run_dir / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def test_a_run_directory_holds_config_log_model_and_result(tmp_path):
    task, config = digits(run_dir=tmp_path / "run", epochs=2)
    result = train(task, config, quiet=True)
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "config.json",
        "log.jsonl",
        "model.safetensors",
        "result.json",
    }
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert written["metric"] == result.metric
    assert written["samples"] == 2 * len(task.train)
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    assert settings["lr"] == task.recipe.lr
    assert settings["epochs"] == 2
    assert [round(e["epoch"]) for e in events(tmp_path / "run", "eval")] == [1, 2]


def test_the_saved_model_loads_into_a_plain_one_and_scores_the_same(tmp_path):
    task, config = digits(run_dir=tmp_path / "run")
    result = train(task, config, quiet=True)
    model = task.build_model()
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    assert xb.evaluate(model, task).metric == result.metric


def test_two_runs_with_one_seed_are_equal_and_another_seed_differs(tmp_path):
    saved = []
    for number, seed in enumerate((1, 1, 2)):
        task, config = digits(run_dir=tmp_path / str(number), seed=seed)
        train(task, config, quiet=True)
        saved.append(load_file(tmp_path / str(number) / "model.safetensors"))
    first, again, other = ([t.sum().item() for t in state.values()] for state in saved)
    assert first == again
    assert first != other


def test_training_leaves_the_callers_random_stream_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    task, config = digits(run_dir=tmp_path / "run")
    train(task, config, quiet=True)
    assert torch.equal(torch.rand(1), expected)


def test_a_target_is_recorded_when_first_met_and_ends_the_run_when_five_hold_it(tmp_path):
    task, config = digits(run_dir=tmp_path / "run", epochs=30, target=0.5, eval_every=100)
    result = train(task, config, quiet=True)
    scores = [e["metric"] for e in events(tmp_path / "run", "eval")]
    samples = [e["samples"] for e in events(tmp_path / "run", "eval")]
    first = next(i for i, score in enumerate(scores) if score >= 0.5)
    assert result.stopped_by == "target"
    assert result.target_reached
    assert result.target_first.samples == samples[first]
    assert result.target_median.samples == samples[-1]
    assert sorted(scores[-5:])[2] >= 0.5
    assert len(scores) == 5 or sorted(scores[-6:-1])[2] < 0.5


def test_a_target_below_is_met_by_a_metric_that_falls(tmp_path):
    task, config = digits(run_dir=tmp_path / "run", epochs=30, target=1.0, eval_every=100)
    falling = Metric("loss", lambda x, y: F.cross_entropy(x, y), higher_is_better=False)
    result = train(Task(**{**vars(task), "metric": falling}), config, quiet=True)
    assert result.target_reached
    assert result.metric < 1.0


def test_a_share_of_an_epoch_is_rounded_to_samples(tmp_path):
    data = random_images(100, 1, 28)
    task = Task(**{**vars(lenet_task()), "train": data})
    for epochs, samples in ((0.07, 7), (1 / 3, 33), (0.001, 1)):  # 0.07 * 100 is above 7
        config = Config(batch_size=4, epochs=epochs, run_dir=tmp_path / str(samples))
        assert train(task, config, quiet=True).samples == samples


def test_the_time_limit_ends_a_run(tmp_path):
    task, config = digits(run_dir=tmp_path / "run", epochs=1e6, time_limit_s=0.5)
    result = train(task, config, quiet=True)
    assert result.stopped_by == "time limit"
    assert result.seconds < 5


def test_the_loss_of_a_report_is_the_mean_since_the_last(tmp_path):
    task, config = digits(run_dir=tmp_path / "run", lr=0.0)
    train(task, config, quiet=True)
    torch.manual_seed(0)
    model = task.model()
    inputs = task.prepare(task.train.inputs, None)
    expected = F.cross_entropy(model(inputs), task.train.targets).item()
    lines = events(tmp_path / "run", "train")
    ends = [line["samples"] for line in lines]
    sizes = [end - start for start, end in pairwise([0, *ends])]
    assert sum(sizes) == len(task.train)
    mean = sum(line["loss"] * size for line, size in zip(lines, sizes, strict=True)) / sum(sizes)
    # the last batch is small and counts like any other, so the means differ a little
    assert math.isclose(mean, expected, rel_tol=0.02)


def test_a_learning_rate_follows_its_schedule_in_samples(tmp_path):
    task, config = digits(
        run_dir=tmp_path / "run", epochs=2, lr=0.4, schedule="linear", eval_every=500
    )
    train(task, config, quiet=True)
    total = 2 * len(task.train)
    for line in events(tmp_path / "run", "train")[:-1]:
        before = line["samples"] - 16
        assert math.isclose(line["lr"], 0.4 * (1 - before / total))


def test_an_optimizer_may_be_a_function_with_groups_of_its_own(tmp_path):
    rates = []

    def make(parameters):
        first, *rest = parameters
        optimizer = torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": rest}], lr=0.1)
        optimizer.register_step_pre_hook(
            lambda *_: rates.append([group["lr"] for group in optimizer.param_groups])
        )
        return optimizer

    task, config = digits(run_dir=tmp_path / "run", optimizer=make, schedule="linear")
    train(task, config, quiet=True)
    assert rates[0] == [0.5, 0.1]
    assert all(math.isclose(first, 5 * second) for first, second in rates)


class Squares(torch.utils.data.Dataset):
    """A data set of our own that is no `Arrays`."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[float, int]:
        return float(index), index % 2


def pairs(samples: list[tuple[float, int]]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*samples, strict=True)
    return torch.tensor(inputs).unsqueeze(1), torch.tensor(targets)


def test_any_map_style_data_set_trains_with_a_collate_function(tmp_path):
    seen: list[int] = []

    class Recorder(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            if self.training:
                seen.extend(inputs.squeeze(1).long().tolist())
            return super().forward(inputs)

    model = Recorder(1, 2)
    task = Task(model=model, loss=F.cross_entropy, train=Squares(), test=Squares(), collate=pairs)
    config = Config(batch_size=3, epochs=2, lr=0.001, run_dir=tmp_path / "run")
    result = train(task, config, quiet=True)
    assert result.samples == 40
    assert sorted(seen[:20]) == sorted(seen[20:]) == list(range(20))


def test_label_smoothing_changes_training_and_not_evaluation(tmp_path):
    task, config = digits(run_dir=tmp_path / "run", lr=0.0, label_smoothing=0.5)
    result = train(task, config, quiet=True)
    torch.manual_seed(0)
    plain = F.cross_entropy(task.model()(task.prepare(task.test.inputs, None)), task.test.targets)
    assert math.isclose(result.loss, plain.item(), rel_tol=1e-4)
    trained = events(tmp_path / "run", "train")[0]["loss"]
    assert not math.isclose(trained, result.loss, rel_tol=1e-4)


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"channels_last": True}])
def test_faster_ways_to_compute_still_learn(options, tmp_path):
    task = tasks.get("resnet8-digits")
    result = train(task, Config(epochs=2, run_dir=tmp_path / "run", **options), quiet=True)
    assert result.metric > 0.85


@pytest.mark.slow
def test_a_compiled_model_learns_and_saves_plain_keys(tmp_path):
    run = tmp_path / "run"
    # a process of its own, for torch.compile leaves worker threads in it
    command = [sys.executable, "-m", "crossbow", "train", "resnet8-digits", "--compile", "--quiet"]
    subprocess.run([*command, "--epochs", "2", "--run-dir", str(run)], check=True, timeout=280)
    result = json.loads((run / "result.json").read_text())
    assert result["metric"] > 0.85
    assert result["first_step_seconds"] > result["train_seconds"] / 10
    tasks.get("resnet8-digits").build_model().load_state_dict(load_file(run / "model.safetensors"))


def test_a_loss_that_is_no_number_names_the_sample_and_keeps_the_log(tmp_path):
    task, config = digits(run_dir=tmp_path / "run", epochs=3, eval_every=10**6)
    inputs = task.train.inputs.float()
    inputs[7] = math.nan
    poisoned = Arrays(inputs, task.train.targets, 10)
    broken = Task(**{**vars(task), "train": poisoned, "prepare": None})
    indices = sample_indices(0, len(inputs), torch.arange(len(inputs)).numpy())
    at = indices.tolist().index(7) // 16 * 16
    expected = rf"became nan in the batch of samples {at} to {at + 16}:"
    with pytest.raises(xb.InputError, match=expected):
        train(broken, config, quiet=True)
    assert events(tmp_path / "run", "diverged")
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_model_that_ends_as_no_number_is_not_saved(tmp_path):
    settings = {"epochs": 1e-9, "lr": 1e38, "optimizer": "sgd", "schedule": "constant"}
    task, config = digits(run_dir=tmp_path / "run", **settings)
    with pytest.raises(xb.InputError, match="the test loss became nan at sample 1:"):
        train(task, config, quiet=True)
    assert events(tmp_path / "run", "diverged")
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_task_without_test_samples_is_refused_before_anything_is_written(tmp_path):
    task, config = digits(run_dir=tmp_path / "run")
    empty = Arrays(task.test.inputs[:0], task.test.targets[:0], 10)
    with pytest.raises(xb.InputError, match="no samples to evaluate on"):
        train(Task(**{**vars(task), "test": empty}), config, quiet=True)
    assert not (tmp_path / "run").exists()


INTERRUPTED = """
import sys, crossbow as xb
from pathlib import Path
task = xb.tasks.get("mlp-digits")
try:
    xb.train(task, xb.Config(epochs=1e6, run_dir=Path(sys.argv[1]), eval_every=10**9), quiet=True)
except KeyboardInterrupt as interrupted:
    print("reached", interrupted.result.samples)
"""


def test_ctrl_c_ends_a_run_cleanly_with_what_was_reached(tmp_path):
    run = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(run)], stdout=subprocess.PIPE, text=True
    ) as process:
        wait_for_lines(run / "log.jsonl", 3)
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    result = json.loads((run / "result.json").read_text())
    assert process.returncode == 0
    assert output == f"reached {result['samples']}\n"
    assert result["stopped_by"] == "interrupt"
    assert (run / "model.safetensors").exists()


def wait_for_lines(path: Path, lines: int) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_text().count("\n") < lines:
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.05)


class Scripted:
    """A tuner that wants what it is told, one number after the other."""

    spent_s = 1.5

    def __init__(self, learners: int, choices: list[int], batch_size: int, total: int) -> None:
        self.first, self.wanted, self.most = learners, [3, 1, 2], []
        assert learners in choices

    def limit(self, most: int) -> None:
        self.most.append(most)

    def observe(self, seconds: float, samples: int, critical: float | None) -> Move | None:
        return Move(self.wanted.pop(0), "because") if self.wanted else None


def test_learners_come_and_go_as_the_tuner_says(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "Tuner", Scripted)
    monkeypatch.setattr(trainer, "REPORT_INTERVAL_S", 0.0)
    settings = xb.Config(batch_size=8, epochs=2, learners="auto", run_dir=tmp_path)
    result = xb.train(xb.tasks.get("mlp-digits"), settings, quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    moves = [(line["learners"], line["reason"]) for line in lines if line["event"] == "learners"]
    assert moves == [(3, "because"), (1, "because"), (2, "because")]
    assert (result.learners, result.learner_changes, result.tuning_seconds) == (2, 3, 1.5)
    assert result.samples == 2 * 1437
    assert result.metric > 0.8
    assert json.loads((tmp_path / "config.json").read_text())["learners"] == "auto"


def test_auto_begins_with_the_plans_number_and_else_with_one_a_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    task = xb.tasks.get("mlp-digits")

    def learners(run: str) -> int:
        settings = xb.Config(epochs=0.1, learners="auto", run_dir=tmp_path / run)
        return xb.train(task, settings, quiet=True).learners

    assert learners("unplanned") == 1
    settings = resolve(xb.Config(learners="auto"), task.recipe)
    cores = len(os.sched_getaffinity(0))
    place = cache.place_of(task.name, task.build_model(), settings, cores)
    cache.save(place, {"chosen": {"learners": 6, "ranks": 2}})
    assert learners("planned") == 3


def test_a_given_number_is_left_alone(tmp_path):
    settings = xb.Config(epochs=0.1, learners=2, run_dir=tmp_path)
    assert xb.train(xb.tasks.get("mlp-digits"), settings, quiet=True).learner_changes is None
