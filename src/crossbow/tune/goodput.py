"""Goodput: how fast training gets on, and not only how fast samples are read.

k learners of batch b read k * b samples a step, and what their gradients say overlaps. With the
critical batch size B (stats/noise.py), a step of k learners is worth r = (b + B) / (b + B / k)
steps of one (AdaScale's gain), so a sample read by one of k is worth r / k of a sample that one
learner reads:

    efficiency = (b + B) / (k * b + B)
    goodput    = samples a second * efficiency

It is 1 for one learner, or where noise is all there is, and tends to 1/k where there is none. The
same holds of data-parallel training over k processes, whose global batch is k * b: so at the same
k and b the two compare by samples a second.
"""

import math

from crossbow.stats.noise import gain_of


def efficiency(learners: int, batch_size: int, critical_batch: float | None) -> float:
    """What a sample read by one of k learners is worth; 1 as long as the noise is not known.

    >>> efficiency(1, batch_size=16, critical_batch=100.0)
    1.0
    >>> efficiency(4, batch_size=16, critical_batch=16.0)
    0.4
    """
    if critical_batch is None or math.isinf(critical_batch):
        return 1.0
    return gain_of(critical_batch / batch_size, 1.0, learners) / learners


def goodput(
    samples_per_second: float, learners: int, batch_size: int, critical_batch: float | None
) -> float:
    """Samples a second, counted as those of one learner."""
    return samples_per_second * efficiency(learners, batch_size, critical_batch)
