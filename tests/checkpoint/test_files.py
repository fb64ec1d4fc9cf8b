"""Files come back bit for bit, and a reader believes nothing it is told."""

import json
import math
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from crossbow.checkpoint.files import (
    DamagedError,
    check_file,
    read_tensors,
    read_tree,
    write_tensors,
    write_tree,
)
from crossbow.checkpoint.tree import UnsavableError

TENSORS = {
    "weights": torch.randn(3, 4).t(),
    "half": torch.randn(5).bfloat16(),
    "flags": torch.tensor([True, False]),
    "count": torch.tensor(2**40),
    "nothing": torch.empty(0, 3),
}


def test_tensors_come_back_and_any_reader_of_safetensors_reads_them(tmp_path):
    written = write_tensors(TENSORS, tmp_path / "model.safetensors")
    assert written.num_bytes == (tmp_path / "model.safetensors").stat().st_size
    for read in (
        read_tensors(tmp_path / written.name, written),
        load_file(tmp_path / written.name),
    ):
        assert read.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name], tensor)
    save_file({k: v.contiguous() for k, v in TENSORS.items()}, tmp_path / "theirs")
    assert torch.equal(read_tensors(tmp_path / "theirs")["weights"], TENSORS["weights"])


def test_trees_come_back(tmp_path):
    tree = {"a": [TENSORS, 3, (math.inf, None)], "b": {"c": 0.1 + 0.2}}
    written = write_tree(tree, tmp_path / "it")
    assert str(read_tree(tmp_path / "it", written)) == str(tree)


def test_a_dtype_that_the_format_does_not_know_is_refused_by_name(tmp_path):
    with pytest.raises(UnsavableError, match=r"'/a/0' is torch\.complex64"):
        write_tree({"a": [torch.zeros(1, dtype=torch.complex64)]}, tmp_path / "it")


def test_any_change_of_a_file_is_noticed(tmp_path):
    path = tmp_path / "it"
    written = write_tree({"weights": torch.randn(40)}, path)
    whole = path.read_bytes()
    stream = random.Random(0)
    for number in range(200):
        content = bytearray(whole)
        place = stream.randrange(len(content))
        content[place] ^= 1 << stream.randrange(8)
        path.write_bytes(content[:place] if number % 2 else content)
        for look in (read_tree, check_file):
            with pytest.raises(DamagedError):
                look(path, written)


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


HOSTILE = {
    "nothing": b"",
    "a header of 2^63 bytes": (2**63).to_bytes(8, "little") + b"{}",
    "a header longer than the file": (100).to_bytes(8, "little") + b"{}",
    "no JSON": file_of(b"{"),
    "deep JSON": file_of(b"[" * 200_000),
    "a long number": file_of(b'{"a": ' + b"9" * 10_000 + b"}"),
    "no object": file_of([]),
    "a tensor that is none": file_of({"a": 3}),
    "huge": file_of({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}}),
    "beyond": file_of({"a": {"dtype": "U8", "shape": [8], "data_offsets": [8, 16]}}, bytes(8)),
    "backwards": file_of({"a": {"dtype": "U8", "shape": [4], "data_offsets": [8, 4]}}, bytes(8)),
    "negative": file_of({"a": {"dtype": "U8", "shape": [-4], "data_offsets": [4, 0]}}, bytes(8)),
    "a shape of truths": file_of(
        {"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, b"1"
    ),
    "another size": file_of(
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}, bytes(8)
    ),
    "an unknown dtype": file_of(
        {"a": {"dtype": "OBJ", "shape": [1], "data_offsets": [0, 8]}}, bytes(8)
    ),
    "dimensions": file_of({"a": {"dtype": "U8", "shape": [1] * 99, "data_offsets": [0, 1]}}, b"1"),
    "no tree": file_of({}),
    "a tree that is no text": file_of({"__metadata__": {"tree": 3}}),
    "a tree of what isn't there": file_of({"__metadata__": {"tree": '{"$tensor": "a"}'}}),
    "a number that is none": file_of({"__metadata__": {"tree": '{"$number": "x"}'}}),
    "a deep tree": file_of({"__metadata__": {"tree": "[" * 100_000}}),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused(kind, tmp_path):
    (tmp_path / "it").write_bytes(HOSTILE[kind])
    with pytest.raises(DamagedError):
        read_tree(tmp_path / "it")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DamagedError, match="can't be read: No such file"):
        read_tree(tmp_path / "it")
