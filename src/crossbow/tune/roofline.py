"""Roofline: what a step asks of a machine, what the machine could give, and what it gives.

    limit = max(flops / peak flops, bytes / bandwidth)
    share = limit / measured seconds

Williams, Waterman and Patterson, Roofline, 2009. Peak and bandwidth are measured, by a matrix
product and by a triad a = b + s * c, once over memory and once within the caches, on all ranks at
the same time. Flops are those of products and convolutions, which are nearly all. Bytes are what
each operation reads and writes, as if nothing stayed in registers between two: eager execution. A
share far below 1 at operations that take microseconds means that starting them is what costs.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

PRODUCT_SIDE = 1024
CACHED_NUMBERS = 2**16
"""Of a vector: three of them are 0.75 MiB, which a core's own cache holds."""

MEMORY_NUMBERS = 2**24
"""Three vectors are 192 MiB, which no cache holds."""

CACHE_BYTES = 2**20
"""What the working set of an operation may be, for the bandwidth of caches to count."""

DISPATCH_SHARE = 0.25
"""A pass that is below this share of its limit spends its time on starting operations."""


@dataclass(frozen=True)
class Machine:
    """What all ranks together can do, a second."""

    flops: float
    memory_bytes: float
    cache_bytes: float


@dataclass(frozen=True)
class Pass:
    """A part of a step of one learner: forward, backward or update."""

    name: str
    flops: float
    bytes: float
    operations: int
    seconds: float

    def limit_s(self, one: Machine) -> float:
        """The least time that a rank which can do this takes."""
        return max(self.flops / one.flops, self.bytes / self._bandwidth(one))

    def share(self, one: Machine) -> float:
        """How much of what is possible is reached."""
        return self.limit_s(one) / self.seconds

    def bound_by(self, one: Machine) -> str:
        """What to look at if it should be faster: dispatch, compute or memory."""
        if self.share(one) < DISPATCH_SHARE:
            return "dispatch"
        is_compute = self.flops / one.flops >= self.bytes / self._bandwidth(one)
        return "compute" if is_compute else "memory"

    def _bandwidth(self, one: Machine) -> float:
        in_cache = self.bytes / max(self.operations, 1) <= CACHE_BYTES
        return one.cache_bytes if in_cache else one.memory_bytes


@dataclass(frozen=True)
class Roofline:
    """A model's step on a machine."""

    machine: Machine
    ranks: int
    passes: tuple[Pass, ...]

    @property
    def one_rank(self) -> Machine:
        """What a rank can do while the others are busy, too."""
        m = self.machine
        return Machine(
            m.flops / self.ranks, m.memory_bytes / self.ranks, m.cache_bytes / self.ranks
        )

    def to_json(self) -> dict[str, Any]:
        """All figures, and what they say."""
        one = self.one_rank
        said = [
            asdict(p) | {"share": p.share(one), "bound_by": p.bound_by(one)} for p in self.passes
        ]
        return {"machine": asdict(self.machine), "ranks": self.ranks, "passes": said}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Roofline":
        """What `to_json` wrote."""
        names = ("name", "flops", "bytes", "operations", "seconds")
        passes = tuple(Pass(**{name: p[name] for name in names}) for p in values["passes"])
        return cls(Machine(**values["machine"]), values["ranks"], passes)


def measure_rank(seconds: float, device: torch.device) -> Machine:
    """What this rank can do now, in three short measurements."""
    part = seconds / 3
    side = PRODUCT_SIDE
    one, other, out = (torch.randn(side, side, device=device) for _ in range(3))
    products = _rate(lambda: torch.mm(one, other, out=out), part, device)
    return Machine(
        flops=2 * side**3 * products,
        memory_bytes=_triad(MEMORY_NUMBERS, part, device),
        cache_bytes=_triad(CACHED_NUMBERS, part, device),
    )


def _triad(numbers: int, seconds: float, device: torch.device) -> float:
    """Bytes a second that a = b + s * c reads and writes."""
    b, c, a = (torch.ones(numbers, device=device) for _ in range(3))
    return 3 * b.nbytes * _rate(lambda: torch.add(b, c, alpha=0.5, out=a), seconds, device)


def _rate(work: Callable[[], object], seconds: float, device: torch.device) -> float:
    """How often a second the work can be done: of five parts of the time, the best."""
    work()
    best, calls = 0.0, 1
    for _ in range(5):
        start, done = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - start) < seconds / 5:
            for _ in range(calls):
                work()
            done += calls
            if device.type != "cpu":
                torch.cuda.synchronize(device)
        best = max(best, done / elapsed)
        calls = max(1, round(best * seconds / 50))
    return best


class _Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes, self.operations = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        written = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        places = {t.untyped_storage().data_ptr() for t in read}
        is_view = all(t.untyped_storage().data_ptr() in places for t in written)
        if not is_view or func._schema.is_mutable:
            self.bytes += sum(t.nbytes for t in (*read, *written))
            self.operations += 1
        return out


@dataclass
class Count:
    """What a pass asked for."""

    flops: float = 0.0
    bytes: float = 0.0
    operations: int = 0


@contextmanager
def counting() -> Iterator[Count]:
    """Count what is computed inside."""
    count = Count()
    with FlopCounterMode(display=False) as flops, _Traffic() as traffic:
        yield count
    count.flops = float(flops.get_total_flops())
    count.bytes, count.operations = float(traffic.bytes), traffic.operations
