"""What commands share about their output files."""

import json
from collections.abc import Mapping
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
