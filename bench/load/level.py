"""Level: drives one load level at a launched server, from the first connection to the measurement."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import orjson
import pyarrow as pa

from bench.engines.protocol import ServerCounters
from bench.experiment import WorkloadSpec
from bench.load import metrics
from bench.load.client import Client, Connection, Target
from bench.load.measurement import Interval, Measurement
from bench.load.prompts import Prompt, PromptSet
from bench.load.stream import Stream
from bench.load.window import STEPS_PER_BIN, Timeline, batch_means, bins_for, is_steady, shift
from bench.outcome import Cause

__all__ = ["LevelResult", "Target", "measure_level"]

CONNECT_TIMEOUT_S = 10.0
COUNTERS_TIMEOUT_S = 5.0
STALL_TIMEOUT_S = 120.0  # longer than kernels take to compile on first use
MIN_STALL_WALL_S = 5.0  # whatever the clock's scale: a busy host may pause for a second or two
GIVE_UP_AFTER_S = 0.5  # of wall time in which every request failed
MAX_FAILED_SHARE = 0.05
MAX_COUNTER_DISAGREEMENT = 0.02
MAX_RESTARTS = 3
RESTART_CHANGE = 0.10
STALE_LAG_SHARE, VOID_LAG_SHARE = 0.05, 0.5  # of the median gap between chunks
BUSY_SHARE, VOID_BUSY_SHARE = 0.7, 0.95  # of a core
_TICK_S = 0.05
_RETRY_S, _MAX_RETRY_S = 0.05, 1.0
_READY = 64  # requests that are built ahead


@dataclass(frozen=True)
class LevelResult:
    """What a level gave.

    Attributes:
        measurement: None when nothing was measured.
        failure: why the level failed, else None; ``detail`` says what was seen.
        requests: one row per request (requests.parquet), times in seconds from the window's start.
        stopped: ``should_stop`` said so.
        requests_finished, requests_empty, requests_miscounted, requests_repetitive: of those that ended well: all;
            without any token; with another count than asked for or than its chunks add up to; saying one thing only.
    """

    measurement: Measurement | None
    requests: pa.Table
    failure: Cause | None = None
    detail: str = ""
    stopped: bool = False
    requests_finished: int = 0
    requests_empty: int = 0
    requests_miscounted: int = 0
    requests_repetitive: int = 0


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
    """Keep ``concurrency`` requests in flight until the throughput is known well enough.

    All seconds, of the workload as of the result, are the server's: wall seconds times ``clock_scale``.

    Args:
        seed, salt: of the prompts, with the concurrency; the same give the same prompts.
        clock_scale: how much faster than real time the server's clock runs (a simulator's; else 1).
        should_stop: asked whenever there is news, with the seconds of window so far and the interval of the throughput
            (0 and None during warm-up).
        read_counters: reads the server's own counters.
        server_alive: whether the server's process still runs.
        stall_timeout_s: without any chunk from any request, at most.

    Raises:
        ValueError: for a target or prompts that cannot be used; whatever the server does is in the result.
    """
    level = _Level(
        replace(target, route="chat") if workload.chat else target,
        workload,
        concurrency,
        prompts=PromptSet(workload, seed=seed, level=concurrency, salt=salt),
        seed=seed,
        scale=clock_scale,
        should_stop=should_stop or (lambda _elapsed_s, _interval: False),
        read_counters=read_counters,
        server_alive=server_alive or (lambda: True),
        acceptance_simulated=acceptance_simulated,
        stall_wall_s=max(stall_timeout_s / clock_scale, MIN_STALL_WALL_S),
    )
    with _collector_off():
        return await level.run()


class _Failed(Exception):  # noqa: N818
    """The level cannot go on."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(detail)
        self.cause, self.detail = cause, detail


@dataclass(frozen=True)
class _Counted:
    """The server's counters and when they were read."""

    at_ns: int
    counters: ServerCounters


