"""Figures of the load: throughput and latency against concurrency, the front between them, speculation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from analysis import words
from analysis.figures.style import (
    BASELINE_COLOUR,
    BEST_COLOUR,
    BLUE,
    GRID,
    INK,
    MUTED,
    SERIES,
    VERMILLION,
    Drawing,
    axes,
    from_zero,
    stamp,
)
from analysis.frames import Run, measurement_at, metric_interval
from analysis.standing import Standing, baseline, best, by_load, measured, standings
from bench.engines.protocol import Value
from bench.load.measurement import Measurement
from bench.outcome import OutcomeKind
from bench.records import TrialRecord

MAX_SERIES = 6  # more lines than this cannot be told apart
SPECULATIVE_STEPS = ("speculative_num_steps", "num_speculative_tokens")


def throughput_by_load(run: Run) -> Drawing:
    """Output tokens per second against concurrency, for best, baseline and finalists."""
    name, title = "throughput", "Throughput against load"
    shown = _shown(run)
    speeds = by_load(shown, "output_tok_per_s")
    if not speeds:
        return Drawing(name, title, "No load level has been measured yet.")
    figure, (axis,) = axes(height=3.3)
    for standing, (colour, style) in zip(shown, _styles(shown), strict=True):
        points = sorted((level, value) for (key, level), value in speeds.items() if key == standing.record.config.key)
        levels = [level for level, _ in points]
        means = np.array([value.mean for _, value in points])
        # An interval may reach below zero, a throughput cannot.
        below = [v.mean if math.isfinite(v.low) and v.low < 0 else v.mean - v.low for _, v in points]
        arms = np.nan_to_num([below, [v.high - v.mean for _, v in points]], posinf=0.0)
        axis.errorbar(levels, means, yerr=np.abs(arms), label=standing.label, color=colour, capsize=3, ms=4.5, **style)
    _load_axis(axis, {level for _, level in speeds})
    axis.set_ylabel("output tokens/s")
    from_zero(axis)
    _mark_level(axis, run)
    axis.legend(loc="best")
    stamp(figure, _records(shown))
    again = all(standing.again for standing in shown)
    if not again:
        what = "of one launch each: nothing has been measured again yet, so the best is likely to look too good."
    elif max(len(standing.launches) for standing in shown) == 1:
        what = "of one fresh launch each: what differs from launch to launch is not in them."
    else:
        what = "over the finalists' fresh launches, the spread from launch to launch pooled over all of them."
    text = f"Bars are 95 % intervals {what}"
    return Drawing(name, title, text + _invalid_text(shown), figure)


def latency_by_load(run: Run) -> Drawing:
    """Time to first token and time per output token against concurrency."""
    name, title = "latency", "Latency against load"
    shown = _shown(run)
    levels = {item.concurrency for standing in shown for item in measured(standing) if item.concurrency}
    metrics = [_percentile(run, "ttft_s"), _percentile(run, "tpot_s")]
    if not levels:
        return Drawing(name, title, "No load level has been measured yet.")
    figure, panels = axes(2, height=4.4)
    for axis, metric in zip(panels, metrics, strict=True):
        for standing, (colour, style) in zip(shown, _styles(shown), strict=True):
            points = _latencies(standing, metric)
            if points:
                low, mean, high = ([value[index] * 1000 for value in points.values()] for index in range(3))
                arms = np.subtract(mean, low), np.subtract(high, mean)
                axis.errorbar(
                    list(points), mean, yerr=arms, label=standing.label, color=colour, capsize=3, ms=4.5, **style
                )
        limit = run.objective.limits.get(metric)
        if limit is not None:
            axis.axhline(limit * 1000, color=VERMILLION, lw=1.1, ls=(0, (2, 2)))
            axis.text(
                0.99,
                limit * 1000,
                "limit",
                transform=axis.get_yaxis_transform(),
                color=VERMILLION,
                fontsize=9,
                va="bottom",
                ha="right",
            )
        axis.set_title(f"{words.metric_name(metric)}, ms")
        from_zero(axis)
        _mark_level(axis, run)
    _load_axis(panels[-1], levels)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=2)
    stamp(figure, _records(shown))
    return Drawing(
        name,
        title,
        "Points are means over the launches, bars reach from the lowest launch to the highest." + _invalid_text(shown),
        figure,
    )


def pareto(run: Run) -> Drawing:
    """What a request gets against what the server gives, over all trials and load levels."""
    name, title = "pareto", "Speed of a request against throughput"
    points = [
        (1 / item.tpot_s.p50, item.output_tok_per_s.mean, record, item.concurrency)
        for record in run.all_records
        for item in record.measurements
        if item.valid and item.tpot_s is not None and item.tpot_s.p50 > 0
    ]
    if len(points) < 2:
        return Drawing(name, title, "Fewer than two load levels were measured with a time per output token.")
    figure, (axis,) = axes(height=3.4)
    winner, first = best(run), baseline(run)
    own = {record.config.key for record in (winner, first) if record is not None}
    others = [point for point in points if point[2].config.key not in own]
    if others:
        x, y = [p[0] for p in others], [p[1] for p in others]
        axis.scatter(x, y, s=12, color=MUTED, alpha=0.55, lw=0, label="other trials")
    same = winner is not None and first is not None and winner.config.key == first.config.key
    named = ((first, "baseline", "s", INK), (None if same else winner, "best", "o", BEST_COLOUR))
    for record, label, marker, colour in named:
        mine = [p for p in points if record is not None and p[2].config.key == record.config.key]
        if mine:
            x, y = [p[0] for p in mine], [p[1] for p in mine]
            axis.scatter(x, y, s=30, color=colour, marker=marker, zorder=4, label=label)
    front = front_of([(speed, total) for speed, total, *_ in points])
    axis.step(
        [p[0] for p in front], [p[1] for p in front], where="pre", color=VERMILLION, lw=1.3, label="front", zorder=3
    )
    for speed, total, level in _mean_points(points, winner):
        axis.annotate(f"{level}", (speed, total), (7, 5), textcoords="offset points", fontsize=8, color=BEST_COLOUR)
    axis.set_xlabel("tokens/s that one request gets (1 / median time per token)")
    axis.set_ylabel("output tokens/s of the server")
    from_zero(axis)
    axis.set_xlim(0, axis.get_xlim()[1] * 1.03)
    axis.legend(loc="best", handletextpad=0.4)
    stamp(figure, run.all_records)
    on_front = {record.number for speed, total, record, _ in points if (speed, total) in set(front)}
    text = (
        "Each point is one load level of one launch; the best one's bear their requests in flight. "
        "Nothing lies above and to the right of the front; on it, by trial: "
        + ", ".join(str(number) for number in sorted(on_front)[:12])
        + (" and more." if len(on_front) > 12 else ".")
    )
    return Drawing(name, title, text, figure)


def _mean_points(
    points: Sequence[tuple[float, float, TrialRecord, int | None]], winner: TrialRecord | None
) -> list[tuple[float, float, int]]:
    """Where the levels of one configuration lie, over its launches."""
    found: dict[int, list[tuple[float, float]]] = {}
    for speed, total, record, level in points:
        if winner is not None and level is not None and record.config.key == winner.config.key:
            found.setdefault(level, []).append((speed, total))
    return [
        (statistics.fmean(x for x, _ in seen), statistics.fmean(y for _, y in seen), level)
        for level, seen in found.items()
    ]


def front_of(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both, by rising first coordinate; larger is better in each."""
    front: list[tuple[float, float]] = []
    for point in sorted(set(points), reverse=True):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front[::-1]


