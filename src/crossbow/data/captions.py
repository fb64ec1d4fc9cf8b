"""Captions: images in files, and sentences about them, as COCO keeps them.

    ROOT/{train2017,val2017}/*.jpg
    ROOT/annotations/captions_{train2017,val2017}.json

Chen et al., Microsoft COCO Captions: Data Collection and Evaluation Server, 2015. Every caption is
a sample. Words are lower-case and without punctuation; those that are rare in training are unknown.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from crossbow.data.datasets import decode_image
from crossbow.data.sentences import Sentences, Words, rows, split, told
from crossbow.errors import DataError

SIDE = 64
LENGTH = 20
"""Words of a caption and its end; COCO's have 10.5 words on average."""


class Caption(NamedTuple):
    """One sentence about one image."""

    image: Path
    sentence: str


@final
@dataclass(frozen=True, eq=False)
class CaptionedImages(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is (pixels and the words told, the words to say), both rows of int16."""

    images: Sequence[Path]
    sentences: Tensor
    """(n, length)"""
    side: int
    classes: int

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        pixels = decode_image(self.images[i], self.side).flatten().short()
        sentence = self.sentences[i : i + 1]
        return torch.cat([pixels, told(sentence)[0]]), sentence[0]


def coco(root: Path, *, side: int = SIDE, length: int = LENGTH, at_least: int = 5) -> Sentences:
    """Read images and captions as COCO 2017 keeps them.

    Args:
        root: holds train2017, val2017 and annotations.
        side: of the images: the shorter side is scaled to it, and the middle cut out.
        length: most words of a caption.
        at_least: how often a word must occur in training to be known.
    """
    train, test = _captions(root, "train2017"), _captions(root, "val2017")
    words = Words.of((caption.sentence for caption in train), at_least)

    def dataset(captions: Sequence[Caption]) -> CaptionedImages:
        sentences = rows([words.encode(caption.sentence) for caption in captions], length)
        return CaptionedImages([c.image for c in captions], sentences, side, len(words))

    return Sentences(dataset(train), dataset(test), words.decode, _references(test))


def _references(captions: Sequence[Caption]) -> dict[int, list[str]]:
    """The first sample of each image, and all that was said of the image."""
    first: dict[Path, int] = {}
    references: dict[int, list[str]] = {}
    for i, (image, sentence) in enumerate(captions):
        said = references.setdefault(first.setdefault(image, i), [])
        said.append(" ".join(split(sentence)))
    return references


def _captions(root: Path, part: str) -> list[Caption]:
    """The captions of one part, in the order of the file."""
    path = root / "annotations" / f"captions_{part}.json"
    try:
        content = json.loads(path.read_text("utf-8"))
        files = {_number(image["id"]): str(image["file_name"]) for image in content["images"]}
        captions = [
            Caption(root / part / files[_number(note["image_id"])], str(note["caption"]))
            for note in content["annotations"]
        ]
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; captions are kept as ROOT/annotations/captions_{part}.json"
            f" and ROOT/{part}/*.jpg"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{path}: not captions in COCO's format ({reason})") from error
    if not captions:
        raise DataError(f"{path}: holds no captions")
    return captions


def _number(value: Any) -> int:
    if isinstance(value, int):
        return value
    raise TypeError(f"{value!r} is no number of an image")
