from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch.optim import lr_scheduler

from crossbow.errors import InputError
from crossbow.optim.schedule import (
    Schedule,
    constant,
    cosine,
    linear,
    multistep,
    parse,
    step,
    warmup,
)

LR, EPOCH, EPOCHS = 0.1, 50, 20
TOTAL = EPOCHS * EPOCH

SCHEDULES: dict[str, Schedule] = {
    "constant": constant(LR),
    "step": step(LR, 300, 0.5),
    "multistep": multistep(LR, [400, 700], 0.1),
    "cosine": cosine(LR, TOTAL, 0.1),
    "linear": linear(LR, TOTAL, 0.1),
}
everywhere = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def torch_rates(build: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]) -> list[float]:
    """The rate that torch's scheduler gives at the beginning of each epoch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = build(optimizer)
    rates = []
    for _ in range(EPOCHS + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("spec", "build"),
    [
        ("constant", lambda opt: lr_scheduler.ConstantLR(opt, factor=1)),
        ("step:every=6,factor=0.5", lambda opt: lr_scheduler.StepLR(opt, 6, 0.5)),
        ("multistep:at=8/14", lambda opt: lr_scheduler.MultiStepLR(opt, [8, 14], 0.1)),
        ("cosine:final=0.1", lambda opt: lr_scheduler.CosineAnnealingLR(opt, EPOCHS, 0.1 * LR)),
        ("linear:final=0.1", lambda opt: lr_scheduler.LinearLR(opt, 1, 0.1, EPOCHS)),
        ("constant:warmup=5,start=0.2", lambda opt: lr_scheduler.LinearLR(opt, 0.2, 1, 5)),
        (
            "multistep:at=3/8/14,warmup=5,start=0.2",
            lambda opt: lr_scheduler.ChainedScheduler(
                [
                    lr_scheduler.LinearLR(opt, 0.2, 1, 5),
                    lr_scheduler.MultiStepLR(opt, [3, 8, 14], 0.1),
                ]
            ),
        ),
    ],
)
def test_rates_are_torchs_at_the_matching_samples(
    spec: str, build: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
) -> None:
    schedule = parse(spec, LR, EPOCH, TOTAL)
    ours = [schedule(epoch * EPOCH) for epoch in range(EPOCHS + 1)]
    assert ours == pytest.approx(torch_rates(build), rel=1e-9)


@everywhere
def test_a_schedule_depends_on_samples_only(schedule: Schedule) -> None:
    forth = [schedule(samples) for samples in range(TOTAL)]
    back = [schedule(samples) for samples in reversed(range(TOTAL))]
    assert forth == back[::-1]


@everywhere
def test_a_schedule_starts_at_lr_and_never_rises(schedule: Schedule) -> None:
    rates = [schedule(samples) for samples in range(2 * TOTAL)]
    assert rates[0] == LR
    assert all(later <= sooner * (1 + 1e-12) for sooner, later in pairwise(rates))


@pytest.mark.parametrize("shape", [cosine, linear])
@pytest.mark.parametrize("final", [0.0, 0.03, 1.0])
def test_cosine_and_linear_end_exactly_at_final_and_stay(
    shape: Callable[..., Schedule], final: float
) -> None:
    schedule = shape(LR, TOTAL, final)
    assert schedule(TOTAL) == schedule(3 * TOTAL) == final * LR


@everywhere
def test_warmup_leaves_the_schedule_alone_from_its_last_sample_on(schedule: Schedule) -> None:
    warm = warmup(schedule, 120, start=0.25)
    assert warm(0) == 0.25 * schedule(0)
    assert warm(119) < schedule(119)
    assert all(warm(samples) == schedule(samples) for samples in range(120, TOTAL))


def test_warmup_rises_to_the_target_in_equal_steps() -> None:
    warm = warmup(constant(LR), 10)
    assert [warm(samples) for samples in range(12)] == pytest.approx(
        [LR * min(samples / 10, 1) for samples in range(12)]
    )


def test_warmup_of_no_samples_is_no_warmup() -> None:
    assert warmup(constant(LR), 0)(0) == LR


def test_a_warmup_longer_than_the_run_still_trains() -> None:
    assert parse("cosine:warmup=5", LR, EPOCH, EPOCH)(EPOCH // 2) > 0


def test_milestones_may_come_in_any_order() -> None:
    assert multistep(1.0, [200, 100], 0.5)(150) == 0.5


@pytest.mark.parametrize("at", ["2.5", "2.5/9"])
def test_positions_of_a_spec_are_epochs_and_may_be_fractions(at: str) -> None:
    schedule = parse(f"multistep:at={at},factor=0.5", LR, EPOCH, TOTAL)
    assert schedule(124) == LR
    assert schedule(125) == LR / 2


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("cosin", "did you mean 'cosine'"),
        ("cosine:finale=0.1", "did you mean 'final'"),
        ("linear:factor=0.1", "unknown option of schedule linear 'factor'"),
        ("constant:every=3", "unknown option of schedule constant 'every'"),
        ("step", "write step:every=EPOCHS"),
        ("multistep:factor=0.1", "write multistep:at=EPOCHS"),
        ("cosine:start=0.1", "add warmup=EPOCHS"),
        ("cosine:final=1.5", "final=1.5 is not possible: give a finite number from 0 to 1"),
        ("cosine:final=nan", "final=nan"),
        ("linear:final=-0.1", "final=-0.1"),
        ("multistep:at=5/nan", "at=nan"),
        ("multistep:at=inf", "at=inf"),
        ("multistep:at=-1/5", "at=-1.0"),
        ("multistep:at=" + "9" * 400, "at=999"),
        ("multistep:at=soon", "at=soon is not a number"),
        ("multistep:at=5,factor=10", "factor=10 is not possible: give a finite number from 0 to 1"),
        ("multistep:at=5,factor=nan", "factor=nan"),
        ("step:every=0", "every=0 is not possible"),
        ("step:every=3/4", "is not a number"),
        ("step:every=true", "every=True is not a number"),
        ("constant:warmup=-1", "warmup=-1 is not possible: give a finite number from 0"),
        ("constant:warmup=inf", "warmup=inf"),
        ("constant:warmup=1,start=2", "start=2"),
    ],
)
def test_a_bad_spec_is_refused_with_value_range_and_remedy(spec: str, told: str) -> None:
    with pytest.raises(InputError) as raised:
        parse(spec, LR, EPOCH, TOTAL)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), -0.1])
@pytest.mark.parametrize("spec", ["constant", "step:every=1", "multistep:at=1", "cosine", "linear"])
def test_a_bad_learning_rate_is_refused(spec: str, lr: float) -> None:
    with pytest.raises(InputError, match=f"lr={lr}"):
        parse(spec, lr, EPOCH, TOTAL)


@pytest.mark.parametrize("shape", [cosine, linear])
def test_a_fall_over_no_samples_is_refused(shape: Callable[..., Schedule]) -> None:
    with pytest.raises(InputError, match="total=0"):
        shape(LR, 0)
