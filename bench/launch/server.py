"""Server: one launched server, from its command line until nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import shlex
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from bench.engines.protocol import Command
from bench.launch import pidfile
from bench.launch.gpus import Gpus, GpuUnreadableError
from bench.launch.guard import Guard
from bench.launch.log import LogFollower
from bench.launch.ports import Listener, PortReservation, listeners
from bench.launch.processes import (
    LAUNCH_ID_VARIABLE,
    Process,
    describe,
    identify,
    oom_kills,
    ticks_since_boot,
)
from bench.launch.reaping import reap
from bench.outcome import Cause, Outcome, OutcomeKind, Phase
from bench.secrets import REDACTED, redact_argv, redact_env, redact_text, secret_values

COMMAND_FILE_NAME = "command.sh"
LOG_FILE_NAME = "server.log"

# SGLang needs 5 to 8 s from SIGTERM to gone on an idle CPU server, 1 to 6 s on an H200.
GRACE_S = 15.0
# For each of group, port and GPU memory to come back after that. The driver frees 100 GB within seconds.
DEADLINE_S = 30.0
# When Ctrl-C has to end everything within 10 s.
INTERRUPTED_GRACE_S = 3.0

_PORT_POLL_S = 0.05

_CAUSES = {
    errno.ENOENT: Cause.MISSING_DEPENDENCY,
    errno.ENOEXEC: Cause.MISSING_DEPENDENCY,
    errno.EACCES: Cause.PERMISSION,
    errno.EPERM: Cause.PERMISSION,
    errno.EROFS: Cause.PERMISSION,
    errno.ENOSPC: Cause.DISK_FULL,
    errno.EDQUOT: Cause.DISK_FULL,
}

_live: set[Server] = set()


class LaunchError(Exception):
    """A server could not even be started; ``outcome`` says why, and never counts against the configuration."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(detail)
        self.outcome = Outcome(OutcomeKind.INFRASTRUCTURE, cause, Phase.ARGS, detail)


@dataclass(frozen=True)
class Teardown:
    """How a server ended.

    Attributes:
        group_gone: no process of the launch is left.
        port_free: nobody listens on its port.
        gpu_memory_back: the GPUs' memory is as before the launch; None where there is no GPU, or none that tells.
        stragglers: what did not come back, in words, each with its pid where it has one.
    """

    group_gone: bool
    port_free: bool
    gpu_memory_back: bool | None
    duration_s: float
    stragglers: tuple[str, ...] = ()


