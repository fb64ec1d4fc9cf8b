"""`crossbow train`: train a task."""

import argparse
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from crossbow.cli.output import check_json_path, print_rows, write_json
from crossbow.config import DEFAULTS, ENGINES, PARTITIONS, PRECISIONS, SINKS, Config
from crossbow.errors import InputError

if TYPE_CHECKING:
    from crossbow.trainer import Result

RESTARTS = 10

AVERAGINGS = """\
  adaptive        at the mean, a gain on the common move    gain, lead, lag, restart
  aeasgd          easgd, each learner in its own time       alpha, period, restart
  allreduce       one model, moved by the mean gradient     scale, accumulate, restart
  asgd            steps go to one model as they come        staleness, aware, restart
  diloco          mean once a period, Nesterov's steps      period, lr, momentum, restart
  eamsgd          easgd of learners with momentum           alpha, period, restart
  easgd           a central model that pulls                alpha, period, restart
  hogwild         all step in one model, without locks      restart
  local_sgd       mean once a period                        period, restart
  pipelined       allreduce, by gradients of steps before   lag, restart
  post_local_sgd  local_sgd, in each round at first         period, switch, restart
  slowmo          mean once a period, with momentum         period, lr, momentum, reset, restart
  sma             a central model with momentum that pulls  alpha, momentum, restart
"""
"""Every averaging, with all its options."""

