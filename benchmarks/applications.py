"""Translation and captioning, really trained: what models write when they write by themselves.

Claim: one learner, with the recipes as they are, writes the held-out part at the end

    transformer-help   10 epochs   with a BLEU of 17 or more
    captioner-shapes    5 epochs   with 95 % or more of the captions right word for word

    crossbow data fetch libreoffice-help
    python benchmarks/applications.py --json benchmarks/results/applications.json

`--learners` and `--sync` try it with several. Exit code 0 if the claim holds, 1 if not.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from crossbow import Config, tasks, train
from crossbow.bench.measure import facts, write

CLAIMED = {"transformer-help": ("bleu", 17.0, 10), "captioner-shapes": ("exact_match", 0.95, 5)}


def main() -> int:
    """Train the tasks, and compare with the claim."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=CLAIMED, default=list(CLAIMED))
    parser.add_argument("--epochs", type=float, help="in the place of the claim's")
    parser.add_argument("--learners", type=int, default=1)
    parser.add_argument("--sync", default="adaptive")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    machine, results, holds = facts(), [], True
    for name in args.tasks:
        score, claimed, epochs = CLAIMED[name]
        config = Config(
            epochs=args.epochs or epochs, learners=args.learners, sync=args.sync, seed=args.seed
        )
        result = run(name, config, args.data_dir)
        print(f"{name}: {score} {result['final_metrics'][score]:.4g}, {result['seconds']:.0f} s")
        results.append({**result, "claimed": claimed})
        holds &= result["final_metrics"][score] >= claimed
    if args.json:
        write(args.json, {**machine, "seeds": [args.seed], "sync": args.sync, "results": results})
    return 0 if holds else 1


def run(name: str, config: Config, data_dir: Path | None) -> dict[str, Any]:
    """Train one task; return its result and its losses on the way."""
    task = tasks.get(name, data_dir=data_dir)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        result = train(task, config.over(Config(run_dir=run_dir)))
        events = map(json.loads, (run_dir / "log.jsonl").read_text("utf-8").splitlines())
        kept = ("samples", "loss", "seconds")
        curve = [{key: e[key] for key in kept} for e in events if e["event"] == "eval"]
    return {**asdict(result), "run_dir": None, "test_loss": curve}


if __name__ == "__main__":
    sys.exit(main())
