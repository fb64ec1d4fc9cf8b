import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from crossbow.bench.crew import Late
from crossbow.cli import main
from crossbow.errors import CrossbowError
from crossbow.tune.plan import Found, Plan, Search, Space, learns_alike
from crossbow.tune.rehearsal import Candidate, Checked

SPACE = Space(cores=2, batch_size=16, precisions=("float32", "bf16"), layouts=(False, True))
LEARNERS, ALONE, DDP = Candidate(2, 2), Candidate(1, 1, threads=2), Candidate(2, 2, is_ddp=True)
LOSSES = [2.0 + 0.1 * math.sin(i) for i in range(200)]


class Simulated:
    """A machine whose speeds are known, with noise, and a clock that runs with its windows."""

    def __init__(
        self,
        speed: Callable[[Candidate], float],
        critical_batch: float | None = None,
        bf16_losses: Sequence[float] = LOSSES,
        compile_s: float = 1.0,
    ) -> None:
        self._speed, self._random = speed, random.Random(0)
        self._checked = [Checked(LOSSES, critical_batch), Checked(list(bf16_losses), None)]
        self.seconds, self.compile_s, self.ready = 0.0, compile_s, set[Candidate]()

    def make_ready(self, candidate: Candidate, timeout_s: float | None = None) -> None:
        self.ready.add(candidate)
        needed = self.compile_s if candidate.compile else 0.3
        self.seconds += min(needed, timeout_s or math.inf)
        if timeout_s is not None and needed > timeout_s:
            raise Late("too slow")

    def speed(self, candidate: Candidate, seconds: float) -> float:
        if candidate not in self.ready:
            self.make_ready(candidate)
        self.seconds += 1.5 * seconds
        return self._speed(candidate) * self._random.gauss(1, 0.01)

    def drop(self, candidate: Candidate) -> None:
        self.ready.discard(candidate)

    def check(self, ways: Sequence[Candidate], seconds: float, most: int) -> list[Checked]:
        self.seconds += seconds
        return self._checked[: len(ways)]


def search(player: Simulated, space: Space = SPACE, seconds: float = 60, most: int = 64) -> Found:
    clock = lambda: player.seconds  # noqa: E731
    return Search(player, space, seconds, lambda *_: None, clock=clock).run(most)


def plain_speed(c: Candidate) -> float:
    """Learners are faster than DDP and one process; flags and numbers change nothing much."""
    return {"learners": 1000.0, "ddp": 700.0, "one process": 600.0}[c.kind]


def test_the_fastest_is_chosen() -> None:
    found = search(Simulated(lambda c: plain_speed(c) * (1 + 0.2 * c.channels_last)))
    assert found.chosen.kind == "learners"
    assert found.chosen.channels_last
    assert found.trials[0].goodput == max(t.goodput for t in found.trials)


def test_it_says_ddp_and_one_process_where_they_win() -> None:
    assert search(Simulated(lambda c: 2000.0 if c.is_ddp else plain_speed(c))).chosen.kind == "ddp"
    slow = Simulated(lambda c: 1500.0 if c.threads == 2 else plain_speed(c))
    assert replace(search(slow).chosen, precision="float32", channels_last=False) == ALONE


def test_a_tie_with_ddp_is_not_won_by_it() -> None:
    assert search(Simulated(lambda c: 1005.0 if c.is_ddp else 1000.0)).chosen.kind != "ddp"


def test_more_learners_are_taken_only_where_noise_lets_them_count() -> None:
    crowd = lambda c: 1000.0 * (1 + 0.2 * (c.learners > 2)) if c.learners > 1 else 600.0  # noqa: E731
    assert search(Simulated(crowd)).chosen.learners > 2
    assert search(Simulated(crowd, critical_batch=1e6)).chosen.learners > 2
    assert search(Simulated(crowd, critical_batch=64.0)).chosen.learners == 2
    assert search(Simulated(crowd, critical_batch=1.0)).chosen.learners == 1


def test_no_more_learners_than_there_is_room_for() -> None:
    found = search(Simulated(lambda c: 100.0 * c.learners), most=4)
    assert max(t.candidate.learners for t in found.trials) == 4


def test_bf16_needs_evidence() -> None:
    fast = lambda c: plain_speed(c) * (1.5 if c.precision == "bf16" else 1)  # noqa: E731
    worse = [loss * 1.05 for loss in LOSSES]
    assert search(Simulated(fast)).chosen.precision == "bf16"
    refused = search(Simulated(fast, bf16_losses=worse))
    assert refused.chosen.precision == "float32"
    assert any("bf16: not recommended: mean loss" in note for note in refused.notes)
    trusting = replace(SPACE, needs_evidence=False)
    assert search(Simulated(fast, bf16_losses=worse), trusting).chosen.precision == "bf16"


