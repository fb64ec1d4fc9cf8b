"""Sequential: the learners of a rank one after another, in the user's own model.

There is one model and one optimizer, the user's. Boarding a learner points the parameters at its
row and the buffers at its live ones, and gives the optimizer and torch's random stream what is its
own.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crossbow.arena import Arena, Block
from crossbow.engines.objective import Batch
from crossbow.errors import InputError


class Place(NamedTuple):
    """Where a module holds something by name."""

    name: str
    owner: dict[str, Any]
    key: str
    held: Any


class Own(NamedTuple):
    """What a learner has to itself, apart from weights and buffers."""

    optimizer_state: Any
    random_state: Tensor


class InTurn:
    """Gradients one learner after another: those of the learner aboard."""

    name = "sequential"

    def __init__(
        self, objective: Callable[[Tensor, Tensor], Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        """Begin.

        Args:
            objective: the loss of a batch (inputs, targets).
            optimizer: of the model.
        """
        self._objective, self._optimizer = objective, optimizer

    def gradients(self, batches: Sequence[Batch], scales: Tensor | None = None) -> Iterator[Tensor]:
        """Yield losses, with the gradients in the parameters."""
        for number, (inputs, targets) in enumerate(batches):
            loss = self._objective(inputs, targets)
            self._optimizer.zero_grad()
            scale = None if scales is None else scales[number].to(loss.dtype)
            loss.backward(scale)  # type: ignore[no-untyped-call]
            yield loss.detach()


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
        self._places, self._buffer_places = _places(model), _buffer_places(model)
        self._frozen = [(name, p) for name, p in parameters.items() if not p.requires_grad]
        self._optimizer = optimizer
        self._arena, self._learners = arena, learners
        copies = range(arena.copies)
        self._rows = [[_row_views(arena, copy, j) for j in learners] for copy in copies]
        self._live = [_live_views(arena, j) for j in learners]
        self._optimizer_states: list[Any] = [optimizer.state]
        self._optimizer_states += [_copy_of(optimizer.state) for _ in learners[1:]]
        self._random_states = list(random_states)
        self._parity, self._aboard = 0, 0
        self.is_holding = False
        """Whether the model holds other tensors than a learner's."""
        _point(self._buffers, self._live[0])
        _point(self._parameters, self._rows[0][0])
        torch.set_rng_state(self._random_states[0])

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What learns, in the arena's order."""
        return self._parameters

    @property
    def names(self) -> list[str]:
        """Of the parameters."""
        return self._names

    def share_state(self) -> None:
        """Let all learners of this rank have the optimizer's state: they make the same moves."""
        self._optimizer_states = [self._optimizer.state] * len(self._live)

    def cross(self, parity: int) -> None:
        """Point the parameters of the learner aboard at its row of this parity."""
        self.check()
        self._parity = parity
        _point(self._parameters, self._rows[parity][self._aboard])

    def check(self) -> None:
        """Refuse to go on with a model that isn't the learner's any more."""
        if self.is_holding:
            raise InputError("the model holds the central model: train outside of central()")
        self._check_untouched()

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
        """Let the model hold these tensors, in the arena's order, and then the learner again.

        What is drawn meanwhile doesn't count: the learner's random stream goes on where it was.
        """
        self._check_untouched()
        self.reclaim_buffers()
        with torch.random.fork_rng(devices=[]):
            _point(self._parameters, parameters)
            _point(self._buffers, buffers)
            self.is_holding = True
            try:
                yield
            finally:
                self.is_holding = False
                for _, owner, key, held in self._buffer_places:
                    owner[key] = held
                _point(self._parameters, self._rows[self._parity][self._aboard])
                _point(self._buffers, self._live[self._aboard])

    def reclaim_buffers(self) -> None:
        """Take the values of buffers that the model made anew: `self.count = self.count + 1`."""
        for name, owner, key, held in self._buffer_places:
            found = owner.get(key)
            if found is not held:
                if found is None or (found.shape, found.dtype) != (held.shape, held.dtype):
                    raise InputError(
                        f"buffer {name!r} changed its shape or dtype after the fleet adopted the "
                        "model: learners can average buffers of one shape only"
                    )
                held.copy_(found.detach())
                owner[key] = held

    def leave(self) -> None:
        """Give the model memory of its own again, with the weights of the learner aboard."""
        for tensors in (self._parameters, self._buffers):
            _point(tensors, [tensor.detach().clone() for tensor in tensors])

    def __len__(self) -> int:
        return len(self._rows[0])

    @property
    def parity(self) -> int:
        """Of the rows that the learner aboard was boarded with."""
        return self._parity

    def stacked(self, parity: int) -> dict[str, Tensor]:
        """All learners' parameters of this parity as views (m, ...) of their rows, by name."""
        return _stacks(
            self._arena.parameters,
            self._learners,
            [block.rows[parity] for block in self._arena.parameters],
        )

    def stacked_buffers(self) -> dict[str, Tensor]:
        """All learners' live buffers as views (m, ...) of their rows, by name."""
        blocks = self._arena.buffers
        return _stacks(blocks, self._learners, [b.live for b in blocks if b.live is not None])

    def owns(self) -> list[Own]:
        """What each learner has to itself."""
        self._random_states[self._aboard] = torch.get_rng_state()
        pairs = zip(self._optimizer_states, self._random_states, strict=True)
        return [Own(*pair) for pair in pairs]

    def take_owns(self, owns: Sequence[Own]) -> None:
        """Give each learner something to itself."""
        self._optimizer_states = [own.optimizer_state for own in owns]
        self._random_states = [own.random_state for own in owns]
        self._optimizer.state = self._optimizer_states[self._aboard]
        torch.set_rng_state(self._random_states[self._aboard])

    def forget_one(self, index: int) -> None:
        """Start the optimizer of one learner anew."""
        self._optimizer_states[index].clear()

    def forget(self) -> None:
        """Start the optimizers of all learners anew."""
        for state in self._optimizer_states:
            state.clear()

    def _check_untouched(self) -> None:
        """Notice a parameter that was moved out of its row, or that only now begins to learn."""
        for name, owner, key, held in self._places:
            if owner.get(key) is not held:
                raise _moved(name)
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise InputError(
                    f"{name!r} was frozen when the fleet adopted the model, and learns now: "
                    "close() the fleet and make a new one"
                )
        expected = self._rows[self._parity][self._aboard]
        for name, parameter, view in zip(self._names, self._parameters, expected, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                raise _moved(name)


def _moved(name: str) -> InputError:
    return InputError(
        f"{name!r} was replaced or moved after the fleet adopted the model: "
        "change the model (its device, dtype or layers) before making the Fleet"
    )


def _places(model: nn.Module) -> list[Place]:
    """All places of modules and parameters; a tied parameter has several."""
    return [
        Place(f"{path}.{key}".lstrip("."), owner, key, held)
        for path, module in model.named_modules()
        for owner in (module._modules, module._parameters)
        for key, held in owner.items()
    ]


def _buffer_places(model: nn.Module) -> list[Place]:
    return [
        Place(f"{path}.{key}".lstrip("."), module._buffers, key, held)
        for path, module in model.named_modules()
        for key, held in module._buffers.items()
        if held is not None
    ]


def _copy_of(state: Any) -> Any:
    """An optimizer's state for another learner: the parameters, its keys, are the same."""
    return defaultdict(dict, {key: copy.deepcopy(values) for key, values in state.items()})


def _point(tensors: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    for tensor, place in zip(tensors, places, strict=True):
        tensor.data = place


def _stacks(
    blocks: Sequence[Block], learners: Sequence[int], rows: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Views (m, ...) of neighboring rows (k, n), by the tensors' names."""
    found = {}
    for block, all_rows in zip(blocks, rows, strict=True):
        mine = all_rows[learners[0] : learners[-1] + 1]
        for name, slot in zip(block.layout.names, block.layout.slots, strict=True):
            shape, stride = (len(learners), *slot.shape), (mine.stride(0), *slot.stride)
            offset = mine.storage_offset() + slot.offset
            found[name] = mine.as_strided(shape, stride, offset)
    return found


def _row_views(arena: Arena, parity: int, learner: int) -> list[Tensor]:
    blocks = arena.parameters
    place = arena.places[learner]
    return [view for b in blocks for view in b.layout.views(b.rows[parity, place])]


def _live_views(arena: Arena, learner: int) -> list[Tensor]:
    blocks = arena.buffers
    return [view for b in blocks if b.live is not None for view in b.layout.views(b.live[learner])]
