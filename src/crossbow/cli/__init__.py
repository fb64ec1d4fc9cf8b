"""The command line: one file a command.

A command parses, calls the library and returns an exit code. Torch is imported inside commands, so
that `--help` answers at once.

Exit codes: 0 done, 2 bad input, 130 interrupted, 1 anything else.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NoReturn

from crossbow.cli import bench, checkpoint, data, plan, report, tasks, train
from crossbow.errors import CrossbowError, InputError, check_choice


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are one line, with the nearest legal name."""

    def error(self, message: str) -> NoReturn:
        """Say it as any other bad input is said."""
        if match := re.match(
            r"argument (.*): invalid choice: '(.*?)' \(choose from (.*)\)", message
        ):
            kind, value, legal = match.groups()
            check_choice(kind, value, [name.strip().strip("'") for name in legal.split(",")])
        raise InputError(f"{message} (try: {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options here, where the legal ones are known."""
        parsed, unknown = super().parse_known_args(args, namespace)
        options = [word for word in unknown if word.startswith("--")]
        if options:
            check_choice(
                "option", options[0].partition("=")[0], sorted(self._option_string_actions)
            )
        return parsed, unknown


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(
        prog="crossbow",
        description="Train on every device at the batch size that learns best.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"crossbow {version('crossbow')}")
    commands: argparse._SubParsersAction[Any] = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True
    )
    train.add_parser(commands)
    plan.add_parser(commands)
    tasks.add_parser(commands)
    checkpoint.add_parser(commands)
    data.add_parser(commands)
    bench.add_parser(commands)
    report.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    try:
        args = build_parser().parse_args(argv)
        code: int = args.run(args)
        return code
    except CrossbowError as error:
        print(f"crossbow: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        sys.stderr.close()
        return 1
