"""The dry run: what would be launched, what would not and why, on a machine without GPU and engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench import check


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert check.main(list(arguments)) == 0
    return capsys.readouterr().out.splitlines()


def test_what_failed_by_hand_stands_on_a_line_each_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    said = lines(capsys, "+experiment=mtp_rtx_pro_6000", "engine.version=0.5.12")
    assert any("refused" in line and "no_buffer with speculative decoding" in line for line in said)
    assert any("F = 0.80 with 48 running requests does not fit" in line for line in said)
    assert any("F = 0.95" in line and "at risk of running out of memory in capture or prefill" in line for line in said)


def test_from_0_5_20_on_the_first_of_them_is_the_renamed_flag(capsys: pytest.CaptureFixture[str]) -> None:
    said = lines(capsys, "+experiment=mtp_rtx_pro_6000", "engine.version=0.5.20")
    tried = said[next(number for number, line in enumerate(said) if line.startswith("tried 1")) + 1]
    assert "--mamba-scheduler-strategy is called --mamba-radix-cache-strategy in SGLang 0.5.20" in tried


def test_a_small_space_is_looked_at_whole(capsys: pytest.CaptureFixture[str]) -> None:
    said = lines(capsys, "+experiment=quickstart")
    assert "space     quick: 7 parameters, 400 points" in said
    assert any(line.startswith("configurations: all 400 points are 400 different servers") for line in said)
    assert any("flags checked against the table shipped for 0.5.15" in line for line in said)
    assert any(line.startswith("port ") and "free" in line for line in said)
    assert any(line.startswith("time ") for line in said)


def test_what_is_ruled_out_is_grouped_by_reason(capsys: pytest.CaptureFixture[str]) -> None:
    said = lines(capsys, "+experiment=mtp_b200", "engine.version=0.5.12")
    refused = said[next(number for number, line in enumerate(said) if line.startswith("refused: ")) + 1]
    assert " x --mamba-scheduler-strategy no_buffer with speculative decoding is refused" in refused


def test_the_question_that_is_put_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    said = lines(
        capsys, "+experiment=quickstart", "objective.limits={ttft_s.p95: 0.5}", "workload=chat", "workload.levels=[16]"
    )
    assert "best      largest output_tok_per_s at 16 concurrent requests" in said
    assert "limits    ttft_s.p95 <= 0.5 s" in said
    assert any(line.startswith("load      chat: ") and "50% of each a shared prefix" in line for line in said)
    latency = lines(capsys, "+experiment=quickstart", "objective=latency", "objective.level=4")
    assert "best      smallest tpot_s.p50 at 4 concurrent requests" in latency


def test_what_a_sweep_would_refuse_or_mix_up_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    said = lines(capsys, "+experiment=quickstart", "+engine.flags.mem_fraction_static=0.9")
    assert any("NOT NEUTRAL" in line and "SGLANG_SIMULATE_ACC_LEN" in line for line in said)
    assert any("mem_fraction_static also searched" in line for line in said)


def test_a_wrong_configuration_ends_with_code_2_and_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.check", "+experiment=mtp_b20"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": ""},
    )
    assert done.returncode == 2
    assert "closest: mtp_b200" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []  # nothing is written either
