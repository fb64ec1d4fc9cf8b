"""Evaluation: how good a model is on a whole data set."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from crossbow.data.loader import scan
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
) -> Scores:
    """Score the model on the task's test set, or on `data`.

    `forward` is how to run the model, if not by calling it: under autocast, say.
    """
    run = forward or model
    sums = torch.zeros(2, dtype=torch.float64)
    samples = 0
    device = next(model.parameters()).device
    with _evaluating(model), torch.inference_mode():
        for inputs, targets in scan(
            task.test if data is None else data,
            EVAL_BATCH,
            prepare=task.prepare,
            collate=task.collate,
        ):
            inputs, targets = inputs.to(device), targets.to(device)
            outputs = run(inputs).float()
            means = torch.stack(
                [task.loss(outputs, targets), task.metric.compute(outputs, targets)]
            )
            sums += means.double().cpu() * len(targets)
            samples += len(targets)
    loss, metric = (sums / samples).tolist()
    return Scores(loss, metric)


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
