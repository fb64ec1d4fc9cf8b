"""Every example runs, at a small size."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.ranks import free_port

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(folder: Path, *words: str, timeout_s: float = 120, **variables: str) -> str:
    """What an example prints."""
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_task_of_your_own(tmp_path: Path) -> None:
    program = str(EXAMPLES / "custom_task.py")
    printed = run(tmp_path, sys.executable, program, "--learners", "2", "--epochs", "1")
    found = re.search(r"mean error (\S+); that of always saying 0 is (\S+)", printed)
    assert found
    assert float(found[1]) < 0.7 * float(found[2])
    assert (tmp_path / "runs" / "surface-1" / "result.json").exists()


def test_a_transformer(tmp_path: Path) -> None:
    words = ["--learners", "2", "--samples", "640"]
    printed = run(tmp_path, sys.executable, str(EXAMPLES / "transformer.py"), *words)
    found = re.search(r"places right (\S+)%", printed)
    assert found
    assert float(found[1]) > 100 / 16 + 3  # better than any one symbol


STUBS = {
    "torchrun": '#!/bin/sh\nexec {python} -m torch.distributed.run "$@"\n',
    "scontrol": "#!/bin/sh\necho 127.0.0.1\necho another\n",
    # a host in the background and one in front, as srun would start them
    "srun": '#!/bin/sh\n"$@" & other=$!\n"$@" || exit 1\nwait $other\n',
}


@pytest.mark.slow
def test_slurm_starts_ranks_on_two_hosts(tmp_path: Path) -> None:
    for name, script in STUBS.items():
        (tmp_path / name).write_text(script.replace("{python}", sys.executable))
        (tmp_path / name).chmod(0o755)
    printed = run(
        tmp_path,
        "bash",
        str(EXAMPLES / "slurm.sbatch"),
        str(EXAMPLES / "with_crossbow.py"),
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        PORT=str(free_port()),
        SLURM_JOB_NODELIST="two",
        SLURM_CPUS_PER_TASK="1",
        SLURM_JOB_ID="7",
        SLURM_NNODES="2",
        SLURM_SUBMIT_DIR=str(EXAMPLES.parent),
    )
    assert printed.count("test accuracy") == 1  # by the first of two ranks
    assert (tmp_path / "digits.safetensors").exists()


def test_several_hosts_are_explained_to_who_asks() -> None:
    done = subprocess.run(
        ["bash", str(EXAMPLES / "multi_host.sh")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "examples/multi_host.sh FIRST_HOST NUM_HOSTS PROGRAM" in done.stderr
    assert "set -euo" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_ray_starts_the_same_program(tmp_path: Path) -> None:
    program = str(EXAMPLES / "with_crossbow.py")
    storage = ["--workers", "2", "--storage", str(tmp_path / "ray")]
    words = (str(EXAMPLES / "ray_train.py"), program, *storage)
    run(tmp_path, sys.executable, *words, timeout_s=280, RAY_USAGE_STATS_ENABLED="0")
    assert (tmp_path / "digits.safetensors").exists()
