import time

import pytest

from crossbow.stats.watch import AVERAGING, COMPUTE, DATA, EVERY, PARTS, WAITING, Watch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which a test sets."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def step(watch: Watch, clock: list[float], learner: int = 0) -> None:
    """One of data for 1 s, computing for 2 s, averaging for 4 s with a wait of 3 s in it."""
    watch.step_begins(learner)
    clock[0] += 1
    watch.mark(COMPUTE)
    clock[0] += 2
    watch.mark(AVERAGING)
    clock[0] += 4
    watch.waited(clock[0] - 3, clock[0])
    watch.step_ended()
    clock[0] += 100  # an evaluation


def test_parts_of_a_step_add_up_to_it(clock: list[float]) -> None:
    watch = Watch()
    for _ in range(3 * EVERY):
        watch.round_begins()
        step(watch, clock, 0)
        step(watch, clock, 1)
    assert watch.read() == {DATA: 1, COMPUTE: 2, AVERAGING: 1, WAITING: 3}
    assert watch.read() is None
    assert watch.spans == []


def test_most_rounds_are_not_looked_at(clock: list[float]) -> None:
    watch = Watch()
    for _ in range(EVERY - 1):
        watch.round_begins()
        step(watch, clock)
    assert watch.read() is None
    watch.round_begins()
    step(watch, clock)
    assert watch.read() is not None


def test_spans_are_kept_of_all_rounds_that_are_asked_for(clock: list[float]) -> None:
    watch = Watch()
    watch.keep(range(2, 4))
    for number in range(6):
        assert watch.has_kept == (number > 4)
        watch.round_begins()
        step(watch, clock, learner=7)
    assert [span.round for span in watch.spans] == [2] * 4 + [3] * 4
    assert {span.learner for span in watch.spans} == {7}
    assert sorted(span.part for span in watch.spans[:4]) == sorted(PARTS)
    wait, outer = watch.spans[2:4]
    assert (wait.part, outer.part) == (WAITING, AVERAGING)
    assert outer.began <= wait.began < wait.ended <= outer.ended


def test_waits_outside_of_a_step_are_nobodys(clock: list[float]) -> None:
    watch = Watch()
    for _ in range(EVERY):
        watch.round_begins()
        watch.waited(0, 5)
        step(watch, clock)
        watch.waited(0, 5)
    parts = watch.read()
    assert parts is not None
    assert parts[WAITING] == 3
