"""Wire: what passes between hosts, through a codec and a topology, with its bytes counted.

Whatever passes is a sum over hosts. What must be exact, or is small, goes as it is; moves may be
compressed. Moves are what is new since the last time: a codec must not be given weights, whose
every message would be as wrong as the codec is, but what they changed by, since what one message
leaves out the next ones bring.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from crossbow.comm.compress import (
    CASTS,
    Cast,
    Compression,
    OneBit,
    PowerSGD,
    Shapes,
    Speaker,
    Sum,
    TopK,
)
from crossbow.comm.topology import Members, Topology


class Channel(Protocol):
    """Adds up moves of the same tensors, time after time, and keeps what was left out."""

    def add_up(self, moves: Tensor) -> int:
        """Set moves, in place, to what is heard of all hosts' sum; return the bytes sent."""

    def state_dict(self) -> dict[str, Any]:
        """What is kept."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep what another kept."""

    def unsaid(self) -> Tensor:
        """What this host has yet to say, as a row of moves."""

    def keep(self, moves: Tensor) -> None:
        """Say this later, too."""


@dataclass(frozen=True)
class Route:
    """How to reach the other hosts."""

    compression: Compression = field(default_factory=lambda: Compression("none"))
    topology: Topology = field(default_factory=lambda: Topology("flat"))


@dataclass
class Traffic:
    """What this host has sent so far."""

    topology: str = ""
    """The one that is used, if there are other hosts."""
    sums: int = 0
    """How many rows were added up."""
    sent_bytes: int = 0
    whole_bytes: int = 0
    """What these rows hold: what one would send without compression, to one other host."""


class Wire:
    """The way to the other hosts."""

    def __init__(
        self, group: dist.ProcessGroup, route: Route, like: Tensor, traffic: Traffic
    ) -> None:
        """Reach out; all hosts do so together.

        Args:
            group: one rank of each host.
            route: compression of moves, and topology of sums.
            like: the largest row that will pass.
            traffic: where to count.
        """
        self.group, self.traffic = group, traffic
        self._compression = route.compression
        self._sum, traffic.topology = route.topology.bind(group, like)

    @property
    def is_exact(self) -> bool:
        """Whether moves pass as they are, so that sums of weights may pass in their place."""
        return self._compression.is_exact

    def add_up(self, values: Tensor) -> None:
        """Add up all hosts' numbers, exactly and in place."""
        self._count(values, self._sum(values))

    def channel(self, shapes: Shapes, like: Tensor) -> "Moves":
        """Make the way of the moves of tensors of these shapes, of the type of `like`.

        What is kept of half-precision moves is kept in single precision.
        """
        wide = torch.promote_types(like.dtype, torch.float32)
        packed = like.new_empty(sum(math.prod(shape) for shape in shapes), dtype=wide)
        channel = _channel(self._compression, shapes, packed, self._sum, self.group)
        return Moves(self, channel, wide)

    def _count(self, values: Tensor, sent: int) -> None:
        self.traffic.sums += 1
        self.traffic.sent_bytes += sent
        self.traffic.whole_bytes += values.nbytes


