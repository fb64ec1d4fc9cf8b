"""What a run is asked to do: the only defaults, and what is legal.

A `Config` holds what the user asked for and leaves the rest unsaid. A task brings a recipe, which
is a `Config` too, with the published hyper-parameters. `resolve` lays the three over each other:
what the user said, else what the recipe says, else `DEFAULTS`.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, get_args

from crossbow.errors import InputError, check_choice

if TYPE_CHECKING:  # the command line reads this module before it needs torch
    import torch

    MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]

Engine = Literal["auto", "sequential", "stacked", "streams"]
ENGINES: tuple[str, ...] = get_args(Engine)

Precision = Literal["float32", "bf16", "fp16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)

SINKS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""Where a run may be logged to beside its directory, and the package that this needs."""
PARTITIONS = ("equal", "speed")


MOST_EPOCHS = 1e9
SEEDS = range(-(2**63), 2**64)  # what torch takes

UNSAID: Any = None
"""What a field holds until `resolve` has filled it in."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run's settings; every field may be left unsaid.

    Rates, schedules and counts are in samples and epochs, never in steps: they keep their meaning
    when the number of learners changes.
    """

    batch_size: int = UNSAID
    """Samples a learner reads in one step."""
    epochs: float = UNSAID
    lr: float = UNSAID
    optimizer: "str | MakeOptimizer" = UNSAID
    """One of torch.optim with its arguments, `sgd:momentum=0.9`; or parameters -> optimizer."""
    schedule: str = UNSAID
    """The learning rate over time, in epochs: `multistep:at=82/123,factor=0.1,warmup=5`."""
    label_smoothing: float = UNSAID
    learners: int | Literal["auto"] = UNSAID
    """Replicas of the model, over all ranks; `auto` finds their number while training."""
    sync: str = UNSAID
    """How learners are averaged, with its options: `adaptive`, `sma:alpha=0.25,momentum=0.9`."""
    compress: str = UNSAID
    """What passes between hosts, if not all of it: `bf16`, `onebit`, `topk:share=0.01`."""
    topology: str = UNSAID
    """By which ways it passes: `flat`, `ring`, `hierarchical:group=2`, `torus:rows=2`, `auto`."""
    speeds: str | None = UNSAID
    """Of the ranks, as `2/1`, or `auto`, which measures: faster ones run more of the learners."""
    partition: str = UNSAID
    """How learners share a round's samples: "equal" batches, or by the "speed" of their ranks."""
    ema: float | None = UNSAID
    """Half-life, in samples, of a moving average of the weights, which is then what counts."""
    bn_samples: int = UNSAID
    """Samples to estimate an average's batch-norm statistics on; 0 averages the learners'."""
    seed: int = UNSAID
    target: float | None = UNSAID
    """Stop once the median of the last five evaluations is this good."""
    eval_every: int | None = UNSAID
    """Samples between evaluations; an epoch if unsaid."""
    time_limit_s: float | None = UNSAID
    """Stop after this many seconds."""
    engine: Engine = UNSAID
    """How a rank runs its learners."""
    precision: Precision = UNSAID
    channels_last: bool = UNSAID
    compile: bool = UNSAID
    threads: int = UNSAID
    """Of one learner that trains alone, within an operation; the last bits depend on it."""
    device: str = UNSAID
    """A torch device; `auto` takes the GPU of this rank if there is one."""
    profile: bool = UNSAID
    """Write trace.json, a timeline of some rounds of all learners."""
    log_to: str | None = UNSAID
    """Of SINKS, separated by commas."""
    replay: Path | str | None = UNSAID
    """A run whose numbers of learners are taken again, each after the same sample."""
    run_dir: Path | str | None = UNSAID
    """Where the run is written; runs/TASK-N, counting up, if unsaid."""
    checkpoint_every_s: float = UNSAID
    """Seconds between checkpoints; 0 for none."""
    keep: int = UNSAID
    """How many of the newest checkpoints to keep, besides the best."""
    resume: Path | str | None = UNSAID
    """The directory of a run to go on with."""

    def __post_init__(self) -> None:
        _check_count("batch size", self.batch_size, "samples")
        if self.learners != "auto":
            _check_count("number of learners", self.learners, "learners", "1 or more, or auto")
        _check_count("number of threads", self.threads, "threads")
        _check_count("evaluation interval", self.eval_every, "samples")
        parse_speeds(self.speeds)
        if self.partition is not None:
            check_choice("partition", self.partition, PARTITIONS)
        _check_number("ema", self.ema, 0, math.inf, above=True)
        if self.bn_samples != 0 or isinstance(self.bn_samples, bool):
            _check_count("number of batch-norm samples", self.bn_samples, "samples, or 0")
        _check_number("epochs", self.epochs, 0, MOST_EPOCHS, above=True)
        _check_number("learning rate", self.lr, 0, math.inf)
        _check_number("label smoothing", self.label_smoothing, 0, 1, below=True)
        _check_number("time limit", self.time_limit_s, 0, math.inf, above=True)
        _check_number("checkpoint interval", self.checkpoint_every_s, 0, math.inf)
        _check_count("number of checkpoints", self.keep, "checkpoints")
        _check_number("target", self.target, -math.inf, math.inf)
        _check_seed(self.seed)
        if self.engine is not None:
            check_choice("engine", self.engine, ENGINES)
        for name in ("optimizer", "schedule", "sync", "compress", "topology", "device", "log_to"):
            _check_text(name, getattr(self, name))
        if self.precision is not None:
            check_choice("precision", self.precision, PRECISIONS)
        for name in self.log_to.split(",") if self.log_to else ():
            check_choice("sink to log to", name, SINKS)

    def over(self, other: "Config") -> "Config":
        """These settings, and the other's where this one says nothing."""
        said = {f.name: getattr(self, f.name) for f in fields(self)}
        return Config(**{k: getattr(other, k) if v is None else v for k, v in said.items()})

    def to_json(self) -> dict[str, Any]:
        """The settings as plain values, for config.json and for people."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def parse_speeds(text: str | None) -> list[float] | None:
    """Read the speeds of ranks; None where nothing is said of them.

    >>> parse_speeds("2/1")
    [2.0, 1.0]
    """
    if text is None or text == "auto":
        return None
    try:
        speeds = [float(part) for part in text.split("/")]
    except (AttributeError, ValueError):
        raise InputError(
            f"speeds {text!r} are not possible: write auto, or a number a rank, 2/1"
        ) from None
    for speed in speeds:
        _check_number("speed", speed, 0, math.inf, above=True)
    return speeds


def _check_count(name: str, value: Any, unit: str, legal: str = "1 or more") -> None:
    if value is None or (_is_number(value, int) and value >= 1):
        return
    raise InputError(f"{name} {value} is not possible: give a whole number of {unit}, {legal}")


def _check_text(name: str, value: Any) -> None:
    if value is None or isinstance(value, str) or (name == "optimizer" and callable(value)):
        return
    raise InputError(f"{name} {value!r} is not possible: give text")


def _check_seed(value: int | None) -> None:
    if value is None or (_is_number(value, int) and value in SEEDS):
        return
    raise InputError(f"seed {value} is not possible: give a whole number from -2^63 to 2^64 - 1")


def _check_number(
    name: str,
    value: float | None,
    low: float,
    high: float,
    *,
    above: bool = False,
    below: bool = False,
) -> None:
    """Refuse NaN, infinity, and what lies outside low to high (strictly inside where said)."""
    if value is None:
        return
    if _is_number(value, int | float) and math.isfinite(value):
        above_low = value > low if above else value >= low
        if above_low and (value < high if below else value <= high):
            return
    bounds = ["a finite number"]
    if math.isfinite(low):
        bounds.append(f"{'above' if above else 'at least'} {low}")
    if math.isfinite(high):
        bounds.append(f"{'below' if below else 'at most'} {high}")
    raise InputError(f"{name} {value} is not possible: give {', '.join(bounds)}")


def _is_number(value: Any, kind: type | UnionType) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return repr(value) if callable(value) else value


DEFAULTS = Config(
    batch_size=32,
    epochs=10,
    lr=0.1,
    optimizer="sgd:momentum=0.9",
    schedule="constant",
    label_smoothing=0.0,
    learners=1,
    sync="adaptive",
    compress="none",
    topology="flat",
    partition="equal",
    bn_samples=2048,
    seed=0,
    engine="auto",
    precision="float32",
    channels_last=False,
    compile=False,
    threads=1,
    device="auto",
    profile=False,
    checkpoint_every_s=60.0,
    keep=3,
)


def resolve(config: Config, recipe: Config) -> Config:
    """Lay the user's settings over the task's recipe over the defaults."""
    return config.over(recipe).over(DEFAULTS)
