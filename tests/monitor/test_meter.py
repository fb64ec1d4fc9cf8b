import math

import pytest
import torch

from crossbow.errors import DivergedError
from crossbow.monitor import meter
from crossbow.monitor.meter import Clock, LossMeter


class Hands:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    moved = Hands()
    monkeypatch.setattr(meter, "time", moved)
    return moved


def test_a_reading_is_all_losses_since_the_last_one() -> None:
    losses = LossMeter()
    assert losses.read() == []
    for number, loss in enumerate((1.0, 2.0, 6.0)):
        losses.add(torch.tensor(loss), (number, number + 1))
    assert losses.read() == [1.0, 2.0, 6.0]
    losses.add(torch.tensor(5.0), (4, 5))
    assert losses.read() == [5.0]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_the_first_loss_that_is_no_number_is_named_with_its_samples(broken: float) -> None:
    losses = LossMeter()
    for start, loss in ((16, 1.0), (32, broken), (48, math.nan)):
        losses.add(torch.tensor(loss), (start, start + 16))
    with pytest.raises(DivergedError, match=rf"became {broken} in the batch of samples 32 to 48:"):
        losses.read()


def test_training_time_leaves_pauses_out(hands: Hands) -> None:
    clock = Clock()
    hands.now += 3
    with clock.paused():
        hands.now += 4
    hands.now += 5
    assert clock.seconds() == 12
    assert clock.train_seconds() == 8


def test_a_pause_that_ends_in_an_error_is_left_out_too(hands: Hands) -> None:
    clock = Clock()
    pause = clock.paused()
    pause.__enter__()
    hands.now += 4
    assert not pause.__exit__(RuntimeError, RuntimeError(), None)
    assert clock.train_seconds() == 0


def test_speeds_leave_the_first_step_and_pauses_out(hands: Hands) -> None:
    clock = Clock()
    hands.now += 30  # compiling
    clock.step_ended(16)
    for samples in (32, 48, 64):
        hands.now += 2
        clock.step_ended(samples)
    with clock.paused():
        hands.now += 50
    assert clock.first_step_seconds == 30
    assert clock.speed(64) == 48 / 6


def test_a_lap_runs_from_the_last_lap_to_now(hands: Hands) -> None:
    clock = Clock()
    hands.now += 30
    clock.step_ended(16)
    hands.now += 2
    assert clock.lap_speed(36) == 20 / 2
    with clock.paused():
        hands.now += 50
    hands.now += 4
    assert clock.lap_speed(136) == 100 / 4


def test_no_step_and_no_time_make_no_speed(hands: Hands) -> None:
    clock = Clock()
    assert clock.speed(0) == clock.lap_speed(0) == 0
    clock.step_ended(16)
    assert clock.speed(16) == clock.speed(32) == 0
