"""`crossbow report`: runs as one HTML page."""

import argparse
from pathlib import Path

from crossbow.errors import InputError

EPILOG = """\
examples:
  crossbow report runs/resnet8-digits-1
  crossbow report runs/lenet-mnist-1 runs/lenet-mnist-2 --out comparison.html
  crossbow report runs/resnet32-cifar10-1 --live
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = commands.add_parser(
        "report",
        help="show runs as one HTML page",
        description="Write one HTML page that shows a run, or several side by side. It needs no "
        "other file and no network.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's directory")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="default: report.html, in the run's directory if there is one run",
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="serve the page on this machine, with news while training goes on, until Ctrl-C",
    )
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="of --live; default: a free one"
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page, or serve it."""
    return serve(args) if args.live else write(args)


def serve(args: argparse.Namespace) -> int:
    """Serve the page and say where, until Ctrl-C."""
    from crossbow.monitor.live import Server
    from crossbow.monitor.record import read

    if args.out:
        raise InputError("--out and --live exclude each other: leave one of them out")
    if not 0 <= args.port < 2**16:
        raise InputError(f"--port {args.port} is not possible: give 0 to 65535")
    for path in args.runs:
        read(path)
    with Server(args.runs, args.port) as server:
        if not args.quiet:
            print(f"{server.address}  (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return 0
    return 0


def write(args: argparse.Namespace) -> int:
    """Write the page and say where it is."""
    from crossbow.monitor.report import page

    out = args.out or _default(args.runs)
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise InputError(f"--out {out} can't be written: name a file in a folder that exists")
    text = page(args.runs)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out {out} can't be written: {error.strerror}") from error
    if not args.quiet:
        print(f"{out}  ({len(text) / 1024:,.0f} KiB; open it in a browser)")
    return 0


def _default(runs: list[Path]) -> Path:
    alone = len(runs) == 1 and runs[0].is_dir()
    return runs[0] / "report.html" if alone else Path("report.html")
