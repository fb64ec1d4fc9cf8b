"""Synchronous: the steps of an averaging, over the rows of one host.

Step t of a rank, for each of its learners: gradients at the row of parity t; pull; local move into
the row of the other parity. Then its slices of the central model at t + 1, and its clock.

The rank waits in one place, before its first pull, until every rank has completed step t - 1. So it
stands only if another is a whole step behind. docs/design/clocks.md says why one wait is enough.

Between hosts the ranks compute no slices: see averaging/hosts.py.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from crossbow.arena import Arena
from crossbow.averaging.family import advance, average, pull_first, pull_last
from crossbow.comm.shared import Clocks
from crossbow.engines.sequential import Sequential


class Synchronous:
    """The learners of a rank, kept together with all others."""

    def __init__(
        self,
        arena: Arena,
        engine: Sequential,
        clocks: Clocks,
        learners: Sequence[int],
        num_learners: int,
        alpha: float,
        momentum: float,
        *,
        pulls_first: bool,
        makes_slices: bool,
        barrier: Callable[[], object],
    ) -> None:
        """Begin at step 0.

        Args:
            arena: the rows of this host.
            engine: runs this rank's learners.
            clocks: tell when the central model of a step is whole.
            learners: this rank's rows of the arena.
            num_learners: of all hosts.
            alpha: the pull.
            momentum: of the central model.
            pulls_first: whether a pull may come before the local move.
            makes_slices: whether the ranks make the central model, in slices.
            barrier: returns when all ranks have called it.
        """
        self.engine, self.clocks = engine, clocks
        self.step, self.turn = 0, 0
        self._arena, self._learners = arena, learners
        self._num_learners, self._alpha, self._momentum = num_learners, alpha, momentum
        self._pulls_first, self._makes_slices = pulls_first, makes_slices
        self._barrier = barrier
        # views are made once: indexing a tensor takes longer than averaging a small row
        self._pulls = [[_pulls(arena, p, j) for j in learners] for p in (0, 1)]
        self._copies = [[_copies(arena, p, j) for j in learners] for p in (0, 1)]
        self._slices = [_slices(arena, p, learners if makes_slices else ()) for p in (0, 1)]

    @property
    def parity(self) -> int:
        """Which of the two rows this step reads."""
        return self.step % 2

    def before_move(self) -> None:
        """Prepare the row that the learner aboard is about to move in."""
        if self.turn == 0:
            self.clocks.wait(self.step)
        for after, before, central in self._pulls[self.parity][self.turn]:
            if self._pulls_first:
                pull_first(after, before, central, self._alpha)
            else:
                after.copy_(before)
        self.engine.cross(1 - self.parity)

    def after_move(self) -> None:
        """Finish the row, and with the rank's last learner the step; take the next one aboard."""
        if not self._pulls_first:
            for after, before, central in self._pulls[self.parity][self.turn]:
                pull_last(after, before, central, self._alpha)
        for published, live in self._copies[self.parity][self.turn]:
            published.copy_(live)
        self.turn += 1
        if self.turn == len(self._learners):
            self._end_step()
        self.engine.board(self.turn, self.parity)

    def rest(self) -> None:
        """Average the learner aboard without a move of its own."""
        with torch.no_grad():
            self.before_move()
            self.after_move()

    @contextmanager
    def central_aboard(self) -> Iterator[None]:
        """Let the model hold a copy of the central model; the other ranks soon wait meanwhile."""
        self.clocks.wait(self.step)
        parameters, buffers = (
            [v for b in blocks for v in b.layout.views(b.central[self.parity].clone())]
            for blocks in (self._arena.parameters, self._arena.buffers)
        )
        with self.engine.holding(parameters, buffers):
            yield

    def restart(self) -> None:
        """Put the learners at the central model and take its velocity; all ranks together."""
        # between hosts the rows of this step must have been summed before they change
        self.clocks.wait(self.step if self._makes_slices else self.step + 1)
        self._barrier()
        for pulls in self._pulls[self.parity]:
            for _, before, central in pulls:
                before.copy_(central)
        for block in self._arena.parameters:  # every rank writes the same bytes
            block.central[1 - self.parity].copy_(block.central[self.parity])
        self.engine.forget()
        self._barrier()

    def _end_step(self) -> None:
        k = self._num_learners
        for oldest, central, rows, is_pulled in self._slices[self.parity]:
            if is_pulled:
                advance(oldest, central, rows, k, self._alpha, self._momentum)
            else:
                average(oldest, rows, k)
        self.step += 1
        self.turn = 0
        self.clocks.advance(self.step)


Pull = tuple[Tensor, Tensor, Tensor]
"""A learner's row after its move, the one before, and the central model."""

Slice = tuple[Tensor, Tensor, list[Tensor], bool]
"""Of the oldest and the present central model and of all rows; and whether they are pulled."""


def _pulls(arena: Arena, parity: int, learner: int) -> list[Pull]:
    return [
        (block.rows[1 - parity, learner], block.rows[parity, learner], block.central[parity])
        for block in arena.parameters
    ]


def _copies(arena: Arena, parity: int, learner: int) -> list[tuple[Tensor, Tensor]]:
    """What a learner publishes of its buffers at the end of a step."""
    return [
        (block.rows[1 - parity, learner], block.live[learner])
        for block in arena.buffers
        if block.live is not None
    ]


def _slices(arena: Arena, parity: int, learners: Sequence[int]) -> list[Slice]:
    return [
        (
            block.central[1 - parity, piece],
            block.central[parity, piece],
            [row[piece] for row in block.rows[parity]],
            block.is_pulled,
        )
        for block in arena.blocks
        for piece in (block.slices()[learner] for learner in learners)
        if piece.stop > piece.start
    ]
