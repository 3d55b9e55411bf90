from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "read_a_run.ipynb"


def test_the_example_notebook_runs_from_top_to_bottom(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN", str(finished))
    names: dict[str, Any] = {}
    for number, cell in enumerate(json.loads(NOTEBOOK.read_text())["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    assert list(names["speeds"].columns) == [1, 4, 16, 32]
    assert len(names["table"]) == 5
    assert names["error"].abs().max() < 0.02
    assert names["figures"]["progress"].figure is not None
