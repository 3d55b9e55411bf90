"""Doubts: reasons not to use a measurement, or to read it with care, one sentence each."""

from __future__ import annotations

import numpy as np

from bench.load import metrics
from bench.load.driver import Job
from bench.load.evidence import Evidence
from bench.load.measurement import Measurement
from bench.load.patterns import CLOSED

MAX_FAILED_SHARE = 0.05
MAX_COUNTER_DISAGREEMENT = 0.02
_COUNTER_STEPS = 40  # engines may add up every so many steps (SGLang's --decode-log-interval)
MERGING_LAG_SHARE = 0.5  # of the median gap between chunks: beyond it, chunks are merged before they are read
# Of a request's time, for one chunk in a hundred. A request starts late by the mean lag, not by this tail: where a CPU
# engine shares two cores with the client, requests of 250 ms saw tails of 91 ms.
VOID_LAG_SHARE = 0.5
BUSY_SHARE, VOID_BUSY_SHARE = 0.7, 0.95  # of a core
QUEUED_SHARE = 0.05  # of the window, without a core though there was work
SEND_LAG_SHARE = 0.05  # of the median time to first token
MAX_CLOCK_STEP_S = 1e-3
MIN_IN_FLIGHT_SHARE = 0.95


def void(seen: Evidence, got: Measurement) -> list[str]:
    """Why the numbers must not be used."""
    reasons = []
    if seen.failure is not None:
        reasons.append(f"the level failed: {seen.failure}")
    done = got.requests_ok + got.requests_failed
    if got.requests_failed > MAX_FAILED_SHARE * done:
        reasons.append(
            f"{got.requests_failed} of {done} requests failed (the first: {seen.first_error}); at most "
            f"{MAX_FAILED_SHARE:.0%} may, since the rest ran with less load than asked for"
        )
    if not got.output_tokens:
        reasons.append("no token arrived inside the window; check the server, or lengthen min_window_s")
    if abs(seen.clock_step_s) > MAX_CLOCK_STEP_S:
        reasons.append(
            f"the host's clock was set by {seen.clock_step_s * 1e3:.1f} ms during the level, and arrivals are stamped "
            "with it; measure again"
        )
    if seen.job.scale != 1:  # a simulation shares its cores with us, and its time is not the wall's
        return reasons
    # In a closed loop every request starts late by about the lag, and the throughput is short by that share.
    whole_s, lag_s = got.e2e_s.p50 if got.e2e_s else 0.0, got.client_lag_p99_s or 0.0
    if whole_s and lag_s > VOID_LAG_SHARE * whole_s:
        reasons.append(
            f"the client handled chunks up to {lag_s * 1e3:.2g} ms late while a request takes "
            f"{whole_s * 1e3:.2g} ms, so it held the load back; give it a core of its own or more processes"
        )
    if (seen.cpu_share or 0) > VOID_BUSY_SHARE:
        reasons.append(
            f"the client used {seen.cpu_share:.0%} of its core and was measured instead of the server; give it more "
            "processes"
        )
    return reasons


def merged(seen: Evidence, got: Measurement) -> bool:
    """Whether chunks were read so late that their gaps are the client's; counts and whole requests are not touched."""
    gap_s, lag_s = got.icl_s.p50 if got.icl_s else 0.0, got.client_lag_p99_s or 0.0
    return seen.job.scale == 1 and gap_s > 0 and lag_s > MERGING_LAG_SHARE * gap_s


def doubts(seen: Evidence, got: Measurement) -> list[str]:
    """What a reader of the numbers should know."""
    job = seen.job
    found: list[str] = []
    early = sum(s.error is not None and s.ended_ns <= seen.start_ns for s in seen.streams if s.ended)
    if early:
        found.append(f"{early} requests failed before the window (the first: {seen.first_error})")
    if got.requests_failed:
        found.append(f"{got.requests_failed} requests failed (the first: {seen.first_error})")
    wanted = job.pattern.concurrency
    if job.pattern.kind == CLOSED and wanted and got.in_flight_mean < MIN_IN_FLIGHT_SHARE * wanted:
        why = "the server closes connections or the client is late"
        if job.scale != 1:
            why = (
                f"the server's clock runs {job.scale:g} times as fast as ours, so each moment of a busy host is as long"
            )
        found.append(f"{got.in_flight_mean:.1f} requests were in flight on average, not {wanted}; {why}")
    if got.e2e_s is None:
        found.append("no whole request fits the window, so there is no end-to-end latency; raise min_window_s")
    if any(not s.counted for s in seen.streams):
        found.append(
            "the server does not count tokens in its chunks: each was taken for an equal share of its reply, so itl_s "
            "follows the chunks"
        )
    size, used = job.prompts().size, len(seen.streams)
    if size is not None and used > size:
        cached = got.cached_tokens / got.prompt_tokens if got.prompt_tokens else 0.0
        found.append(
            f"the {size} prompts were used more than once, so a prefix cache answered part of them ({cached:.0%} of "
            "the prompt tokens); configurations that cache more have less to do"
        )
    finished = seen.ok
    wrong = sum(s.miscounted(ignore_eos=job.workload.ignore_eos) for s in finished)
    if wrong:
        found.append(
            f"{wrong} of {len(finished)} replies have another number of tokens than their chunks add up to or than was "
            "asked for"
        )
    if sum(s.repeats for s in finished) > len(finished) / 2:
        found.append("most replies repeat one thing: dummy weights, or a broken kernel")
    if got.acceptance_length is not None and not seen.acceptance_simulated:
        found += _unlike_use(job)
    if got.retractions:
        found.append(f"{got.retractions} requests were retracted: the server ran out of memory for the load")
    if job.pattern.is_open and _overloaded(seen):
        found.append(
            "requests in flight and first tokens' delay grew all through the window: the server does not keep up with "
            "the rate, and the latencies depend on how long one measures"
        )
    return found + _client_doubts(seen, got) + _server_doubts(seen, got)


