"""Progress: what a person sees while a run trains.

On a terminal a live bar with a line for every evaluation; elsewhere plain lines, few enough to read
in a log file; or nothing. All three follow the same calls, and none of them runs a thread.
"""

import sys
import time
from typing import NamedTuple, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_INTERVAL_S = 10.0


class TrainReport(NamedTuple):
    """Where training stands, and the mean loss since the report before."""

    samples: int
    epoch: float
    loss: float
    lr: float
    samples_per_second: float
    seconds: float
    gain: float | None = None
    """On the learners' common move, where there is one."""
    variance: float | None = None
    """Of the gradient of one small batch."""
    signal: float | None = None
    """Squared length of the true gradient."""
    critical_batch: float | None = None
    """Samples."""
    critical_batch_error: float | None = None
    data_s: float | None = None
    """Of a learner's step, on the mean over ranks, as are the next three."""
    compute_s: float | None = None
    averaging_s: float | None = None
    waiting_s: float | None = None
    staleness: float | None = None
    """Steps of others that a step of the first rank came too late for, on average."""


class EvalReport(NamedTuple):
    """An evaluation."""

    samples: int
    epoch: float
    loss: float
    metric_name: str
    metric: float
    seconds: float
    last_loss: float | None = None
    """Of the weights as they are, where the scores are those of their moving average."""
    last_metric: float | None = None

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch:6.2f}   {self.metric_name} {format_metric(self)}   "
            f"loss {self.loss:.4f}   {self.seconds:7.1f} s"
        )


class Display(Protocol):
    """Somebody who is told how a run goes."""

    def start(self, title: str, total_samples: int) -> None:
        """Training begins."""

    def trained(self, report: TrainReport) -> None:
        """Training goes on; told about twice a second."""

    def evaluated(self, report: EvalReport) -> None:
        """The model was scored."""

    def note(self, line: str) -> None:
        """Something else is worth a line."""

    def close(self) -> None:
        """Training has ended, well or not."""


def format_metric(report: EvalReport) -> str:
    """Shares in percent, anything else as it is."""
    is_share = report.metric_name == "accuracy"
    return f"{report.metric:7.2%}" if is_share else f"{report.metric:.4f}"


def choose_display(quiet: bool) -> Display:
    """The display that suits where standard error goes."""
    if quiet:
        return Silent()
    return Live() if sys.stderr.isatty() else Plain()


class Silent:
    """Says nothing."""

    def start(self, title: str, total_samples: int) -> None:
        """Say nothing."""

    def trained(self, report: TrainReport) -> None:
        """Say nothing."""

    def evaluated(self, report: EvalReport) -> None:
        """Say nothing."""

    def note(self, line: str) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Say nothing."""


class Plain:
    """A line now and then, for log files and pipes."""

    def __init__(self) -> None:
        self._quiet_until = 0.0
        self._total = 0

    def start(self, title: str, total_samples: int) -> None:
        """Name the run."""
        self._total = total_samples
        self._quiet_until = time.monotonic() + PLAIN_INTERVAL_S
        self._print(title)

    def trained(self, report: TrainReport) -> None:
        """Print where training stands, if nothing was printed for a while."""
        if time.monotonic() >= self._quiet_until:
            self._print(
                f"epoch {report.epoch:6.2f}   {report.samples / self._total:4.0%}   "
                f"training loss {report.loss:.4f}   {report.samples_per_second:,.0f} samples/s"
            )

    def evaluated(self, report: EvalReport) -> None:
        """Print the scores."""
        self._print(str(report))

    def note(self, line: str) -> None:
        """Print it."""
        self._print(line)

    def close(self) -> None:
        """Nothing is open."""

    def _print(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        self._quiet_until = time.monotonic() + PLAIN_INTERVAL_S


class Live:
    """A bar that moves, under the scores so far."""

    def __init__(self, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:3.0f}%"),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
            auto_refresh=False,
            transient=True,
        )
        self._bar = self._progress.add_task("", total=None, state="")

    def start(self, title: str, total_samples: int) -> None:
        """Show the empty bar."""
        self._progress.console.print(title, style="bold", markup=False, highlight=False)
        self._progress.update(self._bar, description="epoch 0", total=total_samples)
        self._progress.start()

    def trained(self, report: TrainReport) -> None:
        """Move the bar."""
        state = f"loss {report.loss:.4f}  {report.samples_per_second:,.0f} samples/s"
        self._progress.update(
            self._bar,
            completed=report.samples,
            description=f"epoch {report.epoch:.1f}",
            state=state,
            refresh=True,
        )

    def evaluated(self, report: EvalReport) -> None:
        """Print the scores above the bar."""
        self._progress.console.print(str(report), markup=False, highlight=False)

    def note(self, line: str) -> None:
        """Print it above the bar."""
        self._progress.console.print(line, markup=False, highlight=False)

    def close(self) -> None:
        """Take the bar away and give the cursor back."""
        self._progress.stop()
