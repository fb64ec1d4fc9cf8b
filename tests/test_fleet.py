"""Fleet: any model, any optimizer, in two lines; what is refused; what is left behind."""

import copy
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import crossbow as xb
from crossbow.data.datasets import Arrays
from crossbow.fleet import Fleet
from crossbow.zoo import models

SHM = Path("/dev/shm")
Bits = dict[str, Tensor]


def small_net(dropout: float = 0.5) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Dropout(dropout), nn.Linear(7, 3)
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def batch_of(step: int, learner: int = 0) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(1000 * step + learner)
    return torch.randn(6, 5, generator=stream), torch.randint(0, 3, (6,), generator=stream)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, learners=(0,), first=0):
    """A plain loop; with several learners aboard in turn, one batch each."""
    for step in range(first, first + steps):
        for learner in learners:
            inputs, targets = batch_of(step, learner)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()


def bits(model: nn.Module) -> Bits:
    return {key: value.clone() for key, value in model.state_dict().items()}


def assert_same(actual: Bits, expected: Bits) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


def central_after(make_optimizer, learners: int, steps: int = 6) -> list[bytes]:
    """In a rank: the bytes of the central model after some steps."""
    model = small_net()
    optimizer = make_optimizer(model)
    with Fleet(model, optimizer, learners=learners) as fleet:
        learn(model, optimizer, steps, fleet.mine)
        return [value.numpy().tobytes() for value in fleet.state_dict().values()]


# One learner


def test_one_learner_is_plain_pytorch(one_thread):
    plain = small_net()
    torch.manual_seed(2)
    learn(plain, sgd(plain), 5)
    model = small_net()
    optimizer = sgd(model)
    places = [p.data_ptr() for p in model.parameters()]
    with Fleet(model, optimizer) as fleet:
        torch.manual_seed(2)
        learn(model, optimizer, 5)
        assert [p.data_ptr() for p in model.parameters()] == places
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        assert_same(fleet.state_dict(), bits(plain))
    assert_same(bits(model), bits(plain))


def test_one_learner_keeps_the_thread_count():
    torch.set_num_threads(2)
    try:
        with Fleet(model := small_net(), sgd(model)):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


# Batches


