"""The papers' algorithms, transcribed for reading and not for speed."""

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def sma(
    model: nn.Module,
    make_optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    k: int,
    steps: int,
    alpha: float,
    mu: float,
) -> tuple[list[Tensor], Tensor]:
    """Koliousis et al., CROSSBOW, VLDB 2019, algorithm 1: k replicas and the average model z.

    `loss(replica, learner, step)` is the loss of a learner's batch. Returns the replicas' weights
    and z, after so many steps.
    """
    replicas = [copy.deepcopy(model) for _ in range(k)]
    optimizers = [make_optimizer(list(replica.parameters())) for replica in replicas]
    z = parameters_to_vector(model.parameters()).detach().clone()
    z_previous = z.clone()
    for step in range(steps):
        corrections = []
        for learner, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            w = parameters_to_vector(replica.parameters()).detach().clone()
            correction = alpha * (w - z)
            optimizer.zero_grad()
            loss(replica, learner, step).backward()
            optimizer.step()
            moved = parameters_to_vector(replica.parameters()).detach()
            vector_to_parameters(moved - correction, replica.parameters())
            corrections.append(correction)
        z, z_previous = z + sum(corrections) + mu * (z - z_previous), z
    return [parameters_to_vector(r.parameters()).detach() for r in replicas], z


def adaptive(
    model: nn.Module,
    make_optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    k: int,
    steps: int,
    gain: float | None,
    lead: float,
    lag: int,
) -> tuple[list[Tensor], Tensor, list[float]]:
    """Learners at their mean: docs/algorithms/adaptive.md, with a gain that is given or measured.

    Gradients are taken whole, and smoothed over 1000 small batches. Returns the replicas' weights,
    their mean, and the gain of each step.
    """
    replicas = [copy.deepcopy(model) for _ in range(k)]
    optimizers = [make_optimizer(list(replica.parameters())) for replica in replicas]
    m = parameters_to_vector(model.parameters()).detach().clone()
    last = [torch.zeros_like(m)] * k
    keep = math.exp(-k / 1000)
    variance = signal = 0.0
    gains = []
    r = 1.0 if gain is None else gain
    for step in range(steps):
        moves, gradients = [], []
        for learner, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            w = parameters_to_vector(replica.parameters()).detach().clone()
            optimizer.zero_grad()
            loss(replica, learner, step).backward()
            gradients.append(parameters_to_vector([p.grad for p in replica.parameters()]))
            optimizer.step()
            moves.append(parameters_to_vector(replica.parameters()).detach() - w)
        g = sum(gradients) / k
        s2 = sum(((gradient - g) ** 2).sum().item() for gradient in gradients) / (k - 1)
        variance = keep * variance + (1 - keep) * s2
        signal = keep * signal + (1 - keep) * ((g @ g).item() - s2 / k)
        measured = (variance + max(signal, 0)) / (variance / k + max(signal, 0))
        if gain is None and lag == 0:
            r = measured
        us = [d + (r - 1) * (d + lead * (d - old)) for d, old in zip(moves, last, strict=True)]
        gains.append(r)
        if gain is None and lag == 1:  # hears of these gradients in the next step
            r = measured
        u, last = sum(us) / k, moves
        for replica, own in zip(replicas, us, strict=True):
            vector_to_parameters(m + (own if lag else u), replica.parameters())
        m = m + u
    return [parameters_to_vector(r.parameters()).detach() for r in replicas], m, gains
