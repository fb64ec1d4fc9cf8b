"""What commands share about their output files."""

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from crossbow.errors import InputError


def check_json_path(path: Path | None) -> None:
    """Refuse a place for `--json` that can't be written, before the work and not after it."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise InputError(f"--json {path} can't be written: name a file in a folder that exists")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write the values as a person would like to read them."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    """Print a table as aligned plain text, which no terminal's width cuts.

    The last cell of a row may be of any length: nothing stands to its right.
    """
    inner = zip_longest(*(row[:-1] for row in rows), fillvalue="")
    widths = [max(map(len, column)) for column in inner]
    for *cells, last in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
        print("  ".join([*padded, last]))
