"""Crossbow: train on every device at the batch size that learns best."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crossbow.averaging.family import Averaging as Averaging
    from crossbow.averaging.family import adaptive as adaptive
    from crossbow.averaging.family import aeasgd as aeasgd
    from crossbow.averaging.family import allreduce as allreduce
    from crossbow.averaging.family import asgd as asgd
    from crossbow.averaging.family import diloco as diloco
    from crossbow.averaging.family import eamsgd as eamsgd
    from crossbow.averaging.family import easgd as easgd
    from crossbow.averaging.family import hogwild as hogwild
    from crossbow.averaging.family import local_sgd as local_sgd
    from crossbow.averaging.family import pipelined as pipelined
    from crossbow.averaging.family import post_local_sgd as post_local_sgd
    from crossbow.averaging.family import slowmo as slowmo
    from crossbow.averaging.family import sma as sma
    from crossbow.config import Config as Config
    from crossbow.errors import CrossbowError as CrossbowError
    from crossbow.errors import InputError as InputError
    from crossbow.evaluation import evaluate as evaluate
    from crossbow.fleet import Fleet as Fleet
    from crossbow.task import ACCURACY as ACCURACY
    from crossbow.task import Metric as Metric
    from crossbow.task import Task as Task
    from crossbow.trainer import Interrupted as Interrupted
    from crossbow.trainer import Result as Result
    from crossbow.trainer import train as train
    from crossbow.zoo import tasks as tasks

# Loaded when first asked for: importing torch takes a second that `crossbow --help` need not wait.
_HOMES = {
    "ACCURACY": "crossbow.task",
    "Averaging": "crossbow.averaging.family",
    "Config": "crossbow.config",
    "CrossbowError": "crossbow.errors",
    "Fleet": "crossbow.fleet",
    "InputError": "crossbow.errors",
    "Interrupted": "crossbow.trainer",
    "Metric": "crossbow.task",
    "Result": "crossbow.trainer",
    "Task": "crossbow.task",
    "evaluate": "crossbow.evaluation",
    "adaptive": "crossbow.averaging.family",
    "allreduce": "crossbow.averaging.family",
    "diloco": "crossbow.averaging.family",
    "eamsgd": "crossbow.averaging.family",
    "easgd": "crossbow.averaging.family",
    "local_sgd": "crossbow.averaging.family",
    "post_local_sgd": "crossbow.averaging.family",
    "slowmo": "crossbow.averaging.family",
    "aeasgd": "crossbow.averaging.family",
    "asgd": "crossbow.averaging.family",
    "hogwild": "crossbow.averaging.family",
    "pipelined": "crossbow.averaging.family",
    "sma": "crossbow.averaging.family",
    "tasks": "crossbow.zoo.tasks",
    "train": "crossbow.trainer",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'crossbow' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    return home if _HOMES[name].endswith(f".{name}") else getattr(home, name)


def __dir__() -> list[str]:
    return __all__
