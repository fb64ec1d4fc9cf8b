import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from crossbow.checkpoint.model import save_model
from crossbow.zoo import models


def check_round_trip(model: nn.Module, path: Path) -> dict[str, Tensor]:
    """Save, load, compare; return what was loaded."""
    state = model.state_dict()
    save_model(state, path)
    loaded = load_file(path)
    assert loaded.keys() == state.keys()
    for key, value in state.items():
        assert loaded[key].dtype == value.dtype
        assert torch.equal(loaded[key], value), key
    return loaded


@pytest.mark.parametrize("build", [models.lenet5, lambda: models.resnet_cifar(8)])
def test_a_model_comes_back_bit_for_bit(build, tmp_path: Path) -> None:
    model, other = build(), build()
    other.load_state_dict(check_round_trip(model, tmp_path / "model.safetensors"))


def test_tied_parameters_are_saved_under_each_of_their_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    loaded = check_round_trip(model, tmp_path / "model.safetensors")
    assert torch.equal(loaded["0.weight"], loaded["1.weight"])
    loaded["0.weight"].zero_()  # they share no memory, so that any model can load them
    assert loaded["1.weight"].any()


def test_views_of_one_row_are_saved_as_themselves_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    rows = torch.randn(8, sum(p.numel() for p in model.parameters()))
    start = 0
    for parameter in model.parameters():
        parameter.data = rows[2, start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    check_round_trip(model, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_size < rows.nbytes


def test_any_memory_layout_and_type_is_saved(tmp_path: Path) -> None:
    model = models.resnet_cifar(8).to(memory_format=torch.channels_last)
    check_round_trip(model.bfloat16(), tmp_path / "model.safetensors")


def test_saving_neither_moves_nor_changes_the_model(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    weight, address = model.weight.detach().clone(), model.weight.data_ptr()
    save_model(model.state_dict(), tmp_path / "model.safetensors")
    assert model.weight.data_ptr() == address
    assert torch.equal(model.weight, weight)


def test_a_new_file_takes_the_old_ones_place_and_leaves_nothing_else(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        save_model({"weight": torch.full((2,), value)}, tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert load_file(tmp_path / "model.safetensors")["weight"].tolist() == [2.0, 2.0]


def test_a_failing_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model({"weight": torch.ones(2)}, tmp_path / "model.safetensors")

    def fail(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("crossbow.checkpoint.model.save_file", fail)
    with pytest.raises(OSError, match="no space"):
        save_model({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert load_file(tmp_path / "model.safetensors")["weight"].tolist() == [1.0, 1.0]


WRITER = """
import sys, torch
from pathlib import Path
from crossbow.checkpoint.model import save_model
state = {f"layer{i}": torch.ones(1 << 20) for i in range(8)}
print("ready", flush=True)
while True:
    save_model(state, Path(sys.argv[1]))
    for value in state.values(): value += 1
"""


def test_a_kill_in_the_middle_of_a_write_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        deadline = time.monotonic() + 60
        # a partial file beside a whole one: this is the middle of a write
        while not (path.exists() and list(tmp_path.glob(".model.safetensors.*"))):
            assert time.monotonic() < deadline
        os.kill(process.pid, signal.SIGKILL)
    loaded = load_file(path)
    assert len({value.unique().item() for value in loaded.values()}) == 1
