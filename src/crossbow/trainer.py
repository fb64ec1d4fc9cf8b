"""Trainer: a task and its settings in; a trained model and a run directory out.

`train` checks everything before it writes anything. `_Run.loop` is the loop.
"""

import math
import signal
import statistics
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from crossbow.averaging.family import parse as parse_averaging
from crossbow.checkpoint.folder import Manifest
from crossbow.checkpoint.saver import Said, Saver
from crossbow.checkpoint.writer import Snapshot
from crossbow.comm.world import World, joined
from crossbow.config import Config, parse_speeds, resolve
from crossbow.errors import DivergedError
from crossbow.evaluation import Scores, calibrate, evaluate, final_metrics
from crossbow.fleet import Fleet
from crossbow.learner import Learner, total_samples
from crossbow.monitor import trace
from crossbow.monitor.log import RunLog, learners_of
from crossbow.monitor.machine import machine
from crossbow.monitor.meter import Clock, LossMeter
from crossbow.monitor.progress import Display, EvalReport, TrainReport, choose_display
from crossbow.monitor.sinks import check_installed, names_in, open_sinks
from crossbow.pace import FEWEST_SECONDS, Times, better_speeds, remarks
from crossbow.resuming import Start, find_start, load_model, read_state, remember_run, settle
from crossbow.stats.noise import OneLearnersNoise
from crossbow.stats.watch import PARTS
from crossbow.task import Task
from crossbow.tune.cache import planned_learners
from crossbow.tune.learners import LADDER, Tuner
from crossbow.tune.memory import Footprint, footprint

REPORT_INTERVAL_S = 0.5
RESTART_DROP = 0.6  # a schedule that falls by more from one round to the next has dropped
TARGET_WINDOW = 5  # evaluations whose median must reach the target, as in Koliousis et al., 2019


@dataclass(frozen=True)
class Reached:
    """The moment at which a target was met."""

    samples: int
    epoch: float
    seconds: float


@dataclass(frozen=True)
class RankTimes:
    """How long a rank's rounds took, and how it waited for others."""

    round_s: float
    """Mean, without waiting."""
    spread_s: float
    """Standard deviation."""
    idle: float
    """Share of the time that it waited."""


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
    learner_changes: int | None
    """How often the number of learners changed; None if it was given."""
    tuning_seconds: float
    """Time at numbers of learners that were tried and not kept."""
    gain: float | None
    """On the learners' common move at the end."""
    critical_batch: float | None
    """Samples beyond which larger batches are mostly waste, by the gradient noise at the end."""
    critical_batch_error: float | None
    sent_bytes: int
    """What the first host sent to others."""
    seed: int
    parameters: int
    reseeded: int
    """How often a learner left the numbers, and was put back at the central model."""
    stopped_by: str
    """epochs, target, time limit, interrupt or terminated."""
    run_dir: str
    rank_times: list[RankTimes] = field(default_factory=list)
    """Of each rank, if there are several."""
    remarks: list[str] = field(default_factory=list)
    """On unequal ranks, and such as vary."""
    final_metrics: dict[str, float] = field(default_factory=dict)
    """What the task computes of the final model: BLEU, say."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, after the run was saved and brought to a clean end."""

    def __init__(self, result: Result) -> None:
        super().__init__(f"interrupted after {result.samples} samples")
        self.result = result


