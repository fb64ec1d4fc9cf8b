"""All-reduce is synchronous SGD: one model and the mean gradient, wherever the learners run."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from tests import reference
from tests.averaging.test_synchronous import (
    OPTIMIZERS,
    STEPS,
    assert_close,
    assert_same_bits,
    small_loss,
    small_net,
    train_a_fleet,
)
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

import crossbow as xb
from crossbow.data.datasets import Arrays
from crossbow.fleet import Fleet
from crossbow.task import token_cross_entropy
from crossbow.zoo import models


def train(make_optimizer, sync, k, rounds=STEPS) -> nn.Module:
    model = small_net()
    optimizer = make_optimizer(model.parameters())
    with Fleet(model, optimizer, sync, learners=k) as fleet:
        for step in range(rounds):
            for learner in fleet.mine:
                optimizer.zero_grad()
                small_loss(model, learner, step).backward()
                optimizer.step()
    return model


@pytest.mark.parametrize("k", [2, 3, 8])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_allreduce_takes_the_mean_gradient_with_any_optimizer(k, optimizer):
    make = OPTIMIZERS[optimizer]
    expected = reference.allreduce(small_net(), make, small_loss, k, STEPS)
    assert_close(train(make, xb.allreduce(), k), expected)


@pytest.mark.parametrize("scale", ["linear", "sqrt", 1.5])
@pytest.mark.parametrize(("k", "accumulate"), [(3, 1), (2, 5), (1, 2)])
def test_the_learning_rate_is_scaled_and_rounds_are_accumulated(k, accumulate, scale):
    make = OPTIMIZERS["sgd with weight decay"]
    options = {"scale": scale, "accumulate": accumulate}
    expected = reference.allreduce(small_net(), make, small_loss, k, STEPS, **options)
    assert_close(train(make, xb.allreduce(**options), k), expected)


@pytest.mark.parametrize(("k", "accumulate"), [(3, 1), (2, 5), (1, 2)])
def test_the_adaptive_scale_is_adascales_gain(k, accumulate):
    make = OPTIMIZERS["sgd with momentum"]
    options = {"scale": "adaptive", "accumulate": accumulate}
    expected = reference.allreduce(small_net(), make, small_loss, k, STEPS, **options)
    actual = parameters_to_vector(train(make, xb.allreduce(**options), k).parameters())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)  # measured in float32


def test_allreduce_with_linear_scaling_is_a_gain_of_k_without_lag():
    make = OPTIMIZERS["sgd"]
    one = train(make, xb.allreduce("linear"), 4)
    other = small_net()
    optimizer = make(other.parameters())
    with Fleet(other, optimizer, xb.adaptive("linear", lead=0.0, lag=0), learners=4) as fleet:
        for step in range(STEPS):
            for learner in range(4):
                optimizer.zero_grad()
                small_loss(other, learner, step).backward()
                optimizer.step()
        fleet.restart()
    assert_close(one, parameters_to_vector(other.parameters()).detach())


@pytest.mark.parametrize("model", ["resnet8", "dropout"])
def test_the_same_learners_give_the_same_bits_in_any_number_of_processes(model):
    (expected,) = run_ranks(train_a_fleet, 1, model, 4, None, "allreduce:scale=adaptive")
    for ranks in (2, 4):
        for state in run_ranks(train_a_fleet, ranks, model, 4, 1, "allreduce:scale=adaptive"):
            assert_same_bits(state, expected)


@pytest.mark.parametrize("hosts", [(1, 1), (3, 1)])
def test_hosts_agree_with_one_host_to_rounding(hosts):
    sync = "allreduce:scale=adaptive,accumulate=2"
    (expected,) = run_ranks(train_a_fleet, 1, "dropout", 4, None, sync)
    first, *others = run_ranks(train_a_fleet, hosts, "dropout", 4, 1, sync)
    for other in others:
        assert_same_bits(other, first)
    for key, value in expected.items():
        assert first[key] == pytest.approx(value, rel=1e-3, abs=1e-4), key


def gpt() -> nn.Module:
    return models.gpt(30, 8, num_layers=2, width=16)


def resnet8() -> nn.Module:
    return models.resnet_cifar(8)


def image_loss(model: nn.Module, stream: torch.Generator) -> Tensor:
    inputs = torch.randn(4, 3, 16, 16, generator=stream)
    return F.cross_entropy(model(inputs), torch.randint(0, 10, (4,), generator=stream))


def text_loss(model: nn.Module, stream: torch.Generator) -> Tensor:
    text = torch.randint(0, 30, (4, 9), generator=stream)
    return token_cross_entropy(model(text[:, :-1]), text[:, 1:])


CASES = {
    "resnet8": (resnet8, image_loss, partial(torch.optim.SGD, lr=0.05, momentum=0.9)),
    "gpt": (gpt, text_loss, partial(torch.optim.AdamW, lr=1e-3)),
}


def beside_ddp(case: str) -> tuple[list[float], list[float]]:
    """In one of two ranks: the weights of all-reduce, and of DDP on the same batches."""
    make, loss, make_optimizer = CASES[case]
    found = []
    dist.init_process_group("gloo")  # once: the port of a group that ends is not free at once
    for is_ours in (True, False):
        torch.manual_seed(1)
        model = make()
        optimizer = make_optimizer(model.parameters())
        if is_ours:
            fleet = Fleet(model, optimizer, xb.allreduce())
            rank, runs = fleet.mine[0], model
        else:
            rank = dist.get_rank()
            runs = nn.parallel.DistributedDataParallel(model)
        for step in range(10):
            optimizer.zero_grad()
            loss(runs, torch.Generator().manual_seed(2 * step + rank)).backward()
            optimizer.step()
        if is_ours:
            fleet.close()
        found.append(parameters_to_vector(model.parameters()).tolist())
    dist.destroy_process_group()
    return found[0], found[1]


@pytest.mark.parametrize("case", CASES)
def test_allreduce_is_distributed_data_parallel(case):
    (ours, theirs), (same, _) = run_ranks(beside_ddp, 2, case)
    assert ours == same
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-5)


def read_unevenly(learners: int, sync: str) -> list[list[float]]:
    """In a rank: the weights after reading ten samples in batches of four, and then seven."""
    torch.manual_seed(2)
    data = Arrays(torch.randint(0, 255, (10, 5), dtype=torch.uint8), torch.arange(10) % 3, 3)
    model = small_net().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    with Fleet(model, optimizer, xb.averaging.family.parse(sync), learners=learners) as fleet:
        rates = iter([0.1, 0.01, 0.1, 0.02, 0.03])
        for first, epochs in ((0, 1), (10, 0.7)):
            reading = fleet.batches(
                data, 4, epochs, start=first, prepare=lambda x, _: x.float() / 64
            )
            for inputs, targets in reading:
                if fleet._average.turn == 0:
                    optimizer.param_groups[0]["lr"] = next(rates)
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            found.append(parameters_to_vector(model.parameters()).tolist())
    return found


def test_a_gradient_counts_by_its_samples_and_who_has_none_moves_with_the_others():
    """Rounds of 4 + 4 and 1 + 1, then 4 + 3; of three learners 4 + 3 + 3, and 3 + 2 + 2 at last."""
    (alone,) = run_ranks(read_unevenly, 1, 1, "allreduce:accumulate=2")
    assert len(alone[0]) == 66
    for learners in (2, 3):
        (expected,) = run_ranks(read_unevenly, 1, learners, "allreduce")
        for found in run_ranks(read_unevenly, 2, learners, "allreduce"):
            assert found == expected


class Gate(nn.Module):
    """Its branches are used by turns, and the last one by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(3, 1, bias=False) for _ in range(3))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.branches[which](x).sum()