def _unlike_use(job: Job) -> list[str]:
    """What makes acceptance unlike that of real use."""
    causes = []
    if job.workload.prompts.kind == "random_ids":
        causes.append("the prompts are random ids")
    elif not job.workload.chat:
        causes.append("no chat template was applied")
    if job.workload.ignore_eos:
        causes.append("ignore_eos makes the model write past its end")
    return [f"the acceptance length may differ from real use: {', '.join(causes)}"] if causes else []


def _client_doubts(seen: Evidence, got: Measurement) -> list[str]:
    found: list[str] = []
    if seen.job.scale != 1:
        return found
    if merged(seen, got):
        lag_ms = (got.client_lag_p99_s or 0) * 1e3
        found.append(
            f"the client handled chunks up to {lag_ms:.2g} ms late, longer than half the gap "
            "between them, so chunks were merged and itl_s and icl_s are left out; give it a core of its own"
        )
    if (seen.cpu_share or 0) > BUSY_SHARE:
        found.append(f"the client used {seen.cpu_share:.0%} of its core; latencies may be the client's")
    if (seen.queued_share or 0) > QUEUED_SHARE:
        found.append(f"the client waited for a core {seen.queued_share:.0%} of the time: something else runs on it")
    sent = [s for s in seen.streams if s.scheduled_ns and s.sent_ns and seen.start_ns < s.scheduled_ns <= seen.end_ns]
    if sent and got.ttft_s:
        lag_s = float(np.quantile([s.sent_ns - s.scheduled_ns for s in sent], 0.99)) * seen.seconds
        if lag_s > SEND_LAG_SHARE * got.ttft_s.p50:
            found.append(
                f"requests were sent up to {lag_s * 1e3:.2g} ms after they were due (p99); ttft_sched_s, which starts "
                "when they were due, holds it"
            )
    return found


def _server_doubts(seen: Evidence, got: Measurement) -> list[str]:
    """Where the server's own count differs. It may count tokens as they come, or when their request ends."""
    rate = got.server_output_tok_per_s
    if rate is None or seen.before is None or seen.after is None:
        return []
    begin_ns, end_ns = seen.before.at_ns, seen.after.at_ns
    span_s = (end_ns - begin_ns) * seen.seconds
    arrived = seen.timeline.tokens_between(begin_ns, end_ns) / span_s
    lengths = [s.tokens for s in seen.streams if s.ended and begin_ns < s.last_ns <= end_ns]
    ended = sum(lengths) / span_s
    longest = max(lengths, default=0)
    arrived_slack = _COUNTER_STEPS * (got.step_time_s or 0.0) * arrived + longest
    allowed = MAX_COUNTER_DISAGREEMENT
    if abs(rate - arrived) <= allowed * arrived + arrived_slack / span_s:
        return []
    if abs(rate - ended) <= allowed * ended + longest / span_s:
        return []
    return [
        f"the server counted {rate:.1f} output tok/s and the client {arrived:.1f} over the same time; somebody else "
        "uses the server, or one of the two counts wrongly"
    ]


def _overloaded(seen: Evidence) -> bool:
    """Whether an open loop's queue only grew: half again as many in flight in the window's last third as in its first,
    and first tokens half again as late.
    """
    third = (seen.end_ns - seen.start_ns) // 3
    early = (seen.start_ns, seen.start_ns + third)
    late = (seen.end_ns - third, seen.end_ns)
    if metrics.in_flight(seen.streams, *late) <= 1.5 * metrics.in_flight(seen.streams, *early):
        return False

    def first_s(span: tuple[int, int]) -> float:
        waits = [
            s.first_ns - s.scheduled_ns for s in seen.streams if s.first_ns and span[0] < s.scheduled_ns <= span[1]
        ]
        return float(np.median(waits)) if waits else 0.0

    return first_s(late) > 1.5 * first_s(early)
