"""Captioned shapes: small images of two things, and one sentence that is right for each.

    a small red circle above a large blue square

A pure function of a seed, made in memory. The thing named first is the upper or the left one, so
no other caption of this form is right, and a model can be judged by exact matches. Two sizes, six
colors and four forms make 48 things, and 4,608 captions; images differ in places, shades and noise.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from crossbow.data.datasets import Arrays
from crossbow.data.order import hash64
from crossbow.data.sentences import Sentences, Words, rows, told

SIDE = 24
LENGTH = 11
"""Words of the longest caption, and its end."""

SIZES = {"small": 3.2, "large": 5.2}
COLORS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (230, 210, 50),
    "purple": (160, 60, 190),
    "white": (235, 235, 235),
}
FORMS = ("circle", "square", "triangle", "cross")
RELATIONS = ("above", "left of")

Numbers = NDArray[np.int64]
Plane = NDArray[np.float32]


class _Thing(NamedTuple):
    """What is drawn, of each image: (n,) all."""

    size: Numbers
    color: Numbers
    form: Numbers
    x: Numbers
    y: Numbers


def shapes(num_train: int = 10_000, num_test: int = 1_000, seed: int = 0) -> Sentences:
    """Draw images and write their captions.

    A sample is a row of int16: 3 x 24 x 24 pixels of 0 to 255, then START and the caption without
    its last word; its target is the caption with its END.
    """
    images, captions = _draw(np.arange(num_train + num_test), seed)
    words = Words.of(captions)
    sentences = rows([words.encode(caption) for caption in captions], LENGTH)
    pixels = torch.from_numpy(images).flatten(1)
    whole = torch.cat([pixels, told(sentences)], dim=1)
    return Sentences(
        train=Arrays(whole[:num_train], sentences[:num_train], len(words)),
        test=Arrays(whole[num_train:], sentences[num_train:], len(words)),
        decode=words.decode,
        references={i: [caption] for i, caption in enumerate(captions[num_train:])},
    )


def _draw(numbers: Numbers, seed: int) -> tuple[NDArray[np.int16], list[str]]:
    """Images (n, 3, side, side) and captions, each a function of its number and the seed."""

    def pick(stream: int, choices: int) -> Numbers:
        return (hash64(numbers, seed, stream) % np.uint64(choices)).astype(np.int64)

    relation = pick(0, len(RELATIONS))
    is_beside = relation == 1
    things = []
    for first, far in ((1, 6), (11, 17)):
        along, across = far - 1 + pick(first, 3), 9 + pick(first + 1, 6)
        things.append(
            _Thing(
                size=pick(first + 2, len(SIZES)),
                color=pick(first + 3, len(COLORS)),
                form=pick(first + 4, len(FORMS)),
                x=np.where(is_beside, along, across),
                y=np.where(is_beside, across, along),
            )
        )
    images = _background(numbers, seed)
    for stream, thing in enumerate(things):
        _paint(images, thing, shade=80 + pick(21 + stream, 40))
    upper, lower = (_names(thing) for thing in things)
    parts = zip(upper, relation, lower, strict=True)
    return images, [f"{one} {RELATIONS[r]} {other}" for one, r, other in parts]


def _background(numbers: Numbers, seed: int) -> NDArray[np.int16]:
    """Dark noise."""
    places = numbers[:, None] * SIDE**2 + np.arange(SIDE**2)
    noise = (hash64(places, seed, 30) % np.uint64(60)).astype(np.int16)
    return np.repeat(noise.reshape(-1, 1, SIDE, SIDE), 3, axis=1)


def _paint(images: NDArray[np.int16], thing: _Thing, shade: Numbers) -> None:
    """Paint one thing into each image, in so many hundredths of its color."""
    grid = np.arange(SIDE, dtype=np.float32)
    dx = grid[None, None, :] - _column(thing.x)  # (n, 1, side)
    dy = grid[None, :, None] - _column(thing.y)  # (n, side, 1)
    radius = _column(np.array(list(SIZES.values()))[thing.size])
    inside = np.select(
        [_column(thing.form) == form for form in range(len(FORMS))],
        [
            dx**2 + dy**2 <= radius**2,
            np.maximum(abs(dx), abs(dy)) <= 0.85 * radius,
            (2 * abs(dx) <= dy + radius) & (dy <= 0.85 * radius),
            (np.minimum(abs(dx), abs(dy)) <= 0.3 * radius)
            & (np.maximum(abs(dx), abs(dy)) <= radius),
        ],
        default=False,
    )
    color = np.array(list(COLORS.values()))[thing.color] * shade[:, None] // 120  # (n, 3)
    np.copyto(images, color[:, :, None, None].astype(np.int16), where=inside[:, None])


def _column(values: NDArray[np.generic]) -> Plane:
    return values.astype(np.float32)[:, None, None]


def _names(thing: _Thing) -> list[str]:
    kinds: Sequence[tuple[Sequence[str], Numbers]] = (
        (list(SIZES), thing.size),
        (list(COLORS), thing.color),
        (FORMS, thing.form),
    )
    columns = ([names[i] for i in chosen] for names, chosen in kinds)
    return [f"a {size} {color} {form}" for size, color, form in zip(*columns, strict=True)]
