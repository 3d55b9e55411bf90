"""Faults: reads a server's log as it grows and says what went wrong, where, and which line proves it."""

from __future__ import annotations

from bench.outcome import Fault, Phase


class LogReader:
    """Reads one log, line by line. Engines supply the rules (to be written)."""

    phase: Phase

    def feed(self, line: str) -> Fault | None:
        """Take the next line; return the fault as soon as it is decisive (the server cannot recover), else None."""
        ...

    def verdict(self) -> Fault:
        """The fault that the log shows as a whole, its cause ``healthy`` or ``unknown`` where it shows none."""
        ...
