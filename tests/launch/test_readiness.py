"""Ready means alive, in possession of the port, and answering; anything else is an outcome, known soon."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest

from bench.launch.readiness import Ready, wait_failure, wait_ready
from bench.launch.server import Server
from bench.outcome import Cause, Outcome, OutcomeKind, Phase

from .conftest import LISTENS, SERVER, WAIT, FakeReader, Launchpad, stranger, until

BUSY = """
import threading
def work():
    while True:
        sum(range(100000)); time.sleep(0.002)
threading.Thread(target=work, daemon=True).start()
"""


async def wait(
    server: Server,
    health: Callable[[], Awaitable[bool]],
    *,
    reader: FakeReader | None = None,
    start_timeout_s: float = 20.0,
    stall_timeout_s: float = 20.0,
    phases: list[Phase] | None = None,
) -> Ready | Outcome:
    return await wait_ready(
        server,
        log_reader=reader or FakeReader(),  # type: ignore[arg-type]
        health=health,
        start_timeout_s=start_timeout_s,
        stall_timeout_s=stall_timeout_s,
        on_phase=(phases if phases is not None else []).append,
    )


async def test_a_server_that_serves_is_ready(pad: Launchpad) -> None:
    async with await pad.start() as server:
        ready = await wait(server, pad.healthy)
        assert isinstance(ready, Ready), ready
        assert server.alive
        assert 0 < ready.duration_s < 20


async def test_the_phases_of_a_start_are_told_and_timed(pad: Launchpad) -> None:
    phases: list[Phase] = []
    code = "print('PHASE load', flush=True); time.sleep(0.3); print('PHASE kv_alloc', flush=True)"
    async with await pad.start(code) as server:
        ready = await wait(server, pad.healthy, phases=phases)
    assert isinstance(ready, Ready)
    assert phases == [Phase.ARGS, Phase.LOAD, Phase.KV_ALLOC]
    assert [phase for phase, _ in ready.phases] == phases
    assert sum(seconds for _, seconds in ready.phases) == pytest.approx(ready.duration_s)
    assert all(seconds >= 0 for _, seconds in ready.phases)


async def test_a_server_that_binds_late_is_waited_for(pad: Launchpad) -> None:
    async with await pad.start("time.sleep(0.7)") as server:
        ready = await wait(server, pad.healthy)
        assert isinstance(ready, Ready)
        assert ready.duration_s >= 0.7


async def test_a_worker_of_the_server_may_be_the_one_that_listens(pad: Launchpad) -> None:
    """SGLang with several tokenizer workers; here the worker also left the session."""
    worker = SERVER.replace("{begin}", "")
    program = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, '-c', {worker!r}, sys.argv[1]], start_new_session=True)
{WAIT}
"""
    async with await pad.start(program=program) as server:
        assert isinstance(await wait(server, pad.healthy), Ready)
    assert pad.family().find() == []


async def test_an_exit_is_known_at_once_with_code_and_line(pad: Launchpad) -> None:
    async with await pad.start("print('FATAL oom_gpu_kv_pool at 3 GB', flush=True); os._exit(7)") as server:
        outcome = await wait(server, pad.healthy, start_timeout_s=600, stall_timeout_s=600)
    assert isinstance(outcome, Outcome)
    assert (outcome.kind, outcome.cause) == (OutcomeKind.INFEASIBLE, Cause.OOM_GPU_KV_POOL)
    assert outcome.line == "FATAL oom_gpu_kv_pool at 3 GB"
    assert outcome.line_number == 1
    assert "exited with code 7" in outcome.detail


async def test_a_decisive_line_ends_the_wait_though_the_server_lingers(pad: Launchpad) -> None:
    async with await pad.start(f"print('FATAL oom_gpu_weights', flush=True)\n{WAIT}") as server:
        outcome = await wait(server, pad.healthy, start_timeout_s=600, stall_timeout_s=600)
        assert isinstance(outcome, Outcome)
        assert outcome.cause is Cause.OOM_GPU_WEIGHTS
        assert "still runs" in outcome.detail
        assert server.alive


async def test_what_a_dying_server_still_prints_belongs_to_the_verdict(pad: Launchpad) -> None:
    reader = FakeReader()
    code = (
        "print('FATAL engine_crash', flush=True); time.sleep(0.3); print('last words', end='', flush=True); os._exit(1)"
    )
    async with await pad.start(code) as server:
        await wait(server, pad.healthy, reader=reader)
    assert reader.lines == ["FATAL engine_crash", "last words"]


async def test_a_death_without_a_word_is_unknown(pad: Launchpad) -> None:
    async with await pad.start("os.kill(os.getpid(), 9)") as server:
        outcome = await wait(server, pad.healthy)
    assert isinstance(outcome, Outcome)
    assert (outcome.kind, outcome.cause, outcome.line) == (OutcomeKind.CRASHED, Cause.UNKNOWN, None)
    assert "exited with code -9" in outcome.detail


