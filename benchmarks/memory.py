"""What a learner needs beyond plain training: three copies of its row, and no more.

Claim: for k learners over R ranks of one host, the arena holds for each learner at most 3 rows
beyond the one that plain training has anyway, and its buffers (the statistics of batch norms) once
more: a second row of its own, its letter twice, its share of two central models. A row is the
parameters and buffers of the model, padded. What the ranks have mapped of it is that, within 1 %
and a page for each rank.

"arena" is what the layout asks for, byte by byte. "mapped" is the Pss of the shared block, summed
over the ranks: each page once, whoever maps it. "process" is the Pss of the whole ranks
(/proc/self/smaps_rollup) with a fleet, less that of as many plain PyTorch processes with as many
models and optimizers, for each learner. It also has torch.distributed in it, about the same for any
model, and one gradient instead of one a learner where a rank runs several; so it is shown without a
claim.

    python benchmarks/memory.py --json benchmarks/results/memory.json

Needs Linux. Exit code 0 if the claim holds, 1 if not.
"""

import argparse
import gc
import os
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from crossbow.arena import Arena, adoptable_buffers, adoptable_parameters, plan
from crossbow.averaging.family import sma
from crossbow.bench.crew import Crew, meeting_place
from crossbow.bench.measure import facts, write
from crossbow.bench.throughput import CASES
from crossbow.comm.shared import Carver, Clocks
from crossbow.fleet import Fleet, share
from crossbow.optim.build import build_optimizer

MODELS = ("resnet32", "lenet")
CREWS = ((2, 1), (4, 1), (2, 2), (4, 2), (4, 4))
"""(learners, ranks)"""
ROWS_BEYOND = 3
PAGE_BYTES = 4096
STEPS, BATCH = 3, 16
KIB = 1024


def count(name: str, learners: int, ranks: int) -> dict[str, int]:
    """Bytes of a plain model, and of an arena for it, by the layout."""
    model = CASES[name].build()
    parameters, buffers = adoptable_parameters(model), adoptable_buffers(model)
    carver = Carver()
    layouts = (plan(parameters), plan(buffers))
    Arena(*layouts, share(learners, ranks), carver, ranks_keep=True)
    rows, live = (sum(p.width * p.dtype.itemsize for p in layout) for layout in layouts)
    return {
        "model_bytes": sum(t.nbytes for _, t in (*parameters, *buffers)),
        "row_bytes": rows + live,
        "live_bytes": live,
        "arena_bytes": carver.used,
        "clock_bytes": Clocks.BYTES_EACH * (ranks + 1),
    }


def train_plain(memory: dict[str, Any], name: str, learners: int) -> None:
    """In a rank: make so many models with their optimizers, and train each."""
    memory["plain"] = [_train(name) for _ in range(learners)]


def train_fleet(memory: dict[str, Any], name: str, learners: int, port: int) -> None:
    """In a rank: be a part of a fleet, and train."""
    os.environ["MASTER_PORT"] = str(port)
    memory["stack"] = ExitStack()
    memory["fleet"] = _train(name, memory["stack"], learners)


def _train(name: str, stack: ExitStack | None = None, learners: int = 1) -> Any:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build()
    optimizer = build_optimizer(case.optimizer, model.parameters(), lr=1e-4)
    steps = STEPS
    if stack:
        fleet = stack.enter_context(Fleet(model, optimizer, sma(), learners=learners))
        steps *= len(fleet.mine)
    inputs, targets = case.read(BATCH)
    for _ in range(steps):
        optimizer.zero_grad()
        case.loss(model(inputs), targets).backward()
        optimizer.step()
    gc.collect()
    return model, optimizer


def resident(memory: dict[str, Any]) -> tuple[int, int]:
    """In a rank: the Pss of all of it, and of what it shares with the others, in bytes."""
    whole = re.search(r"^Pss:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert whole
    return int(whole[1]) * KIB, sum(_shared_blocks(Path("/proc/self/smaps").read_text()))


def _shared_blocks(smaps: str) -> list[int]:
    """Pss of the mappings of a fleet's block: in /dev/shm, or of one process alone."""
    found, is_block = [], False
    for line in smaps.splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_block = "/crossbow-" in line or "/dev/zero" in line
        elif is_block and line.startswith("Pss:"):
            found.append(int(line.split()[1]) * KIB)
    return found


def measure(name: str, learners: int, ranks: int) -> dict[str, Any]:
    """One line: a crew for plain training, and another for a fleet."""
    counted = count(name, learners, ranks)
    shares = [(name, len(own)) for own in share(learners, ranks)]
    with Crew(ranks) as crew:
        crew.call_each(train_plain, shares)
        plain = sum(whole for whole, _ in crew.call(resident))
    with Crew(ranks) as crew:
        crew.call(train_fleet, name, learners, meeting_place())
        rows = crew.call(resident)
        fleet, mapped = (sum(column) for column in zip(*rows, strict=True))
    beyond = counted["arena_bytes"] / learners - counted["row_bytes"]
    expected = counted["arena_bytes"] + counted["clock_bytes"]
    return {
        "model": name,
        "learners": learners,
        "ranks": ranks,
        **counted,
        "beyond_bytes_each": beyond,
        "beyond_rows_each": beyond / counted["row_bytes"],
        "mapped_bytes": mapped,
        "process_bytes_each": (fleet - plain) / learners,
        "holds": beyond <= ROWS_BEYOND * counted["row_bytes"] + counted["live_bytes"]
        and abs(mapped - expected) <= 0.01 * expected + ranks * PAGE_BYTES,
    }


def show(lines: list[dict[str, Any]]) -> None:
    """Print the table."""
    heads = ("model", "k", "R", "row", "arena", "mapped", "beyond, each", "rows", "process, each")
    print(f"{heads[0]:10}{heads[1]:>4}{heads[2]:>4}" + "".join(f"{h:>15}" for h in heads[3:]))
    for line in lines:
        print(
            f"{line['model']:10}{line['learners']:>4}{line['ranks']:>4}"
            f"{line['row_bytes']:>15,}{line['arena_bytes']:>15,}{line['mapped_bytes']:>15,}"
            f"{line['beyond_bytes_each']:>15,.0f}{line['beyond_rows_each']:>15.2f}"
            f"{line['process_bytes_each']:>15,.0f}" + ("" if line["holds"] else "   does not hold")
        )
    print("\nbytes; beyond, each: what a learner needs of the arena beyond a plain model")


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), metavar="NAMES")
    parser.add_argument("--most-learners", type=int, default=4, metavar="K")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    names = args.models.split(",")
    if not set(names) <= set(CASES) or args.most_learners < 2:
        parser.error(f"give models of {', '.join(CASES)}, and at least 2 learners")
    where = facts()
    lines = []
    for name in names:
        for learners, ranks in CREWS:
            if learners <= args.most_learners:
                print(f"{name}: {learners} learners on {ranks} ranks", file=sys.stderr, flush=True)
                lines.append(measure(name, learners, ranks))
    show(lines)
    if args.json:
        write(args.json, {"claim": "memory", **where, "cases": lines})
    return 0 if all(line["holds"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
