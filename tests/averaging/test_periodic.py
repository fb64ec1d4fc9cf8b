"""Averaging once a period equals the papers, and gives the same bits wherever the learners run."""

from functools import partial

import pytest
import torch
from tests import reference
from tests.averaging.test_synchronous import (
    OPTIMIZERS,
    assert_close,
    assert_same_bits,
    central_of,
    small_loss,
    small_net,
    train_a_fleet,
)
from tests.ranks import run_ranks
from torch import Tensor
from torch.nn.utils import parameters_to_vector

import crossbow as xb
from crossbow.averaging.family import parse
from crossbow.fleet import Fleet

ROUNDS = 52  # and the last period of 5 is cut short


def rate(step: int) -> float:
    """It rises, and drops after half of the rounds."""
    return 0.05 * min(1.0, (step + 1) / 5) * (0.1 if step >= 26 else 1.0)


def central_after(sync, make_optimizer, k: int, rounds: int = ROUNDS) -> Tensor:
    model = small_net()
    optimizer = make_optimizer(model.parameters())
    with Fleet(model, optimizer, sync, learners=k) as fleet:
        for step in range(rounds):
            for learner in fleet.mine:
                optimizer.param_groups[0]["lr"] = rate(step)
                optimizer.zero_grad()
                small_loss(model, learner, step).backward()
                optimizer.step()
        fleet._average.settle()
        with fleet.central():
            return parameters_to_vector(model.parameters()).detach().clone()


def once_in(period: int, step: int) -> bool:
    return (step + 1) % period == 0 or step == ROUNDS - 1


def after_the_drop(period: int, step: int) -> bool:
    """Lin et al.: in each round until the rate has dropped."""
    return step <= 26 or (step - 26) % period == 0 or step == ROUNDS - 1


def the_mean(z: Tensor, mean: Tensor, rate: float) -> Tensor:
    return mean


METHODS = {
    "local_sgd": (xb.local_sgd(5), partial(once_in, 5), lambda: the_mean, False),
    "local_sgd 1": (xb.local_sgd(1), partial(once_in, 1), lambda: the_mean, False),
    "post_local_sgd": (xb.post_local_sgd(4), partial(after_the_drop, 4), lambda: the_mean, False),
    "slowmo": (xb.slowmo(5), partial(once_in, 5), lambda: reference.SlowMo(1.0, 0.7), False),
    "slowmo, reset": (
        xb.slowmo(3, 0.9, 0.5, reset=True),
        partial(once_in, 3),
        lambda: reference.SlowMo(0.9, 0.5),
        True,
    ),
    "diloco": (xb.diloco(5), partial(once_in, 5), lambda: reference.DiLoCo(0.7, 0.9), False),
}


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("optimizer", ["sgd with momentum", "nesterov", "adamw"])
@pytest.mark.parametrize("method", METHODS)
def test_a_method_equals_its_paper(method, optimizer, k):
    sync, meets, make_outer, resets = METHODS[method]
    make = OPTIMIZERS[optimizer]
    expected = reference.local_sgd(
        small_net(), make, small_loss, k, ROUNDS, meets, make_outer(), rate, resets=resets
    )
    torch.testing.assert_close(central_after(sync, make, k), expected, rtol=1e-10, atol=1e-12)


def test_diloco_without_momentum_at_rate_one_is_local_sgd():
    make = OPTIMIZERS["adamw"]
    one, other = xb.diloco(5, lr=1.0, momentum=0.0), xb.local_sgd(5)
    assert torch.equal(central_after(one, make, 3), central_after(other, make, 3))


def test_local_sgd_of_period_one_is_allreduce():
    make = OPTIMIZERS["sgd with weight decay"]
    one, other = central_after(xb.local_sgd(1), make, 3), central_after(xb.allreduce(), make, 3)
    torch.testing.assert_close(one, other)


def test_one_learner_with_an_outer_step_is_not_alone():
    make = OPTIMIZERS["sgd"]
    expected = reference.local_sgd(
        small_net(),
        make,
        small_loss,
        1,
        ROUNDS,
        partial(once_in, 5),
        reference.DiLoCo(0.5, 0.5),
        rate,
    )
    actual = central_after(xb.diloco(5, 0.5, 0.5), make, 1)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("period", "rounds"), [(1, 50), (4, 50), (4, 52), (7, 50)])
