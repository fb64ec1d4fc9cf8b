"""Batches follow the speed of their ranks, and what is computed stays that of one big batch."""

import time

import pytest
import torch
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

import crossbow as xb
from crossbow.comm.world import World
from crossbow.data.datasets import Arrays
from crossbow.errors import InputError
from crossbow.fleet import Fleet, share
from crossbow.pace import Pace, Stopwatch, Times, remarks, sized_rounds

BATCH, SAMPLES = 12, 600


def small_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def small_set() -> Arrays:
    torch.manual_seed(2)
    inputs = torch.randn(SAMPLES, 5, dtype=torch.float64)
    return Arrays(inputs, torch.randint(0, 3, (SAMPLES,)), 3)


def train_at_pace(
    delays_ms: list[float], epochs: float
) -> tuple[list[float], list[tuple[int, int]]]:
    """Train with a rank that takes so long for each sample; return weights and what it read."""
    model, read = small_net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Fleet(model, optimizer, sync=xb.allreduce()) as fleet:
        delay_s = delays_ms[fleet.world.rank] / 1e3
        for x, y in fleet.batches(small_set(), BATCH, epochs, partition="speed"):
            read.append(fleet.reading)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            time.sleep(delay_s * len(x))
            optimizer.step()
        with fleet.central():
            weights = parameters_to_vector(model.parameters()).tolist()
    return weights, read


def train_on_big_batches(epochs: float) -> Tensor:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Fleet(model, optimizer, learners=1) as fleet:
        for x, y in fleet.batches(small_set(), 2 * BATCH, epochs):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


def test_unequal_batches_follow_speed_and_are_one_big_batch() -> None:
    first, second = run_ranks(train_at_pace, 2, [1.0, 3.0], 5.1)
    assert not isinstance(first, str), first
    for weights, _ in (first, second):
        found = torch.tensor(weights, dtype=torch.float64)
        torch.testing.assert_close(found, train_on_big_batches(5.1), rtol=1e-9, atol=1e-12)
    sizes = [[stop - start for start, stop in read] for _, read in (first, second)]
    assert sizes[0][0] == sizes[1][0] == BATCH
    late = len(sizes[0]) - 20
    assert sizes[0][late] >= 15, sizes
    together = sorted(stretch for _, read in (first, second) for stretch in read)
    assert [start for start, _ in together[1:]] == [stop for _, stop in together[:-1]]
    assert (together[0][0], together[-1][1]) == (0, 3060)


@pytest.mark.parametrize("sizes", [[4, 2], [1, 9, 5], [7]])
@pytest.mark.parametrize("stop", [0, 5, 60, 61, 64])
def test_sized_rounds_read_every_sample_once(sizes: list[int], stop: int) -> None:
    plans = [list(sized_rounds(0, stop, sizes, j)) for j in range(len(sizes))]
    read = sorted(stretch for plan in plans for _, stretch in plan if stretch)
    assert [i for start, end in read for i in range(start, end)] == list(range(stop))
    assert len({tuple(before for before, _ in plan) for plan in plans}) == 1


class Choir(World):
    """A world whose other ranks took what the test says."""

    others: list[Times]

    def gather(self, value: Times) -> list[Times]:
        return [value, *self.others]


def test_sizes_follow_what_ranks_took() -> None:
    world = Choir()
    pace = Pace([range(0, 1), range(1, 3)], 16, world)
    assert pace.sizes == [16, 16, 16]
    took = Times()
    for _ in range(6):
        rounds, mine, theirs = 10, pace.sizes[0], sum(pace.sizes[1:])
        world.others = [Times(rounds, 0.004 * theirs * rounds)]
        took = Times(took.rounds + rounds, took.busy_s + 0.001 * mine * rounds)
        pace.follow(took)
    assert pace.sizes == [39, 5, 4]
    assert pace.rounds >= 4


def test_a_learner_is_never_without_a_sample() -> None:
    world = Choir()
    pace = Pace([range(0, 1), range(1, 3)], 4, world)
    took = Times()
    for _ in range(8):
        world.others = [Times(10, 10 * (5 + sum(pace.sizes[1:])))]
        took = Times(took.rounds + 10, took.busy_s + 0.01 * pace.sizes[0])
        pace.follow(took)
    assert pace.sizes == [10, 1, 1]


def test_a_rank_that_says_nothing_changes_nothing() -> None:
    world = Choir()
    pace = Pace([range(0, 1), range(1, 2)], 8, world)
    for number in range(3):
        world.others = [Times()]
        pace.follow(Times(10 * number, 1.0 * number))
    assert pace.sizes == [8, 8]


