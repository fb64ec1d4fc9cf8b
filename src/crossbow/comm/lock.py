"""Lock: one rank of a host at a time.

It is a lock on a file that all ranks opened and that has no name any more, so nothing is left
behind. The kernel keeps it: who waits sleeps, and who dies lets go. Taking it is an acquire and
letting go a release, as for any lock, so what was written under it is seen under it.
"""

import fcntl
import os
import tempfile
from pathlib import Path
from types import TracebackType

from crossbow.comm.world import World


class Lock:
    """Held inside a `with` block; for a world of one it is no lock at all."""

    def __init__(self, world: World) -> None:
        """Open the file; all ranks do so together."""
        self._file: int | None = None
        if world.size == 1:
            return
        path = None
        if world.rank == 0:
            self._file, path = tempfile.mkstemp(prefix="crossbow-lock-")
        path = world.broadcast(path)
        if self._file is None:
            self._file = os.open(path, os.O_RDWR)
        world.gather(None)  # all have opened it
        if world.rank == 0:
            Path(path).unlink()

    def __enter__(self) -> None:
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
