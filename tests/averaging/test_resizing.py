"""Learners come and go: every sample once, the central model unmoved, the same bits anywhere."""

from collections import Counter
from functools import partial
from itertools import pairwise

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.nn import functional as F

import crossbow as xb
from crossbow.data.datasets import Arrays
from crossbow.fleet import Fleet
from crossbow.stats.noise import NoiseMeter

SYNCS = {"sma": xb.sma(), "lag 1": xb.adaptive(lag=1), "lag 0": xb.adaptive(lag=0)}
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
}
CHANGES = {3: 5, 6: 2, 8: 7, 9: 3}  # after so many rounds


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3)
    )


def data(n: int = 150) -> Arrays:
    stream = torch.Generator().manual_seed(2)
    inputs = torch.randn(n, 4, generator=stream)
    inputs[:, 0] = torch.arange(n) / n
    return Arrays(inputs, torch.randint(0, 3, (n,), generator=stream), 3)


def numbers(inputs: torch.Tensor, n: int = 150) -> list[int]:
    return (inputs[:, 0] * n).round().long().tolist()


def train(sync: str, optimizer: str, start: int, changes: dict[int, int], ema=None):
    """In a rank: what was read, the central model's bytes, and how many learners there were."""
    model = net()
    moves = OPTIMIZERS[optimizer](model.parameters())
    fleet = Fleet(model, moves, SYNCS[sync], learners=start, ema=ema)
    read, sizes, rounds = [], [], 0
    with fleet:
        for inputs, targets in fleet.batches(data(), 3, epochs=1):
            read += numbers(inputs)
            moves.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            moves.step()
            if fleet.is_between_rounds:
                rounds += 1
                sizes.append(fleet.learners)
                if rounds in changes:
                    fleet.resize(changes[rounds])
        state = {key: value.numpy().tobytes() for key, value in fleet.state_dict().items()}
        if ema:
            with fleet.averaged():
                state |= {key: v.numpy().tobytes() for key, v in model.state_dict().items()}
        assert fleet.samples == 150
    return read, state, sizes


@pytest.mark.parametrize("start", [1, 4])
@pytest.mark.parametrize("sync", SYNCS)
def test_every_sample_is_read_once_while_learners_come_and_go(sync, start):
    changes = {**CHANGES, 10: 1} if start == 1 else CHANGES
    read, _, sizes = train(sync, "sgd", start, changes)
    assert Counter(read) == dict.fromkeys(range(150), 1)
    assert sizes[:9] == [start] * 3 + [5] * 3 + [2] * 2 + [7]


@pytest.mark.parametrize(("sync", "optimizer"), [("sma", "adam"), ("lag 1", "adam")])
def test_the_same_changes_give_the_same_bits_in_one_process_and_in_two(sync, optimizer, one_thread):
    plan = (sync, optimizer, 4, CHANGES, 60.0)
    read, state, sizes = train(*plan)
    both = run_ranks(train, 2, *plan)
    assert sorted(both[0][0] + both[1][0]) == sorted(read)
    assert [both[0][2], both[1][2]] == [sizes, sizes]
    assert both[0][1] == state


def test_learners_come_and_go_between_hosts(one_thread):
    plan = ("lag 1", "sgd", 4, CHANGES)
    both = run_ranks(train, [1, 1], *plan)
    assert Counter(both[0][0] + both[1][0]) == dict.fromkeys(range(150), 1)
    assert both[0][1] == both[1][1]


def stepped(fleet: Fleet, rounds: int) -> None:
    for step in range(rounds):
        for learner in fleet.mine:
            stream = torch.Generator().manual_seed(100 * step + learner)
            inputs = torch.randn(5, 4, generator=stream)
            fleet.optimizer.zero_grad()
            fleet.model(inputs).square().mean().backward()
            fleet.optimizer.step()


