"""A whole sweep against real SGLang on the CPU; ``conftest.py`` says what it needs."""

from __future__ import annotations

from pathlib import Path

import orjson
import psutil
import pytest

from bench import records
from bench.outcome import Cause, OutcomeKind
from tests.real.conftest import PYTHON, TINY

pytestmark = [
    pytest.mark.real_engine,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not PYTHON, reason="SWEEP_SGLANG_PYTHON names no interpreter with SGLang"),
    pytest.mark.skipif(not TINY.is_dir(), reason=f"no tiny model in {TINY}; SWEEP_TINY_MODEL names another folder"),
]


def by_cause(run: Path, cause: Cause) -> records.TrialRecord:
    return next(record for record in records.read(run / "trials.jsonl") if record.outcome.cause is cause)


def test_ends_with_a_configuration_and_its_evidence(run: tuple[Path, str]) -> None:
    folder, said = run
    answer = orjson.loads((folder / "best.json").read_bytes())
    assert answer["value"]["mean"] > 0
    assert not answer["simulated"]
    assert "Best configuration" in said
    assert (folder / "report" / "index.html").stat().st_size > 10_000


def test_the_resumed_sweep_launched_six_and_repeated_none(run: tuple[Path, str]) -> None:
    trials = records.read(run[0] / "trials.jsonl")
    counted = [record for record in trials if record.outcome.counts]
    assert len(counted) == 6
    assert len({record.config.key for record in counted}) == 6
    assert trials[0].role == "baseline"


def test_a_configuration_without_memory_is_infeasible_with_the_engines_own_line(run: tuple[Path, str]) -> None:
    record = by_cause(run[0], Cause.OOM_GPU_KV_POOL)
    assert record.outcome.kind is OutcomeKind.INFEASIBLE
    assert record.outcome.line is not None
    assert "Loaded weights leave no GPU memory" in record.outcome.line
    assert any(
        advice.flag == "--mem-fraction-static" and advice.direction == "raise" for advice in record.outcome.flags
    )


def test_a_refused_algorithm_is_rejected_and_never_best(run: tuple[Path, str]) -> None:
    record = by_cause(run[0], Cause.UNSUPPORTED_HARDWARE)
    assert record.outcome.kind is OutcomeKind.REJECTED
    assert record.value is None
    assert "Ngram speculative decoding only supports CUDA" in (record.outcome.line or "")


def test_the_servers_own_count_is_read_and_does_not_contradict_ours(run: tuple[Path, str]) -> None:
    # A window of seconds holds few of the engine's counting steps; tests/real/test_load.py has the strict comparison.
    measured = [item for record in records.read(run[0] / "trials.jsonl") for item in record.measurements if item.valid]
    assert measured
    for item in measured:
        assert item.server_output_tok_per_s is not None
        assert not [warning for warning in item.warnings if "the server counted" in warning]


def test_nothing_is_left_running(run: tuple[Path, str]) -> None:
    left = [
        process.pid
        for process in psutil.process_iter(["cmdline", "environ"])
        if str(run[0]) in " ".join(process.info["cmdline"] or [])
    ]
    assert not left
    assert not list(run[0].rglob("launch.json"))
