"""Best: the configuration that goes into production, with the evidence for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bench.engines.protocol import Value
from bench.experiment import Experiment
from bench.load.measurement import Interval
from bench.outcome import OutcomeKind
from bench.progress import figure, settings
from bench.records import TrialRecord
from bench.search import finalists, objective


@dataclass(frozen=True)
class Best:
    """The answer of a sweep.

    Attributes:
        verdict: ``better`` (than the baseline, the interval of the gain lies above zero), ``no_difference`` (the
            baseline is as good), ``baseline_misses_limits`` (so what it reaches is no alternative),
            ``not_meeting_limits`` (nothing meets the limits; this is the nearest), ``no_baseline`` (there was nothing
            to compare with) or ``not_measured_again`` (a lead of the search).
        trial: number of the trial that found it.
        flags, env: of the server, fixed ones included.
        level: the load level it is best at.
        value, baseline_value: of the objective, from fresh launches. gain: relative, larger is better.
        tied: keys of configurations that cannot be told from it.
        sentences: the answer in words.
        last_trial: the greatest number of a trial that was known to this answer.
    """

    verdict: str
    trial: int
    key: str
    flags: dict[str, Value]
    env: dict[str, str]
    metric: str
    level: int
    limits: dict[str, float]
    excess: dict[str, float]
    value: Interval
    rounds: int
    baseline_value: Interval | None
    gain: Interval | None
    tied: tuple[str, ...]
    engine: str
    simulated: bool
    acceptance_simulated: bool
    sentences: tuple[str, ...]
    last_trial: int
    schema_version: int = 1


def asked_otherwise(
    experiment: Experiment,
    *,
    level: int | None = None,
    limits: Mapping[str, float] | None = None,
    tie_relative: float | None = None,
) -> Experiment:
    """The experiment with another question put to what it measured.

    Args:
        level: load level that decides. limits: they take the place of the experiment's.
        tie_relative: how far from the best a simpler configuration may be.
    """
    goal = replace(
        experiment.objective,
        level=experiment.objective.level if level is None else level,
        limits=experiment.objective.limits if limits is None else limits,
    )
    tie = experiment.search.tie_relative if tie_relative is None else tie_relative
    return replace(experiment, objective=goal, search=replace(experiment.search, tie_relative=tie))


def decide(
    experiment: Experiment,
    search: Sequence[TrialRecord],
    again: Sequence[TrialRecord],
    *,
    unconfirmed: bool = False,
) -> Best | None:
    """Choose among the finalists by their fresh measurements; None when none of them was measured again.

    Args:
        unconfirmed: a configuration that was not measured again may win too, by its only launch in the search; for a
            question that the finalists were not chosen for.
    """
    search, again = [_scored(experiment, item) for item in search], [_scored(experiment, item) for item in again]
    chosen = finalists.choose(experiment, search, again)
    if unconfirmed:
        confirmed = {item.config.key for item in again if item.value is not None}
        again += [item for item in chosen if item.config.key not in confirmed]
    rows = finalists.standings(experiment, chosen, again)
    choice = finalists.winner(experiment, rows)
    if choice is None:
        return None
    row, tied = choice
    baseline = next((item for item in rows if item.baseline), None)
    fresh = [item for item in again if item.config.key == row.config.key and item.value is not None]
    record = fresh[0]
    acceptance_simulated = any(item.acceptance_simulated for item in record.measurements)
    verdict = _verdict(row, baseline) if record.round else "not_measured_again"
    return Best(
        verdict=verdict,
        trial=row.trial,
        key=row.config.key,
        flags=dict(row.config.flags),
        env=dict(row.config.env),
        metric=experiment.objective.metric,
        level=objective.level(experiment),
        limits=dict(experiment.objective.limits),
        excess=dict(row.excess),
        value=row.value,
        rounds=len(row.values),
        baseline_value=baseline.value if baseline else None,
        gain=row.gain,
        tied=tuple(item.config.key for item in tied),
        engine=record.engine,
        simulated=record.simulated,
        acceptance_simulated=acceptance_simulated,
        sentences=tuple(_sentences(experiment, verdict, row, baseline, tied, record, acceptance_simulated)),
        last_trial=max(item.number for item in (*search, *again)),
    )


def _scored(experiment: Experiment, record: TrialRecord) -> TrialRecord:
    """The record with the value that it has in the terms of this experiment."""
    score = objective.score(experiment, record.measurements) if record.outcome.kind is OutcomeKind.COMPLETE else None
    return replace(record, value=score.value if score else None, objective_level=objective.level(experiment))


def _verdict(row: finalists.Standing, baseline: finalists.Standing | None) -> str:
    if not row.meets_limits:
        return "not_meeting_limits"
    if baseline is None:
        return "no_baseline"
    if not baseline.meets_limits:
        return "baseline_misses_limits"
    if row.baseline or row.gain is None or row.gain.low <= 0:
        return "no_difference"
    return "better"


def _sentences(
    experiment: Experiment,
    verdict: str,
    row: finalists.Standing,
    baseline: finalists.Standing | None,
    tied: Sequence[finalists.Standing],
    record: TrialRecord,
    acceptance_simulated: bool,
) -> list[str]:
    metric, level = experiment.objective.metric, objective.level(experiment)
    head = "Nearest to the limits" if verdict == "not_meeting_limits" else "Best configuration"
    said = [
        f"{head}: {settings(row.candidate)} (trial {row.trial}).",
        f"{metric} at {requests(level)}: {figure(row.value.mean)} "
        f"[{figure(max(row.value.low, 0.0))}, {figure(row.value.high)}] ({row.value.method}).",
    ]
    if baseline is not None and row.gain is not None:
        said.append(
            f"Gain over the baseline ({figure(baseline.value.mean)}): {row.gain.mean:+.1%} "
            f"[{max(row.gain.low, -1.0):+.1%}, {row.gain.high:+.1%}]."
        )
    if verdict == "baseline_misses_limits" and baseline is not None:
        said.append(f"The baseline is no alternative: it has {_missed(experiment, baseline)}.")
    if verdict == "no_difference":
        said.append("No difference: nothing that was measured again is better than the baseline beyond the noise.")
    if verdict == "not_measured_again":
        said.append(
            "It was not measured again: this is one launch of the search, and the best of many single launches looks "
            "better than it is. Measure it again before relying on it."
        )
    if verdict == "no_baseline":
        said.append("The baseline was not measured again, so no gain can be stated.")
    if verdict == "not_meeting_limits":
        said.insert(0, f"No configuration meets the limits; the nearest one has {_missed(experiment, row)}.")
    if tied:
        within = experiment.search.tie_relative
        said.append(
            f"{len(tied)} other finalist(s) cannot be told from it or lie within {within:.1%} of the best; the one "
            "with the fewest settings was taken."
        )
    if record.simulated:
        said.append("All of this is simulated: no GPU and no engine was measured.")
    elif acceptance_simulated:
        said.append("The acceptance length was simulated by the engine: real prompts will give another one.")
    return said


def _missed(experiment: Experiment, row: finalists.Standing) -> str:
    limits = experiment.objective.limits
    return ", ".join(
        f"{name} {figure(limits[name] * (1 + amount))} (limit {figure(limits[name])})"
        for name, amount in row.excess
        if amount > 0
    )


def requests(level: int) -> str:
    return f"{level} concurrent request{'' if level == 1 else 's'}"


def source(best: Best, trials: Sequence[TrialRecord]) -> TrialRecord:
    """The trial of the search that found it."""
    return next(record for record in trials if record.number == best.trial)
