"""A learner gone bad is put back before it reaches the others."""

import math

import pytest
import torch
from tests.test_fleet import batch_of, small_net
from tests.test_trainer import digits, events
from torch.nn import functional as F

import crossbow as xb
from crossbow.averaging.family import AVERAGINGS, parse
from crossbow.averaging.guard import Guard
from crossbow.data.datasets import Arrays
from crossbow.fleet import Fleet
from crossbow.task import Task
from crossbow.trainer import train

SYNCS = [*AVERAGINGS, "adaptive:lag=0", "adaptive:lag=1", "sma:alpha=0.3"]
BROKEN = {"nan": math.nan, "infinite": math.inf, "exploded": 1e30}


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("value", BROKEN)
def test_no_bad_learner_reaches_the_central_model(sync, value):
    model = small_net(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with Fleet(model, optimizer, parse(sync), learners=3) as fleet:
        for step in range(12):
            for learner in fleet.mine:
                inputs, targets = batch_of(step, learner)
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                if (step, learner) in ((4, 1), (7, 0)):
                    next(model.parameters()).grad.view(-1)[2] = BROKEN[value]
                optimizer.step()
            if fleet.is_between_rounds:
                assert all(v.isfinite().all() for v in fleet.state_dict().values())
                assert all(v.abs().max() < 100 for v in fleet.state_dict().values())
        assert fleet.guard.found == [1, 0]
        assert fleet.guard.trouble is None
        last = [F.cross_entropy(model(batch_of(99)[0]), batch_of(99)[1]) for _ in fleet.mine]
        assert all(loss.isfinite() for loss in last)


def test_statistics_of_batch_norms_are_put_back_too():
    model = small_net(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Fleet(model, optimizer, xb.sma(), learners=2) as fleet:
        for step in range(4):
            for learner in fleet.mine:
                inputs, targets = batch_of(step, learner)
                if (step, learner) == (2, 1):
                    inputs[0, 0] = math.nan
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
        assert fleet.guard.found == [1]
        assert fleet.state_dict()["1.running_var"].isfinite().all()


def test_a_guard_counts_what_comes_often():
    guard, rows = Guard([7]), [torch.ones(3)]
    for step in range(300):
        rows[0][0] = math.nan if step in (0, 15, 30) else 1.0
        assert guard.passes(0, rows) == (step not in (0, 15, 30))
    assert guard.found == [7, 7, 7]
    assert guard.trouble is None
    rows[0][0] = -math.inf
    for _ in range(3):
        guard.passes(0, rows)
    assert "learner 7 left the numbers 3 times within 20 of its steps" in str(guard.trouble)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_guard_knows_every_dtype(dtype):
    row = torch.full((100_000,), 100.0, dtype=dtype)  # whose sum float16 doesn't hold
    assert Guard([0]).passes(0, [row, torch.tensor([2**40])])
    row[3] = math.nan
    assert not Guard([0]).passes(0, [row])


def poisoned(task: Task, samples) -> Task:
    """The task, with samples that are no numbers."""
    inputs = task.prepare(task.train.inputs, None)
    inputs[samples] = math.nan
    test = Arrays(task.prepare(task.test.inputs, None), task.test.targets, 10)
    changes = {"train": Arrays(inputs, task.train.targets, 10), "test": test, "prepare": None}
    return Task(**{**vars(task), **changes})


def test_a_sample_that_is_no_number_costs_a_step_of_one_learner(tmp_path, capsys):
    task, config = digits(learners=3, epochs=3, run_dir=tmp_path / "run")
    result = train(poisoned(task, [7]), config, quiet=True)
    assert result.reseeded == 3
    assert result.metric > 0.8
    lines = events(tmp_path / "run", "reseeded")
    assert len(lines) == 3
    assert all(0 <= line["learner"] < 3 for line in lines)
    assert "left the numbers, and begins again" in capsys.readouterr().err


def test_repeated_trouble_ends_the_run_with_a_report(tmp_path):
    task, config = digits(learners=3, epochs=3, run_dir=tmp_path / "run")
    with pytest.raises(xb.InputError, match="left the numbers 3 times within 20 of its steps"):
        train(poisoned(task, slice(0, 1000, 5)), config, quiet=True)
    assert events(tmp_path / "run", "diverged")
