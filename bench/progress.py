"""Progress: what a person sees while a sweep runs; a live view on a terminal, one line per trial elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bench.engines.protocol import Candidate
from bench.experiment import Experiment
from bench.outcome import OutcomeKind
from bench.records import TrialRecord
from bench.search import objective

LAST_ROWS = 8

COLOURS = {
    OutcomeKind.COMPLETE: "green",
    OutcomeKind.PRUNED: "cyan",
    OutcomeKind.INFEASIBLE: "yellow",
    OutcomeKind.REJECTED: "yellow",
    OutcomeKind.INFRASTRUCTURE: "magenta",
}

DEFAULTS = "engine's defaults"


class Progress:
    """Follows a sweep. ``budget`` is in launches; ``clock`` gives seconds."""

    def __init__(
        self, experiment: Experiment, console: Console, budget: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._experiment = experiment
        self._console = console
        self._budget = budget
        self._clock = clock
        self._started = clock()
        self._rows: list[TrialRecord] = []
        self._launches = 0
        self._launch_s: list[float] = []
        self._current = ""
        self._phase = ""
        self._phase_since = clock()
        self._baseline: float | None = None
        self._best: TrialRecord | None = None
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def begin(self, number: int, role: str, candidate: Candidate) -> None:
        self._current = f"trial {number} ({role}): {settings(candidate)}"
        self.phase("launch")

    def phase(self, text: str) -> None:
        self._phase = text
        self._phase_since = self._clock()

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def resumed(self, record: TrialRecord) -> None:
        """Count a record of an earlier process without printing it."""
        self._count(record)

    def end(self, record: TrialRecord, *, launched: bool) -> None:
        self._count(record)
        if launched:
            self._launches += 1
            self._launch_s.append(record.times.total_s)
        self._current = ""
        self._console.print(self._line(record), highlight=False, soft_wrap=True)

    def _count(self, record: TrialRecord) -> None:
        self._rows.append(record)
        if record.value is None or record.round:
            return
        if record.role in ("baseline", "anchor"):
            self._baseline = record.value
        scored = objective.score(self._experiment, record.measurements)
        if scored is None or not scored.meets_limits:
            return
        goal = self._experiment.objective
        if self._best is None or self._best.value is None or objective.better(goal, record.value, self._best.value):
            self._best = record

    def _line(self, record: TrialRecord) -> Text:
        outcome = record.outcome
        text = Text(f"{record.number:>4} {record.role:<9}")
        text.append(f"{outcome.kind:<15}", COLOURS.get(outcome.kind, "red"))
        if record.value is not None:
            text.append(f"{self._experiment.objective.metric} {figure(record.value)} ", "bold")
        elif outcome.cause != "none":
            text.append(f"{outcome.cause} ")
        text.append(settings(record.candidate))
        why = outcome.line or outcome.detail
        if record.value is None and why:
            text.append(f"\n       {why.strip()[:300]}", "dim")
        return text

    def _render(self) -> RenderableType:
        elapsed = self._clock() - self._started
        table = Table.grid(padding=(0, 2))
        table.add_row("sweep", f"{self._experiment.name}/{self._experiment.run}")
        table.add_row(
            "launches", f"{self._launches} here, budget {self._budget}, {elapsed / 60:.1f} min, {self._left()}"
        )
        table.add_row("best so far", self._best_so_far())
        table.add_row("now", self._current or "choosing")
        table.add_row("phase", f"{self._phase} for {self._clock() - self._phase_since:.0f} s")
        return Group(Text(""), table)

    def _best_so_far(self) -> str:
        if self._best is None or self._best.value is None:
            return "nothing yet"
        gain = f" ({self._best.value / self._baseline - 1:+.1%} to the baseline)" if self._baseline else ""
        metric = self._experiment.objective.metric
        return f"{metric} {figure(self._best.value)}{gain}: trial {self._best.number}, {settings(self._best.candidate)}"

    def _left(self) -> str:
        if not self._launch_s:
            return "time left not known yet"
        mean_s = sum(self._launch_s) / len(self._launch_s)
        return f"about {max(self._budget - self._launches, 0) * mean_s / 60:.0f} min left"


def settings(candidate: Candidate) -> str:
    """A candidate in one line, without the flags that are off; the engine's defaults have a name of their own."""
    return " ".join(f"{name}={value}" for name, value in candidate.values.items() if value is not False) or DEFAULTS


def figure(value: float) -> str:
    """Four significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
