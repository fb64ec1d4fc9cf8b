"""Help pages: paragraphs that say the same in two languages, out of HTML.

LibreOffice's help has the same pages in every language, and a paragraph keeps its id when it is
translated. So pairs need no guessing: same page, same id. Left out are code, paragraphs that nobody
translated, and those with parts for one platform or program only, which a page shows or hides.
"""

from collections.abc import Iterator, Mapping
from html.parser import HTMLParser

Page = dict[str, str]
"""Paragraph's id -> text."""

_PARAGRAPHS = frozenset(["p", "h1", "h2", "h3", "h4", "h5", "h6"])


def paragraphs(html: str) -> Page:
    """Read the paragraphs that have an id of their own.

    >>> paragraphs('<p id="a">One <b>two</b></p><p>no id</p><h1 id="b">Three</h1>')
    {'a': 'One two', 'b': 'Three'}
    """
    reader = _Reader()
    reader.feed(html)
    reader.close()
    return reader.page


def aligned(source: Mapping[str, Page], target: Mapping[str, Page]) -> Iterator[tuple[str, str]]:
    """Yield each pair of paragraphs once, in the order of the pages' names.

    >>> list(aligned({"1": {"a": "yes", "b": "no"}}, {"1": {"a": "ja", "b": "no"}}))
    [('yes', 'ja')]
    """
    seen = set()
    for name in sorted(source.keys() & target.keys()):
        for key, text in source[name].items():
            pair = text, target[name].get(key, "")
            if all(pair) and text != pair[1] and pair not in seen:
                seen.add(pair)
                yield pair


class _Reader(HTMLParser):
    """Gathers paragraphs; one that opens inside another ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.page: Page = {}
        self._open: tuple[str, str] | None = None  # tag and id
        self._parts: list[str] = []
        self._is_wanted = True

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin a paragraph, or see what is in it."""
        attributes = dict(attrs)
        if tag in _PARAGRAPHS:
            self._end()
            self._is_wanted = attributes.get("class") != "code"
            if key := attributes.get("id"):
                self._open, self._parts = (tag, key), []
        elif "hidden" in attributes:
            self._is_wanted = False
        elif tag == "br":
            self._parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        """End the paragraph."""
        if self._open and self._open[0] == tag:
            self._end()

    def handle_data(self, data: str) -> None:
        """Gather what it says."""
        if self._open:
            self._parts.append(data)

    def close(self) -> None:
        """Take the last one."""
        super().close()
        self._end()

    def _end(self) -> None:
        if self._open:
            key = self._open[1]
            # an id that comes twice says nothing about what belongs together
            is_new = key not in self.page
            text = " ".join("".join(self._parts).split())
            self.page[key] = text if is_new and self._is_wanted else ""
            self._open = None
