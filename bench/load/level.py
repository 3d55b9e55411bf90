"""Level: measures one load level at a launched server, from the first connection to the measurement."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from bench.engines.protocol import ServerCounters
from bench.experiment import WorkloadSpec
from bench.load import metrics
from bench.load.driver import Driver, Harvest, Job, collector_off
from bench.load.evaluation import evaluate, steady_batch
from bench.load.evidence import Counted, Evidence
from bench.load.measurement import Interval, Measurement
from bench.load.patterns import BATCH, CLOSED, TRACE, Pattern
from bench.load.shards import RemoteDriver
from bench.load.stream import Stream
from bench.load.target import Target
from bench.load.window import STEPS_PER_BIN, TREND_BINS, Timeline, batch_means, bins_for, is_steady, shift
from bench.outcome import Cause

CONNECT_TIMEOUT_S = 10.0
COUNTERS_TIMEOUT_S = 5.0
DRAIN_TIMEOUT_S = 60.0
STALL_TIMEOUT_S = 120.0  # longer than kernels take to compile on first use
MIN_STALL_WALL_S = 5.0  # whatever the clock's scale: a busy host may pause for a second or two
GIVE_UP_AFTER_S = 0.5  # of wall time in which every request failed
MAX_RESTARTS = 3
RESTART_CHANGE = 0.10
OPEN_TREND = 0.5  # arrivals by chance make the throughput of ten bins look like a trend
_TICK_S, _SCALED_TICK_S = 0.05, 0.025


@dataclass(frozen=True)
class LevelFailure:
    """Why a level could not be measured: the cause, and what was seen."""

    cause: Cause
    detail: str


@dataclass(frozen=True)
class LevelResult:
    """What a level gave.

    Attributes:
        measurement: None when nothing was measured.
        requests: one row per request (requests-LEVEL.parquet), times in seconds from the window's start.
        stopped: ``should_stop`` said so.
        requests_finished, requests_empty, requests_miscounted: of those that ended well: all; without any token; with
            another count than asked for or than its chunks add up to.
    """

    measurement: Measurement | None
    requests: pa.Table
    failure: LevelFailure | None = None
    stopped: bool = False
    requests_finished: int = 0
    requests_empty: int = 0
    requests_miscounted: int = 0


@dataclass(frozen=True)
class Progress:
    """How a level stands, for a person who watches it.

    Attributes:
        phase: ``warm-up``, ``window`` or ``drain``.
    """

    phase: str
    elapsed_s: float
    in_flight: int
    requests_finished: int
    output_tok_per_s: Interval | None = None


ShouldStop = Callable[[float, Interval | None], bool]
ReadCounters = Callable[[], Awaitable[ServerCounters]]


async def measure_level(
    target: Target,
    workload: WorkloadSpec,
    concurrency: int,
    *,
    seed: int,
    salt: str = "",
    clock_scale: float = 1.0,
    should_stop: ShouldStop | None = None,
    read_counters: ReadCounters | None = None,
    server_alive: Callable[[], bool] | None = None,
    acceptance_simulated: bool = False,
    stall_timeout_s: float = STALL_TIMEOUT_S,
) -> LevelResult:
    """Keep ``concurrency`` requests in flight until the throughput is known well enough: :func:`measure_pattern`."""
    return await measure_pattern(
        target,
        workload,
        Pattern(CLOSED, concurrency),
        seed=seed,
        salt=salt,
        clock_scale=clock_scale,
        should_stop=should_stop,
        read_counters=read_counters,
        server_alive=server_alive,
        acceptance_simulated=acceptance_simulated,
        stall_timeout_s=stall_timeout_s,
    )


async def measure_pattern(
    target: Target,
    workload: WorkloadSpec,
    pattern: Pattern,
    *,
    seed: int,
    salt: str = "",
    clock_scale: float = 1.0,
    processes: int = 1,
    should_stop: ShouldStop | None = None,
    read_counters: ReadCounters | None = None,
    server_alive: Callable[[], bool] | None = None,
    acceptance_simulated: bool = False,
    stall_timeout_s: float = STALL_TIMEOUT_S,
    on_progress: Callable[[Progress], None] | None = None,
) -> LevelResult:
    """Send a pattern of requests until the throughput is known well enough; a batch until its last request.

    All seconds, of the workload as of the result, are the server's: wall seconds times ``clock_scale``.

    Args:
        seed, salt: of the prompts, with the pattern's concurrency or rate; the same give the same prompts.
        clock_scale: how much faster than real time the server's clock runs (a simulator's; else 1).
        processes: 1 sends from this one.
        should_stop: asked whenever there is news, with the seconds of window so far (0 during warm-up) and the interval
            of the throughput (during warm-up None in its first half and whenever it is not steady).
        read_counters: reads the server's own counters.
        server_alive: whether the server's process still runs.
        stall_timeout_s: without any chunk from any request, at most.

    Raises:
        ValueError: for a target or prompts that cannot be used; whatever the server does is in the result.
    """
    if workload.chat:
        target = replace(target, route="chat")
    level = _Level(
        Job(target, workload, pattern, seed, salt, clock_scale, shards=processes),
        should_stop=should_stop or (lambda _elapsed_s, _interval: False),
        read_counters=read_counters,
        server_alive=server_alive or (lambda: True),
        acceptance_simulated=acceptance_simulated,
        stall_wall_s=max(stall_timeout_s / clock_scale, MIN_STALL_WALL_S),
        on_progress=on_progress or (lambda _progress: None),
    )
    target.request(level.job.prompts()[0], workload, 1)  # raises where prompts do not go with the route
    with collector_off():
        return await level.run()


class _Failed(Exception):  # noqa: N818
    """The level cannot go on."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(detail)
        self.failure = LevelFailure(cause, detail)


