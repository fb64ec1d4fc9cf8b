"""All engines: gradients and trajectories are the sequential one's; what can't run is found."""

import copy
import json
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import crossbow as xb
from crossbow.engines.choice import choose
from crossbow.engines.objective import Batch, Objective
from crossbow.engines.sequential import InTurn
from crossbow.engines.stacked import Stacked
from crossbow.engines.trial import why_not
from crossbow.fleet import Fleet
from crossbow.task import token_cross_entropy
from crossbow.zoo import models

M, BATCH, STEPS = 3, 4, 20


def pictures(channels: int, side: int, learner: int, step: int) -> Batch:
    stream = torch.Generator().manual_seed(1000 * step + learner)
    inputs = torch.randn(BATCH, channels, side, side, generator=stream)
    return inputs, torch.randint(0, 10, (BATCH,), generator=stream)


def tokens(learner: int, step: int) -> Batch:
    stream = torch.Generator().manual_seed(1000 * step + learner)
    text = torch.randint(0, 20, (BATCH, 9), generator=stream)
    return text[:, :-1], text[:, 1:]


class Tied(nn.Module):
    """A tied, a frozen and an unused parameter, and a running maximum as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(16, 16, bias=False)
        self.back = nn.Linear(16, 16, bias=False)
        self.back.weight = self.front.weight
        self.fixed = nn.Linear(16, 10).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("highest", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.front(x.flatten(1)))
        self.highest.copy_(torch.maximum(self.highest, hidden.detach().amax(0)))
        return self.fixed(self.back(hidden))


IMAGES = {
    "mlp": (partial(models.mlp, (16, 8, 10)), partial(pictures, 1, 4)),
    "lenet": (models.lenet5, partial(pictures, 1, 28)),
    "batch norm": (partial(models.resnet_cifar, 8), partial(pictures, 3, 8)),
    "tied": (Tied, partial(pictures, 1, 4)),
}
gpt = partial(models.gpt, 20, 8, num_layers=2, width=16, num_heads=2)
CASES = {
    **{name: (make, read, F.cross_entropy) for name, (make, read) in IMAGES.items()},
    "gpt": (gpt, tokens, token_cross_entropy),
}
SYNCS = {"sma": xb.sma(), "lag 1": xb.adaptive(lag=1), "lag 0": xb.adaptive(lag=0)}


class Crew:
    """A fleet with an engine."""

    def __init__(self, model: nn.Module, loss, engine: str, sync=None, m: int = M, **options):
        self.model = model.train()
        learning = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(learning, lr=0.02, momentum=0.9, fused=True)
        self.fleet = Fleet(model, self.optimizer, sync or xb.adaptive(lag=1), learners=m)
        self.objective = Objective(model, model, loss)
        self.in_turn = InTurn(self.objective, self.optimizer)
        self.engine = self.in_turn
        if engine == "stacked":
            self.engine = Stacked(self.objective, self.fleet.crew, self.in_turn, **options)

    def step(self, batches: list[Batch]) -> list[float]:
        losses = []
        for loss in self.engine.gradients(batches):
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def gradients(self, batches: list[Batch]) -> list[list[Tensor]]:
        found = []
        for _ in self.engine.gradients(batches):
            found.append([p.grad.clone() for p in self.model.parameters() if p.grad is not None])
            self.optimizer.step()
        return found

    def rows(self) -> list[Tensor]:
        """Where learners stand, and their buffers."""
        crew = self.fleet.crew
        return [*crew.stacked(crew.parity).values(), *crew.stacked_buffers().values()]


def pair(name: str, sync: str = "lag 1") -> tuple[Crew, Crew, list[list[Batch]]]:
    make, read, loss = CASES[name]
    torch.manual_seed(1)
    model = make().double()
    engines = "sequential", "stacked"
    crews = [Crew(copy.deepcopy(model), loss, engine, SYNCS[sync]) for engine in engines]
    rounds = [[read(learner, step) for learner in range(M)] for step in range(STEPS)]
    if read is not tokens:
        rounds = [[(x.double(), y) for x, y in batches] for batches in rounds]
    return *crews, rounds


def close(crews: tuple[Crew, Crew]) -> None:
    for crew in crews:
        crew.fleet.close()


def assert_close(ones: list[Tensor], others: list[Tensor], tolerance: float = 1e-9) -> None:
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_stacked_gradients_and_buffers_are_the_sequential_ones(name):
    one, other, rounds = pair(name)
    for expected, actual in zip(one.gradients(rounds[0]), other.gradients(rounds[0]), strict=True):
        assert_close(actual, expected)
    assert_close(other.rows(), one.rows())
    close((one, other))


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("name", CASES)
def test_learners_go_the_same_way_on_any_engine(name, sync):
    one, other, rounds = pair(name, sync)
    for batches in rounds:
        assert other.step(batches) == pytest.approx(one.step(batches), rel=1e-7)
    assert_close(other.rows(), one.rows(), 1e-7)
    close((one, other))


def test_a_clipped_norm_is_each_learners_own():
    one, other, rounds = pair("mlp")
    for crew in (one, other):
        clip = partial(nn.utils.clip_grad_norm_, list(crew.model.parameters()), 0.05)
        crew.optimizer.register_step_pre_hook(lambda *_, clip=clip: (clip(), None)[1])
    for batches in rounds[:5]:
        one.step(batches)
        other.step(batches)
    assert_close(other.rows(), one.rows())
    close((one, other))


def test_a_last_round_of_uneven_batches_is_computed_in_turn():
    one, other, rounds = pair("mlp")
    uneven = [(x[: BATCH - (n > 0)], y[: BATCH - (n > 0)]) for n, (x, y) in enumerate(rounds[0])]
    assert other.step(uneven) == one.step(uneven)
    assert_close(other.rows(), one.rows())
    close((one, other))


class Noisy(nn.Module):
    """What dropout leaves of its input is its weight's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1000))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.25, self.training) * self.weight