async def test_a_silent_kill_is_host_memory_if_the_kernel_says_so(
    pad: Launchpad, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await pad.start("os.kill(os.getpid(), 9)") as server:
        monkeypatch.setattr("bench.launch.server.oom_kills", lambda: 10**9)
        outcome = await wait(server, pad.healthy)
    assert isinstance(outcome, Outcome)
    assert (outcome.kind, outcome.cause) == (OutcomeKind.INFEASIBLE, Cause.OOM_HOST)


async def test_a_stranger_on_the_port_is_never_taken_for_the_server(pad: Launchpad) -> None:
    """The port was stolen, the thief answers health, and the server believes that it is ready."""
    async with await pad.start(f"print('fired up and ready', flush=True)\n{WAIT}") as server:
        with stranger(LISTENS, str(pad.port.port)) as thief:

            async def lying_health() -> bool:
                return True

            outcome = await wait(server, lying_health)
            thief.communicate("\n")
    assert isinstance(outcome, Outcome)
    assert (outcome.kind, outcome.cause) == (OutcomeKind.INFRASTRUCTURE, Cause.FOREIGN_SERVER)
    assert f"pid {thief.pid} (" in outcome.detail
    assert str(pad.port.port) in outcome.detail


async def test_a_port_clash_names_who_holds_the_port(pad: Launchpad) -> None:
    with stranger(LISTENS, str(pad.port.port)) as holder:
        async with await pad.start("print('FATAL port_in_use', flush=True); os._exit(3)") as server:
            await until(lambda: not server.alive, 10, "the server's exit")
            outcome = await wait(server, pad.healthy)
        holder.communicate("\n")
    assert isinstance(outcome, Outcome)
    assert (outcome.kind, outcome.cause) == (OutcomeKind.INFRASTRUCTURE, Cause.PORT_IN_USE)
    assert f"is held by pid {holder.pid} (" in outcome.detail


async def test_a_server_that_listens_but_is_not_healthy_is_not_ready(pad: Launchpad) -> None:
    async def unhealthy() -> bool:
        return False

    async with await pad.start() as server:
        outcome = await wait(server, unhealthy, stall_timeout_s=0.8)
    assert isinstance(outcome, Outcome)
    assert outcome.cause is Cause.STARTUP_HANG


async def test_health_that_never_answers_does_not_stop_the_watch(pad: Launchpad) -> None:
    asked = []

    async def silent() -> bool:
        asked.append(True)
        os.kill(server.pid, 9)  # it dies while it is asked
        await asyncio.Event().wait()
        return True

    async with await pad.start() as server:
        outcome = await wait(server, silent)
    assert isinstance(outcome, Outcome)
    assert "exited with code -9" in outcome.detail
    assert asked == [True]


async def test_silence_without_work_is_a_hang(pad: Launchpad) -> None:
    async with await pad.start(f"print('PHASE load', flush=True)\n{WAIT}") as server:
        outcome = await wait(server, pad.healthy, stall_timeout_s=1.5)
    assert isinstance(outcome, Outcome)
    assert (outcome.kind, outcome.cause, outcome.phase) == (OutcomeKind.HUNG, Cause.STARTUP_HANG, Phase.LOAD)
    assert "no progress" in outcome.detail
    assert outcome.line == "PHASE load"


@pytest.mark.slow
async def test_silent_work_in_a_child_is_no_hang_until_the_start_takes_too_long(pad: Launchpad) -> None:
    code = f"subprocess.Popen([sys.executable, '-c', {('import time' + BUSY + WAIT)!r}])\n{WAIT}"
    async with await pad.start(code) as server:
        outcome = await wait(server, pad.healthy, stall_timeout_s=2.0, start_timeout_s=4.0)
    assert isinstance(outcome, Outcome)
    assert outcome.cause is Cause.STARTUP_HANG
    assert "not ready after 4 s" in outcome.detail


async def test_a_start_that_takes_too_long_while_it_works_is_called_slow(pad: Launchpad) -> None:
    code = "print('PHASE graph_capture', flush=True)\nfor i in range(500): print(i, flush=True); time.sleep(0.1)"
    async with await pad.start(code) as server:
        outcome = await wait(server, pad.healthy, stall_timeout_s=60.0, start_timeout_s=1.5)
    assert isinstance(outcome, Outcome)
    assert (outcome.cause, outcome.phase) == (Cause.STARTUP_HANG, Phase.GRAPH_CAPTURE)
    assert "still compiling or capturing graphs: slow, not stuck" in outcome.detail


async def test_a_progress_bar_is_progress(pad: Launchpad) -> None:
    code = "for i in range(10): print(f'\\r{i}/10', end='', flush=True); time.sleep(0.1)"
    async with await pad.start(code) as server:
        assert isinstance(await wait(server, pad.healthy, stall_timeout_s=0.8), Ready)


async def test_a_death_while_serving_is_noticed(pad: Launchpad) -> None:
    reader = FakeReader()
    code = """
import threading
def die():
    while not os.path.exists(sys.argv[2]): time.sleep(0.01)
    print('FATAL illegal_memory_access', flush=True); os._exit(1)
threading.Thread(target=die, daemon=True).start()
"""
    signal_file = pad.folder / "die"
    async with await pad.start(code, arguments=(str(signal_file),)) as server:
        assert isinstance(await wait(server, pad.healthy, reader=reader), Ready)
        signal_file.touch()
        outcome = await wait_failure(server, log_reader=reader)  # type: ignore[arg-type]
    assert outcome.kind is OutcomeKind.CRASHED
    assert outcome.cause is Cause.ILLEGAL_MEMORY_ACCESS
    assert outcome.line == "FATAL illegal_memory_access"


async def test_a_secret_in_the_proving_line_is_taken_out(pad: Launchpad) -> None:
    code = "print('FATAL hub_access with', os.environ['HF_TOKEN'], flush=True); os._exit(1)"
    async with await pad.start(code, env={"HF_TOKEN": "very-secret"}) as server:
        outcome = await wait(server, pad.healthy)
    assert isinstance(outcome, Outcome)
    assert outcome.line == "FATAL hub_access with [redacted]"
