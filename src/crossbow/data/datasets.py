"""Data sets: readers of the formats in which they are published.

A reader checks what it reads (magic numbers, sizes, label ranges) and says what is wrong in one
line. Nothing is decoded or normalized here: images stay uint8 and tokens stay bytes, so that a
batch is small to move; `augment` turns it into what a model takes.
"""

import gzip
import math
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from crossbow.data.catalog import (
    EMBEDDED_DIR,
    Entry,
    default_data_dir,
    find_entry,
    find_member,
    how_to_get,
)
from crossbow.data.order import permutation
from crossbow.errors import DataError, InputError

__all__ = [
    "Arrays",
    "ImageFolder",
    "Split",
    "cifar10",
    "cifar100",
    "decode_image",
    "default_data_dir",
    "digits",
    "idx",
    "image_folder",
    "load",
    "mnist",
    "text",
    "vocabulary",
]

_IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png"}
_LAYOUT = "a set of images is ROOT/{train,val}/CLASS/*.{jpg,jpeg,png}"
_STORED_SIZE = 256  # ImageNet's convention: shorter side to 256, of which a model sees 224


@final
@dataclass(frozen=True, eq=False)
class Arrays(Dataset[tuple[Tensor, Tensor]]):
    """A data set in memory: sample i is (inputs[i], targets[i])."""

    inputs: Tensor
    targets: Tensor
    classes: int

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise InputError(
                f"{len(self.inputs)} inputs but {len(self.targets)} targets: give one for each"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.inputs[i], self.targets[i]


@final
@dataclass(frozen=True, eq=False)
class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images in files, decoded when asked for: sample i is (uint8 (3, 256, 256), class number)."""

    folder: Path
    names: tuple[str, ...]
    """What each class is called: its directory."""
    images: NDArray[np.bytes_]
    """File names: one block instead of a million strings that worker processes would copy."""
    labels: NDArray[np.int64]

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.names)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        label = int(self.labels[i])
        path = self.folder / self.names[label] / os.fsdecode(self.images[i])
        return decode_image(path, _STORED_SIZE), label


@final
@dataclass(frozen=True)
class Split:
    """What a model learns from, and what it is judged by."""

    train: Arrays | ImageFolder
    test: Arrays | ImageFolder


def load(name: str, data_dir: Path | str | None = None) -> Split:
    """Read a named set from DATA_DIR/NAME, or the embedded one."""
    entry = find_entry(name)
    if not entry.members:
        return digits()
    home = Path(data_dir) if data_dir is not None else default_data_dir()
    folder = home / name
    _check_members(entry, folder, home)
    split = _READERS[name](folder)
    _check_counts(entry, split, folder, home)
    return split


def digits() -> Split:
    """UCI's handwritten digits, which come with Crossbow: 1,797 gray images of 8 x 8.

    Every fifth image of each class, in a fixed hashed order, is for testing. The authors' order
    goes writer by writer, so a cut of it would test on other hands than it trains on.
    """
    whole = _labelled_images(EMBEDDED_DIR, "digits", classes=10)
    images = (whole.inputs.short() * 255 // 16).to(torch.uint8)  # published as 0..16
    order = permutation(seed=1998, epoch=0, n=len(whole))
    by_class = order[np.argsort(whole.targets.numpy()[order], kind="stable")]
    is_test = torch.zeros(len(whole), dtype=torch.bool)
    is_test[by_class[::5].copy()] = True
    return Split(
        Arrays(images[~is_test], whole.targets[~is_test], whole.classes),
        Arrays(images[is_test], whole.targets[is_test], whole.classes),
    )


def mnist(folder: Path, classes: int = 10) -> Split:
    """MNIST, and every set published in its four files, plain or gzipped."""
    return Split(
        _labelled_images(folder, "train", classes), _labelled_images(folder, "t10k", classes)
    )


def cifar10(folder: Path) -> Split:
    """CIFAR-10, the binary version."""
    names = [f"data_batch_{i}.bin" for i in range(1, 6)]
    return Split(
        _records([folder / name for name in names], num_labels=1, classes=10),
        _records([folder / "test_batch.bin"], num_labels=1, classes=10),
    )


def cifar100(folder: Path) -> Split:
    """CIFAR-100, the binary version, with its 100 fine labels."""
    return Split(
        _records([folder / "train.bin"], num_labels=2, classes=100),
        _records([folder / "test.bin"], num_labels=2, classes=100),
    )


def image_folder(root: Path) -> Split:
    """Images as ImageNet keeps them: ROOT/{train,val}/CLASS/*.{jpg,jpeg,png}."""
    train, test = _scan_images(root / "train"), _scan_images(root / "val")
    if train.names != test.names:
        odd = sorted(set(train.names) ^ set(test.names))[0]
        raise DataError(
            f"{root}: class {odd!r} is in one of train and val only; give both the same classes"
        )
    return Split(train, test)


def vocabulary(path: Path) -> bytes:
    """The bytes that occur in a file, in ascending order: token t stands for the t-th of them."""
    return bytes(sorted(set(_read_bytes(path))))


def text(path: Path, context_length: int) -> Split:
    """A text file as characters: the targets are the inputs, one character on.

    The first 90 % are for training. Sequences are views of one vector of tokens, side by side, so
    a file takes its own size in memory.
    """
    raw = _read_bytes(path)
    cut = len(raw) * 9 // 10
    if not 1 <= context_length < len(raw) - cut:
        raise DataError(
            f"{path}: the {len(raw) - cut} bytes for testing hold no sequence of context length"
            f" {context_length} and the character after it; take a longer text or a context of 1 up"
        )
    legal = bytes(sorted(set(raw)))
    tokens = torch.frombuffer(raw.translate(_rank_table(legal)), dtype=torch.uint8)
    return Split(
        _sequences(tokens[:cut], context_length, len(legal)),
        _sequences(tokens[cut:], context_length, len(legal)),
    )


def idx(path: Path, num_dims: int) -> Tensor:
    """Read a file of unsigned bytes in MNIST's format, mapped from disk unless it is gzipped."""
    with _explained(path):
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                raw = bytearray(file.read())
            shape = _idx_shape(path, bytes(raw[:16]), num_dims, len(raw))
            return torch.frombuffer(raw, dtype=torch.uint8, offset=4 + 4 * num_dims).view(shape)
        with path.open("rb") as file:
            shape = _idx_shape(path, file.read(16), num_dims, path.stat().st_size)
        # mode "c", copy on write, because torch wants writable memory; processes share the pages
        return torch.from_numpy(np.memmap(path, np.uint8, "c", 4 + 4 * num_dims, shape))


def _idx_shape(path: Path, head: bytes, num_dims: int, size: int) -> tuple[int, ...]:
    """Check magic number, shape and file size against each other."""
    start = 4 + 4 * num_dims
    if len(head) < start or head[:4] != bytes([0, 0, 8, num_dims]):
        raise DataError(
            f"{path}: not an idx file of bytes in {num_dims} dimensions; fetch it again"
        )
    shape = struct.unpack(f">{num_dims}I", head[4:start])
    if not math.prod(shape) or size != start + math.prod(shape):
        raise DataError(
            f"{path}: {size} bytes, but its header says {start + math.prod(shape)}; fetch it again"
        )
    return shape


def _labelled_images(folder: Path, part: str, classes: int) -> Arrays:
    """One part of a set of gray images in MNIST's format."""
    images_path = _member(folder, f"{part}-images-idx3-ubyte")
    labels_path = _member(folder, f"{part}-labels-idx1-ubyte")
    images, labels = idx(images_path, 3).unsqueeze(1), idx(labels_path, 1)
    if len(images) != len(labels):
        raise DataError(f"{labels_path}: {len(labels)} labels for {len(images)} images")
    return Arrays(images, _checked(labels, classes, labels_path), classes)


def _records(paths: Sequence[Path], num_labels: int, classes: int) -> Arrays:
    """CIFAR's records: label bytes, of which the last counts, then 3 x 32 x 32 bytes."""
    width = num_labels + 3072
    counts = [_num_records(path, width) for path in paths]
    images = np.empty((sum(counts), 3072), np.uint8)
    labels = np.empty(sum(counts), np.uint8)
    stop = 0
    for path, count in zip(paths, counts, strict=True):
        start, stop = stop, stop + count
        with _explained(path):
            records = np.memmap(path, np.uint8, "r", shape=(count, width))
        labels[start:stop] = records[:, num_labels - 1]
        _checked(torch.from_numpy(labels[start:stop]), classes, path)
        images[start:stop] = records[:, num_labels:]
    return Arrays(
        torch.from_numpy(images).view(-1, 3, 32, 32), torch.from_numpy(labels).long(), classes
    )


def _num_records(path: Path, width: int) -> int:
    with _explained(path):
        count, rest = divmod(path.stat().st_size, width)
    if rest or not count:
        raise DataError(
            f"{path}: {count * width + rest} bytes are no whole number of records of {width};"
            " fetch it again"
        )
    return count


def _checked(labels: Tensor, classes: int, path: Path) -> Tensor:
    """The labels as int64, when all of them name a class."""
    if (highest := int(labels.max())) >= classes:
        raise DataError(
            f"{path}: label {highest} is out of range (legal: 0 to {classes - 1}); fetch it again"
        )
    return labels.long()


def _sequences(tokens: Tensor, length: int, classes: int) -> Arrays:
    """Views of neighboring stretches, and of the same stretches one token on."""
    inputs = tokens[:-1].unfold(0, length, length)
    return Arrays(inputs, tokens[1:].unfold(0, length, length), classes)


def _rank_table(legal: bytes) -> bytes:
    """For `bytes.translate`: each legal byte becomes its place among them."""
    return bytes(legal.find(byte) % 256 for byte in range(256))


def _read_bytes(path: Path) -> bytearray:
    with _explained(path), path.open("rb") as file:
        return bytearray(file.read())


def _scan_images(folder: Path) -> ImageFolder:
    """List the image files of every class directory, in alphabetical order."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such directory; {_LAYOUT}")
    with _explained(folder):
        names = tuple(sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()))
        found = [_image_names(folder / name) for name in names]
    empty = [name for name, images in zip(names, found, strict=True) if not images]
    if empty or not names:
        raise DataError(f"{folder / empty[0] if empty else folder}: no images here; {_LAYOUT}")
    labels = np.repeat(np.arange(len(names)), [len(images) for images in found])
    return ImageFolder(folder, names, np.array([i for part in found for i in part]), labels)


def _image_names(folder: Path) -> list[bytes]:
    return sorted(
        os.fsencode(entry.name)
        for entry in os.scandir(folder)
        if os.path.splitext(entry.name)[1].lower() in _IMAGE_SUFFIXES
    )


def decode_image(path: Path, side: int) -> Tensor:
    """Read an image as uint8 (3, side, side), shorter side scaled to it and the middle cut out."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise InputError(
            "reading image files takes pillow: pip install 'crossbow[images]'"
        ) from None
    try:
        with Image.open(path) as image:
            image.draft("RGB", (2 * side, 2 * side))  # large JPEGs decode faster
            fitted = ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.BILINEAR)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: no image that can be read ({error}); remove it") from error
    return torch.from_numpy(np.array(fitted)).permute(2, 0, 1).contiguous()


def _check_members(entry: Entry, folder: Path, data_dir: Path) -> None:
    missing = [m.name for m in entry.members if find_member(folder, m.name) is None]
    if len(missing) == len(entry.members):
        raise DataError(f"{entry.name} is not in {data_dir}: run `{how_to_get(entry, data_dir)}`")
    if missing:
        raise DataError(f"{folder / missing[0]} is missing: run `{how_to_get(entry, data_dir)}`")


def _check_counts(entry: Entry, split: Split, folder: Path, data_dir: Path) -> None:
    """A file that was cut at a record's end reads well, but isn't the set."""
    for part, expected in ((split.train, entry.num_train), (split.test, entry.num_test)):
        shape = tuple(part[0][0].shape)
        if (len(part), shape) != (expected, entry.shape):
            raise DataError(
                f"{folder}: {len(part)} samples of shape {shape}, but {entry.name} has {expected}"
                f" of {entry.shape}: run `{how_to_get(entry, data_dir)}`"
            )


def _member(folder: Path, name: str) -> Path:
    if (path := find_member(folder, name)) is None:
        raise DataError(f"{folder / name} is missing (plain or .gz)")
    return path


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what the operating system and gzip say into one line."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{path}: {reason}") from error


_READERS = {
    "mnist": mnist,
    "fashion-mnist": mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
}