def noisy_masks(seed: int, rounds: int = 2) -> list[Tensor]:
    torch.manual_seed(seed)
    crew = Crew(Noisy(), lambda y, _: y.sum(), "stacked")
    batch = torch.ones(1, 1000), torch.zeros(1)
    found = [g for _ in range(rounds) for (g,) in crew.gradients([batch] * M)]
    crew.fleet.close()
    return found


def test_learners_drop_out_differently_and_as_the_seed_says():
    masks = noisy_masks(3)
    kept = torch.tensor(1 / 0.75).item()
    assert all(set(mask.tolist()) == {0.0, kept} for mask in masks)
    assert all(0.7 < (mask > 0).double().mean() < 0.8 for mask in masks)
    assert len({mask.numpy().tobytes() for mask in masks}) == 2 * M
    assert all(map(torch.equal, masks, noisy_masks(3)))
    assert not torch.equal(masks[0], noisy_masks(4)[0])


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum() > 0 else 2 * y


class Renewing(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return super().forward(x)


class Sorted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.bincount(x[:, 0].long().clamp(min=0)).sum()


class Remembering(nn.Linear):
    """Adds the outputs of the batch before: state that is neither parameter nor buffer."""

    before = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y, self.before = y + self.before, y.detach()
        return y


UNSTACKABLE = {
    "control flow": (Branching, "data-dependent control flow"),
    "a buffer made anew": (Renewing, "a buffer would hold other numbers"),
    "no stacked form": (Sorted, "bincount has no stacked form"),
    "state of its own": (Remembering, ""),
}


@pytest.mark.parametrize("case", UNSTACKABLE)
def test_what_can_not_be_stacked_is_found_by_trying_and_leaves_no_trace(case):
    make, message = UNSTACKABLE[case]
    torch.manual_seed(0)
    crew = Crew(make(6, 5), lambda y, t: F.cross_entropy(y, t), "sequential")
    batches = [(torch.randn(BATCH, 6), torch.randint(0, 5, (BATCH,))) for _ in range(M)]
    before, streams = [r.clone() for r in crew.rows()], crew.fleet.crew.owns()
    stacked = Stacked(crew.objective, crew.fleet.crew, crew.in_turn)
    reason = why_not(stacked, crew.in_turn, crew.fleet.crew, batches)
    assert reason
    assert message in reason
    assert "\n" not in reason
    assert all(map(torch.equal, crew.rows(), before))
    for one, other in zip(streams, crew.fleet.crew.owns(), strict=True):
        assert torch.equal(one.random_state, other.random_state)
        assert one.optimizer_state is other.optimizer_state
    crew.model.before = 0.0
    crew.step(batches)
    crew.fleet.close()


@pytest.mark.parametrize("name", [*CASES, "dropout"])
def test_the_zoos_models_are_stacked_without_complaint(name):
    if name == "dropout":
        make, read, loss = partial(gpt, dropout=0.1), tokens, token_cross_entropy
    else:
        make, read, loss = CASES[name]
    torch.manual_seed(1)
    crew = Crew(make(), loss, "sequential")
    batches = [read(learner, 0) for learner in range(M)]
    plainly = crew.objective
    engine, reason = choose(
        "stacked", plainly, plainly, crew.optimizer, crew.fleet.crew, batches, compiles=False
    )
    assert (engine.name, reason) == ("stacked", "")
    assert crew.model.training
    crew.fleet.close()


@pytest.mark.parametrize(("learners", "name"), [(1, "sequential"), (2, "stacked")])
def test_the_trainer_runs_the_engine_or_says_why_not(learners, name, tmp_path, capsys):
    config = xb.Config(
        engine="stacked", learners=learners, epochs=0.3, batch_size=4, run_dir=tmp_path / "run"
    )
    xb.train(xb.tasks.get("mlp-digits"), config)
    said = capsys.readouterr().err
    assert ("engine sequential in the place of stacked: it needs several" in said) == (
        name == "sequential"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "batch norm"])
