"""Rehearsal: candidates run in processes that stand ready, a short window at a time.

What a rank does in a window is what it does in training: the task's own data, read and prepared;
the step, the averaging, the look at the noise. It is neither scored nor logged. The peers are
rehearsed with the same model, data, optimizer and flags: one process on all cores, which is a
candidate with one learner and as many threads, and PyTorch's DistributedDataParallel over Gloo with
the settings under which it is fastest.
"""

import math
import os
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from crossbow.averaging.family import parse as parse_averaging
from crossbow.bench.crew import Crew, Late, meeting_place
from crossbow.bench.throughput import TUNED
from crossbow.comm.world import World, join
from crossbow.config import Config, Precision
from crossbow.data.loader import Batch, read
from crossbow.fleet import Fleet, rounds
from crossbow.learner import Learner
from crossbow.stats.noise import OneLearnersNoise
from crossbow.task import Task
from crossbow.trainer import make_fleet
from crossbow.tune.memory import Activations, Footprint, footprint
from crossbow.tune.roofline import Machine, Pass, Roofline, counting, measure_rank
from crossbow.zoo import tasks

ENDLESS_EPOCHS = 1e6
WARM_UP_S = 0.1
MOST_ROUNDS = 1 << 20
COUNTED_STEPS = 5


@dataclass(frozen=True)
class Source:
    """Where a rank finds the task."""

    name: str
    data_dir: Path | None = None
    text: Path | None = None

    def load(self) -> Task:
        """The task, with its data."""
        return tasks.get(self.name, data_dir=self.data_dir, text=self.text)


@dataclass(frozen=True)
class Candidate:
    """One way to train."""

    learners: int
    ranks: int
    threads: int = 1
    precision: Precision = "float32"
    channels_last: bool = False
    compile: bool = False
    is_ddp: bool = False
    """Whether gradients are reduced by PyTorch, and there are no learners."""

    @property
    def kind(self) -> str:
        """Who trains."""
        if self.is_ddp:
            return "ddp"
        return "learners" if self.learners > 1 else "one process"

    def settings(self, base: Config) -> Config:
        """The settings of a run that trains so."""
        return replace(
            base,
            learners=1 if self.is_ddp else self.learners,
            threads=self.threads,
            precision=self.precision,
            channels_last=self.channels_last,
            compile=self.compile,
        )

    def options(self) -> str:
        """What `crossbow train` has to be told."""
        words = [f"--learners {self.learners}", f"--ranks {self.ranks}"]
        words += [f"--threads {self.threads}"] * (self.threads > 1)
        if self.precision != "float32":
            words.append(f"--precision {self.precision}")
        words += ["--channels-last"] * self.channels_last + ["--compile"] * self.compile
        return " ".join(words)

    def __str__(self) -> str:
        names = {"ddp": f"DDP, {self.ranks} processes", "one process": f"one process, {_n(self)}"}
        who = names.get(self.kind, f"{self.learners} learners on {self.ranks} ranks")
        flags: list[str] = [self.precision] if self.precision != "float32" else []
        flags += ["channels-last"] * self.channels_last + ["compiled"] * self.compile
        return ", ".join([who, *flags])


def _n(candidate: Candidate) -> str:
    return f"{candidate.threads} thread{'s' * (candidate.threads > 1)}"


class Checked(NamedTuple):
    """What a short training with one precision showed."""

    losses: list[float]
    critical_batch: float | None
    """By the gradients' noise at the end."""


