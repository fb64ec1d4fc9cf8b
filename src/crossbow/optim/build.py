"""Optimizers by name: any of torch.optim, with exactly the arguments that are written."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from crossbow.errors import InputError, check_choice
from crossbow.spec import parse_spec

OPTIMIZERS = {
    name.lower(): value
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value)
    and issubclass(value, torch.optim.Optimizer)
    and value is not torch.optim.Optimizer
}


def build_optimizer(
    spec: str, parameters: Iterable[nn.Parameter], lr: float
) -> torch.optim.Optimizer:
    """Make the optimizer that `spec` names, such as `sgd:momentum=0.9,fused=true`."""
    name, options = parse_spec(spec)
    make = OPTIMIZERS[check_choice("optimizer", name, sorted(OPTIMIZERS))]
    legal = list(inspect.signature(make).parameters)[2:]  # after params and lr
    for option in options:
        check_choice(f"option of {name}", option, legal)
    try:
        arguments: dict[str, Any] = {"lr": lr, **options}
        return make(parameters, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"optimizer {spec!r} can't be made: {error}") from error
