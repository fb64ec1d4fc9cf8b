import math

import numpy as np
import pytest
import torch
from torch import Tensor

from crossbow.data.augment import images, tokens
from crossbow.data.order import Keys, sample_keys
from crossbow.errors import InputError

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def batch_of(n: int, size: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=generator)


def keys_of(n: int, start: int = 0) -> Keys:
    return sample_keys(0, np.arange(start, start + n))


def reference(image: Tensor, key: int, pad: int, crop: int, flip: bool) -> Tensor:
    """One sample, step by step in float64: pad the raw image, cut, mirror, normalize."""
    channels, height, width = image.shape
    padded = torch.zeros(channels, height + 2 * pad, width + 2 * pad, dtype=torch.float64)
    padded[:, pad : pad + height, pad : pad + width] = image
    top = (key % 2**24) * (padded.shape[1] - crop + 1) // 2**24
    left = (key // 2**24 % 2**24) * (padded.shape[2] - crop + 1) // 2**24
    cut = padded[:, top : top + crop, left : left + crop]
    cut = cut.flip(-1) if flip and key >= 2**63 else cut
    mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (MEAN, STD))
    return (cut / 255 - mean) / std


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(("pad", "crop"), [(0, None), (4, None), (0, 24), (2, 20), (3, 36)])
def test_a_prepared_batch_equals_the_step_by_step_recipe(
    pad: int, crop: int | None, flip: bool
) -> None:
    batch, keys = batch_of(40), keys_of(40)
    prepared = images(MEAN, STD, pad=pad, crop=crop, flip=flip)(batch, keys)
    pairs = zip(batch, keys.tolist(), strict=True)
    expected = torch.stack([reference(image, key, pad, crop or 32, flip) for image, key in pairs])
    assert prepared.dtype == torch.float32
    torch.testing.assert_close(prepared.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(1, 6), (16, 16, 5), (7,) * 9])
def test_preparing_parts_is_preparing_the_whole_bit_for_bit(sizes: tuple[int, ...]) -> None:
    batch, keys = batch_of(sum(sizes)), keys_of(sum(sizes), start=1000)
    prepare = images(MEAN, STD, pad=4, flip=True)
    parts = np.split(keys, np.cumsum(sizes)[:-1])
    together = torch.cat([prepare(b, k) for b, k in zip(batch.split(sizes), parts, strict=True)])
    assert torch.equal(together, prepare(batch, keys))


def test_preparing_leaves_the_batch_as_it_was() -> None:
    batch = batch_of(8)
    before = batch.clone()
    for prepare in (images(MEAN, STD), images(MEAN, STD, pad=2, crop=8, flip=True)):
        prepare(batch, keys_of(8))
        prepare(batch, None)
    assert torch.equal(batch, before)


def test_every_offset_is_drawn_about_equally_often() -> None:
    n = 81 * 200
    image = torch.zeros(1, 1, 9, 9, dtype=torch.uint8)
    image[0, 0] = torch.arange(81).view(9, 9)
    seen = images([0.0], [1.0], crop=1)(image.expand(n, -1, -1, -1), keys_of(n))
    counts = (seen * 255).round().long().flatten().bincount(minlength=81)
    assert (counts - 200).abs().max() < 5 * math.sqrt(200)


def test_half_of_the_samples_are_mirrored_whatever_their_offset() -> None:
    n = 4000
    image = torch.arange(16, dtype=torch.uint8).view(1, 1, 1, 16).expand(n, 1, 16, 16)
    prepared = images([0.0], [1.0], crop=8, flip=True)(image, keys_of(n))
    mirrored = prepared[:, 0, 0, 0] > prepared[:, 0, 0, 7]
    left = prepared[:, 0, 0].amin(1)
    assert abs(mirrored.float().mean().item() - 0.5) < 0.03
    correlation = torch.corrcoef(torch.stack([mirrored.float(), left]))[0, 1].item()
    assert abs(correlation) < 0.05


def test_evaluation_takes_the_middle_and_draws_nothing() -> None:
    batch = batch_of(4)
    normalize = images(MEAN, STD)
    assert torch.equal(images(MEAN, STD, pad=4, flip=True)(batch, None), normalize(batch, None))
    middle = images(MEAN, STD, crop=24, flip=True)(batch, None)
    assert torch.equal(middle, normalize(batch[:, :, 4:28, 4:28], None))


def test_padding_is_black_before_it_is_normalized() -> None:
    white = torch.full((1, 3, 32, 32), 255, dtype=torch.uint8)
    border = images(MEAN, STD, pad=4, crop=40)(white, None)[0, :, 0, 0]
    expected = -torch.tensor(MEAN) / torch.tensor(STD)
    torch.testing.assert_close(border, expected)


def test_normalized_training_pixels_have_mean_0_and_deviation_1() -> None:
    pixels = batch_of(64)
    mean = (pixels / 255).mean((0, 2, 3)).tolist()
    std = (pixels / 255).std((0, 2, 3)).tolist()
    prepared = images(mean, std)(pixels, None)
    torch.testing.assert_close(prepared.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-4)
    torch.testing.assert_close(prepared.std((0, 2, 3)), torch.ones(3), rtol=0, atol=1e-4)


def test_images_need_not_be_square() -> None:
    batch = torch.zeros(2, 3, 10, 20, dtype=torch.uint8)
    assert images(MEAN, STD, pad=2, flip=True)(batch, keys_of(2)).shape == (2, 3, 10, 20)
    assert images(MEAN, STD, crop=8)(batch, keys_of(2)).shape == (2, 3, 8, 8)


def test_tokens_become_what_embeddings_take() -> None:
    batch = torch.tensor([[1, 255]], dtype=torch.uint8)
    assert tokens()(batch, None).tolist() == [[1, 255]]
    assert tokens()(batch, keys_of(1)).dtype == torch.int64


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(2, 3, 8, 8),
        torch.zeros(2, 1, 8, 8, dtype=torch.uint8),
        torch.zeros(3, 8, 8, dtype=torch.uint8),
    ],
)
def test_what_is_no_batch_of_raw_images_is_refused(batch: Tensor) -> None:
    with pytest.raises(InputError, match=r"legal: torch\.uint8 \(B, 3, H, W\)"):
        images(MEAN, STD)(batch, None)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(InputError, match="crop 40 is larger"):
        images(MEAN, STD, crop=40)(batch_of(1), None)
    for mean, std in (((0.5,), (0.2, 0.2)), ((), ()), ((0.5,), (0.0,))):
        with pytest.raises(InputError, match="std above 0"):
            images(mean, std)
