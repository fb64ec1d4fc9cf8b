"""Engines on a GPU: many learners on one card, one after another, stacked, and as streams.

Claim: on one GPU, at batch 16, learners captured as branches of one CUDA graph train at least twice
as many samples a second as learners run one after another, for each of the models below and 8
learners. Checked first: every engine goes the sequential engine's way.

    PYTHONPATH=src python3 benchmarks/gpu_engines.py --json FILE

A case that fails is written down with its traceback, and the next one runs.
"""

import argparse
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import crossbow as xb
from crossbow.bench.measure import facts, write
from crossbow.bench.throughput import CASES
from crossbow.engines.objective import Engine, Objective
from crossbow.engines.sequential import InTurn
from crossbow.engines.stacked import Stacked
from crossbow.engines.streams import Streams
from crossbow.engines.trial import why_not
from crossbow.fleet import Fleet
from crossbow.optim.build import build_optimizer

MODELS = ("mlp", "lenet", "resnet8", "gpt")
ENGINES = ("sequential", "stacked", "streams")
LEARNERS = (1, 2, 4, 8, 16, 32)
CHECK_STEPS = 6


class Crew:
    """A fleet, an engine, and batches that are ready."""

    def __init__(self, name: str, engine: str, learners: int, batch: int, device: str) -> None:
        case = CASES[name]
        torch.manual_seed(0)
        self.model = case.build().to(device).train()
        optimizer = build_optimizer(case.optimizer, self.model.parameters(), lr=1e-3)
        # with one learner, too, the rows are an arena's
        self.fleet = Fleet(self.model, optimizer, xb.sma(alpha=0.5 / learners), learners=learners)
        self.optimizer = optimizer
        self.crew = self.fleet._average.engine
        objective = Objective(self.model, self.model, case.loss)
        self.in_turn = InTurn(objective, optimizer)
        self.engine: Engine = self.in_turn
        if engine == "stacked":
            self.engine = Stacked(objective, self.crew, self.in_turn)
        elif engine == "streams":
            self.engine = Streams(objective, self.crew, self.in_turn)
        torch.manual_seed(1)
        self.batches = [
            tuple(part.to(device) for part in case.read(batch)) for _ in range(learners)
        ]
        self.reason = ""
        if engine != "sequential":
            self.reason = why_not(self.engine, self.in_turn, self.crew, self.batches)

    def round(self) -> list[torch.Tensor]:
        """One step of each learner."""
        losses = []
        for loss in self.engine.gradients(self.batches):
            self.optimizer.step()
            losses.append(loss)
        return losses

    def state(self) -> list[torch.Tensor]:
        """Where learners stand."""
        return [stack.clone() for stack in self.crew.stacked(self.crew.parity).values()]


@contextmanager
def crew_of(*what: Any) -> Iterator[Crew]:
    """A crew for a while."""
    crew = Crew(*what)
    try:
        yield crew
    finally:
        crew.fleet.close()


def wait(device: str) -> None:
    """Return when the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def check(name: str, engine: str, batch: int, device: str) -> dict[str, Any]:
    """How far an engine's learners end from the sequential one's, relative to how far they went."""
    with crew_of(name, "sequential", 3, batch, device) as one:
        start = one.state()
        for _ in range(CHECK_STEPS):
            one.round()
        expected = one.state()
    with crew_of(name, engine, 3, batch, device) as other:
        for _ in range(CHECK_STEPS):
            other.round()
        actual, reason = other.state(), other.reason
    apart = sum(
        float((a - e).double().square().sum()) for a, e in zip(actual, expected, strict=True)
    )
    went = sum(float((e - s).double().square().sum()) for e, s in zip(expected, start, strict=True))
    return {"relative_distance": (apart / max(went, 1e-300)) ** 0.5, "reason": reason}


def measure(
    name: str, engine: str, learners: int, batch: int, device: str, seconds: float
) -> dict[str, Any]:
    """Samples a second, the median of three goes, and the milliseconds of a round."""
    with crew_of(name, engine, learners, batch, device) as crew:
        for _ in range(3):
            crew.round()
        wait(device)
        goes = []
        for _ in range(3):
            start, rounds = time.perf_counter(), 0
            while rounds < 2 or time.perf_counter() - start < seconds / 3:
                crew.round()
                rounds += 1
                if rounds % 4 == 0:
                    wait(device)
            wait(device)
            goes.append((time.perf_counter() - start) / rounds)
        took = statistics.median(goes)
        memory = torch.cuda.max_memory_allocated() if device == "cuda" else None
        return {
            "samples_per_second": learners * batch / took,
            "round_ms": 1000 * took,
            "reason": crew.reason,
            "peak_bytes": memory,
        }


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Its answer, or how it failed."""
    try:
        return work()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def main() -> None:
    """Check, then measure until the time is up; what was found is written after every case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--learners", nargs="+", type=int, default=list(LEARNERS))
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=0.6, help="for each case")
    parser.add_argument("--budget", type=float, default=150, help="seconds for all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    began = time.perf_counter()
    engines = ENGINES if args.device == "cuda" else ENGINES[:2]
    result: dict[str, Any] = {"facts": facts(), "checks": [], "speeds": [], "left_out": 0}
    for name in args.models:
        for engine in engines[1:]:
            found = attempt(lambda n=name, e=engine: check(n, e, args.batch_size, args.device))
            result["checks"].append({"model": name, "engine": engine, **found})
            print(result["checks"][-1], flush=True)
            write(args.json, result)
    for learners in args.learners:
        for name in args.models:
            for engine in engines:
                if time.perf_counter() - began > args.budget:
                    result["left_out"] += 1
                    continue
                if args.device == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                what = (name, engine, learners, args.batch_size, args.device, args.seconds)
                found = attempt(lambda what=what: measure(*what))
                result["speeds"].append(
                    {"model": name, "engine": engine, "learners": learners, **found}
                )
                told = {k: v for k, v in result["speeds"][-1].items() if k != "traceback"}
                print(told, flush=True)
                write(args.json, result)
    result["seconds"] = time.perf_counter() - began
    write(args.json, result)


if __name__ == "__main__":
    main()
