"""SMA equals the paper, and the same learners give the same bits wherever they run."""

import random
import time
from functools import partial

import pytest
import torch
from tests import reference
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import crossbow as xb
from crossbow.averaging.family import parse
from crossbow.data.datasets import Arrays
from crossbow.fleet import Fleet
from crossbow.zoo import models

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "sgd with momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "sgd with weight decay": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01),  # decays the weights by default
    "fused": partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "asgd": partial(torch.optim.ASGD, lr=0.05),  # its move depends on the weights
}
STEPS = 50


def small_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def small_loss(model: nn.Module, learner: int, step: int) -> Tensor:
    stream = torch.Generator().manual_seed(1000 * step + learner)
    inputs = torch.randn(4, 5, dtype=torch.float64, generator=stream)
    targets = torch.randint(0, 3, (4,), generator=stream)
    return F.cross_entropy(model(inputs), targets)


def assert_equals_the_paper(make_optimizer, k, alpha, mu):
    rows, z = reference.sma(small_net(), make_optimizer, small_loss, k, STEPS, alpha, mu)
    model = small_net()
    optimizer = make_optimizer(model.parameters())
    with Fleet(model, optimizer, sync=xb.sma(alpha, mu), learners=k) as fleet:
        for step in range(STEPS):
            for learner in range(k):
                optimizer.zero_grad()
                small_loss(model, learner, step).backward()
                optimizer.step()
        with fleet.central():
            assert_close(model, z)
        for row in rows:  # aboard in turn, if each sits out a move
            assert_close(model, row)
            fleet._average.rest()


def assert_close(model: nn.Module, expected: Tensor) -> None:
    actual = parameters_to_vector(model.parameters())
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("optimizer", ["sgd with momentum", "adamw"])
@pytest.mark.parametrize(("share", "mu"), [(1.0, 0.9), (0.5, 0.9), (1.0, 0.0), (1.2, 0.5)])
def test_sma_equals_the_paper(k, optimizer, share, mu):
    alpha = min(share / k, 0.9)
    assert_equals_the_paper(OPTIMIZERS[optimizer], k, alpha, mu)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sma_equals_the_paper_for_any_optimizer(optimizer):
    assert_equals_the_paper(OPTIMIZERS[optimizer], 3, 1 / 3, 0.9)


def test_the_default_alpha_is_one_in_k():
    assert xb.sma().pull(4) == 0.25


def train_a_fleet(
    make_model: str, learners: int, jitter_seed: int | None, sync: str = "sma"
) -> dict:
    """Train on random images; return the central model."""
    torch.manual_seed(3)
    pixels = torch.randint(0, 256, (64, *SHAPES[make_model]), dtype=torch.uint8)
    data = Arrays(pixels, torch.randint(0, 10, (64,)), classes=10)
    model = MODELS[make_model]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    jitter = random.Random(jitter_seed)
    with Fleet(model, optimizer, sync=parse(sync), learners=learners) as fleet:
        batches = fleet.batches(data, batch_size=2, epochs=1.7, seed=5, prepare=halve)
        for inputs, targets in batches:
            if jitter_seed is not None:
                time.sleep(jitter.random() * 0.02)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        return {key: value.numpy() for key, value in fleet.state_dict().items()}


def restart_midway(learners: int) -> list[list[float]]:
    """Train, restart, train; return the central model right after the restart, and at the end."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    with Fleet(model, optimizer, sync=xb.sma(), learners=learners) as fleet:
        for step in range(20):
            if step == 10:
                fleet.restart()
                found += [central_of(fleet), aboard(fleet)]
            for learner in fleet.mine:
                optimizer.zero_grad()
                small_loss(model, learner, step).backward()
                optimizer.step()
        found.append(central_of(fleet))
    return found


def central_of(fleet: Fleet) -> list[float]:
    with fleet.central():
        return aboard(fleet)


def aboard(fleet: Fleet) -> list[float]:
    return parameters_to_vector(fleet.model.parameters()).tolist()


def restarted_reference(k: int) -> list[Tensor]:
    make = OPTIMIZERS["sgd with momentum"]
    _, z = reference.sma(small_net(), make, small_loss, k, 10, 1 / k, 0.9)
    model = small_net()
    vector_to_parameters(z, model.parameters())
    later = partial(_later_loss, 10)
    _, end = reference.sma(model, make, later, k, 10, 1 / k, 0.9)
    return [z, z, end]


def _later_loss(delay: int, model: nn.Module, learner: int, step: int) -> Tensor:
    return small_loss(model, learner, step + delay)


@pytest.mark.parametrize("world", [1, 2, (1, 1), (2, 1)])
def test_a_restart_is_a_new_beginning_at_the_central_model(world):
    expected = restarted_reference(3)
    for found in run_ranks(restart_midway, world, 3):
        for actual, wanted in zip(found, expected, strict=True):
            assert actual == pytest.approx(wanted.tolist(), rel=1e-10, abs=1e-12)


def halve(pixels: Tensor, keys: object) -> Tensor:
    return pixels.float() / 128 - 1


def resnet8() -> nn.Module:
    return models.resnet_cifar(8)


def dropout_net() -> nn.Module:
    """What a learner draws from its random stream shows in the weights."""
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(12, 10))


MODELS = {"lenet": models.lenet5, "resnet8": resnet8, "dropout": dropout_net}
SHAPES = {"lenet": (1, 28, 28), "resnet8": (3, 16, 16), "dropout": (3, 2, 2)}


@pytest.mark.parametrize("model", MODELS)
def test_the_same_learners_give_the_same_bits_in_any_number_of_processes(model):
    (expected,) = run_ranks(train_a_fleet, 1, model, 4, None)
    for ranks in (2, 4):
        for state in run_ranks(train_a_fleet, ranks, model, 4, ranks):
            assert_same_bits(state, expected)


def test_ranks_may_run_different_numbers_of_learners():
    (expected,) = run_ranks(train_a_fleet, 1, "dropout", 5, None)
    for state in run_ranks(train_a_fleet, 3, "dropout", 5, 1):
        assert_same_bits(state, expected)


@pytest.mark.parametrize("hosts", [(1, 1), (2, 2), (3, 1), (1, 2)])
@pytest.mark.parametrize("model", ["resnet8", "dropout"])
def test_hosts_agree_with_one_host_to_rounding(model, hosts):
    (expected,) = run_ranks(train_a_fleet, 1, model, 4, None)
    first, *others = run_ranks(train_a_fleet, hosts, model, 4, 1)
    for other in others:
        assert_same_bits(other, first)
    for key, value in expected.items():
        assert first[key] == pytest.approx(value, rel=1e-3, abs=1e-4), key


def assert_same_bits(actual, expected) -> None:
    assert isinstance(actual, dict), actual
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert (actual[key] == value).all(), key