@dataclass(frozen=True)
class Moves:
    """The moves of some tensors, added up over hosts."""

    wire: Wire
    channel: Channel
    dtype: torch.dtype

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Set the tensors, in place, to what is heard of all hosts' sum."""
        row = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(self.dtype)
        self.wire._count(row, self.channel.add_up(row))
        pieces = row.split_with_sizes([tensor.numel() for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.view(tensor.shape))

    def state_dict(self) -> dict[str, Any]:
        """What was not said yet."""
        return self.channel.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another was."""
        self.channel.load_state_dict(state)

    def unsaid(self) -> Tensor:
        """What this host has yet to say; it may be kept by another, and said through any codec."""
        return self.channel.unsaid()

    def keep(self, moves: Tensor) -> None:
        """Say this later, too."""
        self.channel.keep(moves.to(self.dtype))


def _channel(
    compression: Compression, shapes: Shapes, like: Tensor, add_up: Sum, group: dist.ProcessGroup
) -> Channel:
    members = Members.of(group)
    match compression.name:
        case "none":
            return Plain(add_up, torch.zeros_like(like))
        case "onebit":
            return Gathered(Speaker(OneBit(shapes), like), members)
        case "topk":
            return Gathered(Speaker(TopK(compression.share), like), members)
        case "powersgd":
            return PowerSGD(shapes, like, compression.rank, add_up)
        case name:
            return Sliced(Cast(CASTS[name]), like, members)


@dataclass(frozen=True)
class Plain:
    """Everything is said."""

    sum: Sum
    kept: Tensor

    def add_up(self, moves: Tensor) -> int:
        """Add up."""
        moves.add_(self.kept)
        self.kept.zero_()
        return self.sum(moves)

    def state_dict(self) -> dict[str, Any]:
        """What was given to keep."""
        return {"kept": self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep what another kept."""
        self.kept.copy_(state["kept"])

    def unsaid(self) -> Tensor:
        """What was given to keep."""
        return self.kept

    def keep(self, moves: Tensor) -> None:
        """Say it next time."""
        self.kept.add_(moves)


@dataclass(frozen=True)
class Gathered:
    """Every host hears every host's message, and adds up for itself, in order."""

    speaker: Speaker
    members: Members

    def add_up(self, moves: Tensor) -> int:
        """Add up what all say."""
        message = self.speaker.say(moves)
        heard = _gather(message, self.members)
        moves.zero_()
        for said in heard:
            self.speaker.codec.add(said, moves)
        return message.nbytes * (len(self.members) - 1)

    def state_dict(self) -> dict[str, Any]:
        """What the speaker keeps."""
        return self.speaker.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep what another kept."""
        self.speaker.load_state_dict(state)

    def unsaid(self) -> Tensor:
        """What the speaker keeps."""
        return self.speaker.kept

    def keep(self, moves: Tensor) -> None:
        """Keep more."""
        self.speaker.kept.add_(moves)


@dataclass
class Sliced:
    """Each host adds up a slice, of what all say of it, and tells the others the sum.

    For codecs whose messages are cut where the numbers are. Sums are told through the codec, too,
    and what that leaves out is kept by who made them (Tang et al., 2019, DoubleSqueeze).
    """

    codec: Cast
    like: Tensor
    members: Members
    speaker: Speaker = field(init=False)
    summing: Speaker = field(init=False)

    def __post_init__(self) -> None:
        size = len(self.members)
        self._width = -(-self.like.numel() // size)
        self._row = self.like.new_zeros(size * self._width)
        self.speaker = Speaker(self.codec, self._row)
        self.summing = Speaker(self.codec, self._row[: self._width])

    def add_up(self, moves: Tensor) -> int:
        """Add up a slice; hear of the others."""
        members, place, n = self.members, self.members.place, moves.numel()
        self._row[:n].copy_(moves)
        slices = self.speaker.say(self._row).view(len(members), -1)
        heard = [
            slices[place] if p == place else torch.empty_like(slices[0])
            for p in range(len(members))
        ]
        sent = 0
        for turn in range(1, len(members)):
            to, by = (place + turn) % len(members), (place - turn) % len(members)
            sent += members.trade(to, slices[to], by, heard[by])
        total = torch.zeros_like(self.summing.kept)
        for said in heard:
            self.codec.add(said, total)
        sums = _gather(self.summing.say(total), members)
        self._row.zero_()
        self.codec.add(torch.cat(sums), self._row)
        moves.copy_(self._row[:n])
        return sent + sums[0].nbytes * (len(members) - 1)

    def state_dict(self) -> dict[str, Any]:
        """What both speakers keep."""
        return {"own": self.speaker.state_dict(), "sums": self.summing.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep what others kept."""
        self.speaker.load_state_dict(state["own"])
        self.summing.load_state_dict(state["sums"])

    def unsaid(self) -> Tensor:
        """What both speakers keep."""
        row = self.speaker.kept.clone()
        row.view(len(self.members), -1)[self.members.place].add_(self.summing.kept)
        return row[: self.like.numel()]

    def keep(self, moves: Tensor) -> None:
        """Let the first speaker keep more."""
        self.speaker.kept[: moves.numel()].add_(moves)


def _gather(message: Tensor, members: Members) -> list[Tensor]:
    """What all members say, in order."""
    heard = [torch.empty_like(message) for _ in members.ranks]
    dist.all_gather(heard, message, group=members.group)
    return heard
