"""Shared memory of the ranks of one host, and the clocks that order its use.

The block has a name only while the ranks find each other. Once all have mapped it the name is
removed, so that nothing can be left behind, however the ranks end.

A clock is one integer a rank, the number of steps it has completed. Only its owner writes it, with
release order: all that the rank wrote before is visible to whoever sees the new time. Reads have
acquire order. Python has neither, but a lock has: letting go of a lock is a release and taking it
an acquire, so the pair, in this order, is a fence for all that comes before and after it but a
store followed by a load, which the clocks don't need. docs/design/clocks.md has the argument.
"""

import mmap
import os
import select
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from crossbow.comm.world import PeerError, World
from crossbow.errors import InputError

ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vector a kernel loads."""

SPINS, YIELDS = 200, 50
SHORTEST_NAP_S, LONGEST_NAP_S = 2e-5, 1e-3
WATCH_INTERVAL_S = 0.25

_FOLDER = Path("/dev/shm")
_PREFIX = "crossbow-"


def aligned(num_bytes: int) -> int:
    """Round up to whole cache lines."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def map_block(world: World, num_bytes: int, name: str) -> Tensor:
    """Map one block of zeros into every rank of this host; all ranks call this together."""
    if world.size == 1:
        return _as_tensor(mmap.mmap(-1, num_bytes))
    folder = _FOLDER if _FOLDER.is_dir() else Path("/tmp")
    path, failure = None, None
    if world.local_rank == 0 and world.local_size > 1:
        _remove_stale(folder)
        path = folder / f"{_PREFIX}{name}-{os.getpid()}"
        failure = _reserve(path, num_bytes)
    try:
        found = world.gather((path, failure))[world.first_local]
        if found[1]:
            raise InputError(found[1])
        block = _as_tensor(_map_file(found[0], num_bytes))
        world.gather(None)  # all have mapped it
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
    return block


def _map_file(path: Path | None, num_bytes: int) -> mmap.mmap:
    """Map the file; without one, memory of this process alone."""
    if path is None:
        return mmap.mmap(-1, num_bytes)
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), num_bytes)


def _as_tensor(memory: mmap.mmap) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping for as long as it lives


def _reserve(path: Path, num_bytes: int) -> str | None:
    """Make the file with all its pages, since a page that is missing later would be a SIGBUS."""
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(handle, 0, num_bytes)
    except OSError as error:
        status = os.statvfs(path.parent)
        return (
            f"too little shared memory: {num_bytes:,} bytes are needed in {path.parent} and "
            f"{status.f_bavail * status.f_frsize:,} are free ({error.strerror}); "
            "enlarge it, or run fewer learners"
        )
    finally:
        os.close(handle)
    return None


def _remove_stale(folder: Path) -> None:
    """Remove blocks whose maker was killed before it could remove the name."""
    for path in folder.glob(f"{_PREFIX}*"):
        pid = path.name.rpartition("-")[2]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


@contextmanager
def refuge() -> Iterator[Path | None]:
    """A folder in memory for as long as this process lives, whatever becomes of its ranks.

    None where there is no such memory.
    """
    if not _FOLDER.is_dir():
        yield None
        return
    _remove_stale(_FOLDER)
    path = _FOLDER / f"{_PREFIX}refuge-{os.getpid()}"
    path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Carver:
    """Cuts a block into tensors, each on a cache line of its own; without a block, it counts."""

    def __init__(self, block: Tensor | None = None) -> None:
        self._block = block
        self.used = 0

    def cut(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the next tensor of this shape."""
        start, num_bytes = self.used, torch.Size(shape).numel() * dtype.itemsize
        self.used = aligned(start + num_bytes)
        if self._block is None:
            return torch.empty(tuple(shape), dtype=dtype, device="meta")
        return self._block[start : start + num_bytes].view(dtype).view(tuple(shape))


class Peer:
    """Another process of this host, seen through a handle that knows even an unreaped one's end."""

    def __init__(self, name: str, pid: int) -> None:
        self.name, self.pid = name, pid
        self._handle = os.pidfd_open(pid)

    def has_ended(self) -> bool:
        """Whether the process is no more."""
        ready, _, _ = select.select([self._handle], [], [], 0)
        return bool(ready)

    def close(self) -> None:
        """Let go of the handle."""
        os.close(self._handle)


class Clocks:
    """Step counters that order the use of shared memory: one is mine, and some I wait for."""

    BYTES_EACH = 2 * ALIGNMENT
    """A clock has two lines to itself: processors fetch lines in pairs."""

    def __init__(
        self,
        block: Tensor,
        mine: int,
        watched: Mapping[int, Peer],
        poll: Callable[[int], bool] = lambda step: False,
    ) -> None:
        """Use the clocks in `block`.

        Args:
            block: bytes that all ranks of the host map.
            mine: the clock that only this object advances.
            watched: the clocks to wait for, and whose they are.
            poll: asked now and then whether to give up waiting for a step; may raise.
        """
        # an item of this view is written by one aligned 8-byte store: never torn
        self._words = memoryview(block.numpy().data).cast("q")
        self._stride = self.BYTES_EACH // 8
        self._mine = mine * self._stride
        self._watched = [(clock * self._stride, peer) for clock, peer in watched.items()]
        self._poll = poll
        self.on_wait: Callable[[float, float], None] = lambda began, ended: None
        """Told of a wait that took time: when it began and ended, by time.perf_counter()."""
        self._lock = threading.Lock()
        self._lock.acquire()

    def now(self) -> int:
        """Return the steps of the clock that is mine."""
        return self._words[self._mine]

    def advance(self, step: int) -> None:
        """Say that `step` steps are done, and all that was written for them."""
        self._fence()
        self._words[self._mine] = step

    def wait(self, step: int) -> bool:
        """Return once all watched clocks show `step`; False if the wait was given up."""
        words = self._words
        for place, peer in self._watched:
            if words[place] < step:
                began = time.perf_counter()
                has_come = self._wait_long(place, peer, step)
                self.on_wait(began, time.perf_counter())
                if not has_come:
                    return False
        self._fence()
        return True

    def _wait_long(self, place: int, peer: Peer, step: int) -> bool:
        """Spin a little, yield a little, then nap; now and then see whether the peer is alive."""
        words = self._words
        for _ in range(SPINS):
            if words[place] >= step:
                return True
        for _ in range(YIELDS):
            os.sched_yield()
            if words[place] >= step:
                return True
        nap, look = SHORTEST_NAP_S, 0.0
        while words[place] < step:
            time.sleep(nap)
            nap = min(1.5 * nap, LONGEST_NAP_S)
            if time.monotonic() > look:
                if self._poll(step):
                    return False
                if peer.has_ended() and words[place] < step:
                    raise PeerError(
                        f"{peer.name} (process {peer.pid}) ended after {words[place]} steps: "
                        f"its step {step} will never come"
                    )
                look = time.monotonic() + WATCH_INTERVAL_S
        return True

    def _fence(self) -> None:
        self._lock.release()
        self._lock.acquire()
