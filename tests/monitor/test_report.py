"""The page itself, in a browser: what it draws, what it says, and that it complains of nothing."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.browser import Browser, browser, needs_browser
from tests.monitor.test_record import at, written

from crossbow.cli import main
from crossbow.monitor.report import page

CHARTS = (
    *("metric", "loss", "speed", "rate", "learners"),
    *("gain", "critical", "noise", "distance", "cosine", "wire"),
)
FIND = "find((button) => button.textContent === arguments[0])"
LENGTHS = "return [...document.querySelectorAll(arguments[0])].map((e) => e.getTotalLength())"
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>&lt;\u2028"


def made_up(folder: Path, learners: int, lr: float = 0.1) -> Path:
    """A run as `crossbow train` would write it, of a model that learns as the textbook says."""
    lines: list[object] = [
        {"event": "start", "task": "made-up", "parameters": 75002, "learners": learners, "ranks": 2}
    ]
    for i in range(1, 41):
        seconds, samples = i / (1 + learners), 250 * i
        noise = math.sin(7 * i * lr) / 10
        told = {"loss": 2 / i + noise / 5 + 0.2, "lr": lr * (1 - i / 41), "epoch": i / 10}
        gain = {"gain": learners - 1 / i, "critical_batch": 30 * i, "critical_batch_error": 2 * i}
        speed = {"samples_per_second": 3000 * learners + 900 * noise, "seconds": seconds}
        parts = {"data_s": 0.001, "compute_s": 0.006, "averaging_s": 0.002, "waiting_s": 0.001}
        lines.append(at(samples, **told, **speed, **gain, **parts, variance=9 / i, signal=1 / i))
        if i % 4 == 0:
            apart = {"relative_distance": 0.1 / i, "cosine": 0.5 - i / 100}
            lines.append(at(samples, "divergence", **apart, learner_metric=0.9 - 0.8 / i))
            lines.append(at(samples, "wire", sent_bytes=1e5 * i, whole_bytes=4e5 * i))
            scores = {"metric": 0.95 - 0.8 / i, "metric_name": "accuracy", "loss": 2 / i + 0.3}
            lines.append(at(samples, "eval", **scores, seconds=seconds, epoch=i / 10))
        if i == 20:
            lines.append(at(samples, "learners", learners=learners + 2, reason=HOSTILE))
    lines.append({"event": "end", "stopped_by": "epochs"})
    written(folder, *lines)
    (folder / "config.json").write_text(json.dumps({"lr": lr, "seed": 0, "target": 0.93}))
    return folder


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    text = page([made_up(tmp_path / "a", 2)])
    assert "default-src 'none'" in text
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


def test_nothing_from_files_can_become_markup(tmp_path: Path) -> None:
    folder = made_up(tmp_path / "<b>x", 2)
    (folder / "config.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    text = page([folder])
    assert "<b>" not in text
    assert "<img" not in text
    assert text.count("</script>") == 2


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def texts(window: Browser, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
    return window.run(script, selector)


@needs_browser
def test_the_page_draws_every_chart_with_the_numbers_of_the_log(
    tmp_path: Path, window: Browser
) -> None:
    runs = [made_up(tmp_path / "two", 2), made_up(tmp_path / "four", 4, lr=0.2)]
    out = tmp_path / "page.html"
    assert main(["report", *map(str, runs), "--out", str(out), "--quiet"]) == 0
    window.open(out)
    assert window.complaints() == []
    assert window.run("return document.title") == "two, four - Crossbow"
    for key in CHARTS:
        drawn = window.run(LENGTHS, f"#chart-{key} .plot path.trace")
        assert len(drawn) >= 2, key
        assert min(drawn) > 50, key
    logs = [[json.loads(line) for line in (r / "log.jsonl").read_text().splitlines()] for r in runs]
    kinds = [(log, kind) for log in logs for kind in ("train", "eval")]
    losses = [event["loss"] for log, kind in kinds for event in log if event["event"] == kind]
    window.run("document.querySelector('#chart-loss details').open = true")
    window.run("return new Promise((done) => setTimeout(done, 50))")
    assert [float(v) for v in texts(window, "#chart-loss td:last-child")] == losses
    assert texts(window, ".card .big") == ["93.00 %test accuracy"] * 2
    assert texts(window, ".bar")[0] == "60 %20 %10 %10 %"
    assert HOSTILE in texts(window, "#told td:last-child")[0]
    assert texts(window, "#sheets tr.differs")[0] == "lr0.10.2"
    assert window.complaints() == []


@needs_browser
def test_the_page_answers_to_keys_and_buttons(tmp_path: Path, window: Browser) -> None:
    out = tmp_path / "page.html"
    out.write_text(page([made_up(tmp_path / "a", 2), made_up(tmp_path / "b", 4)]))
    window.open(out)
    said = """
        const frame = document.querySelector("#chart-metric .plot");
        for (const key of arguments[0]) {
            frame.dispatchEvent(new KeyboardEvent("keydown", { key }));
        }
        return frame.getAttribute("aria-valuetext");
    """
    line = "1,000 samples: a · test 75.00 %, a · one learner alone 70.00 %, "
    assert window.run(said, ["Home"]).startswith(line)
    assert window.run(said, ["ArrowRight", "ArrowRight", "ArrowLeft"]).startswith("2,000 samples")
    window.run("document.querySelectorAll('#tools button')[2].click()")  # time
    assert window.run(said, ["End"]).startswith("13.3 s: a · test 93.00 %")
    traces = "return document.querySelectorAll('#chart-metric .plot path.trace').length"
    assert window.run(traces) == 4
    window.run("document.querySelectorAll('#tools button')[3].click()")  # run a
    assert window.run(traces) == 2
    for button in ("close-up", "log"):
        before = texts(window, "#chart-loss svg text")
        window.run(f"[...document.querySelectorAll('#chart-loss button')].{FIND}.click()", button)
        assert texts(window, "#chart-loss svg text") != before, button
    assert window.complaints() == []


@needs_browser
def test_screenshots_for_the_documentation(
    tmp_path: Path, window: Browser, pytestconfig: pytest.Config
) -> None:
    asked = pytestconfig.getoption("--screenshots")
    if asked is None:
        pytest.skip("made with --screenshots docs/images")
    runs = {"one-learner": 1, "four-learners": 4}
    for name, learners in runs.items():
        words = ["--learners", str(learners), "--epochs", "8", "--eval-every", "288", "--quiet"]
        command = [sys.executable, "-m", "crossbow", "train", "resnet8-digits", *words]
        subprocess.run([*command, "--run-dir", str(tmp_path / name)], check=True)
    out = tmp_path / "page.html"
    out.write_text(page([tmp_path / name for name in runs]))
    window.open(out)
    for scheme in ("light", "dark"):
        window.prefer(scheme)
        window.screenshot(Path(asked) / f"report-{scheme}.png", 1280, 1130)
    assert window.complaints() == []
