"""MLflow: a run of an experiment named after the task, with samples as steps.

MLFLOW_TRACKING_URI says where it goes; without it MLflow chooses.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crossbow.monitor.sinks import scalars


class MLflow:
    """Logs to a run of its own, and leaves MLflow's current one alone."""

    def __init__(self, path: Path, name: str, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._make_metric = MlflowClient(), Metric
        found = self._client.get_experiment_by_name(name)
        number = found.experiment_id if found else self._client.create_experiment(name)
        run = self._client.create_run(number, run_name=path.name)
        self._id: str = run.info.run_id
        params = [Param(key, str(value)) for key, value in config.items()]
        self._client.log_batch(self._id, params=params)

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        """Log the event's numbers, all with one request."""
        now, samples = round(1000 * time.time()), int(values.get("samples", 0))
        found = scalars(event, values).items()
        metrics = [self._make_metric(name, value, now, samples) for name, value in found]
        if metrics:
            self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._id)


def open_sink(path: Path, name: str, config: Mapping[str, Any]) -> MLflow:
    """Begin a run."""
    return MLflow(path, name, config)
