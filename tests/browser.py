"""A headless Chromium for tests, driven by the WebDriver protocol itself: it is JSON over HTTP."""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.ranks import free_port

FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]

needs_browser = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="Chromium and its driver are not here (Debian: chromium, chromium-driver)",
)


class Browser:
    """One page in one window."""

    def __init__(self, address: str) -> None:
        self._address = address

    def open(self, where: Path | str) -> None:
        """Load a file or an address."""
        self._post("url", url=where.as_uri() if isinstance(where, Path) else where)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a piece of JavaScript returns."""
        return self._post("execute/sync", script=script, args=arguments)

    def complaints(self) -> list[str]:
        """What the console got since the last time, warnings and errors."""
        entries = self._post("se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]

    def prefer(self, scheme: str) -> None:
        """Be a person who likes "light" or "dark" pages."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._devtools("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path, width: int, height: int) -> None:
        """Write what the window shows of the page at this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", **size)
        self.run("return new Promise((done) => requestAnimationFrame(() => setTimeout(done, 100)))")
        data = self._devtools("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def _devtools(self, command: str, **parameters: Any) -> Any:
        return self._post("goog/cdp/execute", cmd=command, params=parameters)

    def _post(self, place: str, **body: Any) -> Any:
        return _ask(f"{self._address}/{place}", "POST", body)


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start a browser with a new profile, and end it with all that it started."""
    port = free_port()
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_for(port, driver)
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {
                "binary": shutil.which("chromium"),
                "args": [*FLAGS, f"--user-data-dir={profile}"],
            },
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        address = f"http://127.0.0.1:{port}/session"
        made = _ask(address, "POST", {"capabilities": {"alwaysMatch": wanted}})
        session = f"{address}/{made['sessionId']}"
        try:
            yield Browser(session)
        finally:
            _ask(session, "DELETE", None)
    finally:
        driver.terminate()
        driver.wait(10)


def _wait_for(port: int, driver: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while driver.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError("chromedriver does not answer")


def _ask(address: str, method: str, body: Any) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, method=method)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["value"]
