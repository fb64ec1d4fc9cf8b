"""Wire: several hosts, real processes; every compression equals its paper and loses nothing."""

import math

import pytest
import torch
import torch.distributed as dist
from tests import reference
from tests.ranks import run_ranks
from torch import Tensor

from crossbow.comm import compress, topology
from crossbow.comm.wire import Route, Traffic, Wire
from crossbow.comm.world import World, joined

HOSTS, STEPS = 3, 20
SHAPES = [(8, 3, 2, 2), (5,), (7, 9)]
N = sum(map(math.prod, SHAPES))
SPECS = ["none", "bf16", "fp16", "onebit", "topk:share=0.1", "powersgd:rank=2"]


def moves_of(step: int, host: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    stream = torch.Generator().manual_seed(100 * step + host)
    return [torch.randn(shape, generator=stream, dtype=torch.float64).to(dtype) for shape in SHAPES]


def talk(dtype: torch.dtype) -> dict:
    """In a rank: what is heard in each step through each compression, and what was left."""
    world = World.from_environment()
    found = {}
    with joined(world):
        group = dist.new_group(range(world.size))
        for spec in SPECS:
            like = torch.zeros(N, dtype=dtype)
            route = Route(compress.parse(spec), topology.parse("ring"))
            wire = Wire(group, route, like, Traffic())
            channel = wire.channel(SHAPES, like)
            heard = []
            for step in range(STEPS):
                tensors = moves_of(step, world.rank, dtype)
                channel.add_up(tensors)
                heard.append([t.numpy() for t in tensors])
            kept = _tensors(channel.state_dict())
            found[spec] = heard, kept, wire.traffic.sent_bytes, wire.traffic.whole_bytes
    return found


def _tensors(state: dict) -> dict:
    """Without the bases of PowerSGD."""
    flat = {k: v for k, v in state.items() if isinstance(v, Tensor) and k == "kept"}
    for name, inner in state.items():
        if isinstance(inner, dict):
            flat |= {f"{name} {k}": v for k, v in inner.items()}
    return {k: v.numpy() for k, v in flat.items()}


@pytest.fixture(scope="module")
def talk_in_float64():
    return run_ranks(talk, HOSTS, torch.float64)


@pytest.fixture(scope="module", params=[torch.float32, torch.float64])
def talks(request, talk_in_float64):
    if request.param == torch.float64:
        return torch.float64, talk_in_float64
    return request.param, run_ranks(talk, HOSTS, request.param)


def row(tensors) -> Tensor:
    return torch.cat([torch.as_tensor(t).double().reshape(-1) for t in tensors])


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_heard_over_time_is_the_sum_but_for_what_is_kept(talks, spec):
    dtype, ranks = talks
    moved = sum(row(moves_of(step, host)) for step in range(STEPS) for host in range(HOSTS))
    heard = sum(row(tensors) for tensors in ranks[0][spec][0])
    kept = torch.zeros(N, dtype=torch.float64)
    for host, rank in enumerate(ranks):
        for name, value in rank[spec][1].items():
            if name == "sums kept":  # of the slice that this host adds up
                whole = torch.zeros(HOSTS * len(value), dtype=torch.float64)
                whole[host * len(value) :][: len(value)] = torch.as_tensor(value)
                kept += whole[:N]
            else:
                kept += torch.as_tensor(value)[:N]
    assert heard + kept == pytest.approx(moved, abs=1e-4 if dtype == torch.float32 else 1e-11)
    assert (kept.abs().max() > 1e-4) == (spec != "none")


def talk_in_bfloat16() -> dict:
    """In a rank: what is heard in all, when nothing moves after the first step."""
    world = World.from_environment()
    found = {}
    with joined(world):
        group = dist.new_group(range(world.size))
        for spec in SPECS:
            like = torch.zeros(N, dtype=torch.bfloat16)
            route = Route(compress.parse(spec), topology.parse("flat"))
            channel = Wire(group, route, like, Traffic()).channel(SHAPES, like)
            heard = torch.zeros(N)
            for step in range(40):
                tensors = moves_of(0, world.rank, torch.bfloat16)
                if step:
                    tensors = [t.zero_() for t in tensors]
                channel.add_up(tensors)
                heard += row(tensors).float()
            found[spec] = heard.tolist()
    return found


def test_moves_in_half_precision_are_kept_in_single_precision():
    moved = sum(row(moves_of(0, host, torch.bfloat16)) for host in range(2))
    for rank in run_ranks(talk_in_bfloat16, 2):
        for spec in SPECS:
            assert rank[spec] == pytest.approx(moved.tolist(), abs=0.05), spec


@pytest.mark.parametrize("spec", SPECS)
def test_all_hosts_hear_the_same_bits(talks, spec):
    _, (first, *others) = talks
    for other in others:
        for ours, theirs in zip(first[spec][0], other[spec][0], strict=True):
            assert all((a == b).all() for a, b in zip(ours, theirs, strict=True))


def first_bases() -> list[Tensor | None]:
    """PowerSGD's, in the order of the matrices."""
    stream = torch.Generator().manual_seed(0)
    return [
        None
        if len(s) == 1
        else torch.randn(math.prod(s[1:]), 2, generator=stream, dtype=torch.float64)
        for s in SHAPES
    ]


REFERENCES = {
    "onebit": lambda moves: reference.with_feedback(reference.one_bit, moves),
    "topk:share=0.1": lambda moves: reference.with_feedback(
        lambda m: reference.top_k(m, math.ceil(0.1 * N)), moves
    ),
    "powersgd:rank=2": lambda moves: reference.powersgd(moves, first_bases()),
}


@pytest.mark.parametrize("spec", REFERENCES)
def test_it_is_the_papers(talk_in_float64, spec):
    moves = [[moves_of(step, host) for host in range(HOSTS)] for step in range(STEPS)]
    for found, expected in zip(talk_in_float64[0][spec][0], REFERENCES[spec](moves), strict=True):
        assert row(found) == pytest.approx(row(expected), abs=1e-9)


def test_bytes_are_counted(talks):
    dtype, ranks = talks
    size = dtype.itemsize
    scales, places = 8 + 1 + 7, math.ceil(0.1 * N)
    width = math.ceil(N / HOSTS)
    thin = (8 + 12 + 7 + 9) * 2 + 5
    expected = {
        "bf16": 2 * (HOSTS - 1) * 2 * width,
        "fp16": 2 * (HOSTS - 1) * 2 * width,
        "onebit": (HOSTS - 1) * (math.ceil(N / 8) + scales * size),
        "topk:share=0.1": (HOSTS - 1) * places * (size + 4),
    }
    for spec, wanted in expected.items():
        for rank in ranks:
            assert rank[spec][2:] == (STEPS * wanted, STEPS * N * size)
    for spec, numbers in (("none", N), ("powersgd:rank=2", thin)):
        sent = sum(rank[spec][2] for rank in ranks)
        assert sent == STEPS * 2 * (HOSTS - 1) * numbers * size
