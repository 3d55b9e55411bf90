"""Finalists: the best few and the baseline, measured again in turns, and what may be said of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scipy import stats

from bench.engines.protocol import Candidate, ServerConfig
from bench.experiment import Experiment
from bench.load.measurement import Interval
from bench.outcome import OutcomeKind
from bench.records import TrialRecord
from bench.search import drift, objective

CONFIDENCE = 0.95
# Rounds at most of the best against the baseline, where the planned ones left open which of them it is: two values each
# tell a difference of 9 % from noise no more often than every other time, if launches differ by 2 to 3 %.
DECIDING_ROUNDS = 2


@dataclass(frozen=True)
class Standing:
    """One finalist after its rounds.

    Attributes:
        values: of the objective, one per round that succeeded.
        value: their mean with its interval, or with one round the interval of that measurement.
        gain: relative to the baseline, larger is better whatever the metric; None for the baseline itself.
        settings: how many flags and variables of its server are not as the baseline's.
    """

    config: ServerConfig
    candidate: Candidate
    baseline: bool
    trial: int
    values: tuple[float, ...]
    value: Interval
    gain: Interval | None
    settings: int
    meets_limits: bool
    excess: tuple[tuple[str, float], ...]

    @property
    def violation(self) -> float:
        """By how much the limit that is missed most is exceeded, relative to it; 0 where all are met."""
        return max((amount for _, amount in self.excess if amount > 0), default=0.0)


def choose(
    experiment: Experiment, records: Sequence[TrialRecord], again: Sequence[TrialRecord] = ()
) -> list[TrialRecord]:
    """The baseline and the best few of the search, best first; those that meet the limits come before the others.

    Where the host changed meanwhile (``drift``), only what was measured since is compared. If only the fresh baseline
    shows it, no value of the search can be trusted: then as many more are taken, each the best of another family
    (configurations that set the same parameters), so that a kind that was measured at a bad time gets its chance.

    Args:
        again: fresh measurements of finalists so far.
    """
    scored = []
    stale = drift.not_comparable(experiment, records)
    for record in records:
        score = objective.score(experiment, record.measurements)
        if record.outcome.kind is not OutcomeKind.COMPLETE or score is None or record.role in drift.BASELINES:
            continue
        if record.number in stale:
            continue
        order = -score.value if objective.maximized(experiment.objective) else score.value
        worst = max((amount for _, amount in score.excess), default=0.0)
        scored.append((not score.meets_limits, 0.0 if score.meets_limits else worst, order, record.number, record))
    ranked = [item[-1] for item in sorted(scored, key=lambda item: item[:-1])]
    best = ranked[: experiment.search.finalists]
    baselines = [record for record in records if record.role in drift.BASELINES and record.value is not None]
    fresh = [record for record in again if baselines and record.config.key == baselines[-1].config.key and record.value]
    if fresh and drift.differs(experiment, baselines[-1], fresh[0]):
        best += _other_families(best, ranked)[: experiment.search.finalists]
    return baselines[:1] + best


def _other_families(chosen: Sequence[TrialRecord], ranked: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The best of each family that none of the chosen belongs to."""
    seen = {frozenset(record.candidate.values) for record in chosen}
    found = []
    for record in ranked:
        family = frozenset(record.candidate.values)
        if family not in seen:
            seen.add(family)
            found.append(record)
    return found


