"""`crossbow tasks`: what there is to train."""

import argparse
from itertools import chain
from typing import TYPE_CHECKING, Any

from crossbow.cli.output import print_rows

if TYPE_CHECKING:
    from crossbow.zoo.tasks import Entry

_HEADER = [("TASK", "DATA", "BATCH", "EPOCHS", "LR"), ("", "SCHEDULE")]


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Register the command."""
    parser = commands.add_parser(
        "tasks",
        help="list the tasks and their recipes",
        description="List the tasks: their data, and what their recipes say.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print two lines a task: a schedule can be too long to stand beside the rest."""
    from crossbow.zoo.tasks import TASKS

    entries = (_describe(name, entry) for name, entry in TASKS.items())
    print_rows([*_HEADER, *chain.from_iterable(entries)])
    return 0


def _describe(name: str, entry: "Entry") -> list[tuple[str, ...]]:
    from crossbow.config import DEFAULTS

    recipe = entry.recipe.over(DEFAULTS)
    numbers = map(str, (recipe.batch_size, recipe.epochs, recipe.lr))
    return [(name, entry.data, *numbers), ("", recipe.schedule)]
