"""The estimators find a noise and a signal that are known, and say how sure they are."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from crossbow.stats.noise import (
    OUTLIER,
    NoiseMeter,
    OneLearnersNoise,
    Pieces,
    gain_of,
    split,
    sums_of,
)

N = 40_000


def gradients(k: int, scale: float, stream: np.random.Generator) -> torch.Tensor:
    """(k, N): a fixed true gradient of length 1, and noise whose variance is `scale`.

    Both are uneven: the first half of the numbers has nearly all of them.
    """
    weight = np.where(np.arange(N) < N // 2, 1.0, 0.1)
    signal = weight / np.linalg.norm(weight)
    noise = stream.standard_normal((k, N)) * weight * math.sqrt(scale / (weight**2).sum())
    return torch.tensor(signal + noise, dtype=torch.float32)


def parameters() -> list[nn.Parameter]:
    """Numbers of several shapes, N in all."""
    shapes = [(100, 150), (7,), (3, 11, 13), (N - 15_000 - 7 - 429,)]
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


def give(ps: list[nn.Parameter], gradient: torch.Tensor) -> None:
    for p, part in zip(ps, gradient.split([p.numel() for p in ps]), strict=True):
        p.grad = part.reshape(p.shape)


def measure(k: int, scale: float, steps: int, seed: int = 0) -> NoiseMeter:
    """A meter that was shown gradients, a piece at a time."""
    stream, ps = np.random.default_rng(seed), parameters()
    pieces = Pieces(ps, k)
    meter, seen = NoiseMeter(pieces.count, k), torch.zeros(k, pieces.width)
    for step in range(steps):
        for row, gradient in zip(seen, gradients(k, scale, stream), strict=True):
            give(ps, gradient)
            pieces.copy(step % pieces.count, row)
        meter.add(step % pieces.count, *sums_of(seen))
    return meter


@pytest.mark.parametrize("k", [2, 8, 64])
@pytest.mark.parametrize("scale", [0.2, 5.0, 40.0])
def test_noise_and_signal_are_found_within_the_stated_error(k: int, scale: float) -> None:
    meter = measure(k, scale, 2400 // k)
    found = meter.read()
    assert found is not None
    assert found.variance == pytest.approx(scale, rel=0.1)
    assert abs(found.scale - scale) < 4 * found.scale_error
    assert found.scale_error < 0.5 * scale
    assert meter.gain == pytest.approx(gain_of(scale, 1.0, k), rel=0.15)


@pytest.mark.slow
def test_the_stated_error_is_neither_boast_nor_excuse() -> None:
    """Of many repetitions, about as much as a normal distribution has lies within it."""
    scale, within = 10.0, 0
    for seed in range(40):
        found = measure(8, scale, 150, seed).read()
        assert found is not None
        within += abs(found.scale - scale) < found.scale_error
    assert 0.4 < within / 40 < 0.95


def test_sums_are_split_without_bias() -> None:
    stream = np.random.default_rng(1)
    found = [split(*sums_of(gradients(2, 9.0, stream)), k=2) for _ in range(400)]
    variance, signal = np.mean(found, axis=0)
    assert variance == pytest.approx(9, rel=0.02)
    assert signal == pytest.approx(1, rel=0.1)


def test_pieces_cover_every_number_once() -> None:
    ps = parameters()
    give(ps, torch.arange(1.0, N + 1))
    for k in (1, 2, 64, 1000):
        pieces = Pieces(ps, k)
        out = torch.full((pieces.count, pieces.width), torch.nan)
        for piece, row in enumerate(out):
            pieces.copy(piece, row)
        assert out[out != 0].tolist() == list(range(1, N + 1))


def test_a_parameter_without_a_gradient_counts_as_zeros() -> None:
    p = nn.Parameter(torch.ones(10))
    out = torch.full((10,), torch.nan)
    Pieces([p], 2).copy(0, out)
    assert not out.any()


def test_a_gradient_in_another_memory_order_is_read_whole() -> None:
    p = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    p.grad = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    out = torch.zeros(120)
    Pieces([p], 2).copy(0, out)
    assert out.norm() == pytest.approx(p.grad.norm().item(), rel=1e-6)


@pytest.mark.parametrize(
    ("squares", "square_of_sum", "gain"),
    [(0.0, 0.0, 1.0), (2.0, 4.0, 1.0), (2.0, 0.0, 2.0), (math.nan, 1.0, 1.0), (math.inf, 1, 1.0)],
    ids=["zero gradient", "all agree", "all noise", "nan", "infinite"],
)
def test_the_gain_is_defined_for_any_gradients(squares, square_of_sum, gain) -> None:
    meter = NoiseMeter(1, 2)
    meter.add(0, squares, square_of_sum)
    assert meter.gain == gain


@pytest.mark.parametrize("k", [2, 3, 16])
def test_the_gain_lies_between_one_and_the_number_of_learners(k: int) -> None:
    stream = np.random.default_rng(2)
    meter = NoiseMeter(1, k)
    for _ in range(200):
        rows = torch.tensor(stream.standard_normal((k, 3)) * 10.0 ** stream.integers(-8, 8))
        meter.add(0, *sums_of(rows))
        assert 1 <= meter.gain <= k + 1e-9


def test_an_outlier_counts_for_little() -> None:
    calm, hit = measure(8, 10.0, 200), measure(8, 10.0, 200)
    hit.add(0, 1e12, 1e6)
    before, after = calm.read(), hit.read()
    assert before is not None
    assert after is not None
    assert after.variance < before.variance * (1 + OUTLIER * 0.2)


def test_nothing_is_said_before_every_piece_was_seen_twice() -> None:
    meter = NoiseMeter(2, 4)
    for piece in (0, 1, 0):
        meter.add(piece, 2.0, 3.0)
        assert meter.read() is None
    meter.add(1, 2.0, 3.0)
    assert meter.read() is not None


def test_smoothing_is_counted_in_small_batches() -> None:
    """However many learners read them, a thousand batches ago counts as much."""
    for k in (2, 10, 50):
        meter = NoiseMeter(1, k)
        for number in range(2000 // k):
            old = number < 1000 // k
            meter.add(0, 2.0 * k if old else 1.0 * k, 0.0)
        found = meter.read()
        assert found is not None
        expected = (1 - math.exp(-1)) + 2 * (math.exp(-1) - math.exp(-2))
        expected *= k / (k - 1) / (1 - math.exp(-2))
        assert found.variance == pytest.approx(expected, rel=0.05)


def test_a_meter_goes_on_from_its_state() -> None:
    one, other = measure(2, 5.0, 100), NoiseMeter(4, 2)
    other.load_state_dict(one.state_dict())
    assert other.read() == one.read()
    assert other.gain == one.gain


def test_one_learner_measures_by_two_steps_in_a_row() -> None:
    stream, ps = np.random.default_rng(3), parameters()
    noise = OneLearnersNoise(ps)
    for _ in range(2400):
        give(ps, gradients(1, 20.0, stream)[0])
        noise.look()
    found = noise.meter.read()
    assert found is not None
    assert abs(found.scale - 20) < 4 * found.scale_error
