"""Whatever a server does, nothing of it is left after it was stopped, or it is named."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bench.engines.protocol import Command
from bench.launch import pidfile
from bench.launch.gpus import Gpus
from bench.launch.log import LogFollower
from bench.launch.processes import identify, process_of
from bench.launch.server import LaunchError, Server, Teardown, kill_live_servers
from bench.outcome import Cause, OutcomeKind
from bench.secrets import REDACTED

from .conftest import LISTENS, WAIT, Launchpad, stranger, until

CHILD = "import time; print('CHILD up', flush=True); time.sleep(600)"
IGNORES_SIGTERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
# Each is started by the server and tells its pid in the log.
ESCAPES = {
    "child in the group": "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])",
    "child that called setsid": (
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)"
    ),
    "child that ignores SIGTERM": (
        "p = subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(15, 1); time.sleep(600)'])"
    ),
    "daemon that closed its output": """
r, w = os.pipe()
if os.fork() == 0:
    os.setsid()
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        time.sleep(600)
    os.write(w, str(pid).encode())
    os._exit(0)
class p: pid = int(os.read(r, 20))
os.wait()
""",
    "daemon without our environment": """
r, w = os.pipe()
if os.fork() == 0:
    os.setsid()
    pid = os.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"], {})
    os.write(w, str(pid).encode())
    os._exit(0)
