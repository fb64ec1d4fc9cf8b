"""A run that was captured and restored anywhere goes on bit for bit."""

import copy
import pickle
from functools import partial

import pytest
import torch
from tests.ranks import run_ranks
from tests.test_fleet import assert_same, learn, small_net

import crossbow as xb
from crossbow.averaging.family import AVERAGINGS, parse
from crossbow.fleet import Captured, Fleet

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "fused": partial(torch.optim.Adam, lr=0.01, fused=True),
    "asgd": partial(torch.optim.ASGD, lr=0.05),
}
SYNCS = [
    *AVERAGINGS,
    "allreduce:accumulate=3,scale=adaptive",
    "adaptive:lag=0",
    "adaptive:lag=1",
    "sma:alpha=0.3,momentum=0.5",
]
STEPS = 6


def trained(make_optimizer, sync, learners, first, steps, captured=None):
    """Learn for some steps; return the central model and the state after each of them."""
    model = small_net()
    optimizer = make_optimizer(model.parameters())
    torch.manual_seed(3)
    found = []
    with Fleet(model, optimizer, parse(sync), learners=learners, ema=40) as fleet:
        if captured:
            fleet.restore(captured, first * 6 * learners)
        for step in range(first, first + steps):
            fleet.samples = step * 6 * learners
            fleet._average.round_begins()
            learn(model, optimizer, 1, fleet.mine, first=step)
            captured = fleet.capture()
            found.append((fleet.state_dict(), captured))
    return found


@pytest.mark.parametrize("learners", [1, 3])
@pytest.mark.parametrize("sync", SYNCS)
def test_any_averaging_goes_on_bit_for_bit_from_every_step(sync, learners):
    assert_goes_on("sgd", sync, learners)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("learners", [1, 2])
def test_any_optimizer_goes_on_bit_for_bit_from_every_step(optimizer, learners):
    assert_goes_on(optimizer, "adaptive", learners)


def assert_goes_on(optimizer, sync, learners):
    make = OPTIMIZERS[optimizer]
    whole = trained(make, sync, learners, 0, STEPS)
    for step in range(1, STEPS):
        rest = trained(make, sync, learners, step, STEPS - step, whole[step - 1][1])
        for (model, state), (expected, expected_state) in zip(rest, whole[step:], strict=True):
            assert_same(model, expected)
            assert_same_state(state, expected_state)


def assert_same_state(actual, expected) -> None:
    assert flat(actual) == flat(expected)


def flat(tree) -> object:
    """The tree with its tensors as bytes."""
    if isinstance(tree, torch.Tensor):
        return tree.numpy().tobytes()
    if isinstance(tree, dict):
        return {key: flat(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [flat(value) for value in tree]
    return tree


def together(captures) -> Captured:
    """What the ranks captured, in one."""
    return Captured(captures[0].shared, {j: s for c in captures for j, s in c.learners.items()})


def of_a_rank(sync, first, steps, captured=None):
    """In a rank: the central model's bytes at the end, and what was captured there."""
    model, state = trained(OPTIMIZERS["sgd"], sync, 4, first, steps, captured)[-1]
    return flat(model), state


def in_a_rank(*args):
    """The same with pickled tensors: a process that ends takes its memory with it."""
    args = [pickle.loads(arg) if isinstance(arg, bytes) else arg for arg in args]
    return pickle.dumps(of_a_rank(*args))


def on_ranks(world, *args):
    args = [pickle.dumps(arg) if isinstance(arg, Captured) else arg for arg in args]
    answers = run_ranks(in_a_rank, world, *args)
    assert not [answer for answer in answers if isinstance(answer, str)], answers
    found = [pickle.loads(answer) for answer in answers]
    return found[0][0], together([state for _, state in found])


@pytest.mark.parametrize("sync", ["adaptive:lag=1", "sma", "easgd:period=2"])
def test_learners_go_on_bit_for_bit_on_another_number_of_ranks(sync):
    expected, _ = of_a_rank(sync, 0, 5)
    _, captured = on_ranks(2, sync, 0, 2)
    _, captured = of_a_rank(sync, 2, 1, captured)
    model, _ = on_ranks(3, sync, 3, 2, captured)
    assert model == expected


@pytest.mark.parametrize("sync", ["adaptive:lag=1", "sma", "slowmo:period=2"])
def test_learners_of_two_hosts_go_on_bit_for_bit_on_two_hosts(sync):
    expected, _ = on_ranks([1, 2], sync, 0, 5)
    _, captured = on_ranks([1, 2], sync, 0, 2)
    model, _ = on_ranks([1, 2], sync, 2, 3, captured)
    assert model == expected


def test_capturing_between_moves_of_one_round_is_refused():
    model = small_net()
    with Fleet(model, optimizer := OPTIMIZERS["sgd"](model.parameters()), learners=2) as fleet:
        learn(model, optimizer, 1)
        with pytest.raises(xb.InputError, match="between rounds only"):
            fleet.capture()
        learn(model, optimizer, 1)
        fleet.capture()


def test_what_was_captured_does_not_move_with_the_learners():
    captured = trained(OPTIMIZERS["adamw"], "sma", 2, 0, 3)[0][1]
    before = copy.deepcopy(captured)
    trained(OPTIMIZERS["adamw"], "sma", 2, 1, 2, captured)
    assert_same_state(captured, before)