@dataclass(eq=False)
class _Level:
    target: Target
    workload: WorkloadSpec
    concurrency: int
    prompts: PromptSet
    seed: int
    scale: float
    should_stop: ShouldStop
    read_counters: ReadCounters | None
    server_alive: Callable[[], bool]
    acceptance_simulated: bool
    stall_wall_s: float
    streams: list[Stream] = field(default_factory=list)
    ready: deque[Stream] = field(default_factory=deque)
    warnings: list[str] = field(default_factory=list)
    stopping: bool = False
    stopped: bool = False
    began_ns: int = 0
    window_ns: int = 0
    end_ns: int = 0
    failures_in_a_row: int = 0
    first_failure_ns: int = 0
    step_wall_s: float = 0.0
    cpu_s: float = 0.0
    before: _Counted | None = None
    after: _Counted | None = None

    async def run(self) -> LevelResult:
        self.native = self.target.route == "generate"
        self.client = Client(self.target, self._on_end)
        self.next_index = 0
        self.seen_rows = 0
        self.retries: set[asyncio.Task[None]] = set()
        self.finished: list[Stream] = []
        self.late_s: list[float] = []
        failure: _Failed | None = None
        try:
            await self._connect()
            self._start()
            await self._warm_up()
            await self._window()
        except _Failed as failed:
            failure = failed
        finally:
            await self._stop()
        return self._result(failure)

    # --- requests ---------------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self.client.connect(self.concurrency)
        except (OSError, TimeoutError) as error:
            detail = f"could not open {self.concurrency} connections to {self.target.base_url}: {error or 'no answer'}"
            raise self._dead(detail) from None

    def _start(self) -> None:
        """Send one request on every connection, with lengths that spread as ages do in a running system."""
        order = list(range(self.concurrency))
        random.Random(self.seed).shuffle(order)
        for place in order:
            share = (place + 0.5) / self.concurrency
            self.ready.append(self._build(share))
        self.began_ns = time.time_ns()
        self.timeline = Timeline(self.began_ns)
        self.client.last_read_ns = self.began_ns
        while self.client.idle:
            self._send(self.client.idle.pop())

    def _build(self, share: float = 1.0) -> Stream:
        prompt = self.prompts[self.next_index]
        tokens = max(1, round(prompt.output_tokens * share))
        request = self.target.request_bytes(_body(self.target, self.workload, prompt, tokens))
        stream = Stream(self.next_index, request, self.native, tokens, first_wave=share < 1)
        self.next_index += 1
        return stream

    def _send(self, connection: Connection) -> None:
        stream = self.ready.popleft() if self.ready else self._build()
        self.streams.append(stream)
        self.client.send(connection, stream)

    def _on_end(self, stream: Stream, connection: Connection | None) -> None:
        self.finished.append(stream)
        if self.stopping:
            return
        if stream.error is None and stream.status == 200 and connection is not None:
            self.failures_in_a_row = 0
            self._send(connection)
            return
        if stream.error is None and stream.status == 200:
            self.failures_in_a_row = 0
            delay_s = 0.0
        else:
            self.first_failure_ns = self.first_failure_ns if self.failures_in_a_row else time.time_ns()
            self.failures_in_a_row += 1
            delay_s = min(_MAX_RETRY_S, _RETRY_S * 2 ** (self.failures_in_a_row // self.concurrency))
        task = asyncio.get_running_loop().create_task(self._resume(connection, delay_s))
        self.retries.add(task)
        task.add_done_callback(self.retries.discard)

    async def _resume(self, connection: Connection | None, delay_s: float) -> None:
        """Put another request in the place of one that failed or whose connection was closed."""
        while not self.stopping:
            await asyncio.sleep(delay_s)
            try:
                connection = connection or await self.client.open()
            except OSError as error:
                self.first_failure_ns = self.first_failure_ns if self.failures_in_a_row else time.time_ns()
                self.failures_in_a_row += 1
                self.last_connect_error = f"connect: {error.strerror or error}"
                delay_s = min(_MAX_RETRY_S, max(delay_s, _RETRY_S) * 2)
                continue
            self._send(connection)
            return

    async def _stop(self) -> None:
        self.stopping = True
        for task in self.retries:
            task.cancel()
        await asyncio.gather(*self.retries, return_exceptions=True)
        await self.client.decode()
        self.client.close()

    # --- phases -----------------------------------------------------------------------------------------------------

    async def _warm_up(self) -> None:
        """Wait until the throughput neither grows nor falls, and one mean request's time has passed."""
        limit_s = self.workload.max_warmup_s
        while True:
            now_ns = await self._tick()
            elapsed_s = self._seconds(now_ns - self.began_ns)
            if self.should_stop(0.0, None):
                self.stopped = True
                return
            if self.step_wall_s and elapsed_s >= self._request_s(now_ns):
                length_ns = round(10 * max(STEPS_PER_BIN * self.step_wall_s, 0.002) * 1e9)
                if now_ns - length_ns > self.began_ns:
                    rates, _ = self.timeline.rates(now_ns - length_ns, now_ns, 10)
                    if is_steady(rates):
                        return
            if elapsed_s >= limit_s:
                self.warnings.append(
                    f"warm-up was ended at {limit_s:g} s before the throughput was steady or one request's time had "
                    "passed: the figures may still hold start-up effects; raise max_warmup_s"
                )
                return

    def _request_s(self, now_ns: int) -> float:
        """About how long a request takes, by Little's law from the throughput of the last half of the warm-up."""
        middle_ns = (self.began_ns + now_ns) // 2
        tokens = self.timeline.tokens_between(middle_ns, now_ns)
        if not tokens:
            return float("inf")
        lengths = [s.tokens for s in self.finished if not s.first_wave]
        length = sum(lengths) / len(lengths) if len(lengths) >= 8 else self.workload.output_tokens
        return self.concurrency * length / (tokens / self._seconds(now_ns - middle_ns))

    async def _window(self) -> None:
        """Measure until the interval is narrow, the time is up, or nobody wants to know any more."""
        if self.stopped:
            return
        self.before = await self._read_counters()
        self.cpu_s = -time.process_time()
        self.late_s.clear()
        first_ns = self.window_ns = time.time_ns()
        restarts = 0
        asked_s = 0.0
        work = self.workload
        while True:
            now_ns = self.end_ns = await self._tick()
            total_s = self._seconds(now_ns - first_ns)
            elapsed_s = self._seconds(now_ns - self.window_ns)
            step_s = self.step_wall_s * self.scale
            if elapsed_s - asked_s < max(step_s, min(STEPS_PER_BIN * step_s, work.min_window_s / 20)) and (
                total_s < work.max_window_s
            ):
                continue
            asked_s = elapsed_s
            rates, widths_s = self._rates()
            interval = batch_means(rates, widths_s)
            if self.should_stop(elapsed_s, interval if len(rates) >= 3 else None):
                self.stopped = True
                break
            if total_s >= work.max_window_s:
                break
            if elapsed_s < work.min_window_s:
                continue
            place = shift(rates) if restarts < MAX_RESTARTS else None
            if place and place <= len(rates) // 2:
                change = abs(rates[place:].mean() / rates[:place].mean() - 1)
                if change > RESTART_CHANGE:  # it was not steady yet: what came before the change is warm-up
                    self.window_ns += round(widths_s[:place].sum() / self.scale * 1e9)
                    restarts += 1
                    asked_s = 0.0
                    continue
            if interval.relative_half_width <= work.target_relative_half_width:
                break
        self.cpu_s += time.process_time()
        self.after = await self._read_counters()
        if restarts:
            self.warnings.append(f"the throughput jumped {restarts} times inside the window, which was begun anew")

    def _rates(self) -> tuple[metrics.Floats, metrics.Floats]:
        """Tokens per second and seconds of the window's bins."""
        length_s = (self.end_ns - self.window_ns) * 1e-9
        rates, widths_s = self.timeline.rates(self.window_ns, self.end_ns, bins_for(length_s, self.step_wall_s))
        return rates / self.scale, widths_s * self.scale

    async def _tick(self) -> int:
        """Let requests run for a moment, then decode what arrived; the time up to which everything is decoded.

        Raises:
            _Failed: when the level cannot go on.
        """
        period_s = _TICK_S if self.scale == 1 else _TICK_S / 2
        began = time.perf_counter()
        await asyncio.sleep(period_s)
        self.late_s.append(time.perf_counter() - began - period_s)
        now_ns = time.time_ns()
        await self.client.decode()
        fresh = metrics.rows(self.client.chunks[self.seen_rows :])
        self.seen_rows = len(self.client.chunks)
        self.timeline.add(fresh[:, 1], fresh[:, 3])
        gaps_ns = fresh[:, 4][fresh[:, 4] > 0]
        if len(gaps_ns):
            self.step_wall_s = float(np.median(gaps_ns)) * 1e-9
        self._check(now_ns)
        while len(self.ready) < min(_READY, self.concurrency):
            self.ready.append(self._build())
        return now_ns

    def _check(self, now_ns: int) -> None:
        if not self.server_alive():
            raise _Failed(Cause.ENGINE_CRASH, "the server's process ended under load")
        silent_s = (now_ns - self.client.last_read_ns) * 1e-9
        if silent_s > self.stall_wall_s:
            raise _Failed(
                Cause.SERVING_HANG,
                f"no chunk from any of {self.client.in_flight} requests for {silent_s * self.scale:.0f} s",
            )
        if not self.client.chunks and len(self.finished) >= max(8, self.concurrency) and not self.failures_in_a_row:
            raise _Failed(Cause.GARBAGE_OUTPUT, f"the first {len(self.finished)} replies held no token")
        if self.failures_in_a_row >= min(8, self.concurrency + 1):
            failing_s = (now_ns - self.first_failure_ns) * 1e-9
            if failing_s > GIVE_UP_AFTER_S:
                raise self._dead(f"{self.failures_in_a_row} failures in a row, the last one: {self._last_error()}")

    def _last_error(self) -> str:
        errors = [stream.error for stream in self.streams[-4 * self.concurrency :] if stream.error]
        return errors[-1] if errors else getattr(self, "last_connect_error", "unknown")

    def _dead(self, detail: str) -> _Failed:
        return _Failed(Cause.SERVER_ERRORS if self.server_alive() else Cause.ENGINE_CRASH, detail)

    async def _read_counters(self) -> _Counted | None:
        if self.read_counters is None:
            return None
        try:
            async with asyncio.timeout(COUNTERS_TIMEOUT_S):
                counters = await self.read_counters()
        except Exception as error:
            self.warnings.append(f"the server's counters could not be read: {error!r}")
            return None
        return _Counted(time.time_ns(), counters)

    def _seconds(self, wall_ns: float) -> float:
        return wall_ns * 1e-9 * self.scale

    # --- result -----------------------------------------------------------------------------------------------------

    def _result(self, failure: _Failed | None) -> LevelResult:
        start_ns = self.window_ns or self.began_ns
        finished = [s for s in self.streams if s.ok]
        empty = sum(s.tokens == 0 for s in finished)
        wrong = sum(s.tokens > 0 and self._miscounted(s) for s in finished)
        if failure is None and finished and (empty + wrong) > len(finished) / 2:
            detail = f"of {len(finished)} replies {empty} held no token and {wrong} another count than was asked for"
            failure = _Failed(Cause.GARBAGE_OUTPUT, detail)
        measured = self.window_ns and self.end_ns > self.window_ns
        return LevelResult(
            measurement=self._measurement(failure) if measured else None,
            requests=metrics.table(self.streams, start_ns, self.end_ns, 1e-9 * self.scale),
            failure=failure.cause if failure else None,
            detail=failure.detail if failure else "",
            stopped=self.stopped,
            requests_finished=len(finished),
            requests_empty=empty,
            requests_miscounted=wrong,
            requests_repetitive=sum(_repeats(s.text) for s in finished),
        )

    def _miscounted(self, stream: Stream) -> bool:
        return stream.miscounted or (self.workload.ignore_eos and stream.tokens != stream.asked_tokens)

    def _measurement(self, failure: _Failed | None) -> Measurement:
        start_ns, end_ns, seconds = self.window_ns, self.end_ns, 1e-9 * self.scale
        window_s = self._seconds(end_ns - start_ns)
        chunks = metrics.rows(self.client.chunks)
        ended = [s for s in self.streams if s.ended and start_ns < s.ended_ns <= end_ns]
        ok = [s for s in ended if s.ok]
        interval = batch_means(*self._rates())
        latencies = metrics.latencies(self.streams, chunks, start_ns, end_ns, seconds, scheduled=False)
        acceptance, verify_steps = metrics.acceptance(self.streams, start_ns, end_ns)
        in_flight = metrics.in_flight(self.streams, start_ns, end_ns)
        inside = chunks[(chunks[:, 1] > start_ns) & (chunks[:, 1] <= end_ns)]
        lag_s = float(np.quantile(inside[:, 2], 0.99)) * 1e-9 if len(inside) else 0.0
        if not self.client.kernel_stamps and self.late_s:
            lag_s = float(np.quantile(self.late_s, 0.99))
        measurement = Measurement(
            pattern="closed",
            valid=True,
            window_s=window_s,
            warmup_s=self._seconds(start_ns - self.began_ns),
            duration_s=self._seconds(end_ns - self.began_ns),
            output_tok_per_s=interval,
            request_per_s=len(ok) / window_s,
            ttft_s=latencies.ttft_s,
            tpot_s=latencies.tpot_s,
            itl_s=latencies.itl_s,
            icl_s=latencies.icl_s,
            e2e_s=latencies.e2e_s,
            in_flight_mean=in_flight,
            requests_ok=len(ok),
            requests_failed=len(ended) - len(ok),
            prompt_tokens=sum(s.prompt_tokens or 0 for s in ok),
            output_tokens=int(inside[:, 3].sum()),
            cached_tokens=sum(s.cached_tokens or 0 for s in ok),
            retractions=self._retractions(),
            prompts_hash=self.prompts.hash,
            seed=self.seed,
            concurrency=self.concurrency,
            acceptance_length=acceptance,
            verify_steps=verify_steps,
            acceptance_simulated=self.acceptance_simulated,
            step_time_s=in_flight * (acceptance or 1.0) / interval.mean if interval.mean else None,
            server_output_tok_per_s=self._server_rate(),
            client_lag_p99_s=lag_s * self.scale,
            client_cpu_share=self.cpu_s / (window_s / self.scale) if self.cpu_s > 0 else None,
        )
        void = self._void(measurement, failure)
        return replace(measurement, valid=not void, warnings=(*void, *self.warnings, *self._doubts(measurement)))

    def _retractions(self) -> int:
        """By the requests' own count or the server's, whichever saw more."""
        told = sum(s.retractions for s in self.streams)
        if self.before and self.after:
            before, after = self.before.counters.retractions, self.after.counters.retractions
            if before is not None and after is not None:
                return max(told, round(after - before))
        return told

    def _server_rate(self) -> float | None:
        if self.before is None or self.after is None:
            return None
        before, after = self.before.counters.generated_tokens, self.after.counters.generated_tokens
        if before is None or after is None:
            return None
        return (after - before) / self._seconds(self.after.at_ns - self.before.at_ns)

    def _void(self, measurement: Measurement, failure: _Failed | None) -> list[str]:
        """Why the numbers must not be used, one sentence each."""
        reasons = []
        if failure is not None:
            reasons.append(f"the level failed: {failure.detail}")
        done = measurement.requests_ok + measurement.requests_failed
        if measurement.requests_failed > MAX_FAILED_SHARE * done:
            reasons.append(
                f"{measurement.requests_failed} of {done} requests failed (the first: {self._first_error()}); at most "
                f"{MAX_FAILED_SHARE:.0%} may, since the rest ran with less load than asked for"
            )
        if not measurement.output_tokens:
            reasons.append("no token arrived inside the window; check the server, or lengthen min_window_s")
        if self.scale != 1:  # a simulation shares its cores with us, and its time is not the wall's
            return reasons
        gap_s, lag_s = measurement.icl_s.p50 if measurement.icl_s else 0.0, measurement.client_lag_p99_s or 0.0
        if gap_s and lag_s > VOID_LAG_SHARE * gap_s:
            reasons.append(
                f"the client handled chunks up to {lag_s * 1e3:.2g} ms late (p99) where they come every "
                f"{gap_s * 1e3:.2g} ms, so arrivals were merged; give it a core of its own or more processes"
            )
        if (measurement.client_cpu_share or 0) > VOID_BUSY_SHARE:
            reasons.append(
                f"the client used {measurement.client_cpu_share:.0%} of its core and was measured instead of the "
                "server; give it more processes"
            )
        return reasons

    def _doubts(self, measurement: Measurement) -> list[str]:
        """What a reader of the numbers should know, one sentence each."""
        doubts = []
        early = sum(s.error is not None and s.ended_ns <= self.window_ns for s in self.streams if s.ended)
        if early:
            doubts.append(f"{early} requests failed during warm-up (the first: {self._first_error()})")
        if measurement.requests_failed > 0:
            doubts.append(f"{measurement.requests_failed} requests failed (the first: {self._first_error()})")
        if measurement.in_flight_mean < 0.95 * self.concurrency:
            doubts.append(
                f"{measurement.in_flight_mean:.1f} requests were in flight on average, not {self.concurrency}; "
                "the server closes connections or the client is late"
            )
        if measurement.e2e_s is None:
            doubts.append("no whole request fits the window, so there is no end-to-end latency; raise min_window_s")
        if any(not s.counted for s in self.streams):
            doubts.append(
                "the server does not count tokens in its chunks: each was taken for an equal share of its reply, so "
                "itl_s follows the chunks"
            )
        size = self.prompts.size
        if size is not None and self.next_index > size:
            doubts.append(f"the {size} prompts were used more than once, so a prefix cache answered part of them")
        if sum(_repeats(s.text) for s in self.streams) > len(self.finished) / 2:
            doubts.append("most replies repeat one thing: dummy weights, or a broken kernel")
        if measurement.acceptance_length is not None and not self.acceptance_simulated:
            doubts += self._unlike_use()
        if self.scale == 1 and (measurement.client_cpu_share or 0) > BUSY_SHARE:
            doubts.append(
                f"the client used {measurement.client_cpu_share:.0%} of its core; latencies may be the client's"
            )
        rate, ours = measurement.server_output_tok_per_s, self._rate_between_counters()
        if rate is not None and ours is not None:
            # Engines add up every so many steps (SGLang's --decode-log-interval: 40), at each end of the span.
            slack = _COUNTER_STEPS * (measurement.step_time_s or 0.0) / measurement.window_s
            if abs(rate / ours - 1) > MAX_COUNTER_DISAGREEMENT + slack:
                doubts.append(
                    f"the server counted {rate:.1f} output tok/s and the client {ours:.1f} over the same time; "
                    "somebody else uses the server, or one of the two counts wrongly"
                )
        return doubts

    def _rate_between_counters(self) -> float | None:
        if self.before is None or self.after is None:
            return None
        tokens = self.timeline.tokens_between(self.before.at_ns, self.after.at_ns)
        return tokens / self._seconds(self.after.at_ns - self.before.at_ns) if tokens else None

    def _unlike_use(self) -> list[str]:
        """What makes acceptance unlike that of real use."""
        causes = []
        if self.workload.prompts.kind == "random_ids":
            causes.append("the prompts are random ids")
        elif not self.workload.chat:
            causes.append("no chat template was applied")
        if self.workload.ignore_eos:
            causes.append("ignore_eos makes the model write past its end")
        return [f"the acceptance length may differ from real use: {', '.join(causes)}"] if causes else []

    def _first_error(self) -> str:
        return next((s.error for s in self.streams if s.error), "")


_COUNTER_STEPS = 40


def _body(target: Target, workload: WorkloadSpec, prompt: Prompt, tokens: int) -> bytes:
    """The JSON of a request.

    Raises:
        ValueError: when the prompt's kind does not go with the route.
    """
    if target.route == "generate":
        sampling = {"max_new_tokens": tokens, "temperature": workload.temperature, "ignore_eos": workload.ignore_eos}
        if prompt.messages is not None:
            raise ValueError("chat messages need the chat route (workload.chat: true), not generate")
        content = {"input_ids": prompt.ids} if prompt.ids is not None else {"text": prompt.text}
        return orjson.dumps({**content, "sampling_params": sampling, "stream": True})
    body: dict[str, object] = {
        "model": target.model or "default",
        "max_tokens": tokens,
        "temperature": workload.temperature,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if workload.ignore_eos:
        body["ignore_eos"] = True
    if target.speculation_details:
        body["return_spec_tokens_details"] = True
    if target.route == "completions":
        if prompt.messages is not None:
            raise ValueError("chat messages need the chat route (workload.chat: true), not completions")
        body["prompt"] = prompt.ids if prompt.ids is not None else prompt.text
    elif prompt.ids is not None:
        raise ValueError("the chat route takes text, not token ids; use generate or completions for random_ids")
    else:
        body["messages"] = prompt.messages or [{"role": "user", "content": prompt.text}]
    return orjson.dumps(body)


def _repeats(text: str) -> bool:
    """Whether a reply says one thing over and over."""
    words = text.split()
    return len(text) >= 32 and (len(set(text)) <= 2 or (len(words) >= 8 and len(set(words)) <= 2))


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
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
