"""Guard: a learner gone bad is found before what it holds reaches the others.

One weight that is no number makes the whole sum of a row none, and an average of rows hands it on
to everybody. So each learner's row is summed up after its move, which reads it once. A bad one is
put back at the central model, with an optimizer that begins anew, and its move doesn't count.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from crossbow.errors import DivergedError

LARGEST_MEAN = 1e6
"""Weights of which the mean is larger have exploded, whatever the model."""

MOST, WITHIN = 3, 20
"""A learner that goes bad so often within so many of its steps won't learn anything."""


class Guard:
    """Looks after the learners of one rank."""

    def __init__(self, learners: Sequence[int]) -> None:
        """Begin with learners that are well.

        Args:
            learners: of this rank.
        """
        self.found: list[int] = []
        """The learners that went bad, in order."""
        self.trouble: DivergedError | None = None
        """Why to end the run, if there is reason to."""
        self._learners = list(learners)
        self._steps = [0 for _ in learners]
        self._last: list[deque[int]] = [deque(maxlen=MOST) for _ in learners]

    def passes(self, own: int, rows: Sequence[Tensor]) -> bool:
        """Whether a learner of this rank is well, after its move; a bad one is counted.

        Args:
            own: which of them.
            rows: what it holds, floating-point or not.
        """
        self._steps[own] += 1
        if all(_is_sound(row) for row in rows):
            return True
        self.found.append(self._learners[own])
        last = self._last[own]
        last.append(self._steps[own])
        if len(last) == MOST and last[-1] - last[0] < WITHIN:
            self.trouble = DivergedError(
                f"learner {self._learners[own]} left the numbers {MOST} times within {WITHIN} of "
                "its steps, and was put back at the central model each time: try a lower --lr, or "
                "a warm-up, and look for samples that are no numbers"
            )
        return False


def _is_sound(row: Tensor) -> bool:
    """Whether all are numbers, and not absurdly large; on a GPU that isn't asked: it would wait."""
    if not row.is_floating_point() or row.device.type != "cpu":
        return True
    total = row.sum(dtype=torch.float32 if row.itemsize < 4 else None).item()
    return abs(total) <= LARGEST_MEAN * row.numel()  # which is false of NaN
