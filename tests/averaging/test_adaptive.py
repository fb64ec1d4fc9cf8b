"""Learners at their mean: equal to the transcription, the same bits anywhere, one gain for all."""

from functools import partial

import pytest
import torch
from tests import reference
from tests.averaging.test_synchronous import (
    OPTIMIZERS,
    STEPS,
    assert_same_bits,
    central_of,
    small_loss,
    small_net,
    train_a_fleet,
)
from tests.ranks import run_ranks
from torch.nn.utils import parameters_to_vector

import crossbow as xb
from crossbow.averaging.adoption import momentum_of
from crossbow.fleet import Fleet


def run_fleet(make_optimizer, k, gain, lead, lag, steps=STEPS):
    """Rows, mean and gains of a fleet after so many steps."""
    model = small_net()
    optimizer = make_optimizer(model.parameters())
    sync = xb.adaptive("measured" if gain is None else gain, lead, lag)
    with Fleet(model, optimizer, sync=sync, learners=k) as fleet:
        gains = []
        for step in range(steps):
            for learner in range(k):
                optimizer.zero_grad()
                small_loss(model, learner, step).backward()
                optimizer.step()
            gains.append(fleet._average.terms.gain.value)
        rows = []
        for learner in range(k):
            fleet._average.engine.board(learner, 0)
            rows.append(parameters_to_vector(model.parameters()).detach().clone())
        fleet._average.engine.board(0, 0)
        return rows, torch.tensor(central_of(fleet), dtype=torch.float64), gains


def assert_equals_the_transcription(make_optimizer, k, gain, lead, lag, rtol=1e-10):
    rows, mean, gains = run_fleet(make_optimizer, k, gain, lead, lag)
    expected = reference.adaptive(
        small_net(), make_optimizer, small_loss, k, STEPS, gain, lead, lag
    )
    torch.testing.assert_close(gains, expected[2], rtol=1e-5, atol=1e-5)
    for actual, wanted in zip([*rows, mean], [*expected[0], expected[1]], strict=True):
        torch.testing.assert_close(actual, wanted, rtol=rtol, atol=1e-2 * rtol)


@pytest.mark.parametrize("k", [2, 3, 5, 8])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("optimizer", ["sgd with momentum", "adamw"])
@pytest.mark.parametrize(("gain", "lead"), [(1.0, 0.0), (1.7, 0.9), (2.0, 0.0)])
def test_learners_at_their_mean_equal_the_transcription(k, lag, optimizer, gain, lead):
    assert_equals_the_transcription(OPTIMIZERS[optimizer], k, gain, lead, lag)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer_moves_as_it_moves_by_itself(optimizer, lag):
    assert_equals_the_transcription(OPTIMIZERS[optimizer], 3, 1.5, 0.9, lag)


@pytest.mark.parametrize("k", [2, 3, 8])
@pytest.mark.parametrize("lag", [0, 1])
def test_the_measured_gain_equals_the_transcription(k, lag):
    make = OPTIMIZERS["sgd with momentum"]  # gradients are measured in float32
    assert_equals_the_transcription(make, k, None, 0.9, lag, rtol=1e-4)


def test_the_mean_moves_alike_with_and_without_lag_on_a_straight_slope():
    """The gradient is the same everywhere: so what is late shows in no weight of the mean."""
    ends = []
    for lag in (0, 1):
        model = torch.nn.Linear(3, 1, bias=False).double()
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with Fleet(model, optimizer, sync=xb.adaptive(3.0, lag=lag), learners=4) as fleet:
            for step in range(20):
                for learner in range(4):
                    optimizer.zero_grad()
                    slope = torch.Generator().manual_seed(4 * step + learner)
                    inputs = torch.randn(2, 3, dtype=torch.float64, generator=slope)
                    model(inputs).mean().backward()
                    optimizer.step()
            ends.append(central_of(fleet))
    assert ends[0] == pytest.approx(ends[1], rel=1e-12)
    assert min(map(abs, ends[0])) > 0.01


def test_gain_k_without_lag_is_linear_scaling_of_the_learning_rate():
    """Four learners in one step: one learner with all their samples, at four times the rate."""
    k, rate = 4, 0.02
    _, mean, _ = run_fleet(partial(torch.optim.SGD, lr=rate), k, "linear", 0.0, 0)
    plain = small_net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=k * rate)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(small_loss(plain, learner, step) for learner in range(k)) / k).backward()
        optimizer.step()
    torch.testing.assert_close(parameters_to_vector(plain.parameters()).detach(), mean)


