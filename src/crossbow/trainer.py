"""Trainer: a task and its settings in; a trained model and a run directory out.

`train` checks everything before it writes anything. `_Run.loop` is the loop.
"""

import inspect
import math
import signal
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn

from crossbow.config import Config, resolve
from crossbow.data.loader import read, stretches
from crossbow.errors import DivergedError, InputError
from crossbow.evaluation import evaluate
from crossbow.monitor.log import RunLog
from crossbow.monitor.meter import Clock, LossMeter
from crossbow.monitor.progress import Display, EvalReport, TrainReport, choose_display
from crossbow.optim import schedule
from crossbow.optim.build import build_optimizer
from crossbow.task import Task

REPORT_INTERVAL_S = 0.5
TARGET_WINDOW = 5  # evaluations whose median must reach the target, as in Koliousis et al., 2019


@dataclass(frozen=True)
class Reached:
    """The moment at which a target was met."""

    samples: int
    epoch: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run reached; the content of result.json."""

    task: str
    metric_name: str
    metric: float
    loss: float
    target: float | None
    target_reached: bool
    target_first: Reached | None
    """When one evaluation first met the target."""
    target_median: Reached | None
    """When the median of the last five did."""
    epochs: float
    samples: int
    seconds: float
    """Wall time from the first step to the last, evaluations included."""
    train_seconds: float
    """Of these, the time spent training."""
    first_step_seconds: float
    """The first step's share, which holds compilation and is left out of samples_per_second."""
    samples_per_second: float
    learners: int
    ranks: int
    seed: int
    parameters: int
    stopped_by: str
    """epochs, target, time limit or interrupt."""
    run_dir: str


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after the run was brought to a clean end."""

    def __init__(self, result: Result) -> None:
        super().__init__(f"interrupted after {result.samples} samples")
        self.result = result


def train(task: Task, config: Config | None = None, *, quiet: bool = False) -> Result:
    """Train the task; return what was reached.

    Raises `Interrupted` after Ctrl-C, with the result so far; a second Ctrl-C ends at once.
    """
    settings = resolve(config or Config(), task.recipe)
    _check(task, settings)
    with _isolated(settings.seed):
        learner = _Learner(task, settings)
        with (
            RunLog.create(settings.run_dir, task.name, settings.to_json()) as log,
            closing(choose_display(quiet)) as display,
            _Interrupts() as interrupts,
        ):
            result = _Run(task, settings, learner, log, display, interrupts).train()
    if result.stopped_by == "interrupt":
        raise Interrupted(result)
    return result


class _Learner:
    """A model with what it takes to move it: device, forward pass, optimizer and learning rate."""

    def __init__(self, task: Task, settings: Config) -> None:
        self.device = _choose_device(settings.device)
        self.model = task.build_model().to(self.device)
        if settings.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.forward = _make_forward(self.model, self.device, settings)
        self.loss = task.loss
        if settings.label_smoothing:
            self.loss = partial(task.loss, label_smoothing=settings.label_smoothing)
        self.optimizer = _make_optimizer(self.model, settings)
        self.rate = _make_schedule(task, settings)
        self._full_rates = [group["lr"] for group in self.optimizer.param_groups]

    def step(self, inputs: Tensor, targets: Tensor, samples_seen: int) -> Tensor:
        """Move by one batch; return its loss."""
        rate = self.rate(samples_seen)
        for group, full in zip(self.optimizer.param_groups, self._full_rates, strict=True):
            group["lr"] = full * rate
        loss = self.loss(self.forward(inputs), targets)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()


class _Run:
    """One run of the loop, and what it has seen so far."""

    def __init__(
        self,
        task: Task,
        settings: Config,
        learner: _Learner,
        log: RunLog,
        display: Display,
        interrupts: "_Interrupts",
    ) -> None:
        self.task, self.settings, self.learner = task, settings, learner
        self.log, self.display, self.interrupts = log, display, interrupts
        self.epoch_samples = len(task.train)
        self.total_samples = math.ceil(settings.epochs * self.epoch_samples)
        self.samples = 0
        self.clock = Clock(REPORT_INTERVAL_S)
        self.meter = LossMeter()
        self.evaluations: list[EvalReport] = []
        self.target_first: Reached | None = None
        self.target_median: Reached | None = None

    def train(self) -> Result:
        """Run the loop, then save what came of it."""
        parameters = sum(p.numel() for p in self.learner.model.parameters())
        self.log.write("start", task=self.task.name, parameters=parameters, torch=torch.__version__)
        self.display.start(
            f"{self.task.name}: {parameters:,} parameters, {self.epoch_samples:,} samples an epoch",
            self.total_samples,
        )
        try:
            stopped_by = self.loop()
        except DivergedError as error:
            self.log.write("diverged", samples=self.samples, message=str(error))
            raise
        result = self._result(stopped_by, parameters)
        self.log.save_model(self.learner.model.state_dict())
        self.log.save_result(asdict(result))
        self.log.write("end", stopped_by=stopped_by)
        return result

    def loop(self) -> str:
        """Train until something ends it; return what did."""
        every = self.settings.eval_every or self.epoch_samples
        self.learner.model.train()
        for inputs, targets in self._batches():
            loss = self.learner.step(inputs, targets, self.samples)
            self.samples += len(targets)
            self.meter.add(loss, self.samples)
            if self.clock.step_ended(self.samples):
                self._report()
            if self.samples // every > (self.samples - len(targets)) // every:
                self._evaluate()
            if stopped_by := self._stopped_by():
                break
        else:
            stopped_by = "epochs"
        if not self.evaluations or self.evaluations[-1].samples != self.samples:
            self._evaluate()
        return stopped_by

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        device, channels_last = self.learner.device, self.settings.channels_last
        batches = read(
            self.task.train,
            stretches(0, self.total_samples, self.settings.batch_size),
            seed=self.settings.seed,
            prepare=self.task.prepare,
            collate=self.task.collate,
        )
        if device.type == "cpu" and not channels_last:
            return batches
        return (
            (_place(inputs, device, channels_last), targets.to(device))
            for inputs, targets in batches
        )

    def _stopped_by(self) -> str | None:
        limit = self.settings.time_limit_s
        if self.target_median:
            return "target"
        if self.interrupts.seen:
            return "interrupt"
        if limit is not None and self.clock.seconds() >= limit:
            return "time limit"
        return None

    def _report(self) -> None:
        """Tell the log and the display where training stands."""
        report = TrainReport(
            samples=self.samples,
            epoch=self.samples / self.epoch_samples,
            loss=self.meter.read(),
            lr=self.learner.optimizer.param_groups[0]["lr"],
            samples_per_second=self.clock.lap_speed(self.samples),
            seconds=self.clock.seconds(),
        )
        self.log.write("train", **report._asdict())
        self.display.trained(report)

    def _evaluate(self) -> None:
        """Score the model, with the clock of training stopped."""
        if self.meter:
            self._report()
        with self.clock.paused():
            scores = evaluate(self.learner.model, self.task, forward=self.learner.forward)
        report = EvalReport(
            samples=self.samples,
            epoch=self.samples / self.epoch_samples,
            loss=scores.loss,
            metric_name=self.task.metric.name,
            metric=scores.metric,
            seconds=self.clock.seconds(),
        )
        self.evaluations.append(report)
        self.log.write("eval", **report._asdict())
        self.display.evaluated(report)
        self._check_target()

    def _check_target(self) -> None:
        target, reached = self.settings.target, self.task.metric.reached
        if target is None:
            return
        last = [report.metric for report in self.evaluations[-TARGET_WINDOW:]]
        now = Reached(self.samples, self.samples / self.epoch_samples, self.clock.seconds())
        if self.target_first is None and reached(last[-1], target):
            self.target_first = now
        if len(last) == TARGET_WINDOW and reached(statistics.median(last), target):
            self.target_median = now

    def _result(self, stopped_by: str, parameters: int) -> Result:
        last = self.evaluations[-1]
        return Result(
            task=self.task.name,
            metric_name=last.metric_name,
            metric=last.metric,
            loss=last.loss,
            target=self.settings.target,
            target_reached=self.target_median is not None,
            target_first=self.target_first,
            target_median=self.target_median,
            epochs=self.samples / self.epoch_samples,
            samples=self.samples,
            seconds=self.clock.seconds(),
            train_seconds=self.clock.train_seconds(),
            first_step_seconds=self.clock.first_step_seconds,
            samples_per_second=self.clock.speed(self.samples),
            learners=1,
            ranks=1,
            seed=self.settings.seed,
            parameters=parameters,
            stopped_by=stopped_by,
            run_dir=str(self.log.path),
        )


class _Interrupts:
    """Remembers the first Ctrl-C; the second one ends the program at once."""

    def __init__(self) -> None:
        self.seen = False
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # signals go nowhere else
            self._before = signal.signal(signal.SIGINT, self._first)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _first(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _isolated(seed: int) -> Iterator[None]:
    """Seed torch and compute on one thread; afterwards both are as they were.

    One thread a learner, because a sum's order, and so its last bits, depends on how many threads
    share it; and because small batches are slower on several.
    """
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _check(task: Task, settings: Config) -> None:
    """Refuse what can't work before anything is written."""
    n = len(task.train)
    if settings.batch_size > n:
        raise InputError(
            f"batch size {settings.batch_size} is above the {n} training samples of {task.name}: "
            f"give 1 to {n}"
        )
    if (
        settings.label_smoothing
        and "label_smoothing" not in inspect.signature(task.loss).parameters
    ):
        raise InputError(
            f"label smoothing {settings.label_smoothing} can't be applied: the loss of {task.name} "
            "takes no label_smoothing; leave it out"
        )


def _choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        raise InputError(f"device {name!r} can't be used here: {error}") from error
    return device


def _make_forward(
    model: nn.Module, device: torch.device, settings: Config
) -> Callable[[Tensor], Tensor]:
    """How to run the model: compiled, or under autocast, as the settings say."""
    run: Callable[[Tensor], Tensor] = torch.compile(model) if settings.compile else model
    if settings.precision == "float32":
        return run

    def run_in_bf16(inputs: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return run(inputs).float()

    return run_in_bf16


def _make_optimizer(model: nn.Module, settings: Config) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise InputError("the model has no parameter that requires a gradient: nothing to train")
    if isinstance(settings.optimizer, str):
        return build_optimizer(settings.optimizer, parameters, settings.lr)
    return settings.optimizer(parameters)


def _make_schedule(task: Task, settings: Config) -> schedule.Schedule:
    """The share of the full learning rate, as a function of samples seen."""
    n = len(task.train)
    return schedule.parse(settings.schedule, 1.0, n, math.ceil(settings.epochs * n))


def _place(inputs: Tensor, device: torch.device, channels_last: bool) -> Tensor:
    if channels_last and inputs.dim() == 4:
        return inputs.to(device, memory_format=torch.channels_last)
    return inputs.to(device)
