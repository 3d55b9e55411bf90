"""The memory forecast against real launches and against the story that started the project."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.engines.protocol import Calibration, LaunchFacts
from bench.engines.sglang.memory import calibrate, forecast
from bench.engines.sglang.memory_plan import REGIMES, regime_of
from bench.engines.sglang.model_shape import ModelShape
from bench.engines.sglang.settings import Settings, parse_version
from bench.experiment import HardwareSpec
from bench.records import from_plain

FIXTURES = Path(__file__).parents[1] / "fixtures"
GIB, MIB = 1 << 30, 1 << 20
LAUNCHES: list[dict[str, Any]] = [json.loads(line) for line in (FIXTURES / "launches.jsonl").read_text().splitlines()]
H200 = HardwareSpec("h200", 143_771 * MIB, 4.8e12, 989e12, 1979e12, "hopper")
RTX_PRO_6000 = HardwareSpec("rtx_pro_6000", 97_887 * MIB, 1.79e12, 500e12, 1000e12, "blackwell")
# As sglang.md assumed them for the story's card: free memory, and weights with overhead.
STORY = Calibration(available_bytes=94.3 * GIB, weight_bytes=52.6 * GIB)
MTP = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3, "speculative_eagle_topk": 1}
EXTRA = {"mamba_scheduler_strategy": "extra_buffer"}


def shape(name: str) -> ModelShape:
    return ModelShape.from_config(json.loads((FIXTURES / "models" / f"{name}.json").read_text()))


def story(version: str = "0.5.12", calibration: Calibration = STORY, **flags: Any) -> Any:
    return forecast(
        {**MTP, **EXTRA, **flags},
        version=version,
        shape=shape("qwen3.6-27b"),
        hardware=RTX_PRO_6000,
        calibration=calibration,
    )


@pytest.mark.parametrize("launch", LAUNCHES, ids=[launch["log"] for launch in LAUNCHES])
@pytest.mark.parametrize("calibrated", [True, False], ids=["calibrated", "from_config_alone"])
def test_forecast_agrees_with_a_real_launch(launch: dict[str, Any], calibrated: bool) -> None:
    facts = from_plain(LaunchFacts, launch["facts"])
    seen = calibrate(Calibration(), facts) if calibrated else Calibration()
    told = forecast(
        launch["flags"], version=launch["version"], shape=shape(launch["model"]), hardware=H200, calibration=seen
    )
    assert told.verdict == ("does_not_fit" if launch["died_of"] else "fits")
    if facts.state_slots is not None:
        assert told.state_slots == pytest.approx(facts.state_slots, abs=1 if calibrated else 3)
    if facts.max_running_requests is not None:
        assert told.max_running_requests == pytest.approx(facts.max_running_requests, abs=1)
    if facts.kv_tokens is not None:
        assert told.kv_tokens == pytest.approx(facts.kv_tokens, rel=0.01 if calibrated else 0.05)


def test_the_draft_pool_that_did_not_fit_is_named() -> None:
    launch = next(row for row in LAUNCHES if row["log"] == "h200_0515_mtp_oom_draft_kv_pool_27b")
    told = forecast(launch["flags"], version="0.5.15", shape=shape("qwen27b"), hardware=H200)
    assert "draft's KV pool of 2.7 GiB" in told.reasons[0]
    assert told.margin_bytes is not None
    assert told.margin_bytes / GIB == pytest.approx(0.78 - 2.69, abs=0.1)


def test_graph_memory_is_within_a_tenth_of_a_gib_or_fifteen_percent() -> None:
    for launch in LAUNCHES:
        seen = launch["facts"].get("graph_bytes")
        if seen is None or launch["model"] != "qwen27b":
            continue
        told = forecast(launch["flags"], version="0.5.15", shape=shape("qwen27b"), hardware=H200)
        graphs = dict(told.split_bytes)["graphs"]
        assert abs(graphs - seen) < max(0.1 * GIB, 0.15 * seen), launch["log"]


class TestStory:
    """Qwen3.6-27B with MTP on a 96 GB card, SGLang 0.5.10 to 0.5.12; sglang.md section 7."""

    def test_48_running_requests_reserve_more_than_there_is(self) -> None:
        told = story(mem_fraction_static=0.80)
        assert told.verdict == "does_not_fit"
        assert told.reasons[0].startswith(
            "F = 0.80 with 48 running requests does not fit: 48 x 4 draft states of 146.8 MiB reserve 27.5 GiB of the "
            "22.8 GiB left after weights"
        )

    def test_from_the_config_alone_as_well(self) -> None:
        assert story(calibration=Calibration(), mem_fraction_static=0.80).verdict == "does_not_fit"

    def test_no_request_could_run_at_85_percent(self) -> None:
        assert story(mem_fraction_static=0.85).verdict == "does_not_fit"

    def test_three_requests_at_90_percent(self) -> None:
        told = story(mem_fraction_static=0.90)
        assert (told.state_slots, told.max_running_requests) == (15, 3)
        assert told.kv_tokens == pytest.approx(42_000, rel=0.02)

    @pytest.mark.parametrize("calibration", [STORY, Calibration()], ids=["calibrated", "from_config_alone"])
    def test_95_percent_is_at_risk_in_capture_or_prefill(self, calibration: Calibration) -> None:
        told = story(calibration=calibration, mem_fraction_static=0.95)
        assert told.verdict == "edge"
        assert "at risk of running out of memory in capture or prefill" in told.reasons[0]
        if calibration is STORY:
            assert (told.state_slots, told.max_running_requests) == (31, 6)
            assert told.kv_tokens == pytest.approx(82_000, rel=0.02)

    def test_eight_running_requests_fit_at_80_percent(self) -> None:
        told = story(mem_fraction_static=0.80, max_running_requests=8)
        assert told.verdict == "fits"
        assert (told.state_slots, told.max_running_requests) == (60, 8)
        assert told.kv_tokens == pytest.approx(158_000, rel=0.01)

    def test_without_radix_cache_it_does_not_fit_either(self) -> None:
        told = forecast(
            {**MTP, "mem_fraction_static": 0.85, "disable_radix_cache": True},
            version="0.5.12",
            shape=shape("qwen3.6-27b"),
            hardware=RTX_PRO_6000,
            calibration=STORY,
        )
        assert told.verdict == "does_not_fit"

    def test_fp8_weights_leave_room(self) -> None:
        small = Calibration(available_bytes=94.3 * GIB, weight_bytes=29.5 * GIB)
        told = story(calibration=small, mem_fraction_static=0.85)
        assert told.state_slots == pytest.approx(76, abs=1)
        assert told.max_running_requests == 15

    @pytest.mark.parametrize("version", ["0.5.15", "0.5.20", "0.5.23"])
    def test_later_versions_run_a_few_requests_and_about_twice_as_many_in_bfloat16(self, version: str) -> None:
        full = story(version, mem_fraction_static=0.80)
        half = story(version, mem_fraction_static=0.80, mamba_ssm_dtype="bfloat16")
        assert 3 <= full.max_running_requests <= 8
        assert half.max_running_requests == pytest.approx(2 * full.max_running_requests, abs=1)


def test_weights_that_exceed_the_fraction_are_named_with_the_flag() -> None:
    told = forecast({"mem_fraction_static": 0.3}, version="0.5.15", shape=shape("qwen27b"), hardware=H200)
    assert told.verdict == "does_not_fit"
    assert "--mem-fraction-static" in told.reasons[0]


def test_a_card_that_is_too_small_for_the_weights_is_named() -> None:
    small = HardwareSpec("rtx_4090", 24_564 * MIB, 1.01e12, 165e12, 330e12, "ada")
    told = forecast({}, version="0.5.23", shape=shape("qwen27b"), hardware=small)
    assert told.verdict == "does_not_fit"
    assert told.reasons[0].startswith("weights of 50.3 GiB do not fit")


def test_hierarchical_cache_needs_host_memory() -> None:
    flags = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0, "mem_fraction_static": 0.8}
    told = forecast(flags, version="0.5.15", shape=shape("qwen27b"), hardware=H200)
    assert told.verdict == "does_not_fit"
    assert told.host_bytes == pytest.approx(4 * (32.1 + 28.8) * GIB, rel=0.01)
    assert "--hicache-ratio" in told.reasons[0]


def test_fp8_keys_and_values_double_the_tokens() -> None:
    tokens = [
        forecast(
            {"mem_fraction_static": 0.8, "kv_cache_dtype": dtype},
            version="0.5.15",
            shape=shape("qwen27b"),
            hardware=H200,
        ).kv_tokens
        for dtype in ("auto", "fp8_e4m3")
    ]
    assert tokens[1] == pytest.approx(2 * tokens[0], abs=1)


def test_tensor_parallelism_halves_what_each_gpu_holds() -> None:
    told = forecast({"tp_size": 2}, version="0.5.15", shape=shape("qwen27b"), hardware=RTX_PRO_6000)
    assert told.verdict == "fits"
    assert dict(told.split_bytes)["weights"] / GIB == pytest.approx(25.15, abs=0.1)


def test_default_fraction_is_what_sglang_resolved() -> None:
    """0.8387624 in h200_0515_mtp_oom_draft_kv_pool; 0.797 and 0.803 verified with 0.5.23's own resolver."""
    flags = {"cuda_graph_backend_prefill": "disabled"}
    for model, version, mib, more, expected in (
        ("qwentiny", "0.5.15", 143_771, {}, 0.8387624),
        ("qwen3.6-27b", "0.5.23", 97_251, {}, 0.797),
        ("qwen3.6-27b", "0.5.23", 97_887, {"max_running_requests": 16}, 0.803),
    ):
        resolved = Settings.resolve({**flags, **more}, version=version, shape=shape(model), gpu_memory_bytes=mib * MIB)
        assert resolved.mem_fraction_static == pytest.approx(expected, abs=0.0006)


def test_older_and_newer_flag_names_mean_the_same() -> None:
    def slots(name: str) -> int:
        flags = {name: "no_buffer", "disable_overlap_schedule": True}
        return Settings.resolve(
            flags, version="0.5.15", shape=shape("qwen27b"), gpu_memory_bytes=H200.memory_bytes
        ).slots_per_request

    assert slots("mamba_scheduler_strategy") == slots("mamba_radix_cache_strategy") == 3


def test_every_version_has_a_regime_and_only_seen_ones_say_so() -> None:
    assert regime_of(parse_version("0.5.11")).reserves_all_draft_states
    assert regime_of(parse_version("0.5.15.post1")).seen
    assert regime_of(parse_version("0.5.23")).budgets_padding
    assert regime_of(parse_version("0.6.0")) == REGIMES[-1]
    assert [regime.first for regime in REGIMES if regime.seen] == [(0, 5, 14)]


def test_a_launch_without_gpu_numbers_teaches_nothing() -> None:
    known = Calibration(available_bytes=1.0, weight_bytes=2.0)
    assert calibrate(known, LaunchFacts()) == known
    assert calibrate(known, LaunchFacts(weight_bytes=-0.01 * GIB)).weight_bytes == 2.0