class Numbers(Dataset):
    """A map-style set whose sample i is i."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"number": index}


def collate(samples: list[dict[str, int]]) -> tuple[Tensor, Tensor]:
    numbers = torch.tensor([sample["number"] for sample in samples])
    return numbers, numbers


def numbers(n: int) -> Arrays:
    return Arrays(torch.arange(n), torch.zeros(n, dtype=torch.long), classes=1)


def idle_fleet(learners: int) -> Fleet:
    model = small_net()
    return Fleet(model, sgd(model), learners=learners)


def read(fleet: Fleet, data, steps_every: int = 1, **plan) -> list[list[int]]:
    """What each yielded batch holds; the model makes no move."""
    found = []
    for inputs, _ in fleet.batches(data, **plan):
        found.append(inputs.tolist())
        if len(found) % steps_every == 0:
            fleet.optimizer.step()
    return found


def read_in_rank(learners: int, **plan) -> list[list[int]]:
    with idle_fleet(learners) as fleet:
        return read(fleet, numbers(23), **plan)


def counts(batches: list[list[int]]) -> Counter:
    return Counter(sample for batch in batches for sample in batch)


@pytest.mark.parametrize("learners", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [1, 7, 22, 31])
@pytest.mark.parametrize("epochs", [1, 2])
def test_every_sample_is_read_once_an_epoch(learners, n, epochs):
    with idle_fleet(learners) as fleet:
        found = read(fleet, numbers(n), batch_size=4, epochs=epochs)
        assert fleet.samples == epochs * n
    assert counts(found) == dict.fromkeys(range(n), epochs)
    assert max(map(len, found)) <= 4


@pytest.mark.parametrize(("learners", "ranks"), [(2, 2), (3, 2), (5, 3)])
def test_ranks_share_every_sample(learners, ranks):
    found = run_ranks(partial(read_in_rank, batch_size=4, epochs=1), ranks, learners)
    assert sum(map(counts, found), Counter()) == dict.fromkeys(range(23), 1)


@pytest.mark.parametrize("learners", [1, 3])
def test_epochs_may_be_read_one_at_a_time(learners):
    with idle_fleet(learners) as fleet:
        found = [read(fleet, numbers(23), batch_size=4, epochs=1, start=23 * e) for e in range(3)]
    assert [counts(epoch) for epoch in found] == [dict.fromkeys(range(23), 1)] * 3
    assert found[0] != found[1]


@pytest.mark.parametrize("learners", [1, 2, 3])
def test_a_map_style_set_is_read_once_with_the_users_collate(learners):
    with idle_fleet(learners) as fleet:
        found = read(fleet, Numbers(11), batch_size=2, collate=collate)
    assert counts(found) == dict.fromkeys(range(11), 1)


@pytest.mark.parametrize("steps_every", [2, 3, 100])
def test_a_loop_that_steps_after_several_batches_reads_every_sample(steps_every):
    with idle_fleet(2) as fleet:
        found = read(fleet, numbers(22), steps_every, batch_size=4)
    assert counts(found) == dict.fromkeys(range(22), 1)


def test_a_batch_larger_than_the_data_is_shared_by_the_learners():
    with idle_fleet(2) as fleet:
        assert [len(batch) for batch in read(fleet, numbers(7), batch_size=100)] == [4, 3]


UNREADABLE = {
    "no batch": ({"batch_size": 0}, "batch size 0 is not possible"),
    "negative batch": ({"batch_size": -1}, "batch size -1"),
    "half a sample": ({"batch_size": 1.5}, "batch size 1.5"),
    "no epochs": ({"epochs": 0}, "0 epochs are not possible"),
    "nan epochs": ({"epochs": float("nan")}, "nan epochs"),
    "before the start": ({"start": -1}, "start -1"),
    "empty data": ({"data": numbers(0)}, "this Arrays can't be read"),
    "a stream": ({"data": iter([1])}, "this list_iterator can't be read"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_can_not_be_read_is_refused_before_the_first_batch(case):
    plan, message = UNREADABLE[case]
    with idle_fleet(2) as fleet, pytest.raises(xb.InputError, match=message):
        fleet.batches(**{"data": numbers(8), "batch_size": 2, **plan})


# Any model


class Tied(nn.Module):
    """Input and output embeddings are one parameter, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(5, 5, bias=False)
        self.back = nn.Linear(5, 5, bias=False)
        self.back.weight = self.front.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.back(torch.tanh(self.front(x)))


class Mixed(nn.Module):
    """Parameters of three dtypes and odd sizes, one of them a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(5, 13).double()
        self.two = nn.Linear(13, 11)
        self.three = nn.Linear(11, 3).bfloat16()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(torch.tanh(self.one(x.double())).float()) * self.scale
        return self.three(x.bfloat16()).float()


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(5, 7).requires_grad_(False)
        self.free = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.free(self.fixed(x))


class Counting(nn.Module):
    """Its buffer is a new tensor after each batch, as user code often does it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("steps", torch.tensor(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + 1
        return self.layer(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x[:, None])[0][:, -1])


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 5, 3, padding=1), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(25, 3)
        )
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x[:, None, None])


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = models.gpt(30, 5, num_layers=1, width=16, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.gpt((x.abs() * 9).long().clamp(max=29))[:, -1, :3]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "mixed dtypes": Mixed,
    "frozen": Frozen,
    "batch norm": small_net,
    "new buffers": Counting,
    "lstm": Recurrent,
    "channels last": Convolution,
    "gpt": Language,
}


def fleet_against_replicas(make_model: Callable[[], nn.Module], k: int, steps: int) -> None:
    """A fleet whose learners don't pull each other equals k models trained apart."""
    torch.manual_seed(4)
    start = make_model()
    model = copy.deepcopy(start)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    with Fleet(model, optimizer, sync=xb.sma(alpha=1e-300), learners=k) as fleet:
        states = [s.clone() for s in fleet._average.engine._random_states]
        learn(model, optimizer, steps, range(k))
        for learner in range(k):
            replica = copy.deepcopy(start)
            own = [p for p in replica.parameters() if p.requires_grad]
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(states[learner])
                learn(replica, torch.optim.SGD(own, lr=0.05, momentum=0.9), steps, [learner])
            assert_same(bits(model), bits(replica))
            fleet._average.rest()