def train(
    task: Task, config: Config | None = None, *, quiet: bool = False, refuge: Path | None = None
) -> Result:
    """Train the task; return what was reached.

    Under a launcher every rank calls this, and the first one writes and shows. Raises `Interrupted`
    after Ctrl-C or SIGTERM, when the run was saved; a second one ends at once.

    Args:
        task: what to learn.
        config: the settings; those left unsaid are the recipe's.
        quiet: whether to print nothing.
        refuge: a folder in memory that outlives ranks, which go on from there when they are started
            again.
    """
    config = config or Config()
    world = World.from_environment()
    is_first = world.rank == 0
    with joined(world), ExitStack() as stack:
        start = find_start(config, task.name, world, refuge)
        settings = resolve(settle(config, start), task.recipe)
        stack.enter_context(_isolated(settings.seed, settings.threads))
        learner = world.agree(lambda: Learner(task, settings, world))
        world.agree(lambda: load_model(start, learner.model))
        number = _first_number(task, settings, learner, world, start)
        fleet = stack.enter_context(make_fleet(learner, settings, task.name, number))
        log = world.agree(lambda: _make_log(task, settings, start, refuge) if is_first else None)
        if log:
            stack.enter_context(log)
        saver = stack.enter_context(_make_saver(world, log, settings, refuge))
        display = stack.enter_context(closing(choose_display(quiet or not is_first)))
        interrupts = stack.enter_context(_Interrupts())
        run = _Run(task, settings, learner, fleet, log, saver, display, interrupts)
        if start:
            run.go_on(start)
        result = run.train()
    if result.stopped_by in _SIGNALS.values():
        raise Interrupted(result)
    return result


