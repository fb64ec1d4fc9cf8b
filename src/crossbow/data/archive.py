"""Archives: the wanted files out of a folder, a tar or a zip, and nothing else.

An archive from somewhere is not to be trusted. So nothing is unpacked to paths that it chooses:
files are found by their last name, links and devices are passed over, and what comes out are
streams, of which the reader takes no more than it expects. Tar streams are cut off at a limit:
a header alone can ask for gigabytes of memory.
"""

import gzip
import os
import tarfile
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, cast, final

Streams = Iterator[tuple[str, IO[bytes]]]
"""(name, contents) of each file found; to be read before the next is asked for."""


def read_source(source: Path, names: Collection[str], limit: int) -> Streams:
    """Find files by name in a folder, tar, tar.gz or zip, gzipped files unpacked.

    Args:
        source: the folder or archive.
        names: the files wanted, without .gz.
        limit: bytes after which a tar is given up.
    """
    if source.is_dir():
        yield from _read_folder(source, names)
        return
    with source.open("rb") as file:
        magic = file.read(2)
        file.seek(0)
        if magic == b"PK":
            yield from _read_zip(file, names)
        elif magic == b"\x1f\x8b":
            with gzip.open(file) as unpacked:
                yield from read_tar(cast(IO[bytes], unpacked), names, limit)
        else:
            yield from read_tar(file, names, limit)


def read_tar(file: IO[bytes], names: Collection[str], limit: int) -> Streams:
    """Find files by name in a stream of tar."""
    with tarfile.open(fileobj=cast(IO[bytes], _Limited(file, limit)), mode="r|") as archive:
        for info in archive:
            name = _wanted(info.name, names)
            content = archive.extractfile(info) if name and info.isreg() else None
            if name and content:
                yield name, _gunzipped(info.name, content)


def read_tar_suffix(file: IO[bytes], suffix: str, limit: int) -> Iterator[tuple[str, bytes]]:
    """Path and contents of every file in a stream of tar whose name ends so."""
    with tarfile.open(fileobj=cast(IO[bytes], _Limited(file, limit)), mode="r|") as archive:
        for info in archive:
            content = archive.extractfile(info) if info.name.endswith(suffix) else None
            if content and info.isreg():
                yield info.name, content.read()


def _read_folder(folder: Path, names: Collection[str]) -> Streams:
    for parent, _, files in os.walk(folder):
        for path in (Path(parent) / file for file in sorted(files)):
            if (name := _wanted(path.name, names)) and path.is_file():
                with path.open("rb") as content:
                    yield name, _gunzipped(path.name, content)


def _read_zip(file: IO[bytes], names: Collection[str]) -> Streams:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if (name := _wanted(info.filename, names)) and not info.is_dir():
                with archive.open(info) as content:
                    yield name, _gunzipped(info.filename, content)


def _wanted(path: str, names: Collection[str]) -> str | None:
    name = PurePosixPath(path).name.removesuffix(".gz")
    return name if name in names else None


def _gunzipped(path: str, content: IO[bytes]) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(content)) if path.endswith(".gz") else content


@final
class _Limited:
    """A stream that refuses to give more than `limit` bytes."""

    def __init__(self, file: IO[bytes], limit: int) -> None:
        self.file, self.limit, self.given = file, limit, 0

    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        self.given += len(data)
        if self.given > self.limit:
            raise OSError(f"more than {self.limit} bytes come out of it, far more than the set")
        return data
