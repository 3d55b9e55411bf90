from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.answer.runs import measured_run

H200 = Path(__file__).parents[2] / "docs" / "runs" / "h200-mtp"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return measured_run(tmp_path)


@pytest.fixture
def h200(tmp_path: Path) -> Path:
    """The committed run; the interpreter and the model that it was measured with are not here."""
    return shutil.copytree(H200, tmp_path / "h200", ignore=shutil.ignore_patterns("report", "picked"))
