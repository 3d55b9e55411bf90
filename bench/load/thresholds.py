"""Thresholds: conditions on a measurement, written as people say them, e.g. ``p95(ttft)<500ms``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from bench.load.measurement import Measurement, Summary
from bench.words import closest

LATENCIES = {
    "ttft": "ttft_s",
    "ttft_sched": "ttft_scheduled_s",
    "ttfat": "ttfat_s",
    "tpot": "tpot_s",
    "itl": "itl_s",
    "icl": "icl_s",
    "e2e": "e2e_s",
    "e2e_sched": "e2e_scheduled_s",
}
STATISTICS = {"mean": "mean", "avg": "mean", "p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99", "max": "max"}
FIGURES = ("output_tok_per_s", "request_per_s", "acceptance_length", "failed")
SLOS = ("ttft", "tpot", "e2e")
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "%": 1e-2, "": 1.0}

_FORM = re.compile(r"\s*(?:(\w+)\s*\(\s*(\w+)\s*\)|(\w+))\s*(<=|>=|<|>)\s*([0-9.eE+-]+?)\s*(us|ms|s|%|)\s*")
_HELP = "expected e.g. p95(ttft)<500ms, output_tok_per_s>1000 or failed<1%"


@dataclass(frozen=True)
class Threshold:
    """One condition.

    Attributes:
        statistic: of a latency, else None.
        limit: in seconds for a latency, a share for ``failed``.
    """

    text: str
    name: str
    statistic: str | None
    sign: str
    limit: float

    def value(self, measurement: Measurement) -> float | None:
        """What was measured; None where there is no such figure."""
        if self.statistic is not None:
            summary: Summary | None = getattr(measurement, LATENCIES[self.name])
            return None if summary is None else float(getattr(summary, self.statistic))
        if self.name == "failed":
            done = measurement.requests_ok + measurement.requests_failed
            return measurement.requests_failed / done if done else None
        if self.name == "output_tok_per_s":
            return measurement.output_tok_per_s.mean
        found: float | None = getattr(measurement, self.name)
        return found

    def holds(self, measurement: Measurement) -> bool:
        """Whether it is met; a figure that was not measured does not meet it."""
        value = self.value(measurement)
        if value is None or math.isnan(value):
            return False
        return {
            "<": value < self.limit,
            "<=": value <= self.limit,
            ">": value > self.limit,
            ">=": value >= self.limit,
        }[self.sign]


def parse(text: str) -> Threshold:
    """Read a condition.

    Raises:
        ValueError: where it is none, with the closest name.
    """
    found = _FORM.fullmatch(text)
    if not found:
        raise ValueError(f"threshold {text!r}: {_HELP}")
    statistic, latency, figure, sign, number, unit = found.groups()
    try:
        limit = float(number) * UNITS[unit]
    except ValueError:
        raise ValueError(f"threshold {text!r}: {number!r} is no number; {_HELP}") from None
    if figure is not None:
        if figure not in FIGURES:
            hint = f"a latency needs a statistic, e.g. p95({figure})" if figure in LATENCIES else ", ".join(FIGURES)
            raise ValueError(f"threshold {text!r}: no figure {figure!r} ({hint}{closest(figure, FIGURES)})")
        if unit not in ("", "%"):
            raise ValueError(f"threshold {text!r}: {figure} is not a time")
        return Threshold(text, figure, None, sign, limit)
    if statistic not in STATISTICS:
        raise ValueError(f"threshold {text!r}: no statistic {statistic!r}, expected one of {', '.join(STATISTICS)}")
    if latency not in LATENCIES:
        names = ", ".join(LATENCIES)
        hint = closest(latency, LATENCIES)
        raise ValueError(f"threshold {text!r}: no latency {latency!r}, expected one of {names}{hint}")
    if unit in ("", "%"):
        raise ValueError(f"threshold {text!r}: a latency needs a unit (us, ms or s)")
    return Threshold(text, latency, STATISTICS[statistic], sign, limit)


def parse_slo(text: str) -> Threshold:
    """Read an objective that each request has to meet, e.g. ``ttft<500ms``.

    Raises:
        ValueError: where it is none.
    """
    name, sign, limit = text.partition("<")
    if name.strip() not in SLOS or not sign:
        hint = closest(name.strip(), SLOS)
        raise ValueError(
            f"slo {text!r}: expected one of {', '.join(SLOS)} below a time, e.g. ttft<500ms or e2e<10s{hint}"
        )
    found = parse(f"max({name.strip()})<{limit}")
    return Threshold(text, found.name, None, "<", found.limit)
