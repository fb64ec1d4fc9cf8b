"""Live: the report of runs that still train, served to this machine alone.

The page asks for news once a second, and gets them if a file of a run has changed.
"""

from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from crossbow.errors import InputError
from crossbow.monitor.figures import figures
from crossbow.monitor.record import read
from crossbow.monitor.report import page, to_json

HOST = "127.0.0.1"
POLL_S = 1.0


class Server(ThreadingHTTPServer):
    """Serves the report of some runs on the loopback interface."""

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], port: int) -> None:
        """Listen.

        Args:
            paths: the runs' directories.
            port: 0 takes a free one.
        """
        self.paths = paths
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise InputError(
                f"port {port} can't be listened on ({error.strerror}): give another --port"
            ) from error

    @property
    def address(self) -> str:
        """Where a browser finds the page."""
        return f"http://{HOST}:{self.server_port}/"

    def version(self) -> str:
        """Another text whenever a file of a run has changed."""
        names = ("log.jsonl", "config.json", "result.json")
        return "-".join(_state(path / name) for path in self.paths for name in names)


class _Handler(BaseHTTPRequestHandler):
    """Answers for the page and for its figures."""

    server: Server

    def do_GET(self) -> None:
        """Answer, unless another site's page asks under a name of its own."""
        asked = urlsplit(self.path)
        if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):
            self._answer(403, "text/plain", "asked under another name")
        elif asked.path == "/":
            self._answer(200, "text/html", page(self.server.paths, poll_s=POLL_S))
        elif asked.path == "/figures.json":
            self._news(parse_qs(asked.query).get("known", [""])[0])
        else:
            self._answer(404, "text/plain", "not here")

    def _news(self, known: str) -> None:
        version = self.server.version()
        if version == known:
            self._answer(204, "application/json", "")
        else:
            shown = figures([read(path) for path in self.server.paths])
            self._answer(200, "application/json", to_json(shown), version)

    def _answer(self, status: int, kind: str, text: str, version: str = "") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Version", version)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def _state(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return "0"
    return f"{status.st_mtime_ns:x}.{status.st_size:x}"
