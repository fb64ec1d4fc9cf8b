"""The loader: whatever the way a stream is read, the same samples come out, bit for bit."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from crossbow.data import loader
from crossbow.data.augment import images
from crossbow.data.datasets import Arrays
from crossbow.data.loader import Stretch, read, scan, stretches
from crossbow.data.order import sample_indices, sample_keys

N, EPOCHS, SEED = 30, 3, 4
PREPARE = images((0.5,), (0.25,), pad=2, flip=True)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def arrays() -> Arrays:
    """Images whose target is their own number."""
    pixels = torch.randint(0, 256, (N, 1, 8, 8), dtype=torch.uint8)
    return Arrays(pixels, torch.arange(N, dtype=torch.uint8), classes=N)


class MapStyle(Dataset[tuple[Tensor, Tensor]]):
    """The same samples, one at a time."""

    def __init__(self, whole: Arrays) -> None:
        self.whole = whole

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.whole.inputs[index], self.whole.targets[index]


KINDS = {"arrays": lambda whole: whole, "map-style": MapStyle}
each_kind = pytest.mark.parametrize("kind", KINDS)


def seen(batches: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """All inputs and all targets, in the order in which they came."""
    inputs, targets = zip(*batches, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def expected(whole: Arrays, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """The stream's samples, fetched and prepared one at a time."""
    rows = []
    for position in np.arange(start, stop)[:, None]:
        index = torch.from_numpy(sample_indices(SEED, N, position))
        rows.append(PREPARE(whole.inputs[index], sample_keys(SEED, position)))
    order = torch.from_numpy(sample_indices(SEED, N, np.arange(start, stop)))
    return torch.cat(rows), whole.targets[order].long()


@each_kind
@pytest.mark.parametrize("size", [1, 4, 7, N, 2 * N + 1])
@pytest.mark.parametrize("start", [0, 13])
def test_any_batch_size_reads_the_stream_itself(kind: str, size: int, start: int) -> None:
    whole = arrays()
    wanted = stretches(start, EPOCHS * N, size)
    batches = read(KINDS[kind](whole), wanted, seed=SEED, prepare=PREPARE)
    assert same(seen(batches), expected(whole, start, EPOCHS * N))


@each_kind
@pytest.mark.parametrize("size", [1, 4, 7])
def test_every_sample_comes_once_an_epoch(kind: str, size: int) -> None:
    data = KINDS[kind](arrays())
    _, targets = seen(read(data, stretches(0, EPOCHS * N, size), seed=SEED))
    for epoch in targets.split(N):
        assert epoch.sort().values.tolist() == list(range(N))


@each_kind
@pytest.mark.parametrize("learners", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 4])
def test_learners_on_disjoint_stretches_see_what_one_learner_would(
    kind: str, learners: int, size: int
) -> None:
    data = KINDS[kind](arrays())
    every: list[Stretch] = list(stretches(0, EPOCHS * N, size))
    one = list(read(data, every, seed=SEED, prepare=PREPARE))
    for learner in range(learners):
        mine = list(read(data, every[learner::learners], seed=SEED, prepare=PREPARE))
        assert len(mine) == len(one[learner::learners])
        assert all(map(same, mine, one[learner::learners]))


@pytest.mark.parametrize("chunk", [1, 5, 16, 1000])
def test_the_size_of_a_chunk_changes_no_bit(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = arrays()
    usual = list(read(data, stretches(0, EPOCHS * N, 4), seed=SEED, prepare=PREPARE))
    monkeypatch.setattr(loader, "CHUNK_SAMPLES", chunk)
    other = list(read(data, stretches(0, EPOCHS * N, 4), seed=SEED, prepare=PREPARE))
    assert len(other) == len(usual)
    assert all(map(same, other, usual))


def test_a_chunk_is_read_when_its_first_batch_is_asked_for_and_not_before() -> None:
    asked: list[Stretch] = []

    def wanted() -> Iterator[Stretch]:
        for stretch in stretches(0, 10**9, 16):
            asked.append(stretch)
            yield stretch

    batches = read(arrays(), wanted(), seed=SEED)
    assert asked == []
    next(batches)
    assert len(asked) == loader.CHUNK_SAMPLES // 16


@pytest.mark.timeout(60)
def test_worker_processes_change_no_bit() -> None:
    data = MapStyle(arrays())
    alone, helped = (
        list(
            read(data, stretches(0, N + 10, 4), seed=SEED, prepare=PREPARE, num_workers=num_workers)
        )
        for num_workers in (0, 2)
    )
    assert len(alone) == len(helped)
    assert all(map(same, alone, helped))


@each_kind
def test_targets_come_as_losses_take_them(kind: str) -> None:
    whole = arrays()
    shares = Arrays(whole.inputs, torch.rand(N, 3), classes=3)
    for data, dtype in ((whole, torch.int64), (shares, torch.float32)):
        for batches in (
            read(KINDS[kind](data), [(0, 4)], seed=0),
            scan(KINDS[kind](data), [(0, 4)]),
        ):
            assert next(iter(batches))[1].dtype == dtype


@each_kind
@pytest.mark.parametrize("size", [1, 7, N, 100])
def test_scan_reads_in_order_and_without_augmentation(kind: str, size: int) -> None:
    whole = arrays()
    inputs, targets = seen(scan(KINDS[kind](whole), list(stretches(0, N, size)), prepare=PREPARE))
    assert targets.tolist() == list(range(N))
    assert torch.equal(inputs, PREPARE(whole.inputs, None))


def test_a_collate_function_makes_the_batches() -> None:
    def tens(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        targets = torch.stack([target for _, target in samples])
        return targets.float() * 10, targets

    data = MapStyle(arrays())
    for batches in (
        read(data, stretches(0, N, 4), seed=SEED, collate=tens),
        scan(data, list(stretches(0, N, 4)), collate=tens),
    ):
        assert all(torch.equal(inputs, targets * 10) for inputs, targets in batches)


@each_kind
def test_reading_draws_nothing_from_torchs_global_stream(kind: str) -> None:
    data = KINDS[kind](arrays())
    before = torch.get_rng_state()
    list(read(data, stretches(0, N, 4), seed=SEED, prepare=PREPARE))
    list(scan(data, list(stretches(0, N, 4)), prepare=PREPARE))
    assert torch.equal(torch.get_rng_state(), before)
