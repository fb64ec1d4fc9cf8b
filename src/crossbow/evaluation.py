"""Evaluation: how good a model is on a whole data set.

An average of models has weights that none of them had, and the statistics which its batch norms
gathered belong to others: with those it may score far below its worth. `calibrate` estimates them
again.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from crossbow.comm.world import World
from crossbow.data.loader import Stretch, read, scan, stretches
from crossbow.errors import InputError
from crossbow.task import Dataset, Task

EVAL_BATCH = 256


class Scores(NamedTuple):
    """Means over a data set."""

    loss: float
    metric: float


def evaluate(
    model: nn.Module,
    task: Task,
    data: Dataset | None = None,
    forward: Callable[[Tensor], Tensor] | None = None,
    world: World | None = None,
) -> Scores:
    """Score the model on the task's test set, or on `data`.

    Args:
        model: is left in the mode it is in.
        task: says how to prepare, and what to score.
        data: in the place of the test set.
        forward: runs the model, if not by calling it: under autocast, say.
        world: of ranks that share the work, each calling this with the same model.
    """
    data = task.test if data is None else data
    world = world or World()
    if not len(data):
        raise InputError(f"{task.name} has no samples to evaluate on: give one or more")
    pieces = list(stretches(0, len(data), EVAL_BATCH))
    with _evaluating(model), torch.inference_mode():
        mine = _sums(model, task, data, forward or model, pieces[world.rank :: world.size])
    # added up piece by piece in the data's own order, so that ranks don't show in the last bits
    sums = [sum_ for turn in zip_longest(*world.gather(mine)) for sum_ in turn if sum_]
    loss, metric = (math.fsum(column) / len(data) for column in zip(*sums, strict=True))
    return Scores(loss, metric)


def final_metrics(model: nn.Module, task: Task, world: World | None = None) -> dict[str, float]:
    """Compute what the task wants to know of a final model; nothing, for most tasks.

    Args:
        model: is left in the mode it is in.
        task: says what.
        world: of ranks that share the work, each calling this with the same model.
    """
    if task.final_metrics is None:
        return {}
    with _evaluating(model), torch.inference_mode():
        return task.final_metrics(model, world or World())


def calibrate(
    model: nn.Module,
    task: Task,
    samples: int,
    seed: int = 0,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Estimate the statistics of the model's batch norms on the first training samples of a stream.

    They are means over whole batches of training input, the same for the same seed. Dropout is off,
    and a model without batch norm is left as it is.

    Args:
        model: holds weights whose statistics are not known.
        task: says what is read, and how it is prepared.
        samples: to read; 0 leaves the model as it is.
        seed: of the stream.
        forward: runs the model, if not by calling it.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not norms or not samples:
        return
    device = next(model.parameters()).device
    wanted = stretches(0, min(samples, len(task.train)), EVAL_BATCH)
    batches = read(task.train, wanted, seed=seed, prepare=task.prepare, collate=task.collate)
    with _evaluating(model), _estimating(norms), torch.no_grad():
        for inputs, _ in batches:
            (forward or model)(inputs.to(device))


@contextmanager
def _estimating(norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """Let batch norms average what they see from now on, evenly."""
    before = [(norm.momentum, _copy_of(norm.num_batches_tracked)) for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # torch's name for a mean over all batches
        norm.train()
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum = momentum
            if norm.num_batches_tracked is not None and count is not None:
                norm.num_batches_tracked.copy_(count)


def _copy_of(count: Tensor | None) -> Tensor | None:
    return None if count is None else count.clone()


def _sums(
    model: nn.Module,
    task: Task,
    data: Dataset,
    forward: Callable[[Tensor], Tensor],
    pieces: Sequence[Stretch],
) -> list[tuple[float, float]]:
    """Loss and metric of each piece of the data, summed over its samples."""
    device = next(model.parameters()).device
    batches = scan(data, pieces, prepare=task.prepare, collate=task.collate)
    sums = []
    for inputs, targets in batches:
        inputs, targets = inputs.to(device), targets.to(device)
        outputs = forward(inputs).float()
        loss, metric = task.loss(outputs, targets), task.metric.compute(outputs, targets)
        sums.append((loss.item() * len(targets), metric.item() * len(targets)))
    return sums


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, and each of its modules back as it was."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
