"""Processes: finds everything that belongs to one launch, proves that it does, and ends it.

Reads /proc (Linux) and needs the standard library only, since the guard imports it without site-packages.

How a process is known as one of a launch's family:

- it is the one that was started, or was seen as one of the family before (pid and start time);
- its environment carries the launch's id, which every child inherits, also one that called setsid or was re-parented;
- its standard output or error is the launch's own log: this also finds those whose environment cannot be read any more,
  because they wrote a title over it (setproctitle, as SGLang's schedulers do);
- its parent is of the family;
- it is in a session that the family opened (the launch begins one of its own).

Nothing is ever found by name, and no signal is sent before pid and start time were compared again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.secrets import redact_argv

LAUNCH_ID_VARIABLE = "BENCH_LAUNCH_ID"

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Between two looks at processes that are to go: a killed process is gone within milliseconds, one that frees tens of
# gigabytes needs seconds.
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.005, 0.1
# What is left of a family after its leader ended in good order (a resource tracker that still removes shared memory).
_SETTLE_S = 0.5


@dataclass(frozen=True)
class Process:
    """One process at one moment, as /proc/PID/stat tells.

    Attributes:
        start_time: in clock ticks since boot; with the pid it names a process for the time that the machine is up.
        cpu_s: processor time used so far, user and system.
        major_faults: pages that it had to wait for from a disk.
        state: one letter; Z is a zombie, D waits in the kernel and cannot be killed.
        threads: of a zombie more than one while others still end and hold its sockets and memory.
    """

    pid: int
    parent: int
    session: int
    start_time: int
    cpu_s: float
    major_faults: int
    state: str
    threads: int

    @property
    def runs(self) -> bool:
        return self.state not in "ZXx" or self.threads > 1


@dataclass(frozen=True)
class ProcessIdentity:
    """What proves later, to another process, that a pid still is the process it was.

    Attributes:
        boot_id, pid_namespace: the machine's boot and the container; elsewhere the pid says nothing.
        command_line: for people, and as one more proof; secrets redacted.
    """

    pid: int
    start_time: int
    boot_id: str
    pid_namespace: str
    command_line: str

    @property
    def is_here(self) -> bool:
        """Whether the pid was given on this machine, in this boot and in this container."""
        return (self.boot_id, self.pid_namespace) == (boot_id(), pid_namespace())

    @property
    def is_alive(self) -> bool:
        process = process_of(self.pid)
        return self.is_here and process is not None and process.runs and process.start_time == self.start_time


@cache
def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@cache
def pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def ticks_since_boot() -> int:
    """Now, on the clock of ``Process.start_time``."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_S)


def identify(pid: int) -> ProcessIdentity | None:
    """The identity of a running process, None if there is none with this pid."""
    process = process_of(pid)
    if process is None or not process.runs:
        return None
    return ProcessIdentity(pid, process.start_time, boot_id(), pid_namespace(), command_line(pid))


def command_line(pid: int) -> str:
    """The command line or title of a process, secrets redacted; empty if it cannot be read."""
    words = [word for word in _read(f"/proc/{pid}/cmdline").decode(errors="replace").split("\0") if word]
    return " ".join(redact_argv(words))


def describe(pid: int) -> str:
    """A process in words, for an error message: pid and what it runs."""
    text = command_line(pid)
    if not text:
        return f"pid {pid}"
    return f"pid {pid} ({text if len(text) <= 100 else text[:97] + '...'})"


def process_of(pid: int) -> Process | None:
    """What /proc says of one process, None if there is none."""
    stat = _read(f"/proc/{pid}/stat")
    if not stat:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the name before it may hold spaces and brackets
    return Process(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        start_time=int(fields[19]),
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
        major_faults=int(fields[9]),
        state=fields[0].decode(),
        threads=int(fields[17]),
    )