def test_a_compiled_stack_goes_the_same_way(name, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # others would be left behind
    make, read, loss = CASES[name]
    torch.manual_seed(1)
    model = make()
    one = Crew(copy.deepcopy(model), loss, "sequential")
    other = Crew(copy.deepcopy(model), loss, "stacked", compiles=True)
    for step in range(5):
        batches = [read(learner, step) for learner in range(M)]
        assert other.step(batches) == pytest.approx(one.step(batches), rel=1e-4)
    assert_close(other.rows(), one.rows(), 1e-3)
    close((one, other))


def test_logged_changes_of_the_number_of_learners_are_replayed_bit_for_bit(tmp_path):
    log = [
        {"event": "start", "learners": 2},
        {"event": "learners", "samples": 80, "learners": 4},
        {"event": "learners", "samples": 240, "learners": 1},
    ]
    (tmp_path / "told").mkdir()
    (tmp_path / "told" / "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in log))
    ends = []
    source = tmp_path / "told"
    for name in ("one", "two"):
        run = tmp_path / name
        settings = {"epochs": 0.3, "batch_size": 10, "replay": source, "run_dir": run}
        xb.train(xb.tasks.get("mlp-digits"), xb.Config(**settings), quiet=True)
        written = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        changes = [(e["samples"], e["learners"]) for e in written if e["event"] == "learners"]
        assert changes == [(80, 4), (240, 1)]
        ends.append((run / "model.safetensors").read_bytes())
        source = run
    assert ends[0] == ends[1]


def test_what_holds_no_log_can_not_be_replayed(tmp_path):
    config = xb.Config(replay=tmp_path, run_dir=tmp_path / "run")
    with pytest.raises(xb.InputError, match="can't be replayed: it holds no log of a run"):
        xb.train(xb.tasks.get("mlp-digits"), config, quiet=True)
