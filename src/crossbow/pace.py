"""Pace: how fast each rank is, and batches that follow.

A rank is timed from round to round, without what it waited for others. Now and then all ranks tell
each other, and share the samples of a round anew, so that all finish together
(averaging/partition.py). What a round holds in all stays as it is.
"""

import math
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from crossbow.averaging.partition import Curve, CurveMeter, partition, rebalanced
from crossbow.comm.world import World
from crossbow.data.loader import Stretch

SPAN_S = 1.0
"""About how long sizes stay; to talk takes a millisecond."""
FEWEST_ROUNDS = 4


class Times(NamedTuple):
    """What a rank did in some rounds."""

    rounds: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0
    busy_squares: float = 0.0
    """The sum over rounds of the squares of busy seconds."""
    samples: int = 0

    @property
    def mean_s(self) -> float:
        """Seconds a round, without waiting."""
        return self.busy_s / self.rounds if self.rounds else 0.0

    @property
    def spread_s(self) -> float:
        """By how much rounds vary: their standard deviation."""
        if not self.rounds:
            return 0.0
        return math.sqrt(max(0.0, self.busy_squares / self.rounds - self.mean_s**2))

    @property
    def idle(self) -> float:
        """The share of its time that the rank waited."""
        whole = self.busy_s + self.waited_s
        return self.waited_s / whole if whole else 0.0

    def since(self, before: "Times") -> "Times":
        """What was added after an earlier look."""
        return Times(
            self.rounds - before.rounds,
            self.busy_s - before.busy_s,
            self.waited_s - before.waited_s,
            self.busy_squares - before.busy_squares,
            self.samples - before.samples,
        )


class Stopwatch:
    """Adds up the times of rounds; one in which something else happened doesn't count."""

    def __init__(self) -> None:
        self._rounds = self._read = self._samples = 0
        self._busy_s = self._waited_s = self._squares = 0.0
        self._began: tuple[float, float] | None = None

    @property
    def times(self) -> Times:
        """Of all rounds so far."""
        return Times(self._rounds, self._busy_s, self._waited_s, self._squares, self._read)

    def reads(self, samples: int) -> None:
        """A learner reads so many samples in this round."""
        self._samples += samples

    def round_begins(self, waited_s: float) -> None:
        """End a round and begin the next one, with all that was ever waited until now."""
        now = time.perf_counter()
        if self._began:
            waited = waited_s - self._began[1]
            busy = now - self._began[0] - waited
            self._rounds += 1
            self._busy_s += busy
            self._waited_s += waited
            self._squares += busy * busy
            self._read += self._samples
        self._began, self._samples = (now, waited_s), 0

    def forget_round(self) -> None:
        """This round's time is not that of training."""
        self._began = None


class Pace:
    """The sizes of all learners' batches, which follow the speeds of their ranks."""

    def __init__(self, shares: Sequence[range], batch_size: int, world: World) -> None:
        """Begin with equal batches.

        Args:
            shares: the learners of every rank.
            batch_size: of a learner, on average.
            world: of the ranks.
        """
        self._shares, self._world = shares, world
        self._meters = [CurveMeter() for _ in shares]
        self._is_warm, self._before = False, Times()
        self._totals = [batch_size * len(share) for share in shares]
        self.rounds = FEWEST_ROUNDS
        """How many to make at these sizes before ranks talk again."""

    @property
    def sizes(self) -> list[int]:
        """Samples of each learner in a round: those of a rank, divided evenly."""
        return [
            size
            for share, total in zip(self._shares, self._totals, strict=True)
            for size in partition(total, [Curve(0.0, 1.0)] * len(share))
        ]

    def follow(self, times: Times) -> None:
        """Tell the others what all rounds so far took, and share samples anew; all together."""
        heard: list[Times] = self._world.gather(times.since(self._before))
        self._before = times
        longest = max(said.busy_s + said.waited_s for said in heard)
        rounds = max(said.rounds for said in heard)
        if not all(said.rounds and said.busy_s > 0 for said in heard):
            return
        self.rounds = max(FEWEST_ROUNDS, round(SPAN_S * rounds / longest))
        if not self._is_warm:  # the first steps make buffers, compile, read
            self._is_warm = True
            return
        for meter, total, said in zip(self._meters, self._totals, heard, strict=True):
            meter.add(total, said.mean_s)
        curves = [meter.read() for meter in self._meters]
        known = [curve for curve in curves if curve]
        self._totals = rebalanced(self._totals, known, [len(share) for share in self._shares])