def turns(experiment: Experiment, chosen: Sequence[TrialRecord]) -> Iterator[tuple[int, TrialRecord]]:
    """Round and record, in turns (A B C A B C), so that a drift of the machine meets all alike.

    Where there are fewer finalists than were asked for, their launches become further rounds: of two configurations
    with two values each even a difference of 10 % could not be told from noise.
    """
    search = experiment.search
    rounds = search.finalist_rounds
    if len(chosen) > 1:
        rounds = max(rounds, (search.finalists + 1) * rounds // len(chosen))
    for number in range(1, rounds + 1):
        for record in chosen:
            yield number, record


def next_turn(
    experiment: Experiment,
    records: Sequence[TrialRecord],
    again: Sequence[TrialRecord],
    given_up: frozenset[tuple[int, str]],
) -> tuple[int, TrialRecord] | None:
    """Round and record that is to be measured next; None when all are done.

    Args:
        given_up: rounds and keys that the host failed too often.
    """
    done = {(record.round, record.config.key) for record in again if record.outcome.counts} | given_up
    chosen = choose(experiment, records, again)
    planned = list(turns(experiment, chosen))
    deciding = _deciding_turns(experiment, chosen, again, planned[-1][0]) if planned else ()
    return next((turn for turn in (*planned, *deciding) if (turn[0], turn[1].config.key) not in done), None)


def _deciding_turns(
    experiment: Experiment, chosen: Sequence[TrialRecord], again: Sequence[TrialRecord], planned_rounds: int
) -> Iterator[tuple[int, TrialRecord]]:
    """Further turns of the best and the baseline, as long as the rounds before do not tell them apart.

    Looking again after each round takes noise for a gain more often than one look would, but only of a configuration
    that was measured to be better. A single planned round is left alone: whoever asks for it wants to be quick.
    """
    if experiment.search.finalist_rounds < 2:
        return
    for number in range(planned_rounds + 1, planned_rounds + DECIDING_ROUNDS + 1):
        rows = standings(experiment, chosen, [record for record in again if record.round < number])
        gain = rows[0].gain if rows else None
        if gain is None or gain.mean <= experiment.search.tie_relative or gain.low > 0:
            return
        if any(row.violation != rows[0].violation for row in rows if row.baseline):
            return  # one of them misses limits by more, which decides
        for record in chosen:
            if record.role in drift.BASELINES or record.config.key == rows[0].config.key:
                yield number, record


def standings(experiment: Experiment, chosen: Sequence[TrialRecord], again: Sequence[TrialRecord]) -> list[Standing]:
    """What the fresh measurements say, best first. The search's own values are not used: the best of many noisy
    values is too good to be true (winner's curse), so the choice falls on fresh ones.

    With two rounds or more the spread between launches is pooled over all finalists (relative standard deviation,
    equal variances assumed) and a t interval taken from it; it holds what a window's own interval cannot see, the
    difference from launch to launch. With one round only the window's interval is left, and the method says so.
    """
    groups = {
        record.config.key: [item for item in again if item.config.key == record.config.key and item.value is not None]
        for record in chosen
    }
    spread, freedom = _pooled([[item.value or 0.0 for item in group] for group in groups.values()])
    defaults = _settings(chosen[0].config) if chosen else frozenset()
    baseline_values: list[float] = []
    rows: list[Standing] = []
    for record in chosen:
        group = groups[record.config.key]
        if not group:
            continue
        values = [item.value for item in group if item.value is not None]
        value = _interval(experiment, values, group, spread, freedom)
        is_baseline = record.role in drift.BASELINES
        if is_baseline:
            baseline_values = values
        gain = None
        if not is_baseline and baseline_values:
            gain = _gain(experiment, value, rows[0].value, len(values), len(baseline_values), spread, freedom)
        scores = [score for item in group if (score := objective.score(experiment, item.measurements)) is not None]
        excess = _mean_excess(scores)
        rows.append(
            Standing(
                config=record.config,
                candidate=record.candidate,
                baseline=is_baseline,
                trial=record.number,
                values=tuple(values),
                value=value,
                gain=gain,
                settings=len(_settings(record.config) - defaults),
                meets_limits=all(amount <= 0 for _, amount in excess),
                excess=excess,
            )
        )
    sign = -1 if objective.maximized(experiment.objective) else 1
    return sorted(rows, key=lambda row: (not row.meets_limits, row.violation, sign * row.value.mean))


def winner(
    experiment: Experiment, rows: Sequence[Standing], *, noise_counts: bool = True
) -> tuple[Standing, tuple[Standing, ...]] | None:
    """The configuration to ship, and those that are tied with it.

    Of all that lie within ``search.tie_relative`` of the best the one with the fewest settings wins; where the gain of
    the best over the baseline cannot be told from nothing, the baseline does. Where nothing meets the limits it is the
    one that comes nearest to them.

    Args:
        noise_counts: whether the baseline wins for want of evidence.
    """
    if not rows:
        return None
    best = rows[0]
    if not best.meets_limits:
        return best, ()
    meeting = [row for row in rows if row.meets_limits]
    tied = [
        row
        for row in meeting
        if abs(row.value.mean / best.value.mean - 1) <= experiment.search.tie_relative
        or (noise_counts and row.baseline and best.gain is not None and best.gain.low <= 0)
    ]
    first = min(tied, key=lambda row: (not row.baseline, row.settings, meeting.index(row)))
    return first, tuple(row for row in tied if row is not first)


def _settings(config: ServerConfig) -> frozenset[tuple[str, str]]:
    """Flags and variables as text, since lists of numbers are among them."""
    return frozenset((name, str(value)) for name, value in (*config.flags, *config.env))


def _pooled(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Relative standard deviation between launches of one configuration, pooled, with its degrees of freedom."""
    squares, freedom = 0.0, 0
    for values in groups:
        if len(values) > 1:
            mean = statistics.fmean(values)
            squares += sum((value / mean - 1) ** 2 for value in values)
            freedom += len(values) - 1
    return (math.sqrt(squares / freedom), freedom) if freedom else (0.0, 0)


def _interval(
    experiment: Experiment, values: Sequence[float], group: Sequence[TrialRecord], spread: float, freedom: int
) -> Interval:
    mean = statistics.fmean(values)
    if freedom:
        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * spread * mean / math.sqrt(len(values))
        return Interval(mean, mean - half, mean + half, f"t over {len(values)} launches, pooled, {freedom} df")
    for measurement in group[0].measurements:
        if measurement.concurrency == objective.level(experiment):
            interval = objective.interval(measurement, experiment.objective.metric)
            if interval is not None:
                return Interval(interval.mean, interval.low, interval.high, f"one launch: {interval.method}")
    return Interval(mean, -math.inf, math.inf, "one launch, no interval")


def _gain(
    experiment: Experiment,
    value: Interval,
    baseline: Interval,
    rounds: int,
    baseline_rounds: int,
    spread: float,
    freedom: int,
) -> Interval:
    """Relative gain with the interval of the ratio, by the delta method on independent relative errors."""
    ratio = value.mean / baseline.mean
    if freedom:
        relative = (
            float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * spread * math.sqrt(1 / rounds + 1 / baseline_rounds)
        )
    else:
        relative = math.hypot(value.relative_half_width, baseline.relative_half_width)
    if objective.maximized(experiment.objective):
        gain = ratio - 1
        return Interval(gain, gain - relative * ratio, gain + relative * ratio, value.method)
    gain = 1 - ratio
    return Interval(gain, gain - relative * ratio, gain + relative * ratio, value.method)


def _mean_excess(scores: Sequence[objective.Score]) -> tuple[tuple[str, float], ...]:
    names = [name for name, _ in scores[0].excess] if scores else []
    return tuple((name, statistics.fmean(dict(score.excess)[name] for score in scores)) for name in names)
