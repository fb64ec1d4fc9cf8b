"""Divergence: how far learners stand apart, and whether they go the same way.

    distance = sqrt(mean_j |w_j - m|^2)         from the mean m of the learners
    cosine   = mean over pairs i < j of cos(v_i, v_j)    v_j: learner j's move in the last step

The mean cosine of all pairs needs no pair: with unit vectors u_j = v_j / |v_j|,
|sum_j u_j|^2 = k + k * (k - 1) * cosine. So each rank sums its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Divergence:
    """How learners stand to each other."""

    distance: float
    """Root mean square of their distances to the mean."""
    relative_distance: float
    """That, over the length of the mean."""
    cosine: float
    """Of their last moves, averaged over pairs; NaN for one learner, or where one didn't move."""


def square_distance(rows: Sequence[Sequence[Tensor]], mean: Sequence[Tensor]) -> float:
    """sum_j |w_j - m|^2; a row is one tensor a block."""
    return math.fsum(
        float((part.double() - center.double()).square().sum())
        for row in rows
        for part, center in zip(row, mean, strict=True)
    )


def unit_sum(moves: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """sum_j v_j / |v_j|, a tensor a block in float64."""
    total = [torch.zeros_like(part, dtype=torch.float64) for part in moves[0]]
    for move in moves:
        length = math.sqrt(math.fsum(float(part.double().square().sum()) for part in move))
        for into, part in zip(total, move, strict=True):
            into.add_(part.double(), alpha=1 / length if length else math.nan)
    return total


def divergence(
    square_distances: float, sum_of_units: Sequence[Tensor], mean: Sequence[Tensor], k: int
) -> Divergence:
    """Put together what the ranks have summed over all k learners."""
    distance = math.sqrt(square_distances / k)
    length = math.sqrt(math.fsum(float(part.double().square().sum()) for part in mean))
    square = math.fsum(float(part.square().sum()) for part in sum_of_units)
    cosine = (square - k) / (k * (k - 1)) if k > 1 else math.nan
    return Divergence(distance, distance / length if length else math.inf, cosine)
