"""The documentation builds as a site, strictly, and needs nothing from elsewhere."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from crossbow.config import SINKS

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (find_spec("mkdocs") and find_spec("material")):
        pytest.skip("mkdocs-material is not installed: group docs of pyproject.toml")
    place = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return place


def test_every_page_of_the_documentation_is_there(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / name).exists() or name.name == "README.html", name
    assert (site / "index.html").exists()


def test_the_command_line_is_documented_by_its_parsers(site: Path) -> None:
    text = (site / "reference" / "command-line.html").read_text()
    for command in ("crossbow train", "crossbow bench throughput", "crossbow data fetch"):
        assert f"{command}<" in text, command
    assert all(name in text for name in ("--log-to", "--live", "--batch-size", *SINKS))


def test_files_that_pages_link_to_are_shown(site: Path) -> None:
    text = (site / "guide" / "fleet.html").read_text()
    assert 'href="../files/examples/with_crossbow.py.html"' in text
    assert "for as many learners as" in (site / "files/examples/with_crossbow.py.html").read_text()


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        tags = re.findall(r"<(?:script|link|img|iframe)[^>]*>", page.read_text())
        assert not [tag for tag in tags if re.search(r'(?:src|href)="(?:https?:)?//', tag)], page
