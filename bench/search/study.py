"""Study: asks Optuna for candidates, tells it what became of them, and goes on where an earlier process stopped.

``trials.jsonl`` is the truth. The Optuna journal is made anew from it at every start, so that whatever a kill left in
the journal (a half-written line, a stale lock, a trial that nobody will finish) cannot matter, and no value can come to
stand beside parameters that it was not measured with.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import optuna
from optuna.distributions import BaseDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from bench.engines.protocol import Calibration, Candidate, Engine, Forecast, RefusedError, ServerConfig
from bench.experiment import Experiment
from bench.outcome import Cause, Outcome, OutcomeKind, Phase
from bench.records import RunFolder, TrialRecord
from bench.search import drift, feasibility, objective
from bench.search.pool import Pool
from bench.search.space import Space

# Asks that may give nothing new before the space is taken for exhausted. TPE repeats itself near the end of a small
# space; random sampling then finds what is left.
MAX_ASKS = 64
MAX_RANDOM_DRAWS = 2000
# Random trials before TPE models anything. Ten, Optuna's default, would be half of a usual budget of launches.
STARTUP_TRIALS = 5
# What lies further below the best than this is no finalist worth a launch. Launches of one configuration were seen to
# differ by 1 to 3 %: at 2 % the difference of two lies within 8.5 % but for one case in a thousand.
HOPELESS = 0.1


@dataclass(frozen=True)
class Proposal:
    """A candidate to run.

    Attributes:
        skip: set when it is not to be launched, and why.
        trial: the open Optuna trial, None where the candidate is no point of the space.
    """

    number: int
    role: str
    candidate: Candidate
    config: ServerConfig
    forecast: Forecast | None = None
    skip: Outcome | None = None
    trial: Trial | None = None


class Study:
    """The search of one run.

    Args:
        records: of the run so far, in order; they are told to a fresh Optuna study in ``folder.journal``.
        interrupted: role and candidate of trials that were begun and never finished; they are asked for first.
    """

    def __init__(
        self,
        experiment: Experiment,
        engine: Engine,
        space: Space,
        folder: RunFolder,
        records: Sequence[TrialRecord],
        interrupted: Sequence[tuple[str, Candidate]] = (),
    ) -> None:
        self._experiment = experiment
        self._engine = engine
        self._space = space
        self._journal = folder.journal
        self.records: list[TrialRecord] = []
        self.stale: frozenset[int] = frozenset()
        self.calibration = Calibration()
        self._seen: dict[str, int] = {}
        self._study = _create(folder.journal, experiment, len(records))
        self._queue = deque([("baseline", Candidate(dict(experiment.space.baseline))), *interrupted])
        self._queue.extend(("recipe", Candidate(dict(recipe))) for recipe in experiment.space.recipes)
        seed = experiment.search.seed + len(records)  # a resumed search must not draw the same points again
        self._pool = Pool(experiment, engine, space, seed) if experiment.search.sampler == "pool" else None
        for record in records:
            self._remember(record)
            if record.optuna_number is not None:
                self._study.add_trial(_frozen(record, self._space, experiment))
        if self.stale:
            self._forget()

    @property
    def launches(self) -> int:
        """Launches that count against the budget."""
        return sum(1 for record in self.records if record.launched and record.outcome.counts)

    @property
    def bar(self) -> float | None:
        """The value that a trial must reach to be of use: that of the last finalist, if the search ended now, or the
        baseline's or ``HOPELESS`` less than the best where that is better; None where nothing can be said yet."""
        values: dict[bool, list[float]] = {True: [], False: []}
        for record in self.records:
            scored = objective.score(self._experiment, record.measurements)
            comparable = record.value is not None and record.number not in self.stale
            if comparable and scored is not None and scored.meets_limits:
                values[record.role in drift.BASELINES].append(scored.value)
        places = max(1, self._experiment.search.finalists)
        larger = objective.maximized(self._experiment.objective)
        best = sorted(values[False], reverse=larger)
        beaten = 1 - HOPELESS if larger else 1 + HOPELESS
        bars = [*values[True][-1:], *best[places - 1 : places], *(value * beaten for value in best[:1])]
        if not bars:
            return None
        return max(bars) if larger else min(bars)

    def ask(self) -> Proposal | None:
        """The next candidate that was not seen before, the baseline first; None when nothing is left.

        The baseline alone is launched again, after a few trials: see ``drift``.
        """
        if drift.anchor_is_due(self._experiment, self.records):
            candidate = Candidate(dict(self._experiment.space.baseline))
            config = self._engine.canonical(candidate)
            return Proposal(
                len(self.records), "anchor", candidate, config, self._foresee(candidate, config, "anchor")[0]
            )
        if not self._is_pools_turn() and (proposal := self._next_queued()) is not None:
            return proposal
        return self._from_pool(self._pool) if self._pool is not None else self._from_sampler()

    def _from_pool(self, pool: Pool) -> Proposal | None:
        chosen = pool.choose(self.records, self._seen, self.calibration, self.stale)
        if chosen is None:
            return self._next_queued()
        return self._propose("search", chosen, self._open(chosen))

    def _from_sampler(self) -> Proposal | None:
        for _ in range(MAX_ASKS):
            trial = self._study.ask()
            candidate = self._space.suggest(trial)
            if self._space.violated(candidate):
                self._forbid(trial)
                continue
            proposal = self._propose("search", candidate, trial)
            if proposal is not None:
                return proposal
        for candidate in self._space.sample(MAX_RANDOM_DRAWS, seed=self._experiment.search.seed + len(self.records)):
            if self._is_new(candidate):
                proposal = self._propose("search", candidate, self._open(candidate))
                if proposal is not None:
                    return proposal
        return None

    def _is_pools_turn(self) -> bool:
        """Recipes and the pool's own choices take turns: what the forecast promises need not wait for all recipes."""
        counting = (record for record in reversed(self.records) if record.launched and record.outcome.counts)
        last = next(counting, None)
        return self._pool is not None and last is not None and last.role == "recipe"

    def _next_queued(self) -> Proposal | None:
        while self._queue:
            role, candidate = self._queue.popleft()
            proposal = self._propose(role, candidate, self._open(candidate))
            if proposal is not None:
                return proposal
        return None

    def tell(self, proposal: Proposal, record: TrialRecord) -> None:
        """Take the outcome of a proposal in. An interruption or an infrastructure failure teaches nothing."""
        self._remember(record)
        if record.role == "anchor" and self.stale:
            self._forget()
        if proposal.trial is None:
            return
        if not record.outcome.counts:
            self._study.tell(proposal.trial, state=TrialState.FAIL)
            return
        for key, value in constraints(record, self._experiment).items():
            proposal.trial.set_constraint(key, value)
        for step, value in intermediate(record, self._experiment).items():
            proposal.trial.report(value, step)
        proposal.trial.set_user_attr("record", record.number)
        proposal.trial.set_user_attr("outcome", f"{record.outcome.kind}: {record.outcome.cause}")
        if record.value is None:
            self._study.tell(proposal.trial, state=TrialState.PRUNED)
        else:
            self._study.tell(proposal.trial, record.value)

    def _propose(self, role: str, candidate: Candidate, trial: Trial | None) -> Proposal | None:
        """A proposal if the candidate is a server that was not seen yet, else None."""
        try:
            config = self._engine.canonical(candidate)
        except RefusedError as refused:
            return self._refused(role, candidate, trial, refused)
        if config.key in self._seen:
            self._drop(trial)
            return None
        forecast_, skip_ = self._foresee(candidate, config, role)
        return Proposal(len(self.records), role, candidate, config, forecast_, skip_, trial)

    def _refused(self, role: str, candidate: Candidate, trial: Trial | None, refused: RefusedError) -> Proposal | None:
        """A candidate that the engine's own rules exclude: launched only where the forecast may not decide."""
        config = refused.config or ServerConfig(tuple(sorted(candidate.values.items())))
        if config.key in self._seen:
            self._drop(trial)
            return None
        skip = Outcome(OutcomeKind.REJECTED, Cause.CONFIG_INCOMPATIBLE, Phase.FORECAST, str(refused))
        launch = refused.config is not None and self._experiment.search.forecast != "prune"
        forecast = Forecast("refused", (str(refused),))
        return Proposal(
            len(self.records), role, candidate, config, forecast, skip=None if launch else skip, trial=trial
        )

    def _foresee(self, candidate: Candidate, config: ServerConfig, role: str) -> tuple[Forecast | None, Outcome | None]:
        if self._experiment.search.forecast == "off":
            return None, None
        forecast = self._engine.forecast(config, self.calibration)
        if self._experiment.search.forecast != "prune" or role == "baseline":
            return forecast, None
        if forecast.verdict == "does_not_fit":
            return forecast, Outcome(
                OutcomeKind.INFEASIBLE, Cause.FORECAST, Phase.FORECAST, "; ".join(forecast.reasons)
            )
        repeated = feasibility.dominating(candidate, self.records, self._experiment.space)
        if repeated is not None:
            detail = f"needs no less memory than trial {repeated.number}, which ended as {repeated.outcome.cause}"
            return forecast, Outcome(OutcomeKind.INFEASIBLE, Cause.DOMINATED, Phase.FORECAST, detail)
        return forecast, None

    def retry(self, proposal: Proposal) -> None:
        """Ask for this candidate once more, before any other."""
        self._queue.appendleft((proposal.role, proposal.candidate))

    def _is_new(self, candidate: Candidate) -> bool:
        try:
            return self._engine.canonical(candidate).key not in self._seen
        except RefusedError:
            return False

    def _open(self, candidate: Candidate) -> Trial | None:
        """An Optuna trial with exactly these values, None where the candidate is no point of the space."""
        if not self._space.contains(candidate):
            return None
        self._study.enqueue_trial(self._space.parameters_of(candidate))
        trial = self._study.ask()
        self._space.suggest(trial)
        return trial

    def _forbid(self, trial: Trial) -> None:
        """Tell a point that breaks the space's own constraints, which Optuna does not know, as infeasible."""
        trial.set_constraint("fits", 0.0)
        trial.set_constraint("runs", 1.0)
        trial.set_user_attr("outcome", "breaks the space's constraints")
        self._study.tell(trial, state=TrialState.PRUNED)

    def _drop(self, trial: Trial | None) -> None:
        if trial is not None:
            trial.set_user_attr("outcome", "duplicate")
            self._study.tell(trial, state=TrialState.FAIL)

    def _forget(self) -> None:
        """Let what was measured on another host, as it were, be launched again; what failed there fails here as well.

        The journal is made anew: the samplers must not see these values either.
        """
        told = [record for record in self.records if record.optuna_number is not None]
        self._seen = {
            record.config.key: record.number
            for record in self.records
            if record.outcome.counts and (record.number not in self.stale or not record.outcome.started)
        }
        self._study = _create(self._journal, self._experiment, len(self.records))
        for record in told:
            shown = replace(record, value=None, measurements=()) if record.number in self.stale else record
            self._study.add_trial(_frozen(shown, self._space, self._experiment))

    def _remember(self, record: TrialRecord) -> None:
        self.records.append(record)
        if record.outcome.counts:
            self._seen.setdefault(record.config.key, record.number)
        if record.facts is not None:
            self.calibration = self._engine.calibrated(self.calibration, record.facts)
        self.stale = drift.not_comparable(self._experiment, self.records)


