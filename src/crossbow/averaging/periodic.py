"""Periodic: learners go their own ways for a period, and begin the next at the central model.

Each of k learners moves H times by its own optimizer, from z to w_j. Then all meet:

    delta = z - mean_j w_j                        what they moved, as a gradient would point
    v <- momentum * v + delta
    z <- z - rate * v                             or rate * (delta + momentum * v), by Nesterov
    w_j <- z

With rate 1 and momentum 0 z is the mean: local SGD (Stich, 2019, arXiv:1805.09767). With period 1
until the learning rate drops it is post-local SGD (Lin et al., 2020, arXiv:1808.07217), with
momentum SlowMo (Wang et al., 2020, arXiv:1910.00643), with Nesterov's DiLoCo (Douillard et al.,
2023, arXiv:2311.08105). SlowMo's v is in units of the learning rate, and is scaled with it.

In the terms of averaging/family.py the pull is 1, the central step `rate`, and the lag 0: all ranks
wait for each other, once a period.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, sub, zeros_like
from torch.optim import Optimizer

from crossbow.averaging.family import Periods
from crossbow.averaging.learners import Learners
from crossbow.averaging.meeting import Meeting, Papers, regions_of
from crossbow.engines.sequential import Sequential
from crossbow.errors import InputError

SWITCH_DROP = 0.6
"""Below this share of the largest rate so far, the learning rate has dropped."""


class Outer:
    """The step of the central model, or of a region of it."""

    def __init__(self, periods: Periods, central: Sequence[Tensor]) -> None:
        """Begin at rest.

        Args:
            periods: the settings.
            central: where it stands, one region a block.
        """
        self._periods = periods
        self._central = [row.clone() for row in central] if periods.moves_center else []
        self._velocity = [zeros_like(row) for row in self._central]
        self._rates = [0.0] * len(self._central)

    def __call__(self, number: int, mean: Tensor, words: Sequence[float]) -> None:
        """Turn the mean of a block's learners into the next central model."""
        periods = self._periods
        if not periods.moves_center:
            return
        central, velocity = self._central[number], self._velocity[number]
        delta = sub(central, mean, out=mean)
        velocity.mul_(periods.momentum * self._rescaled(number, words[1])).add_(delta)
        if periods.nesterov:
            central.sub_(delta, alpha=periods.rate)
            central.sub_(velocity, alpha=periods.rate * periods.momentum)
        else:
            central.sub_(velocity, alpha=periods.rate)
        mean.copy_(central)

    def velocity(self, number: int) -> Tensor | None:
        """Of a block's region; None if it never has one."""
        return self._velocity[number] if self._velocity else None

    def load(self, central: Sequence[Tensor], rate: float) -> None:
        """Go on from this central model, whose velocity is that of a learning rate."""
        for own, other in zip(self._central, central, strict=False):
            own.copy_(other)
        self._rates = [rate] * len(self._central)

    def restart(self) -> None:
        """Come to rest."""
        for velocity in self._velocity:
            velocity.zero_()

    def _rescaled(self, number: int, rate: float) -> float:
        """What the learning rate's change makes of the velocity."""
        before, self._rates[number] = self._rates[number], rate
        if not (self._periods.follows_rate and before and rate):
            return 1.0
        return rate / before


