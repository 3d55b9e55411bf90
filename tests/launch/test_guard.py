"""A harness that dies leaves nothing, and what its guard could not end the next command does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.launch import pidfile
from bench.launch.processes import ProcessIdentity, command_line, identify, processes
from bench.launch.reaping import reap

from .conftest import REPOSITORY, SERVER, Launchpad, stranger, until

# A harness of its own: launches a server that has a child in another session, says so, and works on until it is killed.
HARNESS = f"""
import asyncio, os, sys, multiprocessing, time
from pathlib import Path
from bench.engines.protocol import Command
from bench.launch.gpus import Gpus
from bench.launch.ports import reserve
from bench.launch.server import Server
async def main():
    code = {SERVER!r}.replace("{{begin}}", sys.argv[2])
    with reserve() as port:
        server = await Server.start(
            Command((sys.executable, "-c", code, str(port.port))), folder=Path(sys.argv[1]), port=port,
            launch_id=sys.argv[3], environment=dict(os.environ), gpus=Gpus(visible=""))
        if "fork" in sys.argv:  # a worker that inherits the guard's pipe, and outlives us
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,)).start()
        print(server.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
WITH_CHILD = """
p = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(600)"],
                     start_new_session=True)
print("CHILD", p.pid, flush=True)
"""


@dataclass
class Harness:
    """A harness process with one launched server."""

    process: subprocess.Popen[str]
    pad: Launchpad
    server: ProcessIdentity

    @property
    def guard(self) -> int:
        """Pid of the guard, a child of the harness."""
        (pid,) = [
            pid
            for pid, process in processes().items()
            if process.parent == self.process.pid and "bench.launch.guard" in command_line(pid)
        ]
        return pid

    async def child(self) -> ProcessIdentity:
        child = identify(int(await self.pad.log_has("CHILD")))
        assert child is not None
        return child

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def launch(pad: Launchpad, *arguments: str) -> Harness:
    pad.port.release()
    process = subprocess.Popen(
        [sys.executable, "-c", HARNESS, str(pad.folder), WITH_CHILD, pad.launch_id, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert process.stdout is not None
    server = identify(int(process.stdout.readline()))
    assert server is not None
    return Harness(process, pad, server)


@pytest.fixture
def harness(pad: Launchpad) -> Iterator[Harness]:
    harness = launch(pad)
    yield harness
    harness.kill()


async def test_kill_9_of_the_harness_leaves_nothing(harness: Harness) -> None:
    child = await harness.child()
    harness.kill()
    await until(lambda: not harness.server.is_alive and not child.is_alive, 10, "the end of the server and its child")
    assert harness.pad.family().find() == []


async def test_kill_9_before_the_server_has_done_anything_leaves_nothing(harness: Harness) -> None:
    harness.kill()
    await until(lambda: not harness.server.is_alive, 10, "the end of the server")
    await until(lambda: not harness.pad.family().find(), 10, "the end of whatever it started")


async def test_a_worker_that_inherited_the_guards_pipe_does_not_keep_the_server_alive(pad: Launchpad) -> None:
    harness = launch(pad, "fork")
    workers = [
        pid
        for pid, process in processes().items()
        if process.parent == harness.process.pid and pid != harness.server.pid
    ]
    harness.kill()
    await until(lambda: not harness.server.is_alive, 10, "the end of the server")
    for pid in workers:
        if "bench.launch.guard" not in command_line(pid):
            os.kill(pid, signal.SIGKILL)


async def test_the_guard_stands_signals_that_everybody_gets(harness: Harness) -> None:
    child = await harness.child()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(harness.guard, number)
    harness.kill()
    await until(lambda: not harness.server.is_alive and not child.is_alive, 10, "the end of the server and its child")


async def test_the_next_command_says_what_the_guard_ended(harness: Harness) -> None:
    harness.kill()
    await until((harness.pad.folder / "guard.txt").exists, 20, "the guard's account")
    (reaped,) = reap(harness.pad.folder.parent)
    assert f"pid {harness.server.pid} (" in reaped.describe()
    assert "its guard had ended" in reaped.describe()
    assert sorted(path.name for path in harness.pad.folder.iterdir()) == ["command.sh", "server.log"]
    assert reap(harness.pad.folder.parent) == []


async def test_the_next_command_ends_what_is_left_when_the_guard_was_killed_too(harness: Harness) -> None:
    child = await harness.child()
    os.kill(harness.guard, signal.SIGKILL)
    harness.kill()
    assert harness.server.is_alive

    (reaped,) = reap(harness.pad.folder.parent)

    assert {f"pid {harness.server.pid}", f"pid {child.pid}"} <= {" ".join(text.split()[:2]) for text in reaped.ended}
    assert reaped.left == ()
    assert not harness.server.is_alive
    assert not child.is_alive
    assert not (harness.pad.folder / "launch.json").exists()


async def test_a_key_in_the_log_of_a_dead_harness_is_taken_out_by_the_next_command(harness: Harness) -> None:
    await harness.pad.log_has("fired up")
    harness.kill()
    await until(lambda: not harness.server.is_alive, 10, "the end of the server")
    log = harness.pad.folder / "server.log"
    log.write_text("server_args=ServerArgs(api_key='very secret', port=1)\n")
    reap(harness.pad.folder)
    assert log.read_text() == "server_args=ServerArgs(api_key='[redacted]', port=1)\n"


async def test_the_server_of_a_harness_that_lives_is_left_alone(harness: Harness) -> None:
    assert reap(harness.pad.folder.parent) == []
    assert harness.server.is_alive
    assert (harness.pad.folder / "launch.json").exists()


def left_behind(folder: Path, server_pid: int, **changes: object) -> None:
    """A pid file of a harness that died, as it would name this process as its server."""
    server = identify(server_pid)
    ourselves = identify(os.getpid())
    assert server is not None
    assert ourselves is not None
    dead = ProcessIdentity(2**22 - 1, 1, ourselves.boot_id, ourselves.pid_namespace, "harness")
    folder.mkdir()
    pidfile.write(folder / "launch.json", pidfile.PidFile("no such id", 1, str(folder / "server.log"), 0, dead, server))
    data = json.loads((folder / "launch.json").read_text())
    for path, value in changes.items():
        part, _, key = path.partition("__")
        data[part][key] = value
    (folder / "launch.json").write_text(json.dumps(data))


@pytest.mark.parametrize(
    "changes",
    [
        {"leader__start_time": 1},
        {"harness__boot_id": "00000000-0000-0000-0000-000000000000"},
        {"harness__pid_namespace": "pid:[1]"},
    ],
    ids=["recycled pid", "another boot or host", "another container"],
)
def test_a_process_that_cannot_be_proved_ours_is_left_alone(tmp_path: Path, changes: dict[str, object]) -> None:
    with stranger("") as other:
        left_behind(tmp_path / "0001", other.pid, **changes)
        reap(tmp_path)
        assert other.poll() is None
        other.communicate("\n")
    assert other.returncode == 0


def test_a_server_that_writes_where_a_renamed_folder_was_is_left_alone(tmp_path: Path) -> None:
    """A process that hung in the driver kept its pid file, and the trial was begun again beside it."""
    folder = tmp_path / "0005"
    left_behind(folder, os.getpid(), leader__start_time=1)
    kept = folder.rename(tmp_path / "0005.interrupted-1")
    folder.mkdir()
    with (
        (folder / "server.log").open("w") as log,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=log) as other,
    ):
        (reaped,) = reap(tmp_path)
        assert (reaped.folder, reaped.ended) == (kept, ())
        assert other.poll() is None
        other.communicate(b"\n")
    assert other.returncode == 0


def test_a_file_that_is_no_pid_file_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "launch.json").write_text('{"pid": 1')
    assert reap(tmp_path) == []
