"""Synchronous: the steps of an averaging, as one rank takes them.

Step t of a rank, for each of its learners: gradients at the row of parity t; pull; local move into
the row of the other parity; mail. Then, for the rank: its region of the central model at t + 1,
mail, and its clock.

The rank waits in one place, before its first pull, until every rank has completed step t - 1. So it
stands only if another is a whole step behind. docs/design/clocks.md says why one wait is enough.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from crossbow.arena import Arena, Block, Mail
from crossbow.averaging.family import advance, average, pull_first, pull_last
from crossbow.averaging.hosts import Exchange
from crossbow.comm.shared import Clocks
from crossbow.engines.sequential import Sequential


class Synchronous:
    """The learners of a rank, kept together with all others."""

    def __init__(
        self,
        arena: Arena,
        engine: Sequential,
        clocks: Clocks,
        rank: int,
        num_learners: int,
        alpha: float,
        momentum: float,
        *,
        pulls_first: bool,
        exchange: Exchange | None,
        barrier: Callable[[], object],
    ) -> None:
        """Begin at step 0.

        Args:
            arena: the rows of this host.
            engine: runs this rank's learners.
            clocks: tell when the central model of a step is there.
            rank: of this host's.
            num_learners: of all hosts.
            alpha: the pull.
            momentum: of the central model.
            pulls_first: whether a pull may come before the local move.
            exchange: keeps the central model, if this rank runs it.
            barrier: returns when all ranks have called it.
        """
        self.engine, self.clocks = engine, clocks
        self.step, self.turn = 0, 0
        self._arena, self._rank, self._barrier = arena, rank, barrier
        self._exchange = exchange
        self._num_learners, self._alpha, self._momentum = num_learners, alpha, momentum
        self._pulls_first = pulls_first
        mine = arena.shares[rank]
        self._count = len(mine)
        # views are made once: indexing a tensor takes longer than averaging a small row
        self._pulls = [[_pulls(arena, rank, p, j) for j in mine] for p in (0, 1)]
        self._letters = [[_letters(arena, p, j) for j in mine] for p in (0, 1)]
        self._slices = [_slices(arena, rank, p) for p in (0, 1)]
        self._deliveries = [_deliveries(arena, rank, p) for p in (0, 1)]
        self._read = [_read(arena, rank, p) for p in (0, 1)]

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
        for letter, written in self._letters[self.parity][self.turn]:
            letter.copy_(written)
        self.turn += 1
        if self.turn == self._count:
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
            [view for block in blocks for view in block.layout.views(self._central(block))]
            for blocks in (self._arena.parameters, self._arena.buffers)
        )
        with self.engine.holding(parameters, buffers):
            yield

    def restart(self) -> None:
        """Put the learners at the central model and take its velocity; all ranks together."""
        # an exchange goes on by itself: it must have made its next step, and be waiting for ours
        self.clocks.wait(self.step if self._arena.ranks_keep else self.step + 1)
        self._barrier()
        for block in self._arena.parameters:
            central = self._central(block)
            region, kept = block.regions[self._rank], block.kept[self._rank]
            kept.copy_(central[region].expand_as(kept))
            for learner in self._arena.shares[self._rank]:
                block.rows[self.parity, learner].copy_(central)
                _send(block.of_learner[learner], region, self.parity, central)
            if not self._arena.ranks_keep:  # the exchange may have gone on from the old rows
                _send(block.to_rank[self._rank], region, 1 - self.parity, central)
        if self._exchange:
            self._exchange.restart(self.parity)
        self.engine.forget()
        self._barrier()

    def _central(self, block: Block) -> Tensor:
        """A copy of the central model of this step."""
        mail, kept = block.to_rank[self._rank], block.kept[self._rank]
        return torch.cat([mail.left[self.parity], kept[self.parity], mail.right[self.parity]])

    def _end_step(self) -> None:
        k = self._num_learners
        for oldest, central, rows, is_pulled in self._slices[self.parity]:
            if is_pulled:
                advance(oldest, central, rows, k, self._alpha, self._momentum)
            else:
                average(oldest, rows, k)
        for letter, written in self._deliveries[self.parity]:
            letter.copy_(written)
        for letter in self._read[self.parity]:
            letter.zero_()
        self.step += 1
        self.turn = 0
        self.clocks.advance(self.step)


Pull = tuple[Tensor, Tensor, Tensor]
"""Of a learner's row after its move, of the one before, and of the central model."""

