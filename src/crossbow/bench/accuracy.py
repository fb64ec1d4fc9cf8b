"""Accuracy: time, samples and epochs to a target, ours and the peers' in one run.

    crossbow      learners at the user's batch and rate, nothing retuned
    one process   plain PyTorch on all cores
    ddp           PyTorch DistributedDataParallel over Gloo, a process a core, each with the batch

An *entrant* is one of these with its settings. All read the same stream of samples, run the same
model, loss and optimizer, and score both their last weights and a moving average of them, whichever
is better. Scoring is the same work for all and isn't counted: seconds are those of training.
"""

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from crossbow.averaging.family import parse
from crossbow.averaging.weights import MovingAverage
from crossbow.bench.crew import Crew, meeting_place
from crossbow.comm.world import World, joined
from crossbow.data.loader import Batch, read
from crossbow.evaluation import calibrate, evaluate
from crossbow.fleet import Fleet, rounds
from crossbow.optim import schedule
from crossbow.optim.build import build_optimizer
from crossbow.task import Task
from crossbow.zoo import tasks

BN_SAMPLES = 2048

Kind = Literal["crossbow", "one process", "ddp"]


@dataclass(frozen=True)
class Goal:
    """What all entrants train, and until when."""

    task: str
    target: float
    most_epochs: float
    optimizer: str
    looks_an_epoch: int = 5
    half_life: float = 10_000
    """Of the moving average, in samples."""
    data_dir: Path | None = None
    text: Path | None = None


@dataclass(frozen=True)
class Entrant:
    """A way to train, with its settings."""

    kind: Kind
    batch_size: int
    """Of a learner, or of a rank."""
    lr: float
    warmup: float = 0.0
    """Epochs, from the rate over the number of ranks."""
    sync: str = "adaptive"
    """How learners are averaged; for Crossbow alone."""

    @property
    def label(self) -> str:
        """A name for tables and files."""
        what = f"crossbow {self.sync}" if self.kind == "crossbow" else self.kind
        warm = f", warm-up {self.warmup:g}" if self.warmup else ""
        return f"{what}, batch {self.batch_size}, rate {self.lr:g}{warm}"


@dataclass(frozen=True)
class Look:
    """What was seen at one evaluation."""

    samples: int
    seconds: float
    last: float
    averaged: float


@dataclass(frozen=True)
class Finish:
    """How a run ended."""

    reached: bool
    seconds: float
    """Of training, until the target or until the run was given up."""
    samples: int
    epochs: float
    first_step_seconds: float
    looks: tuple[Look, ...]

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)


class Racer(Protocol):
    """A model in training, whatever stands around it."""

    def batches(self) -> Iterator[tuple[int, Batch]]:
        """Yield each batch of this rank, and the samples that all had read before it."""

    @property
    def forward(self) -> Callable[[Tensor], Tensor]:
        """The model as it is trained."""

    def is_between_rounds(self) -> bool:
        """Whether all ranks have made the same number of steps."""

    def last(self) -> AbstractContextManager[nn.Module]:
        """Let the model hold the weights that count."""

    def averaged(self) -> AbstractContextManager[nn.Module]:
        """Let the model hold their moving average."""


def run(entrant: Entrant, goal: Goal, ranks: int, seed: int) -> Finish:
    """Train once, on processes of its own."""
    cores = sorted(os.sched_getaffinity(0))
    crew = (
        Crew(1, threads=ranks)
        if entrant.kind == "one process"
        else Crew(ranks, cores=[[cores[rank % len(cores)]] for rank in range(ranks)])
    )
    with crew:
        first: Finish = crew.call(race, entrant, goal, seed, meeting_place())[0]
    return first


def race(memory: dict[str, Any], entrant: Entrant, goal: Goal, seed: int, port: int) -> Finish:
    """In a rank: train until the target, or until the epochs are used up."""
    os.environ["MASTER_PORT"] = str(port)
    task = tasks.get(goal.task, data_dir=goal.data_dir, text=goal.text)
    world = World.from_environment()
    with ExitStack() as stack:
        stack.enter_context(joined(world))
        torch.manual_seed(seed)
        model = task.build_model()
        optimizer = build_optimizer(goal.optimizer, model.parameters(), entrant.lr)
        start = _Start(model, optimizer, task, entrant, goal, world, seed)
        make = _Ours if entrant.kind == "crossbow" else _Plain
        return _run(make(start, stack), start)