class Server:
    """A server and everything that belongs to it: process group, port, log, GPU memory, pid file.

    Made by ``start``; leaving ``async with`` stops it. If this process dies, its guard stops it.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        *,
        folder: Path,
        port: int,
        pid_file: pidfile.PidFile,
        guard: Guard,
        gpus: Gpus,
        gpu_baseline_bytes: tuple[int, ...],
        secrets: frozenset[str],
    ) -> None:
        self.folder = folder
        self.port = port
        self.log = LogFollower(folder / LOG_FILE_NAME)
        self.started_at_s = time.monotonic()
        self._process = process
        self._pid_file = pid_file
        self._family = pid_file.family()
        self._guard = guard
        self._gpus = gpus
        self._gpu_baseline_bytes = gpu_baseline_bytes
        self._secrets = secrets
        self._oom_kills = oom_kills()
        self._stopping: asyncio.Task[Teardown] | None = None

    @classmethod
    async def start(
        cls,
        command: Command,
        *,
        folder: Path,
        port: PortReservation,
        launch_id: str,
        environment: Mapping[str, str],
        gpus: Gpus,
    ) -> Server:
        """Start a server in a session and process group of its own, with stdout and stderr going to ``server.log``.

        Args:
            folder: of the trial; command.sh, server.log and launch.json are written into it.
            port: held until the caller releases it, which should be after ``stop``.
            launch_id: unique; marks every process of the launch.
            environment: what the server inherits; ``command.env`` is added.
            gpus: that it will use; what is in use of them now is what has to be free again after it.

        Raises:
            LaunchError: the program cannot be run, or the folder cannot be written.
        """
        environment = {**environment, **dict(command.env)}
        secrets = secret_values(environment, command.argv)
        try:
            await asyncio.to_thread(_make_room, folder)
            _write_command(folder / COMMAND_FILE_NAME, command, secrets)
            return cls._start(command, folder, port.port, launch_id, environment, gpus, secrets)
        except OSError as error:
            cause = _CAUSES.get(error.errno or 0, Cause.OTHER)
            raise LaunchError(cause, f"cannot launch {command.argv[0]} in {folder}: {error}") from error

    @classmethod
    def _start(
        cls,
        command: Command,
        folder: Path,
        port: int,
        launch_id: str,
        environment: Mapping[str, str],
        gpus: Gpus,
        secrets: frozenset[str],
    ) -> Server:
        harness = identify(os.getpid())
        assert harness is not None
        log = (folder / LOG_FILE_NAME).resolve()
        path = folder / pidfile.FILE_NAME
        # One tick less: the clock may be read just before it ticks.
        pid_file = pidfile.PidFile(launch_id, port, str(log), ticks_since_boot() - 1, harness)
        baseline = gpus.used_bytes()
        # Pid file and guard come first: from its first instruction on, somebody can find and end the server.
        pidfile.write(path, pid_file)
        guard = Guard(path, launch_id)
        try:
            process = _spawn(command.argv, {**environment, LAUNCH_ID_VARIABLE: launch_id}, log)
        except BaseException:  # also an argument that no process can have (ValueError: embedded null byte)
            path.unlink()
            guard.release()
            raise
        pid_file = dataclasses.replace(pid_file, leader=identify(process.pid))
        server = cls(
            process,
            folder=folder,
            port=port,
            pid_file=pid_file,
            guard=guard,
            gpus=gpus,
            gpu_baseline_bytes=baseline,
            secrets=secrets,
        )
        _live.add(server)
        try:
            pidfile.write(path, pid_file)
        except OSError:
            server.kill()
            guard.release()
            raise
        return server

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupted = kind is not None and not issubclass(kind, Exception)
        if interrupted and self._stopping is not None:
            await self._hurry(self._stopping)
        await self.stop(grace_s=INTERRUPTED_GRACE_S if interrupted else GRACE_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether its first process runs."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Of its first process: negative is the signal that ended it, None while it runs."""
        return self._process.poll()

    @property
    def kernel_ran_out_of_memory(self) -> bool:
        """Whether the kernel killed any process of this host for want of memory since the launch."""
        return oom_kills() > self._oom_kills

    def redact(self, text: str) -> str:
        """Take out of a text what is secret, also what only this server was given."""
        return redact_text(text, self._secrets)

    def processes(self) -> list[Process]:
        """Everything that belongs to it and runs now. What is new is added to the pid file."""
        known = len(self._family.known)
        found = self._family.find()
        if len(self._family.known) != known and self._stopping is None:
            self._pid_file = dataclasses.replace(self._pid_file, members=tuple(self._family.known.items()))
            with contextlib.suppress(OSError):  # a full disk: the marks still tell who belongs to it
                pidfile.write(self.folder / pidfile.FILE_NAME, self._pid_file)
        return found

    @property
    def known_pids(self) -> frozenset[int]:
        """Of all that was seen to belong to it so far, without looking again."""
        return frozenset(self._family.known)

    def pids(self) -> frozenset[int]:
        """Of everything that belongs to it and runs now."""
        return frozenset(process.pid for process in self.processes())

    async def stop(self, *, grace_s: float = GRACE_S, deadline_s: float = DEADLINE_S) -> Teardown:
        """End it: SIGTERM, ``grace_s`` to go, then SIGKILL to whatever is left; wait until all of it came back.

        A server that is dead already gets no grace. May be called again, and gives the same answer. A caller that is
        cancelled does not stop the stopping.

        Args:
            deadline_s: for each of processes, port and GPU memory.
        """
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop(grace_s, deadline_s))
        return await asyncio.shield(self._stopping)

    def kill(self, *, deadline_s: float = 5.0) -> None:
        """End it at once, without asyncio: for the second Ctrl-C."""
        if not self._family.end(leader=None, grace_s=0.0, deadline_s=deadline_s):
            with contextlib.suppress(OSError):  # others have to be ended too; the next command finds what is left
                self._clean_folder()
        self._process.poll()
        _live.discard(self)

    async def _hurry(self, stopping: asyncio.Task[Teardown]) -> None:
        """End it now, if a stop that was begun with a longer grace still waits."""
        await asyncio.wait([stopping], timeout=INTERRUPTED_GRACE_S)
        if not stopping.done():  # a family of its own: the other thread works with ours
            await asyncio.to_thread(self._pid_file.family().end, leader=None, grace_s=0.0, deadline_s=DEADLINE_S)

    async def _stop(self, grace_s: float, deadline_s: float) -> Teardown:
        begin_s = time.monotonic()
        survivors = await asyncio.to_thread(
            self._family.end, leader=self.pid, grace_s=grace_s if self.alive else 0.0, deadline_s=deadline_s
        )
        self._process.poll()
        if not survivors:
            await asyncio.to_thread(self._leave)
        stragglers = [f"{describe(process.pid)} does not end (state {process.state})" for process in survivors]
        at_port = await self._wait_port_free(deadline_s)
        stragglers += [f"port {self.port} is held by {listener.describe()}" for listener in at_port]
        memory_back: bool | None = None
        try:
            occupants = await self._gpus.wait_free(self._gpu_baseline_bytes, deadline_s=deadline_s)
        except GpuUnreadableError as error:
            stragglers.append(f"GPU memory could not be read: {error}")
        else:
            stragglers += [f"GPU memory did not come back: {occupant}" for occupant in occupants]
            memory_back = not occupants if len(self._gpus) else None
        return Teardown(
            group_gone=not survivors,
            port_free=not at_port,
            gpu_memory_back=memory_back,
            duration_s=time.monotonic() - begin_s,
            stragglers=tuple(stragglers),
        )

    async def _wait_port_free(self, deadline_s: float) -> list[Listener]:
        """Who listens on the port in the end: a process that can be seen is a survivor or a stranger, and stays."""
        end_s = time.monotonic() + deadline_s
        while (found := listeners(self.port)) and time.monotonic() < end_s:
            if any(listener.pids for listener in found):
                break
            await asyncio.sleep(_PORT_POLL_S)
        return found

    def _leave(self) -> None:
        """Nothing of it runs: no more need of guard and pid file."""
        self._clean_folder()
        self._guard.release()
        _live.discard(self)

    def _clean_folder(self) -> None:
        """Nobody writes the log any more. While the pid file is there, a later command cleans the log if we cannot."""
        self.log.take_out(self._secrets)  # SGLang logs its arguments
        (self.folder / pidfile.FILE_NAME).unlink(missing_ok=True)