FEWEST_SECONDS = 3.0
"""For which ranks are watched before learners move."""
WORTH_MOVING = 0.15
"""What moving learners must promise to save of a round: it costs about a second."""


def better_speeds(shares: Sequence[range], ranks: Sequence[Times]) -> list[float] | None:
    """Speeds by which learners would be shared better than they are, if that is worth it.

    >>> better_speeds([range(2), range(2, 4)], [Times(20, 2.0, 2.0), Times(20, 6.0)])
    [20.0, 6.666666666666667]
    >>> better_speeds([range(3), range(3, 4)], [Times(20, 3.0, 0.5), Times(20, 3.3)])
    """
    counts = [len(share) for share in shares]
    each = [times.mean_s / count for times, count in zip(ranks, counts, strict=True)]
    if min(each) <= 0:
        return None
    curves = [Curve(0.0, seconds) for seconds in each]
    better = rebalanced(counts, curves, [1] * len(counts), WORTH_MOVING)
    return None if better == counts else [1 / seconds for seconds in each]


LITTLE = 0.05
"""By what share a rank has to speed the others up, or it is spoken of."""
MUCH = 0.15
"""By what share a rank has to be slower, or its rounds to vary, to be spoken of."""


def remarks(ranks: Sequence[Times]) -> list[str]:
    """What a person would like to know of these ranks' times; nothing, if all is well.

    >>> remarks([Times(10, 1.0, 1.0, 0.1), Times(10, 2.0, 0.0, 0.4)])
    ['rank 1 is slowest: 200 ms a round where the fastest takes 100; rank 0 waits 50 % of its time']
    """
    slow = max(range(len(ranks)), key=lambda rank: ranks[rank].mean_s)
    fastest = min(times.mean_s for times in ranks)
    idle = max(range(len(ranks)), key=lambda rank: ranks[rank].idle)
    found = []
    if ranks[slow].mean_s > (1 + MUCH) * fastest:
        line = f"rank {slow} is slowest: {1e3 * ranks[slow].mean_s:.3g} ms a round"
        line += f" where the fastest takes {1e3 * fastest:.3g}"
        if ranks[idle].idle > MUCH:
            line += f"; rank {idle} waits {ranks[idle].idle:.0%} of its time".replace("%", " %")
        found.append(line)
    speeds = [times.samples / times.busy_s if times.busy_s else 0.0 for times in ranks]
    for rank, speed in enumerate(speeds):
        others = sum(speeds) - speed
        if speed and others and speed < LITTLE * others:
            found.append(
                f"rank {rank} adds {100 * speed / others:.1f} % to the others' speed at best: "
                "leave it out, with fewer --ranks"
            )
    for rank, times in enumerate(ranks):
        if times.spread_s > 2 * MUCH * times.mean_s:
            found.append(
                f"rank {rank}'s rounds vary: {1e3 * times.mean_s:.3g} +- {1e3 * times.spread_s:.3g}"
                " ms; a neighbor on its core, or reading, may be why"
            )
    return found


def sized_rounds(
    start: int, stop: int, sizes: Sequence[int], learner: int
) -> Iterator[tuple[int, Stretch | None]]:
    """What a learner reads of the stream from start to stop, when batches have these sizes.

    What is left at the very end is shared out in the same proportions, as far as it goes.

    >>> list(sized_rounds(0, 10, sizes=[4, 2], learner=1))
    [(0, (4, 6)), (6, (9, 10))]
    """
    for before in range(start, stop, sum(sizes)):
        left = stop - before
        here = sizes if left >= sum(sizes) else partition(left, [Curve(0, 1 / s) for s in sizes])
        ends = list(accumulate(here, initial=before))
        begin, end = ends[learner], ends[learner + 1]
        yield before, ((begin, end) if begin < end else None)
