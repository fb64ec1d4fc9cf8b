"""What benchmarks share: interleaved rounds, medians, and the facts a result can't do without.

Contenders run in turn, round by round, and each round starts with another one: what else happens on
the machine then meets all of them alike. They are compared within a round, and the median of these
ratios is the result.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from crossbow.monitor.machine import machine

Contender = Callable[[int], float]
"""A seed -> samples a second."""

Speeds = dict[str, list[float]]
"""Of each contender, in each round."""


def interleave(contenders: Mapping[str, Contender], rounds: int, title: str) -> Speeds:
    """Run every contender once a round; say on standard error how it goes."""
    names = list(contenders)
    speeds: Speeds = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            speeds[name].append(contenders[name](number))
        told = ", ".join(f"{name} {speeds[name][-1]:,.0f}" for name in names)
        print(f"{title}: round {number + 1} of {rounds}: {told} samples/s", file=sys.stderr)
    return speeds


def ratio(speeds: Speeds, name: str, base: str) -> float:
    """The median over the rounds of one contender's speed over another's."""
    pairs = zip(speeds[name], speeds[base], strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def facts() -> dict[str, Any]:
    """Where and with what a result was measured."""
    return {
        **machine(),
        "load_before": os.getloadavg()[0],
        "commit": _git("rev-parse", "HEAD"),
        "dirty": _git("status", "--porcelain") != "",
    }


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result as a file that people compare line by line."""
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _git(*arguments: str) -> str | None:
    """What git says of the working tree, or None where there is none."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
