"""Topology: by which ways hosts add up their numbers.

    flat           torch's own all-reduce
    ring           every member sends to the next: a reduce-scatter, then an all-gather
    hierarchical   groups send to their leaders, leaders run a ring, leaders send back
    torus          a reduce-scatter along the rows of a grid, a ring along each of its columns,
                   an all-gather along the rows
    auto           the one of these that was fastest when the hosts met

All end with the same bits on every host, because each sum is made in one place and then copied.
docs/design/topology.md says what each costs, and which wins when.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from crossbow.comm.compress import Sum
from crossbow.errors import InputError, check_choice
from crossbow.spec import parse_spec

TRIALS = 3
"""Of each topology, when the fastest is chosen; the first doesn't count."""


@dataclass(frozen=True)
class Members:
    """Some ranks of a process group, in order, and which of them this is."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    place: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "Members":
        """All of a group."""
        return cls(group, tuple(dist.get_process_group_ranks(group)), dist.get_rank(group))

    def __len__(self) -> int:
        return len(self.ranks)

    def some(self, places: Sequence[int]) -> "Members":
        """Those at these places, of which this is one."""
        chosen = tuple(self.ranks[place] for place in places)
        return Members(self.group, chosen, list(places).index(self.place))

    def trade(self, to: int, gives: Tensor, by: int, takes: Tensor) -> int:
        """Send to one member while receiving from another; return the bytes sent."""
        trades = [
            dist.P2POp(way, tensor, self.ranks[place % len(self)], self.group)
            for way, tensor, place in ((dist.isend, gives, to), (dist.irecv, takes, by))
            if tensor.numel()  # both sides know that there is nothing
        ]
        for work in dist.batch_isend_irecv(trades) if trades else ():
            work.wait()
        return gives.nbytes


def flat(values: Tensor, members: Members) -> int:
    """Add up by torch's all-reduce, which moves as much as a ring does."""
    dist.all_reduce(values, group=members.group)
    return 2 * values.nbytes * (len(members) - 1) // len(members)


def ring(values: Tensor, members: Members) -> int:
    """Add up in 2 (p - 1) messages a member, of 1/p of the numbers each."""
    parts = values.tensor_split(len(members))
    return reduce_scatter(parts, members) + all_gather(parts, members)


def reduce_scatter(parts: Sequence[Tensor], members: Members) -> int:
    """Add up; afterwards the part at its own place is whole on each member."""
    size, place, sent = len(members), members.place, 0
    room = torch.empty_like(parts[0])
    for turn in range(1, size):
        gives, takes = parts[(place - turn) % size], parts[(place - turn - 1) % size]
        arrived = room[: takes.numel()]
        sent += members.trade(place + 1, gives, place - 1, arrived)
        takes.add_(arrived)
    return sent


def all_gather(parts: Sequence[Tensor], members: Members) -> int:
    """Give everybody the part that each has at its own place."""
    size, place, sent = len(members), members.place, 0
    for turn in range(size - 1):
        gives, takes = parts[(place - turn) % size], parts[(place - turn - 1) % size]
        sent += members.trade(place + 1, gives, place - 1, takes)
    return sent


def hierarchical(values: Tensor, members: Members, group: int) -> int:
    """Add up within groups of so many neighbours, then between their first members."""
    first = members.place - members.place % group
    leaders = members.some(range(0, len(members), group)) if members.place == first else None
    others = range(first + 1, min(first + group, len(members)))
    nothing = values[:0]
    if leaders is None:
        sent = members.trade(first, values, first, nothing)
        members.trade(first, nothing, first, values)
        return sent
    room = torch.empty_like(values)
    for other in others:
        members.trade(other, nothing, other, room)
        values.add_(room)
    sent = ring(values, leaders)
    return sent + sum(members.trade(other, values, other, nothing) for other in others)


def torus(values: Tensor, members: Members, rows: int) -> int:
    """Add up on a grid of so many rows: rows first, then columns, then rows again."""
    columns = len(members) // rows
    row, column = divmod(members.place, columns)
    along = members.some(range(row * columns, (row + 1) * columns))
    across = members.some(range(column, len(members), columns))
    parts = values.tensor_split(columns)
    sent = reduce_scatter(parts, along)
    sent += ring(parts[column], across)
    return sent + all_gather(parts, along)


@dataclass(frozen=True)
class Topology:
    """Which way, with its option."""

    name: str
    size: int | None = None
    """The members of a group, or the rows of a torus; None is near the root of their number."""

    def bind(self, group: dist.ProcessGroup, like: Tensor) -> tuple[Sum, str]:
        """Return what adds up in this group, and its name; all members call this together.

        Args:
            group: whose members add up.
            like: numbers as there will be, on which `auto` measures.
        """
        members = Members.of(group)
        if self.name != "auto":
            return self._sum(members), self.name
        sums = {name: Topology(name)._sum(members) for name in WAYS}
        name = fastest(sums, like, group)
        return sums[name], name

    def check(self, hosts: int) -> None:
        """Refuse a number of hosts that it can't join."""
        if self.name == "torus" and self.size and hosts % self.size:
            raise InputError(
                f"a torus of {self.size} rows can't hold {hosts} hosts: give a divisor of {hosts}"
            )

    def _sum(self, members: Members) -> Sum:
        count = len(members)
        if self.name == "hierarchical":
            size = self.size or math.ceil(math.sqrt(count))
            return lambda values: hierarchical(values, members, size)
        if self.name == "torus":
            rows = self.size or most_square(count)
            return lambda values: torus(values, members, rows)
        way = {"flat": flat, "ring": ring}[self.name]
        return lambda values: way(values, members)


WAYS = ("flat", "ring", "hierarchical", "torus")
OPTIONS: Mapping[str, str | None] = {
    "flat": None,
    "ring": None,
    "hierarchical": "group",
    "torus": "rows",
    "auto": None,
}


def parse(spec: str) -> Topology:
    """Return the topology that `spec` names.

    >>> parse("torus:rows=2")
    Topology(name='torus', size=2)
    """
    name, options = parse_spec(spec)
    legal = OPTIONS[check_choice("topology", name, OPTIONS)]
    for option, size in options.items():
        check_choice(f"option of {name}", option, [legal] if legal else [])
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InputError(f"{option} {size} of {name} is not possible: give 1 or more")
        return Topology(name, size)
    return Topology(name)


def most_square(count: int) -> int:
    """The largest divisor that is at most the root.

    >>> [most_square(count) for count in (1, 7, 12, 16)]
    [1, 1, 3, 4]
    """
    return max(rows for rows in range(1, math.isqrt(count) + 1) if count % rows == 0)


def fastest(sums: Mapping[str, Sum], like: Tensor, group: dist.ProcessGroup) -> str:
    """Return the name of the quickest, by the slowest member's clock; all members agree."""
    medians = [statistics.median(_timed(add_up, like, group)[1:]) for add_up in sums.values()]
    times = torch.tensor(medians, dtype=torch.float64, device=like.device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    return list(sums)[int(times.argmin())]


def _timed(
    add_up: Callable[[Tensor], object], like: Tensor, group: dist.ProcessGroup
) -> list[float]:
    seconds = []
    for _ in range(TRIALS):
        numbers, start = torch.zeros_like(like), torch.zeros(1, device=like.device)
        dist.all_reduce(start, group=group)  # so that all begin together
        begin = time.perf_counter()
        add_up(numbers)
        numbers[:1].sum().item()  # a GPU has done it by then
        seconds.append(time.perf_counter() - begin)
    return seconds