def speculation(run: Run) -> Drawing:
    """Acceptance length and step time, which together make the speed, against speculative steps."""
    name, title = "speculation", "Why: acceptance length and step time"
    level = run.objective.level
    found: dict[int, list[Measurement]] = {}
    records: list[TrialRecord] = []
    for record in run.all_records:
        measurement = measurement_at(record, level)
        if measurement is not None and measurement.step_time_s and record.outcome.kind is OutcomeKind.COMPLETE:
            found.setdefault(_steps(record), []).append(measurement)
            records.append(record)
    if not any(found):
        return Drawing(name, title, "No trial with speculative decoding was measured at the deciding load.")
    figure, (length, step, speed) = axes(3, height=5.0)
    _spread(length, {steps: [item.acceptance_length or 1.0 for item in items] for steps, items in found.items()})
    _spread(step, {steps: [(item.step_time_s or 0.0) * 1000 for item in items] for steps, items in found.items()})
    _spread(speed, {steps: [item.output_tok_per_s.mean for item in items] for steps, items in found.items()})
    length.set_title("acceptance length (tokens per step and request)")
    step.set_title("step time (ms)")
    speed.set_title("output tokens/s")
    speed.set_xlabel("speculative steps (0: no speculation)")
    speed.xaxis.set_major_locator(FixedLocator(sorted(found)))
    for axis in (length, step, speed):
        from_zero(axis)
        axis.margins(x=0.08)
    stamp(figure, records)
    counts = ", ".join(f"{len(found[steps])} with {words.counted(steps, 'step')}" for steps in sorted(found))
    text = (
        f"At {level} requests in flight. Throughput = requests in flight x acceptance length / step time: more "
        "steps pay as long as the acceptance length grows faster than the step gets slower. Dots are "
        f"launches ({counts}), which differ in other settings too; the line joins their medians."
    )
    return Drawing(name, title, text, figure)


