"""Nobody waits: delays that come and go cost the fleet their mean, not their maximum.

Claim: two ranks, a learner and a core each, ResNet-8 at batch 16. In every step each learner is
delayed at random, on its own, by step * U^2, U uniform in 0 to 1: at most a step, a third of one in
the mean; the longer of the two is half a step in the mean. As medians over the rounds, a step
takes longer than an undelayed one by

    the fleet as it is        the mean, and at most a third of the way from there to the maximum
    the same with a barrier   the maximum, or at least two thirds of the way from the mean to there

The barrier is a wait, after each step, until every rank's clock shows the step just completed. The
fleet's own wait, in the middle of a step, is for the step before it. Both are measured undelayed,
too, and each is compared with itself.

What to expect follows from the delays themselves, as they turned out (a sleep is never exact): the
mean, the mean of the longer one, and between them what one step of slack can't hide, from

    end_r(t) = max(end_r(t - 1) + step + delay_r(t), end_other(t - 1))

Contenders take turns, round by round, and each round has new delays, the same for both.

    python benchmarks/jitter.py --json benchmarks/results/jitter.json

Exit code 0 if the claim holds, 1 if not.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from crossbow.bench.crew import Crew, meeting_place
from crossbow.bench.measure import facts, write
from crossbow.bench.throughput import CASES, READY_BATCHES, WARM_UP_STEPS, run, set_up

RANKS = 2
WAYS = ("slack", "barrier")
SLACK_PAYS, BARRIER_PAYS = 1 / 3, 2 / 3


class Sample(NamedTuple):
    """What a rank saw of a round."""

    seconds: float
    """From the first step's beginning to the last one's end."""
    delays: list[float]
    """Seconds that it was delayed in each step."""


def steps_of(memory: dict[str, Any], delays: Sequence[float], has_barrier: bool) -> Sample:
    """In a rank: train, delayed by so many seconds in each step."""
    model, optimizer, loss, batches = memory["parts"]
    average = memory["fleet"]._average
    average.clocks.wait(average.step)  # all begin together
    slept = []
    start = time.perf_counter()
    for step, delay in enumerate(delays):
        inputs, targets = batches[step % READY_BATCHES]
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        slept.append(sleep(delay))
        optimizer.step()
        if has_barrier:
            average.clocks.wait(average.step)
    average.clocks.wait(average.step)  # and end together
    return Sample(time.perf_counter() - start, slept)


def sleep(seconds: float) -> float:
    """Sleep; return how long it took."""
    if not seconds:
        return 0.0
    start = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - start


def draw(steps: int, seed: int) -> np.ndarray:
    """Delays of each rank and step, in steps."""
    return np.random.default_rng(seed).uniform(size=(RANKS, steps)) ** 2


class Expected(NamedTuple):
    """Seconds a step takes longer."""

    mean: float
    slack: float
    maximum: float


def expect(delays: np.ndarray, step_s: float) -> Expected:
    """What these delays cost by the claim; `delays` are seconds, (ranks, steps)."""
    ends = np.zeros(RANKS)
    for delay in delays.T:
        ends = np.maximum(ends + step_s + delay, ends[::-1])
    steps = delays.shape[1]
    return Expected(
        mean=float(delays.mean()),
        slack=float(ends.max() / steps - step_s),
        maximum=float(delays.max(axis=0).mean()),
    )


def measure(crew: Crew, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Run all rounds; return the lines of each."""
    calm = np.zeros((RANKS, steps))
    step_s = statistics.median(_play(crew, "slack", calm)[0] for _ in range(3))
    lines = []
    for number in range(rounds):
        wild = draw(steps, seed=number) * step_s
        cases = list(product(WAYS, ("calm", "delayed")))
        first = number % len(cases)
        line: dict[str, Any] = {}
        for way, air in cases[first:] + cases[:first]:
            seconds, slept = _play(crew, way, calm if air == "calm" else wild)
            line[f"{way}, {air}"] = seconds
            if air == "delayed":
                line[f"{way}, expected"] = expect(slept, step_s)._asdict()
        for way in WAYS:
            added = line[f"{way}, delayed"] - line[f"{way}, calm"]
            low, high = (line[f"{way}, expected"][name] for name in ("mean", "maximum"))
            line[f"{way}, pays"] = (added - low) / (high - low)
        lines.append(line)
        told = ", ".join(f"{way}, {air} {line[f'{way}, {air}'] * 1e3:.2f}" for way, air in cases)
        say(f"round {number + 1} of {rounds}: {told} ms")
    return lines


