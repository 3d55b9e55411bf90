"""Memory plan: how SGLang 0.5.10 to 0.5.23 divides a GPU's memory at start-up, step by step.

Sources: sglang 0.5.12 and 0.5.15 model_executor/model_runner_kv_cache_mixin.py, 0.5.17 and 0.5.23
mem_cache/kv_cache_configurator.py; constants that come from launches were seen with 0.5.15 on one H200.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bench.engines.sglang.model_shape import ModelShape, kv_dtype_bytes
from bench.engines.sglang.settings import GIB, MIB, Settings
from bench.outcome import Cause, Phase

# Between the measurement that the fraction refers to and loading ("Init torch distributed ends. mem usage=0.09").
INIT_BYTES = 0.10 * GIB
# Lost between the end of loading the target and the next measurement (88.77 to 88.73 GiB in every launch).
AFTER_LOAD_BYTES = 0.04 * GIB
# Of the attention backend, between the pools and graph capture (0.12 to 0.13 GiB for the 27B shape).
WORKSPACE_BYTES = 0.13 * GIB
# Graphs: a base and so many bytes per captured row and vocabulary entry; within 0.06 GiB of 14 captures.
GRAPH_BASE_BYTES = {"target": 0.15 * GIB, "draft decode": 0.08 * GIB, "draft extend": 0.0}
GRAPH_BYTES_PER_ROW_AND_TOKEN = 16
# Kept free in host memory beside the hierarchical cache (pool_host/base.py).
HOST_RESERVE_BYTES = 10 * GIB
# SGLANG_VLM_CACHE_SIZE_MB, for multimodal models from 0.5.18.
MULTIMODAL_BYTES = 100 * MIB


@dataclass(frozen=True)
class Regime:
    """How a range of versions sizes its pools, from the version ``first`` on.

    Attributes:
        seen: confirmed by launches on a GPU, not only read in the source.
        reserves_all_draft_states: states for all ``max_running_requests`` times draft tokens come off before the
            split; later versions solve for both together.
        draft_first: the draft's weights are loaded before the pools are sized; else they come out of the slack.
        checks_state: refuses a state cache of no slots, or one too small for one request.
        budgets_padding: the pools' one padding slot each is paid for; else it comes out of the slack.
        counts_draft_layers: the layers of a draft model that was given by a path are part of a token's cell.
        multimodal_reserve: keeps memory for image features.
    """

    first: tuple[int, ...]
    seen: bool = False
    reserves_all_draft_states: bool = False
    draft_first: bool = True
    checks_state: bool = True
    budgets_padding: bool = False
    counts_draft_layers: bool = True
    multimodal_reserve: bool = False


REGIMES = (
    Regime(
        (0, 5, 10), reserves_all_draft_states=True, draft_first=False, checks_state=False, counts_draft_layers=False
    ),
    Regime((0, 5, 13), draft_first=False, counts_draft_layers=False),
    Regime((0, 5, 14), seen=True),
    Regime((0, 5, 17), budgets_padding=True),
    Regime((0, 5, 18), budgets_padding=True, multimodal_reserve=True),
)


def regime_of(version: tuple[int, ...]) -> Regime:
    """The row for a version; one older than the table gets its first row, a newer one its last."""
    return max((regime for regime in REGIMES if regime.first <= version), default=REGIMES[0], key=lambda row: row.first)


@dataclass(frozen=True)
class Host:
    """Memory that a launch meets: of one GPU before anything is loaded, of its weights, and free in the host."""

    available_bytes: float
    weight_bytes: float
    draft_weight_bytes: float
    host_available_bytes: float


@dataclass(frozen=True)
class Failure:
    """Why a plan cannot start.

    Attributes:
        step: that failed, ``pools`` being their sizing.
        message: as SGLang prints it, its exception's name in front; of CUDA's own message only the first sentences.
    """

    cause: Cause
    phase: Phase
    step: str
    message: str


@dataclass(frozen=True)
class Step:
    """One taker of GPU memory, in the order of start-up; ``free_bytes`` is what it leaves."""

    name: str
    taken_bytes: float
    free_bytes: float


@dataclass(frozen=True)
class Graphs:
    """One capture: ``kind`` is ``target``, ``draft decode`` or ``draft extend``."""

    kind: str
    batch_sizes: tuple[int, ...]
    size_bytes: float


@dataclass
class Plan:
    """How a configuration divides the GPU's memory.

    Attributes:
        budget_bytes: for state and KV pools, under ``mem_fraction_static``.
        state_slots: of the linear-attention state cache, 0 where the model has none.
        draft_slots: requests that have states for their draft tokens.
        max_running_requests: the effective one.
        conv_bytes to draft_kv_bytes: of the pools as allocated, padding slots included.
        host_bytes: of the hierarchical cache.
        steps: of start-up, the one that fails last.
    """

    settings: Settings
    budget_bytes: float = 0.0
    state_slots: int = 0
    draft_slots: int = 0
    kv_tokens: int = 0
    max_running_requests: int = 0
    conv_bytes: float = 0.0
    ssm_bytes: float = 0.0
    draft_ssm_bytes: float = 0.0
    draft_conv_bytes: float = 0.0
    kv_bytes: float = 0.0
    draft_kv_bytes: float = 0.0
    host_bytes: float = 0.0
    graphs: list[Graphs] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    failure: Failure | None = None

    @property
    def free_bytes(self) -> float:
        """Free GPU memory after the last step; negative is missing."""
        return self.steps[-1].free_bytes

    def free_after(self, name: str) -> float:
        """Free GPU memory after a step, by name."""
        return next(step.free_bytes for step in self.steps if step.name == name)


def make_plan(settings: Settings, shape: ModelShape, host: Host) -> Plan:
    """Divide a GPU's memory as SGLang does, up to the step that fails.

    Args:
        shape: of what one GPU holds (``ModelShape.sharded``).
    """
    return _Planner(settings, shape, host).plan()


class _Planner:
    """Makes one plan."""

    def __init__(self, settings: Settings, shape: ModelShape, host: Host) -> None:
        self.settings = settings
        self.shape = shape
        self.host = host
        self.regime = regime_of(settings.version)
        self.free = host.available_bytes
        self.result = Plan(settings)
        self.state = shape.state_bytes(settings.ssm_dtype) if shape.linear_layers else 0
        self.draft = shape.draft if settings.has_draft_model else None
        self.draft_tokens = 0 if settings.replay_ssm else settings.draft_tokens

    def plan(self) -> Plan:
        load, capture, kv = Phase.LOAD, Phase.GRAPH_CAPTURE, Phase.KV_ALLOC
        loading_draft = lambda: self.take("draft_weights", self.host.draft_weight_bytes, load)  # noqa: E731
        target_graphs = lambda: self.capture("target")  # noqa: E731
        first = self.regime.draft_first
        order = [
            lambda: self.take("weights", self.host.weight_bytes, load),
            lambda: self.take("after_load", AFTER_LOAD_BYTES, load),
            *([loading_draft] if self.draft and first else []),
            self.size_pools,
            self.allocate_state,
            lambda: self.take("kv_pool", self.kv_bytes(), kv),
            *([target_graphs, loading_draft] if self.draft and not first else []),
            *([lambda: self.take("draft_kv_pool", self.draft_kv_bytes(), kv), self.share] if self.draft else []),
            lambda: self.take("workspace", WORKSPACE_BYTES, capture),
            *([] if self.draft and not first else [target_graphs]),
            *([lambda: self.capture("draft decode"), lambda: self.capture("draft extend")] if self.draft else []),
            self.allocate_host,
        ]
        for step in order:
            step()
            if self.result.failure:
                break
        return self.result

    def take(self, name: str, size: float, phase: Phase) -> None:
        self.free -= size
        self.result.steps.append(Step(name, size, self.free))
        if self.free < 0:
            cause = {
                Phase.LOAD: Cause.OOM_GPU_WEIGHTS,
                Phase.KV_ALLOC: Cause.OOM_GPU_STATE_CACHE if name == "state_cache" else Cause.OOM_GPU_KV_POOL,
            }.get(phase, Cause.OOM_GPU_GRAPH_CAPTURE)
            self.fail(
                cause, name, f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {size / GIB:.2f} GiB."
            )

    def fail(self, cause: Cause, step: str, message: str) -> None:
        phase = Phase.KV_ALLOC
        if cause is Cause.OOM_GPU_WEIGHTS:
            phase = Phase.LOAD
        elif cause is Cause.OOM_GPU_GRAPH_CAPTURE:
            phase = Phase.GRAPH_CAPTURE
        self.result.failure = Failure(cause, phase, step, message)

    # Sizing the pools

    def size_pools(self) -> None:
        settings, result = self.settings, self.result
        before = self.host.available_bytes + INIT_BYTES
        rest = self.free - before * (1 - settings.mem_fraction_static)
        if self.regime.multimodal_reserve and self.shape.multimodal:
            rest -= MULTIMODAL_BYTES
        result.budget_bytes = rest
        if self.state:
            rest = self.split_state(rest)
            if result.failure:
                return
        if rest <= 0 and self.regime.draft_first:
            self.fail(Cause.OOM_GPU_KV_POOL, "pools", self.nothing_left(before))
            return
        tokens = math.floor(rest / self.cell_bytes())
        if settings.max_total_tokens is not None:
            tokens = min(tokens, settings.max_total_tokens)
        result.kv_tokens = tokens // settings.page_size * settings.page_size
        if result.kv_tokens <= 0:
            message = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
            if self.regime.checks_state:
                message += f" Current value: mem_fraction_static={settings.mem_fraction_static}"
            self.fail(Cause.OOM_GPU_KV_POOL, "pools", message)
            return
        self.limit_running()

    def cell_bytes(self) -> float:
        cell = self.shape.kv_bytes_per_token(self.settings.kv_cache_dtype)
        if self.draft and self.draft.from_path and self.regime.counts_draft_layers:
            cell *= 1 + self.draft.layers / self.shape.full_layers
        return cell

    def nothing_left(self, before: float) -> str:
        smallest = 1 - self.free / before
        return (
            "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static="
            f"{self.settings.mem_fraction_static}. Raise --mem-fraction-static above "
            f"{math.ceil(smallest * 1000) / 1000:.3f} (minimum viable = 1 - available/pre = {smallest:.4f}). "
            "If using speculative decoding, draft weights are now counted."
        )

    def split_state(self, rest: float) -> float:
        """Size the state cache; returns what is left for keys and values."""
        settings, result, state = self.settings, self.result, self.state
        ratio, requested = settings.slots_per_request, settings.max_running_requests
        padding = 1 if self.regime.budgets_padding else 0
        reserves_all = self.regime.reserves_all_draft_states and self.draft_tokens > 0
        if reserves_all:
            result.draft_slots = requested or 0
            rest -= state * result.draft_slots * self.draft_tokens
        if settings.max_mamba_cache_size is not None:
            result.state_slots = settings.max_mamba_cache_size
        elif not settings.radix_cache and requested is not None:
            result.state_slots = requested
        else:
            share = settings.mamba_full_memory_ratio / (1 + settings.mamba_full_memory_ratio)
            per_request = 0 if reserves_all else self.draft_tokens
            budget = rest * share - padding * state * (1 + per_request) - self.ring_bytes()
            result.state_slots = math.floor(budget / (state * (1 + per_request / ratio)))
        if self.draft_tokens and not reserves_all:
            result.draft_slots = min(requested or 0, result.state_slots // ratio)
            rest -= state * (result.draft_slots + padding) * self.draft_tokens
        if result.state_slots <= 0 and self.regime.checks_state:
            self.fail(
                Cause.OOM_GPU_STATE_CACHE,
                "pools",
                "RuntimeError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache. Computed "
                f"max_mamba_cache_size={result.state_slots} (total_rest_memory={rest / GIB:.2f} GB, "
                f"mamba_cache_per_req={state / MIB:.2f} MB). Try: (1) reduce --max-running-requests, "
                "(2) increase --mem-fraction-static, (3) reduce --speculative-num-draft-tokens, or "
                "(4) use GPUs with more memory.",
            )
        return rest - (result.state_slots + padding) * state - self.ring_bytes()

    def ring_bytes(self) -> float:
        """ReplaySSM's ring buffers, which take the place of draft states: values, keys and gates of each draft token
        for every request. Read only (0.5.23 mamba_utils.replayssm_ring_bytes_per_req), good to about a quarter."""
        if not self.settings.replay_ssm:
            return 0.0
        record = self.shape.conv_elements / max(1, self.shape.conv_taps) * 2 * 2
        return ((self.settings.max_running_requests or 0) + 1) * self.settings.draft_tokens * record

    def limit_running(self) -> None:
        settings, result = self.settings, self.result
        # resolve_max_num_reqs: 2048 to 4096 where nothing is asked for.
        estimated = max(min(int(result.kv_tokens / settings.context_length * 512), 4096), 2048)
        result.max_running_requests = min(settings.max_running_requests or estimated, result.kv_tokens // 2)
        if not self.state:
            return
        ratio = settings.slots_per_request
        result.max_running_requests = min(result.max_running_requests, result.state_slots // ratio)
        if result.max_running_requests > 0:
            return
        message = (
            "RuntimeError: Hybrid (mamba/linear-attention) state cache is too small to serve any requests. "
            f"max_mamba_cache_size={result.state_slots}, mamba_ratio={ratio}, "
            f"resulting max_num_reqs={result.max_running_requests}. Try: (1) reduce --max-running-requests, "
            "(2) increase --mem-fraction-static, or (3) use GPUs with more memory."
        )
        if not self.regime.checks_state:
            # Until 0.5.12 nothing looks: it starts, and no request ever runs.
            message = f"no request can run: {result.state_slots} state slots, {ratio} are needed for one request"
        self.fail(Cause.OOM_GPU_STATE_CACHE, "pools", message)

    # Allocating them

    def allocate_state(self) -> None:
        """Slots, draft states and the request table, each with the one padding entry that SGLang adds."""
        shape, result = self.shape, self.result
        table = (result.max_running_requests + 1) * (self.settings.context_length + 8) * 4.0
        if self.state:
            convolution = shape.conv_elements * 2
            result.conv_bytes = (result.state_slots + 1.0) * convolution
            result.ssm_bytes = (result.state_slots + 1.0) * (self.state - convolution)
        if self.state and self.draft_tokens:
            columns = self.draft_tokens + shape.conv_taps - 1
            result.draft_ssm_bytes = (result.draft_slots + 1.0) * self.draft_tokens * (self.state - convolution)
            result.draft_conv_bytes = (result.draft_slots + 1.0) * columns * convolution / shape.conv_taps
        states = result.conv_bytes + result.ssm_bytes + result.draft_ssm_bytes + result.draft_conv_bytes
        self.take("state_cache", table + states + self.ring_bytes(), Phase.KV_ALLOC)

    def kv_bytes(self) -> float:
        self.result.kv_bytes = self.result.kv_tokens * self.shape.kv_bytes_per_token(self.settings.kv_cache_dtype)
        return self.result.kv_bytes

    def draft_kv_bytes(self) -> float:
        """With as many tokens as the target's pool, beside it."""
        elements = self.draft.kv_elements if self.draft else 0
        self.result.draft_kv_bytes = self.result.kv_tokens * elements * kv_dtype_bytes(self.settings.kv_cache_dtype)
        return self.result.draft_kv_bytes

    def share(self) -> None:
        """The draft takes over the target's embedding and head, and frees its own."""
        if self.draft and self.draft.shared_bytes:
            self.take("shared", -self.draft.shared_bytes, Phase.KV_ALLOC)

    def capture(self, kind: str) -> None:
        settings, running = self.settings, self.result.max_running_requests
        sizes = tuple(size for size in settings.graph_batch_sizes if size <= running)
        if max(settings.graph_batch_sizes, default=0) > running and running not in sizes:
            sizes += (running,)
        rows = max(sizes, default=0)
        if kind == "draft decode":
            rows *= (settings.steps - 1) * settings.topk
        elif settings.speculative:
            rows *= settings.draft_tokens
        if rows:
            size = GRAPH_BASE_BYTES[kind] + rows * self.shape.vocabulary_size * GRAPH_BYTES_PER_ROW_AND_TOKEN
            self.result.graphs.append(Graphs(kind, sizes, size))
            self.take(f"{kind} graphs", size, Phase.GRAPH_CAPTURE)

    def allocate_host(self) -> None:
        """The hierarchical cache: device pools times the ratio, or the size that was asked for."""
        settings, result = self.settings, self.result
        if not settings.hierarchical:
            return
        free = self.host.host_available_bytes - HOST_RESERVE_BYTES
        wanted = (result.kv_bytes + result.draft_kv_bytes + result.state_slots * self.state) * settings.hicache_ratio
        if settings.hicache_size_gb:
            wanted = settings.hicache_size_gb * 1e9
        elif settings.hicache_ratio_adapts:
            wanted = min(wanted, max(0.0, 0.8 * free))
        result.host_bytes = wanted
        if wanted > free:
            self.fail(
                Cause.OOM_HOST,
                "host",
                f"ValueError: Not enough host memory available. Requesting {wanted / 1e9:.2f} GB but only have "
                f"{max(0.0, free) / 1e9:.2f} GB free. Please reduce the size of the hierarchical cache.",
            )