def test_a_stopwatch_counts_what_was_not_waited() -> None:
    watch = Stopwatch()
    for waited_s in (5.0, 5.0, 5.01, 5.01):
        watch.round_begins(waited_s)
        watch.reads(16)
        time.sleep(0.02)
    watch.forget_round()
    watch.round_begins(9.0)
    times = watch.times
    assert (times.rounds, times.samples) == (3, 48)
    assert times.waited_s == pytest.approx(0.01)
    assert times.busy_s == pytest.approx(0.05, abs=0.04)
    assert times.since(times) == Times()


def test_equal_ranks_call_for_no_remark() -> None:
    assert remarks([Times(10, 1.0, 0.0, 0.101), Times(10, 1.05, 0.0, 0.112)]) == []


def test_rounds_that_vary_are_spoken_of() -> None:
    (said,) = remarks([Times(10, 1.0, 0.0, 0.101), Times(10, 1.0, 0.0, 0.2)])
    assert said.startswith("rank 1's rounds vary: 100 +- 100 ms")


def test_a_rank_that_hardly_helps_is_spoken_of() -> None:
    ranks = [Times(10, 1.0, 0.0, 0.1, 1000), Times(10, 1.0, 0.0, 0.1, 30)]
    (said,) = remarks(ranks)
    assert said.startswith("rank 1 adds 3.0 % to the others' speed at best: leave it out")
    assert remarks([times._replace(samples=1000) for times in ranks]) == []


def train_by_sma() -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Fleet(model, optimizer, sync=xb.sma(), learners=2) as fleet:
        fleet.batches(small_set(), BATCH, partition="speed")


def test_what_can_not_be_followed_is_refused() -> None:
    with pytest.raises(InputError, match=r"need sync=allreduce\(\)"):
        train_by_sma()
    with pytest.raises(InputError, match="unknown partition 'spede'; did you mean 'speed'"):
        xb.Config(partition="spede")


@pytest.mark.parametrize(
    ("learners", "speeds", "counts"),
    [
        (3, [2, 1], [2, 1]),
        (5, [1, 0.25], [4, 1]),
        (6, [1, 1, 1], [2, 2, 2]),
        (7, [1, 1, 1], [3, 2, 2]),
        (4, [9, 1, 1], [2, 1, 1]),
        (4, None, [4]),
    ],
)
def test_faster_ranks_run_more_learners(
    learners: int, speeds: list[float] | None, counts: list[int]
) -> None:
    shares = share(learners, len(counts), speeds)
    assert [len(part) for part in shares] == counts
    assert [j for part in shares for j in part] == list(range(learners))


@pytest.mark.parametrize("speeds", [[1], [1, 0], [1, -1], [1, float("nan")]])
def test_impossible_speeds_are_refused(speeds: list[float]) -> None:
    with pytest.raises(InputError, match="give 2 numbers above 0"):
        share(4, 2, speeds)


def train_three(speeds: list[float] | None) -> tuple[int, list[float]]:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Fleet(model, optimizer, learners=3, speeds=speeds) as fleet:
        for x, y in fleet.batches(small_set(), BATCH, 0.5):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        with fleet.central():
            return len(fleet.mine), parameters_to_vector(model.parameters()).tolist()


def test_who_runs_the_learners_changes_no_bit() -> None:
    alone = train_three(None)[1]
    assert run_ranks(train_three, 2, [1.0, 2.0]) == [(1, alone), (2, alone)]


def train_and_move(
    rank_speeds: list[float],
) -> tuple[list[int], list[tuple[int, int]], list[float]]:
    """Train three learners that change ranks after a while."""
    model, counts, read = small_net(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Fleet(model, optimizer, learners=3, sync=xb.sma(momentum=0)) as fleet:
        counts.append(len(fleet.mine))
        for x, y in fleet.batches(small_set(), BATCH, 1):
            read.append(fleet.reading)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if fleet.samples == 5 * 3 * BATCH and fleet.is_between_rounds:
                fleet.resize(3, rank_speeds)
        counts.append(len(fleet.mine))
        with fleet.central():
            return counts, read, parameters_to_vector(model.parameters()).tolist()


def test_learners_move_to_the_faster_rank_and_every_sample_is_read_once() -> None:
    first, second = run_ranks(train_and_move, 2, [1.0, 2.0])
    assert (first[0], second[0]) == ([2, 1], [1, 2])
    together = sorted([*first[1], *second[1]])
    assert [i for start, stop in together for i in range(start, stop)] == list(range(SAMPLES))
    assert first[2] == second[2]
