"""Scaling: float16 gradients kept from vanishing, for each learner by itself.

Small gradients underflow in float16, so the loss is scaled up before the backward pass and the
gradients down after it (Micikevicius et al., Mixed Precision Training, 2018, arXiv:1710.03740). A
scale is halved when a gradient overflows, and doubled after a while without. Each learner has a
scale of its own: one learner's overflow skips its own step and nobody else's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
"""Steps without an overflow after which a scale is doubled; torch's own default."""


class LossScales:
    """The scales of a rank's learners."""

    def __init__(self, learners: int, device: torch.device) -> None:
        """Begin, with the same scale for each."""
        self.values = torch.full((learners,), FIRST_SCALE, device=device)
        """(m,)"""
        self.skipped = 0
        """Steps that an overflow took, of all learners."""
        self._steps = [0] * learners

    def unscale(self, learner: int, parameters: Sequence[Tensor]) -> bool:
        """Scale a learner's gradients down; return whether all are finite, so that it may move."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        scale = self.values[learner]
        torch._foreach_mul_(gradients, scale.reciprocal())
        is_finite = bool(torch.stack([g.isfinite().all() for g in gradients]).all())
        self._steps[learner] = self._steps[learner] + 1 if is_finite else 0
        if not is_finite:
            self.skipped += 1
            scale.mul_(0.5)
        elif self._steps[learner] == GROWTH_INTERVAL:
            self._steps[learner] = 0
            scale.mul_(2.0)
        return is_finite
