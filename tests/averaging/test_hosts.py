"""Between hosts: what is compressed, by which ways it goes, and that nothing is lost."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.averaging.test_synchronous import assert_same_bits
from tests.ranks import run_ranks
from torch import nn
from torch.nn import functional as F

from crossbow.averaging.family import parse
from crossbow.comm.world import World, joined
from crossbow.config import Config
from crossbow.errors import InputError
from crossbow.fleet import Captured, Fleet
from crossbow.trainer import train
from crossbow.zoo import tasks

SYNCS = ["sma", "adaptive:lag=1,gain=1.0", "adaptive:lag=0,gain=1.0"]
METHODS = [*SYNCS, "allreduce", "easgd:period=3", "local_sgd:period=3", "diloco:period=3"]
EVERYTHING = "topk:share=1"
COMPRESSIONS = ["none", EVERYTHING, "bf16", "onebit", "topk:share=0.2", "powersgd:rank=1"]
TOPOLOGIES = ["flat", "ring", "hierarchical:group=2", "torus", "auto"]
HOSTS, STEPS, RESTS, LEARNERS = (1, 2), 30, 120, 4


def small_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))


def sail(sync: str, compress: str, topology: str = "flat") -> dict:
    """In a rank: the central model after some steps and more of rest, and what was sent."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    route = {"compress": compress, "topology": topology}
    with Fleet(model, optimizer, sync=parse(sync), learners=LEARNERS, **route) as fleet:
        for step in range(STEPS):
            for learner in fleet.mine:
                stream = torch.Generator().manual_seed(1000 * step + learner)
                inputs = torch.randn(6, 5, generator=stream)
                optimizer.zero_grad()
                targets = torch.randint(0, 3, (6,), generator=stream)
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
        moving = fleet.state_dict()
        if sync in SYNCS and topology == "flat":
            for _ in range(RESTS * len(fleet.mine)):
                fleet._average.rest()
        rested, apart = fleet.state_dict(), fleet.divergence()
        return {
            "moving": {key: value.numpy() for key, value in moving.items()},
            "rested": {key: value.numpy() for key, value in rested.items()},
            "apart": apart.distance if apart else 0.0,
            "sent": fleet.traffic.sent_bytes,
            "whole": fleet.traffic.whole_bytes,
        }


def all_of(work: Callable[..., Any], cases: list[tuple[str, ...]]) -> dict:
    """In a rank: what comes of each case, with torch.distributed started once for all fleets."""
    with joined(World.from_environment()):
        return {case: work(*case) for case in cases}


@pytest.fixture(scope="module")
def compressed():
    return run_ranks(all_of, HOSTS, sail, [*product(METHODS, COMPRESSIONS)], timeout_s=240)


def parameters(state: dict, model: nn.Module | None = None) -> torch.Tensor:
    """Without what batch norms count and average, which isn't compressed."""
    names = [name for name, _ in (model or small_net()).named_parameters()]
    return torch.cat([torch.as_tensor(state[name]).reshape(-1) for name in names])


@pytest.mark.parametrize("sync", METHODS)
@pytest.mark.parametrize("spec", COMPRESSIONS)
def test_all_hosts_hold_the_same_central_model(compressed, sync, spec):
    first, *others = (rank[sync, spec] for rank in compressed)
    for other in others:
        assert_same_bits(other["moving"], first["moving"])
        assert_same_bits(other["rested"], first["rested"])


@pytest.mark.parametrize("sync", METHODS)
def test_a_codec_that_says_everything_changes_nothing(compressed, sync):
    found, expected = compressed[0][sync, EVERYTHING], compressed[0][sync, "none"]
    for when in ("moving", "rested"):
        assert parameters(found[when]) == pytest.approx(parameters(expected[when]), abs=2e-5)


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("spec", COMPRESSIONS)
def test_learners_that_rest_come_together(compressed, sync, spec):
    """What was kept is said, sooner or later: central model and learners end at one point."""
    assert compressed[0][sync, spec]["apart"] < 1e-3


@pytest.mark.parametrize("sync", METHODS)
@pytest.mark.parametrize("spec", ["bf16", "onebit", "topk:share=0.2", "powersgd:rank=1"])
def test_less_is_sent_and_about_the_same_is_learned(compressed, sync, spec):
    found, exact = compressed[0][sync, spec], compressed[0][sync, "none"]
    assert found["sent"] < exact["sent"]
    start = parameters({key: value.numpy() for key, value in small_net().state_dict().items()})
    moved = (parameters(exact["moving"]) - start).norm()
    assert (parameters(found["moving"]) - parameters(exact["moving"])).norm() < 0.5 * moved


def attempt(*case: str) -> dict | str:
    """In a rank: what comes of a case, or why it is refused."""
    try:
        return sail(*case)
    except InputError as error:
        return str(error)


