"""The moving average of weights equals its definition, for any averaging and one learner."""

import pytest
import torch
from tests.averaging.test_synchronous import small_loss, small_net
from tests.ranks import run_ranks
from torch import Tensor
from torch.nn.utils import parameters_to_vector

import crossbow as xb
from crossbow.averaging.weights import LOOKS_A_HALF_LIFE, MovingAverage
from crossbow.data.datasets import Arrays
from crossbow.fleet import Fleet

SYNCS = {"sma": xb.sma(), "lag 1": xb.adaptive(lag=1), "lag 0": xb.adaptive(lag=0)}


def test_weights_half_a_life_ago_count_half() -> None:
    average = MovingAverage(half_life=100)
    values = torch.tensor([3.0, 5.0, 11.0, 2.0])
    for number, value in enumerate(values):
        average.take([value.reshape(1)], 100 * (number + 1))
    shares = 0.5 ** torch.arange(3.0, -1.0, -1.0)
    torch.testing.assert_close(average.rows[0], (shares @ values / shares.sum()).reshape(1))


def test_it_looks_often_enough_and_not_in_every_step() -> None:
    average = MovingAverage(half_life=3200)
    looks = 0
    for samples in range(0, 3200, 10):
        if average.is_due(samples):
            looks += 1
            average.take([torch.zeros(1)], samples)
    assert LOOKS_A_HALF_LIFE - 2 <= looks <= LOOKS_A_HALF_LIFE


def learn(sync: xb.Averaging, learners: int, half_life: float) -> list[list[float]]:
    """The moving average, and the central model, after some epochs; then what training held."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = Arrays(torch.arange(64), torch.zeros(64, dtype=torch.long), classes=1)
    found = []
    with Fleet(model, optimizer, sync=sync, learners=learners, ema=half_life) as fleet:
        for numbers, _ in fleet.batches(data, batch_size=2, epochs=4, seed=1):
            optimizer.zero_grad()
            small_loss(model, int(numbers[0]), 0).backward()
            optimizer.step()
        aboard = weights(model)
        with fleet.averaged():
            found.append(weights(model))
        with fleet.central():
            found.append(weights(model))
        assert weights(model) == aboard
    return found


def weights(model: torch.nn.Module) -> list[float]:
    return parameters_to_vector(model.parameters()).tolist()


@pytest.mark.parametrize("sync", SYNCS)
def test_a_short_half_life_is_the_central_model_and_a_long_one_lags(sync: str) -> None:
    short, central = learn(SYNCS[sync], 4, 1e-3)
    long, same = learn(SYNCS[sync], 4, 100.0)
    assert central == same
    near, far = distance(short, central), distance(long, central)
    assert near < 0.5 * far
    assert far > 0


def distance(one: list[float], other: list[float]) -> float:
    return float((torch.tensor(one) - torch.tensor(other)).norm())


@pytest.mark.parametrize("sync", SYNCS)
def test_it_has_the_same_bits_in_any_number_of_processes(sync: str) -> None:
    (alone,) = run_ranks(learn, 1, SYNCS[sync], 4, 30.0)
    for found in run_ranks(learn, 2, SYNCS[sync], 4, 30.0):
        assert found == alone


def test_one_learner_has_one_too_and_trains_as_ever() -> None:
    average, central = learn(xb.adaptive(), 1, 30.0)
    plain = learn(xb.adaptive(), 1, 1e9)[1]
    assert central == plain
    assert average != central


def test_a_fleet_without_one_says_how_to_get_it() -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        Fleet(model, optimizer) as fleet,
        pytest.raises(xb.InputError, match="give ema=SAMPLES"),
        fleet.averaged(),
    ):
        pass


@pytest.mark.parametrize("half_life", [0.0, -1.0, float("nan"), float("inf")])
def test_a_half_life_that_is_none_is_refused(half_life: float) -> None:
    model = small_net()
    with pytest.raises(xb.InputError, match="is not possible: give a half-life in samples"):
        Fleet(model, torch.optim.SGD(model.parameters(), lr=0.1), ema=half_life)


def buffers_in_averaged() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Arrays(torch.randn(40, 5), torch.zeros(40, dtype=torch.long), classes=1)
    with Fleet(model, optimizer, ema=10.0) as fleet:
        for inputs, _ in fleet.batches(data, batch_size=4, epochs=1):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        before = model[1].running_mean.clone()
        with fleet.averaged():
            model[1].running_mean.fill_(7.0)
        return before, model[1].running_mean


def test_what_is_done_to_buffers_inside_ends_with_it() -> None:
    before, after = buffers_in_averaged()
    assert torch.equal(before, after)
