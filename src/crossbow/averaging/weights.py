"""Weights: a moving average of the central model, for any averaging and for one learner.

A model in motion is noisy, and the mean of where it has been is better than where it is: at a
constant learning rate by as much as a decay would give (Polyak and Juditsky, 1992; Izmailov et al.,
2018). The half-life is counted in samples, so it means the same for any number of learners.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

LOOKS_A_HALF_LIFE = 32
"""Weights are looked at so often: what is between two looks differs little."""


class MovingAverage:
    """An exponential moving average of rows of weights."""

    def __init__(self, half_life: float) -> None:
        """Begin with nothing.

        Args:
            half_life: samples after which weights count half.
        """
        self.half_life = half_life
        self.rows: list[Tensor] = []
        self._samples, self._weight = 0, 0.0

    def is_due(self, samples: int) -> bool:
        """Whether enough was read since the last look."""
        return samples - self._samples >= self.half_life / LOOKS_A_HALF_LIFE

    def take(self, rows: Sequence[Tensor], samples: int) -> None:
        """Look at the weights after so many samples in all.

        The first weights count as much as their share, and not as if they had stood there for ever.
        """
        keep = 0.5 ** ((samples - self._samples) / self.half_life)
        self._weight = keep * self._weight + 1 - keep
        self._samples = samples
        if not self.rows:
            self.rows = [row.detach().clone() for row in rows]
            return
        for mean, row in zip(self.rows, rows, strict=True):
            mean.lerp_(row, (1 - keep) / self._weight)

    def state_dict(self) -> dict[str, Any]:
        """All that was seen."""
        return {"rows": self.rows, "samples": self._samples, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was seen before."""
        self.rows = [row.clone() for row in state["rows"]]
        self._samples, self._weight = state["samples"], state["weight"]
