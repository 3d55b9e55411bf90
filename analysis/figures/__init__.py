"""Figures: what the report shows, in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from matplotlib import rc_context

from analysis.figures.load import latency_by_load, pareto, speculation, throughput_by_load
from analysis.figures.memory import forecast_error, memory_split
from analysis.figures.search import failure_map, progress, timeline, what_mattered
from analysis.figures.style import RC, Drawing
from analysis.frames import Run

FIGURES: tuple[Callable[[Run], Drawing], ...] = (
    throughput_by_load,
    latency_by_load,
    pareto,
    progress,
    failure_map,
    memory_split,
    forecast_error,
    speculation,
    what_mattered,
    timeline,
)


def drawings(run: Run) -> Iterator[Drawing]:
    """Every figure, each drawn when it is asked for; one that cannot be drawn says why."""
    for draw in FIGURES:
        with rc_context(RC):
            drawing = draw(run)
        yield drawing
