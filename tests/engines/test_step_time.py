"""Step times against what a real H200 printed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bench.engines.sglang.model_shape import ModelShape
from bench.engines.simulator.model import ServerModel
from bench.engines.simulator.options import H200, Disturbance
from benchmarks.simulator import model_of, rows, steady_tok_per_s, wave_tok_per_s

MODELS = Path(__file__).parents[1] / "fixtures" / "models"


def test_steady_batches_are_within_two_percent() -> None:
    for row in rows():
        model = model_of(row)
        for measured in row["steady"]:
            told = steady_tok_per_s(model, measured)
            assert told == pytest.approx(measured["tok_per_s"], rel=0.02), (row["name"], measured)


def test_waves_are_within_ten_percent_where_no_kernels_were_compiled() -> None:
    """Real rows at 32, and at 8 with a new kind of kernel, also measured the compiler: they may only be slower."""
    for row in rows():
        model = model_of(row)
        for measured in row["waves"]:
            told = wave_tok_per_s(model, measured) / measured["tok_per_s"]
            assert 0.90 < told < (1.25 if measured["requests"] in (8, 32) else 1.10), (row["name"], measured)


def test_the_crash_of_a_full_batch_is_where_it_was_seen() -> None:
    """Levels of 1, 8, 16, 32 and 64 requests; the first level that died, None where all were served."""
    died = {
        "no speculation, float32 state": None,
        "no speculation, bfloat16 state": None,
        "NEXTN 3 steps, bfloat16 state": 64,
        "NEXTN 1 step, float32 state": 32,
        "NEXTN 3 steps, float32 state, no radix cache": 32,
    }
    for row in rows():
        model = model_of(row)
        full = [n for n in (1, 8, 16, 32, 64) if model.crashes_at_full_batch and n >= model.plan.max_running_requests]
        assert (full[0] if full else None) == died[row["name"]]


def times(**flags: object) -> ServerModel:
    shape = ModelShape.from_config(json.loads((MODELS / "qwen27b.json").read_text()))
    values = {"attention_backend": "triton", "mem_fraction_static": 0.8, **flags}
    return ServerModel.of(
        values,  # type: ignore[arg-type]
        version="0.5.16",
        shape=shape,
        hardware=H200,
        env={},
        disturbance=Disturbance(),
    )


def test_steps_without_graphs_are_bound_by_launches() -> None:
    with_graphs, without = times().times, times(disable_cuda_graph=True).times
    assert without.decode_s(1, 100) > 1.5 * with_graphs.decode_s(1, 100)


def test_a_faster_card_takes_less() -> None:
    shape = ModelShape.from_config(json.loads((MODELS / "qwen27b.json").read_text()))
    slow = dataclasses.replace(H200, bandwidth_bytes_per_s=2.4e12)
    at = {
        name: ServerModel.of(
            {"mem_fraction_static": 0.8},
            version="0.5.16",
            shape=shape,
            hardware=card,
            env={},
            disturbance=Disturbance(),
        ).times.decode_s(8, 4000)
        for name, card in (("fast", H200), ("slow", slow))
    }
    assert 1.5 < at["slow"] / at["fast"] < 2.0


def test_a_longer_context_takes_longer_and_half_of_it_with_fp8_keys() -> None:
    full, half = times().times, times(kv_cache_dtype="fp8_e4m3").times
    added = full.decode_s(8, 400_000) - full.decode_s(8, 0)
    assert added > 5e-3
    assert half.decode_s(8, 400_000) - half.decode_s(8, 0) == pytest.approx(added * 0.5 / 0.9, rel=0.01)
