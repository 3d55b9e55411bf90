"""Failures of real SGLang on the CPU, by its own fault hooks, and kill -9 of the harness while it starts and serves."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.outcome import Cause, OutcomeKind
from tests.faults.sweeps import Sweep, assert_intact, assert_nothing_left, cleaned_up, until
from tests.real.conftest import PYTHON, TINY

pytestmark = [
    pytest.mark.real_engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="SWEEP_SGLANG_PYTHON names no interpreter with SGLang"),
    pytest.mark.skipif(not TINY.is_dir(), reason=f"no tiny model in {TINY}; SWEEP_TINY_MODEL names another folder"),
]

ENGINE = (f"model.path={TINY}", f"engine.python={PYTHON}", "search.trials=1")
START_DEADLINE_S = 300


@pytest.fixture
def swept(tmp_path: Path) -> Iterator[Sweep]:
    with cleaned_up(Sweep(tmp_path / "results", experiment="cpu_smoke")) as made:
        yield made


@pytest.mark.parametrize(
    ("phase", "line"), [("start", "server_args="), ("load", "POST /generate")], ids=["start", "load"]
)
def test_kill_9_of_the_harness_leaves_nothing_of_sglang(swept: Sweep, phase: str, line: str) -> None:
    long = ("workload.min_window_s=1e5", "workload.max_window_s=1e6") if phase == "load" else ()
    process = swept.command(*ENGINE, *long)
    until(lambda: process.poll() is not None or line in swept.log_of(0), f"{line!r} in the log", START_DEADLINE_S)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGKILL)
    swept.finish(process)
    assert_nothing_left(swept, after_kill=True)
    assert not swept.trials


def test_a_scheduler_that_crashes_under_load_is_a_crash_with_its_line(swept: Sweep) -> None:
    swept.finish(swept.command(*ENGINE, "+engine.env.SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS='300'"))
    assert swept.code == 3, swept.output
    outcome = swept.trials[0].outcome
    assert (outcome.kind, outcome.cause) == (OutcomeKind.CRASHED, Cause.ENGINE_CRASH)
    assert "concurrent requests" in outcome.detail
    assert outcome.line is not None
    assert "Test crash after stream_output" in outcome.line
    assert outcome.line in swept.log_of(0)
    assert "stopped: engine_crash: " in swept.output
    assert_nothing_left(swept)
    assert_intact(swept)


def test_a_scheduler_that_is_stuck_in_its_start_is_a_hang(swept: Sweep) -> None:
    swept.finish(
        swept.command(*ENGINE, "+engine.env.SGLANG_TEST_STUCK_SCHEDULER_INIT='600'", "engine.stall_timeout_s=8")
    )
    assert swept.code == 3, swept.output
    outcome = swept.trials[0].outcome
    assert (outcome.kind, outcome.cause) == (OutcomeKind.HUNG, Cause.STARTUP_HANG)
    assert "made no progress for" in outcome.detail
    assert_nothing_left(swept)
    assert_intact(swept)
