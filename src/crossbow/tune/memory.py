"""Memory: how many learners a machine has room for, told before they are made.

A learner needs its rows in the arena and the state of its optimizer. A rank needs the activations
and gradients of the learner at work, one set, for its learners take turns.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from crossbow.arena import Arena, adoptable_buffers, adoptable_parameters, plan
from crossbow.averaging.family import Averaging, Pulled
from crossbow.comm.shared import Carver
from crossbow.fleet import share

SHARE_OF_FREE = 0.8
"""Of the memory that is free, learners may take so much."""


@dataclass(frozen=True)
class Footprint:
    """What learners need, in bytes."""

    learner_bytes: int
    rank_bytes: int

    def of(self, learners: int, ranks: int) -> int:
        """All that so many need."""
        return learners * self.learner_bytes + ranks * self.rank_bytes

    def more_learners(self, device: torch.device) -> int:
        """How many more learners there is room for, beside those at work."""
        free = free_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
        return int(SHARE_OF_FREE * free // self.learner_bytes)

    def most_learners(self, ranks: int, free: int | None = None) -> int:
        """How many learners there is room for."""
        room = SHARE_OF_FREE * (free_bytes() if free is None else free)
        return int((room - ranks * self.rank_bytes) // self.learner_bytes)


def footprint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    averaging: Averaging,
    ranks: int,
    activations: int,
) -> Footprint:
    """Count what a learner of this model needs, once the optimizer has made a step.

    Args:
        model: whose tensors learners have copies of.
        optimizer: of the model.
        averaging: that learners are kept together by.
        ranks: that share them.
        activations: bytes that a forward pass keeps.
    """
    parameters, buffers = adoptable_parameters(model), adoptable_buffers(model)
    layouts = plan(parameters), plan(buffers)

    def arena_bytes(learners: int) -> int:
        carver, is_pulled = Carver(), isinstance(averaging, Pulled)
        shares = share(learners, ranks)
        Arena(*layouts, shares, carver, ranks_keep=is_pulled, copies=2 if is_pulled else 1)
        return carver.used

    state = sum(
        value.nbytes
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor)
    )
    gradients = sum(p.nbytes for _, p in parameters)
    row_bytes = (arena_bytes(2 * ranks) - arena_bytes(ranks)) // ranks
    return Footprint(row_bytes + state, activations + gradients)


class Activations(saved_tensors_hooks):
    """Counts what a forward pass keeps for the backward pass, each tensor once."""

    def __init__(self) -> None:
        self._kept: dict[int, int] = {}
        super().__init__(self._keep, lambda kept: kept)

    @property
    def bytes(self) -> int:
        """All that was kept."""
        return sum(self._kept.values())

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._kept[storage.data_ptr()] = storage.nbytes()
        return tensor


def free_bytes() -> int:
    """Memory that can be had without swapping, as Linux and its control groups say."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    free = next((int(s.split()[1]) * 1024 for s in lines if s.startswith("MemAvailable")), 0)
    limit, used = (
        _number(Path("/sys/fs/cgroup", name)) for name in ("memory.max", "memory.current")
    )
    return free if limit is None or used is None else min(free, limit - used)


def _number(path: Path) -> int | None:
    """What a control group's file says; None if it says that there is no limit, or isn't there."""
    try:
        said = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(said) if said.isdecimal() else None
