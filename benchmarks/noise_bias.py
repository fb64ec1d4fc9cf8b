"""What spread does to the measured noise: learners that stand apart see gradients that differ.

Claim: with the lag of 1 that up to four learners have, at the recipe's rate and batch 16, the noise
scale that learners measure where they stand is at most 1.25 times the one they would measure at
their mean, on the same batches, and the gain that follows from it is within 5 %. Beyond four
learners the lag is 0: all stand at one place, and there is no such bias.

Learners are trained, and every so often probed: learner j takes the gradient of a batch where it
stands, and the gradient of the same batch at the mean. Variance and signal (stats/noise.py) are
averaged over all probes before their ratio is taken, since a ratio of small samples is biased by
itself. Larger rates and k are shown without a claim.

    python benchmarks/noise_bias.py --json benchmarks/results/noise_bias.json

Exit code 0 if the claim holds, 1 if not.
"""

import argparse
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crossbow.averaging.family import adaptive
from crossbow.bench.measure import facts, write
from crossbow.data.loader import read, stretches
from crossbow.fleet import Fleet
from crossbow.optim.build import build_optimizer
from crossbow.stats.noise import gain_of, split, sums_of
from crossbow.task import Task
from crossbow.zoo import tasks

BATCH, PROBE_EVERY = 16, 5
CASES = (
    # task, rate, learners, claimed
    ("resnet8-digits", 0.05, 2, True),
    ("resnet8-digits", 0.05, 4, True),
    ("resnet8-digits", 0.05, 16, False),
    ("resnet8-digits", 0.2, 4, False),
    ("lenet-fashion", 0.01, 2, True),
    ("lenet-fashion", 0.01, 4, True),
    ("lenet-fashion", 0.01, 16, False),
)
SCALE_AT_MOST, GAIN_WITHIN = 1.25, 0.05


def gradient(model: nn.Module, task: Task, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Of one batch, as one vector."""
    model.zero_grad()
    task.loss(model(batch[0]), batch[1]).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def places(fleet: Fleet, probe: nn.Module) -> Iterator[None]:
    """Put the probe where each learner stands, in turn."""
    (block,) = fleet._average._letters.arena.parameters
    weights = dict(probe.named_parameters())
    for (row,), _ in fleet._average.learners():
        for name, view in zip(block.layout.names, block.layout.views(row), strict=True):
            weights[name].data.copy_(view)
        yield


def probed(
    fleet: Fleet, task: Task, probe: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Variance and signal: seen where the learners stand, and at their mean."""
    k = fleet.learners
    taken = [next(batches) for _ in range(k)]
    pairs = zip(places(fleet, probe), taken, strict=True)
    apart = torch.stack([gradient(probe, task, batch) for _, batch in pairs])
    probe.load_state_dict(fleet.state_dict())
    together = torch.stack([gradient(probe, task, batch) for batch in taken])
    return split(*sums_of(apart), k), split(*sums_of(together), k)


def measure(name: str, lr: float, k: int, rounds: int, seed: int) -> dict[str, Any]:
    """One case."""
    task = tasks.get(name)
    torch.manual_seed(seed)
    model = task.build_model()
    probe = copy.deepcopy(model)
    optimizer = build_optimizer("sgd:momentum=0.9", model.parameters(), lr)
    wanted = stretches(0, 1_000 * len(task.train), BATCH)
    batches = read(task.train, wanted, seed=seed + 1, prepare=task.prepare)
    sums = torch.zeros(2, 2, dtype=torch.float64)
    with Fleet(model, optimizer, adaptive(lag=1), learners=k) as fleet:
        epochs = rounds * k * BATCH / len(task.train)
        step = 0
        for inputs, targets in fleet.batches(
            task.train, BATCH, epochs, seed=seed, prepare=task.prepare
        ):
            if fleet.is_between_rounds:
                step += 1
                if step % PROBE_EVERY == 0:
                    sums += torch.tensor(probed(fleet, task, probe, batches), dtype=torch.float64)
            optimizer.zero_grad()
            task.loss(model(inputs), targets).backward()
            optimizer.step()
    (apart_noise, apart_signal), (noise, signal) = sums.tolist()
    gains = gain_of(apart_noise, apart_signal, k), gain_of(noise, signal, k)
    return {
        "scale": (apart_noise / apart_signal) / (noise / signal),
        "critical_batch_at_mean": BATCH * noise / signal,
        "gain_apart": gains[0],
        "gain_at_mean": gains[1],
        "gain": gains[0] / gains[1],
    }


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1000, help="of training, in each case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", default="resnet8-digits,lenet-fashion", metavar="NAMES")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    where, lines, holds = facts(), [], True
    for name, lr, k, is_claimed in CASES:
        if name not in args.tasks.split(","):
            continue
        found = measure(name, lr, k, args.rounds, args.seed)
        is_within = found["scale"] <= SCALE_AT_MOST and abs(found["gain"] - 1) <= GAIN_WITHIN
        lines.append({"task": name, "lr": lr, "k": k, "claimed": is_claimed, **found})
        holds &= is_within or not is_claimed
        print(
            f"{name}, rate {lr}, k {k}: noise scale x {found['scale']:.3f}, "
            f"gain {found['gain_apart']:.3f} against {found['gain_at_mean']:.3f} at the mean"
            + ("" if is_claimed else "   (no claim)"),
            flush=True,
        )
    if args.json:
        settings = {"rounds": args.rounds, "seeds": [args.seed]}
        write(args.json, {"claim": "noise bias", **where, **settings, "holds": holds, "of": lines})
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
