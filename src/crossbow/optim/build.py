"""Optimizers by name: those of torch.optim, with exactly the arguments that are written."""

import inspect
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from crossbow.errors import InputError, check_choice
from crossbow.spec import Value, parse_spec

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
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
    kind = OPTIMIZERS[check_choice("optimizer", name, sorted(OPTIMIZERS))]
    legal = list(inspect.signature(kind).parameters)[2:]  # after params and lr
    for option, value in options.items():
        check_choice(f"option of {name}", option, legal)
        _check_finite(option, value)
    arguments: dict[str, Any] = {"lr": lr, **options}
    make = partial(kind, **arguments)
    parameters = list(parameters)
    try:
        _rehearse(make([_like(parameters[0])]))
        return make(parameters)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise InputError(f"optimizer {spec!r} can't be used: {error}") from error


def _check_finite(option: str, value: Value) -> None:
    """Refuse what torch lets pass: a comparison with NaN is false."""
    numbers = value if isinstance(value, tuple) else (value,)
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        raise InputError(f"{option}={value} is not possible: give finite numbers")


def _like(parameter: nn.Parameter) -> nn.Parameter:
    """A matrix of one number, where the parameter lives."""
    return nn.Parameter(parameter.new_zeros(1, 1))


def _rehearse(optimizer: torch.optim.Optimizer) -> None:
    """Take a step that counts for nothing: some refuse their arguments only then."""
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
