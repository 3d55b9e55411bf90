"""Style of the figures: colours that the colour-blind can tell apart, sizes that a phone can show, and the stamp."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.frames import dummy_weights
from bench.outcome import OutcomeKind
from bench.records import TrialRecord

# Light and dark of each colour. The hues are Okabe and Ito's ("Color Universal Design", 2008), darkened or lightened
# until they stand out from the page in both schemes. Every mark also differs in shape or has its name beside it.
COLOURS = {
    "ink": ("#1c1f24", "#e8eaed"),
    "muted": ("#5f6670", "#a3abb5"),
    "grid": ("#d9dde3", "#363c45"),
    "paper": ("#fffffe", "#171a1f"),
    "blue": ("#0072b2", "#56b4e9"),
    "vermillion": ("#d55e00", "#ff8a4c"),
    "green": ("#00896b", "#2fc79a"),
    "purple": ("#a8528f", "#e29cc4"),
    "amber": ("#b87a00", "#f0b73c"),
    "sky": ("#3d94c4", "#8fd0f5"),
    "brown": ("#7a5230", "#c79a72"),
}
INK, MUTED, GRID, PAPER = (COLOURS[name][0] for name in ("ink", "muted", "grid", "paper"))
BLUE, VERMILLION, GREEN, PURPLE, AMBER, SKY, BROWN = (light for light, _ in list(COLOURS.values())[4:])

BASELINE_COLOUR, BEST_COLOUR = MUTED, BLUE
SERIES = (VERMILLION, GREEN, PURPLE, AMBER, SKY, BROWN)

# Marker, colour and words of each way to end.
KINDS: dict[OutcomeKind, tuple[str, str, str]] = {
    OutcomeKind.COMPLETE: ("o", BLUE, "measured"),
    OutcomeKind.PRUNED: ("o", MUTED, "stopped early"),
    OutcomeKind.INFEASIBLE: ("v", VERMILLION, "out of memory"),
    OutcomeKind.REJECTED: ("s", PURPLE, "refused"),
    OutcomeKind.CRASHED: ("X", INK, "crashed"),
    OutcomeKind.HUNG: ("D", AMBER, "hung"),
    OutcomeKind.UNHEALTHY: ("p", GREEN, "unhealthy"),
    OutcomeKind.MISMATCHED: ("P", SKY, "wrong server"),
    OutcomeKind.INTERRUPTED: ("|", MUTED, "interrupted"),
    OutcomeKind.INFRASTRUCTURE: ("*", BROWN, "infrastructure"),
}

SIMULATED = "simulated engine"
# 5.2 inches: on a phone of 390 px the text stays near 10 px, in two columns of a desktop it is near 15 px.
WIDTH_INCHES = 5.2
RC: Any = {
    "font.size": 10.0,
    "font.family": "sans-serif",
    "axes.edgecolor": MUTED,
    "axes.facecolor": PAPER,
    "axes.labelcolor": INK,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "figure.facecolor": PAPER,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.8,
    "text.color": INK,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "svg.fonttype": "none",  # text stays text: selectable, searchable
    "svg.hashsalt": "sweep",  # the same data give the same file
}


@dataclass(frozen=True)
class Drawing:
    """A figure of the report.

    Attributes:
        name: of its files and its anchor.
        text: what it shows and how to read it, or, without a figure, why there is none.
    """

    name: str
    title: str
    text: str
    figure: Figure | None = None


def axes(rows: int = 1, height: float = 3.1, ratios: Iterable[float] | None = None) -> tuple[Figure, list[Axes]]:
    """A figure of the report's width with its axes one above the other, sharing x."""
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    heights = None if ratios is None else list(ratios)
    grid = figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=heights)
    return figure, [row[0] for row in grid]


def from_zero(axis: Axes) -> None:
    """Let y begin at zero, with room for the mark of the highest point."""
    axis.set_ylim(0, axis.get_ylim()[1] * 1.06)


def origins(records: Iterable[TrialRecord], *, acceptance: bool = True) -> list[str]:
    """What is not real about the numbers of these launches; ``acceptance``: whether the figure depends on it."""
    records = list(records)
    found = []
    if any(record.simulated for record in records):
        found.append(SIMULATED)
    if any(dummy_weights(record) for record in records):
        found.append("dummy weights")
    if acceptance and any(item.acceptance_simulated for record in records for item in record.measurements):
        found.append("acceptance simulated")
    return found


def stamp(figure: Figure, records: Iterable[TrialRecord], *, acceptance: bool = True) -> None:
    """Say on the figure itself what is not real about its numbers, so that a copied figure still says it."""
    found = origins(records, acceptance=acceptance)
    if found:
        figure.suptitle(
            " · ".join(found).upper(), x=0.995, ha="right", fontsize=7.5, color=VERMILLION, fontweight="bold"
        )


def save(figure: Figure, name: str, folder: Path) -> str:
    """Write ``NAME.svg`` and ``NAME.png``; return the SVG."""
    buffer = io.StringIO()
    with rc_context(RC):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        figure.savefig(folder / f"{name}.png", dpi=160)
    (folder / f"{name}.svg").write_text(buffer.getvalue())
    return buffer.getvalue()


def inline_svg(svg: str, name: str, label: str) -> str:
    """A saved SVG as a part of a page: as wide as its place, colours that follow the scheme, ids of its own."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", body, count=1)
    body = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", body, count=1)
    body = body.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", body)
    for colour, (light, _) in COLOURS.items():
        body = body.replace(light, f"var(--{colour})")
    return body
