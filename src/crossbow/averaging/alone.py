"""Alone: one learner, which is its own average."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from crossbow.averaging.guard import Guard
from crossbow.engines.sequential import Own


class Alone:
    """Plain PyTorch: the model is left as it is, and so is every step."""

    turn = 0
    weight = 1.0

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self.guard = Guard([])
        """There is nobody to be guarded, and nothing to be put back to."""
        self.follow: Callable[[Callable[[], list[Tensor]]], None] | None = None
        """Told at the beginning of a round of the weights, for those who want them."""

    def round_begins(self) -> None:
        """Tell the follower."""
        if self.follow:
            self.follow(self._weights)

    def central_rows(self) -> list[Tensor]:
        """A copy of the weights, a row for each parameter."""
        return [weight.clone() for weight in self._weights()]

    def rest(self) -> None:
        """Nothing to average."""

    @contextmanager
    def central_aboard(self, rows: Sequence[Tensor] | None = None) -> Iterator[None]:
        """The model is the central model; with weights given, it holds these and then its own."""
        if rows is None:
            yield
            return
        own, buffers = self._weights(), list(self._model.buffers())
        values = [buffer.clone() for buffer in buffers]
        learning = [p for p in self._model.parameters() if p.requires_grad]
        for parameter, row in zip(learning, rows, strict=True):
            parameter.data = row
        try:
            yield
        finally:
            for parameter, weight in zip(learning, own, strict=True):
                parameter.data = weight
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)

    def settle(self) -> None:
        """There is nothing to average."""

    def learners(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """There is nobody to compare with."""
        return []

    def owns(self) -> list[Own]:
        """What the learner has to itself."""
        return [Own(self._optimizer.state, torch.get_rng_state())]

    def take_owns(self, owns: Sequence[Own]) -> None:
        """Give it that."""
        self._optimizer.state, random_state = owns[0]
        torch.set_rng_state(random_state)

    def pack(self, weights: Mapping[str, Tensor]) -> list[Tensor]:
        """Rows of these weights."""
        return [weights[name] for name, p in self._model.named_parameters() if p.requires_grad]

    def restart(self) -> None:
        """The learner is at the central model already."""

    def state_dict(self) -> dict[str, Any]:
        """There is nobody to share with."""
        return {}

    def learner_states(self) -> list[dict[str, Any]]:
        """The learner's weights and buffers."""
        return [{"weights": self._weights(), "buffers": list(self._model.buffers())}]

    def load_state_dict(
        self, shared: Mapping[str, Any], learners: Sequence[Mapping[str, Any]]
    ) -> None:
        """Go on from there."""
        (own,) = learners
        places = [*self._weights(), *self._model.buffers()]
        for place, value in zip(places, [*own["weights"], *own["buffers"]], strict=True):
            place.copy_(value)

    def _weights(self) -> list[Tensor]:
        return [p.data for p in self._model.parameters() if p.requires_grad]
