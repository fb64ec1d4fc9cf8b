"""The family: averagings as settings of one pair of equations.

Synchronous model averaging keeps k learners w_j together through a central model z. With c_j taken
before the local move d_j of the learner's own optimizer, a step is

    c_j = alpha * (w_j - z)
    w_j <- w_j + d_j - c_j
    z   <- z + sum_j c_j + mu * (z - z_previous)

Koliousis et al., CROSSBOW, VLDB 2019. With mu = 0 it is EASGD (Zhang et al., 2015).

The functions below are one learner's row and one slice of the central model, in place. Both are
linear combinations, written so that each passes over memory as seldom as it can.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import UnionType

from torch import Tensor, lerp

from crossbow.averaging.gain import MEASURED, check_gain
from crossbow.errors import InputError, check_choice
from crossbow.spec import Value, parse_spec


@dataclass(frozen=True)
class Pulled:
    """A central model that pulls on the learners, and lags: the equations above."""

    alpha: float | None
    """The pull of the central model on the learners; None is 1/k, for k learners."""
    momentum: float
    """Of the central model; mu above."""
    restart: bool = False
    """Whether a drop of the learning rate restarts all learners at the central model."""
    period: int = 1
    """Rounds between two pulls."""
    wants_momentum: bool = False
    """Whether learners without momentum of their own are refused."""

    @property
    def changes_one(self) -> bool:
        """Whether a learner that is alone doesn't train as in plain PyTorch."""
        return self.alpha is not None

    def pull(self, num_learners: int) -> float:
        """Return alpha for so many learners; refuse one under which the mean is unstable."""
        alpha = 1 / num_learners if self.alpha is None else self.alpha
        check_stable(num_learners, alpha, self.momentum)
        return alpha


@dataclass(frozen=True)
class Adaptive:
    """Learners at their mean, whose common move has a gain: averaging/adaptive.py."""

    gain: str | float
    """"measured", "linear", "sqrt" or a number."""
    lead: float | None
    """How far the gained part of a move looks ahead; None is the optimizer's own momentum."""
    lag: int | None
    """Steps after which learners hear of each other: 1 or 0; None lets their number decide."""
    restart: bool = False
    """Whether a drop of the learning rate restarts the optimizers."""

    @property
    def changes_one(self) -> bool:
        """Whether a learner that is alone doesn't train as in plain PyTorch."""
        return False

    def lag_of(self, num_learners: int) -> int:
        """Return the lag for so many learners."""
        if self.lag is not None:
            return self.lag
        return 1 if num_learners <= MOST_LEARNERS_WITH_LAG else 0


@dataclass(frozen=True)
class Reduced:
    """One model, moved by the mean of all learners' gradients: averaging/allreduce.py."""

    scale: str | float | None
    """Of the learning rate: "linear", "sqrt", "adaptive" or a number; None leaves it as it is."""
    accumulate: int
    """Rounds whose gradients make a step."""
    restart: bool = False
    """Whether a drop of the learning rate restarts the optimizer."""

    @property
    def changes_one(self) -> bool:
        """Whether a learner that is alone doesn't train as in plain PyTorch."""
        return self.accumulate > 1

    @property
    def gain(self) -> str | float | None:
        """The scale as a rule of averaging/gain.py."""
        return MEASURED if self.scale == "adaptive" else self.scale


@dataclass(frozen=True)
class Periods:
    """Learners that begin each period at the central model: averaging/periodic.py."""

    period: int
    """Rounds between two averagings."""
    rate: float = 1.0
    """Of the central model's step; 1 without momentum makes it the mean of the learners."""
    momentum: float = 0.0
    """Of the central model."""
    nesterov: bool = False
    """Whether it is Nesterov's."""
    follows_rate: bool = False
    """Whether its velocity is scaled when the learning rate changes."""
    switches: bool = False
    """Whether the period is 1 at first."""
    switch: int | None = None
    """The round after which it isn't; None: once the learning rate has dropped."""
    resets: bool = False
    """Whether the learners' optimizers begin each period at rest."""
    restart: bool = False
    """Whether a drop of the learning rate restarts all learners at the central model."""

    @property
    def moves_center(self) -> bool:
        """Whether the central model is something else than the mean of the learners."""
        return self.rate != 1 or self.momentum != 0

    @property
    def changes_one(self) -> bool:
        """Whether a learner that is alone doesn't train as in plain PyTorch."""
        return self.moves_center or self.resets


@dataclass(frozen=True)
class Unordered:
    """Learners that don't wait for each other: averaging/asynchronous.py."""

    name: str
    shares_row: bool = False
    """Whether all learners stand in one row."""
    is_elastic: bool = False
    """Whether learner and central model pull each other, and don't become one."""
    alpha: float | None = None
    """The elastic pull; None is 1/k, for k learners."""
    period: int = 1
    """Steps of a learner between two pulls."""
    staleness: int | None = None
    """Rounds that a learner may be ahead of the last one; None: any number."""
    aware: bool = False
    """Whether stale steps count less."""
    restart: bool = False
    """Whether a drop of the learning rate restarts all learners at the central model."""

    @property
    def changes_one(self) -> bool:
        """Whether a learner that is alone doesn't train as in plain PyTorch."""
        return self.is_elastic and self.alpha is not None


