"""Compress: numbers in fewer bytes, and what went unsaid kept for the next time.

A codec turns n numbers into a message whose length depends on n alone, and back into an
approximation of them. A `Speaker` says moves through a codec and keeps what a message left out; it
is added to the next moves (error feedback: Seide et al., 2014; Karimireddy et al., 2019). So what
was heard is late, but nothing is lost: after any number of steps

    sum of what was heard = sum of the moves - what the speaker still keeps

    codec      message of n numbers, in bytes                                    contributions
    Cast       2 n                                                               sums of slices
    OneBit     n / 8, and a number for each row of each tensor                   all messages
    TopK       8 for each of the largest (4-byte numbers; 12 for 8-byte ones)    all messages
    PowerSGD   r (rows + columns) numbers for each matrix, and all other tensors sums of factors

The last column says how what several hosts say is added up (comm/wire.py). Messages hold no
lengths, names or shapes: both sides know them.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from crossbow.errors import InputError, check_choice
from crossbow.spec import parse_spec

Shapes = Sequence[Sequence[int]]
"""Of the tensors that lie in a row of numbers, one after another."""

Sum = Callable[[Tensor], int]
"""Adds up all hosts' numbers in place; returns the bytes that this host sent for it."""

_GATHER_BITS = 0x0102040810204080  # bit 56 + i of the product is byte i of eight bytes of 0 or 1
_SPREAD_BYTE = 0x0101010101010101
_BIT_OF_BYTE = 0x8040201008040201 - 2**64  # bit i of byte i, as a signed number


class Codec(Protocol):
    """Numbers to bytes and back, without a state."""

    def encode(self, values: Tensor) -> Tensor:
        """Return the message, a row of bytes."""

    def add(self, message: Tensor, out: Tensor, factor: float = 1) -> None:
        """Add to `out` what a message says, times a factor."""


@dataclass(frozen=True)
class Cast:
    """Each number in a narrower type. What the type can't reach comes in several steps."""

    dtype: torch.dtype

    def encode(self, values: Tensor) -> Tensor:
        """Return the message."""
        widest = torch.finfo(self.dtype).max
        return values.clamp(-widest, widest).to(self.dtype).view(torch.uint8)

    def add(self, message: Tensor, out: Tensor, factor: float = 1) -> None:
        """Add what the message says."""
        out.add_(message.view(self.dtype), alpha=factor)


@dataclass(frozen=True)
class OneBit:
    """A sign for each number and a size for each row of a tensor: the mean of its absolutes.

    A row is what belongs to one output of a layer. A tensor of one dimension is a row.
    """

    shapes: Shapes

    def encode(self, values: Tensor) -> Tensor:
        """Return the message: the sizes, then the signs."""
        absolutes = _split(values.abs(), self.shapes)
        sizes = torch.cat([tensor.mean(1) for tensor in absolutes])
        return torch.cat([sizes.view(torch.uint8), _pack(values >= 0)])

    def add(self, message: Tensor, out: Tensor, factor: float = 1) -> None:
        """Add what the message says."""
        counts = [_matrix(shape)[0] for shape in self.shapes]
        num_bytes = sum(counts) * out.itemsize
        sizes = message[:num_bytes].view(out.dtype).split_with_sizes(counts)
        said = _unpack(message[num_bytes:], out.numel()).to(out.dtype).mul_(2).sub_(1)
        for tensor, size in zip(_split(said, self.shapes), sizes, strict=True):
            tensor.mul_(size[:, None])
        out.add_(said, alpha=factor)


