"""Streams: the gradients of all learners of a rank in one CUDA graph.

Each learner is a branch: its forward and backward pass on a stream of its own, on inputs that lie
in one place, with its gradients in one place. All branches are captured together, once, and a round
is one launch: small kernels of different learners fill the GPU side by side; Python is not asked.

The optimizers' steps and the averaging follow on the stream that all came back to. They are queued
while the graph runs, as is the copy of the next batches, so neither waits for the other.

Tests of the captured graph run where CUDA is; docs/design/engines.md says where that has been.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.func import functional_call

from crossbow.engines.objective import Batch, Objective, fits, laid_out
from crossbow.engines.sequential import InTurn, Sequential

MOST_STREAMS = 16
WARM_UPS = 3
"""Passes before the capture, in which libraries choose and allocate what they need."""


class Branch:
    """One learner's forward and backward pass, from a fixed place to a fixed place."""

    def __init__(
        self, objective: Objective, crew: Sequential, number: int, batch: Batch, scale: Tensor
    ) -> None:
        """Begin.

        Args:
            objective: the loss of a batch.
            crew: the learners of this rank, at a parity.
            number: of the learner.
            batch: of the shape of all that come.
            scale: () that the loss is multiplied with for its gradients.
        """
        self._objective, self._scale = objective, scale
        # .data: autograd counts changes of each tensor apart, though all lie in one block
        self._row = {
            f"model.{name}": stack[number].data.requires_grad_()
            for name, stack in crew.stacked(crew.parity).items()
        }
        self._buffers = {
            f"model.{name}": stack[number].data for name, stack in crew.stacked_buffers().items()
        }
        self.inputs, self.targets = batch[0].clone(), batch[1].clone()
        self.loss = torch.empty(0)
        self.gradients: tuple[Tensor | None, ...] = ()

    def run(self) -> None:
        """Compute the loss and the gradients."""
        given = self._row, self._buffers
        loss = functional_call(self._objective, given, (self.inputs, self.targets))
        row = list(self._row.values())
        gradients = torch.autograd.grad(loss, row, self._scale, allow_unused=True)
        strides = [weight.stride() for weight in row]
        self.gradients = tuple(map(laid_out, gradients, strides))
        self.loss = loss.detach()


class Streams:
    """Gradients of all learners at once, each on a stream of its own."""

    name = "streams"

    def __init__(self, objective: Objective, crew: Sequential, in_turn: InTurn) -> None:
        """Begin.

        Args:
            objective: the loss of a batch.
            crew: the learners of this rank.
            in_turn: takes the rounds, at the end, whose batches are not as the first ones.
        """
        self.objective, self._crew, self._in_turn = objective, crew, in_turn
        self._parameters = crew.parameters
        self._scales = torch.ones(len(crew), device=self._parameters[0].device)
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, list[Branch], Tensor]] = {}

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
        parity = self._crew.parity
        if parity not in self._captured:
            self._captured[parity] = self._capture(batches)
        graph, branches, losses = self._captured[parity]
        if scales is None:
            self._scales.fill_(1.0)
        else:
            self._scales.copy_(scales)
        for branch, (inputs, targets) in zip(branches, batches, strict=True):
            branch.inputs.copy_(inputs, non_blocking=True)
            branch.targets.copy_(targets, non_blocking=True)
        graph.replay()
        # losses are read later, when the next graph has run over them
        return losses.clone(), list(zip(*(branch.gradients for branch in branches), strict=True))

    def _capture(
        self, batches: Sequence[Batch]
    ) -> tuple[torch.cuda.CUDAGraph, list[Branch], Tensor]:
        """Warm the branches up, leaving no trace of that, and capture them in one graph."""
        branches = [
            Branch(self.objective, self._crew, number, batch, self._scales[number])
            for number, batch in enumerate(batches)
        ]
        streams = [torch.cuda.Stream() for _ in branches[:MOST_STREAMS]]  # type: ignore[no-untyped-call]
        buffers = list(self._crew.stacked_buffers().values())
        values, random_state = [b.clone() for b in buffers], torch.cuda.get_rng_state()
        # the default stream can't be captured, nor be warm for it
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                _run_all(branches, streams)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
        torch.cuda.set_rng_state(random_state)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _run_all(branches, streams)
            losses = torch.stack([branch.loss for branch in branches])
        return graph, branches, losses


def _run_all(branches: Sequence[Branch], streams: Sequence[torch.cuda.Stream]) -> None:
    """Fork to the streams, run every branch on one of them, and come back."""
    here = torch.cuda.current_stream()
    for stream in streams:
        stream.wait_stream(here)
    for number, branch in enumerate(branches):
        with torch.cuda.stream(streams[number % len(streams)]):
            branch.run()
    for stream in streams:
        here.wait_stream(stream)
