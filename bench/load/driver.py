"""Driver: sends the requests of a pattern, one process's share of them, and gathers what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import random
import resource
import time
from collections import deque
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.experiment import WorkloadSpec
from bench.load.client import Client, Connection, Target
from bench.load.metrics import rows
from bench.load.patterns import BATCH, CLOSED, Pattern
from bench.load.prompts import PromptSet
from bench.load.stream import Stream

_RETRY_S, _MAX_RETRY_S = 0.05, 1.0
_READY = 64  # requests that are built ahead
_SPARE_S = 0.25  # an open loop keeps connections ready for the requests of so long
_MIN_SPARE, _MAX_SPARE = 8, 256


@dataclass(frozen=True)
class Job:
    """What a driver does: shard ``shard`` of ``shards`` of a pattern.

    Attributes:
        scale: of the server's clock against ours.
    """

    target: Target
    workload: WorkloadSpec
    pattern: Pattern
    seed: int
    salt: str = ""
    scale: float = 1.0
    shard: int = 0
    shards: int = 1

    def prompts(self) -> PromptSet:
        pattern = self.pattern
        level = pattern.concurrency or (f"{pattern.rate_per_s:g}/s" if pattern.rate_per_s else pattern.kind)
        return PromptSet(self.workload, seed=self.seed, level=level, salt=self.salt, trace=pattern.trace)


@dataclass(frozen=True)
class Harvest:
    """What a driver has seen since it was asked last, and how it stands.

    Attributes:
        chunks: rows of ``bench.load.stream.COLUMNS``.
        lengths: output tokens of the requests that finished, those cut short at the start left out.
        request_s: mean time of these, in wall seconds; None without any.
        failures_in_a_row, first_failure_ns, last_error: since the last request that ended well.
        exhausted: a batch's requests have all ended.
        cpu_s: processor time of the process so far. late_s: how late the event loop woke, at worst.
        run_queue_s: time that the process was ready to run and did not get a core; None where it cannot be told.
    """

    chunks: npt.NDArray[np.int64]
    in_flight: int
    finished: int
    lengths: tuple[int, ...]
    request_s: float | None
    failures_in_a_row: int
    first_failure_ns: int
    last_error: str
    last_read_ns: int
    exhausted: bool
    cpu_s: float
    late_s: float
    run_queue_s: float | None
    kernel_stamps: bool


@dataclass(eq=False)
class Driver:
    """Drives a job in this process, on the running event loop."""

    job: Job
    streams: list[Stream] = field(default_factory=list)

    def __post_init__(self) -> None:
        job = self.job
        self._pattern = job.pattern.share(job.shard, job.shards)
        self._prompts = job.prompts()
        self._client = Client(job.target, self._on_end)
        self._native = job.target.route == "generate"
        self._ready: deque[Stream] = deque()
        self._next = job.shard
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening = 0
        self._stopping = self._paused = False
        self._finished: list[Stream] = []
        self._reported = self._reported_chunks = 0
        self._failures_in_a_row = self._first_failure_ns = 0
        self._last_error = ""
        self._late_s = 0.0

    async def connect(self) -> None:
        """Open the connections that the start needs and build the first requests, so that the start is only writes.

        Raises:
            OSError: when one cannot be opened.
        """
        _allow_open_files()
        await self._client.connect(self._pattern.concurrency or self._spare())
        if self._pattern.is_open:
            self._refill()
            return
        concurrency = self._pattern.concurrency or 0
        shares = [(place + 0.5) / concurrency for place in range(concurrency)]
        # A closed loop starts with lengths that are spread as what is left of requests is in a running system; else
        # all would end together, again and again.
        random.Random(self.job.seed).shuffle(shares)
        for share in shares[: self._pattern.requests]:
            self._ready.append(self._build(share if self._pattern.kind == CLOSED else 1.0))

    async def start(self) -> None:
        """Send the first requests, or start the schedule."""
        self._client.last_read_ns = time.time_ns()
        self._begun_ns = time.time_ns()
        self._spawn(self._watch_loop())
        if self._pattern.is_open:
            self._spawn(self._keep_schedule(self._begun_ns))
            return
        while self._client.idle and self._may_send():
            self._send(self._client.idle.pop(), self._take())

    async def collect(self) -> Harvest:
        """Decode what has arrived, and say what is new."""
        self._client.decode()
        fresh = rows(self._client.chunks[self._reported_chunks :])
        self._reported_chunks = len(self._client.chunks)
        ended = [stream for stream in self._closed() if stream.error is None and not stream.first_wave]
        self._refill()
        late_s, self._late_s = self._late_s, 0.0
        return Harvest(
            chunks=fresh,
            in_flight=self._client.in_flight,
            finished=len(self._finished),
            lengths=tuple(stream.tokens for stream in ended),
            request_s=sum(s.last_ns - s.sent_ns for s in ended) * 1e-9 / len(ended) if ended else None,
            failures_in_a_row=self._failures_in_a_row,
            first_failure_ns=self._first_failure_ns,
            last_error=self._last_error,
            last_read_ns=self._client.last_read_ns,
            exhausted=not self._may_send() and not self._client.in_flight and not self._tasks_sending(),
            cpu_s=time.process_time(),
            late_s=late_s,
            run_queue_s=_run_queue_s(),
            kernel_stamps=self._client.kernel_stamps,
        )

    def _closed(self) -> list[Stream]:
        """Streams decoded to their end since the last call. Only now it is known which of them failed."""
        begin = self._reported
        while self._reported < len(self._finished) and self._finished[self._reported].closed:
            self._reported += 1
        for stream in self._finished[begin : self._reported]:
            if stream.error is None:
                self._failures_in_a_row = 0
            else:
                self._failed(stream.error, stream.ended_ns)
        return self._finished[begin : self._reported]

    async def pause(self) -> None:
        """Send no more requests; those in flight go on."""
        self._paused = True

    async def stop(self) -> list[Stream]:
        """Abort what still runs, close all connections and give every stream."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._client.decode()
        self._client.close()
        return self.streams

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tasks_sending(self) -> bool:
        return len(self._tasks) > 1  # the first watches the loop

    async def _watch_loop(self) -> None:
        """Note how late the event loop is."""
        period_s = 0.01
        while True:
            began = time.perf_counter()
            await asyncio.sleep(period_s)
            self._late_s = max(self._late_s, time.perf_counter() - began - period_s)

    # --- sending ----------------------------------------------------------------------------------------------------

    def _may_send(self) -> bool:
        if self._stopping or self._paused:
            return False
        return self._pattern.kind != BATCH or len(self.streams) < (self._pattern.requests or 0)

    def _build(self, share: float = 1.0) -> Stream:
        prompt = self._prompts[self._next]
        tokens = max(1, round(prompt.output_tokens * share))
        request = self.job.target.request(prompt, self.job.workload, tokens)
        stream = Stream(self._next, request, self._native, tokens, first_wave=share < 1)
        self._next += self.job.shards
        return stream

    def _take(self) -> Stream:
        return self._ready.popleft() if self._ready else self._build()

    def _refill(self) -> None:
        while len(self._ready) < _READY:
            self._ready.append(self._build())

    def _send(self, connection: Connection, stream: Stream) -> None:
        self.streams.append(stream)
        self._client.send(connection, stream)

    def _on_end(self, stream: Stream, connection: Connection | None) -> None:
        if stream.unanswered and self._pattern.is_open and not self._stopping:
            # The server closed an idle connection as the request was written: any client sends such a one again.
            stream.renew()
            self._spawn(self._open_and_send(stream))
            return
        self._finished.append(stream)
        if self._stopping:
            return
        delay_s = 0.0
        if stream.error is not None or stream.status != 200:
            rounds = self._failures_in_a_row // (self._pattern.concurrency or 1)
            delay_s = min(_MAX_RETRY_S, _RETRY_S * 2 ** min(rounds, 10))
        if self._pattern.is_open:
            if connection is not None:
                self._client.idle.append(connection)
        elif self._may_send():
            if connection is not None and not delay_s:
                self._send(connection, self._take())
            else:
                self._spawn(self._resume(connection, delay_s))

    def _failed(self, error: str, at_ns: int) -> None:
        if not self._failures_in_a_row:
            self._first_failure_ns = at_ns
        self._failures_in_a_row += 1
        self._last_error = error

    async def _resume(self, connection: Connection | None, delay_s: float) -> None:
        """Send another request in the place of one that failed or whose connection was closed."""
        while True:
            await asyncio.sleep(delay_s)
            try:
                connection = connection or await self._client.open()
            except OSError as error:
                self._failed(f"could not connect: {error.strerror or error}", time.time_ns())
                delay_s = min(_MAX_RETRY_S, max(delay_s, _RETRY_S) * 2)
                continue
            if self._may_send() and connection.sock.fileno() >= 0:
                self._send(connection, self._take())
                return
            if not self._may_send():
                return
            connection = None  # the server closed it meanwhile

    async def _keep_schedule(self, start_ns: int) -> None:
        """Send each request when it is due, late ones at once; ``scheduled_ns`` stays what it was."""
        job = self.job
        for number, due_s in enumerate(self._pattern.due_s(job.seed)):
            if number % job.shards != job.shard:
                continue
            due_ns = start_ns + round(due_s / job.scale * 1e9)
            delay_s = (due_ns - time.time_ns()) * 1e-9
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            if not self._may_send():
                return
            stream = self._take()
            stream.scheduled_ns = due_ns
            if self._client.idle:
                self._send(self._client.idle.pop(), stream)
            else:
                self._spawn(self._open_and_send(stream))
            if len(self._client.idle) + self._opening < self._spare():
                self._spawn(self._open_spare())
        self._paused = True  # a trace has an end

    def _spare(self) -> int:
        per_wall_s = self._pattern.mean_rate_per_s * self.job.scale / self.job.shards
        return min(_MAX_SPARE, max(_MIN_SPARE, math.ceil(per_wall_s * _SPARE_S)))

    async def _open_spare(self) -> None:
        self._opening += 1
        try:
            self._client.idle.append(await self._client.open())
        except OSError as error:
            self._failed(f"could not connect: {error.strerror or error}", time.time_ns())
        finally:
            self._opening -= 1

    async def _open_and_send(self, stream: Stream) -> None:
        if stream not in self.streams[-_MAX_SPARE:]:
            self.streams.append(stream)
        try:
            connection = await self._client.open()
        except OSError as error:
            stream.error = f"could not connect: {error.strerror or error}"
            stream.ended, stream.closed, stream.ended_ns = True, True, time.time_ns()
            self._finished.append(stream)
            return
        self._client.send(connection, stream)


def _allow_open_files() -> None:
    """Shells give 1,024 by default, fewer than the connections of a large level."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # a limit beyond what the system gives: it stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _run_queue_s() -> float | None:
    """Seconds that this process was ready but not running (second field of Linux's schedstat)."""
    try:
        with open("/proc/self/schedstat") as file:  # noqa: PTH123 - a third of pathlib's time
            return int(file.read().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return None


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Garbage collection stops the loop for milliseconds; nothing here makes cycles, so it can wait."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()
