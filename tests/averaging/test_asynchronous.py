"""Asynchronous methods: a repeated run equals the papers, and nothing is torn that must not be."""

import random
import time

import pytest
import torch
from tests import reference
from tests.averaging.test_synchronous import OPTIMIZERS, small_loss, small_net
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import crossbow as xb
from crossbow.averaging.family import parse
from crossbow.fleet import Fleet

K = 3
EVENTS = random.Random(4).choices(range(K), k=60)


def repeated(sync, make_optimizer, events=EVENTS) -> tuple[Tensor, list[int]]:
    """The central model after these learners' steps, one after another, and how stale they were."""
    model = small_net()
    optimizer = make_optimizer(model.parameters())
    counts = [0] * K
    with Fleet(model, optimizer, sync, learners=K) as fleet:
        fleet._average.repeat(events)
        for learner in events:
            assert fleet._average.turn == learner
            optimizer.zero_grad()
            small_loss(model, learner, counts[learner]).backward()
            optimizer.step()
            counts[learner] += 1
        with fleet.central():
            weights = parameters_to_vector(model.parameters()).detach().clone()
        return weights, fleet._average.take_staleness()


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "sgd with weight decay", "adamw"])
def test_asgd_is_a_parameter_server(optimizer, aware):
    make = OPTIMIZERS[optimizer]
    z, stale = reference.asgd(small_net(), make, small_loss, K, EVENTS, aware=aware)
    actual, measured = repeated(xb.asgd(aware=aware), make)
    assert_near(actual, z)
    assert measured == stale
    assert max(stale) > K


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("optimizer", ["nesterov", "sgd with weight decay", "adamw"])
def test_asynchronous_elastic_averaging_equals_its_paper(optimizer, period):
    make = OPTIMIZERS[optimizer]
    expected = reference.aeasgd(small_net(), make, small_loss, K, EVENTS, 0.2, period)
    assert_near(repeated(xb.aeasgd(0.2, period), make)[0], expected)


def test_hogwild_one_after_another_is_one_model_that_all_move():
    model = small_net()
    optimizers = [OPTIMIZERS["sgd with momentum"](model.parameters()) for _ in range(K)]
    counts = [0] * K
    for learner in EVENTS:
        model.zero_grad()
        small_loss(model, learner, counts[learner]).backward()
        optimizers[learner].step()
        counts[learner] += 1
    actual, stale = repeated(xb.hogwild(), OPTIMIZERS["sgd with momentum"])
    assert_near(actual, parameters_to_vector(model.parameters()).detach())
    assert len(stale) == len(EVENTS)


def central_after(sync: str, optimizer: str, learners: int, rounds: int = 50) -> list[float]:
    model = small_net()
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    jitter = random.Random(learners)
    with Fleet(model, optimizer, parse(sync), learners=learners) as fleet:
        for step in range(rounds):
            for learner in fleet.mine:
                optimizer.zero_grad()
                small_loss(model, learner, step).backward()
                time.sleep(jitter.random() * 0.002)
                optimizer.step()
        fleet._average.settle()
        with fleet.central():
            return parameters_to_vector(model.parameters()).tolist()


@pytest.mark.parametrize(("ranks", "optimizer"), [(1, "sgd"), (2, "nesterov")])
def test_staleness_zero_is_allreduce(ranks, optimizer):
    """With the sum of steps, so with a linear scale."""
    expected = central_after("allreduce:scale=linear", optimizer, 4)
    for found in run_ranks(central_after, ranks, "asgd:staleness=0", optimizer, 4):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("optimizer", ["sgd with momentum", "adamw"])
def test_pipelined_gradients_are_late_by_the_same_number_of_steps(optimizer, lag):
    make = OPTIMIZERS[optimizer]
    expected = reference.pipelined(small_net(), make, small_loss, 4, 50, lag).tolist()
    alone = central_after(f"pipelined:lag={lag}", optimizer, 4)
    assert alone == pytest.approx(expected, rel=1e-10, abs=1e-12)
    if optimizer == "adamw":
        assert run_ranks(central_after, 3, f"pipelined:lag={lag}", optimizer, 4) == [alone] * 3


class Level(nn.Module):
    """Its gradient is the same everywhere: so its weights are all equal, unless they are torn."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(30_000))

    def forward(self) -> Tensor:
        return self.weights.sum()


def stress(sync: str, rounds: int) -> tuple[bool, float, int]:
    """Train; whether the central model was ever uneven, where it ends, and this rank's steps."""
    model = Level()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-10)
    is_torn = False
    with Fleet(model, optimizer, parse(sync)) as fleet:
        for step in range(rounds):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            if step % 5 == 0:
                (row,) = fleet._average.central_rows()
                is_torn |= row[:30_000].min().item() != row[:30_000].max().item()
        fleet._average.settle()
        (row,) = fleet._average.central_rows()
        return is_torn, row[:30_000].mean().item(), len(fleet._average.take_staleness())


@pytest.mark.parametrize("sync", ["asgd:staleness=2", "hogwild"])
def test_eight_learners_tear_nothing_that_must_be_whole(sync):
    found = run_ranks(stress, 8, sync, 100)
    assert [steps for *_, steps in found] == [100] * 8
    if sync != "hogwild":  # whose steps overlap, and may be lost
        assert found == [(False, -800 / 2**10, 100)] * 8
    else:
        assert all(-800 / 2**10 <= end < 0 for _, end, _ in found)


def lead_of_the_fast_one(sync: str) -> int:
    """In a rank, the second of which is slow: by how many rounds this one was ahead."""
    model = Level()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lead = 0
    with Fleet(model, optimizer, parse(sync)) as fleet:
        for _ in range(12):
            optimizer.zero_grad()
            model().backward()
            own, other = fleet.mine[0], 1 - fleet.mine[0]
            events = fleet._average._store.events.tolist()
            lead = max(lead, events[own] - events[other])
            if own:
                time.sleep(0.03)
            optimizer.step()
        fleet._average.settle()
    return lead


def test_a_bound_holds_the_fast_ones_back():
    assert run_ranks(lead_of_the_fast_one, 2, "asgd:staleness=3")[0] == 3


def test_two_hosts_are_refused():
    for sync in ("asgd", "pipelined"):
        for answer in run_ranks(stress, (1, 1), sync, 1):
            assert answer.startswith(f"error: InputError: {sync} works within one host")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("asgd:staleness=-1", "staleness -1 is not possible"),
        ("asgd:aware=2", "aware 2 of asgd is not possible"),
        ("aeasgd:alpha=2", "alpha 2 is not possible"),
        ("pipelined:lag=0", "lag 0 is not possible"),
    ],
)
def test_what_is_not_possible_is_refused(spec, message):
    with pytest.raises(xb.InputError, match=message):
        parse(spec)