class Stage:
    """All processes of a rehearsal."""

    def __init__(self, source: Source, settings: Config, cores: Sequence[int]) -> None:
        """Know where to start them; they start when they are needed.

        Args:
            source: of the task.
            settings: of the run, resolved; a candidate has its own way with some of them.
            cores: that may be used, and one rank each.
        """
        self._source, self._settings, self.cores = source, settings, list(cores)
        self._stack = ExitStack()
        self._crews: dict[int, Crew] = {}
        self._rounds: dict[Candidate, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def make_ready(self, candidate: Candidate, timeout_s: float | None = None) -> None:
        """Set a candidate up, warm it, and find out how many rounds a second it makes.

        Args:
            candidate: which wasn't ready.
            timeout_s: after which `Late` is raised.
        """
        crew = self._crew_of(candidate)
        try:
            crew.call(set_up, candidate, self._settings, timeout_s=timeout_s)
            crew.call(run, candidate, 2, timeout_s=timeout_s)
        except Late:
            self._replace_crew(candidate.ranks)
            raise
        number, elapsed = 1, self._timed(candidate, 1)
        while elapsed < WARM_UP_S and number < MOST_ROUNDS:
            number *= 2
            elapsed = self._timed(candidate, number)
        self._rounds[candidate] = max(1, round(number / elapsed))

    def speed(self, candidate: Candidate, seconds: float) -> float:
        """Samples a second in a window of about so many seconds."""
        if candidate not in self._rounds:
            self.make_ready(candidate)
        number = max(1, round(self._rounds[candidate] * seconds))
        samples = number * candidate.learners * self._settings.batch_size
        return samples / self._timed(candidate, number)

    def drop(self, candidate: Candidate) -> None:
        """Forget a candidate."""
        if self._rounds.pop(candidate, None) is not None:
            self._crew_of(candidate).call(put_away, candidate)

    def check(self, ways: Sequence[Candidate], seconds: float, most_steps: int) -> list[Checked]:
        """Train one learner in each of these ways from the same weights on the same batches."""
        crew = self.crew(len(self.cores))
        told = [
            (replace(w, learners=1, ranks=1), self._settings, seconds, most_steps) for w in ways
        ]
        found: list[Checked] = []
        for first in range(0, len(told), len(crew)):  # as many at a time as there are ranks
            some = told[first : first + len(crew)]
            idle = [(None, self._settings, 0.0, 0)] * (len(crew) - len(some))
            found += crew.call_each(check, [*some, *idle])[: len(some)]
        return found

    def roofline(self, way: Candidate, seconds: float) -> tuple[Roofline, Footprint]:
        """Measure the machine, all ranks at once, and count and time a step of one learner."""
        crew = self.crew(len(self.cores))
        machines: list[Machine] = crew.call(machine, seconds, self._settings.device)
        columns = zip(*map(astuple, machines), strict=True)
        sums = Machine(*(math.fsum(column) for column in columns))
        answers = crew.call(count, replace(way, learners=1, ranks=1), self._settings, len(crew))
        passes, needed = answers[0]
        return Roofline(sums, len(crew), tuple(passes)), needed

    def _timed(self, candidate: Candidate, number: int) -> float:
        start = time.perf_counter()
        self._crew_of(candidate).call(run, candidate, number)
        return time.perf_counter() - start

    def _replace_crew(self, ranks: int) -> None:
        """End a crew that is busy; a new one starts when it is needed."""
        self._crews.pop(ranks).dismiss(patience_s=0)
        self._rounds = {one: n for one, n in self._rounds.items() if one.ranks != ranks}

    def _crew_of(self, candidate: Candidate) -> Crew:
        return self.crew(candidate.ranks)

    def crew(self, ranks: int) -> Crew:
        """The crew of so many ranks: each on a core of its own, or alone on all of them."""
        if ranks not in self._crews:
            own = [[self.cores[rank % len(self.cores)]] for rank in range(ranks)]
            crew = Crew(1, len(self.cores)) if ranks == 1 else Crew(ranks, cores=own)
            self._crews[ranks] = self._stack.enter_context(crew)
            crew.call(load, self._source, meeting_place())
        return self._crews[ranks]


def load(memory: dict[str, Any], source: Source, port: int) -> None:
    """In a rank: get the data, and meet the other ranks."""
    os.environ["MASTER_PORT"] = str(port)
    join(World.from_environment())
    memory["task"] = source.load()


class _Rehearsed:
    """A candidate in a rank: what it is made of, and where it stands."""

    def __init__(self, task: Task, candidate: Candidate, base: Config) -> None:
        settings = candidate.settings(base)
        world = World.from_environment()
        self._stack, self._threads = ExitStack(), candidate.threads
        self._fleet: Fleet | None = None
        torch.set_num_threads(candidate.threads)
        torch.manual_seed(settings.seed)
        if candidate.is_ddp:
            task = replace(task, model=_reduced(task.build_model(), settings))
        self.learner = Learner(task, settings, world)
        if candidate.kind == "learners":
            fleet = make_fleet(self.learner, settings, "rehearsal", candidate.learners)
            self._fleet = self._stack.enter_context(fleet)
            self.batches = _batches(self._fleet, task, settings)
        else:
            self.batches = _share(task, settings, world if candidate.is_ddp else World())
        if candidate.kind != "ddp" and not (self._fleet and self._fleet.gain):
            self.learner.noise = OneLearnersNoise(self.learning())
        self._steps_a_round = len(self._fleet.mine) if self._fleet else 1
        self.learner.model.train()

    def learning(self) -> list[nn.Parameter]:
        """What the optimizer moves."""
        return [p for p in self.learner.model.parameters() if p.requires_grad]

    def run(self, number: int) -> list[float]:
        """Go on for so many rounds; return the losses."""
        torch.set_num_threads(self._threads)  # which another candidate may have set
        losses = []
        for _ in range(number * self._steps_a_round):
            inputs, targets = next(self.batches)
            samples = self._fleet.samples if self._fleet else 0
            losses.append(self.learner.step(inputs, targets, samples))
        values: list[float] = torch.stack(losses).tolist()  # waits for the device, too
        return values

    def close(self) -> None:
        """Leave."""
        self._stack.close()


def set_up(memory: dict[str, Any], candidate: Candidate, base: Config) -> None:
    """In a rank: get a candidate ready."""
    memory[str(candidate)] = _Rehearsed(memory["task"], candidate, base)


def run(memory: dict[str, Any], candidate: Candidate, number: int) -> None:
    """In a rank: let a candidate train for so many rounds."""
    memory[str(candidate)].run(number)


def put_away(memory: dict[str, Any], candidate: Candidate) -> None:
    """In a rank: forget a candidate."""
    memory.pop(str(candidate)).close()


def check(
    memory: dict[str, Any], way: Candidate | None, base: Config, seconds: float, most_steps: int
) -> Checked | None:
    """In a rank: train one learner for a while, for its losses and its gradients' noise."""
    if way is None:
        return None
    rehearsed = _Rehearsed(memory["task"], way, base)
    noise = OneLearnersNoise(rehearsed.learning(), every=2)
    rehearsed.learner.noise = noise
    losses: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end and len(losses) < most_steps:
        losses += rehearsed.run(1)
    rehearsed.close()
    seen = noise.meter.read()
    return Checked(losses, base.batch_size * seen.scale if seen else None)


def machine(memory: dict[str, Any], seconds: float, device: str) -> Machine:
    """In a rank: what it can do while the others are busy with the same."""
    torch.set_num_threads(1)
    return measure_rank(seconds, torch.device("cpu" if device == "auto" else device))


def count(
    memory: dict[str, Any], way: Candidate, base: Config, ranks: int
) -> tuple[list[Pass], Footprint]:
    """In a rank: count and time the passes of a step of one learner, and what it keeps."""
    rehearsed = _Rehearsed(memory["task"], replace(way, compile=False), base)
    learner = rehearsed.learner
    inputs, targets = next(rehearsed.batches)
    rehearsed.run(2)
    kept = Activations()
    with kept, counting() as forward:
        loss = learner.loss(learner.forward(inputs), targets)
    with counting() as backward:
        loss.backward()  # type: ignore[no-untyped-call]
    with counting() as update:
        learner.optimizer.step()
    seconds = []
    for _ in range(COUNTED_STEPS):
        times = [time.perf_counter()]
        loss = learner.loss(learner.forward(inputs), targets)
        times.append(time.perf_counter())
        learner.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        times.append(time.perf_counter())
        learner.optimizer.step()
        times.append(time.perf_counter())
        seconds.append([b - a for a, b in pairwise(times)])
    medians = [statistics.median(column) for column in zip(*seconds, strict=True)]
    counts = {"forward": forward, "backward": backward, "update": update}
    passes = [
        Pass(name, count.flops, count.bytes, count.operations, spent)
        for (name, count), spent in zip(counts.items(), medians, strict=True)
    ]
    averaging = parse_averaging(base.sync)
    needed = footprint(learner.model, learner.optimizer, averaging, ranks, kept.bytes)
    rehearsed.close()
    return passes, needed


def _reduced(model: nn.Module, settings: Config) -> nn.Module:
    """The model with gradients that all processes share."""
    if settings.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with warnings.catch_warnings():  # torch 2.13 calls broadcast_buffers something else
        warnings.simplefilter("ignore", FutureWarning)
        return nn.parallel.DistributedDataParallel(model, **TUNED)


def _batches(fleet: Fleet, task: Task, settings: Config) -> Iterator[Batch]:
    return fleet.batches(
        task.train,
        settings.batch_size,
        ENDLESS_EPOCHS,
        seed=settings.seed,
        prepare=task.prepare,
        collate=task.collate,
    )


def _share(task: Task, settings: Config, world: World) -> Iterator[Batch]:
    """What this process reads of every round, without a fleet."""
    stop = round(ENDLESS_EPOCHS * len(task.train))
    plan = rounds(0, stop, settings.batch_size, world.size, world.rank)
    wanted = (stretch for _, stretch in plan if stretch)
    return read(task.train, wanted, seed=settings.seed, prepare=task.prepare, collate=task.collate)
