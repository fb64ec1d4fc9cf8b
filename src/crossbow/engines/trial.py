"""Trial: whether an engine computes what the sequential one does, found by computing both.

What an engine can't run is not guessed from a model's layers. Two rounds are computed by both
engines, and gradients and buffers compared: so control flow that depends on data, operations
without a stacked form, state outside of buffers or calls that wait for the GPU show by themselves.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from crossbow.engines.objective import AtOnce, Batch, Objective
from crossbow.engines.sequential import InTurn, Sequential

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Of a gradient's relative distance from the sequential engine's."""

TOLERANCE_IN_LOW_PRECISION = 0.1

TOLERANCE_OF_GPUS = 0.02
"""Where convolutions compute in TF32 by default, and kernels are chosen by trying them."""

ROUNDS = 2
"""Tried, for what a model remembers shows in the second one."""


def why_not(engine: AtOnce, in_turn: InTurn, crew: Sequential, batches: Sequence[Batch]) -> str:
    """Return why an engine can't run these learners, found by trying; empty if it can.

    Nothing is left of the try: buffers and random streams are as they were.
    """
    objective = engine.objective
    with _untouched(crew, objective):
        draws = _draws(objective, batches[0])
    if not draws:
        return _first_difference(engine, in_turn, crew, batches)
    reason = _first_difference(engine, in_turn, crew, batches, compares=False)
    training = [module for module in objective.modules() if module.training]
    objective.eval()  # in which gradients can be compared
    try:
        return reason or _first_difference(engine, in_turn, crew, batches)
    finally:
        for module in training:
            module.training = True


def _first_difference(
    engine: AtOnce,
    in_turn: InTurn,
    crew: Sequential,
    batches: Sequence[Batch],
    *,
    compares: bool = True,
) -> str:
    """What is refused, slow or another number than in turn, if anything is."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with _untouched(crew, engine.objective) as buffers:
                for _ in range(ROUNDS):
                    _, stacks = engine.compute(batches)
                seen = [buffer.clone() for buffer in buffers]
        except Exception as error:  # whatever a model may raise that wasn't written for vmap
            return _first_line(error)
    slow = [str(w.message) for w in said if "performance drop" in str(w.message)]
    if slow:
        return slow[0].partition("batching rule for ")[2].partition(".")[0] + " has no stacked form"
    if not compares:
        return ""
    with _untouched(crew, engine.objective) as buffers:
        for _ in range(ROUNDS - 1):
            for _ in _gradients_in_turn(in_turn, crew, batches):
                pass
        for number, gradients in enumerate(_gradients_in_turn(in_turn, crew, batches)):
            for (name, gradient), stack in zip(gradients.items(), stacks, strict=True):
                if _differ(stack[number], gradient):
                    return f"the gradient of {name!r} would be another one"
        if any(map(_differ, seen, buffers)):
            return "a buffer would hold other numbers"
    return ""


def _gradients_in_turn(
    in_turn: InTurn, crew: Sequential, batches: Sequence[Batch]
) -> Iterator[dict[str, Tensor | None]]:
    """Each learner's gradients by parameter, as the sequential engine finds them; none moves."""
    parity = crew.parity
    for number, batch in enumerate(batches):
        crew.board(number, parity)
        for _ in in_turn.gradients([batch]):
            crew.reclaim_buffers()
            yield {n: p.grad for n, p in zip(crew.names, crew.parameters, strict=True)}
    crew.board(0, parity)


@contextmanager
def _untouched(crew: Sequential, objective: Objective) -> Iterator[list[Tensor]]:
    """Give the buffers; afterwards these, random streams and the model are as they were."""
    buffers = list(crew.stacked_buffers().values())
    values = [buffer.clone() for buffer in buffers]
    streams = [own.random_state.clone() for own in crew.owns()]
    _, *of_gpu = _random_states()
    attributes = [(module, dict(vars(module))) for module in objective.modules()]
    try:
        yield buffers
    finally:
        for module, before in attributes:
            vars(module).clear()
            vars(module).update(before)
        crew.reclaim_buffers()
        crew.board(0, crew.parity)
        for parameter in crew.parameters:
            parameter.grad = None
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
        pairs = zip(crew.owns(), streams, strict=True)
        for state in of_gpu:
            torch.cuda.set_rng_state(state)
        crew.take_owns([own._replace(random_state=stream) for own, stream in pairs])


def _draws(objective: Objective, batch: Batch) -> bool:
    """Whether the loss takes random numbers."""
    before = _random_states()
    with torch.no_grad():
        objective(*batch)
    return not all(map(torch.equal, before, _random_states()))


def _random_states() -> list[Tensor]:
    """Of the streams that models draw from."""
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_gpu else [])]


def _differ(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        found = other if one is None else one
        return found is not None and bool(found.any())
    tolerance = TOLERANCES.get(one.dtype, TOLERANCE_IN_LOW_PRECISION)
    if one.is_cuda:
        tolerance = max(tolerance, TOLERANCE_OF_GPUS)
    one, other = one.double(), other.double()
    return not bool((one - other).norm() <= tolerance * other.norm() + 1e-12)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].partition(". ")[0] or type(error).__name__
