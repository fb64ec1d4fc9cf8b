import os
import pty
import subprocess
import sys

import pytest

from crossbow.cli import main
from crossbow.zoo.tasks import TASKS


def test_every_task_is_listed_with_its_data_and_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks"]) == 0
    shown = capsys.readouterr().out.split()
    for name, entry in TASKS.items():
        assert name in shown
        assert entry.data in shown
        assert str(entry.recipe.lr) in shown
        assert (entry.recipe.schedule or "constant") in shown


def test_columns_are_aligned_and_fit_80(capsys: pytest.CaptureFixture[str]) -> None:
    main(["tasks"])
    header, second, *lines = capsys.readouterr().out.splitlines()
    assert max(map(len, [header, second, *lines])) <= 80
    for column in ("DATA", "BATCH", "EPOCHS", "LR"):
        start = header.index(column)
        assert all(line[start - 1] == " " and line[start] != " " for line in lines[::2])
    assert {len(line) - len(line.lstrip()) for line in lines[1::2]} == {second.index("SCHEDULE")}


def test_a_narrow_terminal_gets_what_a_pipe_gets(capsys: pytest.CaptureFixture[str]) -> None:
    main(["tasks"])
    piped = capsys.readouterr().out
    reader, terminal = pty.openpty()
    command = [sys.executable, "-m", "crossbow", "tasks"]
    environment = {**os.environ, "COLUMNS": "40"}
    shown = b""
    with subprocess.Popen(command, stdout=terminal, env=environment):
        os.close(terminal)
        while block := _read(reader):
            shown += block
    os.close(reader)
    assert shown.decode().replace("\r\n", "\n") == piped


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the other side has closed it
        return b""
