from collections.abc import Callable

import pytest
import torch
from torch import nn

from crossbow.errors import InputError
from crossbow.optim.build import OPTIMIZERS, build_optimizer

UNFIT = {"lbfgs", "sparseadam"}
"""LBFGS asks for the loss again and again within a step; SparseAdam for sparse gradients."""


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4, 3))]


def steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> torch.Tensor:
    """Where five steps towards zero lead."""
    for _ in range(5):
        optimizer.zero_grad()
        parameters[0].square().sum().backward()
        optimizer.step()
    return parameters[0].detach()


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - UNFIT))
def test_any_optimizer_of_torch_is_the_one_that_torch_makes(name: str) -> None:
    ours, theirs = weights(), weights()
    kind = next(value for key, value in vars(torch.optim).items() if key.lower() == name)
    expected = steps(kind(theirs, lr=0.01), theirs)
    assert torch.equal(steps(build_optimizer(name, ours, 0.01), ours), expected)


@pytest.mark.parametrize(
    ("spec", "make"),
    [
        ("sgd:momentum=0.9,nesterov=true", lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True)),
        ("sgd:momentum=0.9,fused=true", lambda p: torch.optim.SGD(p, 0.1, 0.9, fused=True)),
        ("adamw:betas=0.8/0.95,eps=1e-6", lambda p: torch.optim.AdamW(p, 0.1, (0.8, 0.95), 1e-6)),
        ("rmsprop:alpha=0.5,centered=true", lambda p: torch.optim.RMSprop(p, 0.1, 0.5, centered=1)),
    ],
)
def test_options_are_torchs_arguments(
    spec: str, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> None:
    ours, theirs = weights(), weights()
    assert torch.equal(steps(build_optimizer(spec, ours, 0.1), ours), steps(make(theirs), theirs))


def test_building_moves_no_parameter_and_draws_nothing() -> None:
    parameters, before = weights(), torch.get_rng_state()
    optimizer = build_optimizer("adamw:weight_decay=0.5", parameters, 0.1)
    assert torch.equal(parameters[0], weights()[0])
    assert parameters[0].grad is None
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), before)


def test_parameters_may_come_from_a_generator() -> None:
    parameters = weights()
    optimizer = build_optimizer("sgd", iter(parameters), 0.1)
    assert optimizer.param_groups[0]["params"] == parameters


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("adamv", "unknown optimizer 'adamv'; did you mean 'adam'?"),
        ("optimizer", "unknown optimizer 'optimizer'"),
        ("sgd:momentun=0.9", "unknown option of sgd 'momentun'; did you mean 'momentum'?"),
        ("sgd:lr=0.1", "unknown option of sgd 'lr'"),
        ("sgd:params=1", "unknown option of sgd 'params'"),
        ("sgd:momentum=-1", "'sgd:momentum=-1' can't be used: Invalid momentum value: -1"),
        ("sgd:momentum=much", "'sgd:momentum=much' can't be used: '<' not supported"),
        ("sgd:momentum=nan", "momentum=nan is not possible: give finite numbers"),
        ("adamw:weight_decay=inf", "weight_decay=inf is not possible: give finite numbers"),
        ("adamw:betas=0.9/nan", "betas=(0.9, nan) is not possible: give finite numbers"),
        ("adamw:betas=0.9", "'adamw:betas=0.9' can't be used: 'float' object"),
        ("adamw:betas=0.9/0.9/0.9", "can't be used: too many values to unpack"),
        ("adamw:capturable=true", "can't be used: If capturable=True, params"),
        ("lbfgs", "'lbfgs' can't be used: LBFGS.step() missing 1 required positional argument"),
        ("sparseadam", "can't be used: SparseAdam does not support dense gradients"),
    ],
)
def test_a_bad_spec_is_refused_before_the_first_step(spec: str, told: str) -> None:
    with pytest.raises(InputError) as raised:
        build_optimizer(spec, weights(), 0.1)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_optimizer_that_can_not_move_these_parameters_is_refused() -> None:
    with pytest.raises(InputError, match="Muon only supports 2D parameters"):
        build_optimizer("muon", [*weights(), nn.Parameter(torch.zeros(3))], 0.1)
