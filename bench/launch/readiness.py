"""Readiness: whether a launched server really serves, or why it never will."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bench.faults import LogReader
from bench.launch.ports import Listener, foreign, listeners
from bench.launch.server import Server
from bench.outcome import Cause, Fault, Outcome, OutcomeKind, Phase, kind_of

# Looks at the server: often at first (a simulator is up within a second), less often as the start goes on. A look
# takes 0.1 ms, and 3 to 7 ms once somebody listens on the port.
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.02, 0.1
_HEALTH_INTERVAL_S = 0.1
_PORT_INTERVAL_S = 0.25
# After the line that decides, SGLang kills its own tree; what it prints meanwhile belongs to the verdict.
_TIME_TO_DIE_S = 1.0
# Progress: more than this share of one core over the family. An idle server that waits uses 1 to 3 %.
_BUSY_CORES = 0.1
_PROGRESS_INTERVAL_S = 1.0
# One look at /proc may fall between a server's bind and our sight of its process.
_LOOKS_AT_A_STRANGER = 2
# Verdicts that a kill by the kernel explains better.
_VAGUE = frozenset({Cause.UNKNOWN, Cause.NONE, Cause.HEALTHY, Cause.STARTUP_HANG, Cause.OTHER, Cause.ENGINE_CRASH})
# What a log without a fault is taken for, while its server may still live.
_NO_FAULT = frozenset({Cause.NONE, Cause.HEALTHY, Cause.STARTUP_HANG})


@dataclass(frozen=True)
class Ready:
    """A server that serves: it is alive, its own processes alone listen on the port, and it answered.

    Attributes:
        duration_s: from the launch until that was known.
        phases: by phase, in order, seconds spent in it.
    """

    duration_s: float
    phases: tuple[tuple[Phase, float], ...]


async def wait_ready(
    server: Server,
    *,
    log_reader: LogReader,
    health: Callable[[], Awaitable[bool]],
    start_timeout_s: float,
    stall_timeout_s: float,
    on_phase: Callable[[Phase], None],
) -> Ready | Outcome:
    """Wait until the server serves or has failed, whichever is known first. The server is left as it is.

    What the log says of readiness counts for nothing: SGLang reports it even when another server holds the port.

    Args:
        health: asks the server for a sign of life; False, not an exception, while there is none.
        start_timeout_s: from the launch, at most.
        stall_timeout_s: without progress: the log grows, its processes use the processor or wait for pages from disk.
        on_phase: called with the first phase and each one that the log enters.
    """
    start = _Start(server, log_reader, on_phase, start_timeout_s, stall_timeout_s)
    asking: asyncio.Task[bool] | None = None
    ask_after_s = 0.0
    try:
        while True:
            if (failure := start.failure()) is not None:
                return failure
            now_s = time.monotonic()
            if asking is not None and asking.done():
                start.look_at_port()  # again: whoever answered must still be the one
                if asking.result() and server.alive and start.owns_port:
                    return Ready(now_s - server.started_at_s, start.phases(now_s))
                asking, ask_after_s = None, now_s + _HEALTH_INTERVAL_S
            if asking is None and start.owns_port and now_s >= ask_after_s:
                asking = asyncio.ensure_future(health())
            await _pause(_poll_s(now_s - server.started_at_s), asking)
    finally:
        if asking is not None:
            asking.cancel()


async def wait_failure(server: Server, *, log_reader: LogReader) -> Outcome:
    """Wait until a server that was ready dies, or its log says that it cannot recover. For as long as it serves.

    Args:
        log_reader: the one that saw the start.
    """
    watch = _Watch(server, log_reader)
    while True:
        if (failure := watch.failure()) is not None:
            return failure
        await asyncio.sleep(_LONGEST_POLL_S)


async def _pause(duration_s: float, asking: asyncio.Task[bool] | None) -> None:
    if asking is None:
        await asyncio.sleep(duration_s)
    else:
        await asyncio.wait([asking], timeout=duration_s)


def _poll_s(elapsed_s: float) -> float:
    return min(_LONGEST_POLL_S, max(_SHORTEST_POLL_S, elapsed_s / 100))


class _Watch:
    """Feeds the log to its reader and sees whether the server is done for."""

    def __init__(self, server: Server, log_reader: LogReader) -> None:
        self.server = server
        self.reader = log_reader
        self._dies_by_s: float | None = None

    def failure(self) -> Outcome | None:
        """The outcome, once the server is dead or has had its time to die after the decisive line."""
        ended = not self.server.alive  # asked before the log is read, so that its last words are in it
        self._read(final=ended)
        now_s = time.monotonic()
        if ended:
            return self._verdict(f"exited with code {self.server.exit_code}")
        if self._dies_by_s is not None and now_s >= self._dies_by_s:
            return self._verdict(f"still runs {_TIME_TO_DIE_S:g} s after its log said that it cannot go on")
        return None

    def _read(self, *, final: bool) -> None:
        for line in self.server.log.new_lines(final=final):
            if self.reader.feed(line) is not None and self._dies_by_s is None:
                self._dies_by_s = time.monotonic() + _TIME_TO_DIE_S

    def _verdict(self, seen: str) -> Outcome:
        fault = self.reader.verdict()
        if fault.cause in _VAGUE and self.server.kernel_ran_out_of_memory:
            seen += "; meanwhile the kernel killed a process of this host for want of memory"
            fault = dataclasses.replace(fault, cause=Cause.OOM_HOST)
        elif fault.cause in _NO_FAULT:  # and yet it is dead
            last = self.server.log.tail(1)
            fault = Fault(Cause.UNKNOWN, self.reader.phase, last[0] if last else None)
        return self._outcome(fault, seen)

    def _outcome(self, fault: Fault, seen: str, kind: OutcomeKind | None = None) -> Outcome:
        after_s = time.monotonic() - self.server.started_at_s
        return Outcome(
            kind=kind or kind_of(fault.cause),
            cause=fault.cause,
            phase=fault.phase,
            detail=self.server.redact(f"the server {seen}, {after_s:.1f} s after its launch"),
            line=None if fault.line is None else self.server.redact(fault.line),
            line_number=fault.line_number,
            flags=fault.flags,
        )


class _Start(_Watch):
    """A server's start: besides its death, its port, its phases and its progress."""

    def __init__(
        self,
        server: Server,
        log_reader: LogReader,
        on_phase: Callable[[Phase], None],
        start_timeout_s: float,
        stall_timeout_s: float,
    ) -> None:
        super().__init__(server, log_reader)
        self.owns_port = False
        self._looked_s = 0.0
        self._start_timeout_s = start_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._on_phase = on_phase
        self._entered: list[tuple[Phase, float]] = []
        self._looks_at_a_stranger = 0
        self._progress = _Progress(server)

    def failure(self) -> Outcome | None:
        failure = super().failure()
        self._note_phase()
        due = not self.owns_port or time.monotonic() >= self._looked_s + _PORT_INTERVAL_S
        strangers = self.look_at_port() if due else []
        if failure is not None:
            return self._name_strangers(failure, strangers)
        if self._looks_at_a_stranger >= _LOOKS_AT_A_STRANGER:
            return self._foreign(strangers)
        return self._hang()

    def phases(self, now_s: float) -> tuple[tuple[Phase, float], ...]:
        ends = [entered_s for _, entered_s in self._entered[1:]] + [now_s]
        return tuple((phase, end_s - entered_s) for (phase, entered_s), end_s in zip(self._entered, ends, strict=True))

    def _note_phase(self) -> None:
        phase = self.reader.phase
        if not self._entered:
            self._entered.append((phase, self.server.started_at_s))
        elif self._entered[-1][0] != phase:
            self._entered.append((phase, time.monotonic()))
        else:
            return
        self._on_phase(phase)

    def look_at_port(self) -> list[Listener]:
        """Who listens on the port though it is none of the server's processes."""
        self._looked_s = time.monotonic()
        found = listeners(self.server.port, self.server.known_pids)
        strangers = foreign(found, self.server.known_pids)
        if strangers:  # or a process that it started since we last looked
            strangers = foreign(found, self.server.pids())
        self.owns_port = bool(found) and not strangers
        self._looks_at_a_stranger = self._looks_at_a_stranger + 1 if strangers else 0
        return strangers

    def _name_strangers(self, failure: Outcome, strangers: list[Listener]) -> Outcome:
        if failure.cause is not Cause.PORT_IN_USE or not strangers:
            return failure
        holders = ", ".join(stranger.describe() for stranger in strangers)
        return dataclasses.replace(failure, detail=f"{failure.detail}; port {self.server.port} is held by {holders}")

    def _foreign(self, strangers: list[Listener]) -> Outcome:
        holders = ", ".join(stranger.describe() for stranger in strangers)
        seen = f"does not own port {self.server.port}: {holders} listens there"
        return self._outcome(Fault(Cause.FOREIGN_SERVER, self.reader.phase), seen, OutcomeKind.INFRASTRUCTURE)

    def _hang(self) -> Outcome | None:
        still_s, phase = self._progress.still_s(), self.reader.phase
        if still_s >= self._stall_timeout_s:
            seen = (
                f"made no progress for {still_s:.0f} s in phase {phase} (its log did not grow, its processes neither "
                "computed nor read; engine.stall_timeout_s)"
            )
        elif time.monotonic() - self.server.started_at_s >= self._start_timeout_s:
            seen = (
                f"is not ready after {self._start_timeout_s:.0f} s, in phase {phase} ({_work(still_s, phase)}; "
                "engine.start_timeout_s)"
            )
        else:
            return None
        last = self.server.log.tail(1)
        return self._outcome(Fault(Cause.STARTUP_HANG, phase, last[0] if last else None), seen)


