"""Objective: from a batch to its loss, as one module around the user's model."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
"""(inputs, targets)"""


class Objective(nn.Module):
    """The loss of a batch, as a function of the model's parameters."""

    def __init__(
        self, model: nn.Module, run: Callable[[Tensor], Tensor], loss: Callable[..., Tensor]
    ) -> None:
        """Begin.

        Args:
            model: whose parameters learn.
            run: calls the model: under autocast, say.
            loss: of (outputs, targets).
        """
        super().__init__()
        self.model = model
        self._calls = run, loss  # in a tuple: what is called may be the module itself

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch."""
        run, loss = self._calls
        return loss(run(inputs), targets)


class Engine(Protocol):
    """Computes the gradients of a rank's learners."""

    name: str

    def gradients(self, batches: Sequence[Batch], scales: Tensor | None = None) -> Iterator[Tensor]:
        """For each learner in turn: leave its gradients in the parameters, and yield its loss.

        Whoever asks for the next one has moved the learner, so that the next one is aboard.

        Args:
            batches: one for each learner, or fewer in a round in which the last ones rest.
            scales: (m,) that the learners' losses are multiplied with for their gradients.
        """


class AtOnce(Engine, Protocol):
    """Computes them for all learners at once, before the first one moves."""

    objective: Objective

    def compute(
        self, batches: Sequence[Batch], scales: Tensor | None = None
    ) -> tuple[Tensor, Sequence[Sequence[Tensor | None]]]:
        """Return the losses (m,), and of each parameter the learners' gradients."""


def laid_out(gradient: Tensor | None, stride: Sequence[int]) -> Tensor | None:
    """The gradient with these strides, its parameter's: fused optimizers take memory as it lies."""
    if gradient is None or gradient.stride() == tuple(stride):
        return gradient
    same = torch.empty_strided(
        gradient.shape, tuple(stride), dtype=gradient.dtype, device=gradient.device
    )
    return same.copy_(gradient)


def fits(batches: Sequence[Batch], learners: int) -> bool:
    """Whether there is a batch for each learner, all of one size."""
    return len(batches) == learners and len({len(inputs) for inputs, _ in batches}) == 1