Copy = tuple[Tensor, Tensor]
"""What is written, and what it is a copy of."""

Slice = tuple[Tensor, Tensor, list[Tensor], bool]
"""Of the oldest and the present central model and of all rows; and whether they are pulled."""


def _pulls(arena: Arena, rank: int, parity: int, learner: int) -> list[Pull]:
    pulls = []
    for block in arena.parameters:
        after, before = block.rows[1 - parity, learner], block.rows[parity, learner]
        region, mail, kept = block.regions[rank], block.to_rank[rank], block.kept[rank]
        left, right = slice(0, region.start), slice(region.stop, block.layout.width)
        pulls += [
            (after[left], before[left], mail.left[parity]),
            (after[region], before[region], kept[parity]),
            (after[right], before[right], mail.right[parity]),
        ]
    return [pull for pull in pulls if pull[0].numel()]


def _letters(arena: Arena, parity: int, learner: int) -> list[Copy]:
    """What a learner writes of its row, and before it of its buffers, after its move."""
    (rank,) = (r for r, share in enumerate(arena.shares) if learner in share)
    copies = []
    for block in arena.blocks:
        row = block.rows[1 - parity, learner]
        if block.live is not None:
            copies.append((row, block.live[learner]))
        region, mail = block.regions[rank], block.of_learner[learner]
        copies.append((mail.left[1 - parity], row[: region.start]))
        copies.append((mail.right[1 - parity], row[region.stop :]))
    return [copy for copy in copies if copy[0].numel()]


def _slices(arena: Arena, rank: int, parity: int) -> list[Slice]:
    """What makes the rank's region, learner by learner, so that ranks don't show in the bits."""
    found = []
    for block in arena.blocks:
        region, kept = block.regions[rank], block.kept[rank]
        for learner in arena.shares[rank]:
            piece = block.layout.slices(arena.shares[-1].stop)[learner]
            place = slice(piece.start - region.start, piece.stop - region.start)
            if region.start <= piece.start < piece.stop <= region.stop:
                rows = _rows(arena, block, rank, parity, piece)
                found.append((kept[1 - parity, place], kept[parity, place], rows, block.is_pulled))
    return found


def _rows(arena: Arena, block: Block, rank: int, parity: int, piece: slice) -> list[Tensor]:
    """A piece of all rows, as this rank can read it: its own rows, and mail of the others."""
    return [
        block.rows[parity, learner, piece]
        if sender == rank
        else block.part(block.of_learner[learner], sender, parity, piece)
        for sender, share in enumerate(arena.shares)
        for learner in share
    ]


def _deliveries(arena: Arena, rank: int, parity: int) -> list[Copy]:
    """The rank's region of the next central model, for each other rank."""
    return [
        (block.part(block.to_rank[other], other, 1 - parity, region), block.kept[rank][1 - parity])
        for block in arena.blocks
        for region in [block.regions[rank]]
        for other in range(len(arena.shares))
        if other != rank and region.stop > region.start
    ]


def _read(arena: Arena, rank: int, parity: int) -> list[Tensor]:
    """The mail that the rank has read once its step is over."""
    found = []
    for block in arena.blocks:
        found += [block.to_rank[rank].left[parity], block.to_rank[rank].right[parity]]
        region = block.regions[rank]
        if region.stop > region.start:
            rows = _rows(arena, block, rank, parity, region)
            found += [row for j, row in enumerate(rows) if j not in arena.shares[rank]]
    return [mail for mail in found if mail.numel()]


def _send(mail: Mail, region: slice, parity: int, row: Tensor) -> None:
    mail.left[parity].copy_(row[: region.start])
    mail.right[parity].copy_(row[region.stop :])
