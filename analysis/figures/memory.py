"""Figures of GPU memory: how the winner's is split, and how good the forecast was."""

from __future__ import annotations

import statistics

from analysis import words
from analysis.figures.style import (
    AMBER,
    BLUE,
    BROWN,
    GREEN,
    GRID,
    INK,
    MUTED,
    PAPER,
    PURPLE,
    SKY,
    VERMILLION,
    Drawing,
    axes,
    stamp,
)
from analysis.frames import Run
from analysis.standing import baseline, best
from bench.engines.protocol import Forecast, LaunchFacts
from bench.records import TrialRecord

# By use, in the order of allocation: name in the forecast's split, words, colour, fields of the facts (summed).
USES: tuple[tuple[str, str, str, str], ...] = (
    ("weights", "weights", BLUE, "weight_bytes"),
    ("draft_weights", "draft weights", SKY, "draft_weight_bytes"),
    ("state_cache", "state cache", GREEN, "state_bytes"),
    ("draft_state", "draft state", PURPLE, ""),
    ("kv_pool", "KV pool", AMBER, "kv_bytes"),
    ("draft_kv_pool", "draft KV pool", BROWN, "draft_kv_bytes"),
    ("graphs", "graphs", VERMILLION, "graph_bytes"),
    ("activations", "activations", MUTED, ""),
    ("slack", "free", GRID, "available_after_start_bytes"),
)
QUANTITIES = (
    ("kv_tokens", "KV tokens", "o", BLUE),
    ("state_slots", "state slots", "s", GREEN),
    ("max_running_requests", "running requests", "^", VERMILLION),
)


def memory_split(run: Run) -> Drawing:
    """GPU memory of the best configuration and the baseline by use, forecast beside what the log said."""
    name, title = "memory", "GPU memory, forecast and seen"
    rows: list[tuple[str, dict[str, float]]] = []
    shown: list[TrialRecord] = []
    winner, first = best(run), baseline(run)
    same = winner is not None and first is not None and winner.config.key == first.config.key
    for label, record in (("best", None if same else winner), ("baseline", first)):
        if record is None:
            continue
        both = [
            (f"{label},\nforecast", _forecast_split(record.forecast)),
            (f"{label},\nseen", _seen_split(record.facts)),
        ]
        rows += [(text, split) for text, split in both if split]
        shown.append(record)
    if not rows:
        return Drawing(name, title, "Neither the forecast nor the log says how the memory is split.")
    figure, (axis,) = axes(height=1.5 + 0.5 * len(rows))
    ends = [0.0] * len(rows)
    for use, label, colour, _ in USES:
        sizes = [split.get(use, 0.0) / 2**30 for _, split in rows]
        if max(sizes) < 0.01:
            continue
        bars = axis.barh(
            range(len(rows)), sizes, left=ends, color=colour, height=0.62, label=label, edgecolor=PAPER, lw=0.6
        )
        # A size is written where it has room: from a fourteenth of the bar on.
        total = max(sum(split.values()) for _, split in rows) / 2**30
        ink = INK if use == "slack" else PAPER
        axis.bar_label(
            bars,
            [f"{size:.1f}" if size > total / 14 else "" for size in sizes],
            label_type="center",
            fontsize=8,
            color=ink,
        )
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    axis.set_yticks(range(len(rows)), [label for label, _ in rows])
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("GiB")
    figure.legend(
        *axis.get_legend_handles_labels(), loc="outside lower left", ncols=4, columnspacing=1, handlelength=1.2
    )
    stamp(figure, shown, acceptance=False)
    return Drawing(name, title, _split_text(shown[0], "baseline" if same or winner is None else "best"), figure)


def _forecast_split(forecast: Forecast | None) -> dict[str, float]:
    return {use: max(0.0, size) for use, size in forecast.split_bytes} if forecast is not None else {}


def _seen_split(facts: LaunchFacts | None) -> dict[str, float]:
    if facts is None:
        return {}
    split = {use: getattr(facts, field) or 0.0 for use, _, _, field in USES if field}
    split = {use: size for use, size in split.items() if size}
    if facts.available_bytes and split:
        # What the log does not name: activations, work space, the engine's own buffers.
        rest = facts.available_bytes - sum(split.values())
        if rest > 0:
            split["activations"] = rest
    return split if "weights" in split else {}


def _split_text(record: TrialRecord, label: str) -> str:
    facts = record.facts
    parts = ["“Seen” is read from the server's log; what the log does not name is counted with the activations."]
    if facts is not None and facts.available_bytes and sum(_seen_split(facts).values()) > facts.available_bytes * 1.005:
        parts.append("It adds up to more than there is where memory is given back after the pools are made.")
    if facts is not None and facts.max_running_requests is not None:
        slots = f" and {facts.state_slots:,} state slots" if facts.state_slots else ""
        tokens = f" {facts.kv_tokens:,} tokens of KV cache{slots}," if facts.kv_tokens else ""
        most = words.counted(facts.max_running_requests, "request")
        parts.append(f"The {label} holds{tokens} and runs at most {most} at once.")
    return " ".join(parts)


def forecast_error(run: Run) -> Drawing:
    """How far the forecast was from what the launch showed, by trial."""
    name, title = "forecast", "Forecast against actual"
    errors = {quantity: _errors(run, quantity) for quantity, *_ in QUANTITIES}
    if not any(errors.values()):
        return Drawing(name, title, "No launch has both a forecast and a log that it can be held against.")
    figure, (axis,) = axes(height=2.7)
    axis.axhline(0, color=INK, lw=1)
    shown: set[int] = set()
    for quantity, label, marker, colour in QUANTITIES:
        points = errors[quantity]
        if points:
            axis.scatter(
                [n for n, _ in points],
                [e * 100 for _, e in points],
                marker=marker,
                s=22,
                color=colour,
                label=label,
                alpha=0.8,
                lw=0,
            )
            shown |= {number for number, _ in points}
    axis.set_xlabel("trial")
    axis.set_ylabel("forecast over seen (%)")
    span = max(2.0, *(abs(error) * 110 for points in errors.values() for _, error in points))
    axis.set_ylim(-span, span)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower left", ncols=3, columnspacing=1)
    stamp(figure, [r for r in run.all_records if r.number in shown], acceptance=False)
    medians = ", ".join(
        f"{label} {statistics.median(abs(error) for _, error in errors[quantity]):.1%}"
        for quantity, label, *_ in QUANTITIES
        if errors[quantity]
    )
    text = f"Above zero the forecast promised more than the launch had. Median error: {medians}." + _simulated_text(run)
    return Drawing(name, title, text, figure)


def _simulated_text(run: Run) -> str:
    if any(record.simulated for record in run.records):
        return " The simulator shares its memory model with the forecast, so this says nothing about real launches."
    return ""


def _errors(run: Run, quantity: str) -> list[tuple[int, float]]:
    found = []
    for record in run.all_records:
        expected = getattr(record.forecast, quantity, None)
        seen = getattr(record.facts, quantity, None)
        if expected is not None and seen:
            found.append((record.number, expected / seen - 1))
    return found
