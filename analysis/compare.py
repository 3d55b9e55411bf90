"""Compare: runs side by side, what differs beyond doubt, and what cannot be compared.

python -m analysis.compare results/EXPERIMENT/OLD results/EXPERIMENT/NEW
python -m analysis.compare OLD NEW --regression --tolerance 0.03     # exit code 1: slower, 3: cannot tell
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from analysis import words
from analysis.figures.style import SIMULATED, origins
from analysis.frames import AnalysisError, Run, load
from analysis.intervals import is_difference, relative_difference
from analysis.standing import Standing, baseline, by_load, settings, standings
from bench.load.measurement import Interval

EXIT_REGRESSION = 1
EXIT_REFUSED = 2
EXIT_UNDECIDED = 3

# What a workload sends, by the path in the experiment; its name, its seeds and how long it is watched may differ.
SENT = ("prompts", "output_tokens", "output_tokens_spread", "ignore_eos", "temperature", "chat", "flush_cache")


@dataclass(frozen=True)
class Row:
    """One configuration at one load level in two runs.

    Attributes:
        role: ``best`` or ``baseline``.
        difference: relative, of the later run to the first.
        verdict: ``better``, ``worse`` or ``no difference``.
    """

    role: str
    level: int
    run: str
    reference: Interval
    value: Interval
    difference: Interval
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """Runs against the first of them.

    Attributes:
        changed: what is not the same in them, one sentence each.
        deciding_level: the load level that the objective is taken at.
        marks: what is not real about the numbers, the same in all runs.
    """

    metric: str
    larger_is_better: bool
    deciding_level: int | None
    changed: tuple[str, ...]
    rows: tuple[Row, ...]
    marks: tuple[str, ...]

    @property
    def mark(self) -> str:
        """`` (simulated)`` where the numbers are a simulator's, to stand behind them."""
        return " (simulated)" if SIMULATED in self.marks else ""


def compare(runs: Sequence[Run]) -> Comparison:
    """Hold every run against the first.

    Raises:
        AnalysisError: they are not comparable; the message names each reason.
    """
    first, others = runs[0], runs[1:]
    reasons = [reason for other in others for reason in _obstacles(first, other)]
    if reasons:
        raise AnalysisError("not comparable:\n" + "\n".join(f"  - {reason}" for reason in dict.fromkeys(reasons)))
    rows = [row for other in others for row in _rows(first, other)]
    if not rows:
        raise AnalysisError("not comparable:\n  - no load level was measured validly in both runs")
    objective = first.objective
    changed = [text for other in others for text in _changes(first, other)]
    return Comparison(
        objective.metric,
        objective.larger_is_better,
        objective.level,
        tuple(dict.fromkeys(changed)),
        tuple(rows),
        tuple(_marks(first)),
    )


def regression(comparison: Comparison, role: str, tolerance: float) -> tuple[int, str]:
    """Exit code and sentence: did the last run get worse than the first by more than ``tolerance`` (relative)?"""
    rows = [row for row in comparison.rows if row.role == role and row.level == comparison.deciding_level]
    if not rows:
        return EXIT_UNDECIDED, f"Undecided: the {role} was not measured at the deciding load in both runs."
    row = rows[-1]
    sign = 1.0 if comparison.larger_is_better else -1.0
    low, high = sorted((sign * row.difference.low, sign * row.difference.high))
    seen = f"{words.interval(row.difference, relative=True)}{comparison.mark} at {row.level} in flight"
    seen += f", tolerance {tolerance:.1%}"
    if high < -tolerance:
        return EXIT_REGRESSION, f"Regression: the {role} changed by {seen}."
    if low > -tolerance:
        return 0, f"No regression: the {role} changed by {seen}."
    return EXIT_UNDECIDED, f"Undecided: the {role} changed by {seen}; more finalist rounds would narrow the interval."


def _obstacles(first: Run, other: Run) -> list[str]:
    found = [f"{run.name} has no valid measurement" for run in (first, other) if not standings(run)]
    one, two = first.objective, other.objective
    if one.metric != two.metric:
        found.append(f"the objective is {one.metric} in {first.name} and {two.metric} in {other.name}")
    if one.level != two.level:
        found.append(f"the deciding load is {one.level} in {first.name} and {two.level} in {other.name}")
    if dict(one.limits) != dict(two.limits):
        found.append(f"the limits are {_limits(one.limits)} in {first.name} and {_limits(two.limits)} in {other.name}")
    for name in SENT:
        mine, theirs = first.setting("workload", name), other.setting("workload", name)
        if mine != theirs:
            found.append(f"workload.{name} is {mine} in {first.name} and {theirs} in {other.name}")
    mine, theirs = set(_marks(first)), set(_marks(other))
    for mark in sorted(mine ^ theirs):
        holder, without = (first, other) if mark in mine else (other, first)
        found.append(f"{holder.name} has numbers with {mark}, {without.name} has none")
    return found


