import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.data.formats import (
    cifar10_files,
    cifar100_files,
    idx_file,
    mnist_files,
    place,
    random_bytes,
    records,
)
from torch.utils.data import DataLoader

from crossbow.data import catalog
from crossbow.data.datasets import (
    Arrays,
    cifar10,
    cifar100,
    default_data_dir,
    digits,
    idx,
    image_folder,
    load,
    mnist,
    text,
    vocabulary,
)
from crossbow.errors import DataError, InputError


def test_arrays_work_in_torch_s_own_loader() -> None:
    inputs, targets = torch.arange(12).view(6, 2), torch.arange(6)
    (batch, labels), *rest = DataLoader(Arrays(inputs, targets, classes=6), batch_size=4)
    assert torch.equal(batch, inputs[:4])
    assert torch.equal(labels, targets[:4])
    assert len(rest) == 1


def test_arrays_refuse_a_target_too_few() -> None:
    with pytest.raises(InputError, match="3 inputs but 2 targets"):
        Arrays(torch.zeros(3), torch.zeros(2), classes=1)


def test_digits_are_split_by_class_and_cover_the_set() -> None:
    split = digits()
    assert (len(split.train), len(split.test)) == (1437, 360)
    assert split.train.inputs.shape == (1437, 1, 8, 8)
    assert (split.train.inputs.dtype, split.train.targets.dtype) == (torch.uint8, torch.int64)
    assert (split.train.inputs.min(), split.train.inputs.max()) == (0, 255)
    in_train, in_test = split.train.targets.bincount(), split.test.targets.bincount()
    assert (in_train + in_test).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (in_test - (in_train + in_test) / 5).abs().max() < 1


def test_digits_never_change() -> None:
    test = digits().test
    assert test.targets[:8].tolist() == [0, 2, 5, 7, 0, 9, 2, 5]
    assert int(test.inputs.long().sum()) == 1_786_296


@pytest.mark.parametrize("zipped", [False, True])
def test_mnist_is_read_plain_and_gzipped(tmp_path: Path, zipped: bool) -> None:
    files = mnist_files(num_train=7, num_test=3)
    if zipped:
        files = {f"{name}.gz": gzip.compress(content) for name, content in files.items()}
    split = mnist(place(tmp_path, files))
    assert np.array_equal(split.train.inputs[:, 0].numpy(), random_bytes(7, 28, 28))
    assert split.train.inputs.shape == (7, 1, 28, 28)
    assert split.test.targets.tolist() == [0, 1, 2]
    assert split.test.targets.dtype == torch.int64


def test_plain_mnist_is_mapped_and_writing_to_it_stays_private(tmp_path: Path) -> None:
    place(tmp_path, mnist_files())
    mnist(tmp_path).train.inputs.zero_()
    assert mnist(tmp_path).train.inputs.any()


def test_cifar10_joins_its_batches_in_order(tmp_path: Path) -> None:
    split = cifar10(place(tmp_path, cifar10_files(per_file=4)))
    assert split.train.inputs.shape == (20, 3, 32, 32)
    assert split.train.targets.tolist() == [0, 1, 2, 3] * 5
    second_file = random_bytes(4, 3072, seed=1).reshape(4, 3, 32, 32)
    assert np.array_equal(split.train.inputs[4:8].numpy(), second_file)
    assert split.train.inputs.is_contiguous()
    assert len(split.test) == 4


def test_cifar100_takes_the_fine_label(tmp_path: Path) -> None:
    split = cifar100(place(tmp_path, cifar100_files()))
    assert split.train.targets.tolist() == list(range(100))
    assert split.train.classes == 100
    assert np.array_equal(
        split.test.inputs.numpy(), random_bytes(100, 3072, seed=1).reshape(-1, 3, 32, 32)
    )


