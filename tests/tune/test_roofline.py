import pytest
import torch
from torch import nn

from crossbow.averaging.family import adaptive, sma
from crossbow.tune import memory
from crossbow.tune.memory import Activations, Footprint, footprint
from crossbow.tune.roofline import Machine, Pass, Roofline, counting, measure_rank

ONE = Machine(flops=1e9, memory_bytes=1e8, cache_bytes=1e9)


def test_flops_and_bytes_of_a_product_are_counted() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    with counting() as count:
        torch.mm(a, b)
    assert count.flops == 2 * 3 * 4 * 5
    assert count.bytes == 4 * (12 + 20 + 15)
    assert count.operations == 1


def test_views_move_nothing_and_writing_in_place_does() -> None:
    a = torch.zeros(8)
    with counting() as count:
        a.view(2, 4).t()
        a.add_(1.0)
    assert (count.bytes, count.operations) == (2 * 8 * 4, 1)


def test_a_pass_is_bound_by_what_takes_longest() -> None:
    compute = Pass("forward", flops=1e6, bytes=1e3, operations=1, seconds=2e-3)
    assert (compute.bound_by(ONE), compute.share(ONE)) == ("compute", 0.5)
    memory = Pass("update", flops=0, bytes=1e7, operations=1, seconds=0.2)
    assert (memory.bound_by(ONE), memory.share(ONE)) == ("memory", 0.5)
    cached = Pass("update", flops=0, bytes=1e6, operations=1, seconds=2e-3)
    assert (cached.bound_by(ONE), cached.share(ONE)) == ("memory", 0.5)
    idle = Pass("forward", flops=1e3, bytes=1e3, operations=50, seconds=2e-3)
    assert idle.bound_by(ONE) == "dispatch"


def test_a_roofline_is_shared_by_its_ranks_and_survives_json() -> None:
    roofline = Roofline(ONE, 2, (Pass("forward", 1e6, 1e3, 1, 2e-3),))
    assert roofline.one_rank.flops == ONE.flops / 2
    assert Roofline.from_json(roofline.to_json()) == roofline


def test_a_rank_can_do_something() -> None:
    found = measure_rank(0.03, torch.device("cpu"))
    assert found.flops > 1e8
    assert found.cache_bytes > found.memory_bytes / 2 > 1e7


def test_activations_are_counted_once() -> None:
    x = torch.ones(10, requires_grad=True)
    kept = Activations()
    with kept:
        (x.exp() * x).sum()
    assert kept.bytes == 2 * 40  # exp keeps its result and the product both factors


def test_a_learner_needs_its_rows_and_its_optimizers_state() -> None:
    model = nn.Linear(1024, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 1024)).sum().backward()
    row = 4 * 1024 * 64

    def learner_bytes(averaging: object) -> int:
        return footprint(model, optimizer, averaging, ranks=1, activations=7).learner_bytes

    assert learner_bytes(adaptive()) // row == 3  # the row, and its letter twice
    before = learner_bytes(sma())
    optimizer.step()
    assert learner_bytes(sma()) - before == row  # the momentum
    assert footprint(model, optimizer, sma(), ranks=1, activations=7).rank_bytes == row + 7


def test_learners_fit_into_what_is_free() -> None:
    needed = Footprint(learner_bytes=100, rank_bytes=50)
    assert needed.most_learners(ranks=2, free=1000) == (800 - 100) // 100
    assert needed.of(3, ranks=2) == 400


def test_more_learners_fit_into_most_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 1000)
    needed = Footprint(learner_bytes=100, rank_bytes=50)
    assert needed.more_learners(torch.device("cpu")) == 8