def _play(crew: Crew, way: str, delays: np.ndarray) -> tuple[float, np.ndarray]:
    """Seconds a step, and the delays as they turned out."""
    samples = crew.call_each(steps_of, [(list(row), way == "barrier") for row in delays])
    seconds = max(sample.seconds for sample in samples) / delays.shape[1]
    return seconds, np.array([sample.delays for sample in samples])


def conclude(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, and what they say of the claim."""
    said: dict[str, Any] = {}
    for way in WAYS:
        added = [line[f"{way}, delayed"] - line[f"{way}, calm"] for line in lines]
        said[way] = {
            "step_ms": 1e3 * statistics.median(line[f"{way}, calm"] for line in lines),
            "delayed_step_ms": 1e3 * statistics.median(line[f"{way}, delayed"] for line in lines),
            "added_ms": 1e3 * statistics.median(added),
            "expected_ms": {
                name: 1e3 * statistics.median(line[f"{way}, expected"][name] for line in lines)
                for name in Expected._fields
            },
            "pays": statistics.median(line[f"{way}, pays"] for line in lines),
        }
    said["holds"] = {
        f"slack pays at most {SLACK_PAYS:.2f} of the way from mean to maximum": (
            said["slack"]["pays"] <= SLACK_PAYS
        ),
        f"a barrier pays at least {BARRIER_PAYS:.2f} of it": (
            said["barrier"]["pays"] >= BARRIER_PAYS
        ),
    }
    return said


def show(said: dict[str, Any]) -> None:
    """Print the table."""
    heads = ("step", "delayed", "added", "mean", "with slack", "maximum", "pays")
    print(f"{'ms':10}" + "".join(f"{head:>12}" for head in heads))
    for way in WAYS:
        of = said[way]
        figures = [
            of["step_ms"],
            of["delayed_step_ms"],
            of["added_ms"],
            *of["expected_ms"].values(),
        ]
        print(f"{way:10}" + "".join(f"{f:>12.2f}" for f in (*figures, of["pays"])))
    print("\nmean, with slack, maximum: what these delays would add to a step by the mean of the")
    print(
        "two, by the recursion above, and by the longer one. pays: 0 is the mean, 1 the maximum.\n"
    )
    for line, holds in said["holds"].items():
        print(f"{line}: {'holds' if holds else 'does not hold'}")


def say(line: str) -> None:
    """Tell on standard error how it goes."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=list(CASES), default="resnet8")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=150, help="of a contender in a round")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if min(args.batch_size, args.rounds, args.steps) < 1:
        parser.error("give at least one sample, one round and one step")
    where = facts()
    cores = sorted(os.sched_getaffinity(0))
    own = [[cores[rank % len(cores)]] for rank in range(RANKS)]
    try:
        with Crew(RANKS, cores=own) as crew:
            crew.call(set_up, "sma", args.model, args.batch_size, meeting_place())
            crew.call(run, WARM_UP_STEPS)
            lines = measure(crew, args.rounds, args.steps)
    except KeyboardInterrupt:
        return 130
    said = conclude(lines)
    show(said)
    if args.json:
        settings = {"model": args.model, "batch": args.batch_size, "steps": args.steps}
        seeds = {"seeds": list(range(args.rounds))}
        write(args.json, {"claim": "jitter", **where, **settings, **seeds, **said, "rounds": lines})
    return 0 if all(said["holds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
