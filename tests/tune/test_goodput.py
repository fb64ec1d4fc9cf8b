import math

import pytest

from crossbow.tune.goodput import efficiency, goodput


@pytest.mark.parametrize("k", [1, 2, 5, 64])
@pytest.mark.parametrize("b", [4, 64])
@pytest.mark.parametrize("critical", [1.0, 64.0, 1e4])
def test_efficiency_is_the_closed_form(k: int, b: int, critical: float) -> None:
    assert efficiency(k, b, critical) == pytest.approx((b + critical) / (k * b + critical))


def test_efficiency_without_knowledge_or_signal_is_one() -> None:
    assert efficiency(8, 16, None) == efficiency(8, 16, math.inf) == 1.0


def test_goodput_of_one_learner_is_its_throughput() -> None:
    assert goodput(123.0, 1, 16, 40.0) == 123.0
