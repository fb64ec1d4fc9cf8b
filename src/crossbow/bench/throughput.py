"""Throughput: samples a second of Crossbow and of its peers, interleaved in one run.

    adaptive      learners kept together by adaptive averaging, one a core
    sma           the same by synchronous model averaging as published
    allreduce     the same batches, and one model that is moved by the mean gradient
    independent   as many learners that never speak: the limit
    ddp           PyTorch DistributedDataParallel over Gloo, as many processes, each with this batch
    ddp tuned     the same with the settings under which it is fastest
    one process   plain PyTorch with as many threads

Same models, batches, optimizers and flags for all, and batches that are ready in memory: what is
compared is a training step. Contenders take turns, round by round, and are compared within a round.
"""

import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from crossbow.averaging.family import AVERAGINGS
from crossbow.bench.crew import Crew, meeting_place
from crossbow.bench.measure import Speeds, ratio
from crossbow.fleet import Fleet
from crossbow.optim.build import build_optimizer
from crossbow.task import Loss, token_cross_entropy
from crossbow.zoo import models

READY_BATCHES = 8
WARM_UP_STEPS = 10
SEED = 0

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A model, what it reads, and how it is optimized."""

    build: Callable[[], nn.Module]
    read: Callable[[int], Batch]
    """Batch size -> a random batch."""
    optimizer: str
    loss: Loss = F.cross_entropy


def _images(*shape: int) -> Callable[[int], Batch]:
    return lambda size: (torch.randn(size, *shape), torch.randint(0, 10, (size,)))


def _characters(size: int) -> Batch:
    text = torch.randint(0, 96, (size, 65))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


_SGD = "sgd:momentum=0.9,fused=true"
_DECAYED = "sgd:momentum=0.9,weight_decay=1e-4,fused=true"
_ADAMW = "adamw:weight_decay=0.1,fused=true"

CASES: Mapping[str, Case] = {
    "resnet32": Case(partial(models.resnet_cifar, 32), _images(3, 32, 32), _DECAYED),
    "resnet8": Case(partial(models.resnet_cifar, 8), _images(3, 32, 32), _DECAYED),
    "gpt": Case(partial(models.gpt, 96), _characters, _ADAMW, token_cross_entropy),
    "lenet": Case(models.lenet5, _images(1, 28, 28), _SGD),
    "mlp": Case(models.mlp, _images(1, 28, 28), _SGD),
}

OURS = ("adaptive", "sma", "allreduce")
PEERS = ("independent", "ddp", "ddp tuned", "one process")
CONTENDERS = OURS + PEERS
TUNED: Mapping[str, Any] = {  # under which DDP is fastest here; batch norms' buffers then drift
    "gradient_as_bucket_view": True,
    "broadcast_buffers": False,
    "static_graph": True,
}


class Row(NamedTuple):
    """What was measured of one model at one batch size."""

    model: str
    batch_size: int
    speeds: Speeds

    def median(self, contender: str) -> float:
        """Samples a second."""
        return statistics.median(self.speeds[contender])

    def ratio(self, contender: str, base: str) -> float:
        """One contender's speed over another's."""
        return ratio(self.speeds, contender, base)

    def to_json(self) -> dict[str, Any]:
        """All that was measured, and what it says."""
        return {
            "model": self.model,
            "batch_size": self.batch_size,
            "samples_per_second": {name: self.median(name) for name in CONTENDERS},
            "ratio_to": {
                ours: {name: self.ratio(ours, name) for name in CONTENDERS if name != ours}
                for ours in OURS
            },
            "rounds": self.speeds,
        }


def measure(
    names: Sequence[str],
    batch_sizes: Sequence[int],
    ranks: int,
    rounds: int,
    seconds: float,
    on_progress: Callable[[str, int, int], None],
) -> Iterator[Row]:
    """Measure every model at every batch size.

    Args:
        names: of the models, from CASES.
        batch_sizes: of one learner.
        ranks: learners, processes of DDP, and threads of the one process.
        rounds: of each contender.
        seconds: a contender is timed for in a round, about.
        on_progress: told what is measured now, and how many of how many rounds are done.
    """
    cores = sorted(os.sched_getaffinity(0))
    own = [[cores[rank % len(cores)]] for rank in range(ranks)]
    done, total = 0, len(names) * len(batch_sizes) * rounds
    with ExitStack() as stack:
        crews = {
            name: stack.enter_context(
                Crew(1, threads=ranks) if name == "one process" else Crew(ranks, cores=own)
            )
            for name in CONTENDERS
        }
        for name in names:
            for batch_size in batch_sizes:
                what = f"{name}, batch {batch_size}"
                on_progress(what, done, total)
                steps = {
                    contender: _ready(contender, crew, name, batch_size, seconds)
                    for contender, crew in crews.items()
                }
                speeds: Speeds = {contender: [] for contender in CONTENDERS}
                for number in range(rounds):
                    first = number % len(CONTENDERS)
                    for contender in CONTENDERS[first:] + CONTENDERS[:first]:
                        crew = crews[contender]
                        samples = steps[contender] * batch_size * len(crew)
                        speeds[contender].append(samples / _timed(crew, steps[contender]))
                    done += 1
                    on_progress(what, done, total)
                for crew in crews.values():
                    crew.call(put_away)
                yield Row(name, batch_size, speeds)


def _ready(contender: str, crew: Crew, name: str, batch_size: int, seconds: float) -> int:
    """Set a contender up and warm it; return how many steps take about so many seconds."""
    crew.call(set_up, contender, name, batch_size, meeting_place())
    _timed(crew, WARM_UP_STEPS)
    steps, elapsed = WARM_UP_STEPS, 0.0
    while elapsed < min(seconds, 0.2):
        steps *= 2
        elapsed = _timed(crew, steps)
    return max(1, round(steps * seconds / elapsed))


def _timed(crew: Crew, steps: int) -> float:
    start = time.perf_counter()
    crew.call(run, steps)
    return time.perf_counter() - start


def set_up(
    memory: dict[str, Any],
    contender: str,
    name: str,
    batch: int,
    port: int,
    bucket_mb: float | None = None,
) -> None:
    """In a rank: make model, optimizer and batches, and what the contender puts around them.

    Args:
        memory: the rank's, between calls.
        contender: one of CONTENDERS.
        name: of the model, from CASES.
        batch: its size.
        port: where the ranks meet.
        bucket_mb: how much DDP reduces at once; its own choice, if left out.
    """
    os.environ["MASTER_PORT"] = str(port)
    case = CASES[name]
    torch.manual_seed(SEED)
    model = case.build()
    stack = ExitStack()
    if contender.startswith("ddp"):
        dist.init_process_group("gloo")
        stack.callback(dist.destroy_process_group)
        tuned = TUNED if contender == "ddp tuned" else {}
        with warnings.catch_warnings():  # torch 2.13 calls broadcast_buffers something else
            warnings.simplefilter("ignore", FutureWarning)
            model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb, **tuned)
    optimizer = build_optimizer(case.optimizer, model.parameters(), lr=1e-4)
    if contender in OURS:
        sync = AVERAGINGS[contender]()
        memory["fleet"] = stack.enter_context(Fleet(model, optimizer, sync, name="bench"))
    torch.manual_seed(SEED + int(os.environ["RANK"]))
    batches = [case.read(batch) for _ in range(READY_BATCHES)]
    memory |= {"stack": stack, "parts": (model, optimizer, case.loss, batches)}


def run(memory: dict[str, Any], steps: int) -> None:
    """In a rank: train."""
    model, optimizer, loss, batches = memory["parts"]
    for step in range(steps):
        inputs, targets = batches[step % READY_BATCHES]
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()


def put_away(memory: dict[str, Any]) -> None:
    """In a rank: forget the model."""
    memory.pop("stack").close()
    memory.clear()
