"""Memory forecast: will a configuration fit, and how many requests can it run, before it is launched."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from bench.engines.protocol import Calibration, DecodeDemand, Forecast, LaunchFacts, Value
from bench.engines.sglang.memory_plan import (
    HOST_RESERVE_BYTES,
    INIT_BYTES,
    WORKSPACE_BYTES,
    Host,
    Plan,
    make_plan,
    regime_of,
)
from bench.engines.sglang.model_shape import ModelShape
from bench.engines.sglang.settings import GIB, MIB, Settings
from bench.experiment import HardwareSpec
from bench.outcome import Phase

# Driver and context take this much of what nvidia-smi shows as total: 143,771 MiB against 139.09 GiB on the H200.
CONTEXT_BYTES = 1.31 * GIB
# At risk is what keeps less than this share of what SGLang's default fraction would leave free.
COMFORTABLE_SHARE = 0.5
# How far a forecast can be off: after a launch has shown free memory and weights, and before.
CALIBRATED_ERROR_BYTES = 0.1 * GIB
UNCALIBRATED_ERROR_BYTES = 1.0 * GIB
UNCALIBRATED_WEIGHT_ERROR = 0.02

NOT_CALIBRATED = Calibration()


def forecast(
    flags: Mapping[str, Value],
    *,
    version: str,
    shape: ModelShape,
    hardware: HardwareSpec,
    calibration: Calibration = NOT_CALIBRATED,
    env: Mapping[str, str] | None = None,
) -> Forecast:
    """Forecast memory and effective limits of a configuration.

    Args:
        flags: by destination name; a name that is older or newer than the version is understood as well.
        version: of SGLang.
        shape: of the model, before it is divided among GPUs.
        calibration: what launches on this host have shown, per GPU.
        env: environment variables of the server.

    Returns:
        ``does_not_fit`` where start-up fails even with the forecast's error in its favour; ``edge`` where that error
        decides, or where much less memory stays free than SGLang's default would keep; else ``fits``.

    Raises:
        ShapeError: a dtype is not known.
    """
    settings = Settings.resolve(flags, version=version, shape=shape, gpu_memory_bytes=hardware.memory_bytes, env=env)
    shape = shape.sharded(settings.tp_size)
    host = expected_host(shape, hardware, calibration)
    plan = make_plan(settings, shape, host)
    error = CALIBRATED_ERROR_BYTES
    if calibration.available_bytes is None or calibration.weight_bytes is None:
        error = UNCALIBRATED_ERROR_BYTES + UNCALIBRATED_WEIGHT_ERROR * host.weight_bytes
    verdict, reasons, margin = _judge(plan, shape, host, error, calibration)
    sized = plan.failure is None or plan.failure.step != "pools"
    return Forecast(
        verdict=verdict,
        reasons=reasons,
        margin_bytes=margin,
        kv_tokens=plan.kv_tokens if sized else None,
        state_slots=max(0, plan.state_slots) if shape.linear_layers else None,
        max_running_requests=plan.max_running_requests if sized else None,
        host_bytes=plan.host_bytes or None,
        split_bytes=_split(plan, shape, host),
        demand=decode_demand(plan, shape),
    )


def decode_demand(plan: Plan, shape: ModelShape) -> DecodeDemand:
    """What a decode step asks of the card, counted from shapes.

    A verify step reads a request's state and writes one for each token that it verifies (sglang
    hybrid_linear_attn_backend), unless ReplaySSM keeps only what it takes to redo them.
    """
    settings = plan.settings
    draft = shape.draft if settings.has_draft_model else None
    tokens = settings.draft_tokens if settings.speculative else 1
    state = shape.state_bytes(settings.ssm_dtype) if shape.linear_layers else 0
    depth = tokens - 1 if settings.algorithm in ("NGRAM", "DFLASH") else min(settings.steps, tokens - 1)
    graphs = [size for item in plan.graphs if item.kind == "target" for size in item.batch_sizes]
    return DecodeDemand(
        step_bytes=shape.dense_bytes + shape.expert_bytes + (settings.steps * draft.step_bytes if draft else 0.0),
        request_bytes=state * (2 if tokens == 1 or settings.replay_ssm else 1 + tokens),
        token_bytes=shape.kv_bytes_per_token(settings.kv_cache_dtype),
        token_flops=2 * shape.active_parameters,
        step_tokens=tokens,
        depth=depth,
        graph_requests=max(graphs, default=0),
        prefix_cache=settings.finds_prefixes(hybrid=bool(shape.linear_layers)),
    )


def expected_host(shape: ModelShape, hardware: HardwareSpec, calibration: Calibration) -> Host:
    """What a launch will meet: as launches have shown, else from the card's data and the model's config."""
    draft = shape.draft.weight_bytes if shape.draft else 0.0
    return Host(
        available_bytes=calibration.available_bytes
        or hardware.available_bytes
        or hardware.memory_bytes - CONTEXT_BYTES,
        weight_bytes=calibration.weight_bytes or shape.weight_bytes,
        draft_weight_bytes=calibration.draft_weight_bytes or draft,
        host_available_bytes=hardware.host_memory_bytes,
    )


def calibrate(calibration: Calibration, facts: LaunchFacts) -> Calibration:
    """What the next forecast knows after a launch; what its log did not say stays as it was.

    ``runtime_bytes`` is the most that a start took between its pools and serving.
    """
    runtime = calibration.runtime_bytes
    if facts.available_after_pools_bytes is not None and facts.available_after_start_bytes is not None:
        runtime = max(facts.available_after_pools_bytes - facts.available_after_start_bytes, runtime or 0.0)
    return Calibration(
        available_bytes=_seen(facts.available_bytes) or calibration.available_bytes,
        weight_bytes=_seen(facts.weight_bytes) or calibration.weight_bytes,
        draft_weight_bytes=_seen(facts.draft_weight_bytes) or calibration.draft_weight_bytes,
        runtime_bytes=runtime,
    )


def _seen(size: float | None) -> float | None:
    """Tiny models on a CPU print weights of zero or less; they teach nothing."""
    return size if size is not None and size > 0 else None


def prefill_bytes(settings: Settings, shape: ModelShape) -> float:
    """Least memory that a full prefill batch needs: the largest intermediates of one layer."""
    tokens = settings.chunked_prefill_size if settings.chunked_prefill_size > 0 else settings.max_prefill_tokens
    return tokens * shape.activation_bytes_per_token


def _judge(
    plan: Plan, shape: ModelShape, host: Host, error: float, calibration: Calibration
) -> tuple[str, tuple[str, ...], float]:
    """Verdict, reasons and margin."""
    settings = plan.settings
    if plan.failure:
        better = make_plan(settings, shape, _with(host, error))
        # That the draft's weights come out of the slack was only read for the versions that do so.
        only_read = not regime_of(settings.version).draft_first and plan.failure.step not in (
            "weights",
            "pools",
            "host",
        )
        reason = _why_not(plan, shape, host)
        if only_read:
            return "edge", (_at_risk(plan, host), reason), plan.free_bytes
        return "does_not_fit" if better.failure else "edge", (reason,), -_missing(plan, shape, host)
    summary = _summary(plan, shape)
    needed = WORKSPACE_BYTES + sum(graphs.size_bytes for graphs in plan.graphs)
    free = plan.free_bytes - max(0.0, (calibration.runtime_bytes or 0.0) - needed)
    least = prefill_bytes(settings, shape)
    if free < max(least, COMFORTABLE_SHARE * settings.default_reserve_bytes):
        return "edge", (_at_risk(plan, host), summary), free - least
    worse = make_plan(settings, shape, _with(host, -error))
    if worse.failure:
        doubt = f"fits by less than the forecast's error of {error / GIB:.1f} GiB; with that much less memory "
        return "edge", (doubt + _why_not(worse, shape, host), summary), 0.0
    return "fits", (summary,), free - least


def _with(host: Host, more_bytes: float) -> Host:
    return dataclasses.replace(host, available_bytes=host.available_bytes + more_bytes)


def _missing(plan: Plan, shape: ModelShape, host: Host) -> float:
    """GPU memory that a failed plan lacks, to 0.1 GiB (host memory where the hierarchical cache does not fit)."""
    assert plan.failure is not None
    if plan.failure.step == "host":
        return plan.host_bytes + HOST_RESERVE_BYTES - host.host_available_bytes
    if plan.failure.step != "pools":
        return -plan.free_bytes
    low, high = 0.0, host.available_bytes
    while high - low > 0.1 * GIB:
        middle = (low + high) / 2
        low, high = (middle, high) if make_plan(plan.settings, shape, _with(host, middle)).failure else (low, middle)
    return high


def _fraction(settings: Settings) -> str:
    fraction = settings.mem_fraction_static
    return f"{fraction:.2f}" if abs(round(fraction, 2) - fraction) < 1e-9 else f"{fraction:.3f}"


def _at_risk(plan: Plan, host: Host) -> str:
    settings = plan.settings
    slack = (host.available_bytes + INIT_BYTES) * (1 - settings.mem_fraction_static)
    return (
        f"F = {_fraction(settings)} (--mem-fraction-static) leaves {slack / GIB:.1f} GiB outside weights "
        f"and pools, where SGLang's default would keep {settings.default_reserve_bytes / GIB:.1f} GiB: at risk of "
        "running out of memory in capture or prefill"
    )


def _summary(plan: Plan, shape: ModelShape) -> str:
    settings = plan.settings
    text = f"{plan.kv_tokens:,} KV tokens, {plan.max_running_requests} running requests"
    if shape.linear_layers:
        text += f", {plan.state_slots} state slots of {shape.state_bytes(settings.ssm_dtype) / MIB:.1f} MiB"
        text += f" ({settings.slots_per_request} per request)"
    asked = settings.max_running_requests
    if asked is not None and asked > plan.max_running_requests:
        text += f"; {asked} running requests were asked for (--max-running-requests)"
    return text


def _why_not(plan: Plan, shape: ModelShape, host: Host) -> str:
    """One sentence with the flags and the numbers."""
    settings, failure = plan.settings, plan.failure
    assert failure is not None
    fraction = f"F = {_fraction(settings)}"
    weights = host.weight_bytes + (host.draft_weight_bytes if settings.has_draft_model else 0.0)
    free = plan.steps[-1].free_bytes + plan.steps[-1].taken_bytes
    if failure.step in ("weights", "draft_weights"):
        what = "the draft's weights" if failure.step == "draft_weights" else "weights"
        size = plan.steps[-1].taken_bytes / GIB
        return f"{what} of {size:.1f} GiB do not fit into the {free / GIB:.1f} GiB of GPU memory that are free"
    if failure.step == "host":
        return (
            f"--enable-hierarchical-cache does not fit: {plan.host_bytes / GIB:.1f} GiB of host memory are wanted, "
            f"{host.host_available_bytes / GIB:.1f} GiB less 10 are there; lower --hicache-ratio or --hicache-size"
        )
    if failure.step == "pools":
        return _why_no_pools(plan, shape, fraction, weights)
    if failure.step == "draft_kv_pool":
        return (
            f"{fraction} does not fit: the draft's KV pool of {plan.draft_kv_bytes / GIB:.1f} GiB comes on top of the "
            f"target's and {free / GIB:.1f} GiB are left; lower --mem-fraction-static"
        )
    phase = "capture of CUDA graphs" if failure.phase is Phase.GRAPH_CAPTURE else failure.step.replace("_", " ")
    return (
        f"{fraction} does not fit: {phase} takes {plan.steps[-1].taken_bytes / GIB:.1f} GiB and "
        f"{max(0.0, free) / GIB:.1f} GiB are left; lower --mem-fraction-static"
    )


def _why_no_pools(plan: Plan, shape: ModelShape, fraction: str, weights: float) -> str:
    settings = plan.settings
    left = f"{plan.budget_bytes / GIB:.1f} GiB left after weights"
    if plan.budget_bytes <= 0:
        return (
            f"{fraction} does not fit: weights of {weights / GIB:.1f} GiB take all that --mem-fraction-static allows "
            f"and {-plan.budget_bytes / GIB:.1f} GiB more; raise it"
        )
    if not shape.linear_layers:
        return f"{fraction} does not fit: no room for KV tokens in the {left}; raise --mem-fraction-static"
    state = shape.state_bytes(settings.ssm_dtype)
    size = f"{state / MIB:.1f} MiB"
    drafts = f"{plan.draft_slots} x {settings.draft_tokens} draft states"
    advice = "set --mamba-ssm-dtype bfloat16"
    if settings.draft_tokens:
        advice = f"lower --max-running-requests or --speculative-num-draft-tokens, or {advice}"
    if regime_of(settings.version).reserves_all_draft_states and settings.draft_tokens:
        reserved = plan.draft_slots * settings.draft_tokens * state / GIB
        return (
            f"{fraction} with {plan.draft_slots} running requests does not fit: {drafts} of {size} reserve "
            f"{reserved:.1f} GiB of the {left}; {advice}"
        )
    if settings.max_mamba_cache_size is not None or not settings.radix_cache:
        asked = (plan.state_slots + plan.draft_slots * settings.draft_tokens) * state / GIB
        slots = f"{plan.state_slots} state slots" + (f" and {drafts}" if settings.draft_tokens else "")
        return f"{fraction} does not fit: {slots} of {size} take {asked:.1f} GiB of the {left}; {advice}"
    one = f" and {settings.draft_tokens} draft states" if settings.draft_tokens else ""
    return (
        f"{fraction} does not fit: one request takes {settings.slots_per_request} state slots{one} of {size}, and "
        f"{max(0, plan.state_slots)} slots come out of the {left}; raise --mem-fraction-static or {advice}"
    )


def _split(plan: Plan, shape: ModelShape, host: Host) -> tuple[tuple[str, float], ...]:
    settings = plan.settings
    draft = host.draft_weight_bytes if settings.has_draft_model else 0.0
    activations = prefill_bytes(settings, shape)
    free = plan.free_bytes if plan.steps else host.available_bytes
    return (
        ("weights", host.weight_bytes),
        ("draft_weights", draft - (shape.draft.shared_bytes if shape.draft and draft else 0.0)),
        ("kv_pool", plan.kv_bytes),
        ("draft_kv_pool", plan.draft_kv_bytes),
        ("state_cache", plan.conv_bytes + plan.ssm_bytes),
        ("draft_state", plan.draft_ssm_bytes + plan.draft_conv_bytes),
        ("graphs", sum(graphs.size_bytes for graphs in plan.graphs)),
        ("activations", activations),
        ("slack", free - activations),
    )
