"""A network on handwritten digits, in plain PyTorch.

    python examples/plain_torch.py

`with_crossbow.py` is the same program, for as many learners as there are processes.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader

from crossbow.data.datasets import digits

data = digits()
train_set, test_set = data.train, data.test
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(train_set, batch_size=16, shuffle=True)

for x, y in (batch for _ in range(10) for batch in loader):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x / 255), y).backward()
    optimizer.step()

right = model(test_set.inputs / 255).argmax(1) == test_set.targets
print(f"test accuracy {right.float().mean():.1%}")
