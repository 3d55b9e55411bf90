from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import analysis
from analysis.frames import AnalysisError
from analysis.importance import importance


def test_the_parameter_that_decides_the_value_weighs_most(finished: Path) -> None:
    run = analysis.load(finished)
    records = tuple(
        replace(record, value=1000.0 * float(str(record.candidate.values.get("mem_fraction_static", 0.8))))
        for record in run.records
    )
    found = importance(replace(run, records=records))
    assert max(found.shares, key=lambda name: found.shares[name]) == "mem_fraction_static"
    assert sum(found.shares.values()) == pytest.approx(1.0)


def test_trials_that_were_stopped_early_take_part(finished: Path) -> None:
    run = analysis.load(finished)
    assert importance(run).stopped_early == (run.trials["kind"] == "pruned").sum()


def test_too_few_trials_are_said_to_be_too_few(finished: Path) -> None:
    run = analysis.load(finished)
    with pytest.raises(AnalysisError, match=r"at least 10 measured trials of the search, there are [1-9]"):
        importance(replace(run, records=run.records[:8]))


def test_a_journal_that_cannot_be_read_is_no_reason_to_fail(tmp_path: Path, single: Path) -> None:
    run = analysis.load(single)
    with pytest.raises(AnalysisError, match=r"no study\.journal"):
        importance(run)
    (tmp_path / "study.journal").write_text("not a journal\n")
    with pytest.raises(AnalysisError, match="cannot be read"):
        importance(replace(run, path=tmp_path))