@pytest.mark.parametrize("name", MODELS)
def test_learners_of_any_model_train_as_models_of_their_own(name):
    fleet_against_replicas(MODELS[name], 3, 4)


@pytest.mark.parametrize("name", MODELS)
def test_the_central_model_of_any_model_loads_into_a_plain_one_and_is_the_mean(name):
    torch.manual_seed(4)
    model = MODELS[name]()
    before = bits(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    with Fleet(model, optimizer, learners=2) as fleet:
        assert_same(fleet.state_dict(), before)
        learn(model, optimizer, 3, range(2))
        fresh = MODELS[name]()
        fresh.load_state_dict(fleet.state_dict())
        with fleet.central():
            assert_same(bits(model), bits(fresh))
            model.eval()(batch_of(0)[0])
    assert any(not torch.equal(value, before[key]) for key, value in fresh.state_dict().items())


def test_a_tied_parameter_stays_tied_and_has_both_keys():
    model = Tied()
    optimizer = sgd(model)
    with Fleet(model, optimizer, learners=2) as fleet:
        learn(model, optimizer, 3, range(2))
        assert model.back.weight is model.front.weight
        state = fleet.state_dict()
    assert model.back.weight is model.front.weight
    assert torch.equal(state["front.weight"], state["back.weight"])
    assert not torch.equal(state["front.weight"], Tied().front.weight)


def test_a_frozen_parameter_stays_where_and_what_it_was():
    model = Frozen()
    place, value = model.fixed.weight.data_ptr(), model.fixed.weight.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # may hold it, as in plain PyTorch
    with Fleet(model, optimizer, learners=2) as fleet:
        learn(model, optimizer, 3, range(2))
        state = fleet.state_dict()
    assert model.fixed.weight.data_ptr() == place
    assert torch.equal(state["fixed.weight"], value)


def first_weights() -> list[float]:
    """In a rank, whose model and optimizer begin with other values than the other rank's."""
    torch.manual_seed(int(os.environ["RANK"]))
    model = Frozen()
    optimizer = torch.optim.Adam(model.free.parameters(), lr=0.1)
    learn(model, optimizer, 1)
    with Fleet(model, optimizer):
        state = [value for p in model.free.parameters() for value in optimizer.state[p].values()]
        return [value.sum().item() for value in (*model.parameters(), *state)]


def test_every_rank_begins_with_the_first_ones_model_and_optimizer_state():
    one, other = run_ranks(first_weights, 2)
    assert len(one) == 4 + 2 * 3
    assert one == other


@pytest.mark.parametrize(("sync", "lag"), [(xb.sma(), 1), (xb.adaptive(), 0)])
def test_integers_count_what_a_learner_saw(sync, lag):
    model = small_net()
    optimizer = sgd(model)
    with Fleet(model, optimizer, sync, learners=3) as fleet:
        learn(model, optimizer, 5, range(3))
        assert model[1].num_batches_tracked == 5
        tracked = fleet.state_dict()["1.num_batches_tracked"]
    assert tracked.dtype == torch.int64
    assert tracked == 5 - lag


# What is refused


class One(nn.Module):
    """A module of the given tensors."""

    def __init__(self, *tensors: Tensor, **buffers: Tensor) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(tensors)
        for name, value in buffers.items():
            self.register_buffer(name, value)


def columns(overlap: int) -> nn.Module:
    whole = torch.randn(4, 8)
    return One(nn.Parameter(whole[:, : 4 + overlap]), nn.Parameter(whole[:, 4:]))


def frozen_alias() -> nn.Module:
    weight = nn.Parameter(torch.zeros(4))
    return One(weight, nn.Parameter(weight.data, requires_grad=False))


def own_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def frozen_whole() -> nn.Module:
    return small_net().requires_grad_(False)


REFUSED = {
    "complex": (lambda: One(nn.Parameter(torch.zeros(3, dtype=torch.complex64))), "'tensors.0' is"),
    "complex buffer": (lambda: One(nn.Parameter(torch.zeros(3)), c=torch.zeros(1) * 1j), "'c' is"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "'0.weight' has no shape yet"),
    "meta": (lambda: nn.Linear(3, 3, device="meta"), "'weight' is on the meta device"),
    "overlap": (lambda: columns(1), "'tensors.0' and 'tensors.1' overlap"),
    "alias": (frozen_alias, "'tensors.0' and 'tensors.1' overlap"),
    "nothing trains": (frozen_whole, "no parameter that requires a gradient"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_can_not_lie_in_rows_is_refused_by_name(case):
    make, message = REFUSED[case]
    model = make()
    with pytest.raises(xb.InputError, match=message) as raised:
        Fleet(model, own_sgd(model), learners=2)
    assert "\n" not in str(raised.value)


def test_parameters_side_by_side_in_one_matrix_are_welcome():
    model = columns(0)
    with Fleet(model, own_sgd(model), learners=2):
        assert [tuple(p.shape) for p in model.parameters()] == [(4, 4), (4, 4)]


def test_an_optimizer_of_another_model_is_refused():
    model = small_net()
    stranger = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(2, 9))], lr=0.1)
    with pytest.raises(xb.InputError, match=r"shape \(2, 9\) that the model doesn't have"):
        Fleet(model, stranger, learners=2)


