"""Topology: every way gives the flat sum, and sends what it says."""

import time

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks

from crossbow.comm import topology
from crossbow.comm.topology import Members
from crossbow.comm.world import World, joined
from crossbow.errors import InputError

SIZES = [0, 1, 2, 5, 12, 1001]
SPECS = [
    "flat",
    "ring",
    "hierarchical",
    "torus",
    "hierarchical:group=2",
    "hierarchical:group=9",
    "auto",
]


def numbers(rank: int, n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * n + rank))


def sums_in_rank(specs: list[str]) -> dict:
    """In a rank: what each topology makes of each size, and the bytes it claims."""
    world = World.from_environment()
    with joined(world):
        group = dist.new_group(range(world.size))
        found = {}
        for spec in specs:
            add_up, _ = topology.parse(spec).bind(group, torch.zeros(100))
            for n in SIZES:
                values = numbers(world.rank, n)
                sent = add_up(values)
                found[spec, n] = values.tolist(), sent
        return found


@pytest.mark.parametrize("world", [2, 3, 6])
def test_every_way_gives_the_flat_sum(world):
    specs = SPECS + [f"torus:rows={r}" for r in range(1, world + 1) if world % r == 0]
    ranks = run_ranks(sums_in_rank, world, specs)
    for spec in specs:
        for n in SIZES:
            expected = sum(numbers(rank, n).double() for rank in range(world)).tolist()
            values = [rank[spec, n][0] for rank in ranks]
            assert values[0] == pytest.approx(expected, abs=1e-5), (spec, n)
            assert all(value == values[0] for value in values), (spec, n)
    for n in (12, 1001):  # all ways but the hierarchical move as little as can be
        for spec in ("ring", "torus", "flat"):
            sent = sum(rank[spec, n][1] for rank in ranks)
            assert sent == pytest.approx(2 * (world - 1) * 4 * n, abs=2 * world), spec
        sent = sum(rank["hierarchical:group=9", n][1] for rank in ranks)
        assert sent == 2 * (world - 1) * 4 * n


def auto_in_rank() -> str:
    """In a rank: which way auto takes, where all but one are made slow for one member."""
    world = World.from_environment()
    with joined(world):
        group = dist.new_group(range(world.size))
        members = Members.of(group)

        def slow(values: torch.Tensor) -> int:
            time.sleep(0.05 * world.rank)
            return topology.ring(values, members)

        ways = {"slow": slow, "quick": lambda values: topology.flat(values, members)}
        return topology.fastest(ways, torch.zeros(1000), group)


def test_auto_takes_the_quickest_by_the_slowest_members_clock():
    assert run_ranks(auto_in_rank, 3) == ["quick"] * 3


def test_a_torus_holds_what_its_rows_divide():
    with pytest.raises(
        InputError, match="a torus of 3 rows can't hold 4 hosts: give a divisor of 4"
    ):
        topology.Topology("torus", 3).check(4)


@pytest.mark.parametrize(
    "spec", ["star", "ring:rows=2", "torus:rows=0", "torus:group=2", "torus:rows=1.5"]
)
def test_what_is_no_topology_is_refused(spec):
    with pytest.raises(InputError):
        topology.parse(spec)
