"""Learn like one learner: epochs to a target against the number of learners, nothing retuned.

Claim: at the hyper-parameters chosen for one learner (batch 16, the recipe's learning rate brought
to that batch, momentum 0.9, constant), medians over three seeds, with the better of the last and
the averaged weights for every method, adaptive averaging needs

    at most 1.05 times the epochs of one learner with 2 learners
    at most 1.3  times with 16

to 90.5 % on Fashion-MNIST (LeNet) and to 72 % on CIFAR-10 (ResNet-8). Beside it, without a claim:

    sma         synchronous model averaging as published
    linear      all-reduce of the learners' moves, the rate times k, warm-up over the first epoch
    unscaled    the same at the rate of one learner
    sqrt        adaptive averaging with a gain of sqrt(k) in the place of the measured one

"lenet-adamw" is LeNet under AdamW: it says what a gain means for a rule whose moves don't grow with
the gradient.

All run in one process, k learners in turn: on a CPU the bits are those of k processes (a law that
tests check). Both weights are scored every fifth of an epoch, and the crossing is interpolated.
Runs end at the target, or after --most-epochs. Several go on side by side (--jobs), so no figure
here is a time. A run that is in --json already is not run again, so it can be interrupted.

    python benchmarks/statistical_efficiency.py --json benchmarks/results/learn_like_one.json
    python benchmarks/statistical_efficiency.py --json ... --plot docs/algorithms/adaptive.svg

Exit code 0 if the claim holds, 1 if not.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from crossbow.averaging.family import parse
from crossbow.bench.measure import facts, write
from crossbow.comm.launch import die_with_parent
from crossbow.evaluation import calibrate, evaluate
from crossbow.fleet import Fleet
from crossbow.optim import schedule
from crossbow.optim.build import build_optimizer
from crossbow.task import Task
from crossbow.zoo import tasks

BATCH = 16
HALF_LIFE = 10_000  # samples
LOOKS_AN_EPOCH = 5
BN_SAMPLES = 2048
CLAIMED = {2: 1.05, 16: 1.3}
CLAIMED_CASES = ("lenet", "resnet8")


@dataclass(frozen=True)
class Case:
    """A task at the hyper-parameters of one learner."""

    task: str
    lr: float
    optimizer: str
    target: float
    most_epochs: float


CASES = {
    "lenet": Case("lenet-fashion", 0.01, "sgd:momentum=0.9", 0.905, 6),
    "resnet8": Case("resnet8-cifar10", 0.0125, "sgd:momentum=0.9,weight_decay=1e-4", 0.72, 10),
    "lenet-adamw": Case("lenet-fashion", 0.001, "adamw:weight_decay=0.01", 0.905, 6),
}

METHODS = {
    "adaptive": "adaptive",
    "sma": "sma",
    "linear": "adaptive:gain=linear,lead=0,lag=0",
    "unscaled": "adaptive:gain=1,lead=0,lag=0",
    "sqrt": "adaptive:gain=sqrt",
}


@dataclass(frozen=True, order=True)
class Run:
    """One training."""

    case: str
    method: str
    k: int
    seed: int

    @property
    def key(self) -> str:
        """A name for files."""
        return f"{self.case}/{self.method}/{self.k}/{self.seed}"


def train(
    run: Run, most_epochs: float | None, data_dir: Path | None, device: str
) -> dict[str, Any]:
    """Train until the target; return what was seen on the way."""
    die_with_parent()
    torch.set_num_threads(1)
    case = CASES[run.case]
    task = tasks.get(case.task, data_dir=data_dir)
    n, limit = len(task.train), most_epochs or case.most_epochs
    torch.manual_seed(run.seed)
    model = task.build_model().to(device)
    optimizer = build_optimizer(case.optimizer, model.parameters(), case.lr)
    warm = run.method == "linear" and run.k > 1
    spec = f"constant:warmup=1,start={1 / run.k}" if warm else "constant"
    rate = schedule.parse(spec, case.lr, n, math.ceil(limit * n))
    looks: list[dict[str, float]] = []
    gains: list[float] = []
    sync = parse(METHODS[run.method])
    with Fleet(model, optimizer, sync, learners=run.k, ema=HALF_LIFE) as fleet:
        model.train()
        due = n / LOOKS_AN_EPOCH
        batches = fleet.batches(task.train, BATCH, limit, seed=run.seed, prepare=task.prepare)
        for inputs, targets in batches:
            if fleet.samples >= due and fleet.is_between_rounds:
                due += n / LOOKS_AN_EPOCH
                looks.append({"epoch": fleet.samples / n, **score(fleet, task, run.seed)})
                gains.append(fleet.gain.value if fleet.gain else 1.0)
                if best(looks[-1]) >= case.target or not math.isfinite(looks[-1]["loss"]):
                    break
            optimizer.param_groups[0]["lr"] = rate(fleet.samples)
            optimizer.zero_grad()
            loss = task.loss(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
    return {"epochs": crossing(looks, case.target), "looks": looks, "gains": gains}


def score(fleet: Fleet, task: Task, seed: int) -> dict[str, float]:
    """Accuracy of the last and of the averaged weights."""
    with fleet.central() as model:
        if fleet.learners > 1:
            calibrate(model, task, BN_SAMPLES, seed)
        last = evaluate(model, task)
    with fleet.averaged() as model:
        calibrate(model, task, BN_SAMPLES, seed)
        averaged = evaluate(model, task)
    return {"last": last.metric, "averaged": averaged.metric, "loss": last.loss}


def best(look: Mapping[str, float]) -> float:
    """The better of the two."""
    return max(look["last"], look["averaged"])


def crossing(looks: Sequence[Mapping[str, float]], target: float) -> float | None:
    """Epochs to the target, interpolated between looks."""
    before_epoch, before = 0.0, 0.0
    for look in looks:
        now = best(look)
        if now >= target:
            share = (target - before) / (now - before)
            return before_epoch + share * (look["epoch"] - before_epoch)
        before_epoch, before = look["epoch"], now
    return None


def epochs_of(found: Mapping[str, Any], case: str, method: str, k: int) -> list[float]:
    """Of each seed that was run; infinite where the target was not reached."""
    method = "adaptive" if k == 1 else method  # one learner is the same in all
    return [
        math.inf if values["epochs"] is None else values["epochs"]
        for key, values in found.items()
        if key.startswith(f"{case}/{method}/{k}/")
    ]


def median_epochs(found: Mapping[str, Any], case: str, method: str, k: int) -> float | None:
    """Over the seeds that were run; None if the middle one didn't reach the target."""
    middle = statistics.median(epochs_of(found, case, method, k) or [math.inf])
    return middle if math.isfinite(middle) else None


