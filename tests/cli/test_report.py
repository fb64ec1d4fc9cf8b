from pathlib import Path

import pytest
from tests.monitor.test_record import at, written

from crossbow.cli import main


def test_the_report_of_one_run_lies_beside_its_log(tmp_path: Path, capsys) -> None:
    run = written(tmp_path / "run", at(1, seconds=1, loss=2))
    assert main(["report", str(run)]) == 0
    assert str(run / "report.html") in capsys.readouterr().out
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_the_report_of_several_runs_lies_here(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [str(written(tmp_path / name, at(1, seconds=1, loss=2))) for name in "ab"]
    assert main(["report", *runs, "--quiet"]) == 0
    assert Path("report.html").exists()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere holds no run"),
        (["run", "--out", "no/such/folder.html"], "--out no/such/folder.html can't be written"),
        (["run", "--out", "."], "--out . can't be written"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "run", at(1))
    assert main(["report", *words]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["log.jsonl", "run"]
