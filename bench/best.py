"""Best: the configuration that goes into production, with the evidence for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
            baseline is as good), ``within_tolerance`` (the baseline is not, but lies as close to the best as was asked
            for), ``baseline_misses_limits`` (so what it reaches is no alternative), ``not_meeting_limits`` (nothing
            meets the limits; this is the nearest), ``no_baseline`` (there was nothing to compare with) or
            ``not_measured_again`` (a lead of the search).
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
    """Choose among the finalists by their fresh measurements; None while none of them was measured again.

    Args:
        unconfirmed: a configuration that was not measured again may win too, by its only launch in the search; for a
            question that the finalists were not chosen for.
    """
    search, again = [_scored(experiment, item) for item in search], [_scored(experiment, item) for item in again]
    chosen = finalists.choose(experiment, search, again)
    if unconfirmed:
        measured = {item.config.key for item in again if item.value is not None}
        again += [item for item in chosen if item.config.key not in measured]
    rows = finalists.standings(experiment, chosen, again)
    launched = {item.config.key for item in again}
    if all(row.baseline for row in rows) and any(item.config.key not in launched for item in chosen):
        return None  # the baseline beside nothing is no answer
    confirmed = {item.config.key for item in again if item.round}
    choice = finalists.winner(experiment, rows, noise_counts=rows[0].config.key in confirmed) if rows else None
    if choice is None:
        return None
    row, tied = choice
    answer = _Choice(
        experiment=experiment,
        row=row,
        first=rows[0],
        baseline=next((item for item in rows if item.baseline), None),
        tied=tied,
        record=next(item for item in again if item.config.key == row.config.key and item.value is not None),
        unfinished=not unconfirmed and finalists.next_turn(experiment, search, again, frozenset()) is not None,
    )
    return answer.as_best(last_trial=max(item.number for item in (*search, *again)))


def _scored(experiment: Experiment, record: TrialRecord) -> TrialRecord:
    """The record with the value that it has in the terms of this experiment."""
    score = objective.score(experiment, record.measurements) if record.outcome.kind is OutcomeKind.COMPLETE else None
    return replace(record, value=score.value if score else None, objective_level=objective.level(experiment))


@dataclass(frozen=True)
class _Choice:
    """What was chosen, and what there is to say of it.

    Attributes:
        first: the best by the objective; ``row`` itself unless something simpler was taken.
        record: a launch of what was chosen.
        unfinished: launches of the finalists are still missing.
    """

    experiment: Experiment
    row: finalists.Standing
    first: finalists.Standing
    baseline: finalists.Standing | None
    tied: tuple[finalists.Standing, ...]
    record: TrialRecord
    unfinished: bool

    def as_best(self, *, last_trial: int) -> Best:
        row, goal = self.row, self.experiment.objective
        return Best(
            verdict=self.verdict,
            trial=row.trial,
            key=row.config.key,
            flags=dict(row.config.flags),
            env=dict(row.config.env),
            metric=goal.metric,
            level=objective.level(self.experiment),
            limits=dict(goal.limits),
            excess=dict(row.excess),
            value=row.value,
            rounds=len(row.values),
            baseline_value=self.baseline.value if self.baseline else None,
            gain=row.gain,
            tied=tuple(item.config.key for item in self.tied),
            engine=self.record.engine,
            simulated=self.record.simulated,
            acceptance_simulated=self.acceptance_simulated,
            sentences=tuple(self.sentences()),
            last_trial=last_trial,
        )

    @property
    def acceptance_simulated(self) -> bool:
        return any(item.acceptance_simulated for item in self.record.measurements)

    @property
    def verdict(self) -> str:
        row, baseline, gain = self.row, self.baseline, self.first.gain
        if not row.meets_limits:
            return "not_meeting_limits"
        if not self.record.round:
            return "not_measured_again"
        if baseline is None or not baseline.meets_limits:
            return "no_baseline" if baseline is None else "baseline_misses_limits"
        if row.baseline or row.gain is None or row.gain.low <= 0:
            return "within_tolerance" if row.baseline and gain is not None and gain.low > 0 else "no_difference"
        return "better"

    def sentences(self) -> Iterator[str]:
        row, baseline, verdict, goal = self.row, self.baseline, self.verdict, self.experiment.objective
        if not row.meets_limits:
            yield f"No configuration meets the limits; the nearest one has {self._limits(row, missed=True)}."
        head = "Best configuration" if row.meets_limits else "Nearest to the limits"
        yield f"{head}: {settings(row.candidate)} (trial {row.trial})."
        yield f"{goal.metric} at {requests(objective.level(self.experiment))}: {_with_interval(row.value)}."
        if goal.limits and row.meets_limits:
            yield f"It keeps the limits: {self._limits(row, missed=False)}."
        if baseline is not None and row.gain is not None:
            yield f"Gain over the baseline ({figure(baseline.value.mean)}): {_gain(row.gain)}."
        if verdict == "baseline_misses_limits" and baseline is not None:
            yield f"The baseline is no alternative: it has {self._limits(baseline, missed=True)}."
        if verdict == "no_difference":
            yield "No difference: nothing that was measured again is better than the baseline beyond the noise."
        if verdict == "within_tolerance" and self.first.gain is not None:
            yield (
                f"Trial {self.first.trial} ({settings(self.first.candidate)}) is better, by {_gain(self.first.gain)}; "
                f"the baseline was taken because it lies within {self.experiment.search.tie_relative:.1%} of it."
            )
        if not self.record.round:
            yield (
                "It was not measured again: this is one launch of the search, and the best of many single launches "
                "looks better than it is. Measure it again before relying on it."
            )
        if verdict == "no_baseline":
            yield "The baseline was not measured again, so no gain can be stated."
        if self.unfinished:
            yield (
                "Not all launches of the finalists have been made: the same sweep command with the same run= makes "
                "those that are missing."
            )
        if self.tied and verdict != "within_tolerance":
            trials = ", ".join(str(item.trial) for item in self.tied)
            yield (
                f"Trial {trials} cannot be told from it or lies within {self.experiment.search.tie_relative:.1%} of "
                "the best; the one with the fewest settings was taken."
            )
        if self.record.simulated:
            yield "All of this is simulated: no GPU and no engine was measured."
        elif self.acceptance_simulated:
            yield "The acceptance length was simulated by the engine: real prompts will give another one."

    def _limits(self, row: finalists.Standing, *, missed: bool) -> str:
        limits = self.experiment.objective.limits
        return ", ".join(
            f"{name} {figure(limits[name] * (1 + amount)) if amount < math.inf else 'not measured'} "
            f"(limit {figure(limits[name])})"
            for name, amount in row.excess
            if amount > 0 or not missed
        )


def _with_interval(value: Interval) -> str:
    return f"{figure(value.mean)} [{figure(max(value.low, 0.0))}, {figure(value.high)}] ({value.method})"


def _gain(gain: Interval) -> str:
    return f"{gain.mean:+.1%} [{max(gain.low, -1.0):+.1%}, {gain.high:+.1%}]"


def requests(level: int) -> str:
    return f"{level} concurrent request{'' if level == 1 else 's'}"


def source(best: Best, trials: Sequence[TrialRecord]) -> TrialRecord:
    """The trial of the search that found it."""
    return next(record for record in trials if record.number == best.trial)
