from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import analysis
from analysis.failures import explain
from analysis.frames import Run
from bench.engines.protocol import Candidate
from bench.outcome import Cause, Outcome, OutcomeKind


def planted(finished: Path) -> Run:
    """120 trials in which only the pair (fraction, steps) decides, and three more parameters vary."""
    run = analysis.load(finished)
    records = []
    for number in range(120):
        fraction, steps = 0.6 + 0.003 * ((number * 37) % 120), number % 3
        values = {"fraction": fraction, "steps": steps, "a": (number * 7) % 5, "b": number % 2 == 0, "c": number}
        fits = fraction > 0.65 + 0.1 * steps
        outcome = Outcome(OutcomeKind.COMPLETE) if fits else Outcome(OutcomeKind.INFEASIBLE, Cause.OOM_GPU_KV_POOL)
        records.append(replace(run.records[0], number=number, candidate=Candidate(values), outcome=outcome))
    return replace(run, records=tuple(records))


def test_the_pair_that_decides_is_found(finished: Path) -> None:
    found = explain(planted(finished))
    assert found is not None
    assert set(found.parameters) == {"fraction", "steps"}
    assert found.share > 0.6


def test_parameters_that_have_nothing_to_do_with_it_explain_about_nothing(finished: Path) -> None:
    run = planted(finished)
    keep = ("a", "b")
    records = [
        replace(record, candidate=Candidate({name: record.candidate.values[name] for name in keep}))
        for record in run.records
    ]
    found = explain(replace(run, records=tuple(records)))
    assert found is not None
    assert found.share < 0.1


def test_where_all_fail_the_causes_are_told_apart(failed: Path) -> None:
    found = explain(analysis.load(failed))
    assert found is not None
    assert "mem_fraction_static" in found.parameters


def test_nothing_is_explained_where_nothing_failed(single: Path) -> None:
    assert explain(analysis.load(single)) is None
