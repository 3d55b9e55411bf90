"""Pid file: what a launch leaves on disk while it runs, so that another process can find and end it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from bench.launch.processes import Family, ProcessIdentity

FILE_NAME = "launch.json"
GUARD_FILE_NAME = "guard.txt"  # beside it: what the guard ended when the harness had died, one process a line


@dataclass(frozen=True)
class PidFile:
    """Contents of ``launch.json``. It is there from just before the server starts until nothing of it is left.

    Attributes:
        harness: the process that launched it; while that lives, the launch is its business alone.
        leader: the server's first process, None until it was started.
        members: pid and start time of everything seen to belong to it.
        not_before: when it was launched, in clock ticks since boot.
        log: the server's log, absolute.
    """

    launch_id: str
    port: int
    log: str
    not_before: int
    harness: ProcessIdentity
    leader: ProcessIdentity | None = None
    members: tuple[tuple[int, int], ...] = ()

    def family(self) -> Family:
        """The launch's processes, as far as they can be proved to be its own."""
        known = list(self.members)
        if self.leader is not None:
            known.append((self.leader.pid, self.leader.start_time))
        return Family(self.launch_id, Path(self.log), self.not_before, known)

    @property
    def is_ours_to_end(self) -> bool:
        """The harness that launched it is dead, and lived on this machine, in this boot and in this container."""
        return self.harness.is_here and not self.harness.is_alive


def write(path: Path, pid_file: PidFile) -> None:
    """Write it whole or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps(dataclasses.asdict(pid_file), indent=1))
    temporary.replace(path)


def read(path: Path) -> PidFile:
    """Read it back.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not such a file.
    """
    data = json.loads(path.read_text())
    try:
        return PidFile(
            launch_id=data["launch_id"],
            port=data["port"],
            log=data["log"],
            not_before=data["not_before"],
            harness=ProcessIdentity(**data["harness"]),
            leader=ProcessIdentity(**data["leader"]) if data["leader"] else None,
            members=tuple((pid, start_time) for pid, start_time in data["members"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no pid file of a launch: {error!r}") from error
