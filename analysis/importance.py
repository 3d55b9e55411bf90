"""Importance: how much each parameter decides whether a trial is among the best."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import optuna
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, create_trial

from analysis.frames import AnalysisError, Run, measurement_at, metric_interval
from bench.outcome import OutcomeKind
from bench.records import TrialRecord

MIN_TRIALS = 10
BEST_SHARE = 0.1
MIN_BEST = 5  # of fewer trials no distribution can be seen


@dataclass(frozen=True)
class Importance:
    """Shares by parameter, which add up to one; ``best`` of ``trials`` were held against all of them."""

    shares: dict[str, float]
    best: int
    trials: int
    stopped_early: int


def importance(run: Run) -> Importance:
    """PED-ANOVA over the journal's trials.

    A trial that was stopped early has no value in the journal; what it gave until then ranks it, since all that the
    measure asks is which trials are among the best.

    Raises:
        AnalysisError: there is no journal, it cannot be read, or too few trials were measured.
    """
    told = _told(run)
    records = {record.optuna_number: record for record in run.records if record.optuna_number is not None}
    measured = [(trial, records[trial.number]) for trial in told if trial.number in records]
    values = [(trial, record, value) for trial, record in measured if (value := _value(run, record)) is not None]
    if len(values) < MIN_TRIALS:
        raise AnalysisError(f"it takes at least {MIN_TRIALS} measured trials of the search, there are {len(values)}")
    study = optuna.create_study(direction="maximize" if run.objective.larger_is_better else "minimize")
    study.add_trials(
        [
            create_trial(params=trial.params, distributions=trial.distributions, value=value)
            for trial, _, value in values
        ]
    )
    best = max(MIN_BEST, round(BEST_SHARE * len(values)))
    evaluator = PedAnovaImportanceEvaluator(target_quantile=best / len(values))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shares = get_param_importances(study, evaluator=evaluator)
    except (ValueError, RuntimeError) as error:
        raise AnalysisError(str(error)) from error
    if not any(math.isfinite(share) and share > 0 for share in shares.values()):
        raise AnalysisError("no parameter tells the best trials from the others")
    early = sum(record.outcome.kind is OutcomeKind.PRUNED for _, record, _ in values)
    return Importance(shares, best, len(values), early)


def _told(run: Run) -> list[FrozenTrial]:
    if not run.journal.exists():
        raise AnalysisError("this run has no study.journal")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        storage = JournalStorage(JournalFileBackend(str(run.journal)))
        names = optuna.get_all_study_names(storage)
        return optuna.load_study(study_name=names[0], storage=storage).get_trials(deepcopy=False)
    except (IndexError, KeyError, ValueError, OSError) as error:
        raise AnalysisError(f"study.journal cannot be read ({type(error).__name__})") from error


def _value(run: Run, record: TrialRecord) -> float | None:
    if record.outcome.kind is OutcomeKind.COMPLETE:
        return record.value
    measurement = measurement_at(record, run.objective.level)
    if record.outcome.kind is not OutcomeKind.PRUNED or measurement is None:
        return None
    value = metric_interval(measurement, run.objective.metric)
    return None if value is None else value.mean
