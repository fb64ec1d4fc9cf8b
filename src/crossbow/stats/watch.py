"""Watch: where the time of a step goes.

Time is cut at marks: what lies between two of them belongs to the part that the first one names.

    data        making the batch
    compute     forward, backward, and the optimizer's own move
    averaging   what keeps learners together
    waiting     for other ranks, which happens inside of averaging and is taken out of it

What happens between two steps belongs to none. Only some rounds are looked at, so that the loop
stays free; a timeline wants all of some. Times are the host's: on a GPU those of launching.
"""

import time
from typing import NamedTuple

DATA, COMPUTE, AVERAGING, WAITING = PARTS = ("data", "compute", "averaging", "waiting")

EVERY = 7
"""Rounds from one that is looked at to the next: odd, since other things happen every 8th."""


class Span(NamedTuple):
    """A learner's time on one part of a step; one of waiting lies inside one of averaging."""

    part: str
    learner: int
    round: int
    began: float
    ended: float


class Watch:
    """Adds up the parts of some steps, and keeps the spans of others."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.waited_s = 0.0
        """For other ranks, in all rounds."""
        self._kept = range(0)
        self._round, self._is_on = -1, False
        self._part, self._since, self._learner = "", 0.0, 0
        self._sums = dict.fromkeys(PARTS, 0.0)
        self._steps = 0

    def keep(self, rounds: range) -> None:
        """Keep the spans of these rounds, counted from the first."""
        self._kept = rounds

    @property
    def has_kept(self) -> bool:
        """Whether the last of the rounds to keep is over."""
        return self._round >= self._kept.stop

    def round_begins(self) -> None:
        """Decide whether to look at this round."""
        self.step_ended()
        self._round += 1
        self._is_on = self._round % EVERY == EVERY - 1 or self._round in self._kept

    def step_begins(self, learner: int) -> None:
        """A learner asks for a batch."""
        if self._is_on:
            self.mark(DATA)
            self._learner = learner
            self._steps += 1

    def mark(self, part: str) -> None:
        """From now on time goes to this part."""
        if self._is_on:
            now = time.perf_counter()
            if self._part:
                self._add(self._part, self._since, now)
            self._part, self._since = part, now

    def step_ended(self) -> None:
        """From now on time goes nowhere."""
        self.mark("")

    def waited(self, began: float, ended: float) -> None:
        """Hear of a wait."""
        self.waited_s += ended - began
        if self._is_on and self._part == AVERAGING:
            self._add(WAITING, began, ended)
            self._sums[AVERAGING] -= ended - began

    def read(self) -> dict[str, float] | None:
        """Mean seconds of each part of a learner's step since the last reading, if any was seen."""
        sums, steps = self._sums, self._steps
        self._sums, self._steps = dict.fromkeys(PARTS, 0.0), 0
        return {part: total / steps for part, total in sums.items()} if steps else None

    def _add(self, part: str, began: float, ended: float) -> None:
        self._sums[part] += ended - began
        if self._round in self._kept:
            self.spans.append(Span(part, self._learner, self._round, began, ended))