EPILOG = f"""\
What is not said comes from the task's published recipe.

averagings, as --sync NAME or --sync NAME:OPTION=VALUE,OPTION=VALUE:
{AVERAGINGS}  docs/algorithms has a card for each.

examples:
  crossbow train resnet8-digits
  crossbow train resnet32-cifar10 --batch-size 16 --epochs 30 --target 0.88
  crossbow train lenet-fashion --learners 4
  crossbow train lenet-mnist --lr 0.02 --schedule cosine:warmup=1
  crossbow train resnet8-cifar10 --optimizer adamw:weight_decay=0.05,fused=true --lr 0.002
  crossbow train lenet-fashion --resume runs/lenet-fashion-1
  crossbow train gpt-text --text book.txt --precision bf16 --compile
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = commands.add_parser(
        "train",
        help="train a task",
        description="Train a task; write the run to a directory.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("task", metavar="TASK", help="`crossbow tasks` lists them")
    recipe = parser.add_argument_group("what is learned, and how")
    recipe.add_argument("--batch-size", type=int, metavar="N", help="samples a step of a learner")
    recipe.add_argument("--epochs", type=float, metavar="N", help="passes over the training set")
    recipe.add_argument("--lr", type=float, metavar="RATE", help="learning rate")
    recipe.add_argument(
        "--optimizer",
        metavar="SPEC",
        help="any of torch.optim with its arguments: sgd:momentum=0.9,weight_decay=1e-4",
    )
    recipe.add_argument(
        "--schedule",
        metavar="SPEC",
        help="constant, step, multistep, cosine or linear, positions in epochs: "
        "multistep:at=82/123,factor=0.1,warmup=5",
    )
    recipe.add_argument("--label-smoothing", type=float, metavar="SHARE", help="0 to 1")
    recipe.add_argument("--seed", type=int, help=f"default {DEFAULTS.seed}")
    fleet = parser.add_argument_group("learners")
    fleet.add_argument(
        "--learners",
        type=_learners,
        metavar="K",
        help="replicas, each with its own batches; auto finds their number while training, from "
        f"what `crossbow plan` found if it ran before; default {DEFAULTS.learners}",
    )
    fleet.add_argument(
        "--ranks",
        type=int,
        metavar="R",
        help="processes that share the learners, each on a core; default: as many as there are "
        "cores, at most K",
    )
    fleet.add_argument(
        "--restarts",
        type=int,
        default=RESTARTS,
        metavar="N",
        help="how often ranks are started again when one was killed, to go on where they were; "
        f"default {RESTARTS}",
    )
    fleet.add_argument(
        "--sync",
        metavar="SPEC",
        help="how learners are averaged: adaptive, allreduce:scale=linear, "
        f"sma:alpha=0.25,momentum=0.9; all are listed below; default {DEFAULTS.sync}",
    )
    fleet.add_argument(
        "--compress",
        metavar="SPEC",
        help="what passes between hosts: none, bf16, fp16, onebit, topk:share=0.01, "
        f"powersgd:rank=2; default {DEFAULTS.compress}",
    )
    fleet.add_argument(
        "--topology",
        metavar="SPEC",
        help="by which ways: flat, ring, hierarchical:group=2, torus:rows=2, or auto, which "
        f"measures them at the start; default {DEFAULTS.topology}",
    )
    fleet.add_argument(
        "--speeds",
        metavar="S/S/...",
        help="of the ranks, such as 2/1, or auto, which measures and follows: faster ones run more "
        "of the learners; default: all alike",
    )
    fleet.add_argument(
        "--partition",
        choices=PARTITIONS,
        help="equal batches, or such as follow the speed of their ranks, with --sync allreduce; "
        f"default {DEFAULTS.partition}",
    )
    fleet.add_argument(
        "--ema",
        type=float,
        metavar="SAMPLES",
        help="evaluate and keep a moving average of the weights, with this half-life",
    )
    fleet.add_argument(
        "--bn-samples",
        type=int,
        metavar="N",
        help="samples on which an average's batch-norm statistics are estimated anew; "
        f"0 averages those of the learners; default {DEFAULTS.bn_samples}",
    )
    stop = parser.add_argument_group("when to evaluate and when to stop")
    stop.add_argument(
        "--target", type=float, metavar="VALUE", help="stop when the median of 5 evaluations is met"
    )
    stop.add_argument("--eval-every", type=int, metavar="SAMPLES", help="default: an epoch")
    stop.add_argument("--time-limit", type=float, metavar="SECONDS", dest="time_limit_s")
    speed = parser.add_argument_group("how to compute")
    speed.add_argument(
        "--engine",
        choices=ENGINES,
        help="how a rank runs its learners: one after another, all in one call, or each on a CUDA "
        f"stream of its own; default {DEFAULTS.engine}, one after another",
    )
    speed.add_argument("--precision", choices=PRECISIONS, help=f"default {DEFAULTS.precision}")
    speed.add_argument("--channels-last", action="store_true", default=None)
    speed.add_argument("--compile", action="store_true", default=None, help="use torch.compile")
    speed.add_argument(
        "--threads", type=int, metavar="N", help="of one learner that trains alone; default 1"
    )
    speed.add_argument("--device", help="a torch device, such as cpu or cuda:1; default auto")
    files = parser.add_argument_group("files and output")
    files.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="where `data fetch` put the sets"
    )
    files.add_argument(
        "--text",
        type=Path,
        action="append",
        metavar="FILE",
        help="what the text tasks read; given twice: a text and its translation, line by line",
    )
    files.add_argument(
        "--replay",
        type=Path,
        metavar="RUN",
        help="take the numbers of learners that this run had, each after the same sample",
    )
    files.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="default runs/TASK-N, counting up"
    )
    files.add_argument(
        "--log-to",
        metavar="NAMES",
        help=f"beside the run's directory: {', '.join(SINKS)}, separated by commas",
    )
    files.add_argument(
        "--profile",
        action="store_true",
        default=None,
        help="write trace.json, a timeline of 200 rounds, for Perfetto or chrome://tracing",
    )
    files.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="go on with the run in this directory, from its newest checkpoint",
    )
    files.add_argument(
        "--checkpoint-every",
        type=float,
        metavar="SECONDS",
        dest="checkpoint_every_s",
        help=f"0 for none; default {DEFAULTS.checkpoint_every_s:g}",
    )
    files.add_argument(
        "--keep",
        type=int,
        metavar="N",
        help=f"newest checkpoints to keep, besides the best; default {DEFAULTS.keep}",
    )
    files.add_argument("--json", type=Path, metavar="FILE", help="write the result here, too")
    files.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, then say what was reached."""
    config = config_from(args)
    check_json_path(args.json)
    ranks = choose_ranks(config.learners or _learners_of(config) or 1, args.ranks)
    if args.restarts < 0:
        raise InputError(f"--restarts {args.restarts} is not possible: give 0 or more")
    named = (args.task, args.data_dir, args.text, config, args.quiet)
    if ranks == 1:
        result, was_interrupted = train_named(*named)
    else:
        from crossbow.comm.launch import launch
        from crossbow.comm.shared import refuge

        with refuge() as folder:
            work = (train_named, *named, folder)
            result, was_interrupted = launch(ranks, *work, restarts=args.restarts)[0]
    if args.json:
        write_json(args.json, asdict(result))
    if not args.quiet:
        summarize(result)
    return 130 if was_interrupted else 0


