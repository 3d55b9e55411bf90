"""Evidence: all that a level saw, before anything is made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from bench.engines.protocol import ServerCounters
from bench.load.driver import Job
from bench.load.metrics import Floats, Integers
from bench.load.stream import Stream
from bench.load.window import Timeline


@dataclass(frozen=True)
class Counted:
    """The server's counters and when they were read."""

    at_ns: int
    counters: ServerCounters


@dataclass(eq=False)
class Evidence:
    """What a level saw.

    Attributes:
        chunks: rows of ``bench.load.stream.COLUMNS``.
        start_ns, end_ns: of the window; ``began_ns`` the first request's time, ``over_ns`` the last one's.
        rates, widths_s: tokens per second and seconds of the window's bins.
        cpu_share: of the busiest process, of a core. queued_share: likewise, ready without a core.
        late_s: how late the client's event loop woke, at worst, once per tick.
        clock_step_s: by how much the wall clock was set during the level.
    """

    job: Job
    streams: Sequence[Stream]
    chunks: Integers
    timeline: Timeline
    began_ns: int
    start_ns: int
    end_ns: int
    over_ns: int
    rates: Floats
    widths_s: Floats
    failure: str | None = None
    warnings: Sequence[str] = ()
    before: Counted | None = None
    after: Counted | None = None
    cpu_share: float | None = None
    queued_share: float | None = None
    late_s: Sequence[float] = ()
    clock_step_s: float = 0.0
    kernel_stamps: bool = False
    acceptance_simulated: bool = False

    @property
    def seconds(self) -> float:
        """The server's seconds in a nanosecond of ours."""
        return 1e-9 * self.job.scale

    @property
    def window_s(self) -> float:
        return (self.end_ns - self.start_ns) * self.seconds

    @cached_property
    def ended(self) -> list[Stream]:
        """What ended inside the window; of an open loop, what was due in it and has ended."""
        if self.job.pattern.is_open:
            return [s for s in self.streams if s.ended and self.start_ns < s.scheduled_ns <= self.end_ns]
        ends = ((s, s.last_ns if s.ok else s.ended_ns) for s in self.streams if s.ended)
        return [stream for stream, end_ns in ends if self.start_ns < end_ns <= self.end_ns]

    @cached_property
    def ok(self) -> list[Stream]:
        """Every request that ended well, in the window or not."""
        return [s for s in self.streams if s.ok]

    @property
    def first_error(self) -> str:
        return next((s.error for s in self.streams if s.error), "")
