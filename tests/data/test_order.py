import numpy as np
import pytest

from crossbow.data.order import hash64, permutation, sample_indices, sample_keys


def stream(seed: int, n: int, start: int, stop: int) -> list[int]:
    return sample_indices(seed, n, np.arange(start, stop)).tolist()


@pytest.mark.parametrize("n", [1, 2, 7, 1000])
@pytest.mark.parametrize("epoch", [0, 1, 9])
def test_every_epoch_reads_every_sample_once(n: int, epoch: int) -> None:
    assert sorted(stream(3, n, epoch * n, (epoch + 1) * n)) == list(range(n))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {
        tuple(permutation(seed, epoch, 50).tolist()) for seed in range(5) for epoch in range(5)
    }
    assert len(orders) == 25


def test_large_and_negative_seeds_are_legal_and_distinct() -> None:
    seeds = (0, -1, 2**63, 2**64 - 2, 12345678901234567890)
    assert len({tuple(stream(seed, 40, 0, 40)) for seed in seeds}) == len(seeds)


@pytest.mark.parametrize("learners", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_learners_batches_are_disjoint_and_cover_the_epochs(learners: int, batch_size: int) -> None:
    n, epochs = 48, 10
    step = learners * batch_size
    read: list[int] = []
    for begin in range(0, n * epochs, step):
        for learner in range(learners):
            start = begin + learner * batch_size
            read += stream(0, n, start, start + batch_size)
    for epoch in range(epochs):
        assert sorted(read[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_the_stream_does_not_depend_on_how_it_is_asked_for() -> None:
    whole = stream(1, 10, 0, 64)
    by_one = [stream(1, 10, i, i + 1)[0] for i in range(64)]
    shuffled = np.random.default_rng(0).permutation(64)
    assert whole == by_one
    assert sample_indices(1, 10, shuffled).tolist() == [whole[i] for i in shuffled]
    assert stream(1, 10, 64, 64) == []


def test_asking_again_gives_the_same_and_the_answer_is_ours_to_change() -> None:
    first = sample_indices(5, 20, np.arange(20))
    kept = first.copy()
    first[:] = 0
    assert np.array_equal(sample_indices(5, 20, np.arange(20)), kept)


def test_the_cached_permutation_is_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        permutation(0, 0, 5)[0] = 1


def test_positions_beyond_32_bits_are_as_good() -> None:
    start = 7 * 2**40
    assert sorted(stream(0, 7, start, start + 7)) == list(range(7))
    keys = sample_keys(0, np.arange(2**40, 2**40 + 100))
    assert len(set(keys.tolist())) == 100


def test_first_places_are_uniform() -> None:
    firsts = [int(permutation(0, epoch, 10)[0]) for epoch in range(2000)]
    assert np.abs(np.bincount(firsts, minlength=10) - 200).max() < 5 * np.sqrt(200)


def test_keys_are_a_pure_function_of_seed_and_position() -> None:
    keys = sample_keys(0, np.arange(100))
    assert np.array_equal(sample_keys(0, np.arange(40, 60)), keys[40:60])
    assert not np.isin(sample_keys(1, np.arange(100)), keys).any()
    assert keys.dtype == np.uint64


def test_every_bit_of_a_key_is_set_half_of_the_time() -> None:
    keys = sample_keys(0, np.arange(10_000))
    bits = np.unpackbits(keys.view(np.uint8)).reshape(10_000, 64)
    assert np.abs(bits.mean(0) - 0.5).max() < 0.025


def test_the_hash_is_splitmix64_in_plain_integers() -> None:
    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    def advance(state: int, word: int) -> int:
        golden = 0x9E3779B97F4A7C15
        return mix(((state + word) * golden + golden) % 2**64)

    counters = [0, 1, 5, 2**40]
    expected = [advance(advance(advance(0, 7), 2**64 - 1), counter) for counter in counters]
    assert hash64(np.array(counters), 7, -1).tolist() == expected


def test_keys_have_a_hash_stream_of_their_own() -> None:
    order_of_keys = np.argsort(sample_keys(0, np.arange(30)), kind="stable")
    assert order_of_keys.tolist() != permutation(0, 0, 30).tolist()


def test_the_order_never_changes() -> None:
    assert stream(0, 10, 0, 12) == [0, 9, 1, 6, 7, 2, 3, 5, 4, 8, 0, 8]
    assert stream(42, 50_000, 49_998, 50_003) == [23550, 18845, 34770, 49577, 23033]
    assert sample_keys(0, np.arange(3)).tolist() == [
        630402048426002627,
        12726605054592257532,
        2773231684895401052,
    ]
    assert hash64(np.array([0, 1, 2**40]), 7, -1).tolist() == [
        14414934919065692059,
        8024785811065951594,
        2397321660157964160,
    ]