@pytest.mark.parametrize(
    ("optimizer", "momentum"),
    [("sgd", 0.0), ("sgd with momentum", 0.9), ("nesterov", 0.9), ("adamw", 0.9), ("asgd", 0.0)],
)
def test_the_lead_is_the_optimizers_own_momentum(optimizer, momentum):
    assert momentum_of(OPTIMIZERS[optimizer](small_net().parameters())) == momentum


@pytest.mark.parametrize(("k", "lag"), [(1, 1), (4, 1), (5, 0), (16, 0)])
def test_few_learners_have_slack_and_many_stand_together(k, lag):
    assert xb.adaptive().lag_of(k) == lag


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("model", ["lenet", "resnet8", "dropout"])
def test_the_same_learners_give_the_same_bits_in_any_number_of_processes(model, lag):
    sync = f"adaptive:lag={lag}"
    (expected,) = run_ranks(train_a_fleet, 1, model, 4, None, sync)
    for ranks in (2, 4):
        for state in run_ranks(train_a_fleet, ranks, model, 4, ranks, sync):
            assert_same_bits(state, expected)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("hosts", [(1, 1), (3, 1), (1, 2)])
def test_hosts_agree_with_one_host_to_rounding(hosts, lag):
    sync = f"adaptive:lag={lag}"
    (expected,) = run_ranks(train_a_fleet, 1, "dropout", 4, None, sync)
    first, *others = run_ranks(train_a_fleet, hosts, "dropout", 4, 1, sync)
    for other in others:
        assert_same_bits(other, first)
    for key, value in expected.items():
        assert first[key] == pytest.approx(value, rel=1e-3, abs=1e-4), key


def restart_midway(lag: int, learners: int) -> list[list[float]]:
    """Train, restart, train; return the mean before and after the restart, and at the end."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    with Fleet(model, optimizer, sync=xb.adaptive(2.0, lag=lag), learners=learners) as fleet:
        for step in range(20):
            if step == 10:
                found.append(central_of(fleet))
                fleet.restart()
                assert not any(optimizer.state.values())
                found.append(central_of(fleet))
            for learner in fleet.mine:
                optimizer.zero_grad()
                small_loss(model, learner, step).backward()
                optimizer.step()
        found.append(central_of(fleet))
    return found


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("world", [1, 2, (2, 1)])
def test_a_restart_keeps_the_mean_and_forgets_the_momentum(world, lag):
    (expected,) = run_ranks(restart_midway, 1, lag, 3)
    assert expected[0] == expected[1]
    for found in run_ranks(restart_midway, world, lag, 3):
        for actual, wanted in zip(found, expected, strict=True):
            assert actual == pytest.approx(wanted, rel=1e-10, abs=1e-12)


BAD = {
    "gain": ({"gain": 0}, "gain 0 is not possible"),
    "nan gain": ({"gain": float("nan")}, "gain nan is not possible"),
    "unknown gain": ({"gain": "cubic"}, "unknown gain 'cubic'"),
    "lead": ({"lead": -1}, "lead -1 is not possible"),
    "lag": ({"lag": 2}, "lag 2 is not possible: give 0 or 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_possible_is_refused(case):
    options, message = BAD[case]
    with pytest.raises(xb.InputError, match=message):
        xb.adaptive(**options)


def momentum_after(is_averaged: bool, steps: int = 30) -> list[float]:
    """The mean of four learners that stand together, their momentum buffers averaged or not."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with Fleet(model, optimizer, sync=xb.adaptive(2.0, lag=0), learners=4) as fleet:
        for step in range(steps):
            for learner in range(4):
                optimizer.zero_grad()
                small_loss(model, learner, step).backward()
                optimizer.step()
            if is_averaged:
                states = fleet._average.engine._optimizer_states
                for parameter in states[0]:
                    buffers = [state[parameter]["momentum_buffer"] for state in states]
                    mean = torch.stack(buffers).mean(0)
                    for buffer in buffers:
                        buffer.copy_(mean)
        return central_of(fleet)


def test_averaging_momentum_buffers_moves_the_mean_nowhere_where_all_stand_together():
    """Moves are linear in the buffers, so their mean doesn't ask whose they were."""
    assert momentum_after(True) == pytest.approx(momentum_after(False), rel=1e-9, abs=1e-12)