def test_compiling_that_takes_too_long_is_given_up_with_a_note() -> None:
    fast = lambda c: plain_speed(c) * (1.5 if c.compile else 1)  # noqa: E731
    assert search(Simulated(fast, compile_s=5)).chosen.compile
    late = search(Simulated(fast, compile_s=500))
    assert not late.chosen.compile
    assert any("took longer to compile" in note for note in late.notes)


def test_a_search_keeps_to_its_time() -> None:
    for compile_s in (1.0, 500.0):
        player = Simulated(plain_speed, compile_s=compile_s)
        search(player)
        assert player.seconds < 75


def test_without_time_the_plainest_of_each_kind_are_measured_and_nothing_breaks() -> None:
    found = search(Simulated(plain_speed), seconds=1e-6)
    assert {t.candidate for t in found.trials} == {LEARNERS, ALONE, DDP}


def test_a_candidate_that_fails_is_left_out_with_a_note() -> None:
    def speed(c: Candidate) -> float:
        if c.precision == "bf16":
            raise CrossbowError("no such kernel")
        return plain_speed(c)

    found = search(Simulated(speed))
    assert {t.candidate.precision for t in found.trials} == {"float32"}
    assert any(note.endswith("no such kernel") for note in found.notes)


def test_if_the_plainest_fails_so_does_the_search() -> None:
    def broken(_: Candidate) -> float:
        raise CrossbowError("no data")

    for cores in (1, 2):
        with pytest.raises(CrossbowError, match="no data"):
            search(Simulated(broken), replace(SPACE, cores=cores))


def test_nothing_is_compiled_if_that_is_not_wanted() -> None:
    found = search(Simulated(plain_speed), replace(SPACE, compiles=False))
    assert not any(t.candidate.compile for t in found.trials)


def test_on_one_core_there_is_no_ddp() -> None:
    found = search(Simulated(plain_speed), replace(SPACE, cores=1))
    assert {t.candidate.ranks for t in found.trials} == {1}
    assert found.best("ddp") is None


def test_a_precision_learns_alike_within_chance_and_a_hundredth() -> None:
    noise = random.Random(1)
    jittered = [loss + noise.gauss(0, 0.05) for loss in LOSSES]
    assert learns_alike(LOSSES, jittered)[0]
    assert learns_alike(LOSSES, [loss - 0.5 for loss in LOSSES])[0]  # better is no fault
    assert not learns_alike(LOSSES, [loss + 0.1 for loss in LOSSES])[0]
    assert not learns_alike(LOSSES, [*LOSSES[:150], *[math.nan] * 50])[0]
    assert learns_alike(LOSSES[:30], jittered)[0]
    assert not learns_alike(LOSSES[:23], LOSSES)[0]  # too few to see


def test_options_are_what_train_understands() -> None:
    from crossbow.cli import build_parser

    way = Candidate(1, 1, 2, precision="bf16", channels_last=True, compile=True)
    for candidate in (LEARNERS, ALONE, way):
        args = build_parser().parse_args(["train", "mlp-digits", *candidate.options().split()])
        assert (args.learners, args.ranks) == (candidate.learners, candidate.ranks)
        assert (args.threads or 1) == candidate.threads
        assert (args.precision or "float32") == candidate.precision
        assert bool(args.compile) == candidate.compile


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seconds", "0"], "--seconds 0.0 is not possible"),
        (["--seconds", "nan"], "--seconds nan is not possible"),
        (["--critical-batch", "-1"], "--critical-batch -1.0 is not possible"),
        (["--batch-size", "0"], "batch size 0 is not possible"),
        (["--batch-size", "2000"], "above the 1437"),
        (["--sync", "smaa"], "did you mean 'sma'?"),
        (["--precision", "bf17"], "unknown --precision 'bf17'"),
        (["--json", "no/such/folder.json"], "--json"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(argv, message, capsys) -> None:
    assert main(["plan", "mlp-digits", *argv]) == 2
    assert message in capsys.readouterr().err


def test_plan_measures_recommends_and_remembers(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    argv = ["plan", "mlp-digits", "--batch-size", "16", "--json", str(tmp_path / "plan.json")]
    assert main([*argv, "--seconds", "4", "--quiet"]) == 0
    first, written = capsys.readouterr(), json.loads((tmp_path / "plan.json").read_text())
    assert first.err == ""
    assert json.loads(json.dumps(Plan.from_json(written).to_json())) == written
    assert written["samples_per_second"] > 0
    assert written["roofline"]["passes"][0]["flops"] == 2 * 16 * (64 * 64 + 64 * 10)
    for part in ("GOODPUT", "learners on", "predicted", "because", "forward", "now kept at"):
        assert part in first.out
    assert (written["command"] or "use DDP") in first.out
    assert main(argv) == 0  # at once: it measures nothing
    assert "--refresh measures again" in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text()) == written
