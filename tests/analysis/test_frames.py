from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import analysis
from analysis.frames import AnalysisError, column
from bench.outcome import OutcomeKind
from bench.records import RunFolder
from tests.analysis.runs import LEVELS, make_run

FRAMES_PAGE = Path(__file__).parents[2] / "docs" / "frames.md"


def test_each_trial_and_each_level_is_one_row(finished: Path) -> None:
    run = analysis.load(finished)
    assert list(run.trials["trial"]) == list(range(40))
    assert set(run.finalists["round"]) == {1, 2}
    assert set(run.trials["kind"]) == {str(kind) for kind in OutcomeKind} - {"mismatched"}
    baseline = run.measurements[run.measurements["trial"] == 0]
    assert list(baseline["concurrency"]) == list(LEVELS)
    assert (baseline["output_tok_per_s_low"] < baseline["output_tok_per_s"]).all()
    assert (baseline["ttft_p95_s"] > baseline["ttft_p50_s"]).all()


def test_asked_and_effective_parameters_stand_side_by_side(finished: Path) -> None:
    parameters = analysis.load(finished).parameters
    fixed = parameters[(parameters["trial"] == 0) & (parameters["parameter"] == "load_format")].iloc[0]
    assert (fixed["searched"], fixed["asked"], fixed["effective"]) == (False, None, "dummy")
    left = parameters[(parameters["trial"] == 0) & (parameters["parameter"] == "mem_fraction_static")].iloc[0]
    assert (left["searched"], left["asked"], left["effective"]) == (True, None, None)


def test_columns_keep_their_types_whatever_the_run_holds(tmp_path: Path, finished: Path) -> None:
    empty = analysis.load(make_run(tmp_path / "toy" / "empty", trials=0))
    full = analysis.load(finished)
    for name in ("trials", "measurements"):
        nothing, everything = getattr(empty, name), getattr(full, name)
        assert list(nothing.columns) == list(everything.columns)
        assert not [column for column in everything if everything[column].dtype == object]
    assert not len(empty.trials)
    assert isinstance(full.trials["started_at"].dtype, pd.DatetimeTZDtype)


def test_every_column_is_documented(finished: Path) -> None:
    page = FRAMES_PAGE.read_text()
    named = set(re.findall(r"`([a-z0-9_*]+)`", page))
    run = analysis.load(finished)
    for frame in (run.trials, run.measurements, run.parameters):
        for name in frame.columns:
            pattern = re.sub(r"_(mean|p50|p90|p95|p99|max)_s$", "_*_s", str(name))
            assert name in named or pattern in named, f"docs/frames.md does not mention {name}"


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "toy" / "cut", trials=3, finalists=False)
    trials = RunFolder(folder).trials
    trials.write_bytes(trials.read_bytes()[:-200])
    assert list(analysis.load(folder).trials["trial"]) == [0, 1]


def test_a_folder_without_a_run_is_told_and_the_runs_below_it_named(tmp_path: Path) -> None:
    make_run(tmp_path / "toy" / "one", trials=1, finalists=False)
    with pytest.raises(AnalysisError, match=r"is no run folder.*toy/one"):
        analysis.load(tmp_path)
    with pytest.raises(AnalysisError, match="does not exist"):
        analysis.load(tmp_path / "nothing")


def test_a_run_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "toy" / "newer", trials=1, finalists=False)
    trials = RunFolder(folder).trials
    trials.write_text(trials.read_text().replace('"schema_version":1', '"schema_version":99'))
    with pytest.raises(AnalysisError, match="newer"):
        analysis.load(folder)


def test_metric_names_lead_to_columns(finished: Path) -> None:
    columns = set(analysis.load(finished).measurements.columns)
    assert {column(name) for name in ("ttft_s.p95", "tpot_s.mean", "output_tok_per_s", "request_per_s")} <= columns


def test_importing_the_package_alone_does_not_load_pandas() -> None:
    code = "import sys, analysis; sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
