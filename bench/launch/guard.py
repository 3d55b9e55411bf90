"""Guard: a tiny process that ends a launch when the harness that made it dies, however it dies.

Why a process of its own: no code of ours runs after SIGKILL or the OOM killer. Why PR_SET_PDEATHSIG is not enough: the
kernel sends that signal to direct children only, and when the thread that forked them ends; it is not inherited over
fork, so a grandchild, one that called setsid or one that was re-parented gets none.

One guard per launch, started before the server. It waits for the end of a pipe that the harness holds and, because a
forked worker may have inherited the other end of that pipe, for the harness process itself too. A byte in the pipe says
that the launch was ended in good order. The guard has a session of its own and ignores SIGINT, SIGTERM and SIGHUP,
which terminals and job schedulers send to everybody. It starts without site-packages, and imports what ends processes
when it is needed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

_RELEASED = b"."
_PROGRAM = "import sys; sys.path.append(sys.argv.pop(1)); from bench.launch.guard import main; main()"
# A server that was just being started when the harness died may not carry its marks yet.
_LOOK_AGAIN_S = 1.0
_DEADLINE_S = 60.0
_EXIT_TIMEOUT_S = 5.0


class Guard:
    """The harness's side: as long as this object lives and is not released, the launch dies with the harness."""

    def __init__(self, pid_file: Path, launch_id: str) -> None:
        """Start the guard of the launch that this pid file describes."""
        package_root = str(Path(__file__).resolve().parents[2])
        arguments = [package_root, str(pid_file.resolve()), launch_id, str(os.getpid())]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    def release(self) -> None:
        """The launch was ended: let the guard go, and wait for that (milliseconds)."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody killed it
            self._process.stdin.write(_RELEASED)
        self._process.stdin.close()
        try:
            self._process.wait(timeout=_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # somebody stopped it
            self._process.kill()
            self._process.wait()


def main() -> None:
    """The guard's side: what its process runs, with pid file, launch id and the harness's pid as arguments."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pid_file, launch_id, harness = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    if not _released_by(harness):
        _end(pid_file, launch_id)


def _released_by(harness: int) -> bool:
    """Wait until the harness lets us go (True) or is dead (False)."""
    waiting = select.poll()
    waiting.register(0, select.POLLIN)
    with contextlib.suppress(OSError):  # it is dead already, or the kernel is older than 5.3: then the pipe tells
        waiting.register(os.pidfd_open(harness), select.POLLIN)
    if os.getppid() == harness:
        waiting.poll()
    os.set_blocking(0, False)
    try:
        return os.read(0, 1) == _RELEASED
    except BlockingIOError:
        return False  # a worker still holds the pipe, but the harness itself is dead


def _end(path: Path, launch_id: str) -> None:
    import time

    from bench.launch import pidfile
    from bench.launch.processes import describe

    try:
        pid_file = pidfile.read(path)
    except (OSError, ValueError):
        return  # it was ended in good order
    if pid_file.launch_id != launch_id:
        return  # the next command was quicker, and has launched again in this folder
    family = pid_file.family()
    ended: list[str] = []
    look_until = time.monotonic() + _LOOK_AGAIN_S
    while True:
        ended += [describe(process.pid) for process in family.find()]
        family.end(leader=None, grace_s=0.0, deadline_s=_DEADLINE_S)
        if time.monotonic() > look_until:
            break
        time.sleep(0.1)
    path.with_name(pidfile.GUARD_FILE_NAME).write_text("".join(f"{line}\n" for line in ended))


if __name__ == "__main__":
    main()
