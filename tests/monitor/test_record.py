import json
from pathlib import Path

import pytest

from crossbow.errors import InputError
from crossbow.monitor.record import number, read, short_names


def written(folder: Path, *lines: object) -> Path:
    """A run's directory whose log holds these lines."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "log.jsonl").write_text("\n".join(texts))
    return folder


def at(samples: float, kind: str = "train", **values: object) -> dict[str, object]:
    return {"event": kind, "samples": samples, **values}


def test_broken_lines_are_passed_over(tmp_path: Path) -> None:
    lines = (at(1), "[1, 2]", '"word"', "{no json", '{"samples": 3}', at(4), '{"event": "tra')
    record = read(written(tmp_path, *lines))
    assert [event["samples"] for event in record.events] == [1, 4]
    assert (record.config, record.result) == ({}, {})


def test_broken_files_beside_the_log_say_nothing(tmp_path: Path) -> None:
    (written(tmp_path) / "config.json").write_text("[")
    (tmp_path / "result.json").write_bytes(b"\xff\xfe\x00")
    assert (read(tmp_path).config, read(tmp_path).result) == ({}, {})


def test_what_was_read_twice_counts_as_it_was_read_last(tmp_path: Path) -> None:
    first = [at(10, loss=3), at(20, loss=2), at(30, loss=1)]
    again = [{"event": "resume", "samples": 10}, at(20, loss=5), at(40, loss=4)]
    record = read(written(tmp_path, *first, *again))
    assert [event["loss"] for event in record.of("train")] == [3, 5, 4]


def test_seconds_between_two_events_lie_on_a_line(tmp_path: Path) -> None:
    record = read(written(tmp_path, at(10, seconds=2), at(12, "divergence"), at(30, seconds=6)))
    found = [record.seconds_at(samples) for samples in (0, 5, 10, 20, 30, 99)]
    assert found == [0, 1, 2, 4, 6, 6]


@pytest.mark.parametrize("value", [None, "3", True, float("nan"), float("inf"), [1]])
def test_only_finite_numbers_are_numbers(value: object) -> None:
    assert number({"x": value}, "x") is None
    assert number({"x": 3}, "x") == 3


def test_a_folder_of_runs_is_refused_and_they_are_named(tmp_path: Path) -> None:
    written(tmp_path / "runs" / "a-1")
    with pytest.raises(InputError, match=r"holds no run: give one of those in it: .*runs/a-1"):
        read(tmp_path / "runs")
    with pytest.raises(InputError, match=r"give what `crossbow train` wrote"):
        read(tmp_path / "nowhere")


def test_names_are_as_short_as_they_can_be() -> None:
    assert short_names([Path("a/x"), Path("a/y")]) == ["x", "y"]
    assert short_names([Path("a/x"), Path("b/x")]) == ["a/x", "b/x"]
    assert short_names([Path("x"), Path("x")]) == ["x", "x"]
    assert short_names([Path("/")]) == ["/"]
