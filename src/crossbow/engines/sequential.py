"""Sequential: the learners of a rank one after another, in the user's own model.

There is one model and one optimizer, the user's. Boarding a learner points the parameters at its
row and the buffers at its live ones, and gives the optimizer and torch's random stream what is its
own.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from crossbow.arena import Arena
from crossbow.errors import InputError


class Sequential:
    """The learners of a rank, of which one is aboard."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        arena: Arena,
        learners: Sequence[int],
        random_states: Sequence[Tensor],
    ) -> None:
        """Take the first learner aboard.

        Args:
            model: whose tensors the arena was laid out for.
            optimizer: of the model.
            arena: the rows of this host.
            learners: the rows of this rank.
            random_states: where torch's random stream begins for each of them.
        """
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        self._names = [name for block in arena.parameters for name in block.layout.names]
        self._parameters = [parameters[name] for name in self._names]
        self._buffers = [buffers[name] for b in arena.buffers for name in b.layout.names]
        self._optimizer = optimizer
        self._rows = [[_row_views(arena, parity, j) for j in learners] for parity in (0, 1)]
        self._live = [_live_views(arena, j) for j in learners]
        self._optimizer_states: list[Any] = [optimizer.state]
        self._optimizer_states += [defaultdict(dict) for _ in learners[1:]]
        self._random_states = list(random_states)
        self._parity, self._aboard = 0, 0
        _point(self._buffers, self._live[0])
        _point(self._parameters, self._rows[0][0])
        torch.set_rng_state(self._random_states[0])

    def cross(self, parity: int) -> None:
        """Point the parameters of the learner aboard at its row of this parity."""
        self._check_untouched()
        self._parity = parity
        _point(self._parameters, self._rows[parity][self._aboard])

    def board(self, index: int, parity: int) -> None:
        """Take the rank's learner `index` aboard, with its row of this parity."""
        if index == self._aboard:
            if parity != self._parity:
                self.cross(parity)
            return
        self._random_states[self._aboard] = torch.get_rng_state()
        torch.set_rng_state(self._random_states[index])
        self._optimizer.state = self._optimizer_states[index]
        self._parity, self._aboard = parity, index
        _point(self._buffers, self._live[index])
        _point(self._parameters, self._rows[parity][index])

    @contextmanager
    def holding(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> Iterator[None]:
        """Let the model hold these tensors, in the arena's order, and then the learner again."""
        self._check_untouched()
        _point(self._parameters, parameters)
        _point(self._buffers, buffers)
        try:
            yield
        finally:
            _point(self._parameters, self._rows[self._parity][self._aboard])
            _point(self._buffers, self._live[self._aboard])

    def forget(self) -> None:
        """Start the optimizers of all learners anew."""
        for state in self._optimizer_states:
            state.clear()

    def _check_untouched(self) -> None:
        """Notice a parameter that was moved out of its row."""
        expected = self._rows[self._parity][self._aboard]
        for name, parameter, view in zip(self._names, self._parameters, expected, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                raise InputError(
                    f"parameter {name!r} was replaced or moved after the fleet adopted the model: "
                    "change the model (its device, dtype or layers) before making the Fleet"
                )


def _point(tensors: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    for tensor, place in zip(tensors, places, strict=True):
        tensor.data = place


def _row_views(arena: Arena, parity: int, learner: int) -> list[Tensor]:
    blocks = arena.parameters
    return [view for b in blocks for view in b.layout.views(b.rows[parity, learner])]


def _live_views(arena: Arena, learner: int) -> list[Tensor]:
    blocks = arena.buffers
    return [view for b in blocks if b.live is not None for view in b.layout.views(b.live[learner])]
