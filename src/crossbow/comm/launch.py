"""Launch: the ranks of one host, by torch's own elastic launcher, called in-process.

What `torchrun` does for a script, `launch` does for a function. Each rank gets a core of its own.
If one is killed all are started again, as often as they may be. What they have to remember then
they leave in a refuge, memory that ends with the launcher and not with a rank (comm/shared.py).
"""

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import traceback
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


def launch(ranks: int, work: Callable[..., Any], *arguments: Any, restarts: int = 0) -> list[Any]:
    """Run work(*arguments) in so many ranks; return what each answers.

    Ctrl-C and SIGTERM are passed on to the ranks, which decide what to do about them.

    Args:
        ranks: processes.
        work: what each does; an error that it raises ends them all.
        arguments: of the work.
        restarts: how often all are started again when one was killed.
    """
    for name in ("torch.distributed", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # we explain failures ourselves
    with _signals_passed_on() as signals:
        for left in reversed(range(restarts + 1)):
            try:
                answers = elastic_launch(_config(ranks), _rank)(work, arguments)
                return _checked([answers[rank] for rank in range(ranks)])
            except ChildFailedError as error:
                rank, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
                how = f"rank {rank} ended with {_describe(failure.exitcode)}"
                if not left or failure.exitcode >= 0 or signals:
                    raise RankError(how) from error
                print(f"crossbow: {how}; all are started again", file=sys.stderr, flush=True)
    raise AssertionError("unreachable")


def _config(ranks: int) -> LaunchConfig:
    """One attempt; another one is a new launch, which meets at a new place and so never waits."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGHUP,SIGQUIT",  # and not those that the ranks handle
    )


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
    except Exception as error:  # to be started again wouldn't help
        if not _follows_from_a_death(error):
            traceback.print_exc()
        return _Failed(RankError(f"a rank failed with {type(error).__name__}: {error}"))


def _follows_from_a_death(error: Exception) -> bool:
    """Whether a peer's end is what this rank noticed, as torch says it."""
    return isinstance(error, RuntimeError) and "onnection" in str(error)


def _checked(answers: list[Any]) -> list[Any]:
    """Raise the failure that the others, who lost a peer by it, followed from."""
    failures = [answer.error for answer in answers if isinstance(answer, _Failed)]
    if failures:
        kinds = (RankError, PeerError)  # what others followed from comes last
        raise min(
            failures, key=lambda error: isinstance(error, kinds) + isinstance(error, PeerError)
        )
    return answers


@contextmanager
def _signals_passed_on() -> Iterator[list[int]]:
    """Pass the first Ctrl-C or SIGTERM on to the ranks; at the second, end them."""
    seen: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        again = bool(seen)
        seen.append(number)
        for process in multiprocessing.active_children():
            if process.pid is not None:
                os.kill(process.pid, signal.SIGKILL if again else number)
        if again:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _describe(exit_code: int) -> str:
    if exit_code < 0:
        return f"signal {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"
