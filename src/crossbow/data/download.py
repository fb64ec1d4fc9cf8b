"""Download: bring an archive here, through a package manager or from an address.

Package managers know mirrors, proxies and credentials; we only run them, in a directory of their
own, and watch what arrives on disk.
"""

import http.client
import os
import signal
import subprocess
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from crossbow.errors import DataError

Progress = Callable[[str, int, int | None], None]
"""(what is being done, bytes done, bytes in all where known)"""

_BLOCK_BYTES = 1 << 20
_POLL_S = 0.2
_TIMEOUT_S = 60.0  # without a byte from the network


def run_tool(command: list[str], cwd: Path, report: Progress, total: int | None) -> None:
    """Run a tool that is silent about its progress: what has arrived on disk tells."""
    stage = " ".join(command[:3])
    log = cwd / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,  # so that its own children can be ended with it
        )
        try:
            while process.poll() is None:
                arrived = _bytes_under(cwd)
                report(stage, min(arrived, total) if total else arrived, total)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
        finally:
            _end(process)
    if process.returncode:
        raise DataError(f"`{stage}` failed: {_complaint(log.read_text(errors='replace'))}")


def download(url: str, target: Path, limit: int, report: Progress) -> None:
    """Get what an address that the user gave points to, up to `limit` bytes."""
    request = urllib.request.Request(url, headers={"User-Agent": "crossbow"})
    try:
        with (
            urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response,
            target.open("wb") as file,
        ):
            total = int(response.headers.get("Content-Length") or 0) or None
            done = 0
            while block := response.read(_BLOCK_BYTES):
                done += len(block)
                if done > limit:
                    raise DataError(f"{url}: more than {limit} bytes, far more than the set")
                file.write(block)
                report(url, done, total)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise DataError(f"{url} can't be read: {error or type(error).__name__}") from error
    if total and done != total:
        raise DataError(f"{url}: the connection ended after {done} of {total} bytes; try again")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a tool and its children, gently first."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if process.poll() is None:
                os.killpg(process.pid, sign)
                process.wait(5)


def _complaint(log: str) -> str:
    """The one or two lines of a tool's output that say what failed."""
    marks = ("E: ", "npm error ", "npm ERR! ")
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix(mark) for line in lines for mark in marks if line.startswith(mark)]
    return ", ".join(errors[:2] or lines[-1:]) or "no output"


def _bytes_under(folder: Path) -> int:
    """What the files below a folder take, as far as they stay while we look."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total
