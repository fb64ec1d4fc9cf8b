"""Loader: stretches of the stream, as prepared batches.

`read` is a generator that owns no state worth keeping: give it stretches of the stream and it
yields a batch for each. It may work ahead of its reader, by a chunk or in worker processes; where
training stands is known to the caller alone, as an integer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import tee
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from crossbow.data.augment import Prepare
from crossbow.data.datasets import Arrays
from crossbow.data.order import Indices, sample_indices, sample_keys

Stretch = tuple[int, int]
"""Positions start to stop of the stream."""

Batch = tuple[Any, Any]
"""(inputs, targets)"""

CHUNK_SAMPLES = 256
"""Samples prepared together: a call's fixed cost becomes small, and all still fits a cache."""


def stretches(start: int, stop: int, size: int) -> Iterator[Stretch]:
    """Cut the stream from start to stop into batches of `size`; the last may be smaller.

    >>> list(stretches(0, 7, 3))
    [(0, 3), (3, 6), (6, 7)]
    """
    for begin in range(start, stop, size):
        yield begin, min(begin + size, stop)


def read(
    data: Any,
    wanted: Iterable[Stretch],
    *,
    seed: int,
    prepare: Prepare | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
) -> Iterator[Batch]:
    """Yield the batch of every wanted stretch, in order."""
    if isinstance(data, Arrays):
        return _read_arrays(data, wanted, seed, prepare)
    return _read_dataset(data, wanted, seed, prepare, collate, num_workers)


def scan(
    data: Any,
    pieces: Sequence[Stretch],
    *,
    prepare: Prepare | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Iterator[Batch]:
    """Yield pieces of the data set, in its own order and without augmentation."""
    batches: Iterable[Batch]
    if isinstance(data, Arrays):
        batches = ((data.inputs[a:b], data.targets[a:b]) for a, b in pieces)
    else:
        batches = DataLoader(
            data,
            batch_sampler=[list(range(a, b)) for a, b in pieces],
            collate_fn=collate,
            generator=torch.Generator(),
        )
    for inputs, targets in batches:
        yield (prepare(inputs, None) if prepare else inputs), _labels(targets)


def _read_arrays(
    data: Arrays, wanted: Iterable[Stretch], seed: int, prepare: Prepare | None
) -> Iterator[Batch]:
    """Gather and prepare whole chunks, then hand out their parts."""
    for chunk in _chunks(wanted):
        positions = _positions(chunk)
        indices = torch.from_numpy(sample_indices(seed, len(data), positions))
        inputs = data.inputs[indices]
        targets = data.targets[indices]
        if prepare:
            inputs = prepare(inputs, sample_keys(seed, positions))
        sizes = [stop - start for start, stop in chunk]
        pieces = torch.split(inputs, sizes), torch.split(_labels(targets), sizes)
        yield from zip(*pieces, strict=True)


def _read_dataset(
    data: Any,
    wanted: Iterable[Stretch],
    seed: int,
    prepare: Prepare | None,
    collate: Callable[[list[Any]], Any] | None,
    num_workers: int,
) -> Iterator[Batch]:
    """Let torch's loader fetch and collate, in the order of the stream."""
    ahead, here = tee(wanted)
    batches: DataLoader[Any] = DataLoader(
        data,
        batch_sampler=_Indices(seed, len(data), ahead),
        collate_fn=collate,
        num_workers=num_workers,
        generator=torch.Generator(),  # its own, so that reading draws nothing from the learner's
    )
    for stretch, (inputs, targets) in zip(here, batches, strict=True):
        if prepare:
            inputs = prepare(inputs, sample_keys(seed, _positions([stretch])))
        yield inputs, _labels(targets)


class _Indices:
    """The sample numbers of each stretch, as torch's loader asks for them."""

    def __init__(self, seed: int, n: int, wanted: Iterable[Stretch]) -> None:
        self.seed, self.n, self.wanted = seed, n, wanted

    def __iter__(self) -> Iterator[list[int]]:
        for stretch in self.wanted:
            yield sample_indices(self.seed, self.n, _positions([stretch])).tolist()


def _chunks(wanted: Iterable[Stretch]) -> Iterator[list[Stretch]]:
    """Group stretches until a chunk holds CHUNK_SAMPLES samples or more."""
    chunk: list[Stretch] = []
    held = 0
    for start, stop in wanted:
        chunk.append((start, stop))
        held += stop - start
        if held >= CHUNK_SAMPLES:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


def _positions(chunk: list[Stretch]) -> Indices:
    return np.concatenate([np.arange(start, stop) for start, stop in chunk])


def _labels(targets: Any) -> Any:
    """Targets as losses take them: bytes become 64-bit integers."""
    is_whole = isinstance(targets, Tensor) and not targets.is_floating_point()
    return targets.long() if is_whole else targets