@dataclass(frozen=True)
class Queued:
    """One model, moved by mean gradients of some steps before: averaging/pipeline.py."""

    lag: int
    """Steps after which a gradient moves the model."""
    restart: bool = False
    """Whether a drop of the learning rate restarts the optimizer."""
    changes_one = True


Averaging = Pulled | Adaptive | Reduced | Periods | Unordered | Queued

MOST_LEARNERS_WITH_LAG = 4
"""With more, what a learner's own batch alone says of the common move is too noisy to step by."""


def sma(alpha: float | None = None, momentum: float = 0.9, restart: bool = False) -> Pulled:
    """Synchronous model averaging as published: alpha = 1/k, central momentum 0.9."""
    if alpha is not None and not (math.isfinite(alpha) and 0 < alpha <= 1):
        raise InputError(f"alpha {alpha} is not possible: give a number above 0, at most 1")
    _check_momentum(momentum)
    return Pulled(alpha, momentum, restart)


def adaptive(
    gain: str | float = MEASURED,
    lead: float | None = None,
    lag: int | None = None,
    restart: bool = False,
) -> Adaptive:
    """Model averaging that learns like one learner: with a gain on what learners do in common."""
    check_gain(gain)
    if lead is not None and not (math.isfinite(lead) and lead >= 0):
        raise InputError(f"lead {lead} is not possible: give a finite number, 0 or more")
    if lag is not None and (isinstance(lag, bool) or lag not in (0, 1)):
        raise InputError(f"lag {lag} is not possible: give 0 or 1")
    return Adaptive(gain, lead, lag, restart)


def allreduce(
    scale: str | float | None = None, accumulate: int = 1, restart: bool = False
) -> Reduced:
    """Synchronous SGD: one model, moved by the mean of all learners' gradients."""
    if isinstance(scale, str):
        check_choice("scale", scale, SCALES)
    elif scale is not None:
        _check_number("scale", scale, above=0)
    _check_whole("accumulate", accumulate)
    return Reduced(scale, accumulate, restart)


SCALES = ("linear", "sqrt", "adaptive")


def easgd(alpha: float | None = None, period: int = 1, restart: bool = False) -> Pulled:
    """Elastic averaging SGD: synchronous model averaging without central momentum."""
    _check_whole("period", period)
    return replace(sma(alpha, 0.0, restart), period=period)


def eamsgd(alpha: float | None = None, period: int = 10, restart: bool = False) -> Pulled:
    """Elastic averaging of learners with Nesterov's momentum of their own."""
    return replace(easgd(alpha, period, restart), wants_momentum=True)


def local_sgd(period: int = 8, restart: bool = False) -> Periods:
    """Local SGD: learners become their mean every so many rounds."""
    _check_whole("period", period)
    return Periods(period, restart=restart)


def post_local_sgd(period: int = 8, switch: int | None = None, restart: bool = False) -> Periods:
    """Post-local SGD: learners become their mean in each round at first, then once a period."""
    _check_whole("period", period)
    if switch is not None:
        _check_whole("switch", switch)
    return Periods(period, switches=True, switch=switch, restart=restart)


def slowmo(
    period: int = 12,
    lr: float = 1.0,
    momentum: float = 0.7,
    reset: bool = False,
    restart: bool = False,
) -> Periods:
    """SlowMo: local SGD whose central model has momentum, in units of the learning rate."""
    _check_outer(period, lr, momentum)
    return Periods(period, lr, momentum, follows_rate=True, resets=reset, restart=restart)


def diloco(
    period: int = 50, lr: float = 0.7, momentum: float = 0.9, restart: bool = False
) -> Periods:
    """DiLoCo: local SGD whose central model takes Nesterov's steps."""
    _check_outer(period, lr, momentum)
    return Periods(period, lr, momentum, nesterov=True, restart=restart)


def _check_outer(period: int, lr: float, momentum: float) -> None:
    _check_whole("period", period)
    _check_number("lr", lr, above=0)
    _check_momentum(momentum)


def asgd(staleness: int | None = None, aware: bool = False, restart: bool = False) -> Unordered:
    """Asynchronous SGD: steps go to the central model as they come, as to a parameter server."""
    if staleness is not None and (isinstance(staleness, bool) or staleness < 0):
        raise InputError(f"staleness {staleness} is not possible: give 0 or more rounds")
    return Unordered("asgd", staleness=staleness, aware=aware, restart=restart)


