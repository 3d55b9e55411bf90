"""Settings: what SGLang makes of its flags before it allocates anything, where memory and speed depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.engines.protocol import Value
from bench.engines.sglang.model_shape import ModelShape

MIB = 1 << 20
GIB = 1 << 30

# By GPU memory in MiB, tp < 4: (below, chunked_prefill_size, decode graph's largest batch, the same from 0.5.23).
# sglang 0.5.12 and 0.5.15 server_args._handle_gpu_memory_settings, 0.5.23 arg_groups/memory_hook.
_BY_GPU_MEMORY = (
    (20 * 1024, 2048, 8, 8, 2048),
    (35 * 1024, 2048, 24, 48, 4096),
    (60 * 1024, 4096, 32, 32, 4096),
    (90 * 1024, 8192, 256, 256, 8192),
    (160 * 1024, 8192, 256, 256, 8192),
    (float("inf"), 16384, 512, 512, 16384),
)
# Requests at once that speculation sets where nothing is asked for ("Max running requests is reset to 48").
SPECULATIVE_MAX_RUNNING = 48
# (steps, topk, draft tokens) that are chosen where none is given; sglang speculative_hook._auto_choose.
_AUTO_SPECULATION = (3, 1, 4)
_AUTO_SPECULATION_LLAMA = (5, 4, 8)
_NGRAM_DRAFT_TOKENS = 12
_DFLASH_DRAFT_TOKENS = 16

# Flags that were renamed; a version's own name is always among them.
_NAMES = {
    "mamba_radix_cache_strategy": ("mamba_radix_cache_strategy", "mamba_scheduler_strategy"),
    "cuda_graph_max_bs_decode": ("cuda_graph_max_bs_decode", "cuda_graph_max_bs"),
    "cuda_graph_bs_decode": ("cuda_graph_bs_decode", "cuda_graph_bs"),
    "enable_linear_replayssm_spec": ("enable_linear_replayssm_spec", "enable_gdn_replayssm_spec"),
    "tp_size": ("tp_size", "tensor_parallel_size"),
}


def parse_version(version: str) -> tuple[int, ...]:
    """``0.5.15`` or ``0.5.15.post1`` as a tuple of its numbers."""
    parts: list[int] = []
    for part in version.split("."):
        digits = "".join(character for character in part if character.isdigit())
        if not part[:1].isdigit():
            break
        parts.append(int(digits))
    return tuple(parts)


@dataclass(frozen=True)
class Settings:
    """Resolved settings of one server.

    Attributes:
        mem_fraction_static: given or by SGLang's default formula; ``default_reserve_bytes`` is what that formula keeps
            free for graphs and activations.
        max_running_requests: asked for (48 with speculation), None where the engine decides.
        slots_per_request: state slots that one running request needs, r in ``sglang.md``.
        algorithm: of speculation, NEXTN being EAGLE, else None; ``steps``, ``topk`` and ``draft_tokens`` are 0 then.
        graph_batch_sizes: for which decode graphs are captured, before they are limited by running requests; empty
            where graphs are off.
    """

    version: tuple[int, ...]
    mem_fraction_static: float
    default_reserve_bytes: float
    chunked_prefill_size: int
    max_prefill_tokens: int
    max_running_requests: int | None
    max_total_tokens: int | None
    context_length: int
    page_size: int
    tp_size: int
    graph_batch_sizes: tuple[int, ...]
    radix_cache: bool
    overlap: bool
    strategy: str
    slots_per_request: int
    mamba_full_memory_ratio: float
    max_mamba_cache_size: int | None
    ssm_dtype: str
    kv_cache_dtype: str
    algorithm: str | None
    steps: int
    topk: int
    draft_tokens: int
    replay_ssm: bool
    hierarchical: bool
    hicache_ratio: float
    hicache_size_gb: float
    hicache_ratio_adapts: bool
    schedule_policy: str
    schedule_conservativeness: float
    attention_backend: str

    def finds_prefixes(self, *, hybrid: bool) -> bool:
        """Whether a prefix that was computed for another request is not computed again. Without a buffer for it, the
        state of linear attention is not kept where prefixes part."""
        return self.radix_cache and not (hybrid and self.strategy == "no_buffer")

    @property
    def speculative(self) -> bool:
        return self.algorithm is not None

    @property
    def has_draft_model(self) -> bool:
        return self.algorithm is not None and self.algorithm != "NGRAM"

    @classmethod
    def resolve(
        cls,
        flags: Mapping[str, Value],
        *,
        version: str,
        shape: ModelShape,
        gpu_memory_bytes: float,
        env: Mapping[str, str] | None = None,
    ) -> Settings:
        """Apply SGLang's defaults and rewrites to flags by destination name (of any version).

        Args:
            gpu_memory_bytes: total of one GPU as nvidia-smi shows it.
            env: environment variables of the server that the sizes depend on.
        """
        parsed = parse_version(version)
        tp_size = int(_number(flags, "tp_size", 1))
        algorithm, steps, topk, draft_tokens = _speculation(flags, shape)
        running = _optional_int(flags, "max_running_requests")
        chunk, graph_max = _gpu_defaults(gpu_memory_bytes / MIB, tp_size, parsed)
        chunk = int(_number(flags, "chunked_prefill_size", chunk))
        sizes = _graph_sizes(flags, graph_max, running, algorithm is not None, parsed)
        reserve = _default_reserve(flags, chunk, sizes, gpu_memory_bytes, tp_size, algorithm, shape, parsed)
        fraction = _optional_float(flags, "mem_fraction_static")
        if fraction is None:
            fraction = _default_fraction(reserve, gpu_memory_bytes, shape)
        if running is None and algorithm is not None:
            running = SPECULATIVE_MAX_RUNNING
        strategy, overlap = _strategy(flags, shape, parsed)
        radix = not _on(flags, "disable_radix_cache")
        ratio = _optional_float(flags, "hicache_ratio")
        return cls(
            version=parsed,
            mem_fraction_static=fraction,
            default_reserve_bytes=reserve,
            chunked_prefill_size=chunk,
            max_prefill_tokens=int(_number(flags, "max_prefill_tokens", 16384)),
            max_running_requests=running,
            max_total_tokens=_optional_int(flags, "max_total_tokens"),
            context_length=_optional_int(flags, "context_length") or shape.context_length,
            page_size=int(_number(flags, "page_size", 1)),
            tp_size=tp_size,
            graph_batch_sizes=sizes,
            radix_cache=radix,
            overlap=overlap,
            strategy=strategy,
            slots_per_request=_slots_per_request(radix, strategy, overlap, parsed, env or {}),
            mamba_full_memory_ratio=_number(flags, "mamba_full_memory_ratio", 0.9),
            max_mamba_cache_size=_optional_int(flags, "max_mamba_cache_size"),
            ssm_dtype=str(_value(flags, "mamba_ssm_dtype") or shape.ssm_dtype),
            kv_cache_dtype=str(_value(flags, "kv_cache_dtype") or "auto"),
            algorithm=algorithm,
            steps=steps,
            topk=topk,
            draft_tokens=draft_tokens,
            replay_ssm=_on(flags, "enable_linear_replayssm_spec"),
            hierarchical=_on(flags, "enable_hierarchical_cache"),
            hicache_ratio=2.0 if ratio is None else ratio,
            hicache_size_gb=_number(flags, "hicache_size", 0),
            hicache_ratio_adapts=parsed >= (0, 5, 21) and ratio is None,
            schedule_policy=str(_value(flags, "schedule_policy") or "fcfs"),
            schedule_conservativeness=_number(flags, "schedule_conservativeness", 1.0),
            attention_backend=str(_value(flags, "attention_backend") or "auto"),
        )


def _value(flags: Mapping[str, Value], name: str) -> Value | None:
    for spelling in _NAMES.get(name, (name,)):
        if spelling in flags:
            return flags[spelling]
    return None


def _on(flags: Mapping[str, Value], name: str) -> bool:
    return bool(_value(flags, name))


def _number(flags: Mapping[str, Value], name: str, default: float) -> float:
    value = _optional_float(flags, name)
    return default if value is None else value


def _optional_float(flags: Mapping[str, Value], name: str) -> float | None:
    value = _value(flags, name)
    return None if value is None or isinstance(value, list) else float(value)


def _optional_int(flags: Mapping[str, Value], name: str) -> int | None:
    value = _optional_float(flags, name)
    return None if value is None else int(value)


def _gpu_defaults(gpu_mib: float, tp_size: int, version: tuple[int, ...]) -> tuple[int, int]:
    late = version >= (0, 5, 23)
    for below, chunk, graph_max, late_graph_max, late_chunk in _BY_GPU_MEMORY:
        if gpu_mib < below:
            largest = late_graph_max if late else graph_max
            if tp_size >= 4:
                largest = {24: 80, 48: 160, 32: 160, 256: 512}.get(largest, largest)
            return (late_chunk if late else chunk), largest
    raise AssertionError("the last row has no upper limit")


def _graph_sizes(
    flags: Mapping[str, Value], default_max: int, running: int | None, speculative: bool, version: tuple[int, ...]
) -> tuple[int, ...]:
    """Batch sizes of the decode graphs; sglang 0.5.15 server_args._generate_decode_cuda_graph_batch_sizes."""
    if _on(flags, "disable_cuda_graph") or _value(flags, "cuda_graph_backend_decode") == "disabled":
        return ()
    listed = _value(flags, "cuda_graph_bs_decode")
    if isinstance(listed, list) and listed:
        return tuple(sorted(listed))
    largest = _optional_int(flags, "cuda_graph_max_bs_decode")
    if largest is None:
        largest = default_max
        # 0.5.23 arg_groups/memory_hook; not in 0.5.17.
        if version >= (0, 5, 18) and running is not None:
            largest = min(largest, running)
    if _on(flags, "disable_cuda_graph_padding"):
        return tuple(range(1, largest + 1))
    if speculative:
        sizes = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, largest + 1, 16)]
    else:
        sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, largest + 1, 32)]
    return tuple(sorted({size for size in sizes if size <= largest} | {largest}))


def _prefill_graphs(chunk: int) -> int:
    """How many prefill graphs are captured up to a chunk of that many tokens."""
    sizes = (*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64))
    sizes += (*range(1280, 4097, 256), *range(4608, chunk + 1, 512))
    return sum(size <= chunk for size in sizes)


def _default_reserve(
    flags: Mapping[str, Value],
    chunk: int,
    graph_sizes: tuple[int, ...],
    gpu_memory_bytes: float,
    tp_size: int,
    algorithm: str | None,
    shape: ModelShape,
    version: tuple[int, ...],
) -> float:
    """Bytes that the default fraction leaves free for activations and graphs; server_args of 0.5.12 to 0.5.23."""
    tokens = chunk if chunk > 0 else int(_number(flags, "max_prefill_tokens", 16384))
    reserve = 512 + 1.5 * max(tokens, 2048) + 2 * max(graph_sizes, default=0)
    reserve += tp_size * _number(flags, "pp_size", 1) / 8 * 1024
    disabled = _value(flags, "cuda_graph_backend_prefill") == "disabled" or _on(flags, "disable_piecewise_cuda_graph")
    # Architectures with vision get no prefill graph by default.
    if not disabled and not shape.multimodal:
        reserve += 8 * _prefill_graphs(tokens)
    if gpu_memory_bytes > 60 * GIB:
        reserve = max(reserve, 10 * 1024)
    if version < (0, 5, 14) and algorithm not in (None, "NGRAM"):
        # Until 0.5.13 the draft is loaded after the pools were sized; from 0.5.14 its weights are counted.
        reserve += (6 if algorithm == "STANDALONE" else 4) * 1024
    return reserve * MIB


def _default_fraction(reserve: float, gpu_memory_bytes: float, shape: ModelShape) -> float:
    fraction = round((gpu_memory_bytes - reserve) / gpu_memory_bytes, 3)
    if not shape.multimodal:
        return fraction
    # server_args.adjust_mem_fraction_for_vlm: it looks for num_hidden_layers, which a config with depth lacks, and
    # takes 24 then.
    complexity = shape.vision_hidden_size**2 * 24 / (24 * 1024**2)
    return fraction * 0.95 * min(1.05, max(0.8, 1.0 - 0.1 * (complexity - 1.0)))


def _speculation(flags: Mapping[str, Value], shape: ModelShape) -> tuple[str | None, int, int, int]:
    algorithm = _value(flags, "speculative_algorithm")
    if not algorithm:
        return None, 0, 0, 0
    name = str(algorithm).upper()
    name = "EAGLE" if name == "NEXTN" else name
    tokens = _optional_int(flags, "speculative_num_draft_tokens")
    if name == "NGRAM":
        return name, 0, 1, tokens or _NGRAM_DRAFT_TOKENS
    if name == "DFLASH":
        return name, 1, 1, tokens or _optional_int(flags, "speculative_dflash_block_size") or _DFLASH_DRAFT_TOKENS
    steps = _optional_int(flags, "speculative_num_steps")
    topk = _optional_int(flags, "speculative_eagle_topk")
    if steps is None:
        llama = shape.architecture.startswith(("LlamaFor", "Grok"))
        steps, topk, tokens = _AUTO_SPECULATION_LLAMA if llama else _AUTO_SPECULATION
    topk = topk or 1
    if topk == 1 or tokens is None:
        tokens = steps + 1
    return name, steps, topk, tokens


def _strategy(flags: Mapping[str, Value], shape: ModelShape, version: tuple[int, ...]) -> tuple[str, bool]:
    """Radix-cache strategy of the linear-attention state, and whether scheduling overlaps with the GPU."""
    overlap = not _on(flags, "disable_overlap_schedule")
    if not shape.linear_layers:
        return "none", overlap
    strategy = str(_value(flags, "mamba_radix_cache_strategy") or "auto")
    radix = not _on(flags, "disable_radix_cache")
    if strategy == "auto":
        triton = _value(flags, "linear_attn_backend") in (None, "triton")
        wanted = overlap or _number(flags, "page_size", 1) > 1
        strategy = "extra_buffer" if version >= (0, 5, 14) and wanted and triton else "no_buffer"
    if strategy == "no_buffer" and radix:
        overlap = False
    return strategy, overlap


def _slots_per_request(
    radix: bool, strategy: str, overlap: bool, version: tuple[int, ...], env: Mapping[str, str]
) -> int:
    """sglang 0.5.15 model_runner_kv_cache_mixin and 0.5.23 kv_cache_configurator, ``_calculate_mamba_ratio``."""
    if not radix:
        return 1
    slots = {"extra_buffer": 5 if overlap else 4, "extra_buffer_lazy": 4}.get(strategy, 3)
    skipping = env.get("SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK", "").lower() in ("1", "true", "yes")
    if version >= (0, 5, 17) and skipping and strategy.startswith("extra_buffer"):
        slots -= 1
    return slots
