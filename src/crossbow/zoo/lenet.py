"""LeNet-5 as benchmarks know it: Caffe's, wider than that of LeCun et al. (1998).

Caffe has a ReLU after the hidden linear layer only. Here the convolutions have theirs too, as in
the LeNet of the first Crossbow; it stands behind the pooling, where it gives the same numbers (a
maximum and a ReLU commute) for a quarter of the work.
"""

from torch import nn


def lenet5() -> nn.Sequential:
    """Build LeNet-5 for grey images (1, 28, 28) and ten classes; 431,080 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 20, kernel_size=5),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
        nn.Conv2d(20, 50, kernel_size=5),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(50 * 4 * 4, 500),
        nn.ReLU(inplace=True),
        nn.Linear(500, 10),
    )