def test_an_optimizer_that_lacks_a_parameter_is_refused():
    model = small_net()
    with pytest.raises(xb.InputError, match=r"'0.bias' learns, but the optimizer doesn't hold it"):
        Fleet(model, torch.optim.SGD([model[0].weight], lr=0.1), learners=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": float("nan")}, "alpha nan is not possible"),
        ({"alpha": -0.1}, "alpha -0.1 is not possible"),
        ({"alpha": 0.9}, r"alpha 0.9 is unstable for 8 learners .* less than 0.3838"),
        ({"momentum": 1.0}, "momentum 1.0 is not possible"),
        ({"momentum": -0.1}, "momentum -0.1 is not possible"),
    ],
)
def test_settings_beyond_their_bounds_are_refused(options, message):
    model = small_net()
    with pytest.raises(xb.InputError, match=message):
        Fleet(model, sgd(model), xb.sma(**options), learners=8)


def test_no_learner_is_refused():
    with pytest.raises(xb.InputError, match="0 learners"):
        idle_fleet(0)


def test_fewer_learners_than_ranks_are_refused():
    for answer in run_ranks(central_after, 3, sgd, 2):
        assert answer.startswith("error: InputError: 2 learners can't be shared by 3 ranks")


def replace_data(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data.clone()


def replace_parameter(model: nn.Module) -> None:
    model[4].bias = nn.Parameter(torch.zeros(3))


def replace_layer(model: nn.Module) -> None:
    model[4] = nn.Linear(7, 3)


CHANGES = {
    "double": (lambda model: model.double(), "'0.weight'"),
    "data": (replace_data, "'0.weight'"),
    "parameter": (replace_parameter, "'4.bias'"),
    "layer": (replace_layer, "'4'"),
    "assigned": (
        lambda model: model.load_state_dict(small_net().state_dict(), assign=True),
        "'0.weight'",
    ),
}


@pytest.mark.parametrize("learners", [2, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_changed_after_adoption_is_noticed_at_the_next_step(change, learners):
    model = small_net()
    optimizer = sgd(model)
    alter, name = CHANGES[change]
    with Fleet(model, optimizer, xb.sma(alpha=0.5), learners=learners):
        learn(model, optimizer, 2)
        alter(model)
        with pytest.raises(xb.InputError, match=f"{name} was replaced or moved"):
            optimizer.step()


def test_a_parameter_that_is_unfrozen_later_is_noticed():
    model = Frozen()
    optimizer = own_sgd(model)
    with Fleet(model, optimizer, learners=2):
        model.fixed.requires_grad_(True)
        with pytest.raises(xb.InputError, match=r"'fixed.weight' was frozen"):
            optimizer.step()


def test_a_buffer_that_changes_its_shape_is_noticed():
    model = Counting()
    optimizer = own_sgd(model)
    with Fleet(model, optimizer, learners=2):
        model.seen = torch.zeros(2)
        with pytest.raises(xb.InputError, match="'seen' changed its shape"):
            optimizer.step()
        model.seen = torch.zeros(1)


# Optimizers


def tensor_rate(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), amsgrad=True)


@pytest.mark.parametrize("make_optimizer", [sgd, adam, tensor_rate])
def test_each_learner_has_its_own_optimizer_state_and_random_stream_anywhere(make_optimizer):
    (expected,) = run_ranks(central_after, 1, make_optimizer, 3)
    assert isinstance(expected, list)
    for ranks in (2, 3):
        assert run_ranks(central_after, ranks, make_optimizer, 3) == [expected] * ranks


def test_learners_begin_with_copies_of_the_state_that_an_optimizer_has():
    model = small_net()
    optimizer = adam(model)
    learn(model, optimizer, 3)
    weight = model[0].weight
    before = copy.deepcopy(optimizer.state[weight])
    with Fleet(model, optimizer, learners=3):
        for _ in range(3):
            state = optimizer.state[weight]
            assert torch.equal(state["exp_avg"], before["exp_avg"])
            assert state["step"] == 3
            optimizer.zero_grad()
            F.cross_entropy(model(batch_of(9)[0]), batch_of(9)[1]).backward()
            optimizer.step()


@pytest.mark.parametrize("make_optimizer", [sgd, torch.optim.SGD])
def test_a_closure_computes_gradients_at_the_weights_before_the_pull(make_optimizer):
    """LBFGS wants one, and any optimizer takes one."""
    ends = []
    for has_closure in (True, False):
        model = small_net(dropout=0)
        optimizer = make_optimizer(model) if make_optimizer is sgd else own_sgd(model)
        with Fleet(model, optimizer, learners=2) as fleet:
            for step in range(6):
                for learner in range(2):
                    closure = partial(gradient, model, optimizer, step, learner)
                    if has_closure:
                        optimizer.step(closure)
                    else:
                        closure()
                        optimizer.step()
            ends.append(fleet.state_dict())
    for key, value in ends[1].items():
        torch.testing.assert_close(ends[0][key], value, rtol=1e-4, atol=1e-6)


def gradient(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, learner: int) -> Tensor:
    inputs, targets = batch_of(step, learner)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    return loss


def test_lbfgs_learns():
    model = small_net(dropout=0)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    with Fleet(model, optimizer, learners=2):
        losses = [
            optimizer.step(partial(gradient, model, optimizer, 0, 0)).item() for _ in range(12)
        ]
    assert losses[-1] < 0.5 * losses[0]


def test_weight_decay_may_begin_later():
    """The pull comes first for optimizers that don't look at the weights, while they don't."""
    ends = []
    for is_blind in (True, False):
        model = small_net(dropout=0)
        optimizer = own_sgd(model) if is_blind else Sighted(model.parameters(), lr=0.1)
        with Fleet(model, optimizer, learners=2) as fleet:
            learn(model, optimizer, 2, range(2))
            optimizer.param_groups[0]["weight_decay"] = 0.5
            learn(model, optimizer, 4, range(2), first=2)
            ends.append(fleet.state_dict())
    for key, value in ends[1].items():
        torch.testing.assert_close(ends[0][key], value, rtol=1e-4, atol=1e-6)


class Sighted(torch.optim.SGD):
    """An optimizer that Crossbow doesn't know."""


def test_several_backward_passes_a_step_add_up():
    ends = []
    for parts in (1, 3):
        model = small_net(dropout=0)[:1].double()
        optimizer = own_sgd(model)
        with Fleet(model, optimizer, learners=2) as fleet:
            for step in range(8):
                inputs, _ = batch_of(step)
                optimizer.zero_grad()
                for part in inputs.double().chunk(parts):
                    (model(part).square().sum() / 6).backward()
                optimizer.step()
            ends.append(fleet.state_dict())
    for key, value in ends[1].items():
        torch.testing.assert_close(ends[0][key], value)


# The central model


@pytest.fixture
def trained():
    """A fleet of two learners in the middle of a round."""
    model = small_net()
    optimizer = sgd(model)
    with Fleet(model, optimizer, learners=2) as fleet:
        learn(model, optimizer, 3, range(2))
        learn(model, optimizer, 1, [0], first=3)
        yield fleet


def test_the_model_holds_the_average_and_then_the_learner_again(trained):
    before = bits(trained.model)
    with trained.central() as model:
        assert model is trained.model
        inside = bits(model)
    assert_same(bits(trained.model), before)
    assert_same(trained.state_dict(), inside)
    assert not torch.equal(inside["0.weight"], before["0.weight"])


def test_the_learner_is_back_after_an_exception(trained):
    before = bits(trained.model)
    with pytest.raises(ZeroDivisionError), trained.central():
        _ = 1 / 0
    assert_same(bits(trained.model), before)


def test_what_is_done_to_the_model_inside_ends_with_it(trained):
    before, central = bits(trained.model), trained.state_dict()
    with trained.central() as model:
        model(batch_of(0)[0])  # moves batch norm's statistics
        with torch.no_grad():
            model[0].weight.zero_()
        model.double()
    assert_same(bits(trained.model), before)
    assert_same(trained.state_dict(), central)


def test_central_may_be_asked_for_inside_central(trained):
    expected = trained.state_dict()
    with trained.central(), trained.central() as model:
        assert_same(trained.state_dict(), expected)
        assert_same(bits(model), expected)
    learn(trained.model, trained.optimizer, 2)


def test_central_works_in_inference_mode_and_training_goes_on(trained):
    with torch.inference_mode(), trained.central() as model:
        model(batch_of(0)[0])
    learn(trained.model, trained.optimizer, 2)


def test_a_step_inside_central_is_refused_and_changes_nothing(trained):
    expected = trained.state_dict()
    with (
        trained.central(),
        pytest.raises(xb.InputError, match=r"train outside of central\(\)"),
    ):
        trained.optimizer.step()
    assert_same(trained.state_dict(), expected)


def train_and_look(looks: bool) -> Bits:
    model = small_net()
    optimizer = sgd(model)
    with Fleet(model, optimizer, learners=3) as fleet:
        for step in range(4):
            for learner in range(3):
                learn(model, optimizer, 1, [learner], first=step)
                if looks:
                    with fleet.central():
                        model(batch_of(0)[0]).sum()  # in training mode: draws, and moves statistics
        return fleet.state_dict()


def test_an_evaluation_changes_nothing_of_training():
    assert_same(train_and_look(True), train_and_look(False))


def test_a_state_dict_is_a_copy(trained):
    state = trained.state_dict()
    expected = {key: value.clone() for key, value in state.items()}
    learn(trained.model, trained.optimizer, 3)
    assert_same(state, expected)
    state["0.weight"].zero_()
    assert trained.state_dict()["0.weight"].any()


def save_in_rank(folder: Path) -> dict[str, list[float]]:
    model = small_net()
    optimizer = sgd(model)
    with Fleet(model, optimizer) as fleet:
        learn(model, optimizer, 3, fleet.mine)
        fleet.save(folder / f"{fleet.world.rank}.safetensors")
        return {key: value.flatten().tolist() for key, value in fleet.state_dict().items()}


def test_the_first_rank_saves_and_the_others_do_not(tmp_path):
    states = run_ranks(save_in_rank, 2, tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.name == "0.safetensors"
    small_net().load_state_dict(load_file(path))
    saved = {key: value.flatten().tolist() for key, value in load_file(path).items()}
    assert states == [saved, saved]


def test_a_restart_in_the_middle_of_a_round_is_refused(trained):
    assert not trained.is_between_rounds
    with pytest.raises(xb.InputError, match="between rounds"):
        trained.restart()


# Random streams


def draws(learners: int, first: int = 7) -> list[list[float]]:
    torch.manual_seed(first)
    model = small_net()
    torch.manual_seed(first)
    optimizer = sgd(model)
    found = []
    with Fleet(model, optimizer, learners=learners) as fleet:
        for _ in range(2):
            for _ in fleet.mine:
                found.append(torch.rand(5).tolist())
                optimizer.step()
    return found


def test_learners_draw_other_numbers_than_each_other_and_the_same_again():
    found = draws(4)
    assert len({number for numbers in found for number in numbers}) == 4 * 2 * 5
    assert draws(4) == found
    assert not {n for row in draws(4, first=8) for n in row} & {n for row in found for n in row}


def test_the_first_learner_goes_on_with_the_callers_random_stream():
    torch.manual_seed(7)
    assert torch.rand(5).tolist() == draws(4)[0]


def test_learners_draw_the_same_numbers_in_any_number_of_processes():
    expected = draws(3)
    found = run_ranks(draws, 3, 3)
    assert [row for rank in zip(*found, strict=True) for row in rank] == expected


# The end


def test_a_closed_fleet_leaves_plain_pytorch():
    threads = set(threading.enumerate())
    torch.set_num_threads(2)
    try:
        model = small_net(dropout=0)
        optimizer = sgd(model)
        fleet = Fleet(model, optimizer, learners=2)
        assert torch.get_num_threads() == 1
        learn(model, optimizer, 2, range(2))
        before = bits(model)
        fleet.close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert_same(bits(model), before)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert set(threading.enumerate()) == threads
    assert not list(SHM.glob(f"crossbow-*-{os.getpid()}"))
    assert not multiprocessing.active_children()
    plain = small_net(dropout=0)
    plain.load_state_dict(before)
    theirs = sgd(plain)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    learn(model, optimizer, 3)
    learn(plain, theirs, 3)
    assert_same(bits(model), bits(plain))


def test_a_closed_fleets_model_has_memory_of_its_own():
    model = Convolution()
    strides = [p.stride() for p in model.parameters()]
    optimizer = sgd(model)
    with Fleet(model, optimizer, learners=2):
        learn(model, optimizer, 1, range(2))
    for tensor in model.state_dict().values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert [p.stride() for p in model.parameters()] == strides


def test_a_closed_fleet_has_no_central_model():
    fleet = idle_fleet(2)
    fleet.close()
    fleet.close()
    with pytest.raises(xb.InputError, match="the fleet is closed"):
        fleet.state_dict()


def two_side_by_side(closes_first: int) -> list[bytes]:
    """Train two fleets in turn, one batch each; one is closed before the other has ended."""
    found: list[bytes] = []
    parts = []
    for _ in range(2):
        model = small_net(dropout=0)
        optimizer = sgd(model)
        parts.append((model, optimizer, Fleet(model, optimizer, learners=2)))
    for step in range(4):
        for model, optimizer, fleet in parts:
            learn(model, optimizer, 1, fleet.mine, first=step)
    for number in (closes_first, 1 - closes_first):
        model, optimizer, fleet = parts[number]
        fleet.restart()
        learn(model, optimizer, 2, fleet.mine, first=4)
        found += [value.numpy().tobytes() for value in fleet.state_dict().values()]
        assert torch.get_num_threads() == 1
        fleet.close()
    return found


@pytest.mark.parametrize("closes_first", [0, 1])
def test_two_fleets_in_one_process_do_not_meet(closes_first):
    torch.set_num_threads(2)
    try:
        found = two_side_by_side(closes_first)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert found[: len(found) // 2] == found[len(found) // 2 :]
    assert run_ranks(two_side_by_side, 2, closes_first) == [found, found]


def test_two_runs_on_one_machine_do_not_meet():
    answers: dict[str, list] = {}
    runs = [
        threading.Thread(
            target=lambda name=name, make=make: answers.update(
                {name: run_ranks(central_after, 2, make, 2, 200)}
            )
        )
        for name, make in (("sgd", sgd), ("adam", adam))
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert answers["sgd"] == run_ranks(central_after, 1, sgd, 2, 200) * 2
    assert answers["adam"] == run_ranks(central_after, 1, adam, 2, 200) * 2
