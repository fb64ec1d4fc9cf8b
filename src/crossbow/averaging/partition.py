"""Partition: one batch over ranks of unequal speed, so that all finish together.

What a rank needs for b samples is not b over its speed: a step has a fixed cost, too. So each rank
has a curve,

    t_r(b) = a_r + c_r * b        0 without samples

and of all partitions into whole samples one is taken whose slowest rank is fastest.
"""

import heapq
import math
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

WORTHWHILE = 0.04
"""What a new partition must promise to save of a step before it is taken: figures are noisy."""

_MEMORY = 0.6  # of what was measured a span ago, how much still counts
_SPREAD = 0.05  # batches that differ by less than this share say little about the fixed cost


class Curve(NamedTuple):
    """How long a rank takes for a number of samples."""

    fixed: float
    """Seconds, whatever the number."""
    each: float
    """Seconds a sample."""

    def seconds(self, samples: int) -> float:
        """How long so many take; none take no time."""
        return self.fixed + self.each * samples if samples else 0.0


def partition(
    total: int, curves: Sequence[Curve], at_least: Sequence[int] | None = None
) -> list[int]:
    """Share samples out so that the slowest rank is as fast as can be.

    >>> partition(30, [Curve(0, 1), Curve(0, 2)])
    [20, 10]
    >>> partition(3, [Curve(0, 1), Curve(9, 1)])
    [3, 0]

    Args:
        total: of samples.
        curves: of each rank.
        at_least: how many samples each rank gets in any case.
    """
    least = [0] * len(curves) if at_least is None else at_least
    assert total >= sum(least)
    low, high = 0.0, min(curve.seconds(total) for curve in curves)
    for _ in range(60):  # the time in which all together do this much, and no more
        middle = (low + high) / 2
        fits = sum(map(_fitting, curves, repeat(middle), least)) <= total
        low, high = (middle, high) if fits else (low, middle)
    sizes = list(map(_fitting, curves, repeat(low), least))
    ends = [(c.seconds(size + 1), r) for r, (c, size) in enumerate(zip(curves, sizes, strict=True))]
    heapq.heapify(ends)
    for _ in range(total - sum(sizes)):  # what rounding left: each goes where it ends soonest
        rank = ends[0][1]
        sizes[rank] += 1
        heapq.heapreplace(ends, (curves[rank].seconds(sizes[rank] + 1), rank))
    return sizes


def _fitting(curve: Curve, seconds: float, at_least: int) -> int:
    """How many samples a rank can do in this time, or has to."""
    return max(at_least, math.floor((seconds - curve.fixed) / curve.each))


def slowest(sizes: Sequence[int], curves: Sequence[Curve]) -> float:
    """Seconds that a step takes."""
    return max(curve.seconds(size) for size, curve in zip(sizes, curves, strict=True))


def rebalanced(
    sizes: Sequence[int],
    curves: Sequence[Curve],
    at_least: Sequence[int] | None = None,
    worthwhile: float = WORTHWHILE,
) -> list[int]:
    """The best partition of as many samples, if it is worth leaving this one for.

    >>> rebalanced([8, 8], [Curve(0, 1), Curve(0, 1.02)])
    [8, 8]
    """
    better = partition(sum(sizes), curves, at_least)
    saves = 1 - slowest(better, curves) / slowest(sizes, curves)
    return better if saves > worthwhile else list(sizes)


class CurveMeter:
    """Learns a rank's curve from steps that it made, and forgets."""

    def __init__(self) -> None:
        self._count = self._sum_b = self._sum_t = self._sum_bb = self._sum_bt = 0.0

    def add(self, samples: int, seconds: float) -> None:
        """Hear how long a step of so many samples took, on average over a span."""
        sums = self._count, self._sum_b, self._sum_t, self._sum_bb, self._sum_bt
        news = 1.0, samples, seconds, samples**2, samples * seconds
        both = (_MEMORY * old + new for old, new in zip(sums, news, strict=True))
        self._count, self._sum_b, self._sum_t, self._sum_bb, self._sum_bt = both

    def read(self) -> Curve | None:
        """The line through what was heard; through the origin as long as all steps were alike."""
        if not self._sum_b or not self._sum_t:
            return None
        b, t = self._sum_b / self._count, self._sum_t / self._count
        variance = self._sum_bb / self._count - b * b
        covariance = self._sum_bt / self._count - b * t
        # a little of the line through the origin keeps noise from making up a fixed cost
        prior = (_SPREAD * b) ** 2
        each = (covariance + prior * t / b) / (variance + prior)
        each = min(max(each, 0.25 * t / b), t / b)
        return Curve(t - each * b, each)
