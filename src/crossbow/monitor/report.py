"""Report: runs as one HTML page that needs nothing else.

The page holds its style, its program and the figures; its own policy forbids it to load anything or
to run any other program. What comes from files is data to it, never markup.
"""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from crossbow.monitor.figures import figures
from crossbow.monitor.record import read

_PAGE = """\
<!DOCTYPE html>
<html lang="en"{live}>
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><div>
<h1><span id="title"></span>{badge}</h1>
<p class="soft" id="subtitle"></p>
</div></header>
<main>
<ul class="cards" id="cards"></ul>
<div class="tools" id="tools"></div>
<noscript>The plots need JavaScript.</noscript>
<div class="charts" id="charts"></div>
<section id="parts" hidden>
<h2>Where the time of a step goes</h2>
<figure><p class="soft">Of one learner: the mean over ranks and over the run.</p>
<div id="bars"></div><details><summary>Values</summary>
<div class="scroll" id="partvalues" tabindex="0" role="region" aria-label="Parts"></div>
</details></figure>
</section>
<section id="events" hidden>
<h2>What happened on the way</h2>
<div class="scroll" id="told" tabindex="0" role="region" aria-label="Events"></div>
</section>
<section><h2>Settings, results, machine</h2><div class="sheets" id="sheets"></div></section>
</main>
<footer>Made by <code>crossbow report</code>, from the runs' own logs.</footer>
<script type="application/json" id="figures">{figures}</script>
<script>{program}</script>
</body>
</html>
"""


def page(paths: Sequence[Path], *, poll_s: float | None = None) -> str:
    """The page of these runs.

    Args:
        paths: the runs' directories.
        poll_s: how often the page asks its server for news; None for a page that stands alone.
    """
    shown = figures([read(path) for path in paths])
    style, program = _part("report.css"), _part("report.js")
    names = ", ".join(run["name"] for run in shown["runs"])
    return _PAGE.format(
        live="" if poll_s is None else f' data-live="{round(1000 * poll_s)}"',
        badge="" if poll_s is None else '<span class="badge" id="live">live</span>',
        policy=_policy(program, style, is_live=poll_s is not None),
        title=html.escape(f"{names} - Crossbow").encode(errors="replace").decode(),
        style=style,
        program=program,
        figures=to_json(shown),
    )


def to_json(shown: dict[str, Any]) -> str:
    """The figures, as JSON that can't end the element it stands in."""
    return json.dumps(shown, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _part(name: str) -> str:
    return (files("crossbow.monitor") / "page" / name).read_text(encoding="utf-8")


def _policy(program: str, style: str, *, is_live: bool) -> str:
    """What the page may do: run its own program, use its own style, ask its own server."""
    allowed = [
        "default-src 'none'",
        "img-src data:",
        f"script-src '{_hash(program)}'",
        f"style-src '{_hash(style)}'",
        *(["connect-src 'self'"] if is_live else []),
    ]
    return "; ".join(allowed)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
