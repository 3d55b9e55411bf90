"""Equal servers are equal values, and what the engine refuses is refused before it is launched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.engines.protocol import RefusedError, ServerConfig, Value
from bench.engines.sglang.canonical import Surroundings, acceptance_length, canonical
from bench.engines.sglang.flags import FlagTable
from bench.engines.sglang.model_shape import ModelShape

MODELS = Path(__file__).parents[1] / "fixtures" / "models"
NEXTN: dict[str, Value] = {
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
EXTRA: dict[str, Value] = {**NEXTN, "mamba_radix_cache_strategy": "extra_buffer"}


def around(version: str, model: str = "qwen3.6-27b", **others: Any) -> Surroundings:
    return Surroundings(
        table=FlagTable.for_version(version),
        shape=ModelShape.from_config(json.loads((MODELS / f"{model}.json").read_text())),
        gpu_memory_bytes=others.pop("gpu_memory_bytes", 143_771 * 2**20),
        architecture=others.pop("architecture", "sm90"),
        **others,
    )


def of(
    flags: dict[str, Value], version: str = "0.5.15", env: dict[str, str] | None = None, **others: Any
) -> ServerConfig:
    return canonical(flags, env or {}, around(version, **others))


def refusal(flags: dict[str, Value], version: str = "0.5.15", env: dict[str, str] | None = None, **others: Any) -> str:
    with pytest.raises(RefusedError) as caught:
        of(flags, version, env, **others)
    return str(caught.value)


@pytest.mark.parametrize(
    ("one", "other", "version"),
    [
        ({**EXTRA, "speculative_num_draft_tokens": 9}, EXTRA, "0.5.15"),
        ({**EXTRA, "max_running_requests": 48}, EXTRA, "0.5.15"),
        ({"speculative_algorithm": "NEXTN"}, EXTRA, "0.5.15"),
        ({**EXTRA, "speculative_algorithm": "EAGLE"}, EXTRA, "0.5.15"),
        (EXTRA, NEXTN, "0.5.15"),
        (EXTRA, NEXTN, "0.5.23"),
        ({"schedule_policy": "fcfs", "kv_cache_dtype": "auto", "mamba_full_memory_ratio": 0.9}, {}, "0.5.15"),
        ({"mamba_full_memory_ratio": 0.9, "disable_radix_cache": False}, {}, "0.5.23"),
        ({"chunked_prefill_size": 8192}, {}, "0.5.15"),
        ({"mamba_ssm_dtype": "float32"}, {}, "0.5.15"),
        ({"cuda_graph_max_bs": 256}, {}, "0.5.15"),
        ({"cuda_graph_bs": [4, 1, 4], "cuda_graph_max_bs": 64}, {"cuda_graph_bs_decode": [1, 4]}, "0.5.15"),
        ({"kv_cache_dtype": "bf16"}, {"kv_cache_dtype": "bfloat16"}, "0.5.15"),
        (
            {"disable_radix_cache": True, "mamba_radix_cache_strategy": "extra_buffer"},
            {"disable_radix_cache": True},
            "0.5.15",
        ),
        ({"disable_radix_cache": True, "schedule_policy": "lpm"}, {"disable_radix_cache": True}, "0.5.15"),
        (
            {"disable_radix_cache": True, "mamba_scheduler_strategy": "no_buffer"},
            {"disable_radix_cache": True},
            "0.5.12",
        ),
        ({"mamba_scheduler_strategy": "no_buffer", "disable_overlap_schedule": True}, {}, "0.5.12"),
        (
            {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True},
            {"disable_overlap_schedule": True},
            "0.5.15",
        ),
        (
            {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_attention_mode": "decode"},
            {},
            "0.5.15",
        ),
        ({"hicache_ratio": 3.0, "hicache_write_policy": "write_back"}, {}, "0.5.15"),
        ({"max_mamba_cache_size": 64, "mamba_full_memory_ratio": 2.0}, {"max_mamba_cache_size": 64}, "0.5.15"),
        (
            {"enable_hierarchical_cache": True, "hicache_io_backend": "direct"},
            {
                "enable_hierarchical_cache": True,
                "hicache_io_backend": "direct",
                "hicache_mem_layout": "page_first_direct",
            },
            "0.5.15",
        ),
        ({**EXTRA, "enable_mixed_chunk": True}, EXTRA, "0.5.15"),
    ],
)
def test_two_ways_to_write_one_server(one: dict[str, Value], other: dict[str, Value], version: str) -> None:
    assert of(one, version) == of(other, version)
    assert of(one, version).key == of(other, version).key


@pytest.mark.parametrize(
    ("one", "other", "version"),
    [
        ({**EXTRA, "max_running_requests": 40}, EXTRA, "0.5.15"),
        ({**EXTRA, "speculative_num_steps": 2}, EXTRA, "0.5.15"),
        ({"chunked_prefill_size": 4096}, {}, "0.5.15"),
        ({"disable_overlap_schedule": True}, {}, "0.5.15"),
        ({"schedule_policy": "lpm"}, {}, "0.5.15"),
        ({"attention_backend": "triton"}, {}, "0.5.15"),
        ({"mamba_ssm_dtype": "bfloat16"}, {}, "0.5.15"),
        # From 0.5.21 an explicit ratio turns the fit to the host's memory off.
        ({"enable_hierarchical_cache": True, "hicache_ratio": 2.0}, {"enable_hierarchical_cache": True}, "0.5.21"),
        # From 0.5.23 an explicit limit also limits the captured graphs.
        ({**EXTRA, "max_running_requests": 48}, EXTRA, "0.5.23"),
    ],
)
def test_what_differs_stays_different(one: dict[str, Value], other: dict[str, Value], version: str) -> None:
    assert of(one, version) != of(other, version)


def test_a_dense_model_has_no_state_flags() -> None:
    flags: dict[str, Value] = {"mamba_ssm_dtype": "bfloat16", "max_mamba_cache_size": 64, "max_running_requests": 8}
    config = of(flags, model="tiny")
    assert dict(config.flags) == {"max_running_requests": 8}
    assert "keeps no linear-attention state" in config.rewrites[0]


def test_the_canonical_form_is_written_in_the_versions_own_names_with_the_reasons() -> None:
    config = of({**EXTRA, "cuda_graph_max_bs_decode": 64}, "0.5.12")
    assert {"mamba_scheduler_strategy", "cuda_graph_max_bs"} <= set(dict(config.flags))
    assert any("--mamba-radix-cache-strategy is called --mamba-scheduler-strategy" in text for text in config.rewrites)


def test_what_was_asked_for_and_left_out_is_kept_for_the_identity_check() -> None:
    config = of({**EXTRA, "max_running_requests": 48, "chunked_prefill_size": 8192})
    assert dict(config.implied) == {
        "mamba_radix_cache_strategy": "extra_buffer",
        "max_running_requests": 48,
        "chunked_prefill_size": 8192,
    }


def test_the_default_chunk_depends_on_the_card() -> None:
    small = 24_564 * 2**20
    assert of({"chunked_prefill_size": 2048}, gpu_memory_bytes=small) == of({}, gpu_memory_bytes=small)
    assert of({"chunked_prefill_size": 2048}) != of({})


STRATEGY = "mamba_radix_cache_strategy"


@pytest.mark.parametrize("version", ["0.5.10", "0.5.11", "0.5.12", "0.5.13"])
def test_no_buffer_with_speculation_is_refused_until_0_5_13(version: str) -> None:
    text = refusal({**NEXTN, STRATEGY: "no_buffer"}, version)
    assert "--mamba-scheduler-strategy no_buffer with speculative decoding is refused in 0.5.10 to 0.5.13" in text
    assert "auto, which is no_buffer here," in refusal(NEXTN, version)
    of({**NEXTN, STRATEGY: "no_buffer", "disable_radix_cache": True}, version)


@pytest.mark.parametrize(
    ("flags", "version", "said"),
    [
        ({**NEXTN, STRATEGY: "no_buffer"}, "0.5.14", "add --disable-overlap-schedule"),
        ({STRATEGY: "no_buffer"}, "0.5.23", "add --disable-overlap-schedule"),
        ({STRATEGY: "no_buffer", "disable_overlap_schedule": True, "page_size": 64}, "0.5.15", "--page-size 1 only"),
        (
            {STRATEGY: "no_buffer", "disable_overlap_schedule": True, "attention_backend": "trtllm_mha"},
            "0.5.15",
            "trtllm_mha",
        ),
        (
            {STRATEGY: "extra_buffer", "disable_radix_cache": True},
            "0.5.12",
            "not compatible with --disable-radix-cache",
        ),
        (
            {**NEXTN, STRATEGY: "extra_buffer_lazy"},
            "0.5.15",
            "not supported with speculative decoding in 0.5.14 to 0.5.16",
        ),
        ({STRATEGY: "extra_buffer_lazy", "disable_overlap_schedule": True}, "0.5.17", "exclude each other"),
        (
            {STRATEGY: "extra_buffer", "linear_attn_backend": "flashinfer"},
            "0.5.15",
            "needs --linear-attn-backend triton",
        ),
        ({"linear_attn_decode_backend": "flashinfer", STRATEGY: "no_buffer"}, "0.5.12", "--linear-attn-decode-backend"),
        ({**EXTRA, "mamba_track_interval": 2}, "0.5.15", "below the 4 draft tokens"),
        ({STRATEGY: "extra_buffer", "page_size": 48}, "0.5.15", "--mamba-track-interval 256 is not divisible"),
        ({"chunked_prefill_size": 1000, "page_size": 64}, "0.5.15", "not divisible by --page-size 64"),
        ({"enable_hierarchical_cache": True, "disable_radix_cache": True}, "0.5.15", "exclude each other"),
        (
            {"speculative_algorithm": "NEXTN", "speculative_eagle_topk": 1},
            "0.5.15",
            "need --speculative-num-steps as well",
        ),
        ({"speculative_algorithm": "NEXTN", "speculative_num_steps": 3}, "0.5.15", "needs --speculative-eagle-topk"),
        (
            {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3, "speculative_eagle_topk": 4},
            "0.5.15",
            "needs --speculative-num-draft-tokens",
        ),
        (
            {**EXTRA, "speculative_eagle_topk": 4, "attention_backend": "trtllm_mha"},
            "0.5.15",
            "--speculative-eagle-topk 1 only",
        ),
        (
            {**EXTRA, "speculative_eagle_topk": 4, "page_size": 64, "attention_backend": "flashmla"},
            "0.5.15",
            "works with flashinfer, fa3, triton only",
        ),
        (
            {**EXTRA, "speculative_eagle_topk": 4, "speculative_use_rejection_sampling": True},
            "0.5.15",
            "needs --speculative-eagle-topk 1",
        ),
        ({"speculative_algorithm": "EAGLE3"}, "0.5.15", "needs a draft model: give model.draft_path="),
        ({"speculative_algorithm": "DFLASH"}, "0.5.15", "needs a draft model: give model.draft_path="),
        ({**EXTRA, "weight_cache_mode": "client"}, "0.5.17", "--weight-cache-mode"),
    ],
)
def test_refusals_name_the_flags(flags: dict[str, Value], version: str, said: str) -> None:
    assert said in refusal(flags, version)


def test_several_reasons_are_said_together() -> None:
    text = refusal({"chunked_prefill_size": 1000, "page_size": 64, STRATEGY: "no_buffer"})
    assert len(text.split("; ")) == 3


def test_from_0_5_20_on_the_old_flag_is_said_to_have_been_renamed() -> None:
    text = refusal({**NEXTN, "mamba_scheduler_strategy": "no_buffer"}, "0.5.20")
    assert text.startswith("--mamba-scheduler-strategy is called --mamba-radix-cache-strategy in SGLang 0.5.20")


def test_topk_above_one_with_the_new_worker_is_refused_by_0_5_10_only() -> None:
    tree: dict[str, Value] = {**EXTRA, "speculative_eagle_topk": 4}
    env = {"SGLANG_ENABLE_SPEC_V2": "1"}
    assert "SGLANG_ENABLE_SPEC_V2" in refusal(tree, "0.5.10", env)
    of(tree, "0.5.10")
    of(tree, "0.5.12", env)


def test_a_dense_model_has_no_mtp_layers() -> None:
    assert "has no MTP layers" in refusal(NEXTN, model="tiny")
    config = of(NEXTN, model="tiny", draft_path="some/draft")
    assert dict(config.flags)["speculative_algorithm"] == "EAGLE"
    assert dict(config.flags)["speculative_draft_model_path"] == "some/draft"


def test_extra_buffer_needs_a_model_with_state() -> None:
    assert "needs a model with linear-attention state" in refusal({STRATEGY: "extra_buffer"}, model="tiny")
    assert of({STRATEGY: "no_buffer"}, model="tiny").flags == ()
    assert dict(of({STRATEGY: "extra_buffer", "disable_radix_cache": True}, model="tiny").flags) == {
        "disable_radix_cache": True
    }


def test_extra_buffer_needs_a_gpu() -> None:
    assert "needs a GPU" in refusal({STRATEGY: "extra_buffer"}, architecture="cpu")


def test_simulated_acceptance_follows_the_steps_and_goes_with_speculation() -> None:
    assert dict(of(EXTRA, simulated_acceptance=0.8).env) == {"SGLANG_SIMULATE_ACC_LEN": "2.95"}
    one = {**EXTRA, "speculative_num_steps": 1}
    assert dict(of(one, simulated_acceptance=0.8).env) == {"SGLANG_SIMULATE_ACC_LEN": "1.80"}
    assert of({}, simulated_acceptance=0.8).env == ()
    assert of({}, env={"SGLANG_SIMULATE_ACC_LEN": "3.0", "OTHER": "1"}).env == (("OTHER", "1"),)


def test_acceptance_length_counts_the_token_that_verification_adds() -> None:
    assert acceptance_length(0.0, 3) == 1
    assert acceptance_length(1.0, 3) == 4
    assert acceptance_length(0.5, 1) == 1.5