class _Start(NamedTuple):
    """What every racer begins with."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    task: Task
    entrant: Entrant
    goal: Goal
    world: World
    seed: int


def _run(racer: Racer, start: _Start) -> Finish:
    model, optimizer, task, entrant, goal, world, seed = start
    n, reached = len(task.train), task.metric.reached
    rate = _rate(entrant, goal, world, n)
    looks: list[Look] = []
    due = every = n / goal.looks_an_epoch
    seconds = first = 0.0
    began = time.perf_counter()
    model.train()
    samples = 0
    for samples, (inputs, targets) in racer.batches():
        if samples >= due and racer.is_between_rounds():
            seconds += time.perf_counter() - began
            due += every
            looks.append(_look(racer, task, world, seed, samples, seconds))
            if _is_over(looks[-1], reached, goal.target):
                break
            began = time.perf_counter()
        optimizer.param_groups[0]["lr"] = rate(samples)
        optimizer.zero_grad()
        task.loss(racer.forward(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        first = first or time.perf_counter() - began
    else:
        samples, seconds = round(goal.most_epochs * n), seconds + time.perf_counter() - began
        looks.append(_look(racer, task, world, seed, samples, seconds))
    best = max(looks[-1].last, looks[-1].averaged, key=lambda value: _worth(value, task))
    return Finish(reached(best, goal.target), seconds, samples, samples / n, first, tuple(looks))


def _worth(value: float, task: Task) -> float:
    if math.isnan(value):
        return -math.inf
    return value if task.metric.higher_is_better else -value


def _is_over(look: Look, reached: Callable[[float, float], bool], target: float) -> bool:
    """Whether the target is met, or can't be any more."""
    if not math.isfinite(look.last):
        return True
    return reached(look.last, target) or reached(look.averaged, target)


def _look(racer: Racer, task: Task, world: World, seed: int, samples: int, seconds: float) -> Look:
    with racer.last() as model:
        if world.size > 1:
            calibrate(model, task, BN_SAMPLES, seed)
        last = evaluate(model, task, world=world).metric
    with racer.averaged() as model:
        calibrate(model, task, BN_SAMPLES, seed)
        averaged = evaluate(model, task, world=world).metric
    # a look of the first rank is everybody's, so that all end together
    return world.broadcast(Look(samples, seconds, last, averaged))  # type: ignore[no-any-return]


def _rate(entrant: Entrant, goal: Goal, world: World, n: int) -> schedule.Schedule:
    total = math.ceil(goal.most_epochs * n)
    if not entrant.warmup:
        return schedule.constant(entrant.lr)
    spec = f"constant:warmup={entrant.warmup},start={1 / world.size}"
    return schedule.parse(spec, entrant.lr, n, total)


class _Ours:
    """Learners, one a rank."""

    def __init__(self, start: _Start, stack: ExitStack) -> None:
        model, optimizer, task, entrant, goal, _, seed = start
        self.forward = model
        self._fleet = stack.enter_context(
            Fleet(model, optimizer, parse(entrant.sync), ema=goal.half_life)
        )
        self._batches = self._fleet.batches(
            task.train, entrant.batch_size, goal.most_epochs, seed=seed, prepare=task.prepare
        )
        self.last, self.averaged = self._fleet.central, self._fleet.averaged

    def batches(self) -> Iterator[tuple[int, Batch]]:
        """Yield what the fleet reads."""
        for batch in self._batches:
            yield self._fleet.samples, batch

    def is_between_rounds(self) -> bool:
        """Ask the fleet."""
        return self._fleet.is_between_rounds


class _Plain:
    """PyTorch alone, or with DDP around the model."""

    def __init__(self, start: _Start, stack: ExitStack) -> None:
        model, _, task, entrant, goal, world, seed = start
        self._model, self._ema = model, MovingAverage(goal.half_life)
        self._plan = (0, self._whole(task, entrant, goal, world), entrant.batch_size, world.size)
        self._world, self._task, self._seed = world, task, seed
        self.forward: Callable[[Tensor], Tensor] = model
        if entrant.kind == "ddp":
            with warnings.catch_warnings():  # torch 2.13 calls broadcast_buffers something else
                warnings.simplefilter("ignore", FutureWarning)
                self.forward = nn.parallel.DistributedDataParallel(
                    model,
                    gradient_as_bucket_view=True,
                    static_graph=True,
                    broadcast_buffers=False,
                )

    @staticmethod
    def _whole(task: Task, entrant: Entrant, goal: Goal, world: World) -> int:
        """Samples in whole rounds: DDP would wait for a rank without a batch."""
        each = world.size * entrant.batch_size
        return max(1, round(goal.most_epochs * len(task.train)) // each) * each

    def batches(self) -> Iterator[tuple[int, Batch]]:
        """Yield this rank's part of the stream."""
        plan = list(rounds(*self._plan, self._world.rank))
        wanted = (stretch for _, stretch in plan if stretch)
        found = read(self._task.train, wanted, seed=self._seed, prepare=self._task.prepare)
        for (samples, _), batch in zip(plan, found, strict=True):
            if self._ema.is_due(samples):
                self._ema.take(self._weights(), samples)
            yield samples, batch

    def is_between_rounds(self) -> bool:
        """Ranks step together."""
        return True

    @contextmanager
    def last(self) -> Iterator[nn.Module]:
        """Let the model hold its own weights, whose statistics may be estimated anew."""
        with self._holding([weight.clone() for weight in self._weights()]):
            yield self._model

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Let the model hold the moving average of its weights."""
        with self._holding(self._ema.rows or self._weights()):
            yield self._model

    @contextmanager
    def _holding(self, rows: Sequence[Tensor]) -> Iterator[None]:
        own = [tensor.clone() for tensor in (*self._weights(), *self._model.buffers())]
        places = [*self._weights(), *self._model.buffers()]
        for place, row in zip(places, rows, strict=False):
            place.copy_(row)
        try:
            yield
        finally:
            for place, value in zip(places, own, strict=True):
                place.copy_(value)

    def _weights(self) -> list[Tensor]:
        return [p.data for p in self._model.parameters()]
