"""The prior of the search: physics that any card obeys, and acceptance as it was measured."""

from dataclasses import replace

import pytest

from bench.engines.protocol import Calibration, Candidate, DecodeDemand, Forecast
from bench.experiment import HardwareSpec, PromptSpec, WorkloadSpec
from bench.search.roofline import ACCEPTED, accepted_share, roofline
from benchmarks import search as benchmark
from tests import build

CARD = HardwareSpec("card", 80e9, 1e12, 1e15, 2e15, "sm90")
WORKLOAD = WorkloadSpec("w", PromptSpec("text", input_tokens=0), (8,), 1000)
DENSE = DecodeDemand(step_bytes=10e9, request_bytes=0, token_bytes=0, token_flops=0)


def forecast(demand, running=64, tokens=10**6):
    return Forecast("fits", kv_tokens=tokens, max_running_requests=running, demand=demand)


def test_decoding_is_bound_by_reading_weights():
    # 10 GB at 1 TB/s are 10 ms a step, for eight requests at once
    assert roofline(forecast(DENSE), CARD, WORKLOAD, 8).tok_per_s == pytest.approx(800)


def test_requests_beyond_the_limit_or_the_pool_wait():
    assert roofline(forecast(DENSE, running=4), CARD, WORKLOAD, 8).running == 4
    # each holds 500 tokens on average, and the one that enters needs room for all its 1,000
    assert roofline(forecast(DENSE, tokens=1600), CARD, WORKLOAD, 8).running == 2


def test_speculation_pays_as_far_as_drafts_are_accepted():
    drafting = replace(DENSE, step_tokens=3, depth=2)
    found = roofline(forecast(drafting), CARD, WORKLOAD, 8, accepted=0.5)
    assert found.tok_per_s == pytest.approx(800 * 1.75)
    assert roofline(forecast(drafting), CARD, WORKLOAD, 8, accepted=0.0).tok_per_s == pytest.approx(800)


def test_a_measured_acceptance_length_takes_the_place_of_the_assumption():
    assert accepted_share([build.record(1, 100)]) == ACCEPTED
    record = build.record(1, 100)
    measured = replace(record.measurements[0], acceptance_length=1.75)
    seen = replace(record, forecast=forecast(replace(DENSE, step_tokens=3, depth=2)), measurements=(measured,))
    assert accepted_share([seen]) == pytest.approx(0.5, abs=1e-6)


def test_a_shared_prefix_saves_prefill_only_where_the_cache_can_find_it_again():
    experiment, engine = benchmark.load(["+experiment=mtp_rtx_pro_6000", "workload=chat", "workload.levels=[32]"])

    def tok_per_s(**flags):
        server = engine.canonical(Candidate({"mem_fraction_static": 0.9, "max_running_requests": 8, **flags}))
        forecast = engine.forecast(server, Calibration())
        return roofline(forecast, experiment.hardware, experiment.workload, 32).tok_per_s

    kept = tok_per_s(mamba_radix_cache_strategy="extra_buffer")
    assert kept > 1.02 * tok_per_s(disable_radix_cache=True)
    assert kept > 1.02 * tok_per_s(mamba_radix_cache_strategy="no_buffer", disable_overlap_schedule=True)
