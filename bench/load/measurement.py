"""Measurement: what one load level gave, with units in the names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % confidence interval.

    Attributes:
        method: how it was computed, e.g. ``batch means, 20 bins of 1.2 s, t``.
    """

    mean: float
    low: float
    high: float
    method: str = ""

    @property
    def relative_half_width(self) -> float:
        return (self.high - self.low) / 2 / self.mean if self.mean else float("inf")


@dataclass(frozen=True)
class Summary:
    """Distribution of one latency over all samples of the window, in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True)
class Measurement:
    """One load level at one launched server.

    Attributes:
        pattern: ``closed``, ``poisson``, ``gamma``, ``constant`` or ``batch``.
        concurrency: requests in flight that were asked for (closed loop), else None.
        request_rate_per_s: arrivals that were asked for (open loop), else None.
        valid: False when the numbers must not be used; ``warnings`` then says why.
        warnings: one sentence each: what was seen, why it matters, what to do.
        window_s: length of the steady window that the throughput is taken from.
        output_tok_per_s: from tokens that arrived inside the window.
        ttft_s: request written to first chunk with content.
        ttft_scheduled_s: from the time at which it was due (open loop), else None.
        ttfat_s: to the first token of the answer, where reasoning comes before it.
        e2e_scheduled_s: from the time at which it was due to the last token (open loop), else None.
        tpot_s: per request ``(last - first) / (tokens - tokens of the first chunk)``.
        itl_s: every gap spread over its tokens.
        icl_s: gap between chunks.
        acceptance_length: ``sum(tokens - 1) / sum(verify steps)`` over the window's requests; None without speculation.
        acceptance_simulated: the engine was told to simulate acceptance.
        step_time_s: ``mean in flight * acceptance length / output tok/s``: what one decode step took.
        server_output_tok_per_s: the same from the server's own counters over the window, None where it has none.
        client_lag_p99_s: handling time less arrival time of chunks.
        client_cpu_share: of one core, over the window.
        prompts_hash: of the prompt set used.
        accepted_histogram: verify steps by the number of drafts that they accepted, where the server tells it.
        intervals: 95 % intervals of headline latencies by name, e.g. ``ttft_s.p95``, where samples were enough.
    """

    pattern: str
    valid: bool
    window_s: float
    warmup_s: float
    duration_s: float
    output_tok_per_s: Interval
    request_per_s: float
    ttft_s: Summary | None
    tpot_s: Summary | None
    itl_s: Summary | None
    icl_s: Summary | None
    e2e_s: Summary | None
    in_flight_mean: float
    requests_ok: int
    requests_failed: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    retractions: int
    prompts_hash: str
    seed: int
    concurrency: int | None = None
    request_rate_per_s: float | None = None
    ttft_scheduled_s: Summary | None = None
    acceptance_length: float | None = None
    verify_steps: int | None = None
    acceptance_simulated: bool = False
    step_time_s: float | None = None
    server_output_tok_per_s: float | None = None
    client_lag_p99_s: float | None = None
    client_cpu_share: float | None = None
    warnings: tuple[str, ...] = ()
    ttfat_s: Summary | None = None
    e2e_scheduled_s: Summary | None = None
    accepted_histogram: tuple[int, ...] = ()
    intervals: tuple[tuple[str, Interval], ...] = ()
