"""Files: trees on disk, as safetensors that are checked before anything is made of them.

A file is 8 bytes that give the length of a JSON header, the header, and the tensors' bytes. The
tree that they are the leaves of is JSON, too, and stands in the header as metadata. Any reader of
safetensors can read the tensors; nothing in the format can run.

Reading trusts nothing: sizes are compared with what the file holds before memory is taken, and each
tensor with its place in the file before it is made.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crossbow.checkpoint.tree import UnsavableError, pack, unpack
from crossbow.errors import CrossbowError

MOST_HEADER_BYTES = 1 << 26
MOST_DIMENSIONS = 16
_LENGTH_BYTES = 8
_TREE = "tree"

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class DamagedError(CrossbowError):
    """A file of a checkpoint that isn't what was written."""


class Written(NamedTuple):
    """A file as it was written."""

    name: str
    num_bytes: int
    sha256: str


def write_tree(tree: Any, path: Path, *, durably: bool = True) -> Written:
    """Write a tree of tensors, which nobody changes meanwhile, and plain values.

    Args:
        tree: see `tree.py`.
        path: is made.
        durably: whether it has to survive a power cut.
    """
    tensors: dict[str, Tensor] = {}
    plain = pack(tree, "", tensors)
    return _write(tensors, {_TREE: json.dumps(plain, allow_nan=False)}, path, durably)


def write_tensors(tensors: Mapping[str, Tensor], path: Path, *, durably: bool = True) -> Written:
    """Write named tensors, as `read_tensors` and any reader of safetensors read them."""
    return _write(tensors, {}, path, durably)


def read_tree(path: Path, expected: Written | None = None) -> Any:
    """Return the tree of a file; refuse one that isn't what was written."""
    tensors, metadata = _read(path, expected)
    if _TREE not in metadata:
        raise DamagedError(f"{path} holds no state")
    plain = _parse(path, metadata[_TREE].encode())
    try:
        return unpack(plain, tensors.__getitem__)
    except (KeyError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: its state doesn't fit together") from error


def read_tensors(path: Path, expected: Written | None = None) -> dict[str, Tensor]:
    """Return the named tensors of a file; refuse one that isn't what was written."""
    return _read(path, expected)[0]


def check_file(path: Path, expected: Written) -> None:
    """Refuse a file that isn't what was written, without keeping what it holds."""
    digest = hashlib.sha256()
    try:
        _check_size(path, path.stat().st_size, expected)
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        raise DamagedError(f"{path} can't be read: {error.strerror}") from error
    _check_digest(path, digest.hexdigest(), expected)


def sync_folder(path: Path) -> None:
    """Let a folder's names survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], path: Path, durably: bool
) -> Written:
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise UnsavableError(f"{name!r} is {tensor.dtype}, which a checkpoint can't hold")
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        start = memoryview(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for piece in (start, *map(_bytes_of, tensors.values())):
            digest.update(piece)  # lets other threads compute meanwhile, as write does
            size += _write_all(file.fileno(), piece)
        if durably:
            os.fsync(file.fileno())
    return Written(path.name, size, digest.hexdigest())


def _write_all(handle: int, piece: memoryview) -> int:
    """Write all of it: one call may write less, of large pieces or on a disk that fills up."""
    done = 0
    while done < len(piece):
        done += os.write(handle, piece[done : done + (1 << 24)])
    return done


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data


def _read(path: Path, expected: Written | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        size = path.stat().st_size
        _check_size(path, size, expected)
        content = torch.empty(size, dtype=torch.uint8)
        view = content.numpy().data
        with path.open("rb", buffering=0) as file:
            done = 0
            while done < size and (got := file.readinto(view[done:])):
                done += got
    except OSError as error:
        raise DamagedError(f"{path} can't be read: {error.strerror}") from error
    if done < size:
        raise DamagedError(f"{path} became shorter while it was read")
    if expected:
        _check_digest(path, hashlib.sha256(view).hexdigest(), expected)
    return _parse_file(path, content, view)


def _parse_file(
    path: Path, content: Tensor, view: memoryview
) -> tuple[dict[str, Tensor], dict[str, str]]:
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    if length > min(len(view) - _LENGTH_BYTES, MOST_HEADER_BYTES):
        raise DamagedError(f"{path} is damaged: its header of {length} bytes doesn't fit")
    start = _LENGTH_BYTES + length
    header = _parse(path, bytes(view[_LENGTH_BYTES:start]))
    if not isinstance(header, dict):
        raise DamagedError(f"{path} is damaged: its header is no object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise DamagedError(f"{path} is damaged: its metadata isn't text")
    data = content[start:]
    return {name: _tensor(path, name, entry, data) for name, entry in header.items()}, metadata


def _tensor(path: Path, name: str, entry: Any, data: Tensor) -> Tensor:
    """One tensor, if what the header says of it is possible."""
    match entry:
        case {"dtype": str(kind), "shape": list(shape), "data_offsets": [begin, end]}:
            sizes = [*shape, begin, end]
            if (
                kind in _DTYPES
                and len(shape) <= MOST_DIMENSIONS
                and all(type(size) is int and 0 <= size <= len(data) for size in sizes)
                and end - begin == math.prod(shape) * _DTYPES[kind].itemsize
            ):
                # a copy where its bytes aren't aligned, which torch would refuse
                return data[begin:end].clone().view(_DTYPES[kind]).view(shape)
    raise DamagedError(f"{path} is damaged: {name[:80]!r} is no tensor of this file")


def _parse(path: Path, text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: its header is no JSON") from error


def _check_size(path: Path, size: int, expected: Written | None) -> None:
    if expected and size != expected.num_bytes:
        raise DamagedError(f"{path} has {size} bytes in the place of {expected.num_bytes}")


def _check_digest(path: Path, found: str, expected: Written) -> None:
    if found != expected.sha256:
        raise DamagedError(f"{path} is damaged: its SHA-256 isn't what was written")
