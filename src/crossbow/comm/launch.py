"""Launch: the ranks of one host, by torch's own elastic launcher, called in-process.

What `torchrun` does for a script, `launch` does for a function. Each rank gets a core of its own.
"""

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any
from uuid import uuid4

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from crossbow.comm.world import PeerError
from crossbow.errors import CrossbowError

_PR_SET_PDEATHSIG = 1


class RankError(CrossbowError):
    """A rank ended without an answer."""


def launch(ranks: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run work(*arguments) in so many ranks; return what each answers.

    Ctrl-C is passed on to the ranks, which decide what to do about it.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",  # and not SIGINT, which the ranks handle
    )
    for name in ("torch.distributed", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # we explain failures ourselves
    with _interrupts_passed_on():
        try:
            answers = elastic_launch(config, _rank)(work, arguments)
        except ChildFailedError as error:
            rank, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
            raise RankError(f"rank {rank} ended with {_describe(failure.exitcode)}") from error
    return _checked([answers[rank] for rank in range(ranks)])


def die_with_parent() -> None:
    """Let the kernel end this process with the one that started it, where it can do so."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def own_core(local_rank: int) -> set[int]:
    """The core of a rank: the cores this process may use, in turn."""
    cores = sorted(os.sched_getaffinity(0))
    return {cores[local_rank % len(cores)]}


@dataclass(frozen=True)
class _Failed:
    """The answer of a rank that raised an error which explains itself."""

    error: CrossbowError


def _rank(work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Be a rank: on a core of its own, and deaf to the terminal, which the launcher listens to."""
    die_with_parent()
    os.setpgid(0, 0)
    os.sched_setaffinity(0, own_core(int(os.environ["LOCAL_RANK"])))
    torch.set_num_threads(1)
    try:
        return work(*arguments)
    except CrossbowError as error:
        return _Failed(error)


def _checked(answers: list[Any]) -> list[Any]:
    """Raise the failure that the others, who lost a peer by it, followed from."""
    failures = [answer.error for answer in answers if isinstance(answer, _Failed)]
    if failures:
        raise min(failures, key=lambda error: isinstance(error, PeerError))
    return answers


@contextmanager
def _interrupts_passed_on() -> Iterator[None]:
    """Pass the first Ctrl-C on to the ranks; at the second, end them."""
    seen = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        again, seen = seen, True
        for process in multiprocessing.active_children():
            if process.pid is not None:
                os.kill(process.pid, signal.SIGKILL if again else signal.SIGINT)
        if again:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _describe(exit_code: int) -> str:
    if exit_code < 0:
        return f"signal {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"