def aeasgd(alpha: float | None = None, period: int = 10, restart: bool = False) -> Unordered:
    """Asynchronous elastic averaging SGD: each learner meets the central model in its own time."""
    elastic = easgd(alpha, period)
    return Unordered("aeasgd", is_elastic=True, alpha=elastic.alpha, period=period, restart=restart)


def hogwild(restart: bool = False) -> Unordered:
    """Hogwild: all learners step in one row, whenever they are ready."""
    return Unordered("hogwild", shares_row=True, restart=restart)


def pipelined(lag: int = 1, restart: bool = False) -> Queued:
    """Pipelined SGD: all-reduce whose gradients move the model some steps later, and hide."""
    _check_whole("lag", lag)
    return Queued(lag, restart)


AVERAGINGS: Mapping[str, Callable[..., Averaging]] = {
    make.__name__: make
    for make in (
        adaptive,
        aeasgd,
        allreduce,
        asgd,
        diloco,
        eamsgd,
        easgd,
        hogwild,
        local_sgd,
        pipelined,
        post_local_sgd,
        slowmo,
        sma,
    )
}


def parse(spec: str) -> Averaging:
    """Return the averaging that `spec` names, such as `sma:alpha=0.25,momentum=0.9`."""
    name, options = parse_spec(spec)
    make = AVERAGINGS[check_choice("averaging", name, AVERAGINGS)]
    for option, value in options.items():
        check_choice(f"option of {name}", option, inspect.signature(make).parameters)
        _check_kind(name, option, value)
    return make(**options)


def _check_kind(name: str, option: str, value: Value) -> None:
    """Refuse a value of another kind than the option's."""
    wants = _KINDS.get(option, int | float)
    if isinstance(value, wants) and isinstance(value, bool) == (wants is bool):
        return
    raise InputError(f"{option} {value!r} of {name} is not possible: see --help")


_KINDS: Mapping[str, UnionType | type] = {
    "accumulate": int,
    "aware": bool,
    "gain": str | int | float,
    "period": int,
    "reset": bool,
    "restart": bool,
    "scale": str | int | float,
    "staleness": int,
    "switch": int,
}
"""Of options that aren't numbers."""


def _check_number(name: str, value: float, above: float) -> None:
    if not (math.isfinite(value) and value > above):
        raise InputError(f"{name} {value} is not possible: give a finite number above {above}")


def _check_momentum(momentum: float) -> None:
    if not (math.isfinite(momentum) and 0 <= momentum < 1):
        raise InputError(f"momentum {momentum} is not possible: give 0 or more, below 1")


def _check_whole(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} {value} is not possible: give a whole number, 1 or more")


def check_stable(num_learners: int, alpha: float, momentum: float) -> None:
    """Refuse a pull under which the common motion of learners and central model grows.

    For the mean m of the learners, without local moves, the step is m <- m - alpha * (m - z) and
    z <- z + k * alpha * (m - z) + mu * (z - z_previous). Its characteristic polynomial has a root
    outside the unit circle if k * alpha >= (1 + mu) * (2 - alpha).
    """
    if num_learners * alpha < (1 + momentum) * (2 - alpha):
        return
    bound = 2 * (1 + momentum) / (num_learners + 1 + momentum)
    raise InputError(
        f"alpha {alpha:g} is unstable for {num_learners} learners at momentum {momentum:g}: "
        f"give less than {bound:.4g}; the default is 1/{num_learners}"
    )


def pull_first(after: Tensor, before: Tensor, central: Tensor, alpha: float) -> None:
    """Set after = before - alpha * (before - central), to which the local move is added next.

    One pass; right only for optimizers whose move doesn't depend on the weights it is added to.
    """
    lerp(before, central, alpha, out=after)


def pull_last(after: Tensor, before: Tensor, central: Tensor, alpha: float) -> None:
    """Subtract alpha * (before - central) from the row after its local move."""
    after.add_(central, alpha=alpha).sub_(before, alpha=alpha)


def advance(
    oldest: Tensor,
    central: Tensor,
    rows: Sequence[Tensor],
    num_learners: int,
    alpha: float,
    momentum: float,
) -> None:
    """Turn z(t-1), in place, into z(t+1), given z(t) and rows that sum up to all learners at t.

    z(t+1) = (1 + mu - k * alpha) * z(t) - mu * z(t-1) + alpha * sum_j w_j(t)
    """
    oldest.mul_(-momentum).add_(central, alpha=1 + momentum - num_learners * alpha)
    for row in rows:  # in learner order, so that the bits don't depend on who computes
        oldest.add_(row, alpha=alpha)


def average(out: Tensor, rows: Sequence[Tensor], num_learners: int) -> None:
    """Set out to the mean of all learners, given rows that sum up to them.

    Integers (how many batches a batch norm has seen) are the same for all: the first one's count.
    """
    out.copy_(rows[0])
    if out.is_floating_point():
        for row in rows[1:]:
            out.add_(row)
        out.div_(num_learners)
