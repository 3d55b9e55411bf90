"""Feasibility: what launches that ran out of memory say about candidates that were not launched yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bench.engines.protocol import Candidate, Value
from bench.experiment import Parameter, SpaceSpec
from bench.outcome import OutcomeKind
from bench.records import TrialRecord


def dominating(candidate: Candidate, records: Iterable[TrialRecord], space: SpaceSpec) -> TrialRecord | None:
    """A launch that ran out of memory and that this candidate can only repeat, else None.

    The fault's own advice decides the direction, since memory messages give opposite ones: a candidate repeats the
    failure when it moves no implicated flag as advised, needs no less memory by any other parameter that is declared
    monotone, and is equal in the rest.
    """
    for record in records:
        if record.outcome.kind is OutcomeKind.INFEASIBLE and record.launched and _repeats(candidate, record, space):
            return record
    return None


def _repeats(candidate: Candidate, record: TrialRecord, space: SpaceSpec) -> bool:
    advised = {advice.flag.lstrip("-").replace("-", "_"): advice.direction for advice in record.outcome.flags}
    failed, values = record.candidate.values, candidate.values
    return all(_no_better(parameter, advised.get(parameter.name), failed, values) for parameter in space.parameters)


def _no_better(
    parameter: Parameter, advice: str | None, failed: Mapping[str, Value], values: Mapping[str, Value]
) -> bool:
    before, after = failed.get(parameter.name), values.get(parameter.name)
    if before == after:
        return True
    if not isinstance(before, (int, float)) or not isinstance(after, (int, float)):
        return False
    demand = {"lower": "up", "raise": "down"}.get(advice or "", parameter.memory)
    if demand == "up":
        return after >= before
    if demand == "down":
        return after <= before
    return False
