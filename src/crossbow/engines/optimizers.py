"""Optimizers: what they have gathered, by the names of parameters, to outlive the process."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from crossbow.engines.sequential import Own
from crossbow.errors import InputError


def own_by_name(own: Own, model: nn.Module) -> dict[str, Any]:
    """What a learner has to itself, as a tree of tensors and plain values."""
    return {"optimizer": state_by_name(own.optimizer_state, model), "random": own.random_state}


def named_own(tree: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> Own:
    """The reverse."""
    return Own(state_by_parameter(tree["optimizer"], model, optimizer), tree["random"].clone())


def state_by_name(state: Mapping[Any, Any], model: nn.Module) -> dict[str, dict[str, Any]]:
    """An optimizer's state, with the names of the model's parameters for keys."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: dict(values) for parameter, values in state.items()}


def state_by_parameter(
    named: Mapping[str, Mapping[str, Any]], model: nn.Module, optimizer: Optimizer
) -> defaultdict[Any, Any]:
    """The reverse: a state as the optimizer keeps it, each tensor where it belongs."""
    parameters = dict(model.named_parameters())
    on_device = {
        parameter
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
    }
    state: defaultdict[Any, Any] = defaultdict(dict)
    for name, values in named.items():
        if name not in parameters:
            raise InputError(f"the optimizer's state is of {name!r}, which the model doesn't have")
        parameter = parameters[name]
        state[parameter] = {
            key: _placed(value, parameter, stays=key == "step" and parameter not in on_device)
            for key, value in values.items()
        }
    return state


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What the optimizer's groups hold besides parameters: rates, and what some adapt."""
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def load_options(optimizer: Optimizer, options: list[dict[str, Any]]) -> None:
    """Take the groups' options from `options_of`."""
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        group.update(saved)


def _placed(value: Any, parameter: Tensor, *, stays: bool) -> Any:
    """A value where the parameter is; but optimizers count steps on the CPU."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() > max(parameter.numel(), 1):
        raise InputError(
            f"the optimizer's state has {tuple(value.shape)} for a parameter of "
            f"{tuple(parameter.shape)}"
        )
    return value.clone() if stays else value.to(parameter.device, copy=True)
