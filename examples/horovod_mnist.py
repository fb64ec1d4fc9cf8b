"""A script for Horovod, on handwritten digits; one import differs from what Horovod would run.

    torchrun --nproc-per-node 2 examples/horovod_mnist.py
    python examples/horovod_mnist.py --epochs 2

It has what Horovod's documentation asks a PyTorch script for: initialize, share the data by rank,
scale the learning rate, wrap the optimizer, broadcast parameters and the optimizer's state, average
metrics. With Horovod the import is `import horovod.torch as hvd`, and the launcher `horovodrun`.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import crossbow.hvd as hvd
from crossbow.data.datasets import Arrays, digits


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=3)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=3)
        self.conv2_drop = nn.Dropout2d(0.1)
        self.fc1 = nn.Linear(80, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities."""
        x = F.relu(self.conv1(x))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Digits, by Horovod's names")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--batches-per-allreduce", type=int, default=1)
    return parser.parse_args(arguments)


def loader(data: Arrays, batch_size: int) -> tuple[DataLoader, DistributedSampler]:
    """Read this rank's part of the data."""
    part: Dataset = TensorDataset(data.inputs.view(-1, 1, 8, 8) / 255, data.targets)
    sampler: DistributedSampler = DistributedSampler(part, num_replicas=hvd.size(), rank=hvd.rank())
    return DataLoader(part, batch_size=batch_size, sampler=sampler), sampler


def metric_average(value: float, name: str) -> float:
    """The mean over all ranks."""
    return hvd.allreduce(torch.tensor(value), name=name).item()


def main(arguments: list[str] | None = None) -> float:
    """Train; return the accuracy on the test set."""
    args = parse(arguments)
    hvd.init()
    torch.manual_seed(args.seed)
    data = digits()
    whole = args.batch_size * args.batches_per_allreduce
    train_loader, train_sampler = loader(data.train, whole)
    test_loader, test_sampler = loader(data.test, args.batch_size)

    model = Net()
    lr_scaler = args.batches_per_allreduce * hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        backward_passes_per_step=args.batches_per_allreduce,
        op=hvd.Average,
    )

    accuracy = 0.0
    for epoch in range(1, args.epochs + 1):
        model.train()
        train_sampler.set_epoch(epoch)
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            parts = zip(inputs.split(args.batch_size), targets.split(args.batch_size), strict=True)
            for part, wanted in parts:
                loss = F.nll_loss(model(part), wanted, reduction="sum") / len(inputs)
                loss.backward()
            optimizer.step()
        model.eval()
        right = 0
        with torch.no_grad():
            for inputs, targets in test_loader:
                right += (model(inputs).argmax(1) == targets).sum().item()
        accuracy = metric_average(right / len(test_sampler), "accuracy")
        if hvd.rank() == 0:
            print(f"epoch {epoch}: test accuracy {accuracy:.1%}")
    hvd.shutdown()
    return accuracy


if __name__ == "__main__":
    main()