def processes() -> dict[int, Process]:
    """All processes that can be seen, by pid."""
    found = (process_of(int(name)) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    return {process.pid: process for process in found if process is not None}


def oom_kills() -> int:
    """How many processes the kernel killed for want of memory since boot, host-wide; 0 where it does not tell."""
    for line in _read("/proc/vmstat").splitlines():
        if line.startswith(b"oom_kill "):
            return int(line.split()[1])
    return 0


class Family:
    """All processes of one launch.

    Args:
        launch_id: in the environment of each of them, under ``BENCH_LAUNCH_ID``.
        log: the file that the launch's output goes to.
        not_before: the launch's time, in ticks since boot; what is older cannot belong to it.
        known: pid and start time of members seen before.
    """

    def __init__(self, launch_id: str, log: Path, not_before: int, known: Iterable[tuple[int, int]] = ()) -> None:
        self.known: dict[int, int] = dict(known)
        self._mark = f"\0{LAUNCH_ID_VARIABLE}={launch_id}\0".encode()
        self._log = log
        self._not_before = not_before

    def find(self) -> list[Process]:
        """The members that run now; they are remembered as ``known``."""
        log = _file_id(self._log)
        candidates = {
            pid: process
            for pid, process in processes().items()
            if process.start_time >= self._not_before and pid != os.getpid()
        }
        members = {
            pid
            for pid, process in candidates.items()
            if self.known.get(pid) == process.start_time or self._is_marked(pid, log)
        }
        while True:
            sessions = {candidates[pid].session for pid in members} & (members | self.known.keys())
            more = {
                pid
                for pid, process in candidates.items()
                if pid not in members and (process.parent in members or process.session in sessions)
            }
            if not more:
                break
            members |= more
        found = [candidates[pid] for pid in sorted(members)]
        self.known.update((process.pid, process.start_time) for process in found)
        return [process for process in found if process.runs]

    def end(self, *, leader: int | None, grace_s: float, deadline_s: float) -> list[Process]:
        """End the whole family and wait until it is gone. Blocks: call it in a thread from a coroutine.

        A leader that still runs is asked with SIGTERM and has ``grace_s`` to end itself and its children; whatever
        then still runs is killed, and killed again until none is found or ``deadline_s`` has passed.

        Returns:
            the members that are left in spite of that.
        """
        process = process_of(leader) if leader is not None else None
        if process is not None and process.runs and self.known.get(process.pid) == process.start_time and grace_s > 0:
            _send(process, signal.SIGTERM)
            _wait_until(lambda: not _is_running(process), grace_s)
            _wait_until(lambda: not self.find(), min(_SETTLE_S, grace_s))
        _wait_until(self._kill, deadline_s)
        return self.find()

    def _kill(self) -> bool:
        """Kill who is there; True if nobody was."""
        members = self.find()
        for process in members:
            _send(process, signal.SIGKILL)
        return not members

    def _is_marked(self, pid: int, log: tuple[int, int] | None) -> bool:
        if self._mark in b"\0" + _read(f"/proc/{pid}/environ") + b"\0":
            return True
        return log is not None and log in (_file_id(f"/proc/{pid}/fd/1"), _file_id(f"/proc/{pid}/fd/2"))


def _send(process: Process, number: signal.Signals) -> None:
    """Signal this very process: the handle keeps the pid from meaning another one between proof and signal."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError as error:
        if isinstance(error, ProcessLookupError):
            return
        handle = None  # a kernel before 5.3
    try:
        now = process_of(process.pid)
        if now is None or now.start_time != process.start_time:
            return
        if handle is None:
            os.kill(process.pid, number)
        else:
            signal.pidfd_send_signal(handle, number)
    except (ProcessLookupError, PermissionError):
        return  # gone, or another user's: then it is reported as left over
    finally:
        if handle is not None:
            os.close(handle)


def _is_running(process: Process) -> bool:
    now = process_of(process.pid)
    return now is not None and now.runs and now.start_time == process.start_time


def _wait_until(condition: Callable[[], bool], deadline_s: float) -> bool:
    """Whether the condition came true in time. It is looked at once at least."""
    end = time.monotonic() + deadline_s
    poll_s = _SHORTEST_POLL_S
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)
    return True


def _file_id(path: Path | str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _read(path: str) -> bytes:
    """A file of /proc; empty if its process is gone or another user's."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return b""
