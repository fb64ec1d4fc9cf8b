"""Small data sets in the exact formats of the published ones."""

import struct
import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def random_bytes(*shape: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def idx_file(values: Bytes) -> bytes:
    return struct.pack(f">4B{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def mnist_files(num_train: int = 7, num_test: int = 3) -> dict[str, bytes]:
    files = {}
    for part, n in (("train", num_train), ("t10k", num_test)):
        files[f"{part}-images-idx3-ubyte"] = idx_file(random_bytes(n, 28, 28))
        files[f"{part}-labels-idx1-ubyte"] = idx_file(np.arange(n, dtype=np.uint8) % 10)
    return files


def records(labels: Bytes, seed: int = 0) -> bytes:
    """CIFAR's records, for labels (n, labels a record)."""
    return np.hstack([labels, random_bytes(len(labels), 3072, seed=seed)]).tobytes()


def cifar10_files(per_file: int = 4) -> dict[str, bytes]:
    labels = np.arange(per_file, dtype=np.uint8)[:, None] % 10
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    return {name: records(labels, seed) for seed, name in enumerate(names)}


def cifar100_files(per_class: int = 1) -> dict[str, bytes]:
    fine = np.repeat(np.arange(100, dtype=np.uint8), per_class)
    labels = np.stack([fine // 5, fine], axis=1)
    return {"train.bin": records(labels), "test.bin": records(labels, seed=1)}


def place(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def tar_gz(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, BytesIO(content))
    return path
