"""Intervals: what several launches of one configuration say together, and how two of them differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from scipy import stats

from bench.load.measurement import Interval

CONFIDENCE = 0.95

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Spread:
    """Relative standard deviation between launches of one configuration, with its degrees of freedom."""

    relative: float = 0.0
    freedom: int = 0

    @property
    def t(self) -> float:
        return float(stats.t.ppf((1 + CONFIDENCE) / 2, self.freedom)) if self.freedom else math.nan


def pooled_spread(groups: Sequence[Sequence[float]]) -> Spread:
    """Pool the spread between launches over configurations, equal relative variances assumed.

    It holds what the interval of one window cannot see: the difference from launch to launch.
    """
    squares, freedom = 0.0, 0
    for values in groups:
        mean = statistics.fmean(values) if values else 0.0
        if len(values) > 1 and mean:
            squares += sum((value / mean - 1) ** 2 for value in values)
            freedom += len(values) - 1
    return Spread(math.sqrt(squares / freedom), freedom) if freedom else Spread()


def over_launches(launches: Sequence[Interval], spread: Spread) -> Interval:
    """Mean of one configuration over its launches: a t interval from the pooled spread, else the window's own."""
    mean = statistics.fmean(launch.mean for launch in launches)
    if not spread.freedom:
        return Interval(mean, launches[0].low, launches[0].high, f"one launch: {launches[0].method}")
    half = spread.t * spread.relative * mean / math.sqrt(len(launches))
    return Interval(mean, mean - half, mean + half, f"t over {len(launches)} launches, {spread.freedom} df, pooled")


def pool(groups: Mapping[Name, Sequence[Interval]]) -> dict[Name, Interval]:
    """One interval for each configuration that was launched at least once."""
    spread = pooled_spread([[launch.mean for launch in launches] for launches in groups.values()])
    return {name: over_launches(launches, spread) for name, launches in groups.items() if launches}


def relative_difference(value: Interval, reference: Interval) -> Interval:
    """``value / reference - 1`` with the interval of the ratio (delta method on independent relative errors)."""
    ratio = value.mean / reference.mean
    half = ratio * math.hypot(value.relative_half_width, reference.relative_half_width)
    return Interval(ratio - 1, ratio - 1 - half, ratio - 1 + half, "delta method on independent relative errors")


def is_difference(difference: Interval) -> bool:
    """Whether the interval leaves zero outside."""
    return difference.low > 0 or difference.high < 0
