from pathlib import Path

import pytest
import torch

from crossbow.data.parallel import help_texts, parallel
from crossbow.data.sentences import END, PAD, START, said
from crossbow.errors import DataError, InputError


def texts(folder: Path, ours: str, theirs: str) -> tuple[Path, Path]:
    (folder / "ours").write_text(ours)
    (folder / "theirs").write_text(theirs)
    return folder / "ours", folder / "theirs"


def numbered(folder: Path, n: int = 100) -> tuple[Path, Path]:
    """Lines whose translation is known from what they say."""
    return texts(
        folder,
        "".join(f"the number {i} is {i % 7}\n" for i in range(n)),
        "".join(f"die Zahl {i} ist {i % 7}\n" for i in range(n)),
    )


def test_a_sample_holds_a_line_and_what_says_the_same(tmp_path: Path) -> None:
    data = parallel(*numbered(tmp_path), length=24, vocabulary=60)
    for part in (data.train, data.test):
        for row, target in zip(part.inputs, part.targets, strict=True):
            source, read = row.chunk(2)
            number = data.decode(said(source.tolist())).split()[2]
            assert data.decode(said(target.tolist())).split()[:3] == ["die", "Zahl", number]
            assert read[0] == START
            assert read[1:].equal(target[:-1])
            assert sorted({*source.tolist(), *target.tolist()})[0] == PAD


def test_references_are_the_lines_of_the_test_part(tmp_path: Path) -> None:
    data = parallel(*numbered(tmp_path), length=24, vocabulary=60)
    assert len(data.test) == 5
    for i, (reference,) in data.references.items():
        assert data.decode(said(data.test.targets[i].tolist())) == reference


def test_no_source_line_is_both_learned_and_tested(tmp_path: Path) -> None:
    ours = "".join(f"line {i % 40}\n" for i in range(200))
    data = parallel(*texts(tmp_path, ours, ours.upper()), length=16, vocabulary=30)
    assert len(data.train) + len(data.test) == 40
    learned = {data.decode(said(row[:16].tolist())) for row in data.train.inputs}
    assert not learned & {data.decode(said(row[:16].tolist())) for row in data.test.inputs}


def test_ranks_that_read_alike_have_the_same_tokens(tmp_path: Path) -> None:
    one, other = (parallel(*numbered(tmp_path), length=24, vocabulary=60) for _ in range(2))
    assert torch.equal(one.train.inputs, other.train.inputs)


def test_long_pairs_are_not_learned_from_but_tested(tmp_path: Path) -> None:
    ours = "".join(f"{'word ' * (1 + i % 30)} {i}\n" for i in range(100))
    data = parallel(*texts(tmp_path, ours, ours), length=12, vocabulary=30)
    assert len(data.train) < 50
    assert all(END in row for row in data.train.targets)
    assert len(data.test) == len(data.references) == 5


@pytest.mark.parametrize(
    ("ours", "theirs", "complaint"),
    [
        ("a\nb\n", "c\n", "ours has 2 lines and .*theirs 1"),
        ("", "", "no two pairs"),
        ("a\n\n", "b\nc\n", "no two pairs"),
    ],
)
def test_files_that_say_different_things_are_refused(
    tmp_path: Path, ours: str, theirs: str, complaint: str
) -> None:
    with pytest.raises(DataError, match=complaint):
        parallel(*texts(tmp_path, ours, theirs))


def test_what_can_not_be_read_is_refused(tmp_path: Path) -> None:
    ours, theirs = numbered(tmp_path)
    with pytest.raises(DataError, match="No such file"):
        parallel(ours, tmp_path / "nothing")
    theirs.write_bytes(b"\xff\xfe\n" * 100)
    with pytest.raises(DataError, match="theirs: not UTF-8"):
        parallel(ours, theirs)
    with pytest.raises(InputError, match="vocabulary of 3 "):
        parallel(ours, theirs, vocabulary=3)


def test_a_separator_inside_a_paragraph_ends_no_line(tmp_path: Path) -> None:
    ours = "".join(f"one\u2028two {i}\n" for i in range(40))
    assert len(parallel(*texts(tmp_path, ours, ours), vocabulary=30).train) == 38


def test_help_texts_that_are_not_here_can_be_fetched(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="crossbow data fetch libreoffice-help"):
        help_texts(tmp_path)
