"""Laws of every averaging there is."""

import inspect
import json
import math

import pytest
import torch
from tests.averaging.test_synchronous import small_loss, small_net
from torch.nn.utils import parameters_to_vector

import crossbow as xb
from crossbow.averaging.family import AVERAGINGS, parse
from crossbow.cli import main
from crossbow.fleet import Fleet

each = pytest.mark.parametrize("name", AVERAGINGS)
OPTIMIZER = "sgd:momentum=0.9,nesterov=true"


def learn(fleet: Fleet, rounds: int) -> None:
    for step in range(rounds):
        for learner in fleet.mine:
            fleet.optimizer.zero_grad()
            small_loss(fleet.model, learner, step).backward()
            fleet.optimizer.step()


def fleet_of(name: str, learners: int) -> Fleet:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    return Fleet(model, optimizer, parse(name), learners=learners)


@each
def test_it_has_a_public_name_that_describes_itself(name):
    assert getattr(xb, name) is AVERAGINGS[name]
    assert inspect.getdoc(AVERAGINGS[name])
    assert "restart" in inspect.signature(AVERAGINGS[name]).parameters


@each
@pytest.mark.parametrize("learners", [1, 4])
def test_it_trains_a_task_to_the_end(name, learners, tmp_path):
    config = xb.Config(
        learners=learners,
        sync=name,
        epochs=1,
        batch_size=16,
        lr=0.02,
        optimizer=OPTIMIZER,
        bn_samples=64,
        run_dir=tmp_path / "run",
    )
    result = xb.train(xb.tasks.get("mlp-digits"), config, quiet=True)
    assert result.samples == len(xb.tasks.get("mlp-digits").train)
    assert result.loss < math.log(10)
    lines = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    is_asynchronous = name in ("asgd", "aeasgd", "hogwild") and learners > 1
    said = [line["staleness"] for line in lines if line["event"] == "train"]
    assert any(staleness is not None for staleness in said) == is_asynchronous


@each
def test_the_central_model_is_a_copy_and_looking_at_it_changes_nothing(name):
    ends = []
    for looks in (False, True):
        with fleet_of(name, 3) as fleet:
            for _ in range(3):
                learn(fleet, 2)
                if looks:
                    with fleet.central() as model, torch.no_grad():
                        for p in model.parameters():
                            p.zero_()
            ends.append(fleet.state_dict())
    for key, value in ends[0].items():
        assert torch.equal(ends[1][key], value), key


@each
def test_after_a_restart_all_stand_at_the_central_model(name):
    with fleet_of(name, 3) as fleet:
        learn(fleet, 7)
        fleet.restart()
        assert not any(fleet.optimizer.state.values())
        central = parameters_to_vector(list(fleet.state_dict().values()))
        for _ in fleet.mine:
            torch.testing.assert_close(
                parameters_to_vector(fleet.model.parameters()).detach(), central
            )
            fleet.optimizer.zero_grad()
            fleet.optimizer.step()
        learn(fleet, 2)


@each
def test_learners_can_be_compared_and_may_come_and_go(name):
    with fleet_of(name, 2) as fleet:
        learn(fleet, 5)
        fleet.divergence()
        for learners in (4, 3):
            fleet.resize(learners)
            learn(fleet, 5)
        found = fleet.state_dict()
    assert all(value.isfinite().all() for value in found.values())


@pytest.mark.slow
@each
def test_the_command_line_trains_on_two_ranks(name, tmp_path):
    words = ["train", "resnet8-digits", "--epochs", "0.5", "--learners", "3", "--ranks", "2"]
    words += ["--sync", name, "--optimizer", OPTIMIZER, "--lr", "0.01", "--quiet"]
    assert main([*words, "--run-dir", str(tmp_path / "run")]) == 0
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["ranks"], result["learners"]) == (2, 3)
