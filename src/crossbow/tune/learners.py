"""Learners: how many of them are best is found while they train.

A run is watched in windows of about half a second. From a number that is kept, the next one up or
down is tried for a few windows, and kept instead if its goodput (tune/goodput.py) is better by more
than chance explains; so steps go uphill until neither neighbor is better. Then the run is left
alone, until its speed has changed for good, or the gradients' noise says that a number which was
tried before should be better by now.

Windows are compared by their medians, which a short load on the machine hardly moves. Time at
numbers that were tried and not kept is what tuning costs: it stays below a share of the run.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from crossbow.tune.goodput import efficiency

LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Learners of a rank that may be tried."""

SETTLING_WINDOWS = 1
"""After a change, not counted: caches and readers are new."""

FEWEST_WINDOWS, MOST_WINDOWS = 4, 12
LEAST_GAIN = 0.02
ERRORS = 2.0
"""A difference counts that is larger than so many of its standard errors."""

LASTING_WINDOWS, LASTING_CHANGE, LASTING_SHARE = 20, 0.15, 0.75
"""Speed has changed for good if of so many windows this share is off to one side by so much."""

PROMISE = 0.05
"""A number that was tried is tried again if it is worth more by this since, and promises a gain."""

SHARE, CREDIT_S, TRIAL_S = 0.03, 12.0, 4.0
"""Tuning may cost so much of the run, of it a few seconds at its beginning; a trial about that."""


@dataclass(frozen=True)
class Move:
    """A decision: how many learners from now on, and why."""

    learners: int
    reason: str


@dataclass(frozen=True)
class _Tried:
    """A number beside the one that is kept."""

    ratio: float
    """Of samples a second."""
    worth: float
    """The ratio of what a sample was worth then."""


