"""A network on handwritten digits, for as many learners as there are processes.

    python examples/with_crossbow.py
    torchrun --nproc-per-node 2 examples/with_crossbow.py

`plain_torch.py` is the same program without Crossbow.
"""

import torch
from torch import nn

import crossbow as xb
from crossbow.data.datasets import digits

data = digits()
train_set, test_set = data.train, data.test
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
fleet = xb.Fleet(model, optimizer, sync=xb.sma())

for x, y in fleet.batches(train_set, batch_size=16, epochs=10):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x / 255), y).backward()
    optimizer.step()

with fleet.central():
    right = model(test_set.inputs / 255).argmax(1) == test_set.targets
if fleet.world.rank == 0:
    print(f"test accuracy {right.float().mean():.1%}")
fleet.save("digits.safetensors")
