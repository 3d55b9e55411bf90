from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import analysis
from analysis.compare import compare, main
from analysis.frames import AnalysisError
from tests.analysis.runs import make_run


def run(folder: Path, name: str, **options: Any) -> Path:
    return make_run(folder / "toy" / name, trials=12, **options)


def test_the_same_speed_is_no_difference(tmp_path: Path) -> None:
    comparison = compare([analysis.load(run(tmp_path, name, seed=seed)) for name, seed in (("one", 4), ("two", 4))])
    assert {row.verdict for row in comparison.rows} == {"no difference"}
    assert {(row.role, row.level) for row in comparison.rows} >= {("best", 32), ("baseline", 1)}
    assert comparison.changed == ()


def test_another_engine_that_is_faster_is_better_and_named(tmp_path: Path) -> None:
    old, new = run(tmp_path, "old"), run(tmp_path, "new", speed=1.4)
    for name in ("trials.jsonl", "finalists.jsonl"):
        file = new / name
        file.write_text(file.read_text().replace("sglang 0.5.15", "sglang 0.5.20"))
    comparison = compare([analysis.load(old), analysis.load(new)])
    decisive = next(row for row in comparison.rows if (row.role, row.level) == ("baseline", 32))
    assert decisive.verdict == "better"
    assert decisive.difference.mean == pytest.approx(0.4, abs=0.05)
    assert "engine: sglang 0.5.15 in toy/old, sglang 0.5.20 in toy/new." in comparison.changed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"workload": {"output_tokens": 64}}, "workload.output_tokens is 512 in toy/one and 64 in toy/other"),
        ({"workload": {"prompts": {"kind": "random_ids"}}}, "workload.prompts is"),
        ({"objective": {"level": 16}}, "the deciding load is 32 in toy/one and 16 in toy/other"),
        ({"objective": {"limits": {"ttft_s.p95": 1.0}}}, "the limits are none in toy/one and ttft_s.p95 1"),
    ],
)
def test_what_is_not_comparable_is_refused_with_the_reason(
    tmp_path: Path, changed: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = run(tmp_path, "one"), run(tmp_path, "other", settings=changed)
    assert main([str(one), str(other)]) == 2
    assert message in capsys.readouterr().err


def test_simulated_and_real_numbers_are_not_compared(tmp_path: Path) -> None:
    runs = [analysis.load(run(tmp_path, str(simulated), simulated=simulated)) for simulated in (True, False)]
    with pytest.raises(AnalysisError, match="toy/True has numbers with simulated engine, toy/False has none"):
        compare(runs)


def test_a_run_without_success_is_not_comparable(tmp_path: Path, failed: Path) -> None:
    with pytest.raises(AnalysisError, match="toy/failed has no valid measurement"):
        compare([analysis.load(run(tmp_path, "one")), analysis.load(failed)])


def test_two_changes_at_once_are_not_laid_at_the_door_of_either(tmp_path: Path) -> None:
    one = run(tmp_path, "one")
    other = run(tmp_path, "other", settings={"model": {"name": "qwen9b"}, "engine": {"flags": {"page_size": 64}}})
    changed = compare([analysis.load(one), analysis.load(other)]).changed
    assert any("More than one thing changed" in text for text in changed)


@pytest.mark.parametrize(("speed", "code", "word"), [(0.5, 1, "Regression"), (1.0, 0, "No regression"), (2.0, 0, "No")])
def test_a_regression_is_an_exit_code(
    tmp_path: Path, speed: float, code: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = run(tmp_path, "old", seed=4), run(tmp_path, "new", seed=4, speed=speed)
    arguments = [str(old), str(new), "--regression", "--tolerance", "0.1", "--role", "baseline"]
    assert main(arguments) == code
    assert word in capsys.readouterr().out


def test_what_the_noise_hides_is_undecided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = run(tmp_path, "old", seed=4), run(tmp_path, "new", seed=4)
    assert main([str(old), str(new), "--regression", "--tolerance", "0.0001"]) == 3
    assert "more finalist rounds would narrow the interval" in capsys.readouterr().out
