"""Stacked: the gradients of all learners of a rank in one call.

The rows (m, n) of a rank's learners are, without a copy, stacked parameters (m, ...) each. One
vmap over them and over m batches gives m losses, and one backward pass of their sum the gradients
(m, ...): learner j's loss depends on row j alone. Then learner by learner these become the
parameters' gradients, and the optimizer moves as ever; so what acts on norms is each learner's own.

Buffers are stacked, too: batch norms update the running statistics of each learner. Random
numbers differ between learners, and come from the stream of the rank's first one: they are other
numbers than the sequential engine's.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from crossbow.engines.objective import Batch, Objective, fits, laid_out
from crossbow.engines.sequential import InTurn, Sequential


class Stacked:
    """Gradients of all learners at once."""

    name = "stacked"

    def __init__(
        self, objective: Objective, crew: Sequential, in_turn: InTurn, *, compiles: bool = False
    ) -> None:
        """Begin.

        Args:
            objective: the loss of a batch.
            crew: the learners of this rank.
            in_turn: takes the rounds, at the end, whose batches are not all of one size.
            compiles: whether to compile the stacked pass.
        """
        self._crew, self.objective, self._in_turn = crew, objective, in_turn
        self._parameters = crew.parameters
        self._run = vmap(self._one, randomness="different")
        if compiles:
            self._run = torch.compile(self._run)
        self._rows: dict[int, dict[str, Tensor]] = {}
        self._buffers = {f"model.{name}": b for name, b in crew.stacked_buffers().items()}

    def gradients(self, batches: Sequence[Batch], scales: Tensor | None = None) -> Iterator[Tensor]:
        """Yield losses, with the gradients in the parameters."""
        if not fits(batches, len(self._crew)):
            yield from self._in_turn.gradients(batches, scales)
            return
        losses, stacks = self.compute(batches, scales)
        for number, loss in enumerate(losses):
            for parameter, stack in zip(self._parameters, stacks, strict=True):
                parameter.grad = stack[number]
            yield loss

    def compute(
        self, batches: Sequence[Batch], scales: Tensor | None = None
    ) -> tuple[Tensor, Sequence[Sequence[Tensor | None]]]:
        """Return the losses (m,), and of each parameter the learners' gradients."""
        rows = self._stacked_rows()
        inputs, targets = (torch.stack(column) for column in zip(*batches, strict=True))
        # packed copies: a batch norm updates those in place, and not rows that lie apart
        buffers = {
            name: live.clone(memory_format=torch.contiguous_format)
            for name, live in self._buffers.items()
        }
        losses = self._run(rows, buffers, inputs, targets)
        scale = torch.ones_like(losses) if scales is None else scales.to(losses.dtype)
        stacks = torch.autograd.grad(losses, list(rows.values()), scale, allow_unused=True)
        for name, live in self._buffers.items():
            live.copy_(buffers[name])
        strides = [(p.numel(), *p.stride()) for p in self._parameters]
        found = [laid_out(stack, stride) for stack, stride in zip(stacks, strides, strict=True)]
        none = [None] * len(batches)
        return losses.detach(), [none if stack is None else stack.unbind() for stack in found]

    def _stacked_rows(self) -> dict[str, Tensor]:
        """Where the learners stand, as leaves; made once for each parity."""
        parity = self._crew.parity
        if parity not in self._rows:
            self._rows[parity] = {
                f"model.{name}": stack.detach().requires_grad_()
                for name, stack in self._crew.stacked(parity).items()
            }
        return self._rows[parity]

    def _one(
        self, row: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor, targets: Tensor
    ) -> Tensor:
        with _Rewritten():
            return cast(Tensor, functional_call(self.objective, (row, buffers), (inputs, targets)))


class _Rewritten(TorchFunctionMode):
    """Operations written so that their stacked form is a fast one."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is F.scaled_dot_product_attention and not named.get("enable_gqa"):
            return _attention(*args, **named)
        if func is F.linear:
            return _linear(*args, **named)
        return func(*args, **named)


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer whose weights' gradient comes out as weights lie, not transposed."""
    flat = inputs.reshape(-1, inputs.shape[-1])
    outputs = (weight @ flat.t()).t().view(*inputs.shape[:-1], weight.shape[0])
    return outputs if bias is None else outputs + bias


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **_: object,
) -> Tensor:
    """Attention by its definition: fused kernels have no stacked form."""
    scores = query @ key.transpose(-1, -2)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, float("-inf"))
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if is_bool else scores + attn_mask
    weights = F.dropout(scores.softmax(-1), dropout_p)
    return weights @ value
