"""Divergence equals its definition, pair by pair."""

import math
from itertools import combinations

import pytest
import torch
from tests.averaging.test_synchronous import small_loss, small_net
from tests.ranks import run_ranks
from torch.nn import functional as F

import crossbow as xb
from crossbow.fleet import Fleet
from crossbow.stats.divergence import divergence, square_distance, unit_sum


@pytest.mark.parametrize("k", [2, 3, 7])
def test_it_equals_its_definition(k: int) -> None:
    torch.manual_seed(k)
    rows, moves = torch.randn(k, 50), torch.randn(k, 50) + 0.5
    mean = rows.double().mean(0)
    parts = [[row[:20], row[20:]] for row in rows]
    units = unit_sum([[move[:20], move[20:]] for move in moves])
    center = [mean[:20], mean[20:]]
    found = divergence(square_distance(parts, center), units, center, k)
    spread = (rows.double() - mean).square().sum(1).mean().sqrt()
    cosines = [F.cosine_similarity(a, b, dim=0) for a, b in combinations(moves.double(), 2)]
    assert found.distance == pytest.approx(spread.item())
    assert found.relative_distance == pytest.approx((spread / mean.norm()).item())
    assert found.cosine == pytest.approx(torch.stack(cosines).mean().item())


def test_who_did_not_move_has_no_direction() -> None:
    still = [[torch.zeros(3)], [torch.ones(3)]]
    found = divergence(0.0, unit_sum(still), [torch.ones(3)], 2)
    assert math.isnan(found.cosine)


def diverge(sync: xb.Averaging, learners: int) -> tuple[float, ...]:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with Fleet(model, optimizer, sync=sync, learners=learners) as fleet:
        for step in range(6):
            for learner in fleet.mine:
                optimizer.zero_grad()
                small_loss(model, learner, step).backward()
                optimizer.step()
        found = fleet.divergence()
    return (found.distance, found.relative_distance, found.cosine)


SYNCS = {"sma": xb.sma(), "lag 1": xb.adaptive(lag=1), "lag 0": xb.adaptive(lag=0)}


@pytest.mark.parametrize("sync", SYNCS)
def test_a_fleet_says_the_same_from_any_number_of_ranks(sync: str) -> None:
    (alone,) = run_ranks(diverge, 1, SYNCS[sync], 4)
    assert alone[0] > 0
    assert -1 / 3 <= alone[2] <= 1
    for found in run_ranks(diverge, 2, SYNCS[sync], 4):
        assert found == pytest.approx(alone, rel=1e-9)


def test_one_learner_has_nobody_to_diverge_from() -> None:
    model = small_net()
    with Fleet(model, torch.optim.SGD(model.parameters(), lr=0.1)) as fleet:
        assert fleet.divergence() is None
