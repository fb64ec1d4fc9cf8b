"""Synchronous: the steps of an averaging, as one rank takes them.

Step t of a rank, for each of its learners: gradients at the row of parity t; pull; local move into
the row of the other parity. Then, for the rank: its region of the central model at t + 1; its
answers to the other ranks' letters; letters of its own; its clock.

The rank waits in one place, before its first pull, until every rank has completed step t - 1. So it
stands only if another is a whole step behind. docs/design/clocks.md says why one wait is enough.

With a period a step has several rounds. Learners are pulled in the first one, and then move where
they stand; letters are written after the last one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from crossbow.arena import NOTHING, Arena, Block
from crossbow.averaging.family import advance, average, pull_first, pull_last
from crossbow.averaging.guard import Guard
from crossbow.averaging.hosts import Exchange
from crossbow.comm.shared import Clocks
from crossbow.engines.sequential import Own, Sequential
from crossbow.errors import InputError


class Synchronous:
    """The learners of a rank, kept together with all others."""

    takes_closures = True
    weight = 1.0
    """A batch of the learner aboard counts as one, however large."""

    def __init__(
        self,
        arena: Arena,
        engine: Sequential,
        clocks: Clocks,
        rank: int,
        num_learners: int,
        alpha: float,
        momentum: float,
        period: int,
        *,
        first_learner: int,
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
            period: rounds between two pulls.
            first_learner: of this host, among those of all hosts.
            exchange: keeps the central model, if this rank runs it.
            barrier: returns when all ranks have called it.
        """
        self.engine, self.clocks = engine, clocks
        self.step, self.turn = 0, 0
        self._arena, self._rank, self._barrier = arena, rank, barrier
        self._exchange = exchange
        self._num_learners, self._alpha, self._momentum = num_learners, alpha, momentum
        self._period, self._round, self._has_pulled = period, 0, False
        self.follow: Callable[[Callable[[], list[Tensor]]], None] | None = None
        """Told once a step of the central model's rows, for those who want them."""
        mine = arena.shares[rank]
        self._count = len(mine)
        # views are made once: indexing a tensor takes longer than averaging a small row
        self._pulls = [[_pulls(arena, rank, p, j) for j in mine] for p in (0, 1)]
        self._publishings = [[_publishings(arena, p, j) for j in mine] for p in (0, 1)]
        self._held = [[_held(arena, p, j) for j in mine] for p in (0, 1)]
        self.guard = Guard([j + first_learner for j in mine])
        self._slices = [_slices(arena, rank, p) for p in (0, 1)]
        self._answers = [_answers(arena, rank, p) for p in (0, 1)]
        self._letters = [_letters(arena, rank, p) for p in (0, 1)]

    @property
    def parity(self) -> int:
        """Which of the two rows this step reads."""
        return self.step % 2

    def before_move(self, *, pulls_first: bool) -> None:
        """Prepare the row that the learner aboard is about to move in.

        Args:
            pulls_first: whether the pull may come before the local move.
        """
        if self._round:
            self.engine.check()
            return
        if self.turn == 0:
            self.clocks.wait(self.step)
            if self.follow:
                self.follow(self.central_rows)
        for after, before, central in self._pulls[self.parity][self.turn]:
            if pulls_first:
                pull_first(after, before, central, self._alpha)
            else:
                after.copy_(before)
        self._has_pulled = pulls_first
        self.engine.cross(1 - self.parity)

    def after_move(self) -> None:
        """Finish the row, and with the rank's last learner the step; take the next one aboard."""
        self.engine.reclaim_buffers()
        if not self.guard.passes(self.turn, self._held[1 - self.parity][self.turn]):
            self._reseed()
        elif not (self._has_pulled or self._round):
            for after, before, central in self._pulls[self.parity][self.turn]:
                pull_last(after, before, central, self._alpha)
        for published, live in self._publishings[self.parity][self.turn]:
            published.copy_(live)
        self.turn += 1
        if self.turn == self._count:
            self._end_round()
        self.engine.board(self.turn, self._standing)

    def rest(self) -> None:
        """Average the learner aboard without a move of its own."""
        with torch.no_grad():
            self.before_move(pulls_first=True)
            self.after_move()

    @contextmanager
    def central_aboard(self, rows: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Let the model hold a copy of the central model; the other ranks soon wait meanwhile.

        Args:
            rows: weights to hold in the place of the central model's, a row for each block.
        """
        if self.engine.is_holding:  # save() inside central(), say
            yield
            return
        weights = rows or self.central_rows()
        parameters = [
            view
            for block, row in zip(self._arena.parameters, weights, strict=True)
            for view in block.layout.views(row)
        ]
        self.clocks.wait(self.step)
        buffers = [
            view
            for block in self._arena.buffers
            for view in block.layout.views(self._central(block))
        ]
        with self.engine.holding(parameters, buffers):
            yield

    def central_rows(self) -> list[Tensor]:
        """A copy of the central model, a row for each block."""
        self.clocks.wait(self.step)
        return [self._central(block) for block in self._arena.parameters]

    def round_begins(self) -> None:
        """Followers hear of the central model when it is known."""

    def settle(self) -> None:
        """All that was learned is averaged in its step, or the next one."""

    def learners(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Where each learner of this rank stands, and where it stood a step before."""
        blocks, mine, now = self._arena.parameters, self._arena.shares[self._rank], self._standing
        return [
            ([b.rows[now, j] for b in blocks], [b.rows[1 - now, j] for b in blocks]) for j in mine
        ]

    def owns(self) -> list[Own]:
        """What each learner of this rank has to itself."""
        return self.engine.owns()

    def take_owns(self, owns: Sequence[Own]) -> None:
        """Give each learner of this rank something to itself."""
        self.engine.take_owns(owns)

    def pack(self, weights: Mapping[str, Tensor]) -> list[Tensor]:
        """Rows of these weights."""
        return [block.pack(weights) for block in self._arena.parameters]

    def restart(self) -> None:
        """Put the learners at the central model and take its velocity; all ranks together."""
        if self.turn:
            raise InputError("a restart is possible between rounds only: see is_between_rounds")
        # an exchange goes on by itself: it must have made its next step, and be waiting for ours
        self.clocks.wait(self.step if self._arena.ranks_keep else self.step + 1)
        self._barrier()
        for block in self._arena.parameters:
            central = self._central(block)
            region, kept = block.regions[self._rank], block.kept[self._rank]
            kept.copy_(central[region].expand_as(kept))
            for learner in self._arena.shares[self._rank]:
                block.rows[:, learner].copy_(central)
                # for the keepers; between hosts in the place of the answer, which was from old rows
                block.letters[learner].left[self.parity].copy_(central[: region.start])
                block.letters[learner].right[self.parity].copy_(central[region.stop :])
        if self._exchange:
            self._exchange.reduce.restart(self.parity)
        self.engine.forget()
        self._barrier()

    def state_dict(self) -> dict[str, Any]:
        """The central model at the beginning of a round, and between hosts the one after."""
        state = {"central": self._all_central(), "round": self._round}
        if self._exchange:
            self.clocks.wait(self.step + 1)
            return {**state, **self._exchange.reduce.state_dict(self.parity)}
        return state

    def learner_states(self) -> list[dict[str, Any]]:
        """Each learner's rows, and its slice of the central model a step before."""
        blocks, rank = self._arena.blocks, self._rank
        found = []
        for learner in self._arena.shares[rank]:
            rows = [
                b.rows[self._standing, learner] if b.live is None else b.live[learner]
                for b in blocks
            ]
            places = [_place(self._arena, block, rank, learner) for block in blocks]
            previous = [
                block.kept[rank][1 - self.parity, place]
                for block, place in zip(blocks, places, strict=True)
            ]
            found.append({"rows": rows, "previous": previous})
        return found

    def load_state_dict(
        self, shared: Mapping[str, Any], learners: Sequence[Mapping[str, Any]]
    ) -> None:
        """Go on from there, before the first step; all ranks together."""
        if self._exchange:
            self.clocks.wait(1)  # it has gone ahead: let it
        self._barrier()
        for learner, own in zip(self._arena.shares[self._rank], learners, strict=True):
            blocks = zip(
                self._arena.blocks, own["rows"], own["previous"], shared["central"], strict=True
            )
            for block, row, previous, central in blocks:
                self._load_row(block, learner, row)
                self._load_central(block, learner, central, previous)
        self._round = shared["round"]
        self.engine.board(0, self._standing)
        self._barrier()  # an exchange answers all letters of its host, which are written now
        if self._exchange:
            self._exchange.reduce.load_state_dict(shared, 0)
        if self._round:  # the pull was made, and letters are answered
            for letter, answer in self._answers[0]:
                letter.copy_(answer)
        self._barrier()

    def _reseed(self) -> None:
        """Put the learner aboard, which went bad, at the central model, in place of its move."""
        learner = self._arena.shares[self._rank].start + self.turn
        for block in self._arena.blocks:
            row = block.rows[1 - self.parity] if block.live is None else block.live
            row[learner].copy_(self._central(block))
        self.engine.forget_one(self.turn)

    def _load_row(self, block: Block, learner: int, row: Tensor) -> None:
        block.rows[:, learner].copy_(row.expand_as(block.rows[:, learner]))
        if block.live is not None:
            block.live[learner].copy_(row)
        region, letter = block.regions[self._rank], block.letters[learner]
        letter.left[0].copy_(row[: region.start])
        letter.right[0].copy_(row[region.stop :])

    def _load_central(self, block: Block, learner: int, central: Tensor, previous: Tensor) -> None:
        region, letter = block.regions[self._rank], block.letters[learner]
        place = _place(self._arena, block, self._rank, learner)
        kept = block.kept[self._rank]
        kept[0].copy_(central[region])
        kept[1, place].copy_(previous)
        letter.left[1].copy_(central[: region.start])
        letter.right[1].copy_(central[region.stop :])

    def _all_central(self) -> list[Tensor]:
        self.clocks.wait(self.step)
        return [self._central(block) for block in self._arena.blocks]

    def _central(self, block: Block) -> Tensor:
        """A copy of the central model of this step."""
        answer = block.letters[self._arena.shares[self._rank].start]
        kept = block.kept[self._rank][self.parity]
        return torch.cat([answer.left[1 - self.parity], kept, answer.right[1 - self.parity]])

    @property
    def _standing(self) -> int:
        """In which of the two rows a learner stands before its move: after a pull in the other."""
        return 1 - self.parity if self._round else self.parity

    def _end_round(self) -> None:
        """Move the central model after a pull, and at the end of a period write the letters."""
        self.turn = 0
        if self._round == 0:
            self._move_center()
        self._round = (self._round + 1) % self._period
        if self._round:
            return
        for letter, written in self._letters[self.parity]:
            letter.copy_(written)
        self.step += 1
        self.clocks.advance(self.step)

    def _move_center(self) -> None:
        """Make this rank's region of the next central model, and answer the letters with it."""
        k = self._num_learners
        for oldest, central, rows, is_pulled in self._slices[self.parity]:
            if is_pulled:
                advance(oldest, central, rows, k, self._alpha, self._momentum)
            else:
                average(oldest, rows, k)
        for letter, answer in self._answers[self.parity]:
            letter.copy_(answer)


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
        region, kept = block.regions[rank], block.kept[rank]
        answer = block.letters[arena.shares[rank].start]
        left, right = slice(0, region.start), slice(region.stop, block.layout.width)
        pulls += [
            (after[left], before[left], answer.left[1 - parity]),
            (after[region], before[region], kept[parity]),
            (after[right], before[right], answer.right[1 - parity]),
        ]
    return [pull for pull in pulls if pull[0].numel()]


def _publishings(arena: Arena, parity: int, learner: int) -> list[Copy]:
    """What a learner copies of its buffers after its move."""
    return [
        (block.rows[1 - parity, learner], block.live[learner])
        for block in arena.buffers
        if block.live is not None
    ]


def _held(arena: Arena, parity: int, learner: int) -> list[Tensor]:
    """The rows that a learner has moved to, if these are of this parity, and its buffers."""
    rows = [block.rows[parity, learner] for block in arena.parameters]
    return rows + [block.live[learner] for block in arena.buffers if block.live is not None]


def _slices(arena: Arena, rank: int, parity: int) -> list[Slice]:
    """What makes the rank's region, learner by learner, so that ranks don't show in the bits."""
    found = []
    for block in arena.blocks:
        kept = block.kept[rank]
        for learner in arena.shares[rank]:
            piece = block.layout.slices(arena.shares[-1].stop)[learner]
            place = _place(arena, block, rank, learner)
            if place.stop > place.start:
                rows = [
                    block.rows[parity, j, piece]
                    if sender == rank
                    else block.part(j, sender, parity, piece)
                    for sender, share in enumerate(arena.shares)
                    for j in share
                ]
                found.append((kept[1 - parity, place], kept[parity, place], rows, block.is_pulled))
    return found


def _place(arena: Arena, block: Block, rank: int, learner: int) -> slice:
    """Where a learner's slice of the central model lies in its rank's region: empty if nowhere."""
    region, piece = block.regions[rank], block.layout.slices(arena.shares[-1].stop)[learner]
    if not region.start <= piece.start < piece.stop <= region.stop:
        return NOTHING
    return slice(piece.start - region.start, piece.stop - region.start)


def _answers(arena: Arena, rank: int, parity: int) -> list[Copy]:
    """What the rank writes over the letters it has read: the next central model.

    Only the letter of a rank's first learner is read again, but a line is not left merely read.
    """
    return [
        (block.part(learner, other, parity, region), block.kept[rank][1 - parity])
        for block in arena.blocks
        for region in [block.regions[rank]]
        for other, share in enumerate(arena.shares)
        for learner in share
        if other != rank and region.stop > region.start
    ]


def _letters(arena: Arena, rank: int, parity: int) -> list[Copy]:
    """What the rank writes of its learners' next rows, over the answers it has read."""
    copies = []
    for block in arena.blocks:
        region = block.regions[rank]
        for learner in arena.shares[rank]:
            row, letter = block.rows[1 - parity, learner], block.letters[learner]
            copies.append((letter.left[1 - parity], row[: region.start]))
            copies.append((letter.right[1 - parity], row[region.stop :]))
    return [copy for copy in copies if copy[0].numel()]
