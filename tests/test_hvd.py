"""hvd: Horovod's names do what Horovod's documentation says."""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks
from torch import Tensor, nn

from crossbow import hvd
from crossbow.comm.world import World, joined
from crossbow.errors import InputError

EXAMPLE = Path(__file__).parent.parent / "examples" / "horovod_mnist.py"
RANKS, STEPS = 2, 5


@pytest.fixture
def alone():
    hvd.init()
    yield
    hvd.shutdown()


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, 2)).double()


def loss_of(model: nn.Module, step: int, rank: int, batch: int = 0) -> Tensor:
    stream = torch.Generator().manual_seed(100 * step + 10 * rank + batch)
    inputs = torch.randn(4, 5, generator=stream, dtype=torch.float64)
    return model(inputs).square().mean()


def weights(model: nn.Module) -> list[float]:
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(passes: int = 1, op: str = "Average", compression: str = "none", clip: float = 0) -> list:
    """In a rank: a loop as Horovod's documentation shows it."""
    hvd.init()
    model = net(seed=hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    kinds = {"compression": hvd.Compression[compression], "op": hvd.Op(op)}
    optimizer = hvd.DistributedOptimizer(
        sgd(model), model.named_parameters(), backward_passes_per_step=passes, **kinds
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        for batch in range(passes):
            loss_of(model, step, hvd.rank(), batch).backward()
        if clip:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    hvd.shutdown()
    return weights(model)


def by_hand(passes: int = 1, share: float = 1 / RANKS, clip: float = 0) -> list[float]:
    model = net()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(RANKS):
            for batch in range(passes):
                (share * loss_of(model, step, rank, batch)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return weights(model)


def train_in_ways(ways: list[dict]) -> list:
    with joined(World.from_environment()):  # once for all
        return [train(**way) for way in ways]


def test_ranks_together_are_one_with_all_their_batches():
    ways = [
        {},
        {"passes": 3},
        {"op": "Sum"},
        {"clip": 0.01},
        {"compression": "fp16"},
        {"compression": "bf16"},
    ]
    expected = [by_hand(), by_hand(3), by_hand(share=1), by_hand(clip=0.01), by_hand(), by_hand()]
    tolerances = [1e-12] * 4 + [1e-4, 1e-3]
    for found in run_ranks(train_in_ways, RANKS, ways):
        for way, one, other, tolerance in zip(ways, found, expected, tolerances, strict=True):
            assert one == pytest.approx(other, abs=tolerance), way


def talk() -> dict:
    """In a rank: every operation on tensors."""
    hvd.init()
    own = hvd.rank()
    mean = hvd.allreduce(torch.tensor([1.0, own]))
    model = net(seed=own)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (own + 1))
    loss_of(model, own, 0).backward()
    optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    state = optimizer.state_dict()
    in_place = torch.tensor([own])
    found = {
        "place": (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()),
        "mean": mean.tolist(),
        "sum": hvd.allreduce(torch.tensor(own + 1), op=hvd.Sum).item(),
        "older": hvd.allreduce(torch.tensor(own + 1), average=False).item(),
        "max": hvd.allreduce(torch.tensor(own), op=hvd.Max).item(),
        "in place": hvd.allreduce_(in_place, op=hvd.Sum).item() + in_place.item(),
        "gathered": hvd.allgather(torch.full((own + 1, 2), own)).tolist(),
        "flags": hvd.allgather(torch.tensor(own == 1)).tolist(),
        "told": hvd.broadcast(torch.tensor([own]), root_rank=1).item(),
        "object": hvd.broadcast_object({"epoch": own}, root_rank=1),
        "rate": state["param_groups"][0]["lr"],
        "moments": state["state"][0]["exp_avg"].sum().item(),
    }
    hvd.shutdown()
    return found


def test_operations_are_those_of_the_documentation():
    first, second = run_ranks(talk, RANKS)
    assert first.pop("place") == (0, 2, 0, 2)
    assert second.pop("place") == (1, 2, 1, 2)
    assert first == second
    assert first.pop("moments") != 0
    assert first == {
        "mean": [1.0, 0.5],
        "sum": 3,
        "older": 3,
        "max": 1,
        "in place": 2,
        "gathered": [[0, 0], [1, 1], [1, 1]],
        "flags": [False, True],
        "told": 1,
        "object": {"epoch": 1},
        "rate": 0.2,
    }


def run_example(arguments: list[str]) -> float:
    return runpy.run_path(str(EXAMPLE))["main"](arguments)


def test_the_structure_of_horovods_example_runs_on_two_ranks():
    arguments = ["--epochs", "4", "--fp16-allreduce", "--batches-per-allreduce", "2"]
    first, second = run_ranks(run_example, RANKS, arguments)
    assert first == second
    assert first > 0.85


def test_alone_nothing_is_reduced(alone):
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
    model, plain = net(), net()
    optimizer, by_itself = hvd.DistributedOptimizer(sgd(model)), sgd(plain)
    for step in range(STEPS):
        for one, steps in ((model, optimizer), (plain, by_itself)):
            steps.zero_grad()
            loss_of(one, step, 0).backward()
            steps.step()
    assert weights(model) == weights(plain)
    assert hvd.allgather(torch.ones(2)).tolist() == [1, 1]
    assert hvd.broadcast(torch.ones(1), 0).item() == 1


def two_backwards() -> None:
    model = net()
    hvd.DistributedOptimizer(sgd(model))
    for batch in range(2):
        loss_of(model, 0, 0, batch).backward()


def step_after_synchronize() -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    loss_of(model, 0, 0).backward()
    optimizer.synchronize()
    optimizer.step()


REFUSED: dict[str, Callable[[], object]] = {
    "Adasum is not offered": lambda: hvd.DistributedOptimizer(sgd(net()), op=hvd.Adasum),
    "op Adasum": lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum),
    "average and op": lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum),
    "give 1 or more": lambda: hvd.DistributedOptimizer(sgd(net()), backward_passes_per_step=0),
    "more than 1 times before": two_backwards,
    "would reduce twice": step_after_synchronize,
    "without a closure": lambda: hvd.DistributedOptimizer(sgd(net())).step(lambda: 0.0),
    "lacks a parameter": lambda: hvd.DistributedOptimizer(sgd(net()), net().named_parameters()),
    "root_rank 1": lambda: hvd.broadcast(torch.ones(1), 1),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_can_not_be_done_is_refused(alone, message):
    with pytest.raises(InputError, match=message):
        REFUSED[message]()


def test_before_init_there_is_no_rank():
    with pytest.raises(InputError, match="not initialized"):
        hvd.rank()


def test_what_no_loss_reaches_has_a_gradient_of_zeros(alone):
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    optimizer.step()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
