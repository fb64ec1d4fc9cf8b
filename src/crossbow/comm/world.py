"""World: which rank this process is, as torchrun counts.

A launcher (torchrun, srun, `crossbow train`) tells a process its place through the environment; a
process that was started alone is a world of one. Ranks of one host share memory, and the first rank
of each host speaks for it to the other hosts.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from crossbow.errors import CrossbowError, InputError

T = TypeVar("T")

_PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class PeerError(CrossbowError):
    """Another rank ended, or can't be reached."""


@dataclass(frozen=True)
class World:
    """A rank's place among all ranks."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "World":
        """Read what the launcher said; without a launcher, a world of one."""
        said = os.environ if environment is None else environment
        if "WORLD_SIZE" not in said:
            return cls()
        missing = [name for name in _PLACES if name not in said]
        if missing:
            raise InputError(
                f"the launcher set WORLD_SIZE but not {', '.join(missing)}: start with torchrun"
            )
        return cls(*(int(said[name]) for name in _PLACES))

    @property
    def first_local(self) -> int:
        """The first rank of this host: launchers number a host's ranks without gaps."""
        return self.rank - self.local_rank

    @property
    def spans_hosts(self) -> bool:
        """Whether there is more than one host."""
        return self.local_size < self.size

    def gather(self, value: Any) -> list[Any]:
        """Collect a small value from every rank, in rank order; all ranks call this together."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value)
        except RuntimeError as error:  # as torch says that a connection ended
            reason = " ".join(str(error).split())
            raise PeerError(f"another rank can't be reached any more: {reason}") from error
        return values

    def agree(self, prepare: Callable[[], T]) -> T:
        """Return what `prepare` returns; raise on every rank what it raises on any."""
        try:
            value, error = prepare(), None
        except CrossbowError as raised:
            value, error = None, raised
        for said in self.gather(error):
            if said is not None:
                raise said
        return cast(T, value)

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's small value on every rank; all ranks call this together."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Give every rank rank 0's values, in place; all ranks call this together."""
        if self.size > 1:
            for tensor in tensors:
                values = tensor.detach().cpu().contiguous()
                dist.broadcast(values.view(-1).view(torch.uint8), src=0)  # bytes: Gloo lacks int16
                tensor.data.copy_(values)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Sum up all ranks' values, in place; all ranks call this together."""
        if self.size > 1:
            for tensor in tensors:
                values = tensor.detach().cpu()
                dist.all_reduce(values)
                tensor.data.copy_(values)


@contextmanager
def joined(world: World) -> Iterator[World]:
    """Be a rank of torch.distributed while this lasts, unless the program already is one."""
    started = join(world)
    try:
        yield world
    finally:
        if started:
            dist.destroy_process_group()


def join(world: World) -> bool:
    """Start torch.distributed if there are peers and nobody did; return whether this did."""
    if world.size == 1 or dist.is_initialized():
        return False
    try:
        dist.init_process_group("gloo")
    except dist.DistNetworkError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise InputError(
            f"the ranks can't meet at {address} ({error}): is the port in use? "
            "give the launcher another --master-port"
        ) from error
    return True
