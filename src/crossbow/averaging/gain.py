"""Gain: how much faster than one learner the common part of the learners' moves is taken.

One learner reads k batches in k steps and moves k times. k learners read them in one step, so their
common move has to be worth k of his where gradients are mostly noise, which the mean of k batches
averages out; and one of his where they are mostly signal, which k batches agree on. The measured
gain lies between, where the noise says it lies (stats/noise.py).
"""

import math
from collections.abc import Callable, Mapping

from crossbow.errors import InputError, check_choice
from crossbow.stats.noise import NoiseMeter

MEASURED = "measured"

RULES: Mapping[str, Callable[[int], float]] = {
    "linear": lambda k: float(k),
    "sqrt": lambda k: math.sqrt(k),
}
"""Gains that the number of learners decides."""


def check_gain(rule: str | float) -> None:
    """Refuse what is no gain."""
    if isinstance(rule, str):
        check_choice("gain", rule, [MEASURED, *RULES, "or a number"])
    elif isinstance(rule, bool) or not (math.isfinite(rule) and rule > 0):
        raise InputError(f"gain {rule} is not possible: give a finite number above 0")


class Gain:
    """The gain of k learners: measured, or fixed."""

    def __init__(self, rule: str | float, meter: NoiseMeter) -> None:
        """Begin.

        Args:
            rule: "measured", one of RULES, or a number.
            meter: what the noise is measured by, whether the gain follows it or not.
        """
        self.meter = meter
        self._fixed: float | None = None
        if isinstance(rule, str):
            self._fixed = RULES[rule](meter.k) if rule != MEASURED else None
        else:
            self._fixed = float(rule)

    @property
    def value(self) -> float:
        """The gain now; a measured one is at least 1 and at most k."""
        return self.meter.gain if self._fixed is None else self._fixed
