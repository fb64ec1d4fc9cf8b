"""Weights & Biases: a run of the project "crossbow", with samples as the horizontal axis.

Its own environment variables say where it goes: WANDB_MODE=offline keeps it in the run's folder.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crossbow.monitor.sinks import scalars

PROJECT = "crossbow"


class WeightsAndBiases:
    """Logs to a run."""

    def __init__(self, path: Path, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=PROJECT, name=path.name, group=name, config=dict(config), dir=str(path)
        )
        self._run.define_metric("samples", hidden=True)
        self._run.define_metric("*", step_metric="samples")

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        """Log the event's numbers."""
        found = scalars(event, values)
        if found:
            self._run.log({"samples": values.get("samples", 0), **found})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def open_sink(path: Path, name: str, config: Mapping[str, Any]) -> WeightsAndBiases:
    """Begin a run, grouped by task."""
    return WeightsAndBiases(path, name, config)