def test_text_targets_are_the_inputs_one_character_on(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"abracadabra" * 20)
    split = text(path, context_length=5)
    letters = vocabulary(path)
    assert letters == b"abcdr"
    assert bytes(letters[i] for i in split.train.inputs[0]) == b"abrac"
    assert bytes(letters[i] for i in split.train.targets[0]) == b"braca"
    assert split.train.classes == 5
    flat = split.train.inputs.flatten()
    assert torch.equal(split.train.targets.flatten()[:-1], flat[1:])
    assert (len(split.train), len(split.test)) == ((198 - 1) // 5, (22 - 1) // 5)


def test_text_takes_its_own_size_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 100)
    split = text(path, context_length=64)
    parts = (split.train.inputs, split.train.targets, split.test.inputs, split.test.targets)
    storages = [part.untyped_storage() for part in parts]
    assert {s.data_ptr() for s in storages} == {storages[0].data_ptr()}
    assert storages[0].nbytes() == 25_600
    assert split.train.classes == 256


@pytest.mark.parametrize("length", [0, 3])
def test_text_refuses_a_context_that_it_cannot_hold(tmp_path: Path, length: int) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"a" * 30)
    with pytest.raises(DataError, match=f"context length {length}"):
        text(path, length)


def test_empty_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").touch()
    with pytest.raises(DataError, match="longer text"):
        text(tmp_path / "text", 1)


def _paint(path: Path, size: tuple[int, int], color: object, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, color).save(path)  # type: ignore[arg-type]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for part in ("train", "val"):
        _paint(tmp_path / part / "cat" / "a.png", (300, 500), (255, 0, 0))
        _paint(tmp_path / part / "cat" / "b.JPEG", (2000, 900), (255, 0, 0))
        _paint(tmp_path / part / "dog" / "c.png", (20, 10), 7, mode="L")
        (tmp_path / part / "dog" / "notes.txt").write_text("no image")
    return tmp_path


def test_images_become_bytes_of_one_shape(images: Path) -> None:
    train = image_folder(images).train
    (cat, _), (jpeg, _), (dog, _) = (train[i] for i in range(3))
    assert [train[i][1] for i in range(len(train))] == [0, 0, 1]
    assert cat.shape == jpeg.shape == dog.shape == (3, 256, 256)
    assert cat.dtype == torch.uint8
    assert cat.flatten(1).float().mean(1).tolist() == [255, 0, 0]
    assert dog.unique().tolist() == [7]
    assert (train.names, train.classes) == (("cat", "dog"), 2)


def test_the_middle_of_an_image_is_kept(tmp_path: Path) -> None:
    wide = Image.new("RGB", (1024, 256))
    wide.paste((255, 255, 255), (384, 0, 640, 256))
    for part in ("train", "val"):
        (tmp_path / part / "x").mkdir(parents=True)
        wide.save(tmp_path / part / "x" / "wide.png")
    assert image_folder(tmp_path).train[0][0].unique().tolist() == [255]


def test_images_collate_in_worker_processes(images: Path) -> None:
    inputs, labels = next(iter(DataLoader(image_folder(images).train, 3, num_workers=1)))
    assert inputs.shape == (3, 3, 256, 256)
    assert labels.tolist() == [0, 0, 1]


def test_a_damaged_image_is_named(images: Path) -> None:
    path = images / "train" / "cat" / "a.png"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(DataError, match=r"cat/a\.png: no image"):
        image_folder(images).train[0]


def test_without_pillow_the_extra_is_named(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r"crossbow\[images\]"):
        image_folder(images).train[0]


def test_a_class_that_only_one_part_has_is_named(images: Path) -> None:
    _paint(images / "val" / "eel" / "a.png", (9, 9), 0)
    with pytest.raises(DataError, match="'eel'"):
        image_folder(images)


