"""Doubts: what a reader should know before relying on the numbers of a run."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime

from analysis import words
from analysis.frames import Run
from analysis.standing import Standing, best, best_so_far, measured, standings, value_text
from bench.load.measurement import Measurement
from bench.outcome import OutcomeKind

# A baseline that moved more than this between the search and the finalists says that the machine did.
DRIFT_RELATIVE = 0.05


def doubts(run: Run) -> list[str]:
    """What is doubtful about the run, one sentence each, gravest first."""
    shown = standings(run)
    found = [*_contradicted(run), *_drift(run), *_edges(run), *_queueing(run, shown), *_losses(shown)]
    infrastructure = [r for r in run.all_records if r.outcome.kind is OutcomeKind.INFRASTRUCTURE]
    if infrastructure:
        causes = ", ".join(sorted({str(record.outcome.cause) for record in infrastructure}))
        found.append(
            f"{words.counted(len(infrastructure), 'launch', 'launches')} failed for reasons of the machine, not of the "
            f"configuration ({causes}); they count against no configuration."
        )
    return list(dict.fromkeys([*found, *_measurement_warnings(run), *_rewrites(run)]))


def _contradicted(run: Run) -> list[str]:
    """Files whose last verification does not hold."""
    last = {verdict["file"]: verdict for verdict in run.verdicts}
    return [
        f"`{file}` was verified on {datetime.fromtimestamp(verdict['at'], UTC):%Y-%m-%d} and does not hold: "
        f"{'; '.join(verdict['reasons'])}."
        for file, verdict in last.items()
        if not verdict["holds"]
    ]


def _drift(run: Run) -> list[str]:
    """Whether the baseline, as the first launch, gave another value than when it was measured again."""
    searched = next((r for r in run.records if r.role == "baseline" and r.value), None)
    if searched is None or not searched.value:
        return []
    again = [r for r in run.finalist_records if r.config.key == searched.config.key and r.value]
    if not again:
        return []
    mean = statistics.fmean(r.value or 0.0 for r in again)
    moved = mean / searched.value - 1
    if abs(moved) <= DRIFT_RELATIVE:
        return []
    metric = run.objective.metric
    why = "a fresh host may compile kernels during its first launches"
    if searched.simulated:
        why = "other programs may take a simulated server's time"
    return [
        f"The baseline read {words.metric_value(metric, searched.value)} first (trial {searched.number}) and "
        f"{words.metric_value(metric, mean)} when it was measured again, "
        f"{words.duration(again[0].started_at - searched.started_at)} later ({words.percent(moved, signed=True)}): the "
        f"machine changed meanwhile ({why}), so early trials are not "
        "comparable with later ones. The fresh launches, taken in turns, are."
    ]


def _edges(run: Run) -> list[str]:
    """Searched numbers whose best value is the first or last that was allowed."""
    winner, space = best_so_far(run.records, run.objective), run.setting("space", "parameters")
    if winner is None or not space:
        return []
    items = space.items() if isinstance(space, dict) else ((item["name"], item) for item in space)
    found = []
    for name, item in items:
        value = winner.candidate.values.get(name)
        if not isinstance(item, dict) or not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        for end in ("low", "high"):
            bound = item.get(end)
            if isinstance(bound, (int, float)) and abs(value - bound) <= 1e-9 * max(1.0, abs(bound)):
                found.append(
                    f"The best trial has {name} = {value_text(value)}, the {end}est that the space allows: a wider "
                    "range may hold something better."
                )
    return found


def _queueing(run: Run, shown: Sequence[Standing]) -> list[str]:
    found = []
    for standing in shown[:1]:
        facts = standing.launches[0].facts
        limit = None if facts is None else facts.max_running_requests
        above = sorted({m.concurrency for m in measured(standing) if m.concurrency and limit and m.concurrency > limit})
        if above and limit:
            loads = ", ".join(map(str, above))
            found.append(
                f"The {standing.label} runs at most {limit} requests at once: at {loads} in flight the rest waits in "
                "its queue, which shows as time to first token."
            )
    return found


def _losses(shown: Sequence[Standing]) -> list[str]:
    found = []
    for standing in shown:
        items = measured(standing)
        failed, retracted = sum(m.requests_failed for m in items), sum(m.retractions for m in items)
        if failed:
            sent = failed + sum(m.requests_ok for m in items)
            found.append(f"The {standing.label} failed {words.counted(failed, 'request')} of {sent}.")
        if retracted:
            found.append(
                f"The {standing.label} threw {words.counted(retracted, 'request')} back into the queue for want of "
                "memory (retractions): work was done twice."
            )
    return found


def _rewrites(run: Run) -> list[str]:
    winner = best(run)
    if winner is None:
        return []
    told = [
        f"The engine changes what trial {winner.number} asks: {text.rstrip('.')}." for text in winner.config.rewrites
    ]
    facts = winner.facts
    said = [
        f"The engine says of trial {winner.number}: {text.rstrip('.')}."
        for text in (facts.warnings if facts is not None else ())
    ]
    return told + said


def _measurement_warnings(run: Run) -> list[str]:
    """Each warning once, with the number of measurements that carry it; digits do not make a difference."""
    seen: dict[str, list[tuple[int, Measurement, str]]] = {}
    for record in run.all_records:
        for item in record.measurements:
            for text in item.warnings:
                seen.setdefault(re.sub(r"[\d.,]+", "#", text), []).append((record.number, item, text))
    found = []
    for cases in sorted(seen.values(), key=len, reverse=True):
        number, item, text = cases[0]
        void = "" if item.valid else "Not used: "
        where = f"trial {number}, {item.concurrency or item.request_rate_per_s} in flight"
        more = f" and {words.counted(len(cases) - 1, 'other measurement')}" if len(cases) > 1 else ""
        found.append(f"{void}{text[:1].upper()}{text[1:].rstrip('.')} ({where}{more}).")
    return found