@dataclass(frozen=True)
class TopK:
    """The largest numbers, exactly, and where they are."""

    share: float
    """Of all numbers; one at least."""

    def encode(self, values: Tensor) -> Tensor:
        """Return the message: numbers, then places."""
        places = values.abs().topk(self._count(values), sorted=False).indices
        return torch.cat(
            [values[places].view(torch.uint8), places.to(torch.int32).view(torch.uint8)]
        )

    def add(self, message: Tensor, out: Tensor, factor: float = 1) -> None:
        """Add what the message says."""
        num_bytes = self._count(out) * out.itemsize
        numbers, places = message[:num_bytes].view(out.dtype), message[num_bytes:].view(torch.int32)
        out.index_add_(0, places, numbers, alpha=factor)

    def _count(self, values: Tensor) -> int:
        return math.ceil(self.share * values.numel())


class Speaker:
    """Says moves through a codec, and keeps what its messages leave out."""

    def __init__(self, codec: Codec, like: Tensor) -> None:
        """Begin with nothing kept; moves will be like this tensor."""
        self.codec = codec
        self.kept = torch.zeros_like(like)

    def say(self, moves: Tensor) -> Tensor:
        """Return the message about these moves and what was kept of earlier ones."""
        self.kept.add_(moves)
        message = self.codec.encode(self.kept)
        self.codec.add(message, self.kept, -1)
        return message

    def state_dict(self) -> dict[str, Tensor]:
        """What is kept."""
        return {"kept": self.kept}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Keep what another kept."""
        self.kept.copy_(state["kept"])


class PowerSGD:
    """Each matrix as a product of two thin ones, which can be added up (Vogels et al., 2019).

    With M = sum_h M_h over hosts and Q of the step before, a step of power iteration is

        P = orthonormal(sum_h M_h Q)        Q = sum_h M_h^T P        M ~ P Q^T

    and a host keeps M_h - P (M_h^T P)^T. A tensor is a matrix of its first dimension by all others.
    What would not get smaller is said exactly.
    """

    def __init__(self, shapes: Shapes, like: Tensor, rank: int, add_up: Sum) -> None:
        """Begin with nothing kept, and with the same Q on every host.

        Args:
            shapes: of the tensors in a row of moves.
            like: a row of moves.
            rank: columns of a factor.
            add_up: adds up factors over hosts.
        """
        self.kept, self._sum = torch.zeros_like(like), add_up
        pieces = _split(self.kept, shapes)
        self._matrices = [p for p in pieces if _gets_smaller(p.shape, rank)]
        self._exact = [p for p in pieces if not _gets_smaller(p.shape, rank)]
        stream = torch.Generator().manual_seed(0)
        self._bases = [
            torch.randn(m.shape[1], rank, generator=stream, dtype=torch.float64).to(like)
            for m in self._matrices
        ]

    def add_up(self, moves: Tensor) -> int:
        """Add up all hosts' moves in place; return the bytes sent."""
        self.kept.add_(moves)
        products = [m @ basis for m, basis in zip(self._matrices, self._bases, strict=True)]
        sums, sent = _together([*products, *self._exact], self._sum)
        frames = [torch.linalg.qr(p).Q for p in sums[: len(products)]]
        own = [m.T @ frame for m, frame in zip(self._matrices, frames, strict=True)]
        for matrix, frame, basis in zip(self._matrices, frames, own, strict=True):
            matrix.addmm_(frame, basis.T, alpha=-1)
        for piece in self._exact:
            piece.zero_()
        bases, sent_again = _together(own, self._sum)
        approximations = [f @ b.T for f, b in zip(frames, bases, strict=True)]
        self._write(moves, approximations, sums[len(products) :])
        for basis, new in zip(self._bases, bases, strict=True):
            # a column of nothing would stay so for ever
            basis.copy_(torch.where((new != 0).any(0), new, basis))
        return sent + sent_again

    def _write(self, out: Tensor, matrices: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
        """Put the tensors where they lie in the row of all."""
        places = [*self._matrices, *self._exact]
        for place, tensor in zip(places, [*matrices, *exact], strict=True):
            start = place.storage_offset() - self.kept.storage_offset()
            out[start : start + place.numel()].copy_(tensor.reshape(-1))

    def unsaid(self) -> Tensor:
        """What is kept."""
        return self.kept

    def keep(self, moves: Tensor) -> None:
        """Keep more."""
        self.kept.add_(moves)

    def state_dict(self) -> dict[str, Tensor]:
        """What is kept, and each Q."""
        return {"kept": self.kept, **{f"basis {i}": b for i, b in enumerate(self._bases)}}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on where another was."""
        self.kept.copy_(state["kept"])
        for number, basis in enumerate(self._bases):
            basis.copy_(state[f"basis {number}"])


@dataclass(frozen=True)
class Compression:
    """Which codec, with its options."""

    name: str
    share: float = 0.01
    """Of top-k: what is said of all numbers."""
    rank: int = 2
    """Of PowerSGD."""

    @property
    def is_exact(self) -> bool:
        """Whether everything is said."""
        return self.name == "none"


def topk(share: float = 0.01) -> Compression:
    """The largest numbers: this share of all."""
    if isinstance(share, bool) or not 0 < share <= 1:
        raise InputError(f"share {share} of topk is not possible: give a number above 0, at most 1")
    return Compression("topk", share=share)


def powersgd(rank: int = 2) -> Compression:
    """Thin factors of so many columns."""
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise InputError(f"rank {rank} of powersgd is not possible: give a whole number, 1 or more")
    return Compression("powersgd", rank=rank)


CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
COMPRESSIONS: Mapping[str, Callable[..., Compression]] = {
    "none": lambda: Compression("none"),
    "bf16": lambda: Compression("bf16"),
    "fp16": lambda: Compression("fp16"),
    "onebit": lambda: Compression("onebit"),
    "topk": topk,
    "powersgd": powersgd,
}


def parse(spec: str) -> Compression:
    """Return the compression that `spec` names.

    >>> parse("topk:share=0.05").share
    0.05
    """
    name, options = parse_spec(spec)
    make = COMPRESSIONS[check_choice("compression", name, COMPRESSIONS)]
    legal = inspect.signature(make).parameters
    for option, value in options.items():
        check_choice(f"option of {name}", option, legal)
        if not isinstance(value, int | float):
            raise InputError(f"{option} {value!r} of {name} is not possible: give a number")
    arguments: dict[str, Any] = options
    return make(**arguments)


def _together(tensors: Sequence[Tensor], add_up: Sum) -> tuple[list[Tensor], int]:
    """Add up tensors of all hosts in one go; return the sums, and the bytes sent."""
    if not tensors:
        return [], 0
    row = torch.cat([tensor.reshape(-1) for tensor in tensors])
    sent = add_up(row)
    sums = row.split_with_sizes([tensor.numel() for tensor in tensors])
    return [s.view(tensor.shape) for s, tensor in zip(sums, tensors, strict=True)], sent


def _gets_smaller(matrix: Sequence[int], rank: int) -> bool:
    rows, columns = matrix
    return rank * (rows + columns) < rows * columns


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor: the first dimension by all others, or one row."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def _split(values: Tensor, shapes: Shapes) -> list[Tensor]:
    """The tensors of a row, each as a matrix."""
    pieces = values.split_with_sizes([math.prod(shape) for shape in shapes])
    return [piece.view(_matrix(shape)) for piece, shape in zip(pieces, shapes, strict=True)]


def _pack(bits: Tensor) -> Tensor:
    """Eight bits to a byte."""
    padded = torch.nn.functional.pad(bits, (0, -bits.numel() % 8))
    words = padded.view(torch.uint8).view(torch.int64)
    return (words.mul(_GATHER_BITS) >> 56).to(torch.uint8)


def _unpack(packed: Tensor, count: int) -> Tensor:
    """The bits of bytes, as booleans."""
    words = packed.to(torch.int64).mul_(_SPREAD_BYTE).bitwise_and_(_BIT_OF_BYTE)
    return words.view(torch.uint8)[:count] != 0
