"""Reaping: ends what an earlier command left running."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from bench.launch import pidfile
from bench.launch.processes import describe
from bench.secrets import redact_text

_DEADLINE_S = 30.0


@dataclass(frozen=True)
class Reaped:
    """A launch whose harness died.

    Attributes:
        folder: of the trial.
        ended: its processes that still ran and were ended now, in words; ``ended_by_guard`` those that the guard had
            ended when the harness died.
        left: those that run in spite of it; ``launch.json`` then stays, so that the next command tries again.
    """

    folder: Path
    ended: tuple[str, ...]
    ended_by_guard: tuple[str, ...]
    left: tuple[str, ...]

    def describe(self) -> str:
        """One sentence for a person."""
        if self.left:
            return f"{self.folder}: could not end {', '.join(self.left)}; end it by hand before you go on"
        if self.ended:
            return f"{self.folder}: ended {', '.join(self.ended)}, left by a harness that died"
        if self.ended_by_guard:
            return f"{self.folder}: its guard had ended {', '.join(self.ended_by_guard)} when the harness died"
        return f"{self.folder}: nothing of it was left running"


def reap(root: Path) -> list[Reaped]:
    """End the servers below a folder (a trial's, a run's, or the whole results folder) whose harness is dead.

    A launch is touched only if its pid file was written in this boot of this machine and in this container, and its
    harness (by pid and start time) does not live any more. What is signalled is proved to belong to it as
    ``processes`` describes. Servers of a living harness, of another host or of another container are left alone.

    Raises:
        OSError: a pid file cannot be removed (a read-only folder).
    """
    return [_reap(path, pid_file) for path, pid_file in _pid_files(root) if pid_file.is_ours_to_end]


def _pid_files(root: Path) -> list[tuple[Path, pidfile.PidFile]]:
    found = []
    for path in sorted(root.rglob(pidfile.FILE_NAME)):
        try:
            pid_file = pidfile.read(path)
        except (OSError, ValueError):
            continue  # gone meanwhile, or not ours
        # Its folder may have been renamed since, and a new trial may write in the old place.
        log = path.parent.resolve() / Path(pid_file.log).name
        found.append((path, dataclasses.replace(pid_file, log=str(log))))
    return found


def _reap(path: Path, pid_file: pidfile.PidFile) -> Reaped:
    family = pid_file.family()
    ended = tuple(describe(process.pid) for process in family.find())
    survivors = family.end(leader=None, grace_s=0.0, deadline_s=_DEADLINE_S)
    left = tuple(describe(process.pid) for process in survivors)
    guard_file = path.with_name(pidfile.GUARD_FILE_NAME)
    by_guard = tuple(guard_file.read_text().splitlines()) if guard_file.exists() else ()
    if not left:
        _redact(Path(pid_file.log))
        guard_file.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    return Reaped(path.parent, ended, by_guard, left)


def _redact(log: Path) -> None:
    """What its harness would have done at the end; the values it was given are not known any more, their names are."""
    if log.exists():
        text = log.read_text(errors="replace")
        redacted = redact_text(text)
        if redacted != text:
            log.write_text(redacted)
