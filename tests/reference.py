"""The papers' algorithms, transcribed for reading and not for speed."""

import copy
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
