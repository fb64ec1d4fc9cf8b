"""Schedules: the learning rate as a plain function of the samples seen.

Not of steps: k learners at batch b read k * b samples a step, so a schedule in samples means the
same for any number of learners. It has no state; a resumed run asks it where it stands.

    step       lr * factor ** (samples // every)
    multistep  lr * factor ** (milestones passed)
    linear     lr * (1 + (final - 1) * t)                            t = min(samples / total, 1)
    cosine     lr * (final + (1 - final) * (1 + cos(pi * t)) / 2)    Loshchilov, Hutter, SGDR, 2017

They take the place of torch's StepLR, MultiStepLR, LinearLR and CosineAnnealingLR. `factor`,
`final` and `start` are shares of a rate (torch's `eta_min` is a rate): lr alone scales them all.
"""

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from crossbow.errors import InputError, check_choice
from crossbow.spec import Options, Value, parse_spec

Schedule = Callable[[int], float]

_WARMUP = ("warmup", "start")
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "constant": _WARMUP,
    "step": ("every", "factor", *_WARMUP),
    "multistep": ("at", "factor", *_WARMUP),
    "cosine": ("final", *_WARMUP),
    "linear": ("final", *_WARMUP),
}
_REQUIRED = {"step": "every", "multistep": "at"}
_FACTOR = 0.1
_MOST_EPOCHS = 1e9
_LARGEST = sys.float_info.max


def constant(lr: float) -> Schedule:
    """Keep the learning rate."""
    _check("lr", lr)
    return lambda samples: lr


def step(lr: float, every: int, factor: float) -> Schedule:
    """Multiply the learning rate by `factor` every so many samples."""
    _check_decay(lr, factor)
    _check("every", every, low=1)
    return lambda samples: lr * factor ** (samples // every)


def multistep(lr: float, milestones: Sequence[int], factor: float) -> Schedule:
    """Multiply the learning rate by `factor` at each milestone.

    >>> schedule = multistep(1.0, [100, 200], factor=0.5)
    >>> [schedule(samples) for samples in (0, 99, 100, 200)]
    [1.0, 1.0, 0.5, 0.25]
    """
    _check_decay(lr, factor)
    for milestone in milestones:
        _check("milestone", milestone)
    passed = sorted(milestones)
    return lambda samples: lr * factor ** bisect_right(passed, samples)


def cosine(lr: float, total: int, final: float = 0.0) -> Schedule:
    """Fall from lr to final * lr along half a cosine, and stay there."""
    _check_fall(lr, total, final)

    def schedule(samples: int) -> float:
        left = (1 + math.cos(math.pi * min(samples / total, 1))) / 2
        return lr * (left + (1 - left) * final)

    return schedule


def linear(lr: float, total: int, final: float = 0.0) -> Schedule:
    """Fall from lr to final * lr along a line, and stay there."""
    _check_fall(lr, total, final)

    def schedule(samples: int) -> float:
        done = min(samples / total, 1)
        return lr * ((1 - done) + done * final)

    return schedule


def warmup(schedule: Schedule, samples: int, start: float = 0.0) -> Schedule:
    """Scale a schedule by a ramp that rises from `start` to 1 over the first samples.

    The schedule keeps its own clock, which runs during the warm-up too: its milestones stay where
    they are, and its end is still the end of the run. With `start` 0 the first step doesn't move.

    >>> warm = warmup(constant(1.0), 100, start=0.2)
    >>> [round(warm(seen), 3) for seen in (0, 50, 100, 150)]
    [0.2, 0.6, 1.0, 1.0]
    """
    _check("warmup", samples)
    _check("start", start, high=1)

    def warm(seen: int) -> float:
        if seen >= samples:
            return schedule(seen)
        return schedule(seen) * (start + (1 - start) * seen / samples)

    return warm


def parse(spec: str, lr: float, epoch_samples: int, total_samples: int) -> Schedule:
    """Build a schedule from a spec, whose positions are in epochs and may be fractions.

        constant
        step:every=30,factor=0.1
        multistep:at=82/123,factor=0.1
        cosine:final=0.01
        linear:final=0.01

    `factor` is 0.1 and `final` 0 if unsaid; cosine and linear end with the run. Each takes
    `warmup=EPOCHS`, and with it `start=SHARE` of the rate, 0 if unsaid.

    >>> schedule = parse("multistep:at=1/1.5,warmup=0.5", 1.0, epoch_samples=100, total_samples=200)
    >>> [round(schedule(samples), 3) for samples in (0, 25, 50, 100, 150)]
    [0.0, 0.5, 1.0, 0.1, 0.01]
    """
    name, options = parse_spec(spec)
    check_choice("schedule", name, _OPTIONS)
    _check_options(name, options)
    _check("epoch_samples", epoch_samples, low=1)
    schedule = _build(name, options, lr, epoch_samples, total_samples)
    return _warm(schedule, options, epoch_samples)


def _build(name: str, options: Options, lr: float, epoch_samples: int, total: int) -> Schedule:
    """The named schedule, without its warm-up."""
    match name:
        case "step":
            every = _samples("every", options["every"], epoch_samples, low=1 / epoch_samples)
            return step(lr, every, _number("factor", options.get("factor", _FACTOR)))
        case "multistep":
            at = options["at"]
            epochs = at if isinstance(at, tuple) else (at,)
            milestones = [_samples("at", epoch, epoch_samples) for epoch in epochs]
            return multistep(lr, milestones, _number("factor", options.get("factor", _FACTOR)))
        case "cosine":
            return cosine(lr, total, _number("final", options.get("final", 0.0)))
        case "linear":
            return linear(lr, total, _number("final", options.get("final", 0.0)))
        case _:
            return constant(lr)


def _warm(schedule: Schedule, options: Options, epoch_samples: int) -> Schedule:
    """The schedule with the warm-up that its options ask for."""
    if "warmup" in options:
        samples = _samples("warmup", options["warmup"], epoch_samples)
        return warmup(schedule, samples, _number("start", options.get("start", 0.0)))
    if "start" in options:
        raise InputError(f"start={options['start']} has no warm-up to start: add warmup=EPOCHS")
    return schedule


def _check_options(name: str, options: Options) -> None:
    for key in options:
        check_choice(f"option of schedule {name}", key, _OPTIONS[name])
    required = _REQUIRED.get(name)
    if required and required not in options:
        raise InputError(f"schedule {name} has no {required!r}: write {name}:{required}=EPOCHS")


def _samples(key: str, epochs: Value, epoch_samples: int, low: float = 0.0) -> int:
    """A position of a spec, in samples."""
    position = _number(key, epochs)
    _check(key, position, low, _MOST_EPOCHS)
    return round(position * epoch_samples)


def _number(key: str, value: Value) -> float:
    if isinstance(value, bool | str | tuple):
        raise InputError(f"{key}={value} is not a number: give one, such as {key}=0.1")
    return value


def _check_decay(lr: float, factor: float) -> None:
    _check("lr", lr)
    _check("factor", factor, high=1)


def _check_fall(lr: float, total: int, final: float) -> None:
    _check("lr", lr)
    _check("total", total, low=1)
    _check("final", final, high=1)


def _check(name: str, value: float, low: float = 0, high: float = _LARGEST) -> None:
    """Refuse NaN, infinity, and what lies outside low to high."""
    if not low <= value <= high:
        bounds = f"of {low} or more" if high == _LARGEST else f"from {low} to {high}"
        raise InputError(f"{name}={value} is not possible: give a finite number {bounds}")
