"""Meter: losses and time, gathered at almost no cost a step.

A step appends to a list and compares two clocks. Reading a loss would wait for the device, so
losses are read together when a report is due.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from crossbow.data.loader import Stretch
from crossbow.errors import DivergedError


class LossMeter:
    """The losses since the last reading."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._stretches: list[Stretch] = []

    def add(self, loss: Tensor, stretch: Stretch) -> None:
        """Take the loss of the batch that read this part of the stream."""
        self._losses.append(loss)
        self._stretches.append(stretch)

    def read(self) -> list[float]:
        """Return the losses since the last reading; refuse one that is not finite."""
        if not self._losses:
            return []
        losses = torch.stack(self._losses)
        broken = losses.isfinite().logical_not().nonzero()
        if len(broken):
            first = int(broken[0])
            start, stop = self._stretches[first]
            raise DivergedError(
                f"the loss became {losses[first].item()} in the batch of samples "
                f"{start} to {stop}: try a lower --lr, or a warm-up"
            )
        self._losses, self._stretches = [], []
        values: list[float] = losses.tolist()
        return values


class Clock:
    """Wall time of a run from its making on, with the time spent training kept apart.

    The first step holds compilation and first touches of memory: it counts as training time, but
    speeds leave it out.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._paused = 0.0
        self._first_samples = 0
        self.first_step_seconds = 0.0
        self._lap_seconds, self._lap_samples = 0.0, 0

    def step_ended(self, samples: int) -> None:
        """Note the end of a step, of which only the first one matters."""
        if not self._first_samples:
            self._first_samples = self._lap_samples = samples
            self.first_step_seconds = self._lap_seconds = self.seconds()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep what happens inside out of the training time."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - began

    def seconds(self) -> float:
        """Wall time so far."""
        return time.perf_counter() - self._start

    def train_seconds(self) -> float:
        """Of this, the time spent training."""
        return self.seconds() - self._paused

    def state_dict(self) -> dict[str, float]:
        """Where it stands."""
        return {
            "seconds": self.seconds(),
            "paused": self._paused,
            "first_samples": self._first_samples,
            "first_step_seconds": self.first_step_seconds,
        }

    def load_state_dict(self, state: Mapping[str, float], samples: int) -> None:
        """Go on from where another process stood after so many samples."""
        self._start = time.perf_counter() - state["seconds"]
        self._paused = state["paused"]
        self._first_samples = int(state["first_samples"])
        self.first_step_seconds = state["first_step_seconds"]
        self._lap_seconds, self._lap_samples = self.train_seconds(), samples

    def speed(self, samples: int) -> float:
        """Samples a second of training time, the first step left out."""
        return _rate(samples - self._first_samples, self.train_seconds() - self.first_step_seconds)

    def lap_speed(self, samples: int) -> float:
        """Samples a second since the last lap, which ends here."""
        now = self.train_seconds()
        speed = _rate(samples - self._lap_samples, now - self._lap_seconds)
        self._lap_seconds, self._lap_samples = now, samples
        return speed


def _rate(samples: int, seconds: float) -> float:
    return samples / seconds if samples and seconds > 0 else 0.0
