"""No partition of a batch is faster than the one that is found, and curves are learned."""

import random
from itertools import product

import pytest

from crossbow.averaging.partition import Curve, CurveMeter, partition, rebalanced, slowest


def random_curves(stream: random.Random, ranks: int) -> list[Curve]:
    return [
        Curve(stream.choice([0.0, stream.uniform(0, 5)]), stream.uniform(0.1, 3))
        for _ in range(ranks)
    ]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("at_least", [0, 1])
def test_no_other_partition_is_faster(seed: int, at_least: int) -> None:
    stream = random.Random(seed)
    ranks, total = stream.randint(1, 3), stream.randint(3, 14)
    curves = random_curves(stream, ranks)
    sizes = partition(total, curves, [at_least] * ranks)
    assert sum(sizes) == total
    assert min(sizes) >= at_least
    everything = product(range(at_least, total + 1), repeat=ranks)
    best = min(slowest(other, curves) for other in everything if sum(other) == total)
    assert slowest(sizes, curves) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(20))
def test_large_batches_end_together(seed: int) -> None:
    stream = random.Random(seed)
    curves = random_curves(stream, 8)
    sizes = partition(10_000, curves)
    assert sum(sizes) == 10_000
    times = [curve.seconds(size) for curve, size in zip(curves, sizes, strict=True) if size]
    assert max(times) - min(times) <= 2 * max(curve.each for curve in curves)


def test_equal_ranks_get_equal_parts() -> None:
    assert partition(64, [Curve(0.01, 0.001)] * 4) == [16] * 4


def test_a_rank_whose_fixed_cost_is_the_whole_step_gets_nothing() -> None:
    assert partition(16, [Curve(0.001, 0.001), Curve(0.5, 0.001)]) == [16, 0]
    assert partition(16, [Curve(0.001, 0.001), Curve(0.5, 0.001)], [1, 1]) == [15, 1]


def test_a_small_promise_changes_nothing() -> None:
    curves = [Curve(0, 1.0), Curve(0, 1.1)]
    assert rebalanced([16, 16], curves) == [16, 16]
    assert rebalanced([16, 16], [Curve(0, 1.0), Curve(0, 2.0)]) == [22, 10]
    assert rebalanced([21, 11], [Curve(0, 1.0), Curve(0, 2.02)]) == [21, 11]


def test_a_meter_finds_the_fixed_cost_from_unequal_steps() -> None:
    meter, stream = CurveMeter(), random.Random(0)
    for samples in [16, 32, 24, 8, 40, 16, 32, 24]:
        meter.add(samples, (0.010 + 0.002 * samples) * stream.uniform(0.98, 1.02))
    curve = meter.read()
    assert curve is not None
    assert curve.fixed == pytest.approx(0.010, rel=0.3)
    assert curve.each == pytest.approx(0.002, rel=0.1)


def test_steps_that_are_all_alike_say_nothing_of_a_fixed_cost() -> None:
    meter = CurveMeter()
    assert meter.read() is None
    for seconds in (0.031, 0.033, 0.032):
        meter.add(16, seconds)
    curve = meter.read()
    assert curve is not None
    assert curve.fixed == pytest.approx(0, abs=1e-9)
    assert curve.seconds(16) == pytest.approx(0.032, rel=0.02)


def test_a_changed_speed_is_followed_in_a_few_spans() -> None:
    meters, sizes, pace = [CurveMeter(), CurveMeter()], [16, 16], [1.0, 2.0]
    for span in range(24):
        if span == 12:
            pace = [4.0, 2.0]
        for meter, samples, each in zip(meters, sizes, pace, strict=True):
            if samples:
                meter.add(samples, 2 + each * samples)
        curves = [meter.read() or Curve(0, 1) for meter in meters]
        sizes = rebalanced(sizes, curves)
        if span == 11:
            assert sizes[0] in (20, 21, 22)
    assert sizes[0] in (10, 11, 12)
