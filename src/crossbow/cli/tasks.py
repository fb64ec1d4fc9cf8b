"""`crossbow tasks`: what there is to train."""

import argparse
from typing import Any


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Register the command."""
    parser = commands.add_parser(
        "tasks",
        help="list the tasks and their recipes",
        description="List the tasks: data, batch size, epochs, and what else their recipes say.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    from crossbow.config import DEFAULTS
    from crossbow.zoo.tasks import TASKS

    table = Table("task", "data", "batch", "epochs", "lr", "schedule", "optimizer", box=None)
    for name, entry in TASKS.items():
        recipe = entry.recipe.over(DEFAULTS)
        rest = (recipe.batch_size, recipe.epochs, recipe.lr, recipe.schedule, recipe.optimizer)
        table.add_row(name, entry.data, *map(str, rest))
    Console().print(table, highlight=False, soft_wrap=True)
    return 0
