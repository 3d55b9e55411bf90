"""What a measured level says, against a server that knows the truth."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from bench.engines.protocol import ServerCounters
from bench.experiment import PromptSpec, WorkloadSpec
from bench.load.level import LevelResult, measure_level, measure_pattern
from bench.load.measurement import Interval
from bench.load.patterns import Pattern
from bench.load.target import Target
from bench.outcome import Cause
from tests.load.stub import Behaviour, Stub, random_cuts, serving

pytestmark = pytest.mark.timeout(60)


def workload(**changes: object) -> WorkloadSpec:
    values = {
        "name": "test",
        "prompts": PromptSpec("text", 32),
        "levels": (4,),
        "output_tokens": 20,
        "min_window_s": 0.1,
        "max_window_s": 2.0,
        "max_warmup_s": 3.0,
        "target_relative_half_width": 0.5,
    }
    return WorkloadSpec(**(values | changes))


async def measure(
    stub: Stub, *, concurrency: int = 4, route: str = "generate", spec: WorkloadSpec | None = None, **more: object
) -> LevelResult:
    return await measure_level(Target(stub.url, route), spec or workload(), concurrency, seed=1, **more)


def whole(result: LevelResult) -> list[dict]:
    return [row for row in result.requests.to_pylist() if row["status"] == "ok"]


@pytest.mark.parametrize("route", ["generate", "completions", "chat"])
async def test_tokens_are_counted_exactly_however_bytes_are_cut(route: str) -> None:
    behaviour = Behaviour(
        tokens_per_chunk=lambda chunk: 1 + chunk % 4, cut=random_cuts(1), prefix=b": keep-alive\n\n", empty_every=3
    )
    async with serving(behaviour) as stub:
        result = await measure(stub, route=route)
    assert result.failure is None
    assert len(whole(result)) > 8
    assert all(row["output_tokens"] == row["asked_tokens"] for row in whole(result))
    assert result.requests_miscounted == 0


async def test_the_gap_of_a_chunk_is_spread_over_its_tokens() -> None:
    async with serving(Behaviour(tokens_per_chunk=lambda _chunk: 3)) as stub:
        got = (await measure(stub)).measurement
    assert got.itl_s.count == pytest.approx(3 * got.icl_s.count, rel=0.1)
    assert got.itl_s.mean * got.itl_s.count == pytest.approx(got.icl_s.mean * got.icl_s.count)


async def test_tokens_of_the_first_chunk_are_not_in_the_time_per_token() -> None:
    # 12 tokens at once, then one by one: dividing by n - 1 would more than halve it.
    async with serving(Behaviour(tokens_per_chunk=lambda chunk: 12 if chunk == 0 else 1)) as stub:
        result = await measure(stub)
    rows = [row for row in whole(result) if row["finished_in_window"] and row["output_tokens"] > 12]
    assert {row["first_chunk_tokens"] for row in rows} == {12}
    times = [(row["last_token_s"] - row["first_token_s"]) / (row["output_tokens"] - 12) for row in rows]
    assert result.measurement.tpot_s.count == len(rows)
    assert result.measurement.tpot_s.mean == pytest.approx(sum(times) / len(times))


async def test_tokens_that_a_parser_holds_back_count_when_they_are_told() -> None:
    async with serving(Behaviour(empty_every=1, text="", answers_at=0)) as stub:
        result = await measure(stub, route="completions")
    assert all(row["output_tokens"] == row["asked_tokens"] for row in whole(result))


async def test_a_reply_that_ends_early_is_counted_as_long_as_it_is() -> None:
    async with serving(Behaviour(length_of=lambda asked: max(1, asked // 2))) as stub:
        result = await measure(stub, spec=workload(ignore_eos=False))
    assert result.failure is None
    assert all(row["output_tokens"] == max(1, row["asked_tokens"] // 2) for row in whole(result))


async def test_text_that_would_tokenise_otherwise_does_not_change_the_count() -> None:
    async with serving(Behaviour(text="!!!!!!!!! ")) as stub:
        got = await measure(stub)
    assert all(row["output_tokens"] == row["asked_tokens"] for row in whole(got))
    assert any("repeat" in warning for warning in got.measurement.warnings)


async def test_acceptance_is_of_this_run_and_leaves_out_the_token_of_prefill() -> None:
    behaviour = Behaviour(tokens_per_chunk=lambda chunk: 1 if chunk == 0 else 3, verify_steps=True)
    async with serving(behaviour) as stub:
        result = await measure(stub, spec=workload(output_tokens=25))
    got = result.measurement
    rows = [row for row in whole(result) if row["finished_in_window"]]
    steps = sum(row["verify_steps"] for row in rows)
    assert got.verify_steps == steps
    assert got.acceptance_length == pytest.approx(sum(row["output_tokens"] - 1 for row in rows) / steps)
    assert any("no chat template" in warning for warning in got.warnings)


async def test_acceptance_of_random_ids_is_doubted() -> None:
    spec = workload(prompts=PromptSpec("random_ids", 16, vocabulary_size=1000))
    async with serving(Behaviour(verify_steps=True)) as stub:
        got = (await measure(stub, spec=spec)).measurement
    assert any("random ids" in warning for warning in got.warnings)


async def test_time_to_first_token_is_of_content_and_to_the_answer_is_later() -> None:
    async with serving(Behaviour(answers_at=8)) as stub:
        got = (await measure(stub, route="chat", spec=workload(chat=True))).measurement
    assert got.ttfat_s.mean > got.ttft_s.mean + 5 * got.icl_s.p50


async def test_prompts_of_one_level_differ_and_no_level_repeats_them() -> None:
    async with serving(Behaviour()) as stub:
        await measure(stub)
        first = {body["text"] for body in stub.requests}
        assert len(first) == len(stub.requests)
        await measure(stub, concurrency=2)
        assert not first & {body["text"] for body in stub.requests[len(first) :]}


async def test_cached_tokens_are_in_the_record() -> None:
    async with serving(Behaviour(cached_tokens=5)) as stub:
        got = (await measure(stub)).measurement
    assert got.cached_tokens == 5 * got.requests_ok
    assert got.prompt_tokens == 7 * got.requests_ok


async def test_connections_are_kept() -> None:
    async with serving(Behaviour()) as stub:
        await measure(stub)
        assert stub.connections == 4
        assert len(stub.requests) > 8


async def test_a_server_that_closes_after_each_reply_is_measured_all_the_same() -> None:
    async with serving(Behaviour(keep_alive=False, chunked=False)) as stub:
        result = await measure(stub)
    assert result.failure is None
    assert result.measurement.requests_failed == 0
    assert all(row["output_tokens"] == row["asked_tokens"] for row in whole(result))


async def test_more_streams_than_pools_allow_run_at_once() -> None:
    async with serving(Behaviour(step_s=0.02)) as stub:
        result = await measure(stub, concurrency=120, spec=workload(output_tokens=8))
    assert result.measurement.in_flight_mean == pytest.approx(120, rel=0.1)


async def test_a_failed_request_in_a_hundred_is_in_the_record_and_in_no_latency() -> None:
    behaviour = Behaviour(reset_after=lambda number: 3 if number % 100 == 50 else None)
    async with serving(behaviour) as stub:
        result = await measure(stub, concurrency=8, spec=workload(output_tokens=8, min_window_s=0.5))
    got = result.measurement
    failed = [row for row in result.requests.to_pylist() if row["status"] == "failed"]
    assert failed
    assert not any("at most" in warning for warning in got.warnings)
    assert all("closed" in row["error"] or "lost" in row["error"] for row in failed)
    ended = [row for row in whole(result) if row["finished_in_window"]]
    assert got.tpot_s.count == sum(row["output_tokens"] > row["first_chunk_tokens"] for row in ended)
    assert got.requests_ok == len(ended)
    assert any("failed" in warning for warning in got.warnings)


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        (Behaviour(status=lambda _number: 503), "HTTP 503"),
        (Behaviour(status=lambda _number: 400), "no such thing"),
        (Behaviour(error_event=lambda _number: True), "out of luck"),
        (Behaviour(reset_after=lambda _number: 1), "connection"),
    ],
)
async def test_a_server_that_only_fails_ends_the_level_soon_with_its_reason(behaviour: Behaviour, said: str) -> None:
    async with serving(behaviour) as stub, asyncio.timeout(5):
        result = await measure(stub)
    assert result.failure.cause is Cause.SERVER_ERRORS
    assert said in result.failure.detail


async def test_a_server_that_is_gone_ends_the_level_soon() -> None:
    async with serving(Behaviour()) as stub:
        pass
    async with asyncio.timeout(5):
        result = await measure(stub)
    assert result.failure.cause is Cause.SERVER_ERRORS
    assert "connect" in result.failure.detail
    assert result.measurement is None


async def test_a_server_whose_process_ends_is_a_crash() -> None:
    async with serving(Behaviour()) as stub:
        result = await measure(stub, server_alive=lambda: len(stub.requests) < 20)
    assert result.failure.cause is Cause.ENGINE_CRASH


async def test_a_server_that_falls_silent_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.load.level.MIN_STALL_WALL_S", 0.3)
    async with serving(Behaviour(silent_after=10)) as stub, asyncio.timeout(10):
        result = await measure(stub, stall_timeout_s=0.3)
    assert result.failure.cause is Cause.SERVING_HANG
    assert "no chunk" in result.failure.detail


async def test_empty_replies_are_garbage() -> None:
    async with serving(Behaviour(length_of=lambda _asked: 0)) as stub, asyncio.timeout(5):
        result = await measure(stub)
    assert result.failure.cause is Cause.GARBAGE_OUTPUT
    assert result.requests_empty == result.requests_finished > 0


async def test_replies_of_another_length_than_asked_for_are_garbage() -> None:
    async with serving(Behaviour(length_of=lambda asked: asked + 1)) as stub:
        result = await measure(stub)
    assert result.failure.cause is Cause.GARBAGE_OUTPUT
    assert not result.measurement.valid


async def test_a_stream_without_done_but_with_a_finish_reason_is_whole() -> None:
    async with serving(Behaviour(done=False)) as stub:
        result = await measure(stub, route="chat")
    assert result.failure is None
    assert result.measurement.requests_failed == 0


async def test_without_counts_per_chunk_the_final_count_holds_and_the_measurement_says_so() -> None:
    async with serving(Behaviour(usage=False, tokens_per_chunk=lambda _chunk: 2)) as stub:
        result = await measure(stub, route="completions")
    assert all(row["output_tokens"] == row["asked_tokens"] for row in whole(result))
    assert any("does not count" in warning for warning in result.measurement.warnings)


async def test_what_a_cold_server_does_is_not_in_the_window() -> None:
    async with serving(Behaviour(slow_until=120)) as stub:
        got = (await measure(stub)).measurement
    assert got.icl_s.p99 < 0.05  # ten times the step is what the cold steps took
    assert got.warmup_s > 0.4


async def test_the_search_can_stop_a_level_and_gets_interim_intervals() -> None:
    asked = []

    def stop(elapsed_s: float, interval: object) -> bool:
        asked.append((elapsed_s, interval))
        return interval is not None and elapsed_s > 0.05

    async with serving(Behaviour()) as stub:
        result = await measure(stub, should_stop=stop)
    assert result.stopped
    assert result.measurement.window_s < 0.5
    assert asked[0] == (0.0, None)


async def test_the_search_can_stop_a_level_while_it_warms_up_and_keeps_what_was_steady() -> None:
    asked = []

    def stop(elapsed_s: float, interval: Interval | None) -> bool:
        asked.append(interval)
        return elapsed_s == 0 and interval is not None

    async with serving(Behaviour(slow_until=40)) as stub:
        result = await measure(stub, should_stop=stop, spec=workload(output_tokens=300))
    assert result.stopped
    assert result.failure is None
    assert asked[0] is None  # nothing is said of what is not steady
    got = result.measurement
    assert got.icl_s.p99 < 0.015  # the cold steps took 0.02 and are not in it
    assert got.output_tok_per_s.mean == pytest.approx(asked[-1].mean, rel=0.3)
    assert got.output_tokens == pytest.approx(got.output_tok_per_s.mean * got.window_s, rel=0.1)


async def test_a_server_that_counts_otherwise_is_named() -> None:
    async def counters() -> ServerCounters:
        return ServerCounters(generated_tokens=1.5 * stub.tokens)

    async with serving(Behaviour()) as stub:
        got = (await measure(stub, read_counters=counters, spec=workload(min_window_s=0.5))).measurement
    assert any("the server counted" in warning for warning in got.warnings)


@pytest.mark.parametrize("counts", ["tokens", "finished_tokens"])
async def test_a_server_that_counts_alike_is_not(counts: str) -> None:
    async def counters() -> ServerCounters:
        return ServerCounters(generated_tokens=float(getattr(stub, counts)))

    async with serving(Behaviour()) as stub:
        got = (await measure(stub, read_counters=counters)).measurement
    assert got.server_output_tok_per_s > 0
    assert not any("the server counted" in warning for warning in got.warnings)


async def test_a_server_in_faster_time_is_reported_in_its_own_seconds() -> None:
    async with serving(Behaviour(step_s=0.01)) as stub:
        spec = workload(min_window_s=10.0, max_window_s=40.0, max_warmup_s=100.0)
        got = (await measure(stub, clock_scale=20.0, spec=spec)).measurement
    assert got.window_s >= 10
    assert got.icl_s.p50 == pytest.approx(0.2, rel=0.3)
    assert got.output_tok_per_s.mean == pytest.approx(got.output_tokens / got.window_s, rel=0.1)


async def test_an_open_loop_charges_a_slow_server_from_the_time_that_was_due() -> None:
    # Everything the server does is late; nothing that waits for it may make the next request later.
    pattern = Pattern("constant", rate_per_s=100)
    async with serving(Behaviour(first_s=0.3)) as stub:
        result = await measure_pattern(Target(stub.url), workload(output_tokens=4), pattern, seed=1)
    got = result.measurement
    due = [row["scheduled_s"] for row in result.requests.to_pylist() if row["scheduled_s"] is not None]
    gaps = [b - a for a, b in itertools.pairwise(due)]
    assert max(gaps) == pytest.approx(0.01, abs=1e-6)
    assert got.ttft_scheduled_s.mean >= got.ttft_s.mean
    assert got.ttft_scheduled_s.count == got.requests_ok
    assert got.in_flight_mean > 20


async def test_a_request_that_meets_a_closed_idle_connection_is_sent_again() -> None:
    pattern = Pattern("constant", rate_per_s=100)
    async with serving(Behaviour(once=True, first_s=0.001)) as stub:
        result = await measure_pattern(Target(stub.url), workload(output_tokens=2), pattern, seed=1)
    assert result.failure is None
    assert {row["status"] for row in result.requests.to_pylist()} <= {"ok", "aborted"}
    assert len(whole(result)) > 8


async def test_a_server_that_cannot_keep_up_with_the_rate_is_named() -> None:
    gate = asyncio.Semaphore(1)
    async with serving(Behaviour(gate=gate, first_s=0.015, step_s=0.0)) as stub:
        spec = workload(output_tokens=2, min_window_s=0.9, max_window_s=0.9, max_warmup_s=0.2)
        got = (await measure_pattern(Target(stub.url), spec, Pattern("poisson", rate_per_s=120), seed=1)).measurement
    assert any("does not keep up" in warning for warning in got.warnings)


async def test_a_batch_ends_with_its_last_request_and_leaves_ramp_and_tail_out() -> None:
    # One reply is ten times as long as the others: over the whole run it would pull the throughput down.
    spec = workload(output_tokens=20, max_window_s=30.0, ignore_eos=False)
    async with serving(Behaviour(length_of=lambda asked: asked * (10 if len(stub.requests) == 1 else 1))) as stub:
        result = await measure_pattern(Target(stub.url), spec, Pattern("batch", 16, requests=64), seed=1)
    got = result.measurement
    assert len(stub.requests) == 64
    assert result.requests_finished == 64
    assert got.duration_s > 1.5 * got.window_s
    assert got.output_tok_per_s.mean > 1.2 * stub.tokens / got.duration_s


async def test_the_share_of_a_core_is_of_the_time_that_it_was_counted_over(monkeypatch: pytest.MonkeyPatch) -> None:
    # A client that uses half of a core all the time; the window ends up shorter than what was driven.
    monkeypatch.setattr(time, "process_time", lambda: time.perf_counter() / 2)
    async with serving(Behaviour(length_of=lambda asked: asked * (10 if len(stub.requests) == 1 else 1))) as stub:
        spec = workload(max_window_s=30.0, ignore_eos=False)
        got = (await measure_pattern(Target(stub.url), spec, Pattern("batch", 16, requests=64), seed=1)).measurement
    assert got.duration_s > 1.5 * got.window_s
    assert got.client_cpu_share == pytest.approx(0.5, rel=0.1)


async def test_two_processes_measure_what_one_would() -> None:
    async with serving(Behaviour()) as stub:
        result = await measure_pattern(Target(stub.url), workload(), Pattern("closed", 5), seed=1, processes=2)
        assert stub.connections == 5
    got = result.measurement
    assert result.failure is None
    assert 3 < got.in_flight_mean <= 5.05  # one alone has 2 or 3; a busy machine leaves gaps
    indices = {row["index"] for row in result.requests.to_pylist()}
    assert len(indices) == len(stub.requests)
    assert {index % 2 for index in indices} == {0, 1}
    assert all(row["output_tokens"] == row["asked_tokens"] for row in whole(result))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("route", ["generate", "chat"])
async def test_ten_thousand_requests_with_random_cuts_are_all_exact(route: str) -> None:
    behaviour = Behaviour(
        first_s=0.0, step_s=0.0, tokens_per_chunk=lambda chunk: 1 + chunk * 7 % 4, cut=random_cuts(2), verify_steps=True
    )
    spec = workload(output_tokens=16, output_tokens_spread=0.9, max_window_s=250.0)
    async with serving(behaviour) as stub:
        result = await measure_pattern(Target(stub.url, route), spec, Pattern("batch", 64, requests=10_000), seed=1)
    rows = whole(result)
    assert len(rows) == 10_000
    assert all(row["output_tokens"] == row["asked_tokens"] for row in rows)
    assert sum(row["output_tokens"] for row in rows) == stub.tokens
    if route == "generate":
        assert sum(row["verify_steps"] for row in rows) == stub.verify_steps


async def test_a_client_that_was_late_says_so_and_keeps_its_gaps_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.load.doubts.MERGING_LAG_SHARE", 0.0)
    monkeypatch.setattr("bench.load.doubts.VOID_LAG_SHARE", 0.0)
    async with serving(Behaviour()) as stub:
        got = (await measure(stub)).measurement
    assert not got.valid
    assert got.itl_s is None and got.icl_s is None
    assert any("held the load back" in warning for warning in got.warnings)
