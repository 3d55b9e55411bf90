"""Evaluation: from a level's evidence to its measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from bench.load import metrics
from bench.load.doubts import doubts, merged, void
from bench.load.evidence import Evidence
from bench.load.measurement import Interval, Measurement
from bench.load.patterns import CLOSED
from bench.load.stream import Stream
from bench.load.window import batch_means, sectioned

_BATCH_BUSY = 0.9


def evaluate(seen: Evidence) -> Measurement:
    """The measurement, with one sentence for each reason not to use it (then it is not valid) or to doubt it."""
    pattern, start_ns, end_ns = seen.job.pattern, seen.start_ns, seen.end_ns
    ok = [stream for stream in seen.ended if stream.ok]
    rate = batch_means(seen.rates, seen.widths_s)
    latencies = metrics.latencies(seen.streams, seen.chunks, start_ns, end_ns, seen.seconds, scheduled=pattern.is_open)
    accepted = metrics.acceptance(seen.streams, start_ns, end_ns)
    in_flight = metrics.in_flight(seen.streams, start_ns, end_ns)
    arrival_ns, lag_ns, tokens, gap_ns = seen.chunks[:, 1:].T
    inside = (arrival_ns > start_ns) & (arrival_ns <= end_ns)
    if seen.kernel_stamps:
        lag_s = float(np.quantile(lag_ns[inside], 0.99)) * seen.seconds if inside.any() else None
    else:
        lag_s = max(seen.late_s, default=0.0) * seen.job.scale
    per_chunk = float(tokens[inside & (gap_ns >= 0)].mean()) if (inside & (gap_ns >= 0)).any() else 1.0
    per_step = accepted[0] or (1.0 if per_chunk < 1.01 else None)  # several tokens a chunk: steps are not known
    measurement = Measurement(
        pattern=pattern.kind,
        valid=True,
        window_s=seen.window_s,
        warmup_s=(start_ns - seen.began_ns) * seen.seconds,
        duration_s=(seen.over_ns - seen.began_ns) * seen.seconds,
        output_tok_per_s=rate,
        request_per_s=len(ok) / seen.window_s,
        ttft_s=latencies.ttft_s,
        ttft_scheduled_s=latencies.ttft_scheduled_s,
        ttfat_s=latencies.ttfat_s,
        tpot_s=latencies.tpot_s,
        itl_s=latencies.itl_s,
        icl_s=latencies.icl_s,
        e2e_s=latencies.e2e_s,
        e2e_scheduled_s=latencies.e2e_scheduled_s,
        in_flight_mean=in_flight,
        requests_ok=len(ok),
        requests_failed=len(seen.ended) - len(ok),
        prompt_tokens=sum(s.prompt_tokens or 0 for s in ok),
        output_tokens=int(tokens[inside].sum()),
        cached_tokens=sum(s.cached_tokens or 0 for s in ok),
        retractions=_retractions(seen),
        prompts_hash=seen.job.prompts().hash,
        seed=seen.job.seed,
        concurrency=pattern.concurrency,
        request_rate_per_s=pattern.rate_per_s,
        acceptance_length=accepted[0],
        verify_steps=accepted[1],
        acceptance_simulated=seen.acceptance_simulated,
        step_time_s=in_flight * per_step / rate.mean if per_step and rate.mean and pattern.kind == CLOSED else None,
        server_output_tok_per_s=_server_rate(seen),
        client_lag_p99_s=lag_s,
        client_cpu_share=seen.cpu_share,
        accepted_histogram=metrics.accepted_histogram(seen.streams, start_ns, end_ns),
        intervals=_intervals(seen),
    )
    reasons = void(seen, measurement)
    warnings = (*reasons, *seen.warnings, *doubts(seen, measurement))
    if merged(seen, measurement):
        measurement = replace(measurement, itl_s=None, icl_s=None)
    return replace(measurement, valid=not reasons, warnings=warnings)


def _intervals(seen: Evidence) -> tuple[tuple[str, Interval], ...]:
    """95 % intervals of the headline latencies, by sections of requests in the order of their samples."""
    found: list[tuple[str, Interval]] = []

    def add(name: str, ends: Callable[[Stream], int], take: Callable[[Stream], float], *, whole: bool) -> None:
        inside = [s for s in seen.streams if s.error is None and seen.start_ns < ends(s) <= seen.end_ns]
        chosen = sorted((s for s in inside if s.closed or not whole), key=ends)
        values = np.array([take(s) for s in chosen], np.float64) * seen.seconds
        for statistic in ("mean", "p50", "p95"):
            interval = sectioned(values, statistic)
            if interval is not None:
                found.append((f"{name}.{statistic}", interval))

    add("ttft_s", lambda s: s.first_ns, lambda s: s.first_ns - s.sent_ns, whole=False)
    if seen.job.pattern.is_open:
        add("ttft_scheduled_s", lambda s: s.scheduled_ns, lambda s: s.first_ns - s.scheduled_ns, whole=True)
    add(
        "tpot_s",
        lambda s: s.last_ns if s.tokens > s.first_tokens else 0,
        lambda s: (s.last_ns - s.first_ns) / (s.tokens - s.first_tokens),
        whole=True,
    )
    add("e2e_s", lambda s: 0 if s.first_wave else s.last_ns, lambda s: s.last_ns - s.sent_ns, whole=True)
    return tuple(found)


def _retractions(seen: Evidence) -> int:
    """By the requests' own count or the server's, whichever saw more."""
    told = sum(s.retractions for s in seen.streams)
    if seen.before and seen.after:
        before, after = seen.before.counters.retractions, seen.after.counters.retractions
        if before is not None and after is not None:
            return max(told, round(after - before))
    return told


def _server_rate(seen: Evidence) -> float | None:
    if seen.before is None or seen.after is None:
        return None
    before, after = seen.before.counters.generated_tokens, seen.after.counters.generated_tokens
    if before is None or after is None:
        return None
    return (after - before) / ((seen.after.at_ns - seen.before.at_ns) * seen.seconds)


def steady_batch(streams: Sequence[Stream]) -> tuple[int, int]:
    """From when nine tenths of the most requests at once were running until when they last were: the ramp before it
    and the tail after it say how long the batch is, not how fast the server.
    """
    running = [s for s in streams if s.first_ns and s.last_ns > s.first_ns]
    if not running:
        return 0, 0
    times = np.array([[s.first_ns, s.last_ns] for s in running])
    stamps = times.ravel()
    steps = np.tile([1, -1], len(running))
    order = np.argsort(stamps, kind="stable")
    stamps, count = stamps[order], np.cumsum(steps[order])
    busy = np.flatnonzero(count >= _BATCH_BUSY * count.max())
    return int(stamps[busy[0]]), int(stamps[min(busy[-1] + 1, len(stamps) - 1)])
