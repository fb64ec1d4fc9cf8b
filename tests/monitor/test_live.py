import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.browser import browser, needs_browser
from tests.monitor.test_record import at, written

from crossbow.cli import main
from crossbow.errors import InputError
from crossbow.monitor.live import Server


@contextmanager
def served(*runs: Path) -> Iterator[Server]:
    with Server(runs, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: Server, path: str, host: str = "127.0.0.1") -> tuple[int, str, str]:
    """Status, version and body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", path, headers={"Host": host})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, answer.headers["X-Version"], body


def test_news_come_when_there_are_some(tmp_path: Path) -> None:
    run = written(tmp_path / "run", at(1, seconds=1, loss=2), "")
    with served(run) as server:
        status, version, body = ask(server, "/figures.json?known=")
        assert (status, len(json.loads(body)["charts"][0]["lines"][0]["points"])) == (200, 1)
        assert ask(server, f"/figures.json?known={version}")[0] == 204
        with (run / "log.jsonl").open("a") as log:
            log.write(json.dumps(at(2, seconds=2, loss=1)) + "\n")
        status, newer, body = ask(server, f"/figures.json?known={version}")
        assert (status, len(json.loads(body)["charts"][0]["lines"][0]["points"])) == (200, 2)
        assert newer != version


def test_only_this_machine_is_answered_and_only_what_is_there(tmp_path: Path) -> None:
    with served(written(tmp_path / "run", at(1))) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert ask(server, "/")[0] == ask(server, "/", host="localhost:80")[0] == 200
        assert ask(server, "/", host="elsewhere.example")[0] == 403
        assert ask(server, "/../log.jsonl")[0] == ask(server, "/log.jsonl")[0] == 404


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with served() as server, pytest.raises(InputError, match="give another --port"):
        Server([], server.server_port)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--live", "--port", "70000"], "give 0 to 65535"),
        (["--live", "--out", "x.html"], "exclude each other"),
    ],
)
def test_bad_input_is_refused(words: list[str], message: str, tmp_path: Path, capsys) -> None:
    assert main(["report", str(written(tmp_path / "run", at(1))), *words]) == 2
    assert message in capsys.readouterr().err


def test_ctrl_c_ends_it_cleanly(tmp_path: Path) -> None:
    run = written(tmp_path / "run", at(1))
    command = [sys.executable, "-m", "crossbow", "report", str(run), "--live"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # who starts the tests in the background may have them ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout
        address = process.stdout.readline().split()[0]
        with urllib.request.urlopen(address, timeout=20) as answer:
            assert answer.status == 200
        os.kill(process.pid, signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")


@needs_browser
def test_the_page_shows_news_by_itself(tmp_path: Path) -> None:
    losses = [{"event": "start", "task": "t"}, at(1, seconds=1, loss=2, epoch=1), ""]
    run = written(tmp_path / "run", *losses)
    wait = """
        return new Promise((done) => {
            const look = () => arguments[0](document) ? done(true) : setTimeout(look, 50);
            setTimeout(() => done(false), 8000);
            look();
        })
    """
    with served(run) as server, browser(tmp_path / "profile") as window:
        window.open(server.address)
        marks = "document.querySelectorAll('#chart-loss .marker').length"
        assert window.run(f"return {marks}") == 1
        with (run / "log.jsonl").open("a") as log:
            log.write(json.dumps(at(2, "eval", seconds=2, loss=1, metric=0.5, epoch=2)) + "\n")
        seen = "document.querySelector('#chart-metric') !== null"
        assert window.run(wait.replace("arguments[0](document)", seen))
        assert window.run("return document.getElementById('live').textContent") == "live"
        assert window.complaints() == []