def _work(still_s: float, phase: Phase) -> str:
    """Whether it was slow or stuck when its time was up."""
    if still_s > 2 * _PROGRESS_INTERVAL_S:
        return f"the last sign of progress was {still_s:.0f} s ago: more likely stuck than slow"
    work = {Phase.LOAD: "loading weights", Phase.GRAPH_CAPTURE: "compiling or capturing graphs"}.get(phase, "working")
    if phase is Phase.SERVING:
        return "its log grew or its processes computed, but it gave no healthy answer"
    return f"it was still {work}: slow, not stuck, so raise the limit"


class _Progress:
    """When a server last showed that it works: slow compilation and loading do, a hang does not."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._size_bytes = 0
        self._sampled_s = self._moved_s = time.monotonic()
        self._used: dict[int, tuple[float, int]] = {}

    def still_s(self) -> float:
        """Seconds since the last sign of progress."""
        now_s = time.monotonic()
        size_bytes = self._server.log.size_bytes
        if size_bytes != self._size_bytes:
            self._size_bytes, self._moved_s = size_bytes, now_s
        elif now_s - self._sampled_s >= _PROGRESS_INTERVAL_S:
            if self._works(now_s - self._sampled_s):
                self._moved_s = now_s
            self._sampled_s = now_s
        return now_s - self._moved_s

    def _works(self, interval_s: float) -> bool:
        before = self._used
        self._used = {process.pid: (process.cpu_s, process.major_faults) for process in self._server.processes()}
        cpu_s = sum(cpu - before.get(pid, (0.0, 0))[0] for pid, (cpu, _) in self._used.items())
        faults = sum(count - before.get(pid, (0.0, 0))[1] for pid, (_, count) in self._used.items())
        return cpu_s > _BUSY_CORES * interval_s or faults > 0
