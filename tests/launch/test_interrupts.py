"""Ctrl-C ends in good order, twice ends at once, and neither leaves anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .conftest import REPOSITORY, SERVER, Launchpad, until

HARNESS = f"""
import asyncio, os, sys, time
import uvloop
from pathlib import Path
from bench.engines.protocol import Command
from bench.launch.gpus import Gpus
from bench.launch.interrupts import InterruptedByOperatorError, run_interruptible
from bench.launch.ports import reserve
from bench.launch.server import Server, kill_live_servers
async def work():
    code = {SERVER!r}.replace("{{begin}}", sys.argv[2])
    with reserve() as port:
        async with await Server.start(
            Command((sys.executable, "-c", code, str(port.port))), folder=Path(sys.argv[1]), port=port,
            launch_id=sys.argv[3], environment=dict(os.environ), gpus=Gpus(visible="")):
            print("WORKING", flush=True)
            if sys.argv[5] == "busy":
                deadline = time.monotonic() + 30
                while time.monotonic() < deadline:
                    pass
            if "stubborn" in sys.argv[5]:
                while True:
                    try: await asyncio.sleep(30)
                    except asyncio.CancelledError: pass
            await asyncio.Event().wait()
def say(text):
    if "terminal is gone" in sys.argv[5]: raise OSError(5, "Input/output error")
    print(text, flush=True)
def kill_now():
    kill_live_servers()
    say("killed")
async def main():
    try:
        await run_interruptible(work(), kill_now=kill_now, say=say,
                                clean_end_s=1.0 if "stubborn" in sys.argv[5] else 10.0)
    except InterruptedByOperatorError as error:
        print("CLEAN", flush=True)
        sys.exit(error.exit_code)
if __name__ == "__main__":
    (uvloop.run if sys.argv[4] == "uvloop" else asyncio.run)(main())
"""
IGNORES_SIGTERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


Launch = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def launch(pad: Launchpad) -> Iterator[Launch]:
    """Starts a harness that works until it is interrupted; it does not outlive the test."""
    started: list[subprocess.Popen[str]] = []

    def start(begin: str = "", loop: str = "asyncio", manner: str = "", **options: Any) -> subprocess.Popen[str]:
        pad.port.release()
        process = subprocess.Popen(
            [sys.executable, "-c", HARNESS, str(pad.folder), begin, pad.launch_id, loop, manner],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            **options,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "WORKING\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


async def nothing_is_left(pad: Launchpad) -> None:
    await until(lambda: not pad.family().find(), 5, "the end of the server")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_the_first_signal_ends_the_work_in_good_order(
    pad: Launchpad, launch: Launch, loop: str, number: signal.Signals
) -> None:
    process = launch(loop=loop)
    process.send_signal(number)
    output, errors = process.communicate(timeout=20)
    assert number.name in output
    assert "CLEAN" in output
    assert process.returncode == 128 + number
    assert errors == ""
    assert pad.family().find() == []
    assert not (pad.folder / "launch.json").exists()


@pytest.mark.slow
async def test_a_server_that_ignores_sigterm_is_ended_within_the_time_of_a_clean_end(
    pad: Launchpad, launch: Launch
) -> None:
    process = launch(IGNORES_SIGTERM)
    await pad.log_has("fired up")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert "CLEAN" in output
    assert pad.family().find() == []


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_the_second_signal_ends_it_at_once(pad: Launchpad, launch: Launch, loop: str) -> None:
    process = launch(IGNORES_SIGTERM, loop)
    await pad.log_has("fired up")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert "SIGINT" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert "CLEAN" not in output
    assert process.returncode == 130
    await nothing_is_left(pad)


async def test_a_busy_event_loop_does_not_hold_up_the_second_signal(pad: Launchpad, launch: Launch) -> None:
    process = launch(manner="busy")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    await nothing_is_left(pad)


async def test_work_that_will_not_be_cancelled_is_ended_after_its_time(pad: Launchpad, launch: Launch) -> None:
    process = launch(manner="stubborn")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    await nothing_is_left(pad)


async def test_a_lost_terminal_does_not_keep_the_work_from_ending_in_good_order(pad: Launchpad, launch: Launch) -> None:
    process = launch(manner="terminal is gone")
    process.send_signal(signal.SIGHUP)
    output, errors = process.communicate(timeout=20)
    assert "CLEAN" in output
    assert errors == ""
    assert process.returncode == 128 + signal.SIGHUP
    assert pad.family().find() == []


async def test_a_lost_terminal_does_not_keep_stubborn_work_alive(pad: Launchpad, launch: Launch) -> None:
    process = launch(manner="stubborn, terminal is gone")
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGHUP
    await nothing_is_left(pad)


async def test_sighup_stays_ignored_under_nohup(pad: Launchpad, launch: Launch) -> None:
    process = launch(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert "SIGHUP" not in output
    assert process.returncode == 130


async def test_ctrl_c_in_a_terminal_reaches_neither_server_nor_guard(pad: Launchpad, launch: Launch) -> None:
    """A terminal signals the whole foreground group; the server must not die of it before it was stopped in order."""
    begin = "signal.signal(signal.SIGINT, lambda *_: print('GOT SIGINT', flush=True))"
    process = launch(begin, start_new_session=True)
    await pad.log_has("fired up")
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert "CLEAN" in output
    assert "GOT SIGINT" not in (pad.folder / "server.log").read_text()
