"""Trainer: a task and its settings in; a trained model and a run directory out.

`train` checks everything before it writes anything. `_Run.loop` is the loop.
"""

import math
import signal
import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from types import FrameType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from crossbow.averaging.family import parse as parse_averaging
from crossbow.comm.world import World, joined
from crossbow.config import Config, resolve
from crossbow.errors import DivergedError
from crossbow.evaluation import Scores, calibrate, evaluate, final_metrics
from crossbow.fleet import Fleet
from crossbow.learner import Learner, total_samples
from crossbow.monitor import trace
from crossbow.monitor.log import RunLog
from crossbow.monitor.machine import machine
from crossbow.monitor.meter import Clock, LossMeter
from crossbow.monitor.progress import Display, EvalReport, TrainReport, choose_display
from crossbow.monitor.sinks import check_installed, names_in, open_sinks
from crossbow.stats.noise import OneLearnersNoise
from crossbow.stats.watch import PARTS
from crossbow.task import Task

REPORT_INTERVAL_S = 0.5
RESTART_DROP = 0.6  # a schedule that falls by more from one round to the next has dropped
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
    gain: float | None
    """On the learners' common move at the end."""
    critical_batch: float | None
    """Samples beyond which larger batches are mostly waste, by the gradient noise at the end."""
    critical_batch_error: float | None
    sent_bytes: int
    """What the first host sent to others."""
    seed: int
    parameters: int
    stopped_by: str
    """epochs, target, time limit or interrupt."""
    run_dir: str
    final_metrics: dict[str, float] = field(default_factory=dict)
    """What the task computes of the final model: BLEU, say."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after the run was brought to a clean end."""

    def __init__(self, result: Result) -> None:
        super().__init__(f"interrupted after {result.samples} samples")
        self.result = result


def train(task: Task, config: Config | None = None, *, quiet: bool = False) -> Result:
    """Train the task; return what was reached.

    Under a launcher every rank calls this, and the first one writes and shows. Raises `Interrupted`
    after Ctrl-C, with the result so far; a second Ctrl-C ends at once.
    """
    settings = resolve(config or Config(), task.recipe)
    world = World.from_environment()
    is_first = world.rank == 0
    with joined(world), _isolated(settings.seed), ExitStack() as stack:
        learner = world.agree(lambda: Learner(task, settings, world))
        fleet = stack.enter_context(_make_fleet(learner, settings, task.name))
        log = world.agree(lambda: _make_log(task, settings) if is_first else None)
        if log:
            stack.enter_context(log)
        display = stack.enter_context(closing(choose_display(quiet or not is_first)))
        interrupts = stack.enter_context(_Interrupts())
        result = _Run(task, settings, learner, fleet, log, display, interrupts).train()
    if result.stopped_by == "interrupt":
        raise Interrupted(result)
    return result


class _Word(NamedTuple):
    """What a rank says when all meet."""

    losses: list[float]
    error: DivergedError | None
    was_interrupted: bool
    seconds: float
    parts: dict[str, float] | None
    """Mean seconds of a step's parts."""


