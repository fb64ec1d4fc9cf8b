r"""Every method on the same tasks: accuracy against samples, and against time.

No claim: what is compared is methods at their defaults, four learners, batches of 16 each, and the
recipe of the task, whose learning rate was chosen for one learner. Whoever tunes a method gets more
out of it: --scale 4 multiplies the rate of all, and a line keeps the scale that it was run with.

    lenet     LeNet-5 on Fashion-MNIST
    resnet8   ResNet-8 on CIFAR-10

Each run is a `crossbow train` of its own on --ranks processes, one after another, so the times are
comparable if nothing else runs. "alone" is one learner. A run that is in --json already is not run
again, so it can be interrupted; --plot draws what is there.

    python benchmarks/methods.py --json benchmarks/results/methods.json \
        --plot docs/algorithms/methods.svg

Exit code 0.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crossbow.averaging.family import AVERAGINGS
from crossbow.bench.measure import facts, write
from crossbow.comm.launch import die_with_parent
from crossbow.zoo import tasks

TASKS = {"lenet": "lenet-fashion", "resnet8": "resnet8-cifar10"}
ALONE = "alone"
METHODS = (ALONE, *AVERAGINGS)
LEARNERS, BATCH_SIZE, LOOKS = 4, 16, 10
EAMSGD_OPTIMIZER = "sgd:momentum=0.9,nesterov=true"
LEFT, WIDTH, TOP, HEIGHT = 48, 380, 34, 240
PANELS = (("samples", "samples"), ("seconds", "seconds of training and evaluation"))
HUES = {method: 360 * number // len(METHODS) for number, method in enumerate(METHODS)}


def train(
    case: str, method: str, seed: int, *, epochs: float, ranks: int, scale: float
) -> dict[str, Any]:
    """Run one, and return what its log says."""
    task = tasks.get(TASKS[case])
    samples = round(epochs * len(task.train))
    learners = 1 if method == ALONE else LEARNERS
    options = {
        "--learners": learners,
        "--ranks": min(ranks, learners),
        "--batch-size": BATCH_SIZE,
        "--epochs": epochs,
        "--eval-every": max(1, samples // LOOKS),
        "--seed": seed,
    }
    if method != ALONE:
        options["--sync"] = method
    if method == "eamsgd":
        options["--optimizer"] = EAMSGD_OPTIMIZER
    if scale != 1:
        options["--lr"] = scale * task.recipe.lr
    with tempfile.TemporaryDirectory() as folder:
        words = [str(word) for option in options.items() for word in option]
        command = [sys.executable, "-m", "crossbow", "train", TASKS[case], *words]
        done = subprocess.run(
            [*command, "--quiet", "--run-dir", f"{folder}/run"],
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=die_with_parent,
        )
        log = (Path(folder) / "run/log.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in log]
    return {
        "looks": [
            {key: event[key] for key in ("samples", "seconds", "metric")}
            for event in events
            if event["event"] == "eval"
        ],
        "error": done.stderr.strip()[-300:] or None,  # such as a loss that became infinite
        "machine": facts(),
    }


def best(found: Mapping[str, Any]) -> float:
    """The best accuracy of a run."""
    return max((look["metric"] for look in found["looks"]), default=0.0)


def plot(runs: Mapping[str, Any], path: Path) -> None:
    """Draw the first seed of each run as a small SVG, readable in light and dark."""
    cases = list(dict.fromkeys(key.split()[0] for key in runs))
    height = len(cases) * (HEIGHT + TOP + 40)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH + 140} {height + 10}" '
        'font-family="sans-serif" font-size="11" fill="#888888">'
    ]
    for row, case in enumerate(cases):
        firsts = {
            key.split()[1]: found
            for key, found in reversed(runs.items())
            if key.split()[0] == case and found["looks"]
        }
        for column, (axis, name) in enumerate(PANELS):
            left, top = LEFT + column * WIDTH, TOP + row * (HEIGHT + TOP + 40)
            parts += _panel(firsts, axis, left, top, f"{case}: accuracy against {name}")
    for number, (method, hue) in enumerate(HUES.items()):
        y = TOP + 18 * number
        parts.append(_text(2 * WIDTH + 20, y, method, f"hsl({hue} 65% 50%)"))
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def _panel(found: Mapping[str, Any], axis: str, left: float, top: float, title: str) -> list[str]:
    """A line a method."""
    looks = [look for run in found.values() for look in run["looks"]]
    most = max((look[axis] for look in looks), default=1) or 1
    low = min((look["metric"] for look in looks), default=0)
    high = max((look["metric"] for look in looks), default=1)
    span = max(high - low, 0.01)
    right = left + WIDTH - LEFT - 20
    parts = [
        _text(left, top - 12, title),
        _text(right - 40, top + HEIGHT + 16, f"{most:,.0f}"),
        _text(left - 40, top + 8, f"{high:.1%}"),
        _text(left - 40, top + HEIGHT, f"{low:.1%}"),
        f'<path d="M{left} {top}V{top + HEIGHT}H{right}" stroke="#888888" fill="none"/>',
    ]
    for method, run in found.items():
        points = " ".join(
            f"{left + look[axis] / most * (right - left):.1f},"
            f"{top + HEIGHT * (1 - (look['metric'] - low) / span):.1f}"
            for look in run["looks"]
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="hsl({HUES[method]} 65% 50%)" '
            'stroke-width="1.5"/>'
        )
    return parts


def _text(x: float, y: float, text: str, color: str = "#888888") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}">{text}</text>'


def planned(args: argparse.Namespace) -> list[tuple[str, str, int]]:
    """What is to be run: all methods of a task and seed before the next one."""
    return [
        (case, method, seed)
        for seed in range(args.seeds)
        for case in args.tasks
        for method in args.methods
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--seeds", type=int, default=2, help="how many")
    parser.add_argument("--epochs", type=float, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="of all learning rates")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, write, draw."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if min(args.seeds, args.ranks) < 1 or args.epochs <= 0 or args.scale <= 0:
        parser.error("give 1 seed and rank or more, and epochs and a scale above 0")
    kept = json.loads(args.json.read_text()) if args.json.exists() else {}
    runs: dict[str, Any] = kept.get("runs", {})
    for case, method, seed in planned(args):
        key = f"{case} {method} seed={seed} epochs={args.epochs:g} scale={args.scale:g}"
        if key not in runs:
            size = {"epochs": args.epochs, "ranks": args.ranks, "scale": args.scale}
            runs[key] = train(case, method, seed, **size)
            print(f"{key}: {best(runs[key]):.2%}", flush=True)
            learners = {"learners": LEARNERS, "batch_size": BATCH_SIZE, "ranks": args.ranks}
            write(args.json, {"benchmark": "methods", **learners, "runs": runs})
    if args.plot:
        plot(runs, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
