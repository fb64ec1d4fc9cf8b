import io
import sys
import threading
from itertools import count
from types import SimpleNamespace

import pytest
from rich.console import Console

from crossbow.monitor import progress
from crossbow.monitor.progress import (
    Display,
    EvalReport,
    Live,
    Plain,
    Silent,
    TrainReport,
    choose_display,
)

TRAINED = TrainReport(samples=50, epoch=0.5, loss=1.25, lr=0.1, samples_per_second=1234, seconds=2)
SCORED = EvalReport(
    samples=100, epoch=1.0, loss=0.75, metric_name="accuracy", metric=0.875, seconds=3.2
)


def show(display: Display, title: str = "task [odd]: 100 samples") -> None:
    """What a run tells its display."""
    display.start(title, 100)
    display.trained(TRAINED)
    display.evaluated(SCORED)
    display.close()


def record() -> tuple[Live, io.StringIO]:
    screen = io.StringIO()
    return Live(Console(file=screen, force_terminal=True, width=100)), screen


def test_a_live_display_shows_the_bar_and_keeps_the_scores() -> None:
    display, screen = record()
    show(display)
    shown = screen.getvalue()
    for part in ("task [odd]: 100 samples", "epoch 0.5", " 50%", "loss 1.2500", "1,234 samples/s"):
        assert part in shown
    assert f"{SCORED}\n" in shown


def test_the_bar_moves_with_every_report() -> None:
    display, screen = record()
    display.start("task", 100)
    for samples in (20, 40):
        display.trained(TRAINED._replace(samples=samples))
        assert f" {samples}%" in screen.getvalue()
    display.close()


def test_a_live_display_gives_the_cursor_back() -> None:
    display, screen = record()
    show(display)
    hide, reveal = "\x1b[?25l", "\x1b[?25h"
    assert screen.getvalue().rindex(reveal) > screen.getvalue().rindex(hide)


def test_a_live_display_that_never_started_can_be_closed() -> None:
    display, screen = record()
    display.close()
    assert screen.getvalue() == ""


def test_a_live_display_runs_no_thread() -> None:
    display, _ = record()
    before = threading.active_count()
    display.start("task", 100)
    display.trained(TRAINED)
    assert threading.active_count() == before
    display.close()


def test_brackets_in_a_metrics_name_are_shown_and_not_obeyed() -> None:
    display, screen = record()
    display.start("task", 100)
    display.evaluated(SCORED._replace(metric_name="error [/top5]"))
    display.close()
    assert "error [/top5] 0.8750" in screen.getvalue()


def test_plain_lines_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    show(Plain())
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors == f"task [odd]: 100 samples\n{SCORED}\n"


def test_plain_lines_come_once_an_interval(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count(step=0.5)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    display = Plain()
    display.start("task", 100)
    for _ in range(100):
        display.trained(TRAINED)
    lines = capsys.readouterr().err.splitlines()[1:]
    assert 3 <= len(lines) <= 50 / progress.PLAIN_INTERVAL_S
    assert set(lines) == {"epoch   0.50    50%   training loss 1.2500   1,234 samples/s"}


def test_a_silent_display_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    show(Silent())
    assert capsys.readouterr() == ("", "")


def test_shares_are_shown_in_percent_and_other_metrics_as_they_are() -> None:
    assert "accuracy  87.50%" in str(SCORED)
    assert "loss 0.8750" in str(SCORED._replace(metric_name="loss"))


@pytest.mark.parametrize(
    ("quiet", "terminal", "kind"),
    [
        (True, True, Silent),
        (True, False, Silent),
        (False, True, Live),
        (False, False, Plain),
    ],
)
def test_the_display_suits_where_standard_error_goes(
    quiet: bool, terminal: bool, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    assert type(choose_display(quiet)) is kind
