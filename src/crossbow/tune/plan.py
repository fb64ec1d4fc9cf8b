"""Plan: what to run on this machine, found by a short search.

All ways to train are candidates: how many learners, on how many ranks, with which precision and
layout, compiled or not; and the peers, one process on all cores and PyTorch's data parallelism.
Trying them all would take an hour, so the search goes by halves:

    ways       one learner a core, one process and DDP, with each precision and layout
    check      the best bf16 way against the best float32 one: does the loss fall alike?
               Also measures the gradients' noise, and so what a further learner is worth.
    compiling  the front-runner, and the peers, if there is time
    numbers    more learners in the best ways, as long as that helps
    finals     the best three and the best peers, in turn, over more windows

Windows are short and interleaved, as in bench/measure.py. What counts is goodput: DDP, whose
global batch grows with its processes, is compared at the same learners and batch, one process at
the batch itself.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol

from crossbow.bench.crew import Late
from crossbow.config import PRECISIONS, Config, Precision
from crossbow.errors import CrossbowError
from crossbow.task import Task
from crossbow.tune.goodput import efficiency
from crossbow.tune.memory import Footprint
from crossbow.tune.rehearsal import Candidate, Checked, Source, Stage
from crossbow.tune.roofline import Roofline

WINDOWS, FINAL_WINDOWS = 2, 7
WINDOW_SHARE = 1 / 150
"""Of the time that there is, a window takes so much."""

CHECK_SHARE, ROOFLINE_SHARE, COMPILE_SHARE = 0.15, 0.03, 0.15
NUMBERS_SHARE, FINALS_SHARE = 0.1, 0.2
MOST_CHECK_STEPS, FEWEST_CHECK_STEPS = 2000, 24
CHECK_BLOCKS = 8
MOST_LOSS_BEHIND = 0.01
"""By so much of the loss another precision may be behind, beyond what chance explains."""

WORTH_A_CHECK = 1.02
"""A precision that is not faster than this needs no evidence: it isn't chosen."""

MULTIPLES = (2, 4, 8)
"""Learners a rank, after one."""

BEHIND = 0.95
"""More learners that get on less than so well end the search for a number."""

MARGIN = 1.02
"""A peer is recommended if it is better by this: to a tie belongs what the user asked for."""

Progress = Callable[[str, float], None]
"""(what is measured now, the share of the time that has passed)"""


@dataclass(frozen=True)
class Space:
    """What may be tried."""

    cores: int
    batch_size: int
    precisions: tuple[Precision, ...]
    layouts: tuple[bool, ...]
    """Channels-last or not."""
    needs_evidence: bool = True
    """Whether another precision than float32 has to show that it learns alike."""
    compiles: bool = True

    def ways(self) -> list[Candidate]:
        """One learner a core, one process on all cores, DDP; float32 as it comes first."""
        who = [Candidate(self.cores, self.cores), Candidate(1, 1, threads=self.cores)]
        if self.cores > 1:
            who.append(Candidate(self.cores, self.cores, is_ddp=True))
        return [
            replace(one, precision=precision, channels_last=layout)
            for precision in self.precisions
            for layout in self.layouts
            for one in who
        ]

    def crowds(self, way: Candidate, most_learners: int) -> list[Candidate]:
        """One learner on one core, and more and more learners, that compute in this way."""
        alone = replace(way, learners=1, ranks=1, threads=1)
        sizes = [n * self.cores for n in MULTIPLES if n * self.cores <= most_learners]
        crowds = [replace(alone, learners=size, ranks=self.cores) for size in sizes]
        return [alone, *crowds]


class Player(Protocol):
    """Who runs candidates: a `Stage`."""

    def make_ready(self, candidate: Candidate, timeout_s: float | None = None) -> None:
        """Set it up and warm it."""

    def speed(self, candidate: Candidate, seconds: float) -> float:
        """Samples a second in a window."""

    def drop(self, candidate: Candidate) -> None:
        """Let go of it; it can be made ready again."""

    def check(self, ways: Sequence[Candidate], seconds: float, most_steps: int) -> list[Checked]:
        """Train a learner in each way for a while."""


