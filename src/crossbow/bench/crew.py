"""Crew: processes that stand ready, so that contenders can take turns within one run.

A crew is the ranks of one contender. They are started once and then obey: `call` has every rank run
a function, and returns when the last has answered. Between calls they sleep on a pipe and cost
nothing, so the crews of all contenders can be kept while one of them is timed.
"""

import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import torch

from crossbow.bench.link import Link
from crossbow.comm.launch import die_with_parent
from crossbow.errors import CrossbowError

Work = Callable[..., Any]
"""(the rank's memory between calls, arguments...) -> an answer that can be pickled."""


class Late(CrossbowError):
    """A crew didn't answer in time; it is of no use any more."""


class Crew:
    """The ranks of one contender, one core each."""

    def __init__(
        self,
        ranks: int,
        threads: int = 1,
        cores: Sequence[Sequence[int]] = (),
        link: Link | None = None,
    ) -> None:
        """Start them.

        Args:
            ranks: how many.
            threads: of each, within an operation.
            cores: which ones each rank may use; any, if left out.
            link: joins two hosts, on which the ranks are; all are on this one, if left out.
        """
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            own = tuple(cores[rank]) if cores else ()
            process = context.Process(
                target=_serve, args=(theirs, rank, ranks, threads, own, link), daemon=True
            )
            with _deaf_to_interrupts():  # what it starts is, too
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.dismiss()

    def __len__(self) -> int:
        return len(self._pipes)

    def call(self, work: Work, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Have every rank run `work`; return their answers in rank order, or raise `Late`."""
        return self.call_each(work, [arguments] * len(self), timeout_s)

    def call_each(
        self, work: Work, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None
    ) -> list[Any]:
        """Have every rank run `work` with arguments of its own."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for pipe, own in zip(self._pipes, arguments, strict=True):
            pipe.send((work, own))
        return [self._answer(rank, end) for rank in range(len(self))]

    def dismiss(self, patience_s: float = 5) -> None:
        """Let the ranks end, or make them."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + patience_s
        for process in self._processes:
            process.join(max(0, deadline - time.monotonic()))
            if process.is_alive():
                process.terminate()  # which lets it tidy up
                process.join(2)
            if process.is_alive():
                process.kill()
                process.join()

    def _answer(self, rank: int, end: float | None) -> Any:
        if end is not None and not self._pipes[rank].poll(max(0, end - time.monotonic())):
            raise Late(f"rank {rank} of a contender gave no answer in time")
        try:
            failed, answer = self._pipes[rank].recv()
        except EOFError:
            raise CrossbowError(f"rank {rank} of a contender died") from None
        if failed:
            raise CrossbowError(f"rank {rank} of a contender failed: {answer}")
        return answer


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Leave Ctrl-C for later: a terminal sends it to the ranks too, and they end when told to."""
    resource_tracker.ensure_running()  # which would unblock them when the first process starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def meeting_place() -> int:
    """A free port of the loopback interface, where ranks can meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _serve(
    pipe: Connection,
    rank: int,
    ranks: int,
    threads: int,
    cores: Sequence[int],
    link: Link | None,
) -> None:
    """Obey until the pipe is closed."""
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
    }
    if link:
        os.environ |= link.environment(rank)
        link.enter(rank)
    if cores:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)
    with suppress(EOFError, ConnectionError):
        _obey(pipe)


def _obey(pipe: Connection) -> None:
    memory: dict[str, Any] = {}
    while True:
        work, arguments = pipe.recv()
        try:
            pipe.send((False, work(memory, *arguments)))
        except Exception:  # whatever it is, whoever called must hear of it
            pipe.send((True, traceback.format_exc()))
