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


Matrices = list[Tensor]


def with_feedback(
    say: Callable[[Matrices], Matrices], moves: Sequence[Sequence[Matrices]]
) -> list[Matrices]:
    """Karimireddy et al., 2019, algorithm 2 (EF-SGD), over several hosts: what is heard each step.

    `moves` are those of each step and host. A host says C(move + error) and keeps the rest.
    """
    errors = [[torch.zeros_like(m) for m in host] for host in moves[0]]
    sums = []
    for step in moves:
        heard = []
        for host, delta in enumerate(step):
            wanted = [d + e for d, e in zip(delta, errors[host], strict=True)]
            said = say(wanted)
            errors[host] = [w - s for w, s in zip(wanted, said, strict=True)]
            heard.append(said)
        sums.append([torch.stack(tensors).sum(0) for tensors in zip(*heard, strict=True)])
    return sums


def one_bit(matrices: Matrices) -> Matrices:
    """Signs, times the mean absolute of each row; Bernstein et al., 2018, with a scale a row."""
    said = []
    for matrix in matrices:
        rows = matrix.reshape(1, -1) if matrix.dim() == 1 else matrix.flatten(1)
        signs = torch.where(rows >= 0, 1.0, -1.0).to(matrix)
        said.append((signs * rows.abs().mean(1, keepdim=True)).reshape(matrix.shape))
    return said


def top_k(matrices: Matrices, k: int) -> Matrices:
    """The k numbers largest by absolute; Stich et al., 2018."""
    everything = torch.cat([m.reshape(-1) for m in matrices])
    least = everything.abs().sort(descending=True).values[k - 1]
    return [torch.where(m.abs() >= least, m, 0) for m in matrices]


def powersgd(moves: Sequence[Sequence[Matrices]], bases: Sequence[Tensor | None]) -> list[Matrices]:
    """Vogels et al., 2019, algorithms 1 and 2, with sums in the place of means.

    `bases` are the first Q of each tensor, or None for what is not compressed.
    """
    errors = [[torch.zeros_like(m) for m in host] for host in moves[0]]
    bases = list(bases)
    sums = []
    for step in moves:
        wanted = [
            [d + e for d, e in zip(delta, error, strict=True)]
            for delta, error in zip(step, errors, strict=True)
        ]
        found = []
        for tensor, basis in enumerate(bases):
            own = [host[tensor] for host in wanted]
            if basis is None:
                found.append(torch.stack(own).sum(0))
                said = own
            else:
                matrices = [m.flatten(1) for m in own]
                p = _gram_schmidt(torch.stack([m @ basis for m in matrices]).sum(0))
                qs = [m.T @ p for m in matrices]
                bases[tensor] = torch.stack(qs).sum(0)
                said = [(p @ q.T).reshape(own[0].shape) for q in qs]
                found.append((p @ bases[tensor].T).reshape(own[0].shape))
            for host, part in enumerate(said):
                errors[host][tensor] = wanted[host][tensor] - part
        sums.append(found)
    return sums


def _gram_schmidt(matrix: Tensor) -> Tensor:
    columns: list[Tensor] = []
    for column in matrix.T:
        for earlier in columns:
            column = column - (earlier @ column) * earlier
        columns.append(column / column.norm())
    return torch.stack(columns, 1)


