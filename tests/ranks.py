"""Real processes for tests: `run_ranks(fn, world_size)`."""

import multiprocessing
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch


def run_ranks(
    fn: Callable[..., Any],
    world: int | Sequence[int],
    *args: Any,
    timeout_s: float = 120,
) -> list:
    """Call fn(*args) in every rank, as torchrun would; return what each returned.

    `world` is the number of ranks of one host, or of each of several hosts, all of them on this
    machine. An exception of a rank is returned as its text, after "error: ".
    """
    hosts = [world] if isinstance(world, int) else list(world)
    places = [(local, size) for size in hosts for local in range(size)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "crossbow.trainer"])  # paid once, not once a rank
    port = free_port()
    pipes, processes = [], []
    for rank, place in enumerate(places):
        ours, theirs = context.Pipe(duplex=False)
        whole = (rank, len(places), *place)
        process = context.Process(target=_rank, args=(theirs, whole, port, fn, args))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    results = []
    for pipe in pipes:
        try:
            results.append(pipe.recv() if pipe.poll(timeout_s) else "error: no answer in time")
        except EOFError:
            results.append("error: died")
        pipe.close()
    for process in processes:
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
    return results


def _rank(
    pipe: Any, place: tuple[int, ...], port: int, fn: Callable[..., Any], args: tuple
) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    os.environ |= {
        **dict(zip(names, map(str, place), strict=True)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    try:
        pipe.send(fn(*args))
    except Exception as error:
        pipe.send(f"error: {type(error).__name__}: {error}")
    pipe.close()


def free_port() -> int:
    """A port of the loopback interface that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