def test_topologies_agree_to_rounding_and_what_hosts_do_not_fill_is_refused_by_every_rank():
    unfilled = ("sma", "none", "torus:rows=2")
    cases = [("sma", "none", topology) for topology in TOPOLOGIES]
    cases += [("sma", "powersgd:rank=1", topology) for topology in ("flat", "torus")]
    for rank in run_ranks(all_of, (1, 1, 2), attempt, [unfilled, *cases], timeout_s=240):
        assert rank[unfilled] == "a torus of 2 rows can't hold 3 hosts: give a divisor of 3"
        for sync, spec, topology in cases:
            found, expected = rank[sync, spec, topology], rank[sync, spec, "flat"]
            assert parameters(found["moving"]) == pytest.approx(
                parameters(expected["moving"]), abs=1e-4
            )


def descend(compress: str, sync: str) -> list[float]:
    """In a rank: where the mean comes to rest after moves down a slope that is straight."""
    torch.manual_seed(1)
    model = nn.Linear(6, 5).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with Fleet(model, optimizer, sync=parse(sync), learners=LEARNERS, compress=compress) as fleet:
        for step in range(STEPS):
            for learner in fleet.mine:
                stream = torch.Generator().manual_seed(1000 * step + learner)
                slope = torch.randn(4, 5, generator=stream, dtype=torch.float64)
                inputs = torch.randn(4, 6, generator=stream, dtype=torch.float64)
                optimizer.zero_grad()
                (model(inputs) * slope).mean().backward()
                optimizer.step()
        for _ in range(RESTS * len(fleet.mine)):
            fleet._average.rest()
        return parameters(fleet.state_dict(), model).tolist()


def test_no_move_is_lost():
    """The gradients are the same wherever learners stand: so late moves end where others do."""
    moves = [f"adaptive:lag={lag},gain=2.0,lead=0.5" for lag in (0, 1)]
    cases = [*product(COMPRESSIONS, [*moves, "local_sgd:period=3"])]
    for found in run_ranks(all_of, HOSTS, descend, cases, timeout_s=240):
        for (spec, sync), end in found.items():
            assert end == pytest.approx(found["none", sync], abs=1e-6), (spec, sync)


def go_on(compress: str, sync: str) -> tuple[list[float], list[float]]:
    """In a rank: where one fleet comes to rest, and another that goes on from its middle."""
    ends = []
    world, captured = World.from_environment(), None
    for _ in range(2):
        torch.manual_seed(1)
        model = nn.Linear(6, 5).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with Fleet(model, optimizer, parse(sync), learners=LEARNERS, compress=compress) as fleet:
            if captured:
                fleet.restore(captured, samples=0)
            for step in range(10 if captured else 0, 20):
                if step == 10 and not captured:
                    own = fleet.capture()
                    captured = Captured(world.broadcast(own.shared), own.learners)
                for learner in fleet.mine:
                    stream = torch.Generator().manual_seed(1000 * step + learner)
                    inputs = torch.randn(4, 6, generator=stream, dtype=torch.float64)
                    optimizer.zero_grad()
                    (model(inputs) - inputs[:, :5]).square().mean().backward()
                    optimizer.step()
            for _ in range(RESTS * len(fleet.mine)):
                fleet._average.rest()
            ends.append(parameters(fleet.state_dict(), model).tolist())
    return ends[0], ends[1]


def test_a_fleet_that_goes_on_ends_where_it_would_have():
    """What was not said when it was captured is said later."""
    cases = [*product(["none", "onebit", "powersgd:rank=2"], ["sma", "adaptive:gain=1.0"])]
    for found in run_ranks(all_of, HOSTS, go_on, cases, timeout_s=240):
        for case, (whole, resumed) in found.items():
            assert resumed == pytest.approx(whole, abs=1e-12 if case[0] == "none" else 0.02), case


def test_within_a_host_there_is_nothing_to_compress():
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Fleet(model, optimizer, learners=2, compress="onebit") as fleet:
        for _ in fleet.mine:
            fleet._average.rest()
        assert fleet.traffic.sent_bytes == 0


def train_a_task(folder: str) -> int:
    """In a rank: a short managed run between hosts."""
    settings = Config(
        epochs=0.1, learners=2, compress="onebit", topology="auto", run_dir=f"{folder}/run"
    )
    return train(tasks.get("resnet8-digits"), settings, quiet=True).sent_bytes


def test_a_run_logs_what_was_sent(tmp_path: Path):
    first, _ = run_ranks(train_a_task, (1, 1), str(tmp_path))
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    wire = [line for line in map(json.loads, lines) if line["event"] == "wire"][-1]
    assert 0 < wire["sent_bytes"] <= first
    assert wire["sent_bytes"] < wire["whole_bytes"] / 4
    assert wire["topology"] in ("flat", "ring", "hierarchical", "torus")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["sent_bytes"] == first
