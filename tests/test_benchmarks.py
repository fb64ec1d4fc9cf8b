"""Every benchmark runs, at a size that measures nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / name), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_loop_overhead_measures_both_loops_in_every_round(tmp_path: Path) -> None:
    done = run("loop_overhead.py", "--rounds", "2", "--steps", "16", "--json", f"{tmp_path}/out")
    assert done.returncode in (0, 1), done.stderr
    result = json.loads((tmp_path / "out").read_text())
    assert [case["claimed"] for case in result["cases"]] == [0.97, 0.99]
    for case in result["cases"]:
        rounds = case["samples_per_second"]
        shares = [a / b for a, b in zip(rounds["trainer"], rounds["by hand"], strict=True)]
        assert case["ratio"] == pytest.approx(sum(shares) / 2)  # the median of two
        assert case["holds"] == (case["ratio"] >= case["claimed"])
        assert case["case"] in done.stdout
    assert {"cpu", "cores", "torch", "python", "commit", "dirty", "seeds"} <= result.keys()
    assert done.returncode == (0 if all(case["holds"] for case in result["cases"]) else 1)


@pytest.mark.parametrize("args", [("--rounds", "0"), ("--steps", "17"), ("--steps", "0")])
def test_a_size_that_can_not_be_measured_is_refused(args: tuple[str, str]) -> None:
    assert run("loop_overhead.py", *args).returncode == 2
