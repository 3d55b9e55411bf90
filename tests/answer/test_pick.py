from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from bench import deployment
from bench.pick import main
from tests.answer.runs import as_fast_as_the_baseline, noisy


def picked(folder: Path) -> dict[str, object]:
    found: dict[str, object] = orjson.loads((folder / "best.json").read_bytes())
    return found


def test_everything_for_production_is_written_and_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    said = capsys.readouterr().out
    assert "Gain over the baseline (1,006): +50.0%" in said
    assert all((run / name).stat().st_size > 100 for name in deployment.FILES)
    assert picked(run)["trial"] == 1
    for name in ("launch.sh", "server.service", "compose.yaml"):
        assert "# Meant for 32 concurrent requests." in (run / name).read_text()


def test_another_load_has_another_best_and_says_that_it_was_measured_once(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run)]) == 0
    before = (run / "best.json").read_bytes()
    assert main([str(run), "--level", "4"]) == 0
    other = picked(run / "picked" / "level-4")
    assert (other["trial"], other["level"], other["verdict"]) == (2, 4, "not_measured_again")
    assert "output_tok_per_s at 4 concurrent requests: 400" in capsys.readouterr().out
    assert "It was not measured again" in (run / "picked" / "level-4" / "launch.sh").read_text()
    assert (run / "best.json").read_bytes() == before, "the answer to another question took the place of the run's own"


def test_a_limit_rules_out_what_is_faster_and_too_late(run: Path) -> None:
    assert main([str(run), "--limit", "ttft_s.p95<0.5"]) == 0
    found = picked(run / "picked" / "ttft_s.p95-0.5")
    assert (found["trial"], found["limits"]) == (2, {"ttft_s.p95": 0.5})


def test_the_simplest_within_a_few_percent_is_taken(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    as_fast_as_the_baseline(run, 0.04)
    assert main([str(run)]) == 0
    assert picked(run)["trial"] == 1
    assert main([str(run), "--simplest-within", "5"]) == 0
    assert picked(run / "picked" / "within-5")["trial"] == 0
    said = capsys.readouterr().out
    assert "Trial 1 (mem_fraction_static=0.8 mamba_ssm_dtype=bfloat16) is better, by +4.0%" in said
    assert "the baseline was taken because it lies within 5.0% of it" in said
    assert "No difference" not in said


def test_the_baseline_alone_measured_again_is_no_answer(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "finalists.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(lines[0])  # killed after the first launch of the first round
    assert main([str(run)]) == 3
    assert "no best configuration yet" in capsys.readouterr().err
    file.write_text("".join(lines[:3]))
    assert main([str(run)]) == 0
    assert "Not all launches of the finalists have been made" in capsys.readouterr().out
    file.write_text("".join(lines))
    assert main([str(run)]) == 0
    assert "Not all launches" not in capsys.readouterr().out


def test_what_was_measured_once_is_named_rather_than_a_baseline_that_is_far_slower(run: Path) -> None:
    # The two baselines differ by a tenth: with one degree of freedom that is an interval of hundreds of percent.
    noisy(run, 0.1)
    assert main([str(run), "--limit", "ttft_s.p95<0.5"]) == 0
    found = picked(run / "picked" / "ttft_s.p95-0.5")
    assert (found["trial"], found["verdict"]) == (2, "not_measured_again")


def test_limits_that_are_kept_are_said_and_nothing_is_picked_where_none_is(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "--limit", "ttft_s.p95<0.5"]) == 0
    assert "It keeps the limits: ttft_s.p95 0.2 (limit 0.5)" in capsys.readouterr().out
    assert main([str(run), "--limit", "ttft_s.p95<0.01"]) == 3
    assert "No configuration meets the limits; the nearest one has ttft_s.p95 0.2" in capsys.readouterr().out


def test_a_run_is_picked_from_where_its_engine_is_not_installed(h200: Path) -> None:
    assert main([str(h200), "--level", "1"]) == 0
    script = (h200 / "picked" / "level-1" / "launch.sh").read_text()
    assert '"$PYTHON" -m sglang.launch_server' in script
    assert "--speculative-algorithm NEXTN" in script
    assert main([str(h200)]) == 0
    assert picked(h200)["verdict"] == "no_difference"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--level", "7"], "--level 7 was not measured; measured were 4, 32"),
        (["--limit", "ttft_s.p95"], "expected METRIC<SECONDS"),
        (["--limit", "ttft.p95<1"], "ttft.p95 was not measured"),
        (["--simplest-within", "-3"], "expected a percentage"),
        (["--host", "a b"], "expected an address"),
    ],
)
def test_a_question_that_has_no_answer_is_refused(
    run: Path, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), *words]) == 2
    assert complaint in capsys.readouterr().err
    assert not (run / "best.json").exists()


def test_without_a_fresh_measurement_there_is_no_answer(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "finalists.jsonl").unlink()
    assert main([str(run)]) == 3
    assert "no best configuration yet: 3 trials, 3 of them measured" in capsys.readouterr().err