@dataclass(eq=False)
class _Level:
    job: Job
    should_stop: ShouldStop
    read_counters: ReadCounters | None
    server_alive: Callable[[], bool]
    acceptance_simulated: bool
    stall_wall_s: float
    on_progress: Callable[[Progress], None]
    warnings: list[str] = field(default_factory=list)
    chunks: list[metrics.Integers] = field(default_factory=list)
    harvests: list[Harvest] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    request_wall_s: float = 0.0
    step_wall_s: float = 0.0
    stopped: bool = False
    began_ns: int = 0
    opened_ns: int = 0
    window_ns: int = 0
    end_ns: int = 0
    over_ns: int = 0
    cpu_share: float | None = None
    queued_share: float | None = None
    before: Counted | None = None
    after: Counted | None = None

    async def run(self) -> LevelResult:
        job = self.job
        if job.shards == 1:
            self.drivers: list[Driver | RemoteDriver] = [Driver(job)]
        else:
            self.drivers = [RemoteDriver(replace(job, shard=shard)) for shard in range(job.shards)]
        failure: LevelFailure | None = None
        clock_s = time.time() - time.monotonic()
        self.timeline = Timeline(time.time_ns())
        try:
            await self._connect()
            await asyncio.gather(*(driver.start() for driver in self.drivers))
            if job.pattern.kind in (BATCH, TRACE):
                await self._whole()
            else:
                await self._warm_up()
                await self._window()
                if job.pattern.is_open:
                    await self._drain()
        except _Failed as failed:
            failure = failed.failure
        finally:
            streams = await self._stop()
        self.clock_step_s = time.time() - time.monotonic() - clock_s
        return self._result(streams, failure)

    # --- phases -----------------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S + 2.0 * self.job.shards):
                await asyncio.gather(*(driver.connect() for driver in self.drivers))
        except (OSError, TimeoutError) as error:
            detail = f"could not connect to {self.job.target.base_url}: {error or 'no answer'}"
            raise self._dead(detail) from None
        self.began_ns = time.time_ns()

    async def _warm_up(self) -> None:
        """Wait until the throughput neither grows nor falls, and one mean request's time has passed."""
        limit_s = self.job.workload.max_warmup_s
        while True:
            now_ns = await self._tick()
            elapsed_s = self._seconds(now_ns - self.began_ns)
            self._tell("warm-up", elapsed_s, None)
            request_s = self._request_s(now_ns)
            steady_ns = self._steady_since(now_ns)
            half_way = elapsed_s >= min(request_s, limit_s) / 2
            if self.should_stop(0.0, self._so_far(steady_ns, now_ns) if steady_ns and half_way else None):
                # What was steady is all that there is of a window.
                self.window_ns, self.end_ns, self.stopped = steady_ns or now_ns, now_ns, True
                return
            if elapsed_s >= request_s and steady_ns:
                return
            if elapsed_s >= limit_s:
                self.warnings.append(
                    f"warm-up was ended at {limit_s:g} s before the throughput was steady or one request's time had "
                    "passed: the figures may still hold start-up effects; raise max_warmup_s"
                )
                return

    def _steady_since(self, now_ns: int) -> int | None:
        """The start of the last bins if the throughput was steady in them, else None."""
        bin_s = STEPS_PER_BIN * self.step_wall_s
        pattern = self.job.pattern
        if pattern.is_open and pattern.rate_per_s:
            bin_s = max(bin_s, 4 / (pattern.rate_per_s * self.job.scale))
        start_ns = now_ns - round(TREND_BINS * max(bin_s, 0.002) * 1e9)
        if not self.step_wall_s or start_ns <= self.began_ns + pattern.ramp_s / self.job.scale * 1e9:
            return None
        rates, _ = self.timeline.rates(start_ns, now_ns, TREND_BINS)
        steady = is_steady(rates, tolerated_change=OPEN_TREND) if pattern.is_open else is_steady(rates)
        return start_ns if steady else None

    def _so_far(self, start_ns: int, now_ns: int) -> Interval:
        rates, widths_s = self.timeline.rates(start_ns, now_ns, TREND_BINS)
        return batch_means(rates / self.job.scale, widths_s * self.job.scale)

    def _request_s(self, now_ns: int) -> float:
        """About how long a request takes: in a closed loop by Little's law from the throughput of the last half of the
        warm-up, since the first requests are cut short; in an open loop as seen.
        """
        if self.job.pattern.is_open:
            return self.request_wall_s * self.job.scale or float("inf")
        middle_ns = (self.began_ns + now_ns) // 2
        tokens = self.timeline.tokens_between(middle_ns, now_ns)
        if not tokens:
            return float("inf")
        enough = len(self.lengths) >= 8
        length = sum(self.lengths) / len(self.lengths) if enough else self.job.workload.output_tokens
        return (self.job.pattern.concurrency or 0) * length / (tokens / self._seconds(now_ns - middle_ns))

    async def _window(self) -> None:
        """Measure until the interval is narrow, the time is up, or nobody wants to know any more."""
        if self.stopped:
            return
        await self._open_window()
        work = self.job.workload
        first_ns, restarts, asked_s = self.window_ns, 0, 0.0
        while True:
            now_ns = self.end_ns = await self._tick()
            total_s = self._seconds(now_ns - first_ns)
            elapsed_s = self._seconds(now_ns - self.window_ns)
            over = total_s >= work.max_window_s
            step_s = self.step_wall_s * self.job.scale
            if not over and elapsed_s - asked_s < max(step_s, min(STEPS_PER_BIN * step_s, work.min_window_s / 20)):
                continue
            asked_s = elapsed_s
            rates, widths_s = self._rates()
            interval = batch_means(rates, widths_s) if len(rates) >= 3 else None
            self._tell("window", elapsed_s, interval)
            if self.should_stop(elapsed_s, interval):
                self.stopped = True
                break
            if over:
                break
            if elapsed_s < work.min_window_s or interval is None:
                continue
            place = shift(rates) if restarts < MAX_RESTARTS and not self.job.pattern.is_open else None
            if place and place <= len(rates) // 2:
                change = abs(rates[place:].mean() / rates[:place].mean() - 1)
                if change > RESTART_CHANGE:  # it was not steady yet: what came before the change is warm-up
                    self.window_ns += round(widths_s[:place].sum() / self.job.scale * 1e9)
                    self.before = await self._read_counters()
                    restarts += 1
                    asked_s = 0.0
                    continue
            if interval.relative_half_width <= work.target_relative_half_width:
                break
        await self._close_window()
        if restarts:
            self.warnings.append(f"the throughput jumped inside the window, which was begun anew ({restarts} x)")

    async def _whole(self) -> None:
        """Let all requests of a batch or a trace run."""
        await self._tick()
        await self._open_window()
        limit_ns = self.job.workload.max_window_s / self.job.scale * 1e9
        while True:
            now_ns = self.end_ns = await self._tick()
            elapsed_s = self._seconds(now_ns - self.began_ns)
            self._tell("window", elapsed_s, None)
            if self.should_stop(elapsed_s, None):
                self.stopped = True
                break
            if all(harvest.exhausted for harvest in self.harvests):
                break
            if now_ns - self.began_ns > limit_ns:
                self.warnings.append(f"the {self.job.pattern.kind} was ended by max_window_s before its last request")
                break
        await self._close_window()

    async def _drain(self) -> None:
        """Let the requests that were due in the window end, so that the slow ones are among those counted."""
        await asyncio.gather(*(driver.pause() for driver in self.drivers))
        began_ns = time.time_ns()
        while True:
            now_ns = await self._tick()
            waited_s = self._seconds(now_ns - began_ns)
            in_flight = sum(harvest.in_flight for harvest in self.harvests)
            self._tell("drain", waited_s, None)
            if not in_flight:
                return
            if waited_s > DRAIN_TIMEOUT_S:
                self.warnings.append(
                    f"{in_flight} requests had not ended {DRAIN_TIMEOUT_S:g} s after the window and are not in the "
                    "latencies: the server does not keep up with the rate"
                )
                return

    async def _open_window(self) -> None:
        self.before = await self._read_counters()
        self.opened = tuple(self.harvests)
        self.late_s.clear()
        self.window_ns = self.opened_ns = time.time_ns()

    async def _close_window(self) -> None:
        span_s = (self.end_ns - self.opened_ns) * 1e-9  # a window that was begun anew is shorter
        if len(self.opened) == len(self.harvests) and span_s > 0:
            pairs = list(zip(self.opened, self.harvests, strict=True))
            self.cpu_share = max(after.cpu_s - before.cpu_s for before, after in pairs) / span_s
            queued_s = max((after.run_queue_s or 0.0) - (before.run_queue_s or 0.0) for before, after in pairs)
            self.queued_share = queued_s / span_s
        self.after = await self._read_counters()

    def _rates(self) -> tuple[metrics.Floats, metrics.Floats]:
        """Tokens per second and seconds of the window's bins."""
        length_s = (self.end_ns - self.window_ns) * 1e-9
        rates, widths_s = self.timeline.rates(self.window_ns, self.end_ns, bins_for(length_s, self.step_wall_s))
        return rates / self.job.scale, widths_s * self.job.scale

    # --- what the phases share --------------------------------------------------------------------------------------

    async def _tick(self) -> int:
        """Let requests run for a moment, then take what arrived; the time up to which all of it was taken.

        Raises:
            _Failed: when the level cannot go on.
        """
        await asyncio.sleep(_TICK_S if self.job.scale == 1 else _SCALED_TICK_S)
        now_ns = time.time_ns()
        try:
            self.harvests = await asyncio.gather(*(driver.collect() for driver in self.drivers))
        except OSError as error:
            raise _Failed(Cause.OTHER, str(error)) from None
        for harvest in self.harvests:
            self._take(harvest)
        self.late_s.append(max(harvest.late_s for harvest in self.harvests))
        self._check(now_ns)
        return now_ns

    def _take(self, harvest: Harvest) -> None:
        _, arrival_ns, _, tokens, gap_ns = harvest.chunks.T
        self.chunks.append(harvest.chunks)
        self.timeline.add(arrival_ns, tokens)
        if (gap_ns > 0).any():
            self.step_wall_s = float(np.median(gap_ns[gap_ns > 0])) * 1e-9
        self.lengths += harvest.lengths
        if harvest.request_s:
            self.request_wall_s = harvest.request_s

    def _check(self, now_ns: int) -> None:
        if not self.server_alive():
            raise _Failed(Cause.ENGINE_CRASH, "the server's process ended under load")
        in_flight = sum(harvest.in_flight for harvest in self.harvests)
        finished = sum(harvest.finished for harvest in self.harvests)
        silent_s = (now_ns - max(harvest.last_read_ns for harvest in self.harvests)) * 1e-9
        if in_flight and silent_s > self.stall_wall_s:
            raise _Failed(
                Cause.SERVING_HANG,
                f"no chunk from any of {in_flight} requests for {silent_s * self.job.scale:.0f} s",
            )
        failing = [harvest for harvest in self.harvests if harvest.failures_in_a_row]
        enough = max(8, self.job.pattern.concurrency or 0)
        if not failing and finished >= enough and not any(len(chunks) for chunks in self.chunks):
            raise _Failed(Cause.GARBAGE_OUTPUT, f"the first {finished} replies held no token")
        if len(failing) < len(self.harvests) or sum(h.failures_in_a_row for h in failing) < min(8, enough):
            return
        if (now_ns - max(harvest.first_failure_ns for harvest in failing)) * 1e-9 > GIVE_UP_AFTER_S:
            count = sum(harvest.failures_in_a_row for harvest in failing)
            raise self._dead(f"{count} failures in a row, the last one: {failing[0].last_error}")

    def _dead(self, detail: str) -> _Failed:
        return _Failed(Cause.SERVER_ERRORS if self.server_alive() else Cause.ENGINE_CRASH, detail)

    async def _read_counters(self) -> Counted | None:
        if self.read_counters is None:
            return None
        try:
            async with asyncio.timeout(COUNTERS_TIMEOUT_S):
                counters = await self.read_counters()
        except Exception as error:  # a cross-check must not end what it checks
            self.warnings.append(f"the server's counters could not be read: {error!r}")
            return None
        return Counted(time.time_ns(), counters)

    async def _stop(self) -> list[Stream]:
        self.over_ns = time.time_ns()
        with contextlib.suppress(OSError):
            for harvest in await asyncio.gather(*(driver.collect() for driver in self.drivers)):
                self._take(harvest)
        stopped = await asyncio.gather(*(driver.stop() for driver in self.drivers), return_exceptions=True)
        streams = [stream for found in stopped if isinstance(found, list) for stream in found]
        return sorted(streams, key=lambda stream: stream.index)

    def _tell(self, phase: str, elapsed_s: float, interval: Interval | None) -> None:
        in_flight = sum(harvest.in_flight for harvest in self.harvests)
        finished = sum(harvest.finished for harvest in self.harvests)
        self.on_progress(Progress(phase, elapsed_s, in_flight, finished, interval))

    def _seconds(self, wall_ns: float) -> float:
        return wall_ns * 1e-9 * self.job.scale

    # --- result -----------------------------------------------------------------------------------------------------

    def _result(self, streams: list[Stream], failure: LevelFailure | None) -> LevelResult:
        finished = [stream for stream in streams if stream.ok]
        empty = sum(stream.tokens == 0 for stream in finished)
        ignore_eos = self.job.workload.ignore_eos
        wrong = sum(stream.tokens > 0 and stream.miscounted(ignore_eos=ignore_eos) for stream in finished)
        if failure is None and (empty + wrong) > len(finished) / 2:
            detail = f"of {len(finished)} replies {empty} held no token and {wrong} another count than was asked for"
            failure = LevelFailure(Cause.GARBAGE_OUTPUT, detail)
        if self.job.pattern.kind == BATCH:
            start_ns, end_ns = steady_batch(streams)
            if end_ns > start_ns:
                self.window_ns, self.end_ns = start_ns, end_ns
        if self.job.pattern.kind == TRACE:
            self.window_ns = self.began_ns
        start_ns = self.window_ns or self.began_ns
        measured = self.window_ns and self.end_ns > self.window_ns
        return LevelResult(
            measurement=evaluate(self._evidence(streams, failure)) if measured else None,
            requests=metrics.table(streams, start_ns, self.end_ns, 1e-9 * self.job.scale),
            failure=failure,
            stopped=self.stopped,
            requests_finished=len(finished),
            requests_empty=empty,
            requests_miscounted=wrong,
        )

    def _evidence(self, streams: list[Stream], failure: LevelFailure | None) -> Evidence:
        rates, widths_s = self._rates()
        return Evidence(
            job=self.job,
            streams=streams,
            chunks=np.concatenate(self.chunks),
            timeline=self.timeline,
            began_ns=self.began_ns,
            start_ns=self.window_ns,
            end_ns=self.end_ns,
            over_ns=self.over_ns,
            rates=rates,
            widths_s=widths_s,
            failure=failure.detail if failure else None,
            warnings=self.warnings,
            before=self.before,
            after=self.after,
            cpu_share=self.cpu_share,
            queued_share=self.queued_share,
            late_s=self.late_s,
            clock_step_s=self.clock_step_s,
            kernel_stamps=bool(self.harvests) and all(harvest.kernel_stamps for harvest in self.harvests),
            acceptance_simulated=self.acceptance_simulated,
        )