class Periodic(Learners):
    """The learners of a rank, which meet the others once a period."""

    def __init__(
        self,
        papers: Papers,
        engine: Sequential,
        optimizer: Optimizer,
        meeting: Meeting,
        mine: range,
        first_learner: int,
        periods: Periods,
        outer: Outer | None,
        *,
        spans_hosts: bool,
        barrier: Callable[[], object],
    ) -> None:
        """Begin at step 0.

        Args:
            papers: of this host.
            engine: runs this rank's learners.
            optimizer: of the model.
            meeting: averages.
            mine: this rank's learners.
            first_learner: of this host, among those of all hosts.
            periods: the settings.
            outer: the step of what is kept in this process, if anything is.
            spans_hosts: whether one process a host keeps all of the central model.
            barrier: returns when all ranks have called it.
        """
        super().__init__(papers.arena, engine, mine, first_learner)
        self._papers, self._optimizer, self._meeting = papers, optimizer, meeting
        self._periods, self._outer, self._barrier = periods, outer, barrier
        self._alone_for = 0
        """Rounds since all met."""
        self._has_moved = False
        """Whether any learner of this rank did in this round: who rests may not know the rate."""
        self._rate, self._highest_rate, self._has_switched = 0.0, 0.0, False
        self._keeps_all = spans_hosts
        self._regions = (
            [slice(0, block.layout.width) for block in papers.arena.parameters]
            if spans_hosts
            else regions_of(papers.arena, papers.arena.shares.index(mine))
        )
        blocks = range(len(papers.arena.parameters))
        self._letters = [[papers.letter(number, j) for number in blocks] for j in mine]

    @property
    def period(self) -> int:
        """Rounds between two meetings now."""
        return self._periods.period if self._has_switched or not self._periods.switches else 1

    def before_move(self, *, pulls_first: bool) -> None:
        """A learner moves where it stands."""
        self._has_moved = True
        self.tell_follower()
        self.engine.check()

    def after_move(self) -> None:
        """Take the next learner aboard; after the rank's last one, meet if it is time to."""
        self.engine.reclaim_buffers()
        if not self.is_well():
            self._reseed()
        self.put_buffers_down((self.step + 1) % 2)
        self.turn += 1
        if self.turn == len(self.mine):
            self.turn = 0
            self._alone_for += 1
            if self._alone_for == self.period:
                self._meet()
            self._has_moved = False
        self.engine.board(self.turn, 0)

    def rest(self) -> None:
        """Sit out a batch."""
        self.after_move()

    def settle(self) -> None:
        """End the period now."""
        if self._alone_for:
            self._meet()

    def central_rows(self) -> list[Tensor]:
        """A copy of what all began this period with, a row for each block."""
        return [letter.clone() for letter in self._letters[0]]

    def central_buffers(self) -> list[Tensor]:
        """The mean of the learners' buffers when they met, a row for each block."""
        return self._meeting.buffers()

    def learners(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Where each learner of this rank stands, and where it began this period."""
        return [(rows, self._letters[0]) for rows in self.rows]

    def state_dict(self) -> dict[str, Any]:
        """The central model, how far the period is, and between hosts all of the velocity."""
        return {
            "central": self._letters[0],
            "round": self._alone_for,
            "rates": (self._rate, self._highest_rate),
            "has_switched": self._has_switched,
            "velocity": self._velocities() if self._keeps_all else [],
            "buffers": [mean[self._meeting.met % 2] for mean in self._papers.buffer_means],
        }

    def learner_states(self) -> list[dict[str, Any]]:
        """Where each learner stands, and its slice of the velocity."""
        met, found = self._meeting.met % 2, []
        for own, learner in enumerate(self.mine):
            found.append(
                {
                    "rows": self.rows[own],
                    "buffers": self.live(own),
                    "met": [block.letters[learner].right[met] for block in self.arena.buffers],
                    "velocity": [v[place] for v, place in self._slices(own)],
                }
            )
        return found

    def load_state_dict(
        self, shared: Mapping[str, Any], learners: Sequence[Mapping[str, Any]]
    ) -> None:
        """Go on from there, before the first step; all ranks together."""
        self._alone_for, self._has_switched = shared["round"], shared["has_switched"]
        self._rate, self._highest_rate = shared["rates"]
        for mean, value in zip(self._papers.buffer_means, shared["buffers"], strict=True):
            mean.copy_(value.expand_as(mean))
        for own, (learner, state) in enumerate(zip(self.mine, learners, strict=True)):
            places = [*self.rows[own], *self.live(own), *self._letters[own]]
            values = [*state["rows"], *state["buffers"], *shared["central"]]
            places += [v[place] for v, place in self._slices(own)]
            for place, value in zip(places, [*values, *state["velocity"]], strict=True):
                place.copy_(value)
            for block, met in zip(self.arena.buffers, state["met"], strict=True):
                letter = block.letters[learner].right
                letter.copy_(met.expand_as(letter))
        if self._outer:
            central = shared["central"]
            self._outer.load(
                [row[r] for row, r in zip(central, self._regions, strict=True)], self._rate
            )
            for velocity, value in zip(self._velocities(), shared["velocity"], strict=False):
                velocity.copy_(value)
        self._barrier()

    def _velocities(self) -> list[Tensor]:
        """Of the regions that this process keeps, where they have one."""
        if not self._outer:
            return []
        found = [self._outer.velocity(number) for number in range(len(self._regions))]
        return [velocity for velocity in found if velocity is not None]

    def _slices(self, own: int) -> list[tuple[Tensor, slice]]:
        """A learner's slice of each velocity, within a host; between hosts nobody has one."""
        if self._keeps_all:
            return []
        found = []
        for block, region, velocity in zip(
            self.arena.parameters, self._regions, self._velocities(), strict=False
        ):
            piece = block.layout.slices(self.arena.shares[-1].stop)[self.mine[own]]
            found.append((velocity, slice(piece.start - region.start, piece.stop - region.start)))
        return found

    def _reseed(self) -> None:
        """Put the learner aboard, which went bad, at the central model, in place of its move."""
        central = [*self._letters[0], *self.central_buffers()]
        for place, value in zip(
            [*self.rows[self.turn], *self.live(self.turn)], central, strict=True
        ):
            place.copy_(value)
        self.engine.forget_one(self.turn)

    def restart(self) -> None:
        """End the period, and forget all velocities."""
        if self.turn:
            raise InputError("a restart is possible between rounds only: see is_between_rounds")
        self.settle()
        self._barrier()
        if self._outer:
            self._outer.restart()
        self.engine.forget()
        self._barrier()

    def _meet(self) -> None:
        """Let all learners begin anew at the next central model."""
        rate = float(self._optimizer.param_groups[0]["lr"]) if self._has_moved else 0.0
        for learner, rows, letters in zip(self.mine, self.rows, self._letters, strict=True):
            for row, letter in zip(rows, letters, strict=True):
                letter.copy_(row)
            self._papers.words[learner, 0] = 1.0
            self._papers.words[learner, 1] = rate
        _, self._rate = self._meeting.gather()
        self._meeting.close()
        for rows in self.rows:
            for row, letter in zip(rows, self._letters[0], strict=True):
                row.copy_(letter)
        if self._periods.resets:
            self.engine.forget()
        self._look_for_the_switch(self._rate)
        self.step += 1
        self._alone_for = 0

    def _look_for_the_switch(self, rate: float) -> None:
        """Notice the drop of the learning rate, or the meeting, after which periods are longer."""
        self._highest_rate = max(self._highest_rate, rate)
        after = self._periods.switch
        if after is None:
            self._has_switched |= rate < SWITCH_DROP * self._highest_rate
        else:
            self._has_switched |= self.step + 1 >= after
