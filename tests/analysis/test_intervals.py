from __future__ import annotations

import math

import pytest

from analysis.intervals import is_difference, pool, relative_difference
from bench.load.measurement import Interval


def exact(value: float) -> Interval:
    return Interval(value, value, value)


def test_the_spread_between_launches_is_pooled_over_configurations() -> None:
    pooled = pool({"a": [exact(99.0), exact(101.0)], "b": [exact(198.0), exact(202.0)]})
    # By hand: relative deviations of 0.01 four times, two degrees of freedom, t = 4.303.
    half = 4.3027 * math.sqrt(4 * 0.01**2 / 2) / math.sqrt(2)
    assert pooled["a"].mean == 100
    assert pooled["a"].high - 100 == pytest.approx(100 * half, rel=1e-4)
    assert pooled["b"].high - 200 == pytest.approx(200 * half, rel=1e-4)


def test_with_one_launch_the_window_is_all_there_is() -> None:
    pooled = pool({"a": [Interval(100.0, 98.0, 102.0, "batch means")]})
    assert (pooled["a"].low, pooled["a"].high) == (98.0, 102.0)
    assert "one launch" in pooled["a"].method


def test_a_configuration_without_launches_has_no_interval() -> None:
    assert pool({"a": [], "b": [exact(1.0)]}).keys() == {"b"}


def test_a_difference_within_the_noise_is_none() -> None:
    assert not is_difference(relative_difference(Interval(101, 99, 103), Interval(100, 98, 102)))
    assert is_difference(relative_difference(Interval(110, 108, 112), Interval(100, 98, 102)))


def test_a_metric_without_an_interval_proves_nothing() -> None:
    unknown = Interval(50, -math.inf, math.inf)
    assert not is_difference(relative_difference(unknown, exact(100.0)))
