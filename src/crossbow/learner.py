"""Learner: a model with what it takes to move it by one batch."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from crossbow.comm.world import World
from crossbow.config import Config
from crossbow.errors import InputError
from crossbow.optim import schedule
from crossbow.optim.build import build_optimizer
from crossbow.stats.noise import OneLearnersNoise
from crossbow.task import Task


class Learner:
    """A model with what it takes to move it: device, forward pass, optimizer and learning rate."""

    def __init__(self, task: Task, settings: Config, world: World) -> None:
        _check(task, settings)
        self.device = _choose_device(settings.device, world)
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
        self._full_rates = [group["lr"] for group in self.optimizer.param_groups]

    def step(self, inputs: Tensor, targets: Tensor, samples_seen: int) -> Tensor:
        """Move by one batch; return its loss."""
        if self.channels_last or self.device.type != "cpu":
            inputs = _place(inputs, self.device, self.channels_last)
            targets = targets.to(self.device)
        rate = self.rate(samples_seen)
        for group, full in zip(self.optimizer.param_groups, self._full_rates, strict=True):
            group["lr"] = full * rate
        loss = self.loss(self.forward(inputs), targets)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if self.noise:
            self.noise.look()
        self.optimizer.step()
        return loss.detach()


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
    return schedule.parse(settings.schedule, 1.0, len(task.train), total_samples(task, settings))


def _place(inputs: Tensor, device: torch.device, channels_last: bool) -> Tensor:
    if channels_last and inputs.dim() == 4:
        return inputs.to(device, memory_format=torch.channels_last)
    return inputs.to(device)
