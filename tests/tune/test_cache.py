from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from crossbow.config import DEFAULTS
from crossbow.tune import cache


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def place(model: nn.Module | None = None, cores: int = 2, **said: object) -> Path:
    settings = replace(DEFAULTS, **said)
    return cache.place_of("task", model or nn.Linear(2, 3), settings, cores)


def test_a_plan_is_kept_for_its_model_settings_and_machine() -> None:
    assert place() == place()
    others = [
        place(nn.Linear(2, 4)),
        place(nn.Sequential(nn.Linear(2, 3))),
        place(cores=4),
        place(batch_size=8),
        place(optimizer="adamw"),
        place(sync="sma"),
    ]
    assert len({place(), *others}) == len(others) + 1


def test_what_does_not_change_a_step_does_not_change_the_place() -> None:
    assert place(seed=5, epochs=2, lr=0.5, learners=7) == place()


def test_what_is_saved_is_loaded() -> None:
    cache.save(place(), {"chosen": 1})
    assert cache.load(place()) == {"chosen": 1}
    assert [p.suffix for p in place().parent.iterdir()] == [".json"]


def test_there_is_a_rank_for_each_core_or_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 1, 2})
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert cache.rank_cores("auto") == [1, 2, 3]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert cache.rank_cores("auto") == [1, 2]
    assert cache.rank_cores("cpu") == [1, 2, 3]


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_a_file_that_can_not_be_read_is_no_plan(text: str) -> None:
    place().parent.mkdir(parents=True)
    place().write_text(text)
    assert cache.load(place()) is None
    assert cache.load(place(cores=9)) is None
