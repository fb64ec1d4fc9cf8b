"""A task of your own: data, model, loss and metric, trained by the managed loop.

    python examples/custom_task.py
    python examples/custom_task.py --learners 4
    torchrun --nproc-per-node 2 examples/custom_task.py --learners 4

A network learns where the sine of the product of two numbers is.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import crossbow as xb


def samples(count: int, seed: int) -> TensorDataset:
    """Points of a square, and the surface above them."""
    draw = torch.Generator().manual_seed(seed)
    points = 4 * torch.rand(count, 2, generator=draw) - 2
    return TensorDataset(points, points.prod(1, keepdim=True).sin())


def network() -> nn.Module:
    """A function, so that the run's seed decides the weights."""
    return nn.Sequential(
        nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)
    )


parser = argparse.ArgumentParser(description="Train a task of your own.")
parser.add_argument("--learners", type=int, default=1)
parser.add_argument("--epochs", type=float, default=20)
parser.add_argument("--run-dir", help="default: runs/surface-N")
args = parser.parse_args()

task = xb.Task(
    name="surface",
    model=network,
    loss=F.mse_loss,
    train=samples(20_000, seed=0),
    test=samples(2_000, seed=1),
    metric=xb.Metric("mean error", F.l1_loss, higher_is_better=False),
    recipe=xb.Config(batch_size=16, lr=0.05, schedule="cosine:warmup=1"),
)
config = xb.Config(learners=args.learners, epochs=args.epochs, target=0.01, run_dir=args.run_dir)
result = xb.train(task, config)
if result.run_dir:  # on the first rank
    blind = task.test.tensors[1].abs().mean()
    print(f"mean error {result.metric:.4f}; that of always saying 0 is {blind:.4f}")
    print(f"see it: crossbow report {result.run_dir}")
