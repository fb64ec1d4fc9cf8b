"""Machine: what a run is computed on."""

import os
import platform
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """The facts that a speed can't do without."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