def allreduce(
    model: nn.Module,
    make_optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    k: int,
    rounds: int,
    *,
    scale: str | float | None = None,
    accumulate: int = 1,
) -> Tensor:
    """Synchronous SGD: the mean gradient of k learners and so many rounds, taken by one model.

    Scaled by a number, by k, by sqrt(k), or by the gain of AdaScale (Johnson et al., 2020), whose
    means are smoothed over 1000 small batches. Returns the weights.
    """
    model = copy.deepcopy(model)
    parameters = list(model.parameters())
    optimizer = make_optimizer(parameters)
    rate = optimizer.param_groups[0]["lr"]
    batches = k * accumulate
    keep, variance, signal = math.exp(-batches / 1000), 0.0, 0.0
    for first in range(0, rounds, accumulate):
        gradients = [
            parameters_to_vector(torch.autograd.grad(loss(model, learner, step), parameters))
            for step in range(first, first + accumulate)
            for learner in range(k)
        ]
        g = sum(gradients) / batches
        s2 = sum(((gradient - g) ** 2).sum().item() for gradient in gradients) / (batches - 1)
        variance = keep * variance + (1 - keep) * s2
        signal = keep * signal + (1 - keep) * ((g @ g).item() - s2 / batches)
        gain = (variance + max(signal, 0)) / (variance / batches + max(signal, 0))
        named = {None: 1.0, "linear": batches, "sqrt": math.sqrt(batches), "adaptive": gain}
        for group in optimizer.param_groups:
            group["lr"] = rate * named.get(scale, scale)
        vector_to_parameters_gradients(g, parameters)
        optimizer.step()
    return parameters_to_vector(parameters).detach()


