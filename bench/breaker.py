"""Breaker: stops a sweep whose space, engine or host is broken, before a night is spent on it."""

from __future__ import annotations

from collections.abc import Sequence

from bench.experiment import SearchSpec
from bench.outcome import Outcome, OutcomeKind
from bench.records import TrialRecord

# Launches after the baseline without one success: a space in which nothing runs. Ten failures in a row have a chance
# of 0.1 % in a space of which half fits, the share that the measured spaces had.
HOPELESS_LAUNCHES = 10
MAX_INFRASTRUCTURE_RETRIES = 2
# Configurations in a row that the forecast excludes: then the rest of the space does not fit either, and a large one
# would never end. Where one in twenty fits, so many in a row have a chance of 2e-7.
MAX_SKIPPED = 300


def reason_to_stop(search: SearchSpec, records: Sequence[TrialRecord]) -> str | None:
    """Why the sweep should not go on, cause first; None while it should."""
    tried = [record for record in records if record.launched]
    if not tried:
        return None
    last = tried[-1]
    if last.outcome.kind is OutcomeKind.INFRASTRUCTURE:
        return _infrastructure(tried)
    counting = [record for record in tried if record.outcome.counts]
    baseline = [record for record in counting if record.role == "baseline"]
    if search.require_baseline and baseline and baseline[-1].outcome.kind is not OutcomeKind.COMPLETE:
        return (
            f"{_words(baseline[-1].outcome)}. The baseline must run before anything is compared with it: mend the "
            "experiment's fixed flags, or set space.baseline to what runs, or search.require_baseline=false"
        )
    if len(counting) >= search.max_same_failures:
        recent = counting[-search.max_same_failures :]
        if all(not record.outcome.started and record.outcome.cause == last.outcome.cause for record in recent):
            return (
                f"{_words(last.outcome)}. The last {len(recent)} launches died of the same cause: take what "
                "causes it out of the space, or raise search.max_same_failures"
            )
    others = [record for record in counting if record.role != "baseline"]
    if len(others) >= HOPELESS_LAUNCHES and all(not record.outcome.started for record in others):
        return f"{_words(last.outcome)}. None of {len(others)} launches succeeded: the space itself seems broken"
    return None


def _infrastructure(tried: Sequence[TrialRecord]) -> str | None:
    run = 0
    for record in reversed(tried):
        if record.outcome.kind is not OutcomeKind.INFRASTRUCTURE:
            break
        run += 1
    if run <= MAX_INFRASTRUCTURE_RETRIES:
        return None
    return f"{_words(tried[-1].outcome)}. The host failed {run} times in a row; no configuration was blamed for it"


def _words(outcome: Outcome) -> str:
    why = outcome.line or outcome.detail
    return f"{outcome.cause}: {why.strip()}" if why else str(outcome.cause)
