"""Streams: a branch computes what a learner does; on CUDA, all of them captured in one graph."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import crossbow as xb
from crossbow.engines.choice import choose
from crossbow.engines.objective import Objective
from crossbow.engines.sequential import InTurn
from crossbow.engines.streams import Branch, Streams
from crossbow.fleet import Fleet
from crossbow.optim.scaling import FIRST_SCALE, GROWTH_INTERVAL, LossScales
from crossbow.task import token_cross_entropy
from crossbow.zoo import models

M, BATCH = 3, 4
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def images(side: int, channels: int = 3):
    return lambda: (torch.randn(BATCH, channels, side, side), torch.randint(0, 10, (BATCH,)))


def text():
    tokens = torch.randint(0, 20, (BATCH, 9))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


gpt = partial(models.gpt, 20, 8, num_layers=2, width=16, num_heads=2)
CASES = {
    "mlp": (partial(models.mlp, (48, 16, 10)), images(4), F.cross_entropy),
    "lenet": (models.lenet5, images(28, 1), F.cross_entropy),
    "batch norm": (partial(models.resnet_cifar, 8), images(8), F.cross_entropy),
    "gpt": (gpt, text, token_cross_entropy),
}


class Crew:
    """Learners of a model on a device."""

    def __init__(self, model: nn.Module, loss, device: str) -> None:
        self.model = model.to(device).train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.02, momentum=0.9, fused=True)
        self.fleet = Fleet(model, self.optimizer, xb.sma(), learners=M)
        self.objective = Objective(model, model, loss)
        self.in_turn = InTurn(self.objective, self.optimizer)

    def rows(self) -> list[torch.Tensor]:
        crew = self.fleet.crew
        return [*crew.stacked(crew.parity).values(), *crew.stacked_buffers().values()]


def crews(name: str, device: str, number: int = 2) -> tuple[list[Crew], list]:
    make, read, loss = CASES[name]
    torch.manual_seed(1)
    model = make()
    batches = [[tuple(part.to(device) for part in read()) for _ in range(M)] for _ in range(6)]
    return [Crew(copy.deepcopy(model), loss, device) for _ in range(number)], batches


@pytest.mark.parametrize("name", CASES)
def test_a_branch_computes_what_the_learner_does(name):
    (one, other), (batches, *_) = crews(name, "cpu")
    scale = torch.tensor(4.0)
    branches = [
        Branch(other.objective, other.fleet.crew, number, batch, scale)
        for number, batch in enumerate(batches)
    ]
    for branch in branches:
        branch.run()
    losses = list(one.in_turn.gradients(batches[:1]))
    for parameter, gradient in zip(one.fleet.crew.parameters, branches[0].gradients, strict=True):
        torch.testing.assert_close(gradient, 4 * parameter.grad)
    assert branches[0].loss == losses[0]
    for number in (1, 2):
        one.fleet.crew.board(number, 0)
        list(one.in_turn.gradients([batches[number]]))
        for p, gradient in zip(one.fleet.crew.parameters, branches[number].gradients, strict=True):
            torch.testing.assert_close(gradient, 4 * p.grad)
    for mine, expected in zip(other.rows(), one.rows(), strict=True):
        torch.testing.assert_close(mine, expected)
    one.fleet.close()
    other.fleet.close()


def test_streams_on_a_cpu_are_refused_in_one_line():
    (crew,), (batches, *_) = crews("mlp", "cpu", 1)
    plainly = crew.objective
    engine, reason = choose(
        "streams", plainly, plainly, crew.optimizer, crew.fleet.crew, batches, compiles=False
    )
    assert engine.name == "sequential"
    assert reason == "streams are CUDA's, and the model is on cpu"
    crew.fleet.close()


# Loss scales


def scaled(overflows: set[tuple[int, int]], steps: int = 4) -> tuple[LossScales, list[list[bool]]]:
    """Scales after steps of three learners, of which some (step, learner) overflow."""
    scales = LossScales(3, torch.device("cpu"))
    parameter = nn.Parameter(torch.ones(2))
    moved = []
    for step in range(steps):
        moved.append([])
        for learner in range(3):
            parameter.grad = torch.ones(2) * scales.values[learner]
            if (step, learner) in overflows:
                parameter.grad[1] = torch.inf
            moved[-1].append(scales.unscale(learner, [parameter]))
            assert not moved[-1][-1] or parameter.grad.tolist() == [1.0, 1.0]
    return scales, moved


def test_an_overflow_skips_only_its_own_learners_step():
    scales, moved = scaled({(1, 2), (2, 2), (3, 0)})
    assert moved == [[True] * 3, [True, True, False], [True, True, False], [False, True, True]]
    assert scales.values.tolist() == [FIRST_SCALE / 2, FIRST_SCALE, FIRST_SCALE / 4]
    assert scales.skipped == 3


def test_a_scale_grows_after_a_while_without_overflow():
    scales, _ = scaled({(1, 2)}, steps=GROWTH_INTERVAL)
    assert scales.values.tolist() == [2 * FIRST_SCALE, 2 * FIRST_SCALE, FIRST_SCALE / 2]


def test_float16_on_a_cpu_is_refused(tmp_path):
    config = xb.Config(precision="fp16", device="cpu", run_dir=tmp_path / "run")
    with pytest.raises(xb.InputError, match="precision fp16 can't be used on cpu: it needs CUDA"):
        xb.train(xb.tasks.get("mlp-digits"), config, quiet=True)
    assert not (tmp_path / "run").exists()


# On CUDA


@needs_cuda
@pytest.mark.parametrize("name", CASES)
def test_captured_learners_go_the_way_of_sequential_ones(name):
    (one, other), rounds = crews(name, "cuda")
    streams = Streams(other.objective, other.fleet.crew, other.in_turn)
    for batches in rounds:
        ends = []
        for crew, engine in ((one, one.in_turn), (other, streams)):
            losses = []
            for loss in engine.gradients(batches):
                crew.optimizer.step()
                losses.append(loss)
            ends.append(torch.stack(losses))
        torch.testing.assert_close(ends[1], ends[0], rtol=2e-2, atol=2e-2)
    for mine, expected in zip(other.rows(), one.rows(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=5e-2, atol=2e-2)
    one.fleet.close()
    other.fleet.close()


class Waiting(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1.0 if x.sum().item() > 0 else 2.0)


@needs_cuda
def test_a_model_that_waits_for_the_gpu_can_not_be_captured():
    crew = Crew(Waiting(6, 10), F.cross_entropy, "cuda")
    batch = torch.randn(BATCH, 6, device="cuda"), torch.randint(0, 10, (BATCH,), device="cuda")
    plainly = crew.objective
    engine, reason = choose(
        "streams", plainly, plainly, crew.optimizer, crew.fleet.crew, [batch] * M, compiles=False
    )
    assert engine.name == "sequential"
    assert reason
    crew.fleet.close()


@needs_cuda
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
@pytest.mark.parametrize("engine", ["sequential", "stacked", "streams"])
def test_every_engine_learns_digits_on_cuda(engine, precision, tmp_path):
    config = xb.Config(
        engine=engine, precision=precision, learners=4, epochs=4, run_dir=tmp_path / "run"
    )
    result = xb.train(xb.tasks.get("resnet8-digits"), config, quiet=True)
    assert result.metric > 0.85
    assert '"event": "engine"' not in (tmp_path / "run" / "log.jsonl").read_text()
