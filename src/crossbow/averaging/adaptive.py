"""Adaptive: learners at their mean, and a gain on what they do in common.

Learner j stands at w_j and its own optimizer moves it by d_j; m is the mean of all w_j. With the
gain r and the lead p,

    u_j = d_j + (r - 1) * (d_j + p * (d_j - d_j_previous))

    lag 1    w_j <- m + u_j               m as it was when the step began
    lag 0    w_j <- m + mean_i u_i

Either way the mean moves by the mean of the u_j, at once: what learners do in common is never late.
With lag 1 a learner takes its own move for the common one and hears of the others' a step later, so
it has a whole step of slack and only the differences between learners are late. With lag 0 all wait
for each other and stand at the same place.

A learner's own move is its optimizer's. What the gain adds to it, moves that one learner would have
made one after another, is a larger step, and a larger step overshoots where the loss is steep:
there d_j turns round from step to step, and the lead p brakes it. For SGD with momentum p is that
momentum, which makes the added part that of Nesterov's method.

docs/algorithms/adaptive.md has the derivation and what was measured.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crossbow.arena import Block
from crossbow.averaging.gain import Gain
from crossbow.averaging.gathering import Gathering, Letters, MeanOfHosts
from crossbow.averaging.guard import Guard
from crossbow.averaging.hosts import Exchange
from crossbow.comm.shared import Clocks
from crossbow.engines.sequential import Own, Sequential
from crossbow.errors import InputError
from crossbow.stats.noise import NoiseMeter, Pieces


@dataclass(frozen=True)
class Terms:
    """What decides how far learners move."""

    gain: Gain
    lead: float
    lag: int

    def weights(self, *, leads: bool) -> tuple[float, float]:
        """What u_j takes of d_j, and what it takes off of the move before."""
        gained, lead = self.gain.value - 1, self.lead if leads else 0.0
        return 1 + gained * (1 + lead), gained * lead


class Centered:
    """The learners of a rank, kept at the mean of all."""

    takes_closures = True
    weight = 1.0
    """A batch of the learner aboard counts as one, however large."""

    def __init__(
        self,
        letters: Letters,
        engine: Sequential,
        clocks: Clocks,
        rank: int,
        gathering: Gathering,
        pieces: Pieces,
        terms: Terms,
        *,
        first_learner: int,
        exchange: Exchange | None,
        barrier: Callable[[], object],
    ) -> None:
        """Begin at step 0.

        Args:
            letters: of this host.
            engine: runs this rank's learners.
            clocks: of the ranks, or of the thread that speaks to other hosts.
            rank: of this host's.
            gathering: finds the mean.
            pieces: of gradients.
            terms: gain, lead and lag.
            first_learner: of this host, among those of all hosts.
            exchange: makes the mean of all hosts, if this rank runs it.
            barrier: returns when all ranks have called it.
        """
        self.engine, self.clocks, self.terms = engine, clocks, terms
        self.step, self.turn = 0, 0
        self.follow: Callable[[Callable[[], list[Tensor]]], None] | None = None
        """Told once a step of the central model's rows, for those who want them."""
        self._letters, self._gathering, self._pieces = letters, gathering, pieces
        self._exchange, self._barrier = exchange, barrier
        self._mine = letters.arena.shares[rank]
        self._gathered = -1
        self._leads = True
        self._first_step = 0
        """Steps that were made before these letters: since when pieces of gradients take turns."""
        blocks = letters.arena.parameters
        self._center = [block.rows[0, self._mine.start].clone() for block in blocks]
        leading = self._mine if terms.lag else range(1)  # with lag 0 learners lead together
        self._last = [[torch.zeros_like(c) for c in self._center] for _ in leading]
        self.centers = self._center
        """With lag 0: where learners begin their step, for the exchange, which is not asked to
        read it while it is written."""
        self._moves = [torch.zeros_like(center) for center in self._center]
        self.guard = Guard([j + first_learner for j in self._mine])
        buffers = letters.arena.buffers
        self._held = [
            [*(b.rows[0, j] for b in blocks), *(_live(b)[j] for b in buffers)] for j in self._mine
        ]
        self._rows = [[_row_of(block, learner) for block in blocks] for learner in self._mine]

    def before_move(self, *, pulls_first: bool) -> None:
        """Know the mean at which this step began; `pulls_first` doesn't matter here."""
        if self.turn == 0:
            if self.terms.lag:
                self._gather()
            if self.follow:
                self.follow(lambda: self._center)
        self.engine.check()

    def after_move(self, *, rested: bool = False) -> None:
        """Say where the learner is now, and with the rank's last one end the step."""
        self.engine.reclaim_buffers()
        if not rested and not self.guard.passes(self.turn, self._held[self.turn]):
            self._reseed()
            rested = True
        parity = (self.step + 1) % 2
        for number, row in enumerate(self._rows[self.turn]):
            if self.terms.lag:
                before = row.letter[self.step % 2]
                torch.sub(row.now, before, out=self._moves[number])
                self._move(row.now, number, self._last[self.turn])
            row.letter[parity].copy_(row.now)
        self._publish(parity, has_gradient=not rested)
        self.turn += 1
        if self.turn == len(self._mine):
            self._end_step()
        self.engine.board(self.turn, 0)

    def rest(self) -> None:
        """Sit out a move: the mean hears of none, and statistics of nothing."""
        with torch.no_grad():
            self.before_move(pulls_first=True)
            if self.terms.lag:
                for last in self._last[self.turn]:
                    last.zero_()
            self.after_move(rested=True)

    @contextmanager
    def central_aboard(self, rows: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Let the model hold a copy of the mean; the other ranks soon wait meanwhile.

        Args:
            rows: weights to hold in the place of the mean's, a row for each block.
        """
        if self.engine.is_holding:  # save() inside central(), say
            yield
            return
        self._gather()
        arena, rows = self._letters.arena, rows or self.central_rows()
        parameters = [
            view
            for block, row in zip(arena.parameters, rows, strict=True)
            for view in block.layout.views(row)
        ]
        buffers = [
            view
            for block, mean in zip(arena.buffers, self._gathering.buffers(self.step), strict=True)
            for view in block.layout.views(mean)
        ]
        with self.engine.holding(parameters, buffers):
            yield

    def central_rows(self) -> list[Tensor]:
        """A copy of the mean, a row for each block."""
        self._gather()
        return [center.clone() for center in self._center]

    def round_begins(self) -> None:
        """Followers hear of the mean when it is known."""

    def settle(self) -> None:
        """All that was learned is averaged in its step, or the next one."""

    def learners(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Where each learner of this rank stands, and where it stood a step before."""
        now, before = self.step % 2, (self.step + 1) % 2
        return [
            ([r.letter[now] for r in rows], [r.letter[before] for r in rows]) for rows in self._rows
        ]

    def owns(self) -> list[Own]:
        """What each learner of this rank has to itself."""
        return self.engine.owns()

    def take_owns(self, owns: Sequence[Own]) -> None:
        """Give each learner of this rank something to itself."""
        self.engine.take_owns(owns)

    def pack(self, weights: Mapping[str, Tensor]) -> list[Tensor]:
        """Rows of these weights."""
        return [block.pack(weights) for block in self._letters.arena.parameters]

    def go_on(self, meter: NoiseMeter) -> None:
        """Go on from what another fleet's gradients said, and with optimizers that have moved.

        Their moves before aren't known, so the first one has no lead.
        """
        self.terms.gain.meter.inherit(meter)
        self._leads = False

    def restart(self) -> None:
        """Put the learners at the mean, with optimizers that begin anew; all ranks together."""
        if self.turn:
            raise InputError("a restart is possible between rounds only: see is_between_rounds")
        self._gather()
        self._barrier()  # all have read the letters
        for rows in self._rows:
            for row, center in zip(rows, self._center, strict=True):
                row.now.copy_(center)
                row.letter[self.step % 2].copy_(center)
        for last in self._last:
            for move in last:
                move.zero_()
        self.engine.forget()
        self._barrier()

    def state_dict(self) -> dict[str, Any]:
        """The mean, the gain's statistics, and the move that was made together."""
        self._gather()
        reduced = self._exchange.reduce.state_dict(self.step % 2) if self._exchange else {}
        return {
            "step": self._first_step + self.step,
            "leads": self._leads,
            "center": self._center,
            "last": [] if self.terms.lag else self._last[0],
            "noise": self.terms.gain.meter.state_dict(),
            **reduced,
        }

    def learner_states(self) -> list[dict[str, Any]]:
        """Each learner's rows and buffers, where the lag is 1 its last move, and what it told.

        What a host has yet to tell the others is its first learner's.
        """
        lasts = self._last if self.terms.lag else [[] for _ in self._mine]
        unsaid: list[Tensor] = []
        if reduction := self._reduction():
            self.clocks.wait(self.step + 1)
            unsaid = reduction.unsaid()
        return [
            {
                "rows": [row.now for row in rows],
                "buffers": [_live(block)[learner] for block in self._letters.arena.buffers],
                "last": last,
                "unsaid": unsaid if learner == 0 else [],
            }
            for learner, rows, last in zip(self._mine, self._rows, lasts, strict=True)
        ]

    def load_state_dict(
        self, shared: Mapping[str, Any], learners: Sequence[Mapping[str, Any]]
    ) -> None:
        """Go on from there, before the first step; all ranks together."""
        if self._exchange:
            self.clocks.wait(1)  # it has gone ahead: let it
        self._barrier()
        self._first_step, self._leads, self._gathered = shared["step"], shared["leads"], 0
        for center, saved in zip(self._center, shared["center"], strict=True):
            center.copy_(saved)
        self.terms.gain.meter.load_state_dict(shared["noise"])
        lasts = [own["last"] for own in learners] if self.terms.lag else [shared["last"]]
        for last, saved in zip(self._last, lasts, strict=True):
            for move, value in zip(last, saved, strict=True):
                move.copy_(value)
        for learner, rows, own in zip(self._mine, self._rows, learners, strict=True):
            for row, value in zip(rows, own["rows"], strict=True):
                row.now.copy_(value)
                row.letter.copy_(value.expand_as(row.letter))
            for block, value in zip(self._letters.arena.buffers, own["buffers"], strict=True):
                _load_buffers(block, learner, value)
        if self._exchange:
            self._exchange.reduce.load_state_dict(shared, 0)
        if reduction := self._reduction():
            for own in learners:
                reduction.keep(own["unsaid"])
        self._barrier()

    def _reduction(self) -> MeanOfHosts | None:
        """What the exchange does, if this rank runs it."""
        reduction = self._exchange.reduce if self._exchange else None
        assert reduction is None or isinstance(reduction, MeanOfHosts)
        return reduction

    def _reseed(self) -> None:
        """Take the move of the learner aboard back, which went bad, and its optimizer's state."""
        for number, row in enumerate(self._rows[self.turn]):
            before = row.letter[self.step % 2] if self.terms.lag else self._center[number]
            row.now.copy_(before)
            if self.terms.lag:
                self._last[self.turn][number].zero_()
        means = self._gathering.buffers(self.step)
        for block, mean in zip(self._letters.arena.buffers, means, strict=True):
            _live(block)[self._mine[self.turn]].copy_(mean)
        self.engine.forget_one(self.turn)

    def _gather(self) -> None:
        """Learn the mean at the beginning of this step, once."""
        if self._gathered == self.step:
            return
        self._gathered = self.step
        means = self._gathering.means(self.step)
        piece = self._pieces.due(self._first_step + self.step - 1) if self.step else None
        if piece is not None:
            self.terms.gain.meter.add(piece, *self._gathering.gradients(self.step))
        if self.terms.lag:
            self._center = means
        else:
            self._advance(means)

    def _advance(self, means: list[Tensor]) -> None:
        """With lag 0: move the mean by what all moved together, and all learners with it."""
        for number, (mean, center) in enumerate(zip(means, self._center, strict=True)):
            torch.sub(mean, center, out=self._moves[number])
            self._move(center, number, self._last[0])
            for rows in self._rows:
                rows[number].now.copy_(center)

    def _move(self, row: Tensor, number: int, last: list[Tensor]) -> None:
        """Set the row to the mean and u, and keep the move for the next step."""
        with_own, without_last = self.terms.weights(leads=self._leads)
        moves = self._moves[number]
        torch.add(self._center[number], moves, alpha=with_own, out=row)
        if self.terms.lead:
            row.sub_(last[number], alpha=without_last)
            self._moves[number], last[number] = last[number], moves

    def _publish(self, parity: int, *, has_gradient: bool) -> None:
        """Say what the learner aboard has in its buffers, and a piece of its gradient."""
        learner = self._mine[self.turn]
        for block in self._letters.arena.buffers:
            block.letters[learner].right[parity].copy_(_live(block)[learner])
        piece = self._pieces.due(self._first_step + self.step)
        if learner == 0:
            self._letters.looked[parity] = piece is not None
        if piece is None:
            return
        if has_gradient:
            self._pieces.copy(piece, self._letters.pieces[parity, learner])
        else:
            self._letters.pieces[parity, learner].fill_(torch.nan)  # which the meter passes over

    def _end_step(self) -> None:
        self.step += 1
        self.turn = 0
        self.clocks.advance(self.step)
        if not self.terms.lag:
            self._gather()
        self._leads = True


@dataclass(frozen=True)
class _Row:
    """A learner's place in a block."""

    now: Tensor
    letter: Tensor
    """(2, n)"""


def _live(block: Block) -> Tensor:
    assert block.live is not None
    return block.live


def _load_buffers(block: Block, learner: int, value: Tensor) -> None:
    letter = block.letters[learner].right
    _live(block)[learner].copy_(value)
    letter.copy_(value.expand_as(letter))


def _row_of(block: Block, learner: int) -> _Row:
    return _Row(block.rows[0, learner], block.letters[learner].right)