class Tuner:
    """Decides on the number of learners; all ranks that see the same decide the same."""

    def __init__(
        self,
        learners: int,
        choices: Sequence[int],
        batch_size: int,
        total_samples: float = math.inf,
    ) -> None:
        """Begin.

        Args:
            learners: that the run starts with.
            choices: that may be tried.
            batch_size: of one learner.
            total_samples: of the run, by which it is known how long it takes.
        """
        self.learners = self.kept = learners
        """At work now, and when nothing is tried."""
        self.spent_s = 0.0
        """Time at numbers that were tried and not kept."""
        self._choices = sorted({*choices, learners})
        self._batch_size, self._total_samples = batch_size, total_samples
        self._critical_batch: float | None = None
        self._rates: deque[float] = deque(maxlen=LASTING_WINDOWS)
        self._trial: list[float] = []
        self._tried: dict[int, _Tried] = {}
        """From the number that is kept."""
        self._reference: float | None = None
        self._goes_up = True
        self._promised = 0
        self._seconds = self._mark = self._trial_start = 0.0
        self._samples, self._settling = 0, SETTLING_WINDOWS

    def observe(self, seconds: float, samples: int, critical_batch: float | None) -> Move | None:
        """Take note of where the run stands; return what to change, if anything.

        Args:
            seconds: spent training so far.
            samples: read so far.
            critical_batch: by the gradients' noise, if it is known.
        """
        if critical_batch is not None:
            self._critical_batch = critical_batch
        rate = self._rate(seconds, samples)
        if rate is None:
            return None
        if self.learners != self.kept:
            self._trial.append(rate)
            return self._judge()
        self._rates.append(rate)
        self._watch()
        return self._try_next()

    def limit(self, most: int) -> None:
        """Try no more learners than so many."""
        self._choices = [k for k in self._choices if k <= max(most, self.kept)]

    def _rate(self, seconds: float, samples: int) -> float | None:
        """Samples a second since the last look; None if that says nothing of this number."""
        elapsed, read = seconds - self._seconds, samples - self._samples
        if elapsed <= 0 or read <= 0:
            return None
        self._seconds, self._samples = seconds, samples
        if self._settling:
            self._settling -= 1
            return None
        return read / elapsed

    def _judge(self) -> Move | None:
        """Compare a trial with the number it started from, as soon as that is possible."""
        ratio, error = self._ratio()
        tried = _Tried(ratio, self._worth(self.learners) / self._worth(self.kept))
        gain = tried.ratio * tried.worth - 1
        if len(self._trial) < FEWEST_WINDOWS:
            return None
        if gain > max(LEAST_GAIN, ERRORS * error):
            return self._keep(tried)
        if gain + ERRORS * error < LEAST_GAIN or len(self._trial) >= MOST_WINDOWS:
            return self._give_up(tried, gain)
        return None

    def _ratio(self) -> tuple[float, float]:
        """Speed in the trial over that before, and the standard error of it."""
        before, now = _center(self._rates), _center(self._trial)
        return now[0] / before[0], math.hypot(now[1], before[1])

    def _keep(self, tried: _Tried) -> Move | None:
        """Stay where the trial is; where it came from is known."""
        self._tried = {self.kept: _Tried(1 / tried.ratio, 1 / tried.worth)}
        self._goes_up = self.learners > self.kept
        self.kept, self._reference = self.learners, None
        self._rates = deque(self._trial, maxlen=LASTING_WINDOWS)
        self._trial, self._promised = [], 0
        return self._try_next()

    def _give_up(self, tried: _Tried, gain: float) -> Move:
        """Go back."""
        self._tried[self.learners] = tried
        self.spent_s += self._seconds - self._trial_start
        self._trial = []
        how = f"{abs(gain):.0%} {'better, which may be chance' if gain > 0 else 'worse'}"
        return self._go(self.kept, f"{self.learners} learners got on {how}")

    def _try_next(self) -> Move | None:
        """Try a neighbor that wasn't, if enough is known of this number."""
        if len(self._rates) < FEWEST_WINDOWS or not self._may_try():
            return None
        place = self._choices.index(self.kept)
        up, down = self._choices[place + 1 : place + 2], self._choices[max(0, place - 1) : place]
        ways = [*up, *down] if self._goes_up else [*down, *up]
        untried = [k for k in ways if k not in self._tried]
        if not untried:
            self._reference = self._reference or _center(self._rates)[0]
            return None
        self._trial_start = self._seconds
        return self._go(untried[0], f"to see whether {untried[0]} get on better than {self.kept}")

    def _may_try(self) -> bool:
        length_s = self._seconds * self._total_samples / self._samples
        allowed = min(SHARE * length_s, max(CREDIT_S, SHARE * self._seconds))
        return self.spent_s + TRIAL_S <= allowed

    def _watch(self) -> None:
        """In a steady run: forget what was tried once that can't be right any more."""
        if self._reference is None or len(self._rates) < LASTING_WINDOWS:
            return
        off = [rate / self._reference - 1 for rate in self._rates]
        slower, faster = (sum(s * o > LASTING_CHANGE for o in off) for s in (-1, 1))
        if max(slower, faster) >= LASTING_SHARE * LASTING_WINDOWS:
            self._tried, self._reference = {}, None
            self._rates = deque(list(self._rates)[-FEWEST_WINDOWS:], maxlen=LASTING_WINDOWS)
            return
        better = [k for k, tried in self._tried.items() if self._promises(k, tried)]
        self._promised = self._promised + 1 if better else 0
        if self._promised >= LASTING_WINDOWS:
            for k in better:
                del self._tried[k]
            self._promised, self._reference = 0, None

    def _promises(self, learners: int, tried: _Tried) -> bool:
        """Whether what the noise says by now would make a number better that wasn't."""
        worth = self._worth(learners) / self._worth(self.kept)
        return worth > (1 + PROMISE) * tried.worth and tried.ratio * worth > 1 + PROMISE

    def _worth(self, learners: int) -> float:
        return efficiency(learners, self._batch_size, self._critical_batch)

    def _go(self, learners: int, reason: str) -> Move:
        self.learners, self._settling = learners, SETTLING_WINDOWS
        return Move(learners, reason)


def _center(rates: Sequence[float] | deque[float]) -> tuple[float, float]:
    """The median and, relative to it, its standard error, by the median deviation."""
    middle = statistics.median(rates)
    deviation = statistics.median(abs(rate - middle) for rate in rates)
    return middle, 1.4826 * 1.2533 * deviation / math.sqrt(len(rates)) / middle
