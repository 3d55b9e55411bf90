"""Real SGLang on the CPU, swept once for all tests that look at the run.

``SWEEP_SGLANG_PYTHON`` names an interpreter that has SGLang 0.5.15 (how to make one: README of
``sglang_cpu`` beside this repository), ``SWEEP_TINY_MODEL`` a tiny model's folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TINY = Path(os.environ.get("SWEEP_TINY_MODEL", Path(__file__).parents[3] / "shared" / "sglang_cpu" / "tiny"))
PYTHON = os.environ.get("SWEEP_SGLANG_PYTHON", "")


def sweep(results: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "bench.sweep",
            "+experiment=cpu_smoke",
            f"model.path={TINY}",
            f"engine.python={PYTHON}",
            f"results_dir={results}",
            "run=real",
            *overrides,
        ],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A sweep in two commands: the second goes on where the first's budget ended."""
    results = tmp_path_factory.mktemp("results")
    first = sweep(
        results, "search.forecast=advise", "search.trials=4", "search.finalists=0", "search.finalist_rounds=0"
    )
    second = sweep(
        results, "search.forecast=advise", "search.trials=6", "search.finalists=1", "search.finalist_rounds=2"
    )
    assert second.returncode == 0, first.stdout + first.stderr + second.stdout + second.stderr
    return results / "cpu_smoke" / "real", second.stdout