def kill_live_servers() -> None:
    """End at once every server of this process that was not stopped, without asyncio."""
    for server in list(_live):
        server.kill()


def _make_room(folder: Path) -> None:
    """End what an earlier attempt left in this folder, and take its log away.

    Raises:
        LaunchError: it still runs, or belongs to a harness that lives.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for reaped in reap(folder):
        if reaped.left:
            raise LaunchError(Cause.GPU_BUSY, reaped.describe())
    try:
        harness = pidfile.read(folder / pidfile.FILE_NAME).harness
    except (OSError, ValueError):
        harness = None
    if harness is not None and harness.is_alive:
        raise LaunchError(Cause.OTHER, f"a server in {folder} belongs to a command that runs: {describe(harness.pid)}")
    (folder / LOG_FILE_NAME).unlink(missing_ok=True)


def _spawn(argv: tuple[str, ...], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    # The file itself, no pipe: a pipe that nobody reads blocks the server, and breaks when the harness dies.
    with log.open("xb", buffering=0) as output:
        return subprocess.Popen(
            argv,
            env={"PYTHONUNBUFFERED": "1", **environment},  # a decisive line must not wait in a buffer
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _write_command(path: Path, command: Command, secrets: frozenset[str]) -> None:
    """Write the command as a script that a person can run; what is secret has to be filled in."""
    added = redact_env(dict(command.env), secrets)
    words = ["env", *(f"{name}={value}" for name, value in added.items())] if added else []
    words += redact_argv(command.argv, secrets)
    note = "# Secrets are left out: replace each [redacted].\n" if any(REDACTED in word for word in words) else ""
    path.write_text(f"#!/bin/sh\n{note}exec {_join(words)}\n")
    path.chmod(0o755)


def _join(words: list[str]) -> str:
    """Quote for the shell, one option with its values a line."""
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return " \\\n    ".join(" ".join(line) for line in lines)