def constraints(record: TrialRecord, experiment: Experiment) -> dict[str, float]:
    """Constraint values of a trial for Optuna; positive is violated.

    Feasibility is kept apart from the value, so that a good region beside the edge of memory is not taken for a bad
    one. Every trial of a run carries the same keys.
    """
    kind = record.outcome.kind
    values = {
        "fits": 1.0 if kind is OutcomeKind.INFEASIBLE else 0.0,
        "runs": 0.0 if kind in (OutcomeKind.COMPLETE, OutcomeKind.PRUNED, OutcomeKind.INFEASIBLE) else 1.0,
    }
    scored = objective.score(experiment, record.measurements)
    for name in experiment.objective.limits:
        excess = dict(scored.excess) if scored else {}
        values[name] = min(excess.get(name, 0.0), 10.0)
    return values


def intermediate(record: TrialRecord, experiment: Experiment) -> dict[int, float]:
    """The objective's metric by load level, for Optuna: of a trial that was stopped early it is all there is."""
    found = {item.concurrency: objective.metric(item, experiment.objective.metric) for item in record.measurements}
    return {level: value for level, value in found.items() if level is not None and value is not None}


def _create(journal: Path, experiment: Experiment, told: int) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("optuna").setLevel(logging.WARNING)
    for leftover in journal.parent.glob(journal.name + "*"):
        leftover.unlink()
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)  # TPE's group is one
    seed = experiment.search.seed + told  # a resumed search must not draw the same points again
    sampler: optuna.samplers.BaseSampler
    if experiment.search.sampler == "random":
        sampler = optuna.samplers.RandomSampler(seed=seed)
    elif experiment.search.sampler == "gp":
        sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=STARTUP_TRIALS)
    else:
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS, group=True)
    return optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(journal))),
        study_name=experiment.name,
        sampler=sampler,
        direction="maximize" if objective.maximized(experiment.objective) else "minimize",
    )


def _frozen(record: TrialRecord, space: Space, experiment: Experiment) -> FrozenTrial:
    values = space.parameters_of(record.candidate)
    distributions: dict[str, BaseDistribution] = {name: space.distributions[name] for name in values}
    told = {"record": record.number, "outcome": f"{record.outcome.kind}: {record.outcome.cause}"}
    if not record.outcome.counts:  # it says nothing of the configuration
        return optuna.trial.create_trial(
            state=TrialState.FAIL, params=values, distributions=distributions, user_attrs=told
        )
    return optuna.trial.create_trial(
        state=TrialState.PRUNED if record.value is None else TrialState.COMPLETE,
        value=record.value,
        params=values,
        distributions=distributions,
        constraints=constraints(record, experiment),
        intermediate_values=intermediate(record, experiment),
        user_attrs=told,
    )
