"""The tuner finds the number of learners, leaves a steady run alone, and adapts to a load.

Claim, of a run that starts with eight times too many learners: 60 s later its goodput is within 5 %
of the best number's; what was spent at numbers that were not kept is under 3 % of ten minutes; when
a process of higher priority takes one core, the run may change its number, and once the load has
gone its goodput is back within 5 % of what it was.

The best number is found beforehand: all that the tuner may try on its ladder's first rungs are
rehearsed in turn, as `crossbow plan` does it. Goodput uses the critical batch size that the run
itself measured last. The run is `xb.train`, told by a plan in a cache of its own to start with too
many. The ten minutes are not spent here: the tuner's tests simulate them.

Takes three times --part-seconds and half a minute.

    sudo .venv/bin/python benchmarks/tuner.py --json benchmarks/results/tuner.json

Needs root, for a load of higher priority. Exit code 0 if the claim holds, 1 if not.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from crossbow.bench.crew import Crew, meeting_place
from crossbow.bench.measure import facts, interleave, write
from crossbow.config import Config, resolve
from crossbow.trainer import train
from crossbow.tune import cache
from crossbow.tune.goodput import efficiency
from crossbow.tune.rehearsal import Candidate, Source, Stage, load

MULTIPLES = (1, 2, 3, 4, 6, 8)
WRONG = 8
"""Learners a rank that the run starts with."""

WITHIN, SHARE_OF_TEN_MINUTES = 0.95, 0.03 * 600
LOAD_NICENESS = -5
LAST_S = 10.0
"""Speeds are means over so many seconds at the end of each part."""


def best_speeds(source: Source, settings: Config, cores: list[int]) -> dict[int, float]:
    """Samples a second of each number of learners, in the median of turns."""
    ranks = len(cores)
    with Stage(source, settings, cores) as stage:
        contenders = {
            str(n * ranks): lambda _, k=n * ranks: stage.speed(Candidate(k, ranks), 0.5)
            for n in MULTIPLES
        }
        speeds = interleave(contenders, 5, source.name)
    return {int(name): statistics.median(values) for name, values in speeds.items()}


def train_auto(memory: dict[str, Any], batch_size: int, seconds: float, folder: str) -> None:
    """In a rank: train with a number of learners that is found, from the plan in the folder on."""
    os.environ["XDG_CACHE_HOME"] = folder
    settings = Config(
        batch_size=batch_size,
        schedule="constant",
        learners="auto",
        epochs=1e6,
        time_limit_s=seconds,
        eval_every=10**12,
        run_dir=f"{folder}/run",
    )
    train(memory["task"], settings, quiet=True)


def load_a_core(core: int, start: float, stop: float) -> None:
    """Keep a core busy from start to stop, counted in seconds from now."""
    time.sleep(start)
    body = f"import os\nos.nice({LOAD_NICENESS})\nos.sched_setaffinity(0, [{core}])\nwhile 1: pass"
    with subprocess.Popen([sys.executable, "-c", body]) as process:
        time.sleep(stop - start)
        process.kill()


def mean_speed(lines: list[dict[str, Any]], end: float) -> float:
    """Samples a second of the last seconds before `end`."""
    some = [line for line in lines if line["event"] == "train" and line["seconds"] <= end]
    last = some[-1]
    first = next(line for line in some if line["seconds"] >= last["seconds"] - LAST_S)
    read = last["samples"] - first["samples"]
    return float(read / (last["seconds"] - first["seconds"]))


def number_at(lines: list[dict[str, Any]], start: int, end: float) -> int:
    """How many learners there were at a time."""
    moves = [line for line in lines if line["event"] == "learners" and line["seconds"] <= end]
    return int(moves[-1]["learners"]) if moves else start


def main() -> int:
    """Measure, judge, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", default="lenet-fashion")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--part-seconds", type=float, default=60, help="of each of three parts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.part_seconds < LAST_S:
        parser.error(f"--part-seconds {args.part_seconds} is too short: give {LAST_S:.0f} or more")
    machine, cores = facts(), sorted(os.sched_getaffinity(0))
    source, part = Source(args.task), args.part_seconds
    task = source.load()
    settings = resolve(Config(batch_size=args.batch_size, schedule="constant"), task.recipe)
    speeds = best_speeds(source, settings, cores)
    start = WRONG * len(cores)
    with (
        tempfile.TemporaryDirectory() as folder,
        Crew(len(cores), cores=[[core] for core in cores]) as crew,
    ):
        crew.call(load, source, meeting_place())
        os.environ["XDG_CACHE_HOME"] = folder
        wrong = {"chosen": {"learners": start, "ranks": len(cores)}}
        cache.save(cache.place_of(task.name, task.build_model(), settings, len(cores)), wrong)
        loading = threading.Thread(target=load_a_core, args=(cores[-1], part, 2 * part))
        loading.start()
        crew.call(train_auto, args.batch_size, 3 * part, folder)
        loading.join()
        log = Path(folder, "run", "log.jsonl").read_text("utf-8")
        lines = [json.loads(line) for line in log.splitlines()]
        spent = json.loads(Path(folder, "run", "result.json").read_text("utf-8"))["tuning_seconds"]
    critical = next(s["critical_batch"] for s in reversed(lines) if s.get("critical_batch"))

    def worth(k: int) -> float:
        return efficiency(k, args.batch_size, critical)

    ends = {"found": part, "loaded": 2 * part, "recovered": 3 * part}
    numbers = {name: number_at(lines, start, end) for name, end in ends.items()}
    goodputs = {n: mean_speed(lines, end) * worth(numbers[n]) for n, end in ends.items()}
    rehearsed = {k: speed * worth(k) for k, speed in speeds.items()}
    result = {
        "benchmark": "tuner",
        "machine": machine,
        "task": args.task,
        "batch_size": args.batch_size,
        "part_seconds": part,
        "start": start,
        "critical_batch": critical,
        "rehearsed_samples_per_second": speeds,
        "rehearsed_goodput": rehearsed,
        "learners": numbers,
        "goodput": goodputs,
        "found_to_best": rehearsed.get(numbers["found"], 0.0) / max(rehearsed.values()),
        "recovered_to_found": goodputs["recovered"] / goodputs["found"],
        "tuning_seconds": spent,
        "changes": [line for line in lines if line["event"] == "learners"],
    }
    holds = {
        "finds": result["found_to_best"] >= WITHIN,
        "recovers": result["recovered_to_found"] >= WITHIN,
        "is cheap": spent < SHARE_OF_TEN_MINUTES,
    }
    result["holds"] = holds
    print(
        json.dumps({k: v for k, v in result.items() if k not in ("machine", "changes")}, indent=1)
    )
    for change in result["changes"]:
        print(f"{change['seconds']:6.1f} s  {change['learners']:3d}  {change['reason']}")
    if args.json:
        write(args.json, result)
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
