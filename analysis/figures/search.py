"""Figures of the search: its progress, where it failed, what mattered, where the time went."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from analysis import words
from analysis.failures import Explanation, counting, explain
from analysis.figures.style import (
    AMBER,
    BEST_COLOUR,
    BLUE,
    GREEN,
    GRID,
    INK,
    KINDS,
    MUTED,
    SERIES,
    SKY,
    VERMILLION,
    Drawing,
    axes,
    stamp,
)
from analysis.frames import AnalysisError, Run, launched, meets_limits
from analysis.standing import baseline, value_text
from bench.outcome import OutcomeKind
from bench.records import TrialRecord

FEW_LAUNCHES = 20  # below it nearly any pair of parameters tells launches apart
FEW_PER_CELL = 3  # launches of equal values; with fewer, values tell launches apart that chance put there
TICK_LETTERS = 20  # of one tick label
X_LETTERS = 44  # of tick labels that stand side by side under a figure
WEAK_SHARE = 0.15  # below it the map is drawn, and said to explain little
Positions: TypeAlias = NDArray[np.float64]

PHASES = (
    ("startup_s", "start-up", BLUE),
    ("identity_s", "identity check", SKY),
    ("warmup_s", "warm-up", AMBER),
    ("measure_s", "measuring", GREEN),
    ("teardown_s", "stopping", VERMILLION),
    ("harness_s", "harness", MUTED),
)


def progress(run: Run) -> Drawing:
    """The objective over the trials, the best so far, and a row of marks for each way to fail."""
    name, title = "progress", "Progress of the search"
    if not run.records:
        return Drawing(name, title, "No trial has ended yet.")
    failed = _failed_by_kind(run)
    figure, (values, *rest) = axes(
        1 + bool(failed), 2.5 + 0.28 * len(failed), [2.4, 0.28 * len(failed)][: 1 + bool(failed)]
    )
    _draw_values(values, run)
    if failed:
        _draw_failures(rest[0], failed)
    (rest[0] if rest else values).set_xlabel("trial")
    values.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = values.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower left", ncols=2, columnspacing=1, handletextpad=0.4)
    stamp(figure, run.all_records)
    return Drawing(name, title, _progress_text(run, failed), figure)


def _failed_by_kind(run: Run) -> dict[OutcomeKind, list[int]]:
    found: dict[OutcomeKind, list[int]] = {}
    for record in run.all_records:
        if record.outcome.kind is not OutcomeKind.COMPLETE:
            found.setdefault(record.outcome.kind, []).append(record.number)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _draw_values(axis: Axes, run: Run) -> None:
    objective = run.objective
    good = [r for r in run.records if r.value is not None and r.outcome.kind is OutcomeKind.COMPLETE]
    keep = [r for r in good if meets_limits(r, objective) is not False]
    miss = [r for r in good if meets_limits(r, objective) is False]
    _points(axis, keep, "measured", marker="o", s=22, color=BLUE)
    _points(axis, miss, "measured, misses a limit", marker="o", s=22, facecolors="none", edgecolors=BLUE)
    again = [r for r in run.finalist_records if r.value is not None]
    _points(axis, again, "measured again", marker="D", s=22, color=GREEN)
    if keep:
        better = np.maximum.accumulate if objective.larger_is_better else np.minimum.accumulate
        numbers = [record.number for record in keep]
        best = better([record.value or 0.0 for record in keep])
        axis.step([*numbers, run.records[-1].number], [*best, best[-1]], where="post", color=BEST_COLOUR, lw=1.2)
    first = baseline(run)
    if first is not None and first.value is not None:
        axis.axhline(first.value, color=INK, lw=1, ls=(0, (4, 3)), label="baseline")
    unit = "" if "per_s" in objective.metric or not objective.metric.partition(".")[0].endswith("_s") else " (s)"
    axis.set_ylabel(words.metric_name(objective.metric) + unit)
    if good or again:
        axis.set_ylim(bottom=0, top=axis.get_ylim()[1] * 1.05)
    else:
        axis.set_yticks([])
        axis.text(0.5, 0.5, "no trial was measured", transform=axis.transAxes, ha="center", color=MUTED)


def _points(axis: Axes, records: Sequence[TrialRecord], label: str, **style: Any) -> None:
    if records:
        axis.scatter(
            [r.number for r in records],
            [r.value or 0.0 for r in records],
            label=label,
            zorder=3,
            linewidths=1.2,
            **style,
        )


def _draw_failures(axis: Axes, failed: dict[OutcomeKind, list[int]]) -> None:
    for row, (kind, numbers) in enumerate(failed.items()):
        marker, colour, _ = KINDS[kind]
        axis.scatter(numbers, [row] * len(numbers), marker=marker, s=26, color=colour, linewidths=1.2)
    axis.set_yticks(range(len(failed)), [f"{KINDS[kind][2]} ({len(numbers)})" for kind, numbers in failed.items()])
    axis.set_ylim(len(failed) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0, labelsize=9)
    axis.grid(axis="y", visible=False)


def _progress_text(run: Run, failed: dict[OutcomeKind, list[int]]) -> str:
    measured = sum(record.value is not None for record in run.records)
    parts = [f"{words.counted(len(run.records), 'trial')}, {measured} of them measured to the end."]
    if failed:
        parts.append("Below: the trials that gave no value, by the way they ended.")
    if measured:
        parts.append("The line is the best so far.")
    if run.finalist_records:
        parts.append("Diamonds are the finalists' fresh measurements, which alone decide.")
    return " ".join(parts)


def failure_map(run: Run) -> Drawing:
    """Outcomes over the two parameters that explain them best."""
    name, title = "failures", "How trials ended"
    found = explain(run)
    if found is None:
        failed = len({record.outcome.kind for record in counting(run)} - {OutcomeKind.COMPLETE, OutcomeKind.PRUNED})
        why = "All trials ended in one way, or no parameter differs between them." if failed else ""
        return Drawing(name, title, why or "No configuration failed.")
    records = counting(run)
    across, up = found.parameters[0], found.parameters[1] if len(found.parameters) > 1 else None
    # Numbers read best along x, and many names down the side.
    if up is not None and _letters(records, across) > _letters(records, up):
        across, up = up, across
    names_alone = up is None and _letters(records, across) > X_LETTERS
    rows = 0 if up is None and not names_alone else len(_names(records, up or across))
    figure, (axis,) = axes(height=max(3.7, 1.6 + 0.19 * rows))
    shift = _shifts(len(records))
    if names_alone:
        x, y = shift[:, 0] * 0.5, _place(axis, records, across, "y", shift[:, 1] * 0.3)
        axis.set_xticks([])
        axis.set_xlim(-1, 1)
    else:
        x = _place(axis, records, across, "x", shift[:, 0])
        y = np.zeros(len(records)) + shift[:, 1] * 0.5 if up is None else _place(axis, records, up, "y", shift[:, 1])
        if _letters(records, across) > X_LETTERS:
            for tick in axis.get_xticklabels():
                tick.set(rotation=35, ha="right")
    for label, (marker, face, edge), at in _classes(records):
        axis.scatter(
            x[at], y[at], marker=marker, facecolors=face, edgecolors=edge, s=30, linewidths=1.1, label=label, zorder=3
        )
    if up is None and not names_alone:
        axis.set_yticks([])
        axis.set_ylim(-1, 1)
    figure.legend(
        *axis.get_legend_handles_labels(), loc="outside lower left", ncols=3, handletextpad=0.2, columnspacing=1
    )
    stamp(figure, records, acceptance=False)
    return Drawing(name, title, _map_text(records, found), figure)


def _map_text(records: Sequence[TrialRecord], found: Explanation) -> str:
    """What the map rests on, and, only where it rests on enough, how much it explains."""
    failed = sum(record.outcome.kind not in (OutcomeKind.COMPLETE, OutcomeKind.PRUNED) for record in records)
    pair = " and ".join(f"`{item}`" for item in found.parameters)
    is_one = len(found.parameters) == 1
    seen = f"{words.counted(len(records), 'trial')}, of which {failed} failed, by {pair}"
    cells = len({tuple(value_text(r.candidate.values.get(name)) for name in found.parameters) for r in records})
    dense = len(records) >= FEW_PER_CELL * cells or any(_is_number(records, name) for name in found.parameters)
    if len(records) < FEW_LAUNCHES or not dense:
        text = f"{seen}. That is too few to say where configurations fail: read the points one by one."
    elif found.share < WEAK_SHARE:
        text = f"{seen}. No pair of parameters explains the failures well; the best explains {found.share:.0%}"
        text += " of how they ended (adjusted mutual information)."
    else:
        text = f"{seen}: {'it tells' if is_one else 'of all pairs of parameters these tell'} most about how a trial "
        text += f"ended, {found.share:.0%} of the information (adjusted mutual information)."
    return text + " Points that share a value are spread a little so that none hides another."


def _names(records: Sequence[TrialRecord], name: str) -> set[str]:
    """What stands at the ticks of a parameter that is no number."""
    if _is_number(records, name):
        return set()
    return {value_text(record.candidate.values.get(name)) for record in records}


def _letters(records: Sequence[TrialRecord], name: str) -> int:
    return sum(min(len(text), TICK_LETTERS) + 1 for text in _names(records, name))


def _classes(records: Sequence[TrialRecord]) -> list[tuple[str, tuple[str, str, str], list[int]]]:
    """Label, marker with its colours, and places of each way to end; by cause where all are of one kind."""
    found: dict[OutcomeKind | str, list[int]] = {}
    one_kind = len({record.outcome.kind for record in records}) == 1
    for index, record in enumerate(records):
        found.setdefault(str(record.outcome.cause) if one_kind else record.outcome.kind, []).append(index)
    rest = iter(zip("vs^DPX*op<>", (*SERIES, *SERIES), strict=False))
    classes = []
    for ending, at in sorted(found.items(), key=lambda item: -len(item[1])):
        if isinstance(ending, OutcomeKind):
            marker, colour, label = KINDS[ending]
            face = "none" if ending is OutcomeKind.PRUNED else colour
        else:
            (marker, colour), label = next(rest), ending
            face = colour
        classes.append((f"{label} ({len(at)})", (marker, face, colour), at))
    return classes


def _is_number(records: Sequence[TrialRecord], name: str) -> bool:
    values = {
        record.candidate.values.get(name)
        for record in records
        if not isinstance(record.candidate.values.get(name), list)
    }
    values.discard(None)
    return len(values) > 6 and all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in values)


def _place(axis: Axes, records: Sequence[TrialRecord], name: str, side: str, shift: Positions) -> Positions:
    """Positions of the trials along one parameter, and the ticks that name them."""
    (axis.set_xlabel if side == "x" else axis.set_ylabel)(name)
    values = [record.candidate.values.get(name) for record in records]
    if _is_number(records, name):
        return _place_numbers(axis, [float(v) if isinstance(v, (int, float)) else math.nan for v in values], side)
    texts = [value_text(value) for value in values]
    order = sorted(set(texts), key=lambda text: (_as_number(text), text))
    ticks = axis.set_xticks if side == "x" else axis.set_yticks
    ticks(range(len(order)), [text if len(text) <= TICK_LETTERS else text[: TICK_LETTERS - 1] + "…" for text in order])
    (axis.set_xlim if side == "x" else axis.set_ylim)(-0.6, len(order) - 0.4)
    return np.array([order.index(text) for text in texts]) + shift * 0.6


def _place_numbers(axis: Axes, values: Sequence[float], side: str) -> Positions:
    """Numbers on a scale of their own; those that were left to the engine on a band before the least."""
    numbers: Positions = np.array(values)
    low, high = float(np.nanmin(numbers)), float(np.nanmax(numbers))
    absent = low - 0.12 * (high - low)
    if low > 0 and high / low > 20:
        (axis.set_xscale if side == "x" else axis.set_yscale)("log")
        absent = low / (high / low) ** 0.12
    missing = np.isnan(numbers)
    if missing.any():
        numbers[missing] = absent
        # Named at the band itself: a tick there could fall on a number's.
        if side == "x":
            axis.axvline(absent, color=GRID, lw=6, zorder=1)
            place, transform, align = (absent, 1.01), axis.get_xaxis_transform(), "center"
        else:
            axis.axhline(absent, color=GRID, lw=6, zorder=1)
            place, transform, align = (0.99, absent), axis.get_yaxis_transform(), "right"
        axis.text(*place, "default", fontsize=8, color=MUTED, transform=transform, va="bottom", ha=align)
    return numbers


def _as_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -math.inf if text == "default" else math.inf


def _shifts(count: int) -> Positions:
    """Spread of -0.5 to 0.5 in two directions that leaves no clumps and is the same every time (R2 sequence)."""
    # Roberts 2018: the plastic number's powers give an even additive recurrence in two dimensions.
    steps = np.array([0.7548776662466927, 0.5698402909980532])
    shifts: Positions = (np.arange(1, count + 1)[:, None] * steps) % 1.0 - 0.5
    return shifts


def what_mattered(run: Run) -> Drawing:
    """How much each parameter matters for reaching the top (PED-ANOVA over the journal)."""
    name, title = "importance", "What mattered"
    try:
        # Imported here: Optuna is heavy, and only this figure needs it.
        from analysis.importance import importance

        found = importance(run)
    except AnalysisError as error:
        return Drawing(name, title, f"Not computed: {error}.")
    shown = sorted(found.shares.items(), key=lambda item: item[1])[-12:]
    figure, (axis,) = axes(height=0.9 + 0.3 * len(shown))
    bars = axis.barh([item[0] for item in shown], [item[1] for item in shown], color=BLUE, height=0.62)
    axis.bar_label(bars, [f"{item[1]:.0%}" for item in shown], padding=3, fontsize=9, color=INK)
    axis.set_xlim(0, max(item[1] for item in shown) * 1.15)
    axis.set_xticks([])
    axis.grid(visible=False)
    axis.spines["bottom"].set_visible(False)
    axis.tick_params(axis="y", length=0)
    stamp(figure, run.records)
    early = f", {found.stopped_early} of them stopped early" if found.stopped_early else ""
    text = (
        f"How much each parameter decides whether a trial is among the best {found.best} of {found.trials} "
        f"measured ones{early} (PED-ANOVA; the shares add up to 100 %). Few trials make it rough, and a parameter that "
        "only decides whether a launch survives does not show here."
    )
    return Drawing(name, title, text, figure)


def timeline(run: Run) -> Drawing:
    """Where the time of every trial went."""
    name, title = "timeline", "Where the time went"
    records = [record for record in run.all_records if record.times.total_s > 0]
    if not records:
        return Drawing(name, title, "No launch has been timed yet.")
    figure, (axis,) = axes(height=3.1)
    numbers = np.array([record.number for record in records])
    scale, unit = (60.0, "minutes") if max(record.times.total_s for record in records) > 180 else (1.0, "seconds")
    bottom = np.zeros(len(records))
    for field, label, colour in PHASES:
        spent = np.array([max(0.0, getattr(record.times, field)) for record in records]) / scale
        if spent.sum() * scale > 0.005 * sum(record.times.total_s for record in records):
            top = bottom + spent
            _bars(axis, numbers, bottom, top, colour, label)
            bottom = top
    axis.set_ylim(0, bottom.max() * 1.04)
    axis.set_xlim(numbers.min() - 0.7, numbers.max() + 0.7)
    axis.set_xlabel("trial")
    axis.set_ylabel(f"wall time ({unit})")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(axis="x", visible=False)
    figure.legend(
        *axis.get_legend_handles_labels(), loc="outside lower left", ncols=4, columnspacing=1, handlelength=1.2
    )
    stamp(figure, records, acceptance=False)
    return Drawing(name, title, _timeline_text(run, records), figure)


def _bars(axis: Axes, numbers: Positions, bottom: Positions, top: Positions, colour: str, label: str) -> None:
    # One collection instead of one artist per bar: 500 trials stay quick and small.
    left, right = numbers - 0.4, numbers + 0.4
    corners = [
        ((a, low), (a, high), (b, high), (b, low))
        for a, b, low, high in zip(left, right, bottom, top, strict=True)
        if high > low
    ]
    axis.add_collection(PolyCollection(corners, facecolors=colour, linewidths=0, label=label))


def _timeline_text(run: Run, records: Sequence[TrialRecord]) -> str:
    total = sum(record.times.total_s for record in records)
    shares = [(label, sum(getattr(record.times, field) for record in records) / total) for field, label, _ in PHASES]
    shares.sort(key=lambda item: -item[1])
    parts = ", ".join(f"{label} {share:.0%}" for label, share in shares if share >= 0.005)
    text = f"{words.duration(total)} in {words.counted(len(records), 'launch', 'launches')}: {parts}."
    return " ".join([text, *saved_text(run.records)])


def saved_text(records: Sequence[TrialRecord]) -> list[str]:
    """What not launching and stopping early saved, estimated by the median of what was not cut short."""
    complete = [r for r in records if r.outcome.kind is OutcomeKind.COMPLETE]
    tried = [r for r in records if launched(r)]
    sentences = []
    skipped = Counter(str(r.outcome.cause) for r in records if r.outcome.counts and not launched(r))
    if skipped and tried:
        # They would have failed: a failed launch is the fair price, where one was seen.
        failed = [r for r in tried if r.outcome.kind is not OutcomeKind.COMPLETE] or tried
        each = statistics.median(r.times.total_s for r in failed)
        count = skipped.total()
        sentences.append(
            f"{words.counted(count, 'candidate')} were settled without a launch, which saved about "
            f"{words.duration(count * each)} at the median of {words.duration(each)} for a launch that fails."
            if count > 1
            else f"One candidate was settled without a launch, which saved about {words.duration(each)}."
        )
    pruned = [r for r in tried if r.outcome.kind is OutcomeKind.PRUNED]
    if pruned and complete:
        full = statistics.median(r.times.warmup_s + r.times.measure_s for r in complete)
        saved = sum(max(0.0, full - r.times.warmup_s - r.times.measure_s) for r in pruned)
        sentences.append(
            f"{words.counted(len(pruned), 'trial')} stopped early, which saved about "
            f"{words.duration(saved)} of measuring."
        )
    return sentences
