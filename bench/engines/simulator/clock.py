"""Clock: virtual time, which passes ``scale`` times as fast as real time."""

from __future__ import annotations

import asyncio
import time


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
