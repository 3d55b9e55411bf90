"""Words: numbers, metrics and names as a person reads them."""

from __future__ import annotations

import math

from rich.console import Console

from bench.load.measurement import Interval

METRICS = {
    "output_tok_per_s": "output tokens/s",
    "request_per_s": "requests/s",
    "ttft_s": "time to first token",
    "ttft_scheduled_s": "time to first token from the scheduled time",
    "tpot_s": "time per output token",
    "itl_s": "gap between tokens",
    "icl_s": "gap between chunks",
    "e2e_s": "time per request",
    "acceptance_length": "acceptance length",
}


def metric_name(metric: str) -> str:
    """``ttft_s.p95`` is ``time to first token (p95)``."""
    name, _, part = metric.partition(".")
    return METRICS.get(name, name) + (f" ({part})" if part else "")


def metric_value(metric: str, value: float) -> str:
    """A value with its unit: ``1,444 output tokens/s``, ``312 ms``."""
    name = metric.partition(".")[0]
    if name.endswith("_s") and not name.endswith("per_s"):
        return seconds(value)
    return f"{number(value)} {METRICS.get(name, name)}" if name != "acceptance_length" else number(value)


def number(value: float) -> str:
    """Three significant digits, and every digit of what lies in front of the point."""
    if not math.isfinite(value):
        return "unbounded"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def seconds(value: float) -> str:
    if not math.isfinite(value):
        return "unbounded"
    if abs(value) < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s" if abs(value) < 120 else duration(value)


def duration(value_s: float) -> str:
    """``41 s``, ``12 min 5 s``, ``3 h 20 min``, ``4 d 3 h``"""
    whole = round(value_s)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(value_s / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(value_s / 3600)
    return f"{hours // 24} d {hours % 24} h"


def percent(value: float, *, signed: bool = False) -> str:
    if not math.isfinite(value):
        return "unbounded"
    return f"{value * 100:{'+' if signed else ''}.1f} %"


def interval(value: Interval, *, relative: bool = False) -> str:
    """``1,444 (1,402 to 1,486)``; ``relative``: as signed percents.

    What is measured cannot be negative, nor change by less than -100 %: an interval that reaches further ends there.
    """
    least = -1.0 if relative else 0.0
    show = (lambda item: percent(item, signed=True)) if relative else number
    if not (math.isfinite(value.low) and math.isfinite(value.high)):
        return f"{show(value.mean)} (no interval)"
    return f"{show(value.mean)} ({show(max(least, value.low))} to {show(value.high)})"


def gib(value_bytes: float) -> str:
    return f"{value_bytes / 2**30:.1f} GiB"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def console() -> Console:
    """As wide as the terminal; wide enough for a table where there is none."""
    found = Console()
    return found if found.is_terminal else Console(width=140)
