"""TensorBoard: event files in the run's directory, with samples as steps."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crossbow.monitor.sinks import scalars


class TensorBoard:
    """Writes an event file."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(path))
        text = json.dumps(config, indent=2)
        self._writer.add_text("config", f"```\n{text}\n```")

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        """Add the event's numbers."""
        for name, value in scalars(event, values).items():
            self._writer.add_scalar(name, value, values.get("samples"))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


def open_sink(path: Path, name: str, config: Mapping[str, Any]) -> TensorBoard:
    """Write to a folder of the run's directory."""
    return TensorBoard(path / "tensorboard", config)
