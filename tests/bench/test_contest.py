"""A contest gives peers their best, and keeps what was run."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from crossbow.bench import contest as contests
from crossbow.bench.accuracy import Entrant, Finish, Goal
from crossbow.bench.contest import TUNING_SEED, advantage, contest, tries

GOAL = Goal("mlp-digits", 0.9, 2, "sgd:momentum=0.9")
OURS = Entrant("crossbow", 16, 0.1)


def hold(monkeypatch, seconds, peers, path=None, seeds=3):
    """A contest whose runs take as long as `seconds` says; its lines, and the runs in order."""
    ran = []

    def run(entrant, goal, ranks, seed):
        ran.append((entrant, seed))
        taken = seconds(entrant)
        reached = math.isfinite(taken)
        return Finish(reached, taken if reached else 99.0, 1000, 1.0, 0.1, ())

    monkeypatch.setattr(contests, "run", run)
    lines = contest(GOAL, [OURS], peers, 2, seeds, path, lambda *_: None)
    return lines, ran


def test_a_peer_runs_untuned_and_at_the_best_that_was_tried(monkeypatch) -> None:
    found = tries("ddp", 16, 0.1, 2)
    taken = dict.fromkeys(found, 10.0) | {found[3]: 4.0, OURS: 2.0}
    lines, ran = hold(monkeypatch, taken.__getitem__, {"ddp": found})
    assert [seed for _, seed in ran].count(TUNING_SEED) == len(found)
    assert [(line.entrant, line.is_tuned) for line in lines] == [
        (OURS, False),
        (found[3], True),
        (found[0], False),
    ]
    assert advantage(lines) == 2.0


def test_a_target_that_was_missed_is_no_time(monkeypatch) -> None:
    found = tries("one process", 16, 0.1, 2)[:1]
    never = {found[0]: 3.0, OURS: math.inf}
    lines, _ = hold(monkeypatch, never.__getitem__, {"one process": found})
    assert [line.entrant for line in lines] == [found[0], OURS]
    assert advantage(lines) == 0.0


def test_each_seed_begins_with_another_entrant(monkeypatch) -> None:
    found = tries("ddp", 16, 0.1, 2)[:1]
    _, ran = hold(monkeypatch, lambda _: 1.0, {"ddp": found}, seeds=4)
    assert [entrant.kind for entrant, seed in ran if seed != TUNING_SEED] == [
        *("crossbow", "ddp", "ddp", "crossbow") * 2
    ]


def test_what_was_run_is_kept_and_not_run_again(monkeypatch, tmp_path: Path) -> None:
    found, path = tries("ddp", 16, 0.1, 2)[:2], tmp_path / "contest.json"
    before, ran = hold(monkeypatch, lambda _: 1.0, {"ddp": found}, path)
    after, again = hold(monkeypatch, lambda _: 1.0, {"ddp": found}, path)
    assert ran
    assert not again
    assert before == after
    more, third = hold(monkeypatch, lambda _: 1.0, {"ddp": found}, path, seeds=4)
    assert {seed for _, seed in third} == {3}
    page = next(iter(json.loads(path.read_text()).values()))
    assert {"cpu", "torch", "commit"} <= next(iter(page["runs"].values()))["machine"].keys()
    assert len(page["lines"]) == len(more)


@pytest.mark.parametrize("kind", ["ddp", "one process"])
def test_all_that_is_tried_differs_and_rates_follow_the_batch(kind) -> None:
    found = tries(kind, 16, 0.1, 4)
    assert len(set(found)) == len(found) == 8
    first = found[0]
    assert first.batch_size == 16
    assert first.lr == pytest.approx(0.4 if kind == "ddp" else 0.1)


def test_a_quick_contest_runs_end_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "crossbow", "bench", "accuracy", "--quick"]
    done = subprocess.run(
        [*command, "--json", f"{tmp_path}/out.json"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "times as fast as the best peer" in done.stdout
    (page,) = json.loads((tmp_path / "out.json").read_text()).values()
    assert {line["entrant"].partition(",")[0] for line in page["lines"]} == {
        "crossbow adaptive",
        "one process",
        "ddp",
    }
    assert all(line["median_seconds"] for line in page["lines"])


def test_a_contest_without_a_target_is_refused() -> None:
    command = [sys.executable, "-m", "crossbow", "bench", "accuracy", "mlp-digits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "needs a target: give --target" in done.stderr