def planned(
    cases: Sequence[str], methods: Sequence[str], ks: Sequence[int], seeds: int
) -> list[Run]:
    """What the claim needs first; one learner is the same for all methods."""
    runs = [
        Run(case, method, k, seed)
        for case in cases
        for method in methods
        for k in ks
        for seed in range(seeds)
        if k > 1 or method == "adaptive"
    ]
    order = ["adaptive", "linear", "sma", "unscaled", "sqrt"]
    return sorted(runs, key=lambda run: (order.index(run.method), -run.k, run.seed))


def run_all(
    runs: Sequence[Run], jobs: int, arguments: tuple[Any, ...]
) -> Iterator[tuple[Run, Any]]:
    """Run side by side; yield each as it ends."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("forkserver")) as pool:
        futures = {pool.submit(train, run, *arguments): run for run in runs}
        for future in as_completed(futures):
            yield futures[future], future.result()


def conclude(found: Mapping[str, Any], ks: Sequence[int]) -> tuple[list[dict[str, Any]], bool]:
    """Medians and ratios to one learner; whether the claim holds for all that was run."""
    lines, holds = [], True
    for case in CASES:
        alone = median_epochs(found, case, "adaptive", 1)
        for method in METHODS:
            for k in ks:
                seeds = len(epochs_of(found, case, method, k))
                is_shown = any(key.startswith(f"{case}/{method}/") for key in found)
                if alone is None or not (seeds and is_shown):
                    continue
                epochs = median_epochs(found, case, method, k)
                line: dict[str, Any] = {"case": case, "method": method, "k": k, "seeds": seeds}
                ratio = epochs / alone if epochs else None
                lines.append(line | {"epochs": epochs, "ratio": ratio})
                if method == "adaptive" and k in CLAIMED and case in CLAIMED_CASES:
                    holds &= ratio is not None and ratio <= CLAIMED[k]
    return lines, holds


def show(lines: Sequence[Mapping[str, Any]], ks: Sequence[int]) -> None:
    """Print a table a case."""
    for case in dict.fromkeys(line["case"] for line in lines):
        print(f"\n{case}: median epochs to {CASES[case].target:.1%} (times one learner's)")
        print(f"{'':10}" + "".join(f"{f'k = {k}':>16}" for k in ks))
        for method in METHODS:
            cells = {
                line["k"]: f"{line['epochs']:.2f} ({line['ratio']:.2f})"
                if line["epochs"]
                else "not reached"
                for line in lines
                if (line["case"], line["method"]) == (case, method)
            }
            if cells:
                print(f"{method:10}" + "".join(f"{cells.get(k, ''):>16}" for k in ks))


COLORS = {
    "adaptive": "#1b7fbd",
    "sma": "#d1752a",
    "linear": "#3f9b57",
    "unscaled": "#8a63c2",
    "sqrt": "#b8506b",
}
WIDTH, HEIGHT, LEFT, TOP = 360, 230, 46, 34
MOST_RATIO = 4.0  # what needs more, or never gets there, is drawn at the upper edge


def plot(lines: Sequence[Mapping[str, Any]], ks: Sequence[int], path: Path) -> None:
    """Draw epochs against learners as a small SVG, readable in light and dark."""
    cases = list(dict.fromkeys(line["case"] for line in lines))
    size = f"0 0 {len(cases) * WIDTH} {TOP + HEIGHT + 64}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" font-family="sans-serif" '
        'font-size="12" fill="#888888">'
    ]
    for number, case in enumerate(cases):
        mine = [line for line in lines if line["case"] == case]
        parts += _panel(mine, ks, number * WIDTH + LEFT, f"{case}: epochs, in one learner's")
    for i, (method, color) in enumerate(COLORS.items()):
        parts.append(_dot(LEFT + 105 * i, TOP + HEIGHT + 52, color))
        parts.append(_text(LEFT + 105 * i + 10, TOP + HEIGHT + 56, method, "start"))
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def _panel(
    lines: Sequence[Mapping[str, Any]], ks: Sequence[int], left: int, title: str
) -> list[str]:
    """One case: a line a method."""
    right = left + WIDTH - LEFT - 20
    xs = {k: left + i * (right - left) / max(1, len(ks) - 1) for i, k in enumerate(ks)}
    parts = [_text(left, 18, title, "start")]
    for tick in (1, 2, 3, 4):
        y = _height(tick)
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#888888" stroke-opacity="0.3"/>')
        parts.append(_text(left - 8, y + 4, f"{tick}", "end"))
    parts += [_text(x, TOP + HEIGHT + 18, f"{k}", "middle") for k, x in xs.items()]
    parts.append(_text((left + right) / 2, TOP + HEIGHT + 36, "learners", "middle"))
    for method, color in COLORS.items():
        mine = [line for line in lines if line["method"] == method]
        points = [(xs[line["k"]], _height(line["ratio"] or MOST_RATIO)) for line in mine]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [_dot(x, y, color) for x, y in points]
    return parts


def _height(ratio: float) -> float:
    return TOP + HEIGHT * (1 - (min(ratio, MOST_RATIO) - 0.5) / (MOST_RATIO - 0.5))


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _dot(x: float, y: float, color: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>'


def main() -> int:
    """Run what is missing, print, write, plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES), metavar="NAMES")
    parser.add_argument("--methods", default=",".join(METHODS), metavar="NAMES")
    parser.add_argument("--learners", default="1,2,4,8,16", metavar="NUMBERS")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--most-epochs", type=float, help="default: the case's")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    args = parser.parse_args()
    ks = [int(k) for k in args.learners.split(",")]
    cases, methods = args.cases.split(","), args.methods.split(",")
    where = facts() | {"device": args.device}
    found: dict[str, Any] = {}
    if args.json and args.json.exists():
        found = json.loads(args.json.read_text(encoding="utf-8"))["runs"]
    missing = [r for r in planned(cases, methods, ks, args.seeds) if r.key not in found]
    for run, values in run_all(missing, args.jobs, (args.most_epochs, args.data_dir, args.device)):
        found[run.key] = values | where
        reached = values["epochs"] and f"{values['epochs']:.2f} epochs"
        print(f"{run.key}: {reached or 'not reached'}", file=sys.stderr, flush=True)
        if args.json:
            lines, holds = conclude(found, ks)
            result = {"claim": "statistical efficiency", "holds": holds, "medians": lines}
            write(args.json, result | {"runs": dict(sorted(found.items()))})
    lines, holds = conclude(found, ks)
    show(lines, ks)
    if args.plot:
        plot(lines, ks, args.plot)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
