"""Arena: the rows that hold the learners, and the central model beside them.

    rows[t % 2]     (k, n)   learner j's weights at step t are row j: its parameters view it
    central[t % 2]  (n,)     the central model at step t

Both exist twice. Step t reads the rows of its parity and makes its local moves in those of the
other, so what a learner held before a step can be read by everybody for as long as the step lasts,
and nothing is copied out to be published. docs/design/clocks.md shows why two are enough.

Buffers (the statistics of batch norms) change during the forward pass. They live in rows of their
own, `live` (k, n), from which the learner publishes a copy into `rows` after each step.

Each dtype has a block of its own. Tensors lie in a row at multiples of 64 bytes, so that kernels
see the alignment they like. A slice of the central model belongs to each learner: the rank that
runs the learner computes it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from crossbow.comm.shared import ALIGNMENT, Carver, aligned
from crossbow.errors import InputError


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
        grain = ALIGNMENT // dtype.itemsize
        slots, end = [], 0
        for _, tensor in tensors:
            slots.append(Slot(end, tensor.shape, _dense_strides(tensor)))
            end += -(-tensor.numel() // grain) * grain
        return cls(dtype, tuple(name for name, _ in tensors), tuple(slots), end)

    def views(self, row: Tensor) -> list[Tensor]:
        """The row's tensors."""
        return [slot.view(row) for slot in self.slots]

    def slices(self, parts: int) -> list[slice]:
        """Cut the row into so many parts of nearly equal size, at cache lines."""
        grain = ALIGNMENT // self.dtype.itemsize
        lines = self.width // grain
        edges = [grain * (lines * part // parts) for part in range(parts + 1)]
        return [slice(a, b) for a, b in pairwise(edges)]

    def bytes(self, rows: int) -> int:
        """Memory of so many rows."""
        return aligned(rows * self.width * self.dtype.itemsize)


@dataclass(frozen=True)
class Block:
    """Tensors of one dtype and one kind: parameters, which are pulled, or buffers."""

    layout: Layout
    rows: Tensor
    """(2, k, n)"""
    central: Tensor
    """(2, n)"""
    live: Tensor | None
    """(k, n), of buffers only."""

    @property
    def is_pulled(self) -> bool:
        """Whether the central model pulls on these rows."""
        return self.live is None

    def slices(self) -> list[slice]:
        """Every learner's slice of the central model."""
        return self.layout.slices(self.rows.shape[1])


def plan(tensors: Iterable[tuple[str, Tensor]]) -> list[Layout]:
    """One layout for each dtype, in order of first appearance."""
    by_dtype: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append((name, tensor))
    return [Layout.of(group, dtype) for dtype, group in by_dtype.items()]


class Arena:
    """The rows of k learners."""

    def __init__(
        self, parameters: Sequence[Layout], buffers: Sequence[Layout], k: int, carver: Carver
    ) -> None:
        self.parameters = [
            Block(
                layout,
                carver.cut((2, k, layout.width), layout.dtype),
                carver.cut((2, layout.width), layout.dtype),
                live=None,
            )
            for layout in parameters
        ]
        self.buffers = [
            Block(
                layout,
                carver.cut((2, k, layout.width), layout.dtype),
                carver.cut((2, layout.width), layout.dtype),
                carver.cut((k, layout.width), layout.dtype),
            )
            for layout in buffers
        ]

    @property
    def blocks(self) -> list[Block]:
        """All blocks."""
        return self.parameters + self.buffers

    @staticmethod
    def bytes(parameters: Sequence[Layout], buffers: Sequence[Layout], k: int) -> int:
        """Memory that the rows of k learners take."""
        held = sum(layout.bytes(2 * k) + layout.bytes(2) for layout in (*parameters, *buffers))
        return held + sum(layout.bytes(k) for layout in buffers)

    def fill(self, model: Mapping[str, Tensor]) -> None:
        """Put all learners, and the central model at rest, where this model stands."""
        for block in self.blocks:
            for name, slot in zip(block.layout.names, block.layout.slots, strict=True):
                for row in (*block.rows.flatten(0, 1), *block.central):
                    slot.view(row).copy_(model[name])
                if block.live is not None:
                    for row in block.live:
                        slot.view(row).copy_(model[name])


def adoptable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that learn, each once; refuse by name what can't lie in a row.

    A tied parameter has one name here and so one place. A frozen one stays where it is: all
    learners of a process see the same.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise InputError("the model has no parameter that requires a gradient: nothing to train")
    spans: list[tuple[int, int, str]] = []
    for name, parameter in named:
        _check_tensor(name, parameter)
        start = parameter.data_ptr()
        spans.append((start, start + parameter.numel() * parameter.itemsize, name))
    spans.sort()
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise InputError(
                f"parameters {name!r} and {other!r} overlap in memory without being one parameter: "
                "tie them by assigning the same nn.Parameter to both modules"
            )
    return named


def adoptable_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that learners keep apart: all of them, and each once."""
    named = list(model.named_buffers())
    for name, buffer in named:
        _check_tensor(name, buffer)
    return named


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
