"""A transformer learns to sort, in a loop of your own with a schedule and gradient clipping.

    python examples/transformer.py
    torchrun --nproc-per-node 2 examples/transformer.py --learners 4

The lines that Crossbow adds are marked.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import crossbow as xb

LENGTH, SYMBOLS, WIDTH = 8, 16, 64


class Sorter(nn.Module):
    """Reads symbols, and says which one stands at each place once they are sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, symbols: Tensor) -> Tensor:
        """Scores (B, T, symbols) for symbols (B, T)."""
        return self.head(self.layers(self.symbols(symbols) + self.places))


def samples(count: int, seed: int) -> TensorDataset:
    """Rows of symbols, and the same rows sorted."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randint(SYMBOLS, (count, LENGTH), generator=draw)
    return TensorDataset(rows, rows.sort(1).values)


parser = argparse.ArgumentParser(description="A transformer learns to sort.")
parser.add_argument("--learners", type=int, help="of all ranks; default: one a rank")
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--samples", type=int, default=20_000, help="to learn from")
args = parser.parse_args()

train_set, test_set = samples(args.samples, seed=0), samples(1000, seed=1)
torch.manual_seed(0)
model = Sorter()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
fleet = xb.Fleet(model, optimizer, learners=args.learners)  # crossbow

for rows, wanted in fleet.batches(train_set, batch_size=args.batch_size):  # crossbow
    share = fleet.samples / args.samples  # of all that is to be read, by all learners
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * min(1.0, 20 * share) * (1 - share)
    loss = F.cross_entropy(model(rows).flatten(0, 1), wanted.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

with fleet.central(), torch.no_grad():  # crossbow
    model.eval()
    rows, wanted = test_set.tensors
    right = model(rows).argmax(-1) == wanted
if fleet.world.rank == 0:
    print(f"places right {right.float().mean():.1%}, rows right {right.all(1).float().mean():.1%}")