@pytest.mark.parametrize("ks", [(1, 3), (4, 2), (2, 6), (3, 1)])
@pytest.mark.parametrize("sync", SYNCS)
def test_a_change_leaves_the_central_model_and_old_learners_optimizers(sync, ks):
    before, after = ks
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with Fleet(model, optimizer, SYNCS[sync], learners=before, ema=1.0) as fleet:
        stepped(fleet, 4)
        fleet.samples = 40
        fleet._look(fleet._average.central_rows)
        states = [own.optimizer_state for own in fleet._average.owns()]
        streams = [own.random_state for own in fleet._average.owns()]
        central = fleet.state_dict()
        fleet.resize(after)
        assert fleet.learners == after
        assert all(torch.equal(central[k], v) for k, v in fleet.state_dict().items())
        with fleet.averaged():
            assert all(torch.equal(central[k], v) for k, v in model.state_dict().items())
        owns = fleet._average.owns()
        for old, own in zip(states, owns, strict=False):
            assert own.optimizer_state is old
        assert [own.optimizer_state for own in owns[before:]] == [{}] * max(0, after - before)
        assert all(torch.equal(a, b.random_state) for a, b in zip(streams, owns, strict=False))
        assert len({own.random_state.numpy().tobytes() for own in owns}) == after
        stepped(fleet, 2)


def test_the_gain_goes_on_from_what_was_measured():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Fleet(model, optimizer, xb.adaptive(), learners=2) as fleet:
        stepped(fleet, 40)
        fleet.resize(4)
        noise = fleet.gain.meter._totals()
        assert fleet.gain.value == pytest.approx(
            (noise[0] + noise[1]) / (noise[0] / 4 + noise[1]), rel=1e-6
        )


@pytest.mark.parametrize("pieces", [(4, 4), (16, 15), (15, 16), (6, 3)])
def test_a_meter_of_other_pieces_says_about_the_same(pieces):
    one, other = NoiseMeter(pieces[0], 4), NoiseMeter(pieces[1], 8)
    for turn in range(5):
        for piece in range(pieces[0]):
            one.add(piece, 8.0 + 0.1 * turn, 16.0)
    other.inherit(one)
    assert other._totals() == pytest.approx(one._totals(), rel=1e-6)
    assert other.gain > one.gain
    assert other.read().scale == pytest.approx(one.read().scale, rel=1e-6)


def test_a_first_move_after_a_change_has_no_lead():
    """At a constant slope momentum is steady, and so is each move of the mean."""
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    places = []
    with Fleet(model, optimizer, xb.adaptive(2.0, lag=0), learners=2) as fleet:
        for step in range(40):
            for _ in fleet.mine:
                optimizer.zero_grad()
                model(torch.ones(2, 3, dtype=torch.float64)).mean().backward()
                optimizer.step()
            places.append(fleet.state_dict()["weight"].sum().item())
            if step == 29:
                fleet.resize(3)
                for own in fleet._average.owns():  # the new one is at full speed, too
                    own.optimizer_state[model.weight] = {
                        "momentum_buffer": torch.full((1, 3), 2.0, dtype=torch.float64)
                    }
    moves = [b - a for a, b in pairwise(places)]
    assert moves[29:32] == pytest.approx(moves[27:30], rel=1e-6)


REFUSED = {
    "none": (0, "0 learners can't be shared by 1 ranks"),
    "unstable": (9, "alpha 0.2 is unstable for 9 learners"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_is_refused_and_the_fleet_goes_on(case):
    learners, message = REFUSED[case]
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Fleet(model, optimizer, xb.sma(alpha=0.2, momentum=0.0), learners=4) as fleet:
        with pytest.raises(xb.InputError, match=message):
            fleet.resize(learners)
        stepped(fleet, 2)
        assert fleet.learners == 4


def test_a_change_within_a_round_is_refused():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Fleet(model, optimizer, xb.sma(), learners=2) as fleet:
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        with pytest.raises(xb.InputError, match="come and go between rounds only"):
            fleet.resize(3)