def _marks(run: Run) -> list[str]:
    return origins(launch for standing in standings(run) for launch in standing.launches)


def _changes(first: Run, other: Run) -> list[str]:
    found = []
    for noun, one, two in (
        ("engine", _engines(first), _engines(other)),
        ("model", first.setting("model", "name"), other.setting("model", "name")),
        ("GPU", _hardware(first), _hardware(other)),
        ("fixed flags", first.setting("engine", "flags"), other.setting("engine", "flags")),
        ("environment variables", first.setting("engine", "env"), other.setting("engine", "env")),
    ):
        if one != two:
            found.append(f"{noun}: {one} in {first.name}, {two} in {other.name}.")
    if len(found) > 1:
        found.append("More than one thing changed, so a difference cannot be laid at the door of either.")
    mine, theirs = _by_role(first).get("best"), _by_role(other).get("best")
    if mine is not None and theirs is not None and mine.record.config.key != theirs.record.config.key:
        for run, standing in ((first, mine), (other, theirs)):
            found.append(f"The best of {run.name} sets {settings(standing.record, baseline(run))}.")
    return found + [
        f"{run.name} has no fresh measurements of its finalists: its best looks too good."
        for run in (first, other)
        if not all(standing.again for standing in standings(run))
    ]


def _rows(first: Run, other: Run) -> list[Row]:
    objective = first.objective
    found = []
    mine, theirs = _by_role(first), _by_role(other)
    values = [by_load(standings(run), objective.metric) for run in (first, other)]
    for role in ("best", "baseline"):
        if role not in mine or role not in theirs:
            continue
        keys = mine[role].record.config.key, theirs[role].record.config.key
        for level in sorted({level for key, level in values[0] if key == keys[0]}):
            reference, value = values[0][keys[0], level], values[1].get((keys[1], level))
            if value is None:
                continue
            difference = relative_difference(value, reference)
            verdict = "no difference"
            if is_difference(difference):
                verdict = "better" if (difference.mean > 0) == objective.larger_is_better else "worse"
            found.append(Row(role, level, other.name, reference, value, difference, verdict))
    return found


def _by_role(run: Run) -> dict[str, Standing]:
    """Best and baseline; where the baseline is the best it is both."""
    found = {standing.role: standing for standing in reversed(standings(run))}
    if "best" not in found and "baseline" in found:
        found["best"] = found["baseline"]
    return found


def _engines(run: Run) -> str:
    return ", ".join(sorted({record.engine for record in run.all_records}))


def _hardware(run: Run) -> str:
    return "; ".join(str(gpu) for gpu in run.environment.get("gpus") or ()) or str(run.setting("hardware", "name"))


def _limits(limits: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in sorted(limits.items())) or "none"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if len(options.runs) < 2:
            raise AnalysisError("give at least two runs, the reference first")
        comparison = compare([load(path) for path in options.runs])
    except AnalysisError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    code, sentence = regression(comparison, options.role, options.tolerance) if options.regression else (0, "")
    if options.json:
        print(json.dumps({**asdict(comparison), "regression": sentence or None}))
    else:
        _show(comparison, sentence)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m analysis.compare", description="Hold runs against the first.")
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, the reference first")
    parser.add_argument(
        "--regression",
        action="store_true",
        help="judge the last run against the first: exit code 0 no regression, 1 regression, 3 undecided",
    )
    parser.add_argument("--tolerance", type=float, default=0.02, help="loss that is let pass, relative (default 0.02)")
    parser.add_argument("--role", choices=("best", "baseline"), default="best", help="what is judged (default best)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _show(comparison: Comparison, sentence: str) -> None:
    console = words.console()
    if comparison.marks:
        console.print(f"Not real in all of these runs: {', '.join(comparison.marks)}.", markup=False, highlight=False)
    for text in comparison.changed:
        console.print(text, markup=False, highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in (
        "configuration",
        "in flight",
        "reference",
        "run",
        words.metric_name(comparison.metric) + comparison.mark,
        "difference",
        "",
    ):
        table.add_column(name)
    for row in comparison.rows:
        table.add_row(
            row.role,
            str(row.level),
            words.interval(row.reference),
            row.run,
            words.interval(row.value),
            words.interval(row.difference, relative=True),
            row.verdict,
        )
    console.print(table)
    if sentence:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