def test_a_folder_without_images_is_named(images: Path) -> None:
    (images / "train" / "empty").mkdir()
    with pytest.raises(DataError, match=r"train/empty: no images"):
        image_folder(images)
    with pytest.raises(DataError, match="no such directory"):
        image_folder(images / "nowhere")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not an idx file"),
        (b"\x1f\x8b" + bytes(50), "not an idx file"),
        (idx_file(random_bytes(5)), "not an idx file of bytes in 3 dimensions"),
        (idx_file(random_bytes(2, 3, 4))[:-1], "39 bytes, but its header says 40"),
        (idx_file(random_bytes(2, 3, 4)) + b"x", "41 bytes, but its header says 40"),
        (idx_file(random_bytes(0, 3, 4)), "16 bytes"),
        (bytes([0, 0, 8, 3]) + b"\xff" * 12, "16 bytes, but its header says"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_wrong_idx_file_is_refused(
    tmp_path: Path, content: bytes, complaint: str, zipped: bool
) -> None:
    path = tmp_path / ("file.gz" if zipped else "file")
    path.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(DataError, match=complaint):
        idx(path, 3)


def test_a_cut_gzip_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(idx_file(random_bytes(9, 9, 9)))[:-20])
    with pytest.raises(DataError, match=r"file\.gz: Compressed file ended"):
        idx(path, 3)


def test_labels_beyond_the_classes_are_refused(tmp_path: Path) -> None:
    files = mnist_files() | {"train-labels-idx1-ubyte": idx_file(np.full(7, 10, np.uint8))}
    with pytest.raises(DataError, match="label 10 is out of range"):
        mnist(place(tmp_path / "mnist", files))
    files = cifar10_files() | {"data_batch_3.bin": records(np.full((4, 1), 11, np.uint8))}
    with pytest.raises(DataError, match=r"data_batch_3\.bin: label 11"):
        cifar10(place(tmp_path / "cifar10", files))


def test_a_label_too_few_is_refused(tmp_path: Path) -> None:
    files = mnist_files() | {"train-labels-idx1-ubyte": idx_file(np.zeros(6, np.uint8))}
    with pytest.raises(DataError, match="6 labels for 7 images"):
        mnist(place(tmp_path, files))


@pytest.mark.parametrize("size", [0, 3073 * 2 - 1])
def test_a_truncated_cifar_file_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(DataError, match=f"{size} bytes are no whole number of records"):
        cifar10(place(tmp_path, cifar10_files() | {"test_batch.bin": bytes(size)}))


def test_load_names_the_command_for_a_missing_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"`crossbow data fetch cifar10 --data-dir {tmp_path}`"):
        load("cifar10", tmp_path)
    with pytest.raises(DataError, match="`crossbow data fetch cifar100 --from ARCHIVE"):
        load("cifar100", tmp_path)
    with pytest.raises(InputError, match="did you mean 'cifar10'"):
        load("cifar-10", tmp_path)


def test_load_names_a_missing_file(tmp_path: Path) -> None:
    files = cifar10_files()
    del files["data_batch_2.bin"]
    with pytest.raises(DataError, match=r"data_batch_2\.bin is missing: run `crossbow data fetch"):
        load("cifar10", place(tmp_path / "cifar10", files).parent)


def test_load_refuses_a_set_cut_between_records(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"20 samples .* but cifar10 has 50000"):
        load("cifar10", place(tmp_path / "cifar10", cifar10_files()).parent)


def test_load_reads_a_whole_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = catalog.Entry("mnist", 7, 3, (1, 28, 28), 10, catalog.CATALOG["mnist"].members)
    monkeypatch.setitem(catalog.CATALOG, "mnist", small)
    place(tmp_path / "mnist", mnist_files())
    assert len(load("mnist", str(tmp_path)).train) == 7


def test_load_finds_the_embedded_set_without_a_directory(tmp_path: Path) -> None:
    assert len(load("digits", tmp_path / "nowhere").test) == 360


def test_the_default_directory_follows_the_xdg_standard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    for cache, expected in (
        ("/scratch", "/scratch/crossbow"),
        ("", "/home/ada/.cache/crossbow"),
        ("relative", "/home/ada/.cache/crossbow"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        assert str(default_data_dir()) == expected
