"""Learner: a model with what it takes to move it by one batch."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from crossbow.comm.world import World
from crossbow.config import Config
from crossbow.engines.choice import choose
from crossbow.engines.objective import Batch, Engine, Objective
from crossbow.engines.sequential import Sequential
from crossbow.errors import InputError
from crossbow.fleet import Fleet
from crossbow.optim import schedule
from crossbow.optim.build import build_optimizer
from crossbow.optim.scaling import LossScales
from crossbow.stats.noise import OneLearnersNoise
from crossbow.task import Task

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Learner:
    """A model with what it takes to move it: device, forward pass, optimizer and learning rate."""

    def __init__(self, task: Task, settings: Config, world: World) -> None:
        _check(task, settings)
        self.device = _choose_device(settings.device, world)
        _check_precision(settings.precision, self.device)
        self.channels_last = settings.channels_last
        self.model = task.build_model().to(self.device)
        if settings.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.forward = _make_forward(self.model, self.device, settings)
        self.run_plainly = _make_forward(self.model, self.device, replace(settings, compile=False))
        self.loss = task.loss
        if settings.label_smoothing:
            self.loss = partial(task.loss, label_smoothing=settings.label_smoothing)
        self.optimizer = _make_optimizer(self.model, settings)
        self.rate = _make_schedule(task, settings)
        self.noise: OneLearnersNoise | None = None
        """Looks at the gradients, where the averaging doesn't."""
        self._engine: Engine | None = None
        """Chosen in the first round of a crew: by then it is known what batches look like."""
        self._crew: Sequential | None = None
        self._fleet: Fleet | None = None
        self._say: Callable[[str, str], None] = lambda engine, reason: None
        self._losses: Iterator[Tensor] = iter(())
        self._number = 0
        self._engine_name, self._compiles = settings.engine, settings.compile
        self._is_float16 = settings.precision == "fp16"
        self.scales: LossScales | None = None
        """In float16: of the learners' losses."""
        self._learning = [p for p in self.model.parameters() if p.requires_grad]
        self._full_rates = [group["lr"] for group in self.optimizer.param_groups]

    def join(self, fleet: Fleet, say: Callable[[str, str], None]) -> None:
        """Be the learners of this rank, in turn.

        Args:
            fleet: steps the optimizer, and knows what its learners read.
            say: told the engine and why, if it isn't the one that was asked for.
        """
        self._fleet, self._say = fleet, say

    def step(self, inputs: Tensor, targets: Tensor, samples_seen: int) -> Tensor:
        """Move the learner aboard by one batch; return its loss."""
        loss = next(self._losses, None)
        if loss is None:  # a round begins
            self._losses = self._round(inputs, targets)
            loss = next(self._losses)
        rate = self.rate(samples_seen)
        for group, full in zip(self.optimizer.param_groups, self._full_rates, strict=True):
            group["lr"] = full * rate
        if self.scales and not self.scales.unscale(self._number, self._learning):
            self._rest()
            return loss
        if self.noise:
            self.noise.look()
        self.optimizer.step()
        return loss

    def _round(self, inputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
        """Yield losses with gradients in the parameters: of this batch, and of those of its round.

        The sequential engine is given one batch at a time, so that none has to wait in memory.
        """
        crew = self._fleet.crew if self._fleet else None
        if self._engine is None or self._crew is not crew:
            self._choose_engine(crew, (inputs, targets))
        assert self._engine is not None
        batches = [(inputs, targets), *self._ahead()]
        scales = self.scales.values if self.scales else None
        for number, loss in enumerate(self._engine.gradients(self._placed(batches), scales)):
            self._number = number
            yield loss

    def _ahead(self) -> list[Batch]:
        """The other batches of this round, for engines that want them all."""
        wants = self._crew and (self._engine is None or self._engine.name != "sequential")
        if self.scales:  # a learner's scale is known by its place in a round
            wants = self._fleet is not None
        return self._fleet.batches_ahead() if wants and self._fleet else []

    def _choose_engine(self, crew: Sequential | None, batch: Batch) -> None:
        """Choose how this crew computes gradients; say why not as asked, if it is not."""
        self._engine, self._crew = None, crew
        batches = [batch, *self._ahead()]
        if self._is_float16:
            self.scales = LossScales(len(self._fleet.mine) if self._fleet else 1, self.device)
        self._engine, reason = choose(
            self._engine_name,
            Objective(self.model, self.run_plainly, self.loss),
            lambda inputs, targets: self.loss(self.forward(inputs), targets),
            self.optimizer,
            crew,
            self._placed(batches),
            compiles=self._compiles,
        )
        if reason:
            self._say(self._engine.name, reason)

    def _rest(self) -> None:
        if self._fleet:
            self._fleet.rest()

    def _placed(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """The batches where the model is."""
        if not self.channels_last and self.device.type == "cpu":
            return batches
        return [
            (_place(inputs, self.device, self.channels_last), _place(targets, self.device, False))
            for inputs, targets in batches
        ]


def total_samples(task: Task, settings: Config) -> int:
    """Rounded, for 0.07 epochs of 100 samples are 7.000000000000001."""
    return max(1, round(settings.epochs * len(task.train)))


def _check(task: Task, settings: Config) -> None:
    """Refuse what can't work before anything is written."""
    n = len(task.train)
    if settings.batch_size > n:
        raise InputError(
            f"batch size {settings.batch_size} is above the {n} training samples of {task.name}: "
            f"give 1 to {n}"
        )
    if settings.threads > 1 and settings.learners != 1:
        raise InputError(
            f"{settings.threads} threads are not possible with {settings.learners} learners, which "
            "compute on one each: leave out threads, or train one learner"
        )
    if not len(task.test):
        raise InputError(f"{task.name} has no samples to evaluate on: give one or more")
    if (
        settings.label_smoothing
        and "label_smoothing" not in inspect.signature(task.loss).parameters
    ):
        raise InputError(
            f"label smoothing {settings.label_smoothing} can't be applied: the loss of {task.name} "
            "takes no label_smoothing; leave it out"
        )


def _check_precision(precision: str, device: torch.device) -> None:
    if precision == "fp16" and device.type != "cuda":
        raise InputError(
            f"precision fp16 can't be used on {device}: it needs CUDA; give bf16 or float32"
        )


def _choose_device(name: str, world: World) -> torch.device:
    if name == "auto":
        gpus = torch.cuda.device_count()
        return torch.device("cuda", world.local_rank % gpus) if gpus else torch.device("cpu")
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

    dtype = _DTYPES[settings.precision]

    def run_under_autocast(inputs: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype):
            return run(inputs).float()

    return run_under_autocast


def _make_optimizer(model: nn.Module, settings: Config) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise InputError("the model has no parameter that requires a gradient: nothing to train")
    if isinstance(settings.optimizer, str):
        return build_optimizer(settings.optimizer, parameters, settings.lr)
    return settings.optimizer(parameters)


def _make_schedule(task: Task, settings: Config) -> schedule.Schedule:
    """The share of the full learning rate, as a function of samples seen."""
    return schedule.parse(settings.schedule, 1.0, len(task.train), total_samples(task, settings))


def _place(inputs: Tensor, device: torch.device, channels_last: bool) -> Tensor:
    if device.type == "cuda":  # from pinned memory the copy is queued, and nobody waits for it
        inputs = inputs.pin_memory().to(device, non_blocking=True)
    if channels_last and inputs.dim() == 4:
        return inputs.to(device, memory_format=torch.channels_last)
    return inputs.to(device)
