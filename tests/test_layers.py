"""Imports point one way, and importing does nothing."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "crossbow"

# A module may import what stands in its own layer or above it. The longest name counts.
LAYERS = [
    ["errors", "spec", "config"],
    ["zoo", "data", "optim", "comm", "stats"],
    ["arena", "task"],
    ["engines"],
    ["averaging"],
    ["pace"],
    ["fleet", "hvd", "learner", "evaluation", "checkpoint", "monitor"],
    ["tune"],
    ["zoo.tasks", "resuming", "trainer", "bench", "tune.cache"],
    ["tune.rehearsal"],
    ["tune.plan"],
    ["cli"],
    ["", "__main__"],
]
RANKS = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def modules() -> dict[str, Path]:
    """Every module's name below `crossbow`, and its file."""
    names = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(part for part in parts if part != "__init__")] = path
    return names


MODULES = modules()


def imported(tree: ast.AST) -> set[str]:
    """What of `crossbow` a module imports: at its top, in functions, or for types."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they point"
            # a name of a package may be one of its modules
            found |= {
                f"{node.module}.{alias.name}"
                if f"{node.module}.{alias.name}".removeprefix("crossbow.") in MODULES
                else f"{node.module}"
                for alias in node.names
            }
    ours = (name for name in found if name == "crossbow" or name.startswith("crossbow."))
    return {name.removeprefix("crossbow").removeprefix(".") for name in ours}


def rank(module: str) -> int:
    """The layer of the longest name in the table that holds the module."""
    parts = module.split(".")
    for stop in range(len(parts), 0, -1):
        if (name := ".".join(parts[:stop])) in RANKS:
            return RANKS[name]
    raise AssertionError(f"{module} stands in no layer: add it to LAYERS in {__file__}")


IMPORTS = {name: imported(ast.parse(path.read_text())) for name, path in MODULES.items()}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_one_way(module: str) -> None:
    below = [target for target in IMPORTS[module] if rank(target) > rank(module)]
    assert not below, f"{module} imports {below}, which are built on it"


def test_no_module_imports_itself_by_way_of_others() -> None:
    TopologicalSorter(IMPORTS).prepare()  # raises on a cycle, and names it


def test_imports_in_functions_and_of_packages_are_seen() -> None:
    source = """
def f():
    from crossbow import trainer
    from crossbow.optim.build import build_optimizer
    import crossbow.zoo.tasks, os
"""
    assert imported(ast.parse(source)) == {"trainer", "optim.build", "zoo.tasks"}
    assert "zoo.tasks" in IMPORTS["cli.tasks"]


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["crossbow", "crossbow.cli"])
def test_importing_it_imports_no_torch(module: str) -> None:
    heavy = "{'torch', 'numpy', 'rich', 'safetensors'}"
    assert run(f"import sys, {module}\nprint({heavy} & set(sys.modules))") == "set()"


EVERYTHING = """
import os, random, signal, sys, threading
import numpy as np
import torch, torch._dynamo, rich.progress
def facts():
    return (
        threading.active_count(), len(os.listdir("/proc/self/task")), torch.get_num_threads(),
        torch.random.initial_seed(), random.getstate(), dict(os.environ),
        signal.getsignal(signal.SIGINT), torch.get_default_dtype(), os.listdir("."),
    )
before = facts()
"""


def test_importing_everything_does_nothing(tmp_path: Path) -> None:
    names = sorted(f"crossbow.{name}" for name in MODULES if name not in ("", "__main__"))
    imports = "\n".join(f"import {name}" for name in names)
    code = f"{EVERYTHING}\n{imports}\nprint(before == facts(), threading.active_count())"
    assert run(code) == "True 1"