class p: pid = int(os.read(r, 20))
os.wait()
""",
}


@pytest.mark.parametrize("escape", ESCAPES.values(), ids=ESCAPES.keys())
async def test_no_child_outlives_its_server(pad: Launchpad, escape: str) -> None:
    server = await pad.start(f"{escape}\nprint('CHILD', p.pid, flush=True)")
    child = identify(int(await pad.log_has("CHILD")))
    assert child is not None
    await pad.log_has("fired up")
    assert {server.pid, child.pid} <= server.pids()

    teardown = await server.stop(grace_s=5, deadline_s=10)

    assert teardown.group_gone, teardown
    assert teardown.port_free, teardown
    assert teardown.gpu_memory_back is None  # there is no GPU here
    assert teardown.stragglers == ()
    assert not child.is_alive
    assert pad.family().find() == []


async def test_a_child_that_hides_every_mark_is_known_from_having_been_seen(pad: Launchpad) -> None:
    """Empty environment, other output, other session, and at last no parent: but we saw it while it had one."""
    child = (
        "[sys.executable, '-c', 'import time; time.sleep(600)'], env={}, stdout=-3, stderr=-3, start_new_session=True"
    )
    server = await pad.start(f"p = subprocess.Popen({child}); print('CHILD', p.pid, flush=True)")
    pid = int(await pad.log_has("CHILD"))
    assert pid in server.pids()
    os.kill(server.pid, 9)
    await until(lambda: not server.alive, 5, "the server's death")

    assert (await server.stop(deadline_s=10)).stragglers == ()

    assert process_of(pid) is None or not process_of(pid).runs


async def test_a_server_that_ends_on_sigterm_is_not_killed(pad: Launchpad) -> None:
    code = "signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), os._exit(0)))"
    async with await pad.start(code) as server:
        await pad.log_has("fired up")
        teardown = await server.stop(grace_s=20)
    assert teardown.stragglers == ()
    assert server.exit_code == 0
    assert server.log.tail(1) == ["bye"]


async def test_a_server_that_ignores_sigterm_is_killed_after_its_grace(pad: Launchpad) -> None:
    server = await pad.start(IGNORES_SIGTERM)
    await pad.log_has("fired up")
    teardown = await server.stop(grace_s=0.3, deadline_s=10)
    assert teardown.stragglers == ()
    assert server.exit_code == -9
    assert teardown.duration_s >= 0.3


async def test_a_dead_server_gets_no_grace_and_its_children_go(pad: Launchpad) -> None:
    server = await pad.start(f"subprocess.Popen([sys.executable, '-c', {CHILD!r}])\nos.read(0, 1); os._exit(3)")
    await pad.log_has("CHILD up")
    await until(lambda: not server.alive, 10, "the server's exit")
    teardown = await server.stop(grace_s=1000, deadline_s=10)
    assert teardown.stragglers == ()
    assert server.exit_code == 3
    assert pad.family().find() == []


async def test_stopping_twice_gives_one_answer(pad: Launchpad) -> None:
    async with await pad.start() as server:
        first, second = await asyncio.gather(server.stop(grace_s=5), server.stop(grace_s=5))
        assert first is second is await server.stop()


async def test_cancelling_who_waits_does_not_stop_the_stopping(pad: Launchpad) -> None:
    server = await pad.start(IGNORES_SIGTERM)
    await pad.log_has("fired up")
    waiting = asyncio.ensure_future(server.stop(grace_s=0.3, deadline_s=10))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await server.stop()).stragglers == ()


async def test_an_error_between_launch_and_stop_leaves_nothing(pad: Launchpad) -> None:
    with pytest.raises(RuntimeError):
        async with await pad.start() as server:
            raise RuntimeError("load generator failed")
    assert not server.alive
    assert pad.family().find() == []


async def test_killing_at_once_needs_no_event_loop(pad: Launchpad) -> None:
    server = await pad.start(IGNORES_SIGTERM)
    await pad.log_has("fired up")
    kill_live_servers()
    assert server.exit_code == -9
    assert pad.family().find() == []
    assert (await server.stop()).stragglers == ()


async def test_a_stranger_on_the_port_is_named_and_left_alone(pad: Launchpad) -> None:
    server = await pad.start(WAIT)
    with stranger(LISTENS, str(pad.port.port)) as other:
        teardown = await server.stop(grace_s=0, deadline_s=5)
        assert other.poll() is None
        other.communicate("\n")
    assert teardown.group_gone
    assert not teardown.port_free
    assert f"port {pad.port.port} is held by pid {other.pid} (" in teardown.stragglers[0]


async def test_a_process_that_got_the_pid_of_a_member_is_left_alone(pad: Launchpad) -> None:
    """As if a member had died and its pid had been given to somebody else: start times differ."""
    with stranger("") as other:
        async with await pad.start() as server:
            server._family.known[other.pid] = 1
            assert other.pid not in server.pids()
        assert other.poll() is None
        other.communicate("\n")
    assert other.returncode == 0


async def test_what_a_server_prints_is_in_its_log_in_order_with_a_line_end_or_not(pad: Launchpad) -> None:
    code = "print('one'); sys.stderr.write('two\\n'); print('three', end=''); sys.exit(4)"
    async with await pad.start(code) as server:
        await until(lambda: not server.alive, 10, "the server's exit")
        assert server.log.new_lines(final=True) == ["one", "two", "three"]
        assert server.exit_code == 4


async def test_a_program_that_does_not_exist_is_said_so(pad: Launchpad) -> None:
    with pytest.raises(LaunchError, match="cannot launch /nowhere/python") as caught:
        await Server.start(
            Command(("/nowhere/python", "-m", "server")),
            folder=pad.folder,
            port=pad.port,
            launch_id=pad.launch_id,
            environment={},
            gpus=Gpus(visible=""),
        )
    assert caught.value.outcome.cause is Cause.MISSING_DEPENDENCY
    assert caught.value.outcome.kind is OutcomeKind.INFRASTRUCTURE
    assert not (pad.folder / "launch.json").exists()


async def test_an_argument_that_no_process_can_have_leaves_nothing(pad: Launchpad) -> None:
    with pytest.raises(ValueError, match="null byte"):
        await pad.start(arguments=("a\0b",))
    assert not list(pad.folder.glob("launch.json"))
    assert not pad.family().find()


@pytest.mark.parametrize("writes_that_work", [0, 1], ids=["before the server starts", "after it has started"])
async def test_a_full_disk_at_launch_is_said_so_and_leaves_nothing(
    pad: Launchpad, monkeypatch: pytest.MonkeyPatch, writes_that_work: int
) -> None:
    write, written = pidfile.write, []

    def write_until_full(path: Path, pid_file: pidfile.PidFile) -> None:
        if len(written) == writes_that_work:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        written.append(path)
        write(path, pid_file)

    monkeypatch.setattr(pidfile, "write", write_until_full)
    with pytest.raises(LaunchError, match="No space left on device") as caught:
        await pad.start(WAIT)
    assert caught.value.outcome.cause is Cause.DISK_FULL
    assert pad.family().find() == []


async def test_a_disk_that_fills_up_later_does_not_disturb_the_watch(
    pad: Launchpad, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await pad.start(f"p = subprocess.Popen([sys.executable, '-c', {CHILD!r}])") as server:
        await pad.log_has("CHILD up")
        monkeypatch.setattr(pidfile, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        assert len(server.pids()) == 2
    assert pad.family().find() == []


async def test_two_commands_cannot_launch_in_one_folder(pad: Launchpad) -> None:
    async with await pad.start(WAIT):
        with pytest.raises(LaunchError, match="belongs to a command that runs: pid"):
            await pad.start(WAIT)


async def test_a_second_attempt_in_a_folder_has_a_log_of_its_own(pad: Launchpad) -> None:
    for text in ("first", "second"):
        async with await pad.start(f"print({text!r})\n{WAIT}") as server:
            await pad.log_has(text)
    assert server.log.tail(5) == ["second"]


async def test_no_secret_reaches_a_file(pad: Launchpad, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "inherited-secret")
    code = "print('ARGS', sys.argv[2:], os.environ['HF_TOKEN'], os.environ['MY_PASSWORD'])"
    async with await pad.start(
        code, env={"MY_PASSWORD": "added-secret", "SOME_FLAG": "it's on"}, arguments=("--api-key", "flag-secret")
    ) as server:
        await pad.log_has("fired up")
        server.pids()
        assert server.redact("no flag-secret") == f"no {REDACTED}"
        while_running = (pad.folder / "launch.json").read_text()
    files = {path.name: path.read_text() for path in pad.folder.iterdir()}
    assert set(files) == {"command.sh", "server.log"}
    for text in (*files.values(), while_running):
        for secret in ("inherited-secret", "added-secret", "flag-secret"):
            assert secret not in text
    assert f"ARGS ['--api-key', '{REDACTED}'] {REDACTED} {REDACTED}" in files["server.log"]
    assert "Secrets are left out" in files["command.sh"]
    assert f"'MY_PASSWORD={REDACTED}'" in files["command.sh"]


async def test_killing_at_once_leaves_no_secret_in_the_log(pad: Launchpad) -> None:
    code = "print('ARGS', os.environ['MY_PASSWORD'], flush=True)"
    server = await pad.start(code, env={"MY_PASSWORD": "added-secret"})
    await pad.log_has("fired up")
    kill_live_servers()
    assert f"ARGS {REDACTED}\n" in (pad.folder / "server.log").read_text()
    assert not (pad.folder / "launch.json").exists()
    await server.stop()


async def test_a_log_that_cannot_be_written_when_killing_at_once_is_left_to_the_next_command(
    pad: Launchpad, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await pad.start(WAIT, env={"MY_PASSWORD": "added-secret"})
    with monkeypatch.context() as patch:
        patch.setattr(LogFollower, "take_out", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        kill_live_servers()
    assert not server.alive
    assert (pad.folder / "launch.json").exists()
    await server.stop()


async def test_the_command_file_runs_the_same_command(pad: Launchpad) -> None:
    code = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['X']]))"
    words = ["--json-model-override-args", '{"a": "it\'s $HOME"}', "--flag", "x y", "*"]
    async with await pad.start(program=code, env={"X": "a b"}, arguments=tuple(words)) as server:
        await until(lambda: not server.alive, 10, "the end of the command")
    path = pad.folder / "command.sh"
    assert path.stat().st_mode & stat.S_IXUSR
    printed = subprocess.run([path], capture_output=True, text=True, check=True).stdout  # noqa: ASYNC221
    assert json.loads(printed) == [[str(pad.port.port), *words], "a b"]
    assert printed == (pad.folder / "server.log").read_text()


async def test_the_pid_file_names_harness_and_server_and_is_gone_after_the_stop(pad: Launchpad) -> None:
    path = pad.folder / "launch.json"
    async with await pad.start(WAIT) as server:
        data = json.loads(path.read_text())
        assert data["harness"]["pid"] == os.getpid()
        assert data["leader"]["pid"] == server.pid
        assert data["port"] == pad.port.port
        assert len(data["harness"]["boot_id"]) == 36
    assert not path.exists()


async def test_the_server_gets_a_session_of_its_own_and_no_terminal_input(pad: Launchpad) -> None:
    async with await pad.start("print('INPUT', os.read(0, 5), flush=True)") as server:
        assert os.getsid(server.pid) == os.getpgid(server.pid) == server.pid
        assert await pad.log_has("INPUT") == "b''"


async def test_what_does_not_end_is_reported_with_its_pid_and_stays_in_the_pid_file(
    pad: Launchpad, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process that hangs in the driver (state D), which no signal ends."""
    server = await pad.start(WAIT)
    with monkeypatch.context() as patch:
        patch.setattr("bench.launch.processes._send", lambda *_: None)
        teardown: Teardown = await server.stop(grace_s=0.05, deadline_s=0.1)
    assert not teardown.group_gone
    assert f"pid {server.pid} (" in teardown.stragglers[0]
    assert "does not end (state S)" in teardown.stragglers[0]
    assert (pad.folder / "launch.json").exists()
    server.kill()


def test_modules_that_the_guard_needs_import_without_site_packages() -> None:
    code = "import sys; sys.path.append(sys.argv[1]); import bench.launch.reaping, bench.launch.guard"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-I", "-S", "-c", code, str(root)], check=True)
