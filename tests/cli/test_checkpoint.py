"""`crossbow checkpoint` says what there is and what is wrong with it."""

import json

import pytest
from safetensors.torch import load_file
from tests.test_resuming import digits_run

from crossbow.checkpoint.folder import found_in
from crossbow.cli import main
from crossbow.zoo import tasks


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The directory of a run with checkpoints after 32, 64 and 80 samples."""
    digits_run(tmp_path / "run", monkeypatch)
    return tmp_path / "run"


def test_list_names_all_newest_first(run, capsys):
    assert main(["checkpoint", "list", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["SAMPLES", "80", "64", "32"]


def test_verify_finds_what_is_damaged(run, capsys):
    assert main(["checkpoint", "verify", str(run), "--json", str(run / "said.json")]) == 0
    assert capsys.readouterr().out.count("whole") == 3
    newest = found_in(run / "checkpoints")[0]
    (newest / "manifest.json").write_text(
        (newest / "manifest.json").read_text().replace("80", "81")
    )
    assert main(["checkpoint", "verify", str(run)]) == 1
    assert "its checksum is another one" in capsys.readouterr().out
    said = json.loads((run / "said.json").read_text())
    assert [one["samples"] for one in said["checkpoints"]] == [80, 64, 32]


@pytest.mark.parametrize("at", [None, 32])
def test_export_writes_a_model_that_plain_pytorch_loads(run, at, tmp_path):
    where = [] if at is None else ["--at", str(at)]
    assert main(["checkpoint", "export", str(run), *where, "--to", str(tmp_path / "it")]) == 0
    tasks.get("mlp-digits").build_model().load_state_dict(load_file(tmp_path / "it"))


def test_a_folder_without_checkpoints_is_refused(tmp_path, capsys):
    assert main(["checkpoint", "list", str(tmp_path)]) == 2
    assert "has no checkpoints: name a run's directory" in capsys.readouterr().err
