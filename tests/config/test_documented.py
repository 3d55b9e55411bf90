"""What docs/experiment.md shows is an experiment that can be checked as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import check

PAGE = Path(__file__).parents[2] / "docs" / "experiment.md"


def test_the_documented_experiment_can_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(r"```yaml\n# (mine/\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "mine" / "prompts.jsonl").write_text('{"prompt": "Why?", "output_tokens": 64}\n')
    assert check.main(["--config-dir", "mine", "+experiment=support"]) == 0
    said = capsys.readouterr().out
    assert "hardware  ada48: 45.0 GiB" in said
    assert "limits    ttft_s.p95 <= 0.5 s" in said
    assert "prompts: jsonl from mine/prompts.jsonl, 1 of them\n" in said
    assert "constraint: max_running_requests <= 128 * mem_fraction_static - 48" in said
