import json
from pathlib import Path
from typing import Any

import pytest

from crossbow.data.augment import pixels_and_tokens
from crossbow.data.captions import coco
from crossbow.data.loader import read, scan
from crossbow.data.sentences import START, UNKNOWN, said
from crossbow.errors import DataError

Image = pytest.importorskip("PIL.Image")

COLORS = ("red", "green", "blue")


def coco_folder(root: Path) -> Path:
    """A small set in COCO's own format: two captions an image, ids that aren't in order."""
    for part, copies in (("train2017", 3), ("val2017", 1)):
        (root / part).mkdir(parents=True)
        images, annotations = [], []
        for i in range(copies * len(COLORS)):
            color, name = COLORS[i % len(COLORS)], f"{i:012}.jpg"
            Image.new("RGB", (40 + i, 30), color).save(root / part / name, quality=95)
            images.append({"id": 900 - i, "file_name": name, "height": 30, "width": 40 + i})
            for words in (f"A {color} picture.", f"All of it is {color}"):
                annotations.append({"id": len(annotations), "image_id": 900 - i, "caption": words})
        document = {"info": {}, "licenses": [], "images": images, "annotations": annotations}
        write(root, part, document)
    return root


def write(root: Path, part: str, document: Any) -> None:
    (root / "annotations").mkdir(exist_ok=True)
    path = root / "annotations" / f"captions_{part}.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))


def test_every_caption_is_a_sample_of_its_image(tmp_path: Path) -> None:
    data = coco(coco_folder(tmp_path), side=16, length=8)
    assert (len(data.train), len(data.test)) == (18, 6)
    for i in range(len(data.train)):
        row, target = data.train[i]
        pixels = row[: 3 * 16 * 16].view(3, -1).float().mean(1)
        assert COLORS[int(pixels.argmax())] in data.decode(said(target.tolist()))
        assert row[3 * 16 * 16] == START
        assert row[3 * 16 * 16 + 1 :].equal(target[:-1])


def test_rare_words_are_unknown_and_long_captions_are_cut(tmp_path: Path) -> None:
    data = coco(coco_folder(tmp_path), side=16, length=3, at_least=9)
    assert data.train.classes == 4 + 6  # a all is it of picture
    assert data.train[0][1].tolist()[1] == UNKNOWN
    assert len(data.train[1][1]) == 3


def test_references_are_all_captions_of_an_image_at_its_first_sample(tmp_path: Path) -> None:
    references = coco(coco_folder(tmp_path), side=16).references
    assert list(references) == [0, 2, 4]
    assert references[2] == ["a green picture", "all of it is green"]


def test_batches_are_read_as_any_task_reads_them(tmp_path: Path) -> None:
    data = coco(coco_folder(tmp_path), side=16, length=8)
    prepare = pixels_and_tokens(3 * 16 * 16)
    inputs, targets = next(read(data.train, [(0, 5)], seed=0, prepare=prepare))
    assert (inputs.shape, targets.shape) == ((5, 768 + 8), (5, 8))
    inputs, targets = next(scan(data.test, [(1, 3)], prepare=prepare))
    assert inputs[:, :768].abs().max() <= 1
    assert inputs[:, 768:].long()[:, 1:].equal(targets[:, :-1])


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ("{", "not captions in COCO's format"),
        ({"images": []}, "no 'annotations'"),
        ({"images": [], "annotations": [{"image_id": 1, "caption": "a"}]}, "no 1"),
        ({"images": [], "annotations": []}, "holds no captions"),
        ([], "not captions"),
    ],
)
def test_annotations_of_another_form_are_refused(
    tmp_path: Path, document: Any, complaint: str
) -> None:
    coco_folder(tmp_path)
    write(tmp_path, "val2017", document)
    with pytest.raises(DataError, match=complaint):
        coco(tmp_path)


def test_a_missing_set_is_refused_with_the_layout(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"captions_train2017.json and ROOT/train2017/\*.jpg"):
        coco(tmp_path)
