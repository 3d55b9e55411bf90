"""Log: follows a server's log file while the server writes it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from bench.secrets import REDACTED

_CHUNK_BYTES = 1 << 20  # a server that floods its log is read in several steps, so that the event loop lives
_TAIL_BYTES = 1 << 16


class LogFollower:
    """New lines of a growing file.

    A line ends at ``\\n`` and is given as it stands, a progress bar with all states that its ``\\r`` overwrote: the log
    reader makes of it what it makes of the same line in a finished file. What is not UTF-8 becomes a replacement
    character.

    Attributes:
        size_bytes: read so far, unfinished lines included: it also grows while a progress bar moves.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size_bytes = 0
        self._unfinished = b""

    def new_lines(self, *, final: bool = False) -> list[str]:
        """Lines completed since the last call, a megabyte at most; with ``final`` all there is, the unfinished one too.

        A file that does not exist yet has none.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.size_bytes)
                data = file.read(-1 if final else _CHUNK_BYTES)
        except FileNotFoundError:
            data = b""
        self.size_bytes += len(data)
        *complete, self._unfinished = (self._unfinished + data).split(b"\n")
        if final and self._unfinished:
            complete.append(self._unfinished)
            self._unfinished = b""
        return [raw.decode(errors="replace") for raw in complete]

    def tail(self, count: int) -> list[str]:
        """The last lines of the file (of its last 64 KiB) as a terminal shows them, without those that are blank."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
                data = file.read()
        except FileNotFoundError:
            return []
        lines = [_as_shown(raw).decode(errors="replace") for raw in data.split(b"\n")]
        return [line for line in lines if line.strip()][-count:]

    def take_out(self, secrets: Collection[str]) -> None:
        """Take these values out of the file, once nobody writes it any more."""
        if not secrets or not self.path.exists():
            return
        original = text = self.path.read_bytes()
        for secret in sorted(secrets, key=len, reverse=True):
            text = text.replace(secret.encode(), REDACTED.encode())
        if text != original:
            self.path.write_bytes(text)


def _as_shown(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]
