"""`crossbow checkpoint`: what a run has kept."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossbow.cli.output import check_json_path, print_rows, write_json
from crossbow.errors import InputError

if TYPE_CHECKING:
    from crossbow.checkpoint.folder import Checkpoint


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Register the command."""
    parser = commands.add_parser(
        "checkpoint",
        help="list, verify and export checkpoints",
        description="Look at the checkpoints of a run.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, help_text, run in (
        ("list", "say what there is", run_list),
        ("verify", "compare every file with its checksum", run_verify),
        ("export", "write the central model of the newest whole checkpoint", run_export),
    ):
        action = actions.add_parser(
            name, help=help_text, description=f"{help_text.capitalize()}.", allow_abbrev=False
        )
        action.add_argument(
            "directory", type=Path, metavar="RUN", help="the directory of a run: runs/TASK-1"
        )
        if name == "export":
            action.add_argument("--at", type=int, metavar="SAMPLES", help="default: the newest")
            action.add_argument(
                "--to", type=Path, metavar="FILE", help="default RUN/exported.safetensors"
            )
        else:
            action.add_argument("--json", type=Path, metavar="FILE", help="write it here, too")
        action.set_defaults(run=run)


def run_list(args: argparse.Namespace) -> int:
    """Print a line a checkpoint, newest first."""
    return _describe(args, verify=False)


def run_verify(args: argparse.Namespace) -> int:
    """Print a line a checkpoint, with what is wrong with it; 1 if anything is."""
    return _describe(args, verify=True)


def run_export(args: argparse.Namespace) -> int:
    """Write the central model, with plain keys."""
    from crossbow.checkpoint.folder import CHECKPOINTS, Checkpoint, find, folder_of
    from crossbow.checkpoint.model import save_model

    if args.at is None:
        checkpoint, _ = find(args.directory)
    else:
        checkpoint = Checkpoint.open(folder_of(args.directory / CHECKPOINTS, args.at))
        checkpoint.verify()
    path = args.to or args.directory / "exported.safetensors"
    check_json_path(path)
    save_model(checkpoint.model(), path)
    samples = checkpoint.manifest.samples
    print(f"{path}: the central model after {samples:,} samples, its batch norms not calibrated")
    return 0


def _describe(args: argparse.Namespace, *, verify: bool) -> int:
    from crossbow.checkpoint.files import DamagedError
    from crossbow.checkpoint.folder import CHECKPOINTS, Checkpoint, found_in

    check_json_path(args.json)
    paths = found_in(args.directory / CHECKPOINTS)
    if not paths:
        raise InputError(f"{args.directory} has no checkpoints: name a run's directory")
    rows: list[tuple[str, ...]] = [("SAMPLES", "EPOCH", "LEARNERS", "METRIC", "BYTES", "STATE")]
    found, is_whole = [], True
    for path in paths:
        try:
            checkpoint, state = Checkpoint.open(path), "not verified"
            if verify:
                checkpoint.verify()
                state = "whole"
        except DamagedError as error:
            is_whole = False
            rows.append((path.name.lstrip("0"), "", "", "", "", str(error)))
            found.append({"path": str(path), "state": str(error)})
        else:
            rows.append(_row(checkpoint, state))
            found.append({"path": str(path), "state": state, **asdict(checkpoint.manifest)})
    print_rows(rows)
    if args.json:
        write_json(args.json, {"run": str(args.directory), "checkpoints": found})
    return 0 if is_whole else 1


def _row(checkpoint: "Checkpoint", state: str) -> tuple[str, ...]:
    manifest = checkpoint.manifest
    score = "" if manifest.metric is None else f"{manifest.metric_name} {manifest.metric:.4f}"
    size = sum(file.num_bytes for file in manifest.files)
    counts = f"{manifest.samples:,}", f"{manifest.epoch:.4g}", str(manifest.learners)
    return (*counts, score, f"{size:,}", state)