class _Run:
    """One run of the loop, and what it has seen so far.

    Ranks decide together: now and then, after the same round, they meet and hear each other.
    """

    def __init__(
        self,
        task: Task,
        settings: Config,
        learner: Learner,
        fleet: Fleet,
        log: RunLog | None,
        display: Display,
        interrupts: "_Interrupts",
    ) -> None:
        self.task, self.settings, self.learner, self.fleet = task, settings, learner, fleet
        self.log, self.display, self.interrupts = log, display, interrupts
        self.epoch_samples = len(task.train)
        self.total_samples = total_samples(task, settings)
        self.restarts = parse_averaging(settings.sync).restart
        if fleet.gain is None:
            learning = [p for p in learner.model.parameters() if p.requires_grad]
            learner.noise = OneLearnersNoise(learning)
        self.samples = 0
        self.has_traced = False
        self.clock = Clock()
        self.meter = LossMeter()
        self.meetings = _Meetings()
        self.evaluations: list[EvalReport] = []
        self.target_first: Reached | None = None
        self.target_median: Reached | None = None
        self.stopped_by: str | None = None
        if settings.profile:
            fleet.watch.keep(trace.KEPT)

    def train(self) -> Result:
        """Run the loop, then save what came of it."""
        parameters = sum(p.numel() for p in self.learner.model.parameters())
        learners, ranks = self.fleet.learners, self.fleet.world.size
        self._write(
            "start",
            task=self.task.name,
            parameters=parameters,
            learners=learners,
            ranks=ranks,
            torch=torch.__version__,
            machine=machine(),
        )
        crew = f", {learners} learners on {ranks} ranks" if learners > 1 else ""
        self.display.start(
            f"{self.task.name}: {parameters:,} parameters, {self.epoch_samples:,} samples an epoch"
            f"{crew}",
            self.total_samples,
        )
        try:
            self.loop()
        except DivergedError as error:
            self._write("diverged", samples=self.samples, message=str(error))
            raise
        result = self._result(parameters)
        with self._model_aboard() as model:
            if self.log:
                self.log.save_model(model.state_dict())
            final = final_metrics(model, self.task, self.fleet.world)
        result = replace(result, final_metrics=final)
        if self.log:
            self.log.save_result(asdict(result))
        self._write("end", stopped_by=self.stopped_by)
        return result

    def loop(self) -> None:
        """Train until something ends it."""
        self.learner.model.train()
        for inputs, targets in self._batches():
            loss = self.learner.step(inputs, targets, self.fleet.samples)
            self.fleet.watch.step_ended()
            self.meter.add(loss, self.fleet.reading)
            if self.fleet.is_between_rounds and not self._goes_on():
                break
        else:  # not on every rank does the last round end with a batch
            self.samples = self.total_samples
        if not self.evaluations or self.evaluations[-1].samples != self.samples:
            self._evaluate()
        self.stopped_by = self.stopped_by or "epochs"
        if self.settings.profile:
            self._write_trace()

    def _goes_on(self) -> bool:
        """After a round: evaluate, meet and restart when it is time; return whether to go on."""
        before, every = self.fleet.samples, self.settings.eval_every or self.epoch_samples
        self.samples = before + self.fleet.learners * self.settings.batch_size
        if self.samples >= self.total_samples:
            return True
        self.clock.step_ended(self.samples)
        if self.samples // every > before // every:
            self._evaluate()
        elif self.meetings.is_due():
            self._meet()
        if self.restarts and self._has_dropped(before):
            self.fleet.restart()
            self._write("restart", samples=self.samples)
        return self.stopped_by is None

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.fleet.batches(
            self.task.train,
            self.settings.batch_size,
            self.settings.epochs,
            seed=self.settings.seed,
            prepare=self.task.prepare,
            collate=self.task.collate,
        )

    def _has_dropped(self, before: int) -> bool:
        """Whether the learning rate falls here by a step."""
        return self.learner.rate(self.samples) < RESTART_DROP * self.learner.rate(before)

    def _meet(self) -> None:
        """Hear all ranks; tell the log and the display where training stands."""
        try:
            losses, error = self.meter.read(), None
        except DivergedError as diverged:
            losses, error = [], diverged
        parts, seconds = self.fleet.watch.read(), self.clock.seconds()
        word = _Word(losses, error, self.interrupts.seen, seconds, parts)
        words: list[_Word] = self.fleet.world.gather(word)
        for said in words:
            if said.error:
                raise said.error
        self.meetings.held_at(words[0].seconds)
        limit = self.settings.time_limit_s
        if any(said.was_interrupted for said in words):
            self.stopped_by = "interrupt"
        elif limit is not None and words[0].seconds >= limit:
            self.stopped_by = "time limit"
        if self.settings.profile and self.fleet.watch.has_kept:
            self._write_trace()
        all_losses = [loss for said in words for loss in said.losses]
        if all_losses:
            seen = [said.parts for said in words if said.parts]
            self._report(statistics.fmean(all_losses), seen)

    def _report(self, loss: float, parts: Sequence[Mapping[str, float]]) -> None:
        report = TrainReport(
            samples=self.samples,
            epoch=self.samples / self.epoch_samples,
            loss=loss,
            lr=self.learner.optimizer.param_groups[0]["lr"],
            samples_per_second=self.clock.lap_speed(self.samples),
            seconds=self.clock.seconds(),
            **self._noise(),
            **{f"{part}_s": statistics.fmean(p[part] for p in parts) for part in PARTS if parts},
        )
        self._write("train", **report._asdict())
        self.display.trained(report)

    def _write_trace(self) -> None:
        """Write the timeline of all ranks, once."""
        if self.has_traced:
            return
        self.has_traced = True
        spans = trace.gather(self.fleet.watch.spans, self.fleet.world)
        if self.log:
            trace.write(self.log.path / "trace.json", spans)

    def _evaluate(self) -> None:
        """Score the central model, with the clock of training stopped."""
        self._meet()
        last: Scores | None = None
        with self.clock.paused():
            with self._model_aboard():
                scores = self._score()
            if self.settings.ema:
                with self._model_aboard(is_moving_average=False):
                    last = self._score()
            self._compare_learners()
        if math.isnan(scores.loss):
            raise DivergedError(
                f"the test loss became nan at sample {self.samples}: try a lower --lr, or a warm-up"
            )
        report = EvalReport(
            samples=self.samples,
            epoch=self.samples / self.epoch_samples,
            loss=scores.loss,
            metric_name=self.task.metric.name,
            metric=scores.metric,
            seconds=self.clock.seconds(),
            last_loss=last.loss if last else None,
            last_metric=last.metric if last else None,
        )
        if self.fleet.traffic.sums:
            self._write("wire", samples=self.samples, **asdict(self.fleet.traffic))
        self.evaluations.append(report)
        self._write("eval", **report._asdict())
        self.display.evaluated(report)
        self._check_target()

    @contextmanager
    def _model_aboard(self, is_moving_average: bool = True) -> Iterator[nn.Module]:
        """Let the model hold what counts: the moving average if there is one, else the central."""
        averaged = bool(self.settings.ema) and is_moving_average
        with self.fleet.averaged() if averaged else self.fleet.central() as model:
            if averaged or self.fleet.learners > 1:
                calibrate(
                    model,
                    self.task,
                    self.settings.bn_samples,
                    self.settings.seed,
                    forward=self.learner.run_plainly,
                )
            yield model

    def _score(self) -> Scores:
        """Score what the model holds; all ranks share the work."""
        learner, world = self.learner, self.fleet.world
        return evaluate(learner.model, self.task, forward=learner.forward, world=world)

    def _compare_learners(self) -> None:
        """Log how far learners stand apart, and how good they are by themselves."""
        found = self.fleet.divergence()
        if found:
            alone = self._score()  # each rank with its learner aboard
            values = {key: v if math.isfinite(v) else None for key, v in asdict(found).items()}
            self._write(
                "divergence",
                samples=self.samples,
                **values,
                learner_loss=alone.loss,
                learner_metric=alone.metric,
            )

    def _noise(self) -> dict[str, float | None]:
        """What gradients said of their noise so far."""
        gain, own = self.fleet.gain, self.learner.noise
        meter = gain.meter if gain else own.meter if own else None
        noise = meter.read() if meter else None
        if not noise:
            return {"gain": gain.value if gain else None}
        size, error = noise.critical_batch(self.settings.batch_size)
        shown = math.isfinite(size)
        return {
            "gain": gain.value if gain else None,
            "variance": noise.variance,
            "signal": noise.signal,
            "critical_batch": size if shown else None,
            "critical_batch_error": error if shown else None,
        }

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
            self.stopped_by = "target"

    def _write(self, event: str, **values: Any) -> None:
        if self.log:
            self.log.write(event, **values)

    def _result(self, parameters: int) -> Result:
        last, noise = self.evaluations[-1], self._noise()
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
            learners=self.fleet.learners,
            ranks=self.fleet.world.size,
            gain=noise["gain"],
            critical_batch=noise.get("critical_batch"),
            critical_batch_error=noise.get("critical_batch_error"),
            sent_bytes=self.fleet.traffic.sent_bytes,
            seed=self.settings.seed,
            parameters=parameters,
            stopped_by=str(self.stopped_by),
            run_dir=str(self.log.path) if self.log else "",
        )


