"""Model: the trained model on disk, with plain keys, that loads into plain PyTorch."""

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_model(state: Mapping[str, Tensor], path: Path) -> None:
    """Write a state dict so that the file is either whole or not there.

    Tensors are copied out first: parameters may be views of one row, and tied ones share memory,
    which the format does not know.
    """
    tensors = {key: value.detach().cpu().contiguous().clone() for key, value in state.items()}
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(tensors, partial)
        replace_durably(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def replace_durably(partial: Path, path: Path) -> None:
    """Move a finished file to its name, such that it survives a power cut."""
    _sync(partial)
    partial.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
