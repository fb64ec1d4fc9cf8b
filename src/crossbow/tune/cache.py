"""Cache: plans that were made before, each in a file that people can read.

A plan holds for a model, its optimizer and averaging, a batch size, a machine and a version of
torch: all these make its name.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from crossbow.bench.measure import facts
from crossbow.comm.world import World
from crossbow.config import Config
from crossbow.data.catalog import default_data_dir

AUTO = "auto"
"""What is asked for if nothing is."""

FORMAT = 1
"""Of the files; plans of another one are not read."""


def place_of(name: str, model: nn.Module, settings: Config, cores: int, asked: str = AUTO) -> Path:
    """Where the plan for this model, these settings and so many cores is kept.

    Args:
        name: of the task.
        model: on which nothing but its structure matters.
        settings: of which those matter that a step depends on.
        cores: that may be used.
        asked: what else was asked for: the precision, say.
    """
    tensors = [(n, *t.shape, str(t.dtype)) for n, t in model.state_dict().items()]
    said = (
        FORMAT,
        repr(model),
        tensors,
        repr(settings.optimizer),
        settings.sync,
        settings.device,
        facts()["cpu"],
        facts()["gpus"],
        cores,
        asked,
        torch.__version__,
    )
    digest = hashlib.sha256(repr(said).encode()).hexdigest()[:12]
    return default_data_dir() / "plans" / f"{name}-{settings.batch_size}-{digest}.json"


def rank_cores(device: str) -> list[int]:
    """The cores that ranks may use, one each: as many as there are GPUs, if these train."""
    cores = sorted(os.sched_getaffinity(0))
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    return cores[: gpus or len(cores)]


def planned_learners(name: str, model: nn.Module, settings: Config, world: World) -> int | None:
    """How many learners a rank has in the plan that was made before; None if there is none."""
    cores = len(rank_cores(settings.device)) if world.size == 1 else world.local_size
    kept = load(place_of(name, model, settings, cores))
    if kept is None:
        return None
    learners, ranks = (int(kept["chosen"][name]) for name in ("learners", "ranks"))
    return max(1, round(learners / ranks))


def load(place: Path) -> dict[str, Any] | None:
    """What was kept there; None if nothing was, or nothing that can be read."""
    try:
        kept = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return kept if isinstance(kept, dict) else None


def save(place: Path, plan: Mapping[str, Any]) -> None:
    """Keep a plan, whole or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
    partial.replace(place)
