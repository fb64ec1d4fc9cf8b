import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from crossbow.config import DEFAULTS, Config, resolve
from crossbow.errors import InputError

OF_EACH_FIELD = {  # one legal value that is not the default
    "batch_size": 7,
    "epochs": 0.25,
    "lr": 0.0,
    "optimizer": "adamw",
    "schedule": "cosine",
    "label_smoothing": 0.5,
    "learners": 3,
    "sync": "sma:momentum=0.5",
    "compress": "onebit",
    "topology": "ring",
    "speeds": "auto",
    "partition": "speed",
    "ema": 500.0,
    "bn_samples": 0,
    "seed": -1,
    "target": -2.5,
    "eval_every": 1,
    "time_limit_s": 0.5,
    "engine": "stacked",
    "precision": "bf16",
    "channels_last": True,
    "compile": True,
    "threads": 2,
    "device": "cpu",
    "profile": True,
    "log_to": "tensorboard,wandb",
    "replay": "run-1",
    "run_dir": Path("run"),
    "checkpoint_every_s": 0.0,
    "keep": 1,
    "resume": Path("run"),
}


def test_every_field_is_tested_here() -> None:
    assert list(OF_EACH_FIELD) == [field.name for field in dataclasses.fields(Config)]


@pytest.mark.parametrize("name", OF_EACH_FIELD)
def test_user_lies_over_recipe_over_defaults(name: str) -> None:
    said = Config(**{name: OF_EACH_FIELD[name]})
    assert getattr(resolve(Config(), Config()), name) == getattr(DEFAULTS, name)
    assert getattr(resolve(Config(), said), name) == OF_EACH_FIELD[name]
    assert getattr(resolve(said, DEFAULTS), name) == OF_EACH_FIELD[name]


@pytest.mark.parametrize("name", ["lr", "label_smoothing", "seed"])
def test_a_zero_is_a_value_and_not_silence(name: str) -> None:
    recipe = Config(lr=0.5, label_smoothing=0.5, seed=5)
    assert getattr(resolve(Config(**{name: 0}), recipe), name) == 0


def test_a_false_is_a_value_and_not_silence() -> None:
    assert resolve(Config(channels_last=False), Config(channels_last=True)).channels_last is False


def test_after_resolving_only_what_may_be_none_is_none() -> None:
    settings = resolve(Config(), Config())
    unsaid = {f.name for f in dataclasses.fields(Config) if getattr(settings, f.name) is None}
    assert unsaid == {
        "speeds",
        "ema",
        "target",
        "eval_every",
        "time_limit_s",
        "log_to",
        "replay",
        "run_dir",
        "resume",
    }


def test_a_config_can_not_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().lr = 0.1  # type: ignore[misc]


def test_settings_become_plain_json() -> None:
    settings = dataclasses.replace(Config(**OF_EACH_FIELD), optimizer=print)
    written = json.loads(json.dumps(settings.to_json()))
    assert written.pop("optimizer") == "<built-in function print>"
    assert written.pop("run_dir") == written.pop("resume") == "run"
    assert written == {name: getattr(settings, name) for name in written}


WHOLE = "give a whole number of samples, 1 or more"
BAD = [
    ("batch_size", 0, f"batch size 0 is not possible: {WHOLE}"),
    ("batch_size", -16, f"batch size -16 is not possible: {WHOLE}"),
    ("batch_size", 16.0, f"batch size 16.0 is not possible: {WHOLE}"),
    ("batch_size", math.nan, f"batch size nan is not possible: {WHOLE}"),
    ("batch_size", "16", f"batch size 16 is not possible: {WHOLE}"),
    ("batch_size", True, f"batch size True is not possible: {WHOLE}"),
    ("learners", "all", "number of learners all is not possible: give a whole number of learners"),
    ("threads", 0, "number of threads 0 is not possible"),
    ("eval_every", 0, f"evaluation interval 0 is not possible: {WHOLE}"),
    ("eval_every", 0.5, f"evaluation interval 0.5 is not possible: {WHOLE}"),
    ("epochs", 0, "epochs 0 is not possible: give a finite number, above 0"),
    ("epochs", math.inf, "epochs inf is not possible: give a finite number, above 0"),
    ("epochs", 1e300, "epochs 1e+300 is not possible: give a finite number, above 0, at most"),
    ("lr", -0.1, "learning rate -0.1 is not possible: give a finite number, at least 0"),
    ("lr", math.nan, "learning rate nan is not possible: give a finite number, at least 0"),
    ("lr", math.inf, "learning rate inf is not possible: give a finite number, at least 0"),
    ("lr", "0.1", "learning rate 0.1 is not possible: give a finite number, at least 0"),
    ("label_smoothing", 1, "label smoothing 1 is not possible: give a finite number, at least 0, "),
    ("label_smoothing", -0.1, "label smoothing -0.1 is not possible: give a finite number, at lea"),
    ("time_limit_s", 0, "time limit 0 is not possible: give a finite number, above 0"),
    ("time_limit_s", math.inf, "time limit inf is not possible: give a finite number, above 0"),
    ("target", math.nan, "target nan is not possible: give a finite number"),
    ("target", -math.inf, "target -inf is not possible: give a finite number"),
    ("seed", 1.5, "seed 1.5 is not possible: give a whole number from -2^63 to 2^64 - 1"),
    ("seed", 2**64, f"seed {2**64} is not possible: give a whole number from -2^63 to 2^64 - 1"),
    (
        "precision",
        "bf17",
        "unknown precision 'bf17'; did you mean 'bf16'? (legal: float32, bf16, fp16)",
    ),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_a_bad_value_is_refused_with_what_would_be_legal(
    name: str, value: object, message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        Config(**{name: value})


@pytest.mark.parametrize("speeds", ["fast", "1/", "2/0", "2/-1", "1/nan"])
def test_speeds_that_say_nothing_are_refused(speeds: str) -> None:
    with pytest.raises(InputError, match="not possible"):
        Config(speeds=speeds)
