"""What the documentation says can be done, can be done."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from crossbow.cli import build_parser

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [block for name, block in found if name == language]


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


@each_page
def test_commands_can_be_parsed(page: Path) -> None:
    lines = (line for block in blocks(page, "") for line in block.splitlines())
    for line in lines:
        program, *words = shlex.split(line, comments=True) or [""]
        if program == "crossbow":
            build_parser().parse_args(words)


@pytest.mark.parametrize("name", ["README.md", "docs/guide/fleet.md", "docs/guide/training.md"])
def test_programs_run_in_the_order_in_which_they_are_read(name: str, tmp_path: Path) -> None:
    train = ["-m", "crossbow", "train", "resnet8-digits", "--epochs", "1", "--quiet"]
    for arguments in (train, *(["-c", block] for block in blocks(ROOT / name, "python"))):
        done = subprocess.run(
            [sys.executable, "-W", "error", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
