"""Arena: the rows that hold the learners, and the mail that keeps their central model.

    rows[t % 2]  (k, n)   learner j's weights at step t are row j: its parameters view it

Rows exist twice. Step t reads the rows of its parity and makes its local moves in those of the
other, so what a learner held before a step is there until the step is over.

The central model is cut into a slice for each learner, and a rank *keeps* the slices of its
learners, one region of the row. Only its own rank touches a row or what is kept:

    kept[r][t % 2]     (region of rank r)  the central model at step t
    letters[j][t % 2]  (all other regions) row j at step t, then the central model at step t + 1

What others must know travels in letters. A learner writes its row of step t for the keepers of the
other regions, and they answer on the same paper with the central model of step t + 1. So a cache
line of a letter has two users, who write it in turn. A line that one of them had only read would
take the other four times as long to write again (docs/design/clocks.md has the figures).

Between hosts the first rank's exchange keeps all of it (averaging/hosts.py): regions are empty.

Learners that are kept at their mean (averaging/adaptive.py) need one copy of the rows, and letters
that hold all of them: regions are empty then, too. Learners that are the same at all times share a
row, and a letter that is read and answered between two waits exists once (averaging/meeting.py).

Buffers (the statistics of batch norms) change during the forward pass. They live in rows of their
own, `live` (k, n), copied into `rows` after each step.

Each dtype has a block of its own. Tensors lie in a row at multiples of 64 bytes, so that kernels
see the alignment they like.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from crossbow.comm.shared import ALIGNMENT, Carver
from crossbow.errors import InputError

SLICE_ALIGNMENT = 128
"""Bytes of two of the widest vectors: torch's kernels take such pieces without a remainder, which
they would compute by another path, with other last bits."""

NOTHING = slice(0, 0)


@dataclass(frozen=True)
class Slot:
    """A tensor's place in a row."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def view(self, row: Tensor) -> Tensor:
        """The tensor as a view of the row."""
        return row.as_strided(self.shape, self.stride, row.storage_offset() + self.offset)


