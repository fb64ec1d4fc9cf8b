"""Fuzz: readers of what others wrote fail with our own error, or not at all.

Claim: a million random and mutated specs and settings, and as many files as there is time for, of
checkpoints, manifests, data sets and archives, raise nothing but a `CrossbowError`; and no reader
takes more memory than a file of this size can need.

    python benchmarks/fuzz.py --cases 1000000 --seconds 60 --json benchmarks/results/fuzz.json

Cases come from a seed; what fails is printed with the case that made it fail.
"""

import argparse
import gzip
import io
import json
import random
import resource
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

from crossbow.averaging import family
from crossbow.bench.measure import facts
from crossbow.checkpoint.files import read_tree, write_tree
from crossbow.checkpoint.folder import Manifest, Written
from crossbow.comm import compress, topology
from crossbow.config import Config
from crossbow.data import datasets
from crossbow.data.archive import read_source
from crossbow.data.fetch import _explained
from crossbow.errors import CrossbowError
from crossbow.optim import schedule
from crossbow.spec import parse_spec

SEEDS = [
    "sgd:momentum=0.9,nesterov=true",
    "adamw:betas=0.9/0.95",
    "sma:alpha=0.25,momentum=0.9,restart=true",
    "adaptive:gain=linear,lag=1",
    "allreduce:scale=sqrt,accumulate=4",
    "multistep:at=82/123,factor=0.1,warmup=5",
    "cosine:warmup=1",
    "topk:share=0.01",
    "powersgd:rank=2",
    "ring",
]
PIECES = [
    *":,=/ .-+_'\"\\\n\0",
    "nan",
    "inf",
    "1e999",
    "9" * 5000,
    "true",
    "",
    "é",
    "\ud800",
    "0x1",
]
VALUES = [
    0,
    1,
    -1,
    2**63,
    1e308,
    float("nan"),
    float("inf"),
    True,
    "",
    "sma",
    None,
    [],
    {},
    Path("x"),
]

Case = Callable[[random.Random], None]


def main() -> None:
    """Fuzz each reader for so many cases or seconds; print and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=60, help="at most, for each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = measure(args.cases, args.seconds, args.seed)
    print(json.dumps(found["readers"], indent=2))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(any(reader["failures"] for reader in found["readers"].values()))


def measure(cases: int, seconds: float, seed: int) -> dict:
    """Fuzz each reader."""
    readers = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        for kind, case in targets(Path(name)).items():
            readers[kind] = fuzz(case, cases, seconds, seed)
            print(kind, readers[kind], file=sys.stderr, flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"facts": facts(), "seed": seed, "readers": readers, "peak_megabytes": peak / 1024}


def fuzz(case: Case, cases: int, seconds: float, seed: int) -> dict:
    """Run so many cases; count those that were taken, refused, and failed."""
    stream = random.Random(seed)
    counts = {"cases": 0, "refused": 0, "failures": 0}
    last = time.monotonic() + seconds
    while counts["cases"] < cases and (counts["cases"] % 64 or time.monotonic() < last):
        state = stream.getstate()
        counts["cases"] += 1
        try:
            case(stream)
        except CrossbowError:
            counts["refused"] += 1
        except Exception as error:
            counts["failures"] += 1
            if counts["failures"] <= 3:
                print(f"failed: {error!r} at {hash(state)}", file=sys.stderr)
                raise_note(error)
    return counts


def raise_note(error: Exception) -> None:
    """Print where it failed."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    if trace:
        print(f"  {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}", file=sys.stderr)


