"""Ranks that are killed are started again, and the run ends as if they had not been."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from safetensors.torch import load_file
from tests.test_resuming import assert_same_models
from tests.test_trainer import events

SHM = Path("/dev/shm")


def command(run: Path, *more: str) -> list[str]:
    train = ["-m", "crossbow", "train", "mlp-digits", "--learners", "4", "--ranks", "2", "--quiet"]
    return [sys.executable, *train, "--epochs", "60", "--run-dir", str(run), *more]


def children(pid: int) -> list[int]:
    """The ranks of a launcher: what it started that is no helper of multiprocessing."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(p) for p in pids if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()]


def wait_until(condition, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_rank_costs_neither_samples_nor_bits(tmp_path):
    every = ("--eval-every", "100000", "--checkpoint-every", "0")
    subprocess.run(command(tmp_path / "whole", *every), check=True, timeout=200)
    run = tmp_path / "killed"
    with subprocess.Popen(command(run, *every)) as launcher:
        refuge = SHM / f"crossbow-refuge-{launcher.pid}" / "checkpoints"
        wait_until(lambda: list(refuge.glob("[0-9]*")))
        os.kill(children(launcher.pid)[1], signal.SIGKILL)
        assert launcher.wait(200) == 0
    assert not list(SHM.glob(f"crossbow-*-{launcher.pid}"))
    (line,) = events(run, "resume")
    assert line["samples"] > 0  # from memory: nothing was written to disk
    results = [json.loads((r / "result.json").read_text()) for r in (tmp_path / "whole", run)]
    assert results[0]["samples"] == results[1]["samples"]
    assert results[0]["metric"] == results[1]["metric"]
    models = [load_file(r / "model.safetensors") for r in (tmp_path / "whole", run)]
    assert_same_models(*models)
