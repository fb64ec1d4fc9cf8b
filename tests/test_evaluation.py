import copy
import dataclasses
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crossbow.data.augment import images
from crossbow.data.datasets import Arrays
from crossbow.data.loader import read, stretches
from crossbow.errors import InputError
from crossbow.evaluation import EVAL_BATCH, calibrate, evaluate
from crossbow.task import ACCURACY, TOKEN_LOSS, Metric, Task, accuracy, token_cross_entropy
from crossbow.zoo import models, tasks

ODD = 2 * EVAL_BATCH + 37
"""Samples: two whole batches and a part of one."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def image_task(samples: int = ODD) -> Task:
    pixels = torch.randint(0, 256, (samples, 1, 8, 8), dtype=torch.uint8)
    data = Arrays(pixels, torch.randint(0, 10, (samples,)), classes=10)
    return Task(
        model=lambda: models.resnet_cifar(8, in_channels=1),
        loss=F.cross_entropy,
        train=data,
        test=data,
        prepare=images((0.5,), (0.25,), pad=1, flip=True),
    )


@pytest.mark.parametrize("samples", [1, 5, EVAL_BATCH, ODD])
def test_scores_are_means_over_samples_and_not_over_batches(samples: int) -> None:
    task = image_task(samples)
    model = task.build_model()
    scores = evaluate(model, task)
    model.eval()
    losses, hits = [], []
    with torch.no_grad():
        for pixels, label in zip(task.test.inputs, task.test.targets, strict=True):
            logits = model(task.prepare(pixels[None], None))
            losses.append(F.cross_entropy(logits, label[None]).item())
            hits.append(logits.argmax().item() == label.item())
    assert scores.loss == pytest.approx(sum(losses) / samples, rel=1e-5)
    assert scores.metric == pytest.approx(sum(hits) / samples, abs=1e-9)


def test_every_target_of_a_sequence_counts() -> None:
    data = Arrays(torch.randint(0, 9, (ODD, 4)), torch.randint(0, 9, (ODD, 4)), classes=9)
    task = Task(
        model=nn.Embedding(9, 9), loss=token_cross_entropy, train=data, test=data, metric=TOKEN_LOSS
    )
    loss, metric = evaluate(task.build_model(), task)
    logits = task.build_model()(data.inputs).flatten(0, 1)
    assert loss == metric == pytest.approx(F.cross_entropy(logits, data.targets.flatten()).item())


def test_other_data_may_be_scored() -> None:
    task = image_task()
    model = task.build_model()
    assert evaluate(model, task, data=task.test) == evaluate(model, task)
    few = Arrays(task.test.inputs[:3], task.test.targets[:3], 10)
    assert evaluate(model, task, data=few) != evaluate(model, task)


def test_each_module_gets_its_own_mode_back() -> None:
    task = image_task(3)
    model = task.build_model()
    model.train()
    model.bn1.eval()  # frozen, as in fine-tuning
    before = [module.training for module in model.modules()]
    evaluate(model, task)
    assert [module.training for module in model.modules()] == before


def test_a_failing_loss_leaves_the_modes_as_they_were() -> None:
    task = image_task(3)
    model = task.build_model().train()

    def fail(*_: Tensor) -> Tensor:
        raise RuntimeError

    broken = Task(model=model, loss=fail, train=task.train, test=task.test, prepare=task.prepare)
    with pytest.raises(RuntimeError):
        evaluate(model, broken)
    assert all(module.training for module in model.modules())


def test_an_evaluation_changes_nothing_of_the_model() -> None:
    task = image_task()
    model = task.build_model().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    evaluate(model, task)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_the_model_may_be_run_in_another_way() -> None:
    task = image_task(5)
    model = task.build_model()
    turned = evaluate(model, task, forward=lambda inputs: -model(inputs))
    assert turned.loss != evaluate(model, task).loss


def test_an_evaluation_builds_no_graph() -> None:
    task = image_task(5)
    model = task.build_model()
    seen = []

    def watch(inputs: Tensor) -> Tensor:
        outputs = model(inputs)
        seen.append(outputs.requires_grad)
        return outputs

    evaluate(model, task, forward=watch)
    assert seen == [False]


@pytest.mark.parametrize(
    ("logits", "targets", "share"),
    [
        ([[0.0, 1.0], [1.0, 0.0]], [1, 1], 0.5),
        ([[[0.0, 1.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]], [[1, 0], [1, 0]], 0.75),
    ],
)
def test_accuracy_counts_first_ranks(
    logits: Iterable[object], targets: Iterable[object], share: float
) -> None:
    assert accuracy(torch.tensor(logits), torch.tensor(targets)).item() == share


def test_a_metric_knows_which_way_is_up() -> None:
    falling = Metric("loss", token_cross_entropy, higher_is_better=False)
    assert ACCURACY.reached(0.9, 0.9)
    assert not ACCURACY.reached(0.89, 0.9)
    assert falling.reached(0.9, 0.9)
    assert not falling.reached(0.91, 0.9)


def test_an_empty_set_is_refused() -> None:
    task = image_task(3)
    empty = Arrays(task.test.inputs[:0], task.test.targets[:0], 10)
    with pytest.raises(InputError, match="custom has no samples to evaluate on: give one or more"):
        evaluate(task.build_model(), task, data=empty)


def shifted_task() -> Task:
    """Images of a mean that no batch norm begins with."""
    task = image_task(1000)
    return dataclasses.replace(task, prepare=images((0.05,), (0.1,)))


def test_calibrated_statistics_are_those_of_the_training_data() -> None:
    task = shifted_task()
    model = nn.Sequential(nn.BatchNorm2d(1, momentum=0.3), nn.Flatten(), nn.Linear(64, 10))
    calibrate(model, dataclasses.replace(task, model=model), 1000)
    inputs = task.prepare(task.train.inputs, None)
    assert model[0].running_mean.item() == pytest.approx(inputs.mean().item(), abs=0.02)
    assert model[0].running_var.item() == pytest.approx(inputs.var().item(), rel=0.02)
    assert model[0].momentum == 0.3
    assert model[0].num_batches_tracked == 0
    assert model.training


@pytest.mark.parametrize("samples", [0, 700])
def test_calibration_is_deterministic_and_may_be_left_out(samples: int) -> None:
    task = image_task(1000)
    model = task.build_model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    calibrate(model, task, samples, seed=3)
    once = {key: value.clone() for key, value in model.state_dict().items()}
    calibrate(model, task, samples, seed=3)
    assert all(torch.equal(once[key], value) for key, value in model.state_dict().items())
    changed = {key for key, value in before.items() if not torch.equal(once[key], value)}
    expected = {key for key in before if "running" in key} if samples else set()
    assert changed == expected


def test_an_average_needs_statistics_of_its_own() -> None:
    """Noise of learners that stand far apart is in their activations, and not in the average's."""
    task = tasks.get("resnet8-digits")
    good = task.build_model()
    optimizer = torch.optim.SGD(good.parameters(), lr=0.05, momentum=0.9)
    for inputs, targets in read(
        task.train, stretches(0, 4 * len(task.train), 32), seed=2, prepare=task.prepare
    ):
        optimizer.zero_grad()
        task.loss(good(inputs), targets).backward()
        optimizer.step()
    learners = [copy.deepcopy(good) for _ in range(24)]
    for learner in learners:
        for name, parameter in learner.named_parameters():
            if parameter.dim() == 4:
                noise = 2 * torch.randn_like(parameter) * parameter.detach().std()
                parameter.data.add_(noise if "conv" in name else 0)
        calibrate(learner, task, 1000)
    states = [learner.state_dict() for learner in learners]
    mean = {key: sum(state[key] for state in states) / len(states) for key in states[0]}
    average = task.build_model()
    average.load_state_dict(mean)
    naive = evaluate(average, task).metric
    calibrate(average, task, 1000)
    assert naive < 0.6
    assert evaluate(average, task).metric > 0.8


def test_a_model_without_batch_norm_is_left_as_it_is() -> None:
    task = image_task(8)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    state = torch.get_rng_state()
    calibrate(model, task, 100)
    assert torch.equal(torch.get_rng_state(), state)
