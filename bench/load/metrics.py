"""Metrics: from streams and their chunks to a measurement. The definitions are in docs/load.md."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bench.load.measurement import Summary
from bench.load.stream import COLUMNS, Stream

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Latencies:
    """Distributions over a window; a metric without a sample is None."""

    ttft_s: Summary | None
    ttft_scheduled_s: Summary | None
    ttfat_s: Summary | None
    tpot_s: Summary | None
    itl_s: Summary | None
    icl_s: Summary | None
    e2e_s: Summary | None
    e2e_scheduled_s: Summary | None


def summary(values: Floats) -> Summary | None:
    """Distribution of samples of equal weight."""
    if not len(values):
        return None
    p50, p90, p95, p99 = np.quantile(values, (0.5, 0.9, 0.95, 0.99))
    return Summary(
        len(values), float(values.mean()), float(p50), float(p90), float(p95), float(p99), float(values.max())
    )


def weighted_summary(values: Floats, weights: Floats) -> Summary | None:
    """Distribution of samples that stand for ``weights`` samples each."""
    if not len(values):
        return None
    order = np.argsort(values)
    values, below = values[order], np.cumsum(weights[order])
    total = below[-1]
    places = np.searchsorted(below, np.array((0.5, 0.9, 0.95, 0.99)) * total)
    p50, p90, p95, p99 = (float(values[min(place, len(values) - 1)]) for place in places)
    mean = float((values * weights[order]).sum() / total)
    return Summary(round(float(total)), mean, p50, p90, p95, p99, float(values[-1]))


def latencies(
    streams: Sequence[Stream], chunks: Integers, start_ns: int, end_ns: int, seconds: float, *, scheduled: bool
) -> Latencies:
    """Latencies in a window: of first tokens, last tokens and gaps that lie in it; where requests were due at given
    times, of the requests that were due in it, however late they were served. Failed requests are left out.

    Args:
        chunks: rows of ``COLUMNS``, in any order.
        seconds: per nanosecond of the stamps (1e-9, times the clock's scale).
        scheduled: the requests were due at given times.
    """
    good = [stream for stream in streams if stream.error is None]

    def inside(stream: Stream, stamp_ns: int) -> bool:
        return bool(stamp_ns) and start_ns < (stream.scheduled_ns if scheduled else stamp_ns) <= end_ns

    first = [s for s in good if inside(s, s.first_ns)]
    answered = [s for s in good if inside(s, s.first_answer_ns)]
    finished = [s for s in good if s.closed and inside(s, s.last_ns)]
    whole = [s for s in finished if not s.first_wave]

    def took(pairs: Sequence[tuple[int, int]]) -> Summary | None:
        return summary(np.array([end - begin for begin, end in pairs], np.float64) * seconds)

    tpot = [(s.last_ns - s.first_ns) / (s.tokens - s.first_tokens) for s in finished if s.tokens > s.first_tokens]
    gaps_s, tokens = _gaps(good, chunks, start_ns, end_ns, seconds)
    return Latencies(
        ttft_s=took([(s.sent_ns, s.first_ns) for s in first]),
        ttft_scheduled_s=took([(s.scheduled_ns, s.first_ns) for s in first]) if scheduled else None,
        ttfat_s=took([(s.sent_ns, s.first_answer_ns) for s in answered]),
        tpot_s=summary(np.array(tpot, np.float64) * seconds),
        itl_s=weighted_summary(gaps_s / tokens, tokens),
        icl_s=summary(gaps_s),
        e2e_s=took([(s.sent_ns, s.last_ns) for s in whole]),
        e2e_scheduled_s=took([(s.scheduled_ns, s.last_ns) for s in whole]) if scheduled else None,
    )


def _gaps(
    good: Sequence[Stream], chunks: Integers, start_ns: int, end_ns: int, seconds: float
) -> tuple[Floats, Floats]:
    """Gaps that end in the window, in seconds, and the tokens that each of them brought."""
    request, arrival_ns, _, tokens, gap_ns = chunks.T
    size = int(request.max()) + 1 if len(chunks) else 0
    per_chunk = np.zeros(size)  # 0 marks a failed request
    for stream in good:
        if stream.index < size:
            per_chunk[stream.index] = 1 if stream.counted or not stream.chunks else stream.tokens / stream.chunks
    chosen = (arrival_ns > start_ns) & (arrival_ns <= end_ns) & (gap_ns >= 0)
    chosen &= per_chunk[request] > 0
    return gap_ns[chosen] * seconds, tokens[chosen] * per_chunk[request[chosen]]


def acceptance(streams: Sequence[Stream], start_ns: int, end_ns: int) -> tuple[float | None, int | None]:
    """Acceptance length of the requests that finished in the window, and their verify steps; None without any.

    The token that prefill gives needs no verify step, so it is not counted.
    """
    counted = [s for s in streams if s.ok and s.verify_steps and start_ns < s.last_ns <= end_ns]
    steps = sum(s.verify_steps or 0 for s in counted)
    return (sum(s.tokens - 1 for s in counted) / steps, steps) if steps else (None, None)


def accepted_histogram(streams: Sequence[Stream], start_ns: int, end_ns: int) -> tuple[int, ...]:
    """Verify steps by accepted drafts, of the requests that finished in the window."""
    found = [s.accepted_histogram for s in streams if s.ok and start_ns < s.last_ns <= end_ns]
    width = max(map(len, found), default=0)
    return tuple(sum(histogram[place] for histogram in found if place < len(histogram)) for place in range(width))


def in_flight(streams: Sequence[Stream], start_ns: int, end_ns: int) -> float:
    """Mean number of requests between write and last chunk."""
    total = 0
    for stream in streams:
        if stream.sent_ns:
            until = max(stream.last_ns, stream.sent_ns) if stream.ended else end_ns
            total += max(0, min(until, end_ns) - max(stream.sent_ns, start_ns))
    return total / (end_ns - start_ns)


def table(streams: Sequence[Stream], start_ns: int, end_ns: int, seconds: float) -> pa.Table:
    """Every request as a row; times are seconds since the window's start, negative before it."""

    def at(stamp_ns: int) -> float | None:
        return (stamp_ns - start_ns) * seconds if stamp_ns else None

    columns = {
        "index": [s.index for s in streams],
        "status": ["failed" if s.error else "ok" if s.closed else "aborted" for s in streams],
        "error": [s.error for s in streams],
        "finish_reason": [s.finish_reason for s in streams],
        "first_wave": [s.first_wave for s in streams],
        "finished_in_window": [s.ok and start_ns < s.last_ns <= end_ns for s in streams],
        "scheduled_s": [at(s.scheduled_ns) for s in streams],
        "sent_s": [at(s.sent_ns) for s in streams],
        "ended_s": [at(s.ended_ns) for s in streams],
        "first_token_s": [at(s.first_ns) for s in streams],
        "first_answer_token_s": [at(s.first_answer_ns) for s in streams],
        "last_token_s": [at(s.last_ns) for s in streams],
        "asked_tokens": [s.asked_tokens for s in streams],
        "output_tokens": [s.tokens for s in streams],
        "first_chunk_tokens": [s.first_tokens for s in streams],
        "chunks": [s.chunks for s in streams],
        "prompt_tokens": [s.prompt_tokens for s in streams],
        "cached_tokens": [s.cached_tokens for s in streams],
        "verify_steps": [s.verify_steps for s in streams],
        "retractions": [s.retractions for s in streams],
    }
    return pa.table(columns, schema=_SCHEMA)


_INT, _FLOAT, _TEXT, _BOOL = pa.int64(), pa.float64(), pa.string(), pa.bool_()
_SCHEMA = pa.schema(
    {
        "index": _INT,
        "status": _TEXT,
        "error": _TEXT,
        "finish_reason": _TEXT,
        "first_wave": _BOOL,
        "finished_in_window": _BOOL,
        "scheduled_s": _FLOAT,
        "sent_s": _FLOAT,
        "ended_s": _FLOAT,
        "first_token_s": _FLOAT,
        "first_answer_token_s": _FLOAT,
        "last_token_s": _FLOAT,
        "asked_tokens": _INT,
        "output_tokens": _INT,
        "first_chunk_tokens": _INT,
        "chunks": _INT,
        "prompt_tokens": _INT,
        "cached_tokens": _INT,
        "verify_steps": _INT,
        "retractions": _INT,
    }
)


def rows(flat: array[int]) -> Integers:
    """Chunk rows of a flat buffer of ``COLUMNS``."""
    return np.frombuffer(flat, np.int64).reshape(-1, len(COLUMNS)).copy()
