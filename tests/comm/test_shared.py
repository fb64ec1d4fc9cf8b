"""Shared memory and clocks: order, waiting, and the end of a peer."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks

from crossbow.comm.shared import Carver, Clocks, Peer, map_block
from crossbow.comm.world import PeerError, World, join

SHM = Path("/dev/shm")


def blocks() -> list[Path]:
    return list(SHM.glob("crossbow-*"))


def clock_block(ranks: int = 2) -> torch.Tensor:
    return torch.zeros(Clocks.BYTES_EACH * ranks, dtype=torch.uint8)


def sleeper(seconds: float) -> multiprocessing.Process:
    process = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(seconds,))
    process.start()
    return process


@pytest.fixture
def peer():
    process = sleeper(60)
    peer = Peer("rank 1", process.pid)
    yield process, peer
    peer.close()
    process.kill()
    process.join()


def test_a_wait_returns_at_once_when_the_clock_has_come(peer):
    block = clock_block()
    Clocks(block, 1, {}).advance(3)
    start = time.perf_counter()
    assert Clocks(block, 0, {1: peer[1]}).wait(3)
    assert time.perf_counter() - start < 0.1


def test_a_wait_lasts_until_the_clock_comes(peer):
    block = clock_block()
    other = Clocks(block, 1, {})
    timer = threading.Timer(0.3, other.advance, (1,))
    timer.start()
    start = time.perf_counter()
    assert Clocks(block, 0, {1: peer[1]}).wait(1)
    assert 0.25 < time.perf_counter() - start < 5
    timer.join()


def test_a_dead_peer_is_noticed_within_seconds_and_named(peer):
    process, handle = peer
    clocks = Clocks(clock_block(), 0, {1: handle})
    threading.Timer(0.2, os.kill, (process.pid, signal.SIGKILL)).start()
    start = time.perf_counter()
    with pytest.raises(PeerError, match=rf"rank 1 \(process {process.pid}\) ended after 0 steps"):
        clocks.wait(1)
    assert time.perf_counter() - start < 3


def test_a_wait_can_be_given_up(peer):
    asked = []
    clocks = Clocks(clock_block(), 0, {1: peer[1]}, lambda step: asked.append(step) or True)
    assert not clocks.wait(7)
    assert asked == [7]


def test_cut_tensors_are_aligned_and_apart():
    carver = Carver(torch.zeros(4096, dtype=torch.uint8))
    first = carver.cut((3,), torch.float32)
    second = carver.cut((2, 2), torch.float64)
    second.fill_(1)
    assert first.tolist() == [0, 0, 0]
    assert (second.data_ptr() - first.data_ptr()) % 64 == 0


def share_a_block(num_bytes: int) -> tuple[float, int]:
    """Every rank writes its number; returns what rank 0 wrote, and how many names there are."""
    world = World.from_environment()
    join(world)
    block = map_block(world, num_bytes, "test")
    block[world.rank] = world.rank + 1
    world.gather(None)
    return block[: world.size].tolist(), len(blocks())


def test_all_ranks_map_one_block_whose_name_is_gone_at_once():
    assert run_ranks(share_a_block, 3, 4096) == [([1, 2, 3], 0)] * 3


def test_too_little_shared_memory_says_how_much_is_needed_and_leaves_nothing():
    status = os.statvfs(SHM)
    needed = status.f_frsize * status.f_blocks + 2**20
    for answer in run_ranks(share_a_block, 2, needed):
        assert "InputError: too little shared memory" in answer
        assert f"{needed:,} bytes are needed" in answer
    assert not blocks()


def die_before_mapping() -> None:
    world = World.from_environment()
    join(world)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    map_block(world, 4096, "test")


def test_a_block_whose_maker_was_killed_is_removed_at_the_next_start():
    process = sleeper(0)
    process.join()
    stale = SHM / f"crossbow-test-{process.pid}"
    stale.write_bytes(b"stale")
    alive = SHM / f"crossbow-test-{os.getpid()}"
    alive.write_bytes(b"in use")
    try:
        assert run_ranks(share_a_block, 2, 4096) == [([1, 2], 1)] * 2
        assert not stale.exists()
        assert alive.exists()
    finally:
        alive.unlink()


def test_a_rank_that_dies_while_ranks_find_each_other_leaves_no_block():
    answers = run_ranks(die_before_mapping, 2)
    assert answers[1] == "error: died"
    assert answers[0].startswith("error: ")
    assert not blocks()