def _learners(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not possible: give a whole number, 1 or more, or auto"
        ) from None


def choose_ranks(learners: int | str, asked: int | None) -> int:
    """Return how many processes share the learners; under a launcher, this is one of its own."""
    cores = len(os.sched_getaffinity(0))
    if isinstance(learners, str):  # as many as it takes
        learners = max(cores, asked or 1)
    if asked is not None and not 1 <= asked <= learners:
        raise InputError(
            f"--ranks {asked} is not possible with {learners} learners: give 1 to {learners}"
        )
    if "WORLD_SIZE" in os.environ:
        return 1
    return asked or min(learners, cores)


def _learners_of(config: Config) -> int | None:
    """How many learners the run has that goes on, if one does."""
    if not config.resume:
        return None
    from crossbow.checkpoint.folder import find

    checkpoint, _ = find(Path(config.resume))
    return checkpoint.manifest.learners


def train_named(
    name: str,
    data_dir: Path | None,
    text: list[Path] | None,
    config: Config,
    quiet: bool,
    refuge: Path | None = None,
) -> "tuple[Result, bool]":
    """In a rank: train; return the result and whether a signal ended it."""
    from crossbow.trainer import Interrupted, train
    from crossbow.zoo import tasks

    task = tasks.get(name, data_dir=data_dir, text=text or [])
    try:
        return train(task, config, quiet=quiet, refuge=refuge), False
    except Interrupted as interrupted:
        return interrupted.result, True


def config_from(args: argparse.Namespace) -> Config:
    """The settings that were said on the command line."""
    names = {field.name for field in fields(Config)}
    return Config(**{name: value for name, value in vars(args).items() if name in names})


def summarize(result: "Result") -> None:
    """Print the closing summary."""
    share = result.metric_name == "accuracy"
    shown = f"{result.metric:.2%}" if share else f"{result.metric:.4f}"
    rows = [(f"test {result.metric_name}", f"{shown}   (loss {result.loss:.4f})")]
    rows += [(name, f"{value:.4g}") for name, value in result.final_metrics.items()]
    if result.target is not None:
        rows.append(("target", _describe_target(result)))
    if result.critical_batch is not None:
        rows.append(("gradient noise", _describe_noise(result)))
    if result.learner_changes is not None:
        rows.append(("tuning", _describe_tuning(result)))
    rows += [
        ("trained", f"{result.epochs:.4g} epochs, ended by {result.stopped_by}"),
        ("time", f"{result.seconds:.1f} s, of these {result.train_seconds:.1f} s training"),
        ("speed", f"{result.samples_per_second:,.0f} samples/s{_describe_crew(result)}"),
        *(("ranks", remark) for remark in result.remarks),
        ("run", f"{result.run_dir}/  (model.safetensors, log.jsonl, result.json)"),
        ("next", f"crossbow train {result.task} --help"),
    ]
    print_rows(rows)


def _describe_noise(result: "Result") -> str:
    """What the noise says of batches: two digits are all that it is good for."""
    figures = result.critical_batch or 0.0, result.critical_batch_error or 0.0
    size, error = (float(f"{figure:.2g}") for figure in figures)
    gain = f"; gain {result.gain:.2f}" if result.gain is not None else ""
    return f"batches beyond about {size:,.0f} (+-{error:,.0f}) samples waste samples{gain}"


def _describe_crew(result: "Result") -> str:
    if result.learners == 1:
        return ""
    return f", {result.learners} learners on {result.ranks} rank{'s' * (result.ranks > 1)}"


def _describe_tuning(result: "Result") -> str:
    changes, spent = result.learner_changes, result.tuning_seconds
    return (
        f"{result.learners} learners in the end, {changes} changes; {spent:.1f} s spent on trials"
    )


def _describe_target(result: "Result") -> str:
    first, median = result.target_first, result.target_median
    if median is not None:
        return f"{result.target} reached after {median.epoch:.4g} epochs, {median.seconds:.1f} s"
    if first is not None:
        return f"{result.target} touched after {first.epoch:.4g} epochs, but not held for five"
    return f"{result.target} not reached"
