"""Faults: real runs under random events end in the bits of an undisturbed one.

Claim: whatever happens to a run of 4 learners on 2 ranks (a rank, all ranks or the launcher killed
by SIGKILL at a random moment, SIGTERM, Ctrl-C, a bit flipped in or an end cut off its newest
checkpoint, a disk that is full, samples that are no numbers), it finishes, and its model and its
score are bit for bit those of the run to which nothing happened. So no sample was lost or read
twice, and nothing was corrupted silently.

    python benchmarks/faults.py --events 100 --json benchmarks/results/faults.json

Events come at random, from a seed. An event that ends the launcher is followed by `--resume`. The
full disk is a small tmpfs, for which root is needed; without it that event is left out.
"""

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file

from crossbow.bench.measure import facts
from crossbow.checkpoint.folder import CHECKPOINTS, found_in
from crossbow.monitor.log import effective_lines

LEARNERS, RANKS = 4, 2
DEADLINE_S = 900.0
TMPFS_BYTES = 400_000  # holds a run's log, but not three checkpoints

KINDS = (
    "kill a rank",
    "kill all ranks",
    "kill the launcher",
    "SIGTERM",
    "Ctrl-C",
    "flip a bit of the newest checkpoint",
    "cut the newest checkpoint off",
)


def main() -> None:
    """Run under events until there were enough of them; print and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--events-a-run", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after these")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--work", nargs=3, help=argparse.SUPPRESS
    )  # of a run: directory, epochs, go
    args = parser.parse_args()
    if args.work:
        sys.exit(work(Path(args.work[0]), int(args.work[1]), resume=args.work[2] == "resume"))
    found = measure(args.events, args.events_a_run, args.epochs, args.seed, args.minutes)
    print(json.dumps(found["summary"], indent=2))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


def measure(
    events: int, events_a_run: int, epochs: int, seed: int, minutes: float = math.inf
) -> dict:
    """Run under so many events."""
    stream, counts, recoveries = random.Random(seed), Counter(), []
    last = time.monotonic() + 60 * minutes
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "undisturbed"
        subprocess.run(command(reference, epochs, resume=False), check=True, timeout=DEADLINE_S)
        while sum(counts[kind] for kind in KINDS) < events and time.monotonic() < last:
            run = Path(folder) / str(len(runs))
            with small_disk(run) if len(runs) % 5 == 4 else contextlib.nullcontext(False) as full:
                wanted = [stream.choice(KINDS) for _ in range(events_a_run)]
                happened, took = trial(run, epochs, wanted, stream)
                recoveries += took
                happened += ["full disk"] * bool(full)
                ended = compare(run, reference)
                happened += ["a sample that is no number"] * ended["reseeded"]
                counts.update(happened)
                runs.append({"events": dict(Counter(happened)), **ended})
            shown = {k: v for k, v in runs[-1].items() if k != "events"}
            print(
                f"{sum(counts[kind] for kind in KINDS):4} events  {shown}",
                file=sys.stderr,
                flush=True,
            )
    return {
        "facts": facts(),
        "settings": {"learners": LEARNERS, "ranks": RANKS, "epochs": epochs, "seed": seed},
        "summary": {
            "events": sum(counts[kind] for kind in KINDS),
            "by_kind": dict(counts),
            "runs": len(runs),
            "finished": sum(run["finished"] for run in runs),
            "same_samples": sum(run["same_samples"] for run in runs),
            "same_metric": sum(run["same_metric"] for run in runs),
            "same_bits": sum(run["same_bits"] for run in runs),
            "median_recovery_s": statistics.median(recoveries) if recoveries else None,
        },
        "runs": runs,
    }


def work(run: Path, epochs: int, *, resume: bool) -> int:
    """Be the launcher of a run, as `crossbow train` is; some of its samples are no numbers."""
    from crossbow.comm.launch import launch
    from crossbow.comm.shared import refuge

    with refuge() as folder:
        args = (RANKS, train_poisoned, run, epochs, resume, folder)
        was_interrupted = launch(*args, restarts=50)[0]
    return 130 if was_interrupted else 0


def train_poisoned(run: Path, epochs: int, resume: bool, refuge: Path | None) -> bool:
    """In a rank: train; return whether a signal ended it."""
    from dataclasses import replace

    from crossbow.config import Config
    from crossbow.data.datasets import Arrays
    from crossbow.trainer import Interrupted, train
    from crossbow.zoo import tasks

    task = tasks.get("mlp-digits")
    assert task.prepare
    inputs = task.prepare(task.train.inputs, None)
    inputs[7] = math.nan
    test = Arrays(task.prepare(task.test.inputs, None), task.test.targets, 10)
    task = replace(task, train=Arrays(inputs, task.train.targets, 10), test=test, prepare=None)
    common = {"checkpoint_every_s": 0.5, "learners": LEARNERS}
    if resume:
        config = Config(resume=run, **common)
    else:
        config = Config(
            epochs=epochs, seed=0, eval_every=20 * len(task.train), run_dir=run, **common
        )
    try:
        train(task, config, quiet=True, refuge=refuge)
    except Interrupted:
        return True
    return False


def command(run: Path, epochs: int, *, resume: bool) -> list[str]:
    """How to start a run, or go on with it."""
    go = "resume" if resume else "begin"
    return [sys.executable, __file__, "--work", str(run), str(epochs), go]


def trial(
    run: Path, epochs: int, wanted: list[str], stream: random.Random
) -> tuple[list[str], list[float]]:
    """Let things happen to one run until it is finished; return what did, and recovery times."""
    happened: list[str] = []
    recoveries: list[float] = []
    resume, deadline = False, time.monotonic() + DEADLINE_S
    while True:
        kind = ""
        with (
            (run.parent / "errors").open("a") as errors,
            subprocess.Popen(command(run, epochs, resume=resume), stderr=errors) as launcher,
        ):
            while wanted and wait_for(lambda: has_progress(run), launcher, deadline):
                time.sleep(stream.random())
                kind, began = wanted.pop(0), time.monotonic()
                if not strike(kind, launcher, stream):
                    break
                happened.append(kind)
                if kind not in KINDS[:2]:
                    break
                resumes = number_of_resumes(run)
                if wait_for(lambda n=resumes: number_of_resumes(run) > n, launcher, deadline):
                    recoveries.append(time.monotonic() - began)
            try:
                code = launcher.wait(max(deadline - time.monotonic(), 1))
            except subprocess.TimeoutExpired:
                launcher.kill()
                raise SystemExit(f"{run} didn't finish: {happened}") from None
        if code == 0:
            return happened, recoveries
        time.sleep(0.5)  # ranks of a launcher that was killed end with it
        damage(kind, run, stream)
        resume = bool(found_in(run / CHECKPOINTS))
        if not resume:  # ended before there was anything to go on from
            begin_anew(run)


def strike(kind: str, launcher: subprocess.Popen, stream: random.Random) -> bool:
    """Let it happen; False if the run has ended already."""
    ranks = ranks_of(launcher.pid)
    if launcher.poll() is not None or not ranks:
        return False
    if kind == "kill a rank":
        targets, number = [stream.choice(ranks)], signal.SIGKILL
    elif kind == "kill all ranks":
        targets, number = ranks, signal.SIGKILL
    else:
        numbers = {"SIGTERM": signal.SIGTERM, "Ctrl-C": signal.SIGINT}
        targets, number = [launcher.pid], numbers.get(kind, signal.SIGKILL)
    for target in targets:
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, number)
    return True


def damage(kind: str, run: Path, stream: random.Random) -> None:
    """Change the newest checkpoint on disk, if that is what is to happen."""
    found = found_in(run / CHECKPOINTS)
    if not found or kind not in KINDS[5:]:
        return
    path = stream.choice(sorted(found[0].iterdir()))
    content = bytearray(path.read_bytes())
    place = stream.randrange(len(content))
    if kind == KINDS[5]:
        content[place] ^= 1 << stream.randrange(8)
        path.write_bytes(content)
    else:
        path.write_bytes(content[:place])


def compare(run: Path, reference: Path) -> dict:
    """Whether a run ended as the undisturbed one did."""
    results = [json.loads((r / "result.json").read_text()) for r in (run, reference)]
    models = [load_file(r / "model.safetensors") for r in (run, reference)]
    return {
        "finished": results[0]["stopped_by"] == "epochs",
        "same_samples": results[0]["samples"] == results[1]["samples"],
        "same_metric": results[0]["metric"] == results[1]["metric"],
        "same_bits": all(v.equal(models[1][k]) for k, v in models[0].items()),
        "reseeded": results[0]["reseeded"],
    }


@contextlib.contextmanager
def small_disk(run: Path) -> Iterator[bool]:
    """Give the run a disk that is soon full; without root it has the usual one."""
    run.mkdir()
    size = f"size={TMPFS_BYTES}"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(run)], check=False)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "-l", str(run)], check=True)


def begin_anew(run: Path) -> None:
    """Empty the directory of a run."""
    for path in sorted(run.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def wait_for(condition, launcher: subprocess.Popen, deadline: float) -> bool:
    """Return when it holds; False if the run ended before."""
    while not condition():
        if launcher.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def lines(run: Path) -> list[dict]:
    """What the log says that counts."""
    return list(effective_lines(run / "log.jsonl")) if (run / "log.jsonl").exists() else []


def has_progress(run: Path) -> bool:
    """Whether the run has trained since it was begun or resumed last."""
    kinds = [line["event"] for line in lines(run)]
    last = max((n for n, kind in enumerate(kinds) if kind in ("start", "resume")), default=None)
    return last is not None and "train" in kinds[last:]


def number_of_resumes(run: Path) -> int:
    """How often it was resumed."""
    return sum(line["event"] == "resume" for line in lines(run))


def ranks_of(launcher: int) -> list[int]:
    """The processes that a launcher started for its ranks."""
    try:
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        found = [(int(c), Path(f"/proc/{c}/cmdline").read_bytes()) for c in children]
    except OSError:
        return []
    return [pid for pid, line in found if b"spawn_main" in line]


if __name__ == "__main__":
    main()