class _Meetings:
    """Decides after which rounds ranks meet: about two a second, and the same for all of them."""

    def __init__(self) -> None:
        self._rounds = self._interval = 1
        self._last_seconds = 0.0

    def is_due(self) -> bool:
        """Count a round; return whether it ends with a meeting."""
        self._rounds -= 1
        return self._rounds <= 0

    def held_at(self, seconds: float) -> None:
        """Plan the next meeting, by the first rank's clock."""
        elapsed = max(seconds - self._last_seconds, 1e-9)
        wanted = round(self._interval * REPORT_INTERVAL_S / elapsed)
        self._interval = min(max(wanted, 1), 4 * self._interval)
        self._rounds, self._last_seconds = self._interval, seconds


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


def _make_fleet(learner: Learner, settings: Config, name: str) -> Fleet:
    averaging = parse_averaging(settings.sync)
    return Fleet(
        learner.model,
        learner.optimizer,
        averaging,
        learners=settings.learners,
        ema=settings.ema,
        compress=settings.compress,
        topology=settings.topology,
        name=name,
    )


def _make_log(task: Task, settings: Config) -> RunLog:
    names, config = names_in(settings.log_to), settings.to_json()
    check_installed(names)
    with ExitStack() as stack:
        log = stack.enter_context(RunLog.create(settings.run_dir, task.name, config))
        log.sinks = open_sinks(names, log.path, task.name, config)
        stack.pop_all()
    return log
