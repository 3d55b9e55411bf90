"""Run folders that several tests read; none of them writes into one but below ``report/``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from analysis.report import write_report
from tests.analysis.runs import make_run


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a journal and every way to end a trial."""
    return make_run(tmp_path_factory.mktemp("runs") / "toy" / "finished", trials=40, journal=True)


@pytest.fixture(scope="session")
def finished_page(finished: Path) -> Path:
    return write_report(finished)


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "toy" / "running", trials=9, finalists=False, planned=30)


@pytest.fixture(scope="session")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which nothing fitted, at low and at high memory fractions for opposite reasons."""
    return make_run(tmp_path_factory.mktemp("runs") / "toy" / "failed", trials=12, always_fail=True)


@pytest.fixture(scope="session")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on a real H200 that is kept with the documentation."""
    kept = Path(__file__).parents[2] / "docs" / "runs" / "h200-mtp"
    left_out = shutil.ignore_patterns("report", "picked")
    return shutil.copytree(kept, tmp_path_factory.mktemp("runs") / "h200-mtp", ignore=left_out)


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "toy" / "single", trials=1, finalists=False)