@dataclass(frozen=True)
class Layout:
    """Where tensors of one dtype lie in a row of `width` elements."""

    dtype: torch.dtype
    names: tuple[str, ...]
    slots: tuple[Slot, ...]
    width: int

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, Tensor]], dtype: torch.dtype) -> "Layout":
        """Place tensors one after another, each on a cache line of its own."""
        slots, end = [], 0
        for _, tensor in tensors:
            slots.append(Slot(end, tensor.shape, _dense_strides(tensor)))
            end = _round_up(end + tensor.numel(), ALIGNMENT // dtype.itemsize)
        width = _round_up(end, SLICE_ALIGNMENT // dtype.itemsize)
        return cls(dtype, tuple(name for name, _ in tensors), tuple(slots), width)

    def views(self, row: Tensor) -> list[Tensor]:
        """The row's tensors."""
        return [slot.view(row) for slot in self.slots]

    def slices(self, parts: int) -> list[slice]:
        """Cut the row into so many parts of nearly equal size."""
        grain = SLICE_ALIGNMENT // self.dtype.itemsize
        grains = self.width // grain
        edges = [grain * (grains * part // parts) for part in range(parts + 1)]
        return [slice(a, b) for a, b in pairwise(edges)]


class Letter(NamedTuple):
    """A row without the region of the rank that sends it, on papers that are used in turn."""

    left: Tensor
    """(papers, start of the region)"""
    right: Tensor
    """(papers, n - end of the region)"""


@dataclass(frozen=True)
class Block:
    """Tensors of one dtype and one kind: parameters, which are pulled, or buffers."""

    layout: Layout
    rows: Tensor
    """(copies, k, n); fewer than k, if learners share them."""
    live: Tensor | None
    """(k, n), of buffers only."""
    regions: list[slice]
    """What each rank keeps of the central model."""
    kept: list[Tensor]
    """(2, width of the rank's region), for each rank."""
    letters: list[Letter]
    """Of each learner."""

    @property
    def is_pulled(self) -> bool:
        """Whether the central model pulls on these rows."""
        return self.live is None

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A new row that holds these tensors, by name."""
        row = torch.zeros_like(self.rows[0, 0])
        for name, slot in zip(self.layout.names, self.layout.slots, strict=True):
            slot.view(row).copy_(tensors[name])
        return row

    def part(self, learner: int, sender: int, parity: int, piece: slice) -> Tensor:
        """A piece of a letter of a learner of rank `sender`, by its place in the row."""
        region, letter = self.regions[sender], self.letters[learner]
        if piece.stop <= region.start:
            return letter.left[parity, piece]
        return letter.right[parity, piece.start - region.stop : piece.stop - region.stop]


def plan(tensors: Iterable[tuple[str, Tensor]]) -> list[Layout]:
    """One layout for each dtype, in order of first appearance."""
    by_dtype: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append((name, tensor))
    return [Layout.of(group, dtype) for dtype, group in by_dtype.items()]


class Arena:
    """The rows of k learners, run by the ranks of one host."""

    def __init__(
        self,
        parameters: Sequence[Layout],
        buffers: Sequence[Layout],
        shares: Sequence[range],
        carver: Carver,
        *,
        ranks_keep: bool,
        copies: int = 2,
        papers: int = 2,
        places: Sequence[int] | None = None,
    ) -> None:
        """Lay the blocks out; all ranks do so alike.

        Args:
            parameters: one layout for each dtype.
            buffers: one layout for each dtype.
            shares: the rows of each rank.
            carver: cuts the memory; one that counts tells how much is needed.
            ranks_keep: whether the ranks keep the central model.
            copies: of the rows: one, if learners move where they stand.
            papers: of a letter that holds parameters.
            places: in which row each learner stands; in one of its own, if left out.
        """
        self.shares, self.ranks_keep, self.copies = shares, ranks_keep, copies
        self.places = range(shares[-1].stop) if places is None else places
        self._papers = papers
        self.parameters = [self._block(p, carver, has_live=False) for p in parameters]
        self.buffers = [self._block(b, carver, has_live=True) for b in buffers]

    @property
    def blocks(self) -> list[Block]:
        """All blocks."""
        return self.parameters + self.buffers

    def _block(self, layout: Layout, carver: Carver, *, has_live: bool) -> Block:
        k, n, dtype = self.shares[-1].stop, layout.width, layout.dtype
        papers = 2 if has_live else self._papers
        slices = layout.slices(k)
        regions = [
            slice(slices[mine.start].start, slices[mine.stop - 1].stop)
            if self.ranks_keep
            else NOTHING
            for mine in self.shares
        ]

        def letter(region: slice) -> Letter:
            return Letter(
                carver.cut((papers, region.start), dtype),
                carver.cut((papers, n - region.stop), dtype),
            )

        return Block(
            layout=layout,
            rows=carver.cut((self.copies, max(self.places) + 1, n), dtype),
            live=carver.cut((k, n), dtype) if has_live else None,
            regions=regions,
            kept=[carver.cut((2, r.stop - r.start), dtype) for r in regions],
            letters=[letter(regions[rank]) for rank, mine in enumerate(self.shares) for _ in mine],
        )

    def fill(self, model: Mapping[str, Tensor]) -> None:
        """Put all learners, and the central model at rest, where this model stands."""
        for block in self.blocks:
            row = block.pack(model)
            block.rows.copy_(row.expand_as(block.rows))
            if block.live is not None:
                block.live.copy_(row.expand_as(block.live))
            for region, kept, mine in zip(block.regions, block.kept, self.shares, strict=True):
                kept.copy_(row[region].expand_as(kept))
                for letter in block.letters[mine.start : mine.stop]:
                    letter.left.copy_(row[: region.start].expand_as(letter.left))
                    letter.right.copy_(row[region.stop :].expand_as(letter.right))


def adoptable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that learn, each once; refuse by name what can't lie in a row.

    A tied parameter has one name here and so one place. A frozen one stays where it is: all
    learners of a process see the same.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise InputError("the model has no parameter that requires a gradient: nothing to train")
    for name, parameter in named:
        _check_tensor(name, parameter)
    for (name, tensor), (other, another) in _sharing(model):
        if tensor.requires_grad or another.requires_grad:
            raise InputError(
                f"{name!r} and {other!r} overlap in memory without being one parameter: "
                "tie them by assigning the same nn.Parameter to both modules"
            )
    return named


def _sharing(model: nn.Module) -> Iterator[tuple[tuple[str, Tensor], tuple[str, Tensor]]]:
    """Pairs of parameters and buffers that have an element in common."""
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_plain = not nn.parameter.is_lazy(tensor) and tensor.layout == torch.strided
        if is_plain and not tensor.is_meta and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for group in by_storage.values():
        for one, other in combinations(group, 2):
            if _overlap(one[1], other[1]):
                yield one, other


def _overlap(one: Tensor, other: Tensor) -> bool:
    (start, end), (other_start, other_end) = _extent(one), _extent(other)
    if end <= other_start or other_end <= start:
        return False
    # columns of one matrix, say, reach past each other without a common element
    return bool(np.intersect1d(_addresses(one), _addresses(other)).size)


def _extent(tensor: Tensor) -> tuple[int, int]:
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.itemsize


def _addresses(tensor: Tensor) -> NDArray[np.int64]:
    """Where each element begins."""
    addresses = np.full(1, tensor.data_ptr())
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        steps = tensor.itemsize * step * np.arange(size)
        addresses = (addresses[:, None] + steps).ravel()
    return addresses


def adoptable_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that learners keep apart: all of them, and each once."""
    named = list(model.named_buffers())
    for name, buffer in named:
        _check_tensor(name, buffer)
    return named


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _check_tensor(name: str, tensor: Tensor) -> None:
    if nn.parameter.is_lazy(tensor):
        raise InputError(f"{name!r} has no shape yet: run one batch through the model first")
    if tensor.is_complex() or tensor.is_quantized or tensor.layout != torch.strided:
        kind = "complex" if tensor.is_complex() else str(tensor.layout)
        kind = "quantized" if tensor.is_quantized else kind
        raise InputError(f"{name!r} is {kind}: learners can average dense real tensors only")
    if tensor.is_meta:
        raise InputError(f"{name!r} is on the meta device: materialize the model first")


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's strides if its elements are packed (channels-last, say), else row-major ones."""
    expected = 1
    for size, stride in sorted(
        (pair for pair in zip(tensor.shape, tensor.stride(), strict=True) if pair[0] > 1),
        key=lambda pair: pair[1],
    ):
        if stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tuple(tensor.stride())