class _Word(NamedTuple):
    """What a rank says when all meet."""

    losses: list[float]
    error: DivergedError | None
    stopped_by: str | None
    """The signal that came."""
    bad: list[tuple[int, int]]
    """Learners that were put back at the central model, and after how many samples."""
    saving: Said
    seconds: float
    parts: dict[str, float] | None
    """Mean seconds of a step's parts."""
    times: Times


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
        saver: Saver,
        display: Display,
        interrupts: "_Interrupts",
    ) -> None:
        self.task, self.settings, self.learner, self.fleet = task, settings, learner, fleet
        self.log, self.saver, self.display, self.interrupts = log, saver, display, interrupts
        self.epoch_samples = len(task.train)
        self.total_samples = total_samples(task, settings)
        self.restarts = parse_averaging(settings.sync).restart
        self._watch_noise()
        tunes = settings.learners == "auto" and not settings.replay
        self.tuner = _make_tuner(task, settings, fleet) if tunes else None
        self.replayed = learners_of(settings.replay)[1] if settings.replay else {}
        self.learner_changes = 0
        self.needed: Footprint | None = None
        self.samples = 0
        self.has_traced = False
        self.clock = Clock()
        self.meter = LossMeter()
        self.meetings = _Meetings()
        self.evaluations: list[EvalReport] = []
        self.rank_times = self.watched = [Times()] * fleet.world.size
        """Of each rank: all its rounds, and those until learners were last looked at."""
        self.target_first: Reached | None = None
        self.target_median: Reached | None = None
        self.stopped_by: str | None = None
        self.resumed: dict[str, Any] | None = None
        self.bad: list[tuple[int, int]] = []
        """Learners that went bad since ranks met last, and after how many samples."""
        self.num_bad, self.reseeded = 0, 0
        if settings.profile:
            fleet.watch.keep(trace.KEPT)

    def go_on(self, start: Start) -> None:
        """Take over where a run stood; all ranks together."""
        self.resumed = {"samples": start.samples, "anew": [], "warnings": start.warnings}
        for warning in start.warnings:
            self._warn(f"{warning}; going on from the checkpoint before it")
        checkpoint, fleet = start.checkpoint, self.fleet
        if checkpoint is None:
            return
        captured, state = fleet.world.agree(lambda: read_state(checkpoint, fleet.mine))
        with torch.no_grad():
            self.resumed["anew"] = fleet.restore(captured, start.samples)
        self._load_state(state)

    def train(self) -> Result:
        """Run the loop, then save what came of it."""
        parameters = sum(p.numel() for p in self.learner.model.parameters())
        learners, ranks = self.fleet.learners, self.fleet.world.size
        self._write(
            "resume" if self.resumed else "start",
            task=self.task.name,
            parameters=parameters,
            learners=learners,
            ranks=ranks,
            torch=torch.__version__,
            machine=machine(),
            **(self.resumed or {}),
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
        self.learner.join(self.fleet, self._say_engine)
        for inputs, targets in self._batches():
            loss = self.learner.step(inputs, targets, self.fleet.samples)
            self.fleet.watch.step_ended()
            if not self._went_bad():
                self.meter.add(loss, self.fleet.reading)
            if self.fleet.is_between_rounds and not self._goes_on():
                break
        else:  # not on every rank does the last round end with a batch
            self.samples = self.total_samples
        if self.stopped_by and self.stopped_by != "target":  # it could go on: before all else
            self._complain(self.saver.save_now(self._snapshot))
        has_score = self.evaluations and self.evaluations[-1].samples == self.samples
        if not has_score and not (self.evaluations and self.stopped_by == "terminated"):
            self._evaluate()
        self.stopped_by = self.stopped_by or "epochs"
        if self.settings.profile:
            self._write_trace()

    def _say_engine(self, engine: str, reason: str) -> None:
        """Tell why gradients are not computed as asked."""
        asked = self.settings.engine
        self._write("engine", asked=asked, engine=engine, reason=reason)
        self.display.note(f"engine {engine} in the place of {asked}: {reason}")

    def _went_bad(self) -> bool:
        """Whether the learner that has just moved was put back at the central model."""
        number = len(self.fleet.guard.found)
        is_new, self.num_bad = number > self.num_bad, number
        if is_new:
            self.bad.append((self.fleet.guard.found[-1], self.fleet.samples))
        return is_new

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
            if self.tuner and not self.stopped_by:
                self._tune(self.tuner)
            if self.settings.speeds == "auto" and not self.stopped_by:
                self._follow_speeds()
        if self.samples in self.replayed:
            self._resize(self.clock.train_seconds(), self.replayed[self.samples], "replayed")
        if self.restarts and self._has_dropped(before):
            self.fleet.restart()
            self._write("restart", samples=self.samples)
        if self.stopped_by is None:
            self.saver.save(self._snapshot)
        return self.stopped_by is None

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.fleet.batches(
            self.task.train,
            self.settings.batch_size,
            (self.total_samples - self.samples) / self.epoch_samples,
            start=self.samples,
            seed=self.settings.seed,
            prepare=self.task.prepare,
            collate=self.task.collate,
            partition=self.settings.partition,
        )

    def _follow_speeds(self) -> None:
        """Share learners anew if ranks turn out faster or slower than they were taken for."""
        pairs = zip(self.rank_times, self.watched, strict=True)
        lately = [now.since(then) for now, then in pairs]
        if min(times.busy_s + times.waited_s for times in lately) < FEWEST_SECONDS:
            return
        self.watched = self.rank_times
        if speeds := better_speeds(self.fleet.shares, lately):
            self.fleet.resize(self.fleet.learners, speeds)
            shares = [len(share) for share in self.fleet.shares]
            self._write("shares", samples=self.samples, learners=shares)

    def _has_dropped(self, before: int) -> bool:
        """Whether the learning rate falls here by a step."""
        return self.learner.rate(self.samples) < RESTART_DROP * self.learner.rate(before)

    def _meet(self) -> None:
        """Hear all ranks; tell the log and the display where training stands."""
        try:
            losses, error = self.meter.read(), None
        except DivergedError as diverged:
            losses, error = [], diverged
        error = error or self.fleet.guard.trouble
        parts, seconds = self.fleet.watch.read(), self.clock.seconds()
        signal, bad = self.interrupts.seen, self.bad
        word = _Word(losses, error, signal, bad, self.saver.say(), seconds, parts, self.fleet.times)
        words: list[_Word] = self.fleet.world.gather(word)
        self.bad = []
        for learner, samples in (bad for said in words for bad in said.bad):
            self.reseeded += 1
            self._write("reseeded", learner=learner, samples=samples)
            self._warn(f"learner {learner} left the numbers, and begins again at the central model")
        for said in words:
            if said.error:
                raise said.error
        self.meetings.held_at(words[0].seconds)
        self._complain(self.saver.hear([said.saving for said in words]))
        self.rank_times = [said.times for said in words]
        limit = self.settings.time_limit_s
        if signals := [said.stopped_by for said in words if said.stopped_by]:
            self.stopped_by = signals[0]
        elif limit is not None and words[0].seconds >= limit:
            self.stopped_by = "time limit"
        if self.settings.profile and self.fleet.watch.has_kept:
            self._write_trace()
        all_losses = [loss for said in words for loss in said.losses]
        if all_losses:
            seen = [said.parts for said in words if said.parts]
            self._report(statistics.fmean(all_losses), seen)

    def _tune(self, tuner: Tuner) -> None:
        """Change the number of learners if the tuner says so, by the first rank's figures."""
        world, critical = self.fleet.world, self._noise().get("critical_batch")
        seen = world.broadcast((self.clock.train_seconds(), self.samples, critical, self._room()))
        tuner.limit(seen[-1])
        move = tuner.observe(*seen[:-1])
        if move:
            self._resize(seen[0], **asdict(move))

    def _resize(self, seconds: float, learners: int, reason: str) -> None:
        """Go on with so many learners, and log it: a log can be replayed."""
        self.fleet.resize(learners)
        self._watch_noise()
        self.learner_changes += 1
        told = {"learners": learners, "reason": reason}
        self._write("learners", samples=self.samples, seconds=seconds, **told)

    def _room(self) -> int:
        """How many learners there is memory for, those at work included."""
        learner, world = self.learner, self.fleet.world
        if self.needed is None:  # an optimizer that has stepped has all its state
            averaging = self.fleet.averaging
            self.needed = footprint(
                learner.model, learner.optimizer, averaging, world.local_size, activations=0
            )
        hosts = world.size // world.local_size
        return self.fleet.learners + hosts * self.needed.more_learners(learner.device)

    def _watch_noise(self) -> None:
        """Look at one learner's gradients, where the averaging doesn't look at all of them."""
        learner = self.learner
        if self.fleet.gain is not None:
            learner.noise = None
        elif learner.noise is None:
            learning = [p for p in learner.model.parameters() if p.requires_grad]
            learner.noise = OneLearnersNoise(learning)

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
            staleness=self.fleet.take_staleness(),
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
        better = self.task.metric.reached
        if not any(better(before.metric, report.metric) for before in self.evaluations):
            self.saver.has_new_best = True
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

    def _snapshot(self) -> Snapshot:
        """What this rank writes of a checkpoint."""
        fleet, last = self.fleet, self.evaluations[-1] if self.evaluations else None
        captured = fleet.capture()
        is_first = fleet.world.rank == 0
        manifest = Manifest(
            task=self.task.name,
            samples=self.samples,
            epoch=self.samples / self.epoch_samples,
            learners=fleet.learners,
            ranks=fleet.world.size,
            parts=[[share.start, share.stop - 1] for share in fleet.shares],
            metric_name=last.metric_name if last else None,
            metric=last.metric if last else None,
            higher_is_better=self.task.metric.higher_is_better,
            written=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={"crossbow": version("crossbow"), "torch": torch.__version__},
            settings=self.settings.to_json(),
        )
        shared = {"fleet": captured.shared, "run": self._state_dict()} if is_first else {}
        model = fleet.state_dict() if is_first else {}
        return Snapshot(manifest, captured.learners, shared, model)

    def _state_dict(self) -> dict[str, Any]:
        """What the run has seen so far, as plain values; what gradients said as tensors, too."""
        targets = (self.target_first, self.target_median)
        return {
            "evaluations": [report._asdict() for report in self.evaluations],
            "targets": [asdict(reached) if reached else None for reached in targets],
            "reseeded": self.reseeded,
            "clock": self.clock.state_dict(),
            "noise": self.learner.noise.state_dict() if self.learner.noise else None,
        }

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self.samples = self.resumed["samples"] if self.resumed else 0
        self.evaluations = [EvalReport(**report) for report in state["evaluations"]]
        targets = (Reached(**reached) if reached else None for reached in state["targets"])
        self.target_first, self.target_median = targets
        self.reseeded = state["reseeded"]
        self.clock.load_state_dict(state["clock"], self.samples)
        if self.learner.noise and state["noise"]:
            self.learner.noise.load_state_dict(state["noise"])

    def _complain(self, problems: Sequence[str]) -> None:
        """Say that a checkpoint couldn't be written; training goes on."""
        for problem in problems:
            self._write("checkpoint failed", samples=self.samples, message=problem)
            self._warn(f"no checkpoint: {problem}")

    def _warn(self, message: str) -> None:
        if self.fleet.world.rank == 0:
            print(f"crossbow: {message}", file=sys.stderr, flush=True)

    def _write(self, event: str, **values: Any) -> None:
        if self.log:
            self.log.write(event, **values)

    def _result(self, parameters: int) -> Result:
        last, noise = self.evaluations[-1], self._noise()
        times = self.rank_times if self.fleet.world.size > 1 else []
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
            learner_changes=self.learner_changes if self.tuner else None,
            tuning_seconds=self.tuner.spent_s if self.tuner else 0.0,
            gain=noise["gain"],
            critical_batch=noise.get("critical_batch"),
            critical_batch_error=noise.get("critical_batch_error"),
            sent_bytes=self.fleet.traffic.sent_bytes,
            seed=self.settings.seed,
            parameters=parameters,
            reseeded=self.reseeded,
            stopped_by=str(self.stopped_by),
            run_dir=str(self.log.path) if self.log else "",
            rank_times=[RankTimes(t.mean_s, t.spread_s, t.idle) for t in times],
            remarks=remarks(times) if times else [],
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


_SIGNALS = {signal.SIGINT: "interrupt", signal.SIGTERM: "terminated"}


class _Interrupts:
    """Remembers the first Ctrl-C or SIGTERM; the second one ends the program at once."""

    def __init__(self) -> None:
        self.seen: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # signals go nowhere else
            self._before = {number: signal.signal(number, self._first) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _first(self, number: int, frame: FrameType | None) -> None:
        self.seen = _SIGNALS[signal.Signals(number)]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _isolated(seed: int, own_threads: int) -> Iterator[None]:
    """Seed torch and compute on so many threads; afterwards both are as they were.

    One thread a learner, because a sum's order, and so its last bits, depends on how many threads
    share it; and because small batches are slower on several.
    """
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        torch.set_num_threads(own_threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _first_number(
    task: Task, settings: Config, learner: Learner, world: World, start: Start | None
) -> int:
    """How many learners to begin with: if that is to be found, what was found, else one a rank."""
    if settings.replay and not (start and start.checkpoint):
        return learners_of(settings.replay)[0]
    if settings.learners != "auto":
        return settings.learners
    if start and start.checkpoint:
        return max(start.checkpoint.manifest.learners, world.size)
    planned = planned_learners(task.name, learner.model, settings, world)
    most = max(1, len(task.train) // settings.batch_size // world.size)
    a_rank: int = world.broadcast(min(planned or 1, most))
    return a_rank * world.size


def _make_tuner(task: Task, settings: Config, fleet: Fleet) -> Tuner:
    """A tuner of numbers that all ranks have an equal share of, and a round of which is read."""
    numbers = (fleet.world.size * a_rank for a_rank in LADDER)
    most = len(task.train) // settings.batch_size
    choices = [k for k in numbers if k <= most]
    return Tuner(fleet.learners, choices, settings.batch_size, total_samples(task, settings))


def make_fleet(learner: Learner, settings: Config, name: str, learners: int) -> Fleet:
    """So many learners of this kind, as the settings say."""
    averaging = parse_averaging(settings.sync)
    return Fleet(
        learner.model,
        learner.optimizer,
        averaging,
        learners=learners,
        speeds=parse_speeds(settings.speeds),
        ema=settings.ema,
        compress=settings.compress,
        topology=settings.topology,
        name=name,
    )


def _make_log(task: Task, settings: Config, start: Start | None, refuge: Path | None) -> RunLog:
    def claimed(run: Path) -> None:
        if refuge:
            remember_run(refuge, run)

    names, config = names_in(settings.log_to), settings.to_json()
    check_installed(names)
    with ExitStack() as stack:
        if start:
            claimed(start.run)
            log = RunLog.resume(start.run, config)
        else:
            log = RunLog.create(settings.run_dir, task.name, config, claimed)
        stack.enter_context(log)
        log.sinks = open_sinks(names, log.path, task.name, config)
        stack.pop_all()
    return log


def _make_saver(world: World, log: RunLog | None, settings: Config, refuge: Path | None) -> Saver:
    run: Path = world.broadcast(log.path if log else None)
    return Saver(world, run, refuge, every_s=settings.checkpoint_every_s, keep=settings.keep)
