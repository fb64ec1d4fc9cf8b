"""A program on a Ray cluster: Ray Train starts the ranks, and the program stays as it is.

    pip install "ray[train]"
    python examples/ray_train.py examples/with_crossbow.py --workers 2

Ray finds a cluster by its own rules (RAY_ADDRESS), and starts one on this machine if there is none.
Each worker is a rank: Ray Train sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE for it as
torchrun would.
"""

import argparse
import os
import runpy
import sys
from pathlib import Path

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def work(config: dict[str, str | list[str]]) -> None:
    """In a worker: be the program."""
    sys.argv = [str(config["program"]), *config["arguments"]]
    os.chdir(str(config["folder"]))
    runpy.run_path(str(config["program"]), run_name="__main__")


parser = argparse.ArgumentParser(description="Run a program in the workers of a Ray cluster.")
parser.add_argument("program", type=Path, help="a file that all hosts have")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--storage", type=Path, help="where Ray keeps its notes; default: its own")
args, arguments = parser.parse_known_args()

trainer = TorchTrainer(
    work,
    train_loop_config={
        "program": str(args.program.resolve()),
        "arguments": arguments,
        "folder": str(Path.cwd()),
    },
    scaling_config=ScalingConfig(num_workers=args.workers),
    run_config=RunConfig(storage_path=str(args.storage.resolve()) if args.storage else None),
)
trainer.fit()
