"""Order: which sample stands where, as a pure function.

Training reads one endless stream, epoch after epoch. Position `P` of the stream is place `P % n`
of epoch `P // n`; every epoch is a fresh permutation of the n samples. Nothing here has state: the
permutation comes from hashing (seed, epoch, sample), so any process can ask for any position at
any time, and a *cursor*, the number of samples already read, is a plain integer.

k learners at batch b take the next k * b positions of the stream in learner order. A batch may
reach over the end of an epoch into the next one: so every step is full, and every sample is still
read exactly once an epoch.

The hash is splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014),
written out here because the streams of library generators may change between releases.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Keys = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ORDER, _KEYS = 1, 2  # the hash streams of this module


def _mix(x: Keys) -> Keys:
    """Splitmix64's finalizer: a bijection in which every input bit moves every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash64(counters: NDArray[np.integer], *words: int) -> Keys:
    """Hash each counter under the integers `words` to 64 uniform bits.

    >>> hash64(np.arange(3), 7).tolist() == [hash64(np.array([i]), 7).item() for i in range(3)]
    True
    """
    state = np.zeros(1, np.uint64)
    for word in words:
        state = _mix((state + np.uint64(word % 2**64)) * _GOLDEN + _GOLDEN)
    return _mix((state + counters.astype(np.uint64)) * _GOLDEN + _GOLDEN)


@lru_cache(maxsize=4)  # a batch touches two epochs at most; train and test streams share the cache
def permutation(seed: int, epoch: int, n: int) -> Indices:
    """The n samples in the order in which `epoch` reads them."""
    order = np.argsort(hash64(np.arange(n), seed, _ORDER, epoch), kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order


def sample_indices(seed: int, n: int, positions: Indices) -> Indices:
    """The samples that stand at these positions of the stream over n samples.

    >>> first_epoch = sample_indices(seed=0, n=5, positions=np.arange(5))
    >>> sorted(first_epoch.tolist())
    [0, 1, 2, 3, 4]
    """
    epochs, places = np.divmod(positions, n)
    indices = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        indices[here] = permutation(seed, epoch, n)[places[here]]
    return indices


def sample_keys(seed: int, positions: Indices) -> Keys:
    """64 random bits for each position of the stream: what augmentation draws from.

    They belong to the position and not to the learner, so the same samples look the same however
    many learners read them, and after a resume.
    """
    return hash64(positions, seed, _KEYS)