def _steps(record: TrialRecord) -> int:
    flags: dict[str, Value] = dict(record.config.flags)
    for name in SPECULATIVE_STEPS:
        value = flags.get(name)
        if isinstance(value, (int, float)):
            return int(value)
    return 0


def _spread(axis: Axes, groups: dict[int, list[float]]) -> None:
    for steps, values in groups.items():
        offsets = np.linspace(-0.06, 0.06, len(values)) if len(values) > 1 else np.zeros(1)
        axis.scatter(steps + offsets, values, s=16, color=BLUE, alpha=0.6, lw=0, zorder=3)
    order = sorted(groups)
    axis.plot(order, [statistics.median(groups[steps]) for steps in order], color=INK, lw=1.2)


def _shown(run: Run) -> list[Standing]:
    return standings(run)[:MAX_SERIES]


def _records(shown: Sequence[Standing]) -> list[TrialRecord]:
    return [launch for standing in shown for launch in standing.launches]


def _styles(shown: Sequence[Standing]) -> list[tuple[str, dict[str, Any]]]:
    rest = iter(zip(SERIES, "^Dvp<>", strict=True))
    styles: list[tuple[str, dict[str, Any]]] = []
    for standing in shown:
        if standing.role == "baseline":
            styles.append((BASELINE_COLOUR, {"marker": "s", "ls": (0, (4, 3))}))
        elif standing.role == "best":
            styles.append((BEST_COLOUR, {"marker": "o", "lw": 2.2, "zorder": 4}))
        else:
            colour, marker = next(rest)
            styles.append((colour, {"marker": marker, "lw": 1.3}))
    return styles


def _load_axis(axis: Axes, levels: set[int]) -> None:
    axis.set_xlabel("requests in flight")
    if len(levels) > 1 and max(levels) / min(levels) >= 4:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_locator(FixedLocator(sorted(levels)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.margins(x=0.06)


def _mark_level(axis: Axes, run: Run) -> None:
    if run.objective.level is not None:
        axis.axvline(run.objective.level, color=GRID, lw=7, zorder=0)


def _percentile(run: Run, name: str) -> str:
    """The percentile that a limit is set on, else the 95th."""
    return next((limit for limit in run.objective.limits if limit.startswith(f"{name}.")), f"{name}.p95")


def _latencies(standing: Standing, metric: str) -> dict[int, tuple[float, float, float]]:
    """Lowest, mean and highest over the launches, by concurrency."""
    values: dict[int, list[float]] = {}
    for item in measured(standing):
        interval = metric_interval(item, metric)
        if interval is not None and item.concurrency is not None:
            values.setdefault(item.concurrency, []).append(interval.mean)
    return {level: (min(seen), statistics.fmean(seen), max(seen)) for level, seen in sorted(values.items())}


def _invalid_text(shown: Sequence[Standing]) -> str:
    invalid = sum(not item.valid for launch in _records(shown) for item in launch.measurements)
    return f" {words.counted(invalid, 'void measurement')} left out." if invalid else ""
