"""Refusals: configurations that SGLang ends with an exception before it allocates anything, in its own words.

The catalogue is that of ``canonical.py``, which gives the reasons to people; here are the last lines of the
tracebacks (server_args.py of 0.5.10 to 0.5.13, arg_groups of later versions).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bench.engines.sglang.model_shape import ModelShape
from bench.engines.sglang.settings import Settings

EAGLE_FAMILY = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
KNOWN_ALGORITHMS = (*EAGLE_FAMILY, "NGRAM", "DFLASH", "DSPARK", "UNO", "FROZEN_KV_MTP")
NEEDS_DRAFT_MODEL = ("EAGLE3", "STANDALONE", "DFLASH", "DSPARK")


def refusal(
    values: Mapping[str, Any], settings: Settings, shape: ModelShape, env: Mapping[str, str], architecture: str
) -> str | None:
    """The exception that the main process ends with, its name in front; None where it goes on.

    Args:
        values: flags that were passed, by destination.
        env: environment variables of the server.
        architecture: of the card, ``cpu`` where there is none.
    """
    return next(_refusals(values, settings, shape, env, architecture), None)


def _refusals(
    values: Mapping[str, Any], settings: Settings, shape: ModelShape, env: Mapping[str, str], architecture: str
) -> Iterator[str]:
    yield from _strategy(values, settings, shape, architecture)
    yield from _speculation(values, settings, shape, env)
    page = settings.page_size
    if settings.chunked_prefill_size > 0 and settings.chunked_prefill_size % page:
        yield "AssertionError: chunked_prefill_size must be divisible by page_size"
    if settings.hierarchical and not settings.radix_cache:
        yield (
            "ValueError: The arguments enable-hierarchical-cache and disable-radix-cache are mutually exclusive and "
            "cannot be used at the same time. Please use only one of them."
        )
    if values.get("enable_int8_mamba_checkpoint") and settings.hierarchical:
        yield "ValueError: --enable-int8-mamba-checkpoint is not supported together with --enable-hierarchical-cache."
    if settings.schedule_conservativeness < 0:
        yield "AssertionError: schedule_conservativeness must be non-negative"


def _strategy(values: Mapping[str, Any], settings: Settings, shape: ModelShape, architecture: str) -> Iterator[str]:
    early = settings.version < (0, 5, 14)
    option = "--mamba-scheduler-strategy" if early else "--mamba-radix-cache-strategy"
    asked = values.get("mamba_radix_cache_strategy") or values.get("mamba_scheduler_strategy") or "auto"
    if not shape.linear_layers:
        if asked not in ("auto", "no_buffer") and not early:
            yield f"ValueError: {option} {asked} needs mamba state, got {shape.architecture}."
        return
    if asked == "extra_buffer" and not settings.radix_cache and early:
        yield (
            "ValueError: mamba extra_buffer is not compatible with --disable-radix-cache Overlap scheduling is already "
            "supported with no_buffer + disable_radix_cache. Please use --mamba-scheduler-strategy no_buffer instead."
        )
    if not settings.radix_cache:
        return
    if settings.strategy.startswith("extra_buffer"):
        yield from _extra_buffer(values, settings, shape, architecture)
    else:
        yield from _no_buffer(values, settings, shape, asked)


def _extra_buffer(values: Mapping[str, Any], settings: Settings, shape: ModelShape, architecture: str) -> Iterator[str]:
    if architecture == "cpu":
        yield "AssertionError: extra_buffer needs CUDA/MUSA/NPU (FLA)."
    if values.get("linear_attn_backend") not in (None, "triton"):
        yield f"ValueError: extra_buffer is not supported for {shape.architecture}; use no_buffer."
    if settings.strategy == "extra_buffer_lazy" and settings.speculative and settings.version < (0, 5, 17):
        yield "AssertionError: extra_buffer_lazy unsupported with spec."


def _no_buffer(values: Mapping[str, Any], settings: Settings, shape: ModelShape, asked: str) -> Iterator[str]:
    early = settings.version < (0, 5, 14)
    if early and settings.speculative:
        yield (
            f"ValueError: Speculative decoding for {shape.architecture} is not compatible with radix cache when using "
            "--mamba-scheduler-strategy no_buffer.To use radix cache with speculative decoding, please use "
            "--mamba-scheduler-strategy extra_buffer and set SGLANG_ENABLE_SPEC_V2=1."
        )
    if early or asked == "auto":
        return
    if settings.page_size != 1:
        yield "AssertionError: no_buffer only supports page_size=1."
    if not values.get("disable_overlap_schedule"):
        yield ("AssertionError: no_buffer do not support overlap schedule. Try to set disable_overlap_schedule=True.")
    if settings.attention_backend == "trtllm_mha":
        yield "AssertionError: no_buffer do not support trtllm_mha attention backend."


def _speculation(
    values: Mapping[str, Any], settings: Settings, shape: ModelShape, env: Mapping[str, str]
) -> Iterator[str]:
    name = settings.algorithm
    if name is None:
        return
    draft_path = values.get("speculative_draft_model_path")
    if name not in KNOWN_ALGORITHMS:
        yield f"ValueError: Unknown speculative algorithm name: {name}"
    if name in NEEDS_DRAFT_MODEL and not draft_path:
        yield f"ValueError: {name} speculative decoding requires setting --speculative-draft-model-path."
    if values.get("weight_cache_mode") not in (None, "off", "none"):
        yield "ValueError: --weight-cache-mode is not supported together with speculative decoding."
    if name not in EAGLE_FAMILY:
        return
    steps, topk = values.get("speculative_num_steps"), values.get("speculative_eagle_topk")
    tokens = values.get("speculative_num_draft_tokens")
    if steps is None and (topk is not None or tokens is not None):
        yield "AssertionError"  # a bare assert: its message is empty
    if steps is not None and (topk is None or (tokens is None and topk > 1)):
        yield "TypeError: '>' not supported between instances of 'NoneType' and 'int'"
    if settings.topk > 1 and settings.version < (0, 5, 11) and env.get("SGLANG_ENABLE_SPEC_V2") in ("1", "true"):
        yield "ValueError: Spec v2 currently only supports topk = 1 for speculative decoding."
    if settings.topk > 1 and settings.attention_backend == "trtllm_mha":
        yield "ValueError: trtllm_mha backend only supports topk = 1 for speculative decoding."
    if (
        settings.topk > 1
        and settings.page_size > 1
        and settings.attention_backend
        not in (
            "auto",
            "flashinfer",
            "fa3",
            "triton",
        )
    ):
        yield (
            "ValueError: speculative_eagle_topk > 1 with page_size > 1 is only supported on "
            f"('flashinfer', 'fa3', 'triton'); got attention_backend={settings.attention_backend!r}. "
            "Use page_size == 1 or one of those backends."
        )
    if values.get("speculative_use_rejection_sampling") and settings.topk != 1:
        yield "ValueError: --speculative-use-rejection-sampling requires --speculative-eagle-topk=1."
    if shape.draft is None and not draft_path:
        yield f"ValueError: {shape.architecture} has no draft layers; set --speculative-draft-model-path."