@dataclass(frozen=True)
class Trial:
    """A candidate and what it did."""

    candidate: Candidate
    speeds: tuple[float, ...]
    samples_per_second: float
    """The median of its last windows."""
    goodput: float


@dataclass(frozen=True)
class Found:
    """What a search found."""

    trials: tuple[Trial, ...]
    """The best first."""
    chosen: Candidate
    critical_batch: float | None
    notes: tuple[str, ...]

    def best(self, kind: str) -> Trial | None:
        """The best of a kind."""
        return next((t for t in self.trials if t.candidate.kind == kind), None)

    def of(self, candidate: Candidate) -> Trial:
        """What a candidate did."""
        return next(t for t in self.trials if t.candidate == candidate)


class Search:
    """A search within a time."""

    def __init__(
        self,
        player: Player,
        space: Space,
        seconds: float,
        on_progress: Progress,
        critical_batch: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin the count of the time.

        Args:
            player: runs candidates.
            space: what may be tried.
            seconds: to spend, about.
            on_progress: is told how it goes.
            critical_batch: if it is known from an earlier run; else it is measured.
            clock: seconds.
        """
        self._player, self._space, self._seconds = player, space, seconds
        self._on_progress, self._clock, self._start = on_progress, clock, clock()
        self._speeds: dict[Candidate, list[float]] = {}
        ways = space.ways()
        self._plainest = [w for w in ways if replace(ways[0], **_who_of(w)) == w]
        """Measured however little time there is: there is no advice without them."""
        self._counts: dict[Candidate, int] = {}
        self._notes: list[str] = []
        self._known, self._critical_batch = critical_batch is not None, critical_batch
        self._allowed = set(space.precisions)

    def run(self, most_learners: int) -> Found:
        """Search, with so many learners at most."""
        self._play("ways", self._space.ways(), WINDOWS)
        self._check()
        self._keep(self._front())
        self._compile()
        for way in self._fronts_of_ours():
            self._try_numbers(way, most_learners)
        finalists = self._finalists()
        self._keep(finalists)
        self._play("finals", finalists, FINAL_WINDOWS, is_last=True)
        return self._found(finalists)

    def _play(
        self, what: str, candidates: Sequence[Candidate], windows: int, is_last: bool = False
    ) -> None:
        """Let candidates run in turn; what isn't ready when time runs out is left out."""
        for number in range(windows):
            first = number % max(1, len(candidates))
            for one in (*candidates[first:], *candidates[:first]):
                is_extra = one not in self._speeds and one not in self._plainest
                if is_extra and self._left() < self._seconds * FINALS_SHARE:
                    continue
                if not is_last or self._left() > 0 or number < WINDOWS:
                    self._time(what, one)
        if is_last:
            self._counts = {one: min(windows, len(self._speeds[one])) for one in candidates}

    def _time(self, what: str, one: Candidate) -> None:
        self._on_progress(f"{what}: {one}", 1 - self._left() / self._seconds)
        try:
            speed = self._player.speed(one, self._seconds * WINDOW_SHARE)
        except CrossbowError as error:
            if one == self._plainest[0]:
                raise  # the plainest of all: there is nothing to plan
            self._fail(one, error)
        else:
            self._speeds.setdefault(one, []).append(speed)

    def _fail(self, one: Candidate, error: CrossbowError) -> None:
        """Leave a candidate out, and say why, once."""
        reason = str(error).strip().splitlines()[-1]
        if not any(note.startswith(f"{one}:") for note in self._notes):
            self._notes.append(f"{one}: {reason}")
        self._speeds.pop(one, None)

    def _check(self) -> None:
        """See whether another precision learns alike, and how noisy gradients are."""
        plain = self._best(precisions=("float32",))
        assert plain is not None, "the plainest candidate runs, or the search has ended"
        others = [
            best
            for precision in self._allowed - {"float32"}
            if (best := self._best(precisions=(precision,)))
            and self._score(best) > WORTH_A_CHECK * self._score(plain)
        ]
        wanted = others if self._space.needs_evidence else []
        if self._known and not wanted:
            return
        self._on_progress("check: training one learner", 1 - self._left() / self._seconds)
        checked = self._player.check(
            [plain, *wanted], self._seconds * CHECK_SHARE, MOST_CHECK_STEPS
        )
        if not self._known:
            self._critical_batch = checked[0].critical_batch
        for other, seen in zip(wanted, checked[1:], strict=True):
            holds, why = learns_alike(checked[0].losses, seen.losses)
            self._notes.append(f"{other.precision}: {why}")
            if not holds:
                self._allowed.discard(other.precision)

    def _fronts_of_ours(self) -> list[Candidate]:
        """The best way of each precision that may be chosen."""
        ours = ("learners", "one process")
        found = [self._best(ours, (precision,)) for precision in PRECISIONS]
        return [one for one in found if one and one.precision in self._allowed]

    def _try_numbers(self, way: Candidate, most_learners: int) -> None:
        """One learner on one core, then more and more learners, until there is no more gain."""
        for one in self._space.crowds(way, most_learners):
            if one in self._speeds:
                continue
            self._play("numbers", [one], WINDOWS)
            is_behind = one in self._speeds and self._score(one) < BEHIND * self._score(way)
            if one.learners > 1 and is_behind:
                break

    def _compile(self) -> None:
        """Compile the front-runner, then the peers, as long as there is time."""
        if not self._space.compiles:
            return
        front = [self._best(), *(self._best(kinds=(kind,)) for kind in ("one process", "ddp"))]
        for one in dict.fromkeys(front):
            room = self._left() - self._seconds * (NUMBERS_SHARE + FINALS_SHARE)
            if one is None or room < self._seconds * COMPILE_SHARE:
                continue
            compiled = replace(one, compile=True)
            self._on_progress(f"compiling: {compiled}", 1 - self._left() / self._seconds)
            try:
                self._player.make_ready(compiled, timeout_s=room)
            except Late:
                self._notes.append(f"{compiled}: took longer to compile than the {room:.0f} s left")
                return
            except CrossbowError as error:
                self._fail(compiled, error)
                return
            for _ in range(WINDOWS):
                self._time("compiled", compiled)

    def _finalists(self) -> list[Candidate]:
        """The best three, and the best of each kind."""
        ours = [c for c in self._ranked() if not c.is_ddp][:3]
        best = [self._best(kinds=(kind,)) for kind in ("learners", "one process", "ddp")]
        return list(dict.fromkeys([*ours, *(one for one in best if one)]))

    def _front(self) -> list[Candidate]:
        """The best of each kind and precision."""
        kinds = ("learners", "one process", "ddp")
        found = [self._best((kind,), (p,)) for kind in kinds for p in self._space.precisions]
        return [one for one in found if one]

    def _keep(self, some: Iterable[Candidate]) -> None:
        """Let go of all others."""
        kept = set(some)
        for one in self._speeds:
            if one not in kept:
                self._player.drop(one)

    def _best(
        self,
        kinds: Sequence[str] = ("learners", "one process", "ddp"),
        precisions: Sequence[str] | None = None,
    ) -> Candidate | None:
        wanted = self._allowed if precisions is None else precisions
        ranked = (c for c in self._ranked(wanted) if c.kind in kinds)
        return next(ranked, None)

    def _ranked(self, precisions: Iterable[str] | None = None) -> list[Candidate]:
        wanted = set(self._allowed if precisions is None else precisions)
        some = [one for one in self._speeds if one.precision in wanted]
        return sorted(some, key=self._score, reverse=True)

    def _score(self, one: Candidate) -> float:
        return self._speed(one) * efficiency(
            one.learners, self._space.batch_size, self._critical_batch
        )

    def _speed(self, one: Candidate) -> float:
        speeds = self._speeds[one]
        return statistics.median(speeds[-self._counts.get(one, len(speeds)) :])

    def _left(self) -> float:
        return self._seconds - (self._clock() - self._start)

    def _found(self, finalists: Sequence[Candidate]) -> Found:
        finalists = [one for one in finalists if one in self._speeds]
        ours = max((c for c in finalists if not c.is_ddp), key=self._score)
        peers = [c for c in finalists if c.is_ddp and self._score(c) > MARGIN * self._score(ours)]
        trials = tuple(
            Trial(one, tuple(self._speeds[one]), self._speed(one), self._score(one))
            for one in self._ranked(PRECISIONS)
        )
        chosen = max(peers, key=self._score, default=ours)
        return Found(trials, chosen, self._critical_batch, tuple(self._notes))


def _who_of(way: Candidate) -> dict[str, Any]:
    """Who trains in this way, but not how it computes."""
    names = ("learners", "ranks", "threads", "is_ddp")
    return {name: getattr(way, name) for name in names}


def learns_alike(plain: Sequence[float], other: Sequence[float]) -> tuple[bool, str]:
    """Whether the loss of another precision falls as float32's does, on the same batches.

    The mean difference over the second half may be what chance explains, two standard errors of
    the means of blocks, and a hundredth of the loss.
    """
    steps = min(len(plain), len(other))
    if steps < FEWEST_CHECK_STEPS:
        return False, f"not recommended: {steps} steps are too few to see whether it learns alike"
    if not all(map(math.isfinite, other[:steps])):
        return False, "not recommended: the loss left the numbers"
    size = steps // 2 // CHECK_BLOCKS or 1
    start = steps - size * (steps // 2 // size)
    behind = [b - a for a, b in zip(plain[start:steps], other[start:steps], strict=True)]
    blocks = [statistics.fmean(behind[i : i + size]) for i in range(0, len(behind), size)]
    difference, loss = statistics.fmean(blocks), statistics.fmean(plain[start:steps])
    error = statistics.stdev(blocks) / math.sqrt(len(blocks))
    holds = difference <= 2 * error + MOST_LOSS_BEHIND * abs(loss)
    means = f"mean loss {loss + difference:.4f} against {loss:.4f} of float32 over {steps} steps"
    return holds, means if holds else f"not recommended: {means}"


@dataclass(frozen=True)
class Plan:
    """What to run, and why."""

    task: str
    batch_size: int
    found: Found
    roofline: Roofline
    footprint: Footprint
    most_learners: int
    machine: dict[str, Any]
    seconds: float

    @property
    def advice(self) -> str:
        """Who should train: learners, one process or ddp."""
        return self.found.chosen.kind

    @property
    def command(self) -> str | None:
        """The command line; none where PyTorch's data parallelism should train."""
        if self.advice == "ddp":
            return None
        options = self.found.chosen.options()
        return f"crossbow train {self.task} --batch-size {self.batch_size} {options}"

    @property
    def samples_per_second(self) -> float:
        """What the choice is predicted to read."""
        return self.found.of(self.found.chosen).samples_per_second

    def reason(self) -> str:
        """Why, in a sentence."""
        return f"{_who(self.found.chosen)} {_compared(self.found)}{self._worth()}."

    def _worth(self) -> str:
        """What the noise says of further learners."""
        b, critical = self.batch_size, self.found.critical_batch
        cores = max((t.candidate.ranks for t in self.found.trials), default=1)
        if critical is None:
            return "; the gradients' noise is not known, so samples count alike"
        share = efficiency(max(cores, self.found.chosen.learners), b, critical)
        many = max(cores, self.found.chosen.learners)
        return (
            f"; by the gradients' noise (critical batch about {critical:.0f} samples) one of "
            f"{many} learners' samples is worth {share:.2f} of a single learner's"
        )

    def to_json(self) -> dict[str, Any]:
        """All that was measured, and what it says."""
        return {
            "task": self.task,
            "batch_size": self.batch_size,
            "advice": self.advice,
            "chosen": asdict(self.found.chosen),
            "command": self.command,
            "samples_per_second": self.samples_per_second,
            "goodput": self.found.of(self.found.chosen).goodput,
            "reason": self.reason(),
            "critical_batch": self.found.critical_batch,
            "notes": list(self.found.notes),
            "trials": [asdict(trial) for trial in self.found.trials],
            "roofline": self.roofline.to_json(),
            "learner_bytes": self.footprint.learner_bytes,
            "rank_bytes": self.footprint.rank_bytes,
            "most_learners": self.most_learners,
            "machine": self.machine,
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Plan":
        """What `to_json` wrote."""
        trials = tuple(
            Trial(
                Candidate(**t["candidate"]),
                tuple(t["speeds"]),
                t["samples_per_second"],
                t["goodput"],
            )
            for t in values["trials"]
        )
        chosen, notes = Candidate(**values["chosen"]), tuple(values["notes"])
        return cls(
            task=values["task"],
            batch_size=values["batch_size"],
            found=Found(trials, chosen, values["critical_batch"], notes),
            roofline=Roofline.from_json(values["roofline"]),
            footprint=Footprint(values["learner_bytes"], values["rank_bytes"]),
            most_learners=values["most_learners"],
            machine=values["machine"],
            seconds=values["seconds"],
        )


class Asked(NamedTuple):
    """What a plan is asked for."""

    source: Source
    settings: Config
    """Resolved."""
    precision: str = "auto"
    critical_batch: float | None = None
    seconds: float = 60.0
    compiles: bool = True


def make_plan(
    asked: Asked,
    task: Task,
    stage: Stage,
    machine: dict[str, Any],
    on_progress: Progress,
) -> Plan:
    """Measure this machine and choose."""
    cores = len(stage.cores)
    on_progress("starting processes", 0.0)
    for ranks in {1, cores}:  # which takes as long as it takes
        stage.crew(ranks)
    start = time.monotonic()
    on_progress("roofline", 0.0)
    roofline, footprint = stage.roofline(Candidate(cores, cores), asked.seconds * ROOFLINE_SHARE)
    room = footprint.most_learners(cores)
    most = max(1, min(room, len(task.train) // asked.settings.batch_size))
    left = asked.seconds - (time.monotonic() - start)
    space = space_of(asked, task, cores)
    search = Search(stage, space, left, on_progress, asked.critical_batch)
    found = search.run(most)
    return Plan(
        task=asked.source.name,
        batch_size=asked.settings.batch_size,
        found=found,
        roofline=roofline,
        footprint=footprint,
        most_learners=most,
        machine=machine,
        seconds=time.monotonic() - start,
    )


def space_of(asked: Asked, task: Task, cores: int) -> Space:
    """What may be tried of a task."""
    inputs = task.train[0][0]
    return Space(
        cores=cores,
        batch_size=asked.settings.batch_size,
        precisions=("float32",) if asked.precision == "float32" else ("float32", "bf16"),
        layouts=(False, True) if _is_image(inputs) else (False,),
        needs_evidence=asked.precision != "any",
        compiles=asked.compiles,
    )


def _is_image(inputs: Any) -> bool:
    """Whether one sample has channels, height and width: only then layouts differ."""
    return getattr(inputs, "ndim", 0) == 3


def _who(chosen: Candidate) -> str:
    verb = "read" if chosen.kind == "learners" or chosen.is_ddp else "reads"
    names = {"ddp": "Use DDP: its processes", "one process": "Use one process: it"}
    return f"{names.get(chosen.kind, f'{chosen.learners} learners')} {verb}"


def _compared(found: Found) -> str:
    """The choice's speed beside the others'."""
    chosen = found.of(found.chosen)
    names = {"learners": "the best learners", "one process": "one process", "ddp": "DDP"}
    others = [
        f"{chosen.samples_per_second / best.samples_per_second:.2f} times {name}"
        for kind, name in names.items()
        if kind != chosen.candidate.kind and (best := found.best(kind))
    ]
    beside = f", {' and '.join(others)}" if others else ""
    return f"{chosen.samples_per_second:,.0f} samples/s{beside}"