@pytest.mark.parametrize("optimizer", ["nesterov", "adamw", "sgd with weight decay"])
def test_elastic_averaging_equals_its_paper(optimizer, period, rounds):
    make, k, alpha = OPTIMIZERS[optimizer], 3, 0.2
    rows, z = reference.elastic(small_net(), make, small_loss, k, rounds, alpha, period)
    model = small_net()
    optimizer = make(model.parameters())
    with Fleet(model, optimizer, xb.eamsgd(alpha, period), learners=k) as fleet:
        for step in range(rounds):
            for learner in range(k):
                optimizer.zero_grad()
                small_loss(model, learner, step).backward()
                optimizer.step()
        places = [now for now, _ in fleet._average.learners()]
        for place, row in zip(places, rows, strict=True):
            views = fleet._average._arena.parameters[0].layout.views(place[0])
            actual = torch.cat([view.reshape(-1) for view in views])
            torch.testing.assert_close(actual, row, rtol=1e-10, atol=1e-12)
        rounds_since = rounds % period
        if not rounds_since:  # else the last pull shows only once the period is over
            with fleet.central():
                assert_close(model, z)


def test_easgd_is_model_averaging_without_momentum():
    make = OPTIMIZERS["adamw"]
    one, other = central_after(xb.easgd(0.2), make, 3), central_after(xb.sma(0.2, 0.0), make, 3)
    assert torch.equal(one, other)


@pytest.mark.parametrize("sync", ["slowmo:period=3", "easgd:period=3"])
def test_the_same_learners_give_the_same_bits_in_any_number_of_processes(sync):
    (expected,) = run_ranks(train_a_fleet, 1, "dropout", 5, None, sync)
    for state in run_ranks(train_a_fleet, 3, "dropout", 5, 3, sync):
        assert_same_bits(state, expected)


@pytest.mark.parametrize("sync", ["diloco:period=3", "easgd:period=3"])
def test_hosts_agree_with_one_host_to_rounding(sync):
    (expected,) = run_ranks(train_a_fleet, 1, "dropout", 4, None, sync)
    first, *others = run_ranks(train_a_fleet, (2, 1), "dropout", 4, 1, sync)
    for other in others:
        assert_same_bits(other, first)
    for key, value in expected.items():
        assert first[key] == pytest.approx(value, rel=1e-3, abs=1e-4), key


def restart_midway(sync: str, learners: int) -> list[list[float]]:
    """Train, restart within a period, train; the central model after the restart and at the end."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    with Fleet(model, optimizer, parse(sync), learners=learners) as fleet:
        for step in range(20):
            if step == 10:
                fleet.restart()
                found += [central_of(fleet), parameters_to_vector(model.parameters()).tolist()]
            for learner in fleet.mine:
                optimizer.zero_grad()
                small_loss(model, learner, step).backward()
                optimizer.step()
        found.append(central_of(fleet))
    return found


@pytest.mark.parametrize("sync", ["diloco:period=4", "easgd:period=4"])
def test_a_restart_within_a_period_puts_all_at_the_central_model(sync):
    (expected,) = run_ranks(restart_midway, 1, sync, 3)
    assert expected[0] == expected[1]
    for found in run_ranks(restart_midway, (1, 1), sync, 3):
        for actual, wanted in zip(found, expected, strict=True):
            assert actual == pytest.approx(wanted, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("local_sgd:period=0", "period 0 is not possible"),
        ("diloco:momentum=1", "momentum 1 is not possible"),
        ("diloco:lr=0", "lr 0 is not possible"),
        ("post_local_sgd:switch=0", "switch 0 is not possible"),
        ("slowmo:reset=3", "reset 3 of slowmo is not possible"),
    ],
)
def test_what_is_not_possible_is_refused(spec, message):
    with pytest.raises(xb.InputError, match=message):
        parse(spec)


def test_eamsgd_of_learners_without_momentum_is_refused():
    model = small_net()
    with pytest.raises(xb.InputError, match="learners with momentum of their own"):
        Fleet(model, torch.optim.SGD(model.parameters(), lr=0.1), xb.eamsgd(), learners=2)
