import math
import random
from collections.abc import Callable

import pytest

from crossbow.tune.learners import CREDIT_S, SHARE, Tuner

CHOICES = [2, 4, 6, 8, 12, 16]
WINDOW_S = 0.5

Curve = Callable[[int, float], float]
"""(learners, seconds) -> samples a second"""


class Run:
    """A run that is tuned, and where it was."""

    def __init__(self, start: int, total: float = math.inf) -> None:
        self.tuner = Tuner(start, CHOICES, 16, total)
        self.seconds, self.samples = 0.0, 0.0
        self.went: list[tuple[float, int]] = [(0.0, start)]

    def go_on(
        self,
        seconds: float,
        curve: Curve,
        noise: float = 0.0,
        critical: Callable[[float], float | None] = lambda _: None,
        seed: int = 0,
        spikes: float = 0.0,
    ) -> "Run":
        chance = random.Random(seed)
        end = self.seconds + seconds
        while self.seconds < end:
            speed = curve(self.tuner.learners, self.seconds) * max(0.1, chance.gauss(1, noise))
            if chance.random() < spikes:
                speed *= 0.4
            self.seconds += WINDOW_S
            self.samples += speed * WINDOW_S
            move = self.tuner.observe(self.seconds, int(self.samples), critical(self.seconds))
            if move:
                assert move.learners == self.tuner.learners
                assert move.reason
                self.went.append((self.seconds, move.learners))
        return self

    def moves_after(self, seconds: float) -> list[int]:
        return [k for when, k in self.went if when > seconds]


def peak_at(best: int) -> Curve:
    """Speed rises with learners up to the best number, and falls beyond."""
    return lambda k, _: 1000 * min(k / best, 1.0) ** 0.5 * min(best / k, 1.0) ** 0.5


@pytest.mark.parametrize("start", CHOICES)
@pytest.mark.parametrize("best", CHOICES)
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_it_gets_to_the_best_number_within_a_minute_and_stays(start, best, noise) -> None:
    run = Run(start).go_on(60, peak_at(best), noise)
    assert run.tuner.learners == best
    run.go_on(600, peak_at(best), noise, seed=1)
    assert run.moves_after(60) == []


@pytest.mark.parametrize("seed", range(10))
def test_on_a_plateau_it_ends_within_five_percent_and_is_still_for_ten_minutes(seed) -> None:
    curve = lambda k, _: {2: 900, 4: 990, 6: 1000, 8: 1005, 12: 1000, 16: 960}[k]  # noqa: E731
    run = Run(2).go_on(60, curve, noise=0.05, seed=seed)
    assert curve(run.tuner.kept, 0) > 0.95 * 1005
    run.go_on(600, curve, noise=0.05, seed=100 + seed)
    assert run.moves_after(60) == []


@pytest.mark.parametrize("start", [2, 16])
def test_tuning_costs_under_three_percent_of_ten_minutes(start) -> None:
    run = Run(start).go_on(600, peak_at(6), noise=0.05)
    assert run.tuner.spent_s < SHARE * 600
    assert run.tuner.spent_s <= CREDIT_S + 1


@pytest.mark.parametrize("seed", range(5))
def test_load_spikes_move_nothing(seed) -> None:
    run = Run(8).go_on(60, peak_at(8), noise=0.02, seed=seed, spikes=0.1)
    assert run.tuner.learners == 8
    run.go_on(600, peak_at(8), noise=0.02, seed=50 + seed, spikes=0.1)
    assert run.moves_after(60) == []


def test_a_load_of_a_few_seconds_moves_nothing() -> None:
    def curve(k: int, seconds: float) -> float:
        return peak_at(8)(k, seconds) * (0.5 if 100 < seconds < 105 else 1)

    assert Run(8).go_on(300, curve, noise=0.02).moves_after(60) == []


def test_it_adapts_to_a_lasting_drop_and_recovers() -> None:
    def curve(k: int, seconds: float) -> float:
        return peak_at(2)(k, seconds) * 0.6 if 100 <= seconds < 250 else peak_at(8)(k, seconds)

    run = Run(8).go_on(100, curve, noise=0.02)
    assert run.tuner.kept == 8
    assert run.go_on(60, curve, noise=0.02, seed=1).tuner.kept == 2
    run.go_on(90, curve, noise=0.02, seed=2)
    assert run.go_on(60, curve, noise=0.02, seed=3).tuner.kept == 8
    assert run.tuner.spent_s <= max(CREDIT_S, SHARE * run.seconds) + 1


def test_learners_are_added_only_if_noise_makes_them_count() -> None:
    flat = lambda k, _: 1000.0 * k**0.3  # noqa: E731
    few = Run(4).go_on(60, flat, noise=0.01, critical=lambda _: 10.0)
    many = Run(4).go_on(60, flat, noise=0.01, critical=lambda _: 1e6)
    assert (few.tuner.kept, many.tuner.kept) == (2, 16)


def test_noise_that_grows_brings_learners_in() -> None:
    curve = lambda k, _: 1000.0 * k**0.3  # noqa: E731
    run = Run(2).go_on(60, curve, noise=0.01, critical=lambda _: 10.0)
    assert run.tuner.kept == 2
    run.go_on(400, curve, noise=0.01, critical=lambda _: 1e5)
    assert run.tuner.kept == 16


def test_a_run_is_left_alone_that_ends_before_tuning_could_pay() -> None:
    second = 1000  # samples, at the best number
    assert Run(2, total=60 * second).go_on(60, peak_at(8)).tuner.learners == 2
    assert Run(2, total=600 * second).go_on(60, peak_at(8)).tuner.learners == 8


def test_no_more_learners_than_the_limit() -> None:
    run = Run(4)
    run.tuner.limit(6)
    run.go_on(60, lambda k, _: 100.0 * k)
    assert max(k for _, k in run.went) == 6


def test_windows_without_samples_or_time_say_nothing() -> None:
    tuner = Tuner(2, CHOICES, 16)
    assert all(tuner.observe(1.0, 100, None) is None for _ in range(50))
    assert tuner.learners == 2


def test_the_same_observations_lead_to_the_same_moves() -> None:
    one, other = (Run(12).go_on(200, peak_at(4), noise=0.05, seed=7) for _ in range(2))
    assert one.went == other.went
