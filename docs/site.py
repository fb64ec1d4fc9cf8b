"""What `mkdocs.yml` asks for when the site is built: what would go stale if it were written down.

The navigation is made from the folders, the reference of the command line from its parsers, and
each file of the repository that a page links to gets a page that shows it.
"""

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from crossbow.cli import build_parser

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SECTIONS = {"Guide": "guide", "Algorithms": "algorithms", "Applications": "applications"}
FIRST = ["README.md", "training.md", "fleet.md", "report.md", "sma.md", "adaptive.md"]
REFERENCE = "reference/command-line.md"
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".json": "json", ".toml": "toml"}
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Make the navigation from what is there."""
    config.nav = [
        {"Start": "README.md"},
        *({title: _pages(folder)} for title, folder in SECTIONS.items() if _pages(folder)),
        {"Reference": [REFERENCE]},
        {"Design": [*_pages("design"), "log.md"]},
    ]
    return config


def on_pre_build(config: Any) -> None:
    """Take back the script that the plugin `offline` would load from elsewhere."""
    config.extra.pop("polyfills", None)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are generated."""
    files.append(File.generated(config, REFERENCE, content=command_line()))
    for path in sorted({path for page in DOCS.rglob("*.md") for path in _shown_by(page)}):
        made = File.generated(config, _page_of(path), content=_listing(path))
        made.inclusion = made.inclusion.NOT_IN_NAV
        files.append(made)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links out of the documentation lead to the pages that show the files."""
    source = DOCS / page.file.src_uri
    if not source.exists():
        return markdown

    def lead(match: re.Match[str]) -> str:
        path = _outside(source, match[2])
        if path is None:
            return match[0]
        if not path.is_file() or path.suffix == ".md":
            return match[1]  # a folder, or a page for those who have the repository
        return f"[{match[1]}]({os.path.relpath(DOCS / _page_of(path), source.parent)})"

    return LINK.sub(lead, markdown)


def command_line() -> str:
    """The help of every command, as its parser gives it."""
    os.environ["COLUMNS"] = "84"  # which argparse wraps to
    parts = ["# Command line\n"]
    for parser in _parsers(build_parser()):
        parts.append(f"## {parser.prog}\n\n```text\n{parser.format_help().rstrip()}\n```\n")
    return "\n".join(parts)


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _parsers(command)


def _pages(folder: str) -> list[str]:
    """The pages of a folder, those named first ahead."""
    names = sorted(path.name for path in (DOCS / folder).glob("*.md"))
    ahead = [name for name in FIRST if name in names]
    return [f"{folder}/{name}" for name in [*ahead, *(n for n in names if n not in ahead)]]


def _outside(page: Path, link: str) -> Path | None:
    """The file of the repository, outside of its documentation, that a page links to."""
    if "://" in link:
        return None
    path = (page.parent / link).resolve()
    is_outside = path.is_relative_to(ROOT) and not path.is_relative_to(DOCS)
    return path if is_outside else None


def _shown_by(page: Path) -> Iterator[Path]:
    """The files of the repository that a page links to and that can be shown as text."""
    for match in LINK.finditer(page.read_text(encoding="utf-8")):
        path = _outside(page, match[2])
        if path and path.is_file() and path.suffix != ".md":
            yield path


def _page_of(path: Path) -> str:
    return f"files/{path.relative_to(ROOT).as_posix()}.md"


def _listing(path: Path) -> str:
    """A page that shows a file; a longer fence than any that may be in it."""
    name, language = path.relative_to(ROOT).as_posix(), LANGUAGES.get(path.suffix, "text")
    return f"# {name}\n\n``````{language}\n{path.read_text(encoding='utf-8').rstrip()}\n``````\n"
