"""Clock: virtual time, which passes ``scale`` times as fast as real time, and the pace of steps in it."""

from __future__ import annotations

import asyncio
import time

# Below this (real) it is cheaper to run ahead than to sleep: an event loop sleeps whole milliseconds.
SHORTEST_SLEEP_S = 0.0005
# What real time a busy host or the client's turnaround took is made up for by steps that are this much shorter, so
# that throughput is right in the mean; what is more than the debt's limit is lost.
PAYBACK = 0.2
LARGEST_DEBT_S = 0.25
# A pause of less real time than this between two requests is the client's turnaround, which a time scale would
# stretch; it is made up for as well. Without a time scale (1) a pause is a pause.
TURNAROUND_S = 0.03
# How far steps may run behind their shortest pace because of sleeps that took too long.
SLEEP_ERROR_S = 0.02


class Clock:
    """Virtual time, from 0 at the start of the process."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.started = time.monotonic()
        self.wall_started = time.time()

    def now(self) -> float:
        return (time.monotonic() - self.started) * self.scale

    async def sleep(self, virtual_s: float) -> None:
        await asyncio.sleep(virtual_s / self.scale)


class Pace:
    """Where a scheduler stands in virtual time, and when its next step is due.

    Attributes:
        virtual: the scheduler's time.
        lag, worst_lag: virtual seconds that it is behind the clock, now and at worst.
        lost: virtual seconds that were given up because the debt grew too large.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.virtual = 0.0
        self.lag = self.worst_lag = self.lost = 0.0
        self._floor = 0.0
        self._paused: float | None = time.monotonic()

    def pause(self) -> None:
        """There is nothing to do."""
        self._paused = time.monotonic()

    def resume(self) -> None:
        """There is something again."""
        self.virtual = max(self.virtual, self.arrival())
        self._paused = None

    def arrival(self) -> float:
        """Virtual time of a request that arrives now; not after the scheduler's own time, where that is behind."""
        if self._paused is None:
            return min(self.clock.now(), self.virtual)
        turnaround = time.monotonic() - self._paused <= TURNAROUND_S and self.clock.scale > 1
        return self.virtual if turnaround else self.clock.now()

    async def advance(self, duration_s: float) -> None:
        """Let a step's time pass; returns when it is over."""
        self.virtual += duration_s
        scale, now = self.clock.scale, time.monotonic()
        due = self.clock.started + self.virtual / scale
        if now - due > LARGEST_DEBT_S:
            given_up = now - due - LARGEST_DEBT_S
            self.lost += given_up * scale
            self.virtual += given_up * scale
        self.lag = max(0.0, (now - due) * scale)
        self.worst_lag = max(self.worst_lag, self.lag)
        self._floor = max(self._floor, now - SLEEP_ERROR_S) + duration_s / scale * (1 - PAYBACK)
        ahead_s = max(due, self._floor) - now
        await asyncio.sleep(ahead_s if ahead_s > SHORTEST_SLEEP_S else 0)