def test_a_parameter_that_some_learners_use_gets_their_share_and_one_that_none_uses_stays():
    model = Gate()
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1)
    with Fleet(model, optimizer, xb.allreduce(), learners=2):
        for learner in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 3), which=learner).backward()
            optimizer.step()
    first, second, third = model.parameters()
    for actual, start in ((first, before[0]), (second, before[1])):
        torch.testing.assert_close(actual, 0.9 * start - 0.5)
    assert torch.equal(third, before[2])


def resize_on_the_way(steps: int) -> list[float]:
    model = small_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with Fleet(model, optimizer, xb.allreduce(), learners=2) as fleet:
        for learners in (2, 4, 3):
            fleet.resize(learners)
            for step in range(steps):
                for learner in fleet.mine:
                    optimizer.zero_grad()
                    small_loss(model, learner, step).backward()
                    optimizer.step()
        return parameters_to_vector(model.parameters()).tolist()


def test_all_stay_one_model_when_learners_come_and_go():
    (expected,) = run_ranks(resize_on_the_way, 1, 4)
    assert run_ranks(resize_on_the_way, 2, 4) == [expected] * 2


def test_integers_count_what_a_learner_saw_and_statistics_are_the_mean():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    means = []
    with Fleet(model, optimizer, xb.allreduce(), learners=2) as fleet:
        for learner in range(2):
            optimizer.zero_grad()
            model(torch.full((4, 2), learner + torch.randn(()).item())).sum().backward()
            means.append(model[1].running_mean.clone())
            optimizer.step()
        state = fleet.state_dict()
    assert state["1.num_batches_tracked"] == 1
    torch.testing.assert_close(state["1.running_mean"], (means[0] + means[1]) / 2)


def test_a_closure_is_refused():
    model = small_net()
    optimizer = torch.optim.LBFGS(model.parameters())
    with (
        Fleet(model, optimizer, xb.allreduce(), learners=2),
        pytest.raises(xb.InputError, match="before the optimizer's step"),
    ):
        optimizer.step(lambda: small_loss(model, 0, 0))


def test_a_sparse_gradient_is_refused_by_name():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Fleet(model, optimizer, xb.allreduce(), learners=2):
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(xb.InputError, match=r"gradient of '0.weight' is torch.sparse_coo"):
            optimizer.step()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("allreduce:scale=cubic", "unknown scale 'cubic'"),
        ("allreduce:scale=0", "scale 0 is not possible"),
        ("allreduce:accumulate=0", "accumulate 0 is not possible"),
        ("allreduce:accumulate=1.5", "accumulate 1.5 of allreduce is not possible"),
        ("allreduce:pull=1", "unknown option of allreduce 'pull'"),
    ],
)
def test_what_is_not_possible_is_refused(spec, message):
    with pytest.raises(xb.InputError, match=message):
        xb.averaging.family.parse(spec)
