"""The command line: what it prints, what it refuses, and its exit codes."""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crossbow.averaging import family
from crossbow.cli import main
from crossbow.cli.train import AVERAGINGS

QUICK = ["train", "mlp-digits", "--epochs", "1", "--quiet"]


def run_cli(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "crossbow", *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_help_answers_without_torch(tmp_path):
    code = (
        "import sys, crossbow.cli\n"
        "try: crossbow.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_help_answers_in_under_a_third_of_a_second(tmp_path):
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        assert run_cli("--help", cwd=tmp_path).returncode == 0
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.3


def test_help_lists_every_averaging_with_all_its_options():
    listed = {}
    for line in AVERAGINGS.splitlines():
        name, _, options = re.split(r"  +", line.strip())
        listed[name] = options.split(", ")
    assert listed == {
        name: list(inspect.signature(make).parameters) for name, make in family.AVERAGINGS.items()
    }


def test_train_prints_progress_and_a_summary(tmp_path):
    done = run_cli("train", "mlp-digits", "--epochs", "2", "--target", "0.99", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr.count("accuracy") == 2
    for word in ("test accuracy", "samples/s", "runs/mlp-digits-1", "not reached", "next"):
        assert word in done.stdout


def test_the_summary_is_never_cut(tmp_path):
    deep = tmp_path / ("long-" * 20) / ("name-" * 20)
    done = run_cli("train", "mlp-digits", "--epochs", "1", "--run-dir", str(deep), cwd=tmp_path)
    assert str(deep) in done.stdout
    assert "…" not in done.stdout


def test_quiet_prints_nothing(tmp_path):
    done = run_cli(*QUICK, cwd=tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_runs_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(QUICK) == main(QUICK) == 0
    assert sorted(p.name for p in Path("runs").iterdir()) == ["mlp-digits-1", "mlp-digits-2"]


def test_json_writes_the_result_where_it_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*QUICK, "--json", "out.json"]) == 0
    result = json.loads(Path("out.json").read_text())
    assert result == json.loads(Path("runs/mlp-digits-1/result.json").read_text())


def test_ctrl_c_prints_the_summary_and_exits_with_130(tmp_path):
    command = [sys.executable, "-m", "crossbow", "train", "mlp-digits", "--epochs", "1e6"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        log = tmp_path / "runs" / "mlp-digits-1" / "log.jsonl"
        deadline = time.monotonic() + 60
        while not log.exists() or log.read_text().count("\n") < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "ended by interrupt" in output
    assert "Traceback" not in errors


BAD = {
    "unknown task": (["train", "resnet9-digits"], "did you mean 'resnet8-digits'?"),
    "unknown command": (["trian"], "did you mean 'train'?"),
    "unknown option": ([*QUICK, "--bacth-size", "4"], "did you mean '--batch-size'?"),
    "unknown schedule": ([*QUICK, "--schedule", "cosin"], "did you mean 'cosine'?"),
    "unknown schedule option": ([*QUICK, "--schedule", "cosine:warm=1"], "'warmup'"),
    "unknown optimizer": ([*QUICK, "--optimizer", "adamv"], "did you mean 'adam'?"),
    "unknown optimizer option": ([*QUICK, "--optimizer", "sgd:momentun=1"], "'momentum'"),
    "optimizer value": ([*QUICK, "--optimizer", "sgd:momentum=-1"], "can't be used"),
    "unknown precision": ([*QUICK, "--precision", "bf17"], "did you mean 'bf16'?"),
    "no number": ([*QUICK, "--batch-size", "many"], "invalid int value: 'many'"),
    "no number of learners": (["train", "mlp-digits", "--learners", "many"], "or auto"),
    "threads of many": ([*QUICK, "--threads", "2", "--learners", "auto"], "leave out threads"),
    "batch size of zero": ([*QUICK, "--batch-size", "0"], "batch size 0 is not possible"),
    "batch size above the set": ([*QUICK, "--batch-size", "2000"], "above the 1437"),
    "nan rate": ([*QUICK, "--lr", "nan"], "learning rate nan is not possible"),
    "infinite rate": ([*QUICK, "--lr", "inf"], "learning rate inf is not possible"),
    "negative rate": ([*QUICK, "--lr", "-0.1"], "learning rate -0.1 is not possible"),
    "seed": ([*QUICK, "--seed", str(2**64)], f"seed {2**64} is not possible"),
    "nan momentum": ([*QUICK, "--optimizer", "sgd:momentum=nan"], "momentum=nan is not possible"),
    "endless epochs": ([*QUICK, "--epochs", "1e300"], "epochs 1e+300 is not possible"),
    "no epochs": ([*QUICK, "--epochs", "0"], "epochs 0.0 is not possible"),
    "infinite epochs": ([*QUICK, "--epochs", "inf"], "epochs inf is not possible"),
    "label smoothing": ([*QUICK, "--label-smoothing", "1"], "label smoothing 1.0"),
    "device": ([*QUICK, "--device", "gpu"], "device 'gpu' can't be used"),
    "no text": (["train", "gpt-text"], "--text FILE"),
    "text for images": ([*QUICK, "--text", "book.txt"], "leave out --text"),
    "data missing": (
        ["train", "resnet8-cifar10", "--data-dir", "nowhere"],
        "crossbow data fetch cifar10",
    ),
    "json in no folder": ([*QUICK, "--json", "no/such/folder.json"], "--json"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_exit_code_2_and_nothing_written(case, tmp_path, monkeypatch, capsys):
    argv, message = BAD[case]
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.count("\n") == 1
    assert errors.startswith("crossbow: ")
    assert message in errors
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_that_holds_a_run_is_refused_and_left_alone(tmp_path, capsys):
    argv = [*QUICK, "--run-dir", str(tmp_path / "run")]
    assert main(argv) == 0
    before = {p: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    assert main(argv) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before


def test_runs_that_can_not_be_counted_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("runs").touch()
    assert main(QUICK) == 2
    assert "run directory runs/mlp-digits can't be made" in capsys.readouterr().err


def test_a_run_directory_below_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main([*QUICK, "--run-dir", str(tmp_path / "file" / "run")]) == 2
    assert "can't be made" in capsys.readouterr().err


def test_a_diverged_run_exits_with_2_and_keeps_its_log(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*QUICK, "--lr", "1e30"]) == 2
    errors = capsys.readouterr().err
    assert "the loss became" in errors
    assert errors.count("\n") == 1
    last = Path("runs/mlp-digits-1/log.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["event"] == "diverged"
