"""Ctrl-C in each phase of a sweep: it ends in good order within ten seconds, says how to go on, and leaves nothing."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.launch.interrupts import CLEAN_END_S
from tests.faults.sweeps import Sweep, assert_intact, assert_nothing_left, cleaned_up, until

FOR_EVER = ("workload.min_window_s=1e6", "workload.max_window_s=1e7")


def logged(text: str) -> Callable[[Sweep], bool]:
    return lambda swept: text in swept.log_of(0)


# Phase: what makes it long, and what shows that the sweep is in it.
PHASES: dict[str, tuple[tuple[str, ...], Callable[[Sweep], bool]]] = {
    "start-up": (("engine.faults=['slow_start:9000']",), logged("This server is simulated")),
    "load": (FOR_EVER, logged("POST /generate")),
    "teardown": (("engine.faults=['slow_stop:9000']", "engine.stop_timeout_s=60"), logged("SIGTERM received")),
    "between trials": (("search.trials=50",), lambda swept: len(swept.trials) >= 1),
}


@pytest.fixture(
    params=[
        "start-up",
        "load",
        pytest.param("teardown", marks=pytest.mark.slow),
        pytest.param("between trials", marks=pytest.mark.slow),
    ]
)
def in_phase(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Sweep, subprocess.Popen[str]]]:
    more, reached = PHASES[request.param]
    with cleaned_up(Sweep(tmp_path / "results")) as swept:
        process = swept.command(*more)
        until(lambda: process.poll() is not None or reached(swept), f"{request.param} to begin")
        assert process.poll() is None, process.communicate()
        yield swept, process


def test_ctrl_c_ends_in_good_order_and_says_how_to_go_on(in_phase: tuple[Sweep, subprocess.Popen[str]]) -> None:
    swept, process = in_phase
    begin_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    swept.finish(process)
    assert time.monotonic() - begin_s < CLEAN_END_S + 5  # the limit itself, and a loaded machine
    assert swept.code == 128 + signal.SIGINT, swept.output
    command = swept.output.partition("go on with: ")[2]
    assert f"--config-dir {' '.join(swept.words()[1:2])}" in command
    assert "+experiment=injected" in command
    assert "run=one" in command
    assert "Traceback" not in swept.output
    assert_nothing_left(swept)
    assert_intact(swept)


def test_a_second_ctrl_c_is_immediate_and_still_leaves_nothing(tmp_path: Path) -> None:
    with cleaned_up(Sweep(tmp_path / "results")) as swept:
        process = swept.command(*FOR_EVER, "engine.faults=[ignore_sigterm]", "engine.stop_timeout_s=600")
        until(lambda: logged("POST /generate")(swept), "load")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        swept.finish(process, timeout_s=10)
        assert swept.code == 128 + signal.SIGINT
        assert "go on with: python -m bench.sweep" in swept.output
        assert_nothing_left(swept, after_kill=True)
        assert "Traceback" not in swept.output