def targets(folder: Path) -> dict[str, Case]:
    """What reads, and how a case is made for it."""
    tensors = {"rows": [torch.randn(30), torch.arange(4)], "step": 3, "betas": (0.9, 0.95)}
    whole = folder / "whole"
    write_tree(tensors, whole)
    tree, manifest = whole.read_bytes(), manifest_text()

    def write(content: bytes) -> Path:
        path = folder / "case"
        path.write_bytes(content)
        return path

    images = np.random.default_rng(0).integers(0, 256, (3, 4, 4), np.uint8)
    idx = bytes([0, 0, 8, 3]) + np.array(images.shape, ">u4").tobytes() + images.tobytes()
    archives = [
        tar_of({"a.bin": idx}),
        zip_of({"a.bin": idx}),
        gzip.compress(tar_of({"a.bin": idx})),
    ]
    record = folder / "cifar"
    record.mkdir()
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    for name in names:
        (record / name).write_bytes(bytes(3073))

    def cifar(stream: random.Random) -> None:
        (record / names[0]).write_bytes(mutated(bytes(3073), stream))
        datasets.cifar10(record)

    def archive(stream: random.Random) -> None:
        path = write(mutated(stream.choice(archives), stream))
        with _explained("the archive"):
            for _, content in read_source(path, ["a.bin"], 1 << 20):
                content.read(1 << 16)

    return {
        "specs": lambda stream: specs(spec(stream)),
        "settings": settings,
        "checkpoint files": lambda stream: use(read_tree(write(mutated(tree, stream)))),
        "manifests": lambda stream: use(Manifest.parse(whole, mutated_text(manifest, stream))),
        "idx files": lambda stream: use(datasets.idx(write(mutated(idx, stream)), 3)),
        "cifar records": cifar,
        "archives": archive,
    }


def use(value: object) -> None:
    """Look at what was read: a tensor that isn't there would crash here."""
    str(value)


def spec(stream: random.Random) -> str:
    """A spec, or nearly."""
    text = list(stream.choice(SEEDS))
    for _ in range(stream.randrange(6)):
        place = stream.randrange(len(text) + 1)
        if stream.random() < 0.5:
            text.insert(place, stream.choice(PIECES))
        else:
            del text[place : place + stream.randrange(4)]
    return "".join(text)


def specs(text: str) -> None:
    """Let everybody read it who reads specs; who refuses doesn't keep others from it."""
    errors = []
    for read in (
        parse_spec,
        family.parse,
        compress.parse,
        topology.parse,
        lambda it: schedule.parse(it, 0.1, 1000, 10_000),
    ):
        try:
            read(text)
        except CrossbowError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def settings(stream: random.Random) -> None:
    """Some settings, with values of any kind."""
    names = stream.sample([field.name for field in fields(Config)], stream.randrange(1, 5))
    Config(**{name: stream.choice(VALUES) for name in names}).to_json()


def mutated(content: bytes, stream: random.Random) -> bytes:
    """The bytes with some changed, cut out, doubled or put in; sometimes others altogether."""
    if stream.random() < 0.02:
        return stream.randbytes(stream.randrange(200))
    found = bytearray(content)
    for _ in range(stream.randrange(1, 5)):
        place, kind = stream.randrange(len(found) + 1), stream.randrange(5)
        if kind == 0 and place < len(found):
            found[place] ^= 1 << stream.randrange(8)
        elif kind == 1:
            del found[place : place + stream.randrange(16)]
        elif kind == 2:
            found[place:place] = found[place : place + 16]
        elif kind == 3:
            found[place : place + 8] = stream.randbytes(8)
        else:
            del found[place:]
    return bytes(found)


def mutated_text(text: str, stream: random.Random) -> str:
    """The same for text; and with a checksum that is right, as somebody hostile would have it."""
    changed = mutated(text.encode(), stream).decode(errors="replace")
    if stream.random() < 0.5:
        return changed
    values = json.loads(text)
    values.pop("checksum")
    for _ in range(stream.randrange(1, 3)):
        values[stream.choice(list(values))] = stream.choice(
            [
                *(v for v in VALUES if not isinstance(v, Path)),
                [[0, 2**40]],
                [[]],
                [{"name": "../x"}],
            ]
        )
    return forged(values)


def forged(values: dict) -> str:
    """A manifest with the right checksum."""
    from crossbow.checkpoint.folder import _checksum

    return json.dumps({**values, "checksum": _checksum(values)})


def manifest_text() -> str:
    """A manifest as a run writes it."""
    names = ("shared.safetensors", "model.safetensors", "learners-0-1.safetensors")
    return Manifest(
        task="mlp-digits",
        samples=100,
        epoch=0.1,
        learners=2,
        ranks=1,
        parts=[[0, 1]],
        metric_name="accuracy",
        metric=0.5,
        higher_is_better=True,
        written="",
        versions={},
        settings={},
        files=[Written(name, 10, "0" * 64) for name in names],
    ).to_text()


def tar_of(files: dict[str, bytes]) -> bytes:
    """A tar of these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"../{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def zip_of(files: dict[str, bytes]) -> bytes:
    """A zip of these files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


if __name__ == "__main__":
    main()