def vector_to_parameters_gradients(vector: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Cut a gradient into those of the parameters."""
    pieces = vector.split([p.numel() for p in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter).clone()


Rate = Callable[[int], float]
"""Of the learning, in a round."""


def elastic(
    model: nn.Module,
    make_optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    k: int,
    rounds: int,
    alpha: float,
    period: int,
) -> tuple[list[Tensor], Tensor]:
    """Zhang et al., Deep learning with Elastic Averaging SGD, 2015, algorithms 1 and 2, in step.

    Every `period` rounds x_i <- x_i - alpha * (x_i - z) and z <- z + alpha * sum_i (x_i - z), and
    the gradient of that round is that of x_i before. With Nesterov's momentum x_i is torch's
    variable, the look-ahead. Returns the x_i and z.
    """
    replicas = [copy.deepcopy(model) for _ in range(k)]
    optimizers = [make_optimizer(list(replica.parameters())) for replica in replicas]
    z = parameters_to_vector(model.parameters()).detach().clone()
    for t in range(rounds):
        differences = []
        for i, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            x = parameters_to_vector(replica.parameters()).detach().clone()
            optimizer.zero_grad()
            loss(replica, i, t).backward()
            optimizer.step()
            if t % period == 0:
                moved = parameters_to_vector(replica.parameters()).detach()
                vector_to_parameters(moved - alpha * (x - z), replica.parameters())
                differences.append(x - z)
        if differences:
            z = z + alpha * sum(differences)
    return [parameters_to_vector(r.parameters()).detach() for r in replicas], z


def local_sgd(
    model: nn.Module,
    make_optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    k: int,
    rounds: int,
    meets: Callable[[int], bool],
    outer: Callable[[Tensor, Tensor, float], Tensor],
    rate: Rate,
    *,
    resets: bool = False,
) -> Tensor:
    """Stich, 2019, algorithm 1: learners that all become one model after the rounds that meet.

    `outer(z, mean, rate)` is the next model. Returns the last one.
    """
    z = parameters_to_vector(model.parameters()).detach().clone()
    replicas = [copy.deepcopy(model) for _ in range(k)]
    optimizers = [make_optimizer(list(replica.parameters())) for replica in replicas]
    for t in range(rounds):
        for i, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            optimizer.param_groups[0]["lr"] = rate(t)
            optimizer.zero_grad()
            loss(replica, i, t).backward()
            optimizer.step()
        if meets(t):
            mean = sum(parameters_to_vector(r.parameters()).detach() for r in replicas) / k
            z = outer(z, mean, rate(t))
            for replica, optimizer in zip(replicas, optimizers, strict=True):
                vector_to_parameters(z.clone(), replica.parameters())
                if resets:
                    optimizer.state.clear()
    return z


class SlowMo:
    """Wang et al., SlowMo, 2020, algorithm 1, lines 7 and 8: the slow momentum u."""

    def __init__(self, alpha: float, beta: float) -> None:
        self.alpha, self.beta, self.u = alpha, beta, 0.0

    def __call__(self, z: Tensor, mean: Tensor, rate: float) -> Tensor:
        self.u = self.beta * self.u + (z - mean) / rate
        return z - self.alpha * rate * self.u


class DiLoCo:
    """Douillard et al., DiLoCo, 2023, algorithm 1, with torch's Nesterov as the outer optimizer."""

    def __init__(self, lr: float, momentum: float) -> None:
        self.lr, self.momentum = lr, momentum
        self.z, self.optimizer = None, None

    def __call__(self, z: Tensor, mean: Tensor, rate: float) -> Tensor:
        if self.optimizer is None:
            self.z = nn.Parameter(z.clone())
            nesterov = self.momentum > 0
            self.optimizer = torch.optim.SGD(
                [self.z], lr=self.lr, momentum=self.momentum, nesterov=nesterov
            )
        self.z.grad = self.z.detach() - mean
        self.optimizer.step()
        return self.z.detach().clone()


def asgd(
    model: nn.Module,
    make_optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    k: int,
    events: Sequence[int],
    *,
    aware: bool = False,
) -> tuple[Tensor, list[int]]:
    """A parameter server and the order in which its clients' steps arrive.

    With `aware` a step counts by one over its staleness, Zhang et al., 2016. Returns the server's
    model, and how stale each step was.
    """
    z = parameters_to_vector(model.parameters()).detach().clone()
    replicas = [copy.deepcopy(model) for _ in range(k)]
    optimizers = [make_optimizer(list(replica.parameters())) for replica in replicas]
    seen, counts, stale = [0] * k, [0] * k, []
    for t, j in enumerate(events):
        w = parameters_to_vector(replicas[j].parameters()).detach().clone()
        optimizers[j].zero_grad()
        loss(replicas[j], j, counts[j]).backward()
        optimizers[j].step()
        moved = parameters_to_vector(replicas[j].parameters()).detach() - w
        stale.append(t - seen[j])
        z = z + (moved / max(stale[-1], 1) if aware else moved)
        vector_to_parameters(z.clone(), replicas[j].parameters())
        seen[j], counts[j] = t + 1, counts[j] + 1
    return z, stale


def aeasgd(
    model: nn.Module,
    make_optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    k: int,
    events: Sequence[int],
    alpha: float,
    period: int,
) -> Tensor:
    """Zhang et al., 2015, algorithm 1, given the order in which workers step. Returns z."""
    z = parameters_to_vector(model.parameters()).detach().clone()
    replicas = [copy.deepcopy(model) for _ in range(k)]
    optimizers = [make_optimizer(list(replica.parameters())) for replica in replicas]
    counts = [0] * k
    for j in events:
        x = parameters_to_vector(replicas[j].parameters()).detach().clone()
        optimizers[j].zero_grad()
        loss(replicas[j], j, counts[j]).backward()
        optimizers[j].step()
        if counts[j] % period == 0:
            moved = parameters_to_vector(replicas[j].parameters()).detach()
            vector_to_parameters(moved - alpha * (x - z), replicas[j].parameters())
            z = z + alpha * (x - z)
        counts[j] += 1
    return z


def pipelined(
    model: nn.Module,
    make_optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    k: int,
    steps: int,
    lag: int,
) -> Tensor:
    """Li et al., Pipe-SGD, 2018, algorithm 1: step t moves by the gradients of step t - lag."""
    model = copy.deepcopy(model)
    parameters = list(model.parameters())
    optimizer = make_optimizer(parameters)
    queue: list[Tensor] = []
    for t in range(steps + lag):
        if t < steps:
            gradients = [
                parameters_to_vector(torch.autograd.grad(loss(model, j, t), parameters))
                for j in range(k)
            ]
            queue.append(sum(gradients) / k)
        if t >= lag:
            vector_to_parameters_gradients(queue[t - lag], parameters)
            optimizer.step()
    return parameters_to_vector(parameters).detach()
