"""Objective: what makes one measured configuration better than another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.experiment import Experiment, ObjectiveSpec
from bench.load.measurement import Interval, Measurement

LARGER_IS_BETTER = frozenset({"output_tok_per_s", "request_per_s", "acceptance_length"})


@dataclass(frozen=True)
class Score:
    """A measured configuration in the terms of the objective.

    Attributes:
        value: of the metric at the level.
        excess: by limit, how far it is exceeded relative to the limit; zero or less meets it.
    """

    value: float
    level: int
    excess: tuple[tuple[str, float], ...] = ()

    @property
    def meets_limits(self) -> bool:
        return all(amount <= 0 for _, amount in self.excess)


def metric(measurement: Measurement, name: str) -> float | None:
    """A metric by its name, e.g. ``output_tok_per_s`` (the mean of its interval) or ``ttft_s.p95``; None if absent."""
    value: object = measurement
    for part in name.split("."):
        value = getattr(value, part, None)
    if isinstance(value, Interval):
        value = value.mean
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    return None


def interval(measurement: Measurement, name: str) -> Interval | None:
    """The 95 % interval of a metric within one window; None where it has none."""
    if name == "output_tok_per_s":
        return measurement.output_tok_per_s
    return dict(measurement.intervals).get(name)


def level(experiment: Experiment) -> int:
    """The load level that decides: the objective's own, else the busiest that is measured."""
    return experiment.objective.level or max(experiment.workload.levels)


def maximized(objective: ObjectiveSpec) -> bool:
    return objective.metric in LARGER_IS_BETTER


def better(objective: ObjectiveSpec, one: float, other: float) -> bool:
    return one > other if maximized(objective) else one < other


def score(experiment: Experiment, measurements: Sequence[Measurement]) -> Score | None:
    """Score a trial; None when the deciding level was not measured or its numbers must not be used."""
    deciding = level(experiment)
    for measurement in measurements:
        if measurement.concurrency != deciding or not measurement.valid:
            continue
        value = metric(measurement, experiment.objective.metric)
        if not value:  # of no metric zero is a reading: a rate of zero is a window in which nothing ended
            return None
        return Score(value, deciding, _excess(experiment.objective, measurement))
    return None


def _excess(objective: ObjectiveSpec, measurement: Measurement) -> tuple[tuple[str, float], ...]:
    excess = []
    for name, limit in objective.limits.items():
        seen = metric(measurement, name)
        excess.append((name, math.inf if seen is None else seen / limit - 1))
    return tuple(excess)
