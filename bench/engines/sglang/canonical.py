"""Canonical form: what SGLang will really run, and what it refuses before it allocates anything.

The rules come from reading the releases' argument handling (server_args.py, from 0.5.14 on also arg_groups); those
marked "seen" were met in launches. A flag that changes nothing is left out, so that equal servers are equal values.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from bench.engines.protocol import RefusedError, ServerConfig, Value
from bench.engines.sglang.flags import FlagTable, Found
from bench.engines.sglang.model_shape import ModelShape
from bench.engines.sglang.settings import Settings
from bench.words import listed

EAGLE_FAMILY = ("NEXTN", "EAGLE", "EAGLE3", "STANDALONE")
NEEDS_DRAFT_MODEL = ("EAGLE3", "STANDALONE", "DFLASH", "DSPARK")
CACHE_AWARE_POLICIES = ("lpm", "dfs-weight")  # managers/schedule_policy.py: fcfs without a radix cache
PAGED_TREE_BACKENDS = ("flashinfer", "fa3", "triton")
STATE_FLAGS = (
    "mamba_radix_cache_strategy",
    "mamba_scheduler_strategy",
    "mamba_ssm_dtype",
    "mamba_full_memory_ratio",
    "max_mamba_cache_size",
    "mamba_track_interval",
    "mamba_backend",
)
HICACHE_FLAGS = (
    "hicache_ratio",
    "hicache_size",
    "hicache_write_policy",
    "hicache_io_backend",
    "hicache_mem_layout",
    "hicache_host_memory_fraction",
)
# Flags whose whole effect shows in ``Settings``: one that changes nothing there is the engine's default.
RESOLVED_FLAGS = (
    "mamba_radix_cache_strategy",
    "mamba_scheduler_strategy",
    "mem_fraction_static",
    "chunked_prefill_size",
    "max_running_requests",
    "mamba_full_memory_ratio",
    "mamba_ssm_dtype",
    "cuda_graph_max_bs_decode",
    "cuda_graph_max_bs",
)
SPECULATION = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
ACCEPTANCE_ENV = "SGLANG_SIMULATE_ACC_LEN"


@dataclass(frozen=True)
class Surroundings:
    """What the rules depend on besides the flags.

    Attributes:
        gpu_memory_bytes: total of one card as the driver reports it.
        architecture: of the card, e.g. ``sm100``; ``cpu`` where there is none.
        draft_path: of a draft model, None where the checkpoint's own MTP layers draft.
        simulated_acceptance: see ``EngineSpec``.
    """

    table: FlagTable
    shape: ModelShape
    gpu_memory_bytes: float
    architecture: str
    draft_path: str | None = None
    simulated_acceptance: float | None = None


@dataclass
class _Server:
    """A configuration on its way to canonical form."""

    flags: dict[str, Value]
    env: dict[str, str]
    around: Surroundings
    rewrites: list[str] = field(default_factory=list)
    implied: dict[str, Value] = field(default_factory=dict)
    renamed: list[tuple[str, str]] = field(default_factory=list)

    @property
    def version(self) -> tuple[int, ...]:
        return self.around.table.parsed_version

    @property
    def algorithm(self) -> str | None:
        name = self.flags.get("speculative_algorithm")
        return None if name is None else str(name)

    @property
    def radix(self) -> bool:
        return not self.flags.get("disable_radix_cache")

    @property
    def strategy_flag(self) -> str:
        return self.around.table.find("mamba_radix_cache_strategy").name

    @property
    def extra_buffer(self) -> bool:
        return str(self.flags.get(self.strategy_flag, "auto")).startswith("extra_buffer")

    def settings(self, without: str | None = None) -> Settings:
        flags = {name: value for name, value in self.flags.items() if name != without}
        return Settings.resolve(
            flags,
            version=self.around.table.version,
            shape=self.around.shape,
            gpu_memory_bytes=self.around.gpu_memory_bytes,
            env=self.env,
        )

    def number(self, name: str) -> int | None:
        value = self.flags.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def drop(self, names: tuple[str, ...], why: str) -> None:
        """Leave flags out, and say so of those that were given."""
        given = [name for name in names if name in self.flags]
        for name in given:
            del self.flags[name]
        if given:
            self.rewrites.append(f"{listed(_option(name) for name in given)} left out: {why}")

    def set(self, name: str, value: Value, why: str) -> None:
        if self.flags.get(name) != value:
            self.flags[name] = value
            self.rewrites.append(f"{_option(name)} {value}: {why}")


def canonical(flags: Mapping[str, Value], env: Mapping[str, str], around: Surroundings) -> ServerConfig:
    """The server that these flags and environment variables really start.

    Args:
        flags: in any version's spelling.
        env: environment variables of the server.

    Raises:
        RefusedError: SGLang would end at its command line; the message gives its reason.
        UnknownFlagError: this version has no such flag.
    """
    server = _Server({}, dict(env), around)
    _translate(server, flags)
    for rule in _REWRITES:
        rule(server)
    reasons = list(_refusals(server))
    if reasons:
        raise RefusedError("; ".join([*_renames(server, reasons), *reasons]))
    _drop_defaults(server)
    return ServerConfig(
        flags=tuple(sorted(server.flags.items())),
        env=tuple(sorted(server.env.items())),
        rewrites=tuple(server.rewrites),
        implied=tuple(sorted(server.implied.items())),
    )


def _renames(server: _Server, reasons: list[str]) -> list[str]:
    """How flags that the reasons name were written, where that is another spelling."""
    return [note for option, note in server.renamed if any(option in reason for reason in reasons)]


def acceptance_length(per_token: float, steps: int) -> float:
    """Tokens a verify step yields when each drafted token is accepted with this chance and the rest falls with it."""
    return float(steps + 1) if per_token >= 1 else (1 - per_token ** (steps + 1)) / (1 - per_token)


def _translate(server: _Server, flags: Mapping[str, Value]) -> None:
    """Names as this version has them; what equals the parser's default is left out."""
    for name, value in flags.items():
        found = server.around.table.find(name)
        if found.note:
            server.rewrites.append(found.note)
            server.renamed.append((found.option, found.note))
        if not _is_default(found, value):
            server.flags[found.name] = value


def _is_default(found: Found, value: Value) -> bool:
    if found.is_switch and value is False and found.flag.action != "BooleanOptionalAction":
        return True
    try:
        default = ast.literal_eval(found.flag.default)
    except (ValueError, SyntaxError):
        return False
    return bool(default == value) and isinstance(default, bool) == isinstance(value, bool)


def _speculation_off(server: _Server) -> None:
    if server.algorithm is not None:
        return
    names = tuple(name for name in server.flags if name.startswith("speculative_"))
    server.drop(names, "there is no speculation without --speculative-algorithm")
    server.env.pop(ACCEPTANCE_ENV, None)


def _speculation_name(server: _Server) -> None:
    """NEXTN and EAGLE are one algorithm; the name says whether a draft model of its own is used."""
    if server.algorithm is None:
        return
    name = server.algorithm.upper()
    if name in ("NEXTN", "EAGLE"):
        name = "EAGLE" if server.around.draft_path else "NEXTN"
        server.set("speculative_algorithm", name, "NEXTN and EAGLE are one algorithm in SGLang")
    else:
        server.flags["speculative_algorithm"] = name
    if server.around.draft_path and name != "NGRAM":
        server.flags["speculative_draft_model_path"] = server.around.draft_path
    server.drop(("enable_mixed_chunk",), f"{name} speculation turns mixed chunked prefill off")


def _speculation_sizes(server: _Server) -> None:
    if server.algorithm in EAGLE_FAMILY:
        if not server.flags.get("speculative_adaptive") and not any(name in server.flags for name in SPECULATION):
            chosen = server.settings()
            for name, value in zip(SPECULATION, (chosen.steps, chosen.topk, chosen.draft_tokens), strict=True):
                server.set(name, value, "what SGLang chooses where none is given")
        steps, topk = server.number(SPECULATION[0]), server.number(SPECULATION[1])
        if steps is not None and topk == 1:
            server.set(SPECULATION[2], steps + 1, "with --speculative-eagle-topk 1 it is --speculative-num-steps + 1")
    elif server.algorithm == "DFLASH":
        server.drop(SPECULATION[:2], "DFLASH drafts one block: both are 1")
        block = server.number("speculative_dflash_block_size")
        if block is not None and server.number(SPECULATION[2]) == block:
            server.drop((SPECULATION[2],), "DFLASH's block size says the same")


def _state_cache(server: _Server) -> None:
    if not server.around.shape.linear_layers:
        kept = server.strategy_flag if server.radix and server.extra_buffer else None
        names = tuple(name for name in STATE_FLAGS if name != kept)
        server.drop(names, f"{server.around.shape.architecture} keeps no linear-attention state")
        return
    if server.number("max_mamba_cache_size") is not None:
        server.drop(("mamba_full_memory_ratio",), "--max-mamba-cache-size gives the number of states itself")
    elif not server.radix and server.settings().max_running_requests is not None:
        why = "without a radix cache each running request has one state"
        server.drop(("mamba_full_memory_ratio",), why)
    inert = server.version >= (0, 5, 14) or server.flags.get(server.strategy_flag) == "no_buffer"
    if not server.radix and inert:
        server.drop((server.strategy_flag,), "it is inert with --disable-radix-cache")


def _overlap(server: _Server) -> None:
    """Until 0.5.13 no_buffer turns overlap off by itself; auto is no_buffer there."""
    if not server.around.shape.linear_layers or not server.radix or server.version >= (0, 5, 14):
        return
    if server.algorithm is None and server.flags.get(server.strategy_flag, "auto") in ("auto", "no_buffer"):
        server.drop(("disable_overlap_schedule",), "the no_buffer strategy turns overlap scheduling off by itself")


def _radix_cache(server: _Server) -> None:
    if not server.radix and server.flags.get("schedule_policy") in CACHE_AWARE_POLICIES:
        server.drop(("schedule_policy",), "a cache-aware policy falls back to fcfs without a radix cache")


def _hierarchical_cache(server: _Server) -> None:
    if not server.flags.get("enable_hierarchical_cache"):
        server.drop(HICACHE_FLAGS, "there is no hierarchical cache without --enable-hierarchical-cache")
        return
    layout, backend = server.flags.get("hicache_mem_layout"), server.flags.get("hicache_io_backend")
    first = "page_first" if server.version >= (0, 5, 14) else "layer_first"
    if layout == "page_first_direct" and backend is None:
        server.set("hicache_io_backend", "direct", "page_first_direct needs it")
    elif (layout or first) == "page_first" and backend == "direct":
        server.set("hicache_mem_layout", "page_first_direct", "direct reads and writes need it")


def _graphs(server: _Server) -> None:
    names = {name: server.around.table.find(name).name for name in ("cuda_graph_max_bs_decode", "cuda_graph_bs_decode")}
    if server.flags.get("disable_cuda_graph") or server.flags.get("cuda_graph_backend_decode") == "disabled":
        server.drop((*names.values(), "disable_cuda_graph_padding"), "decode graphs are off")
    elif names["cuda_graph_bs_decode"] in server.flags:
        server.drop((names["cuda_graph_max_bs_decode"],), "the list of batch sizes says it")
        sizes = server.flags[names["cuda_graph_bs_decode"]]
        if isinstance(sizes, list):
            server.flags[names["cuda_graph_bs_decode"]] = sorted(set(sizes))


def _key_value_dtype(server: _Server) -> None:
    if server.flags.get("kv_cache_dtype") == "bf16":
        server.set("kv_cache_dtype", "bfloat16", "the same type by its longer name")


def _acceptance(server: _Server) -> None:
    per_token = server.around.simulated_acceptance
    if per_token is None or server.algorithm is None or ACCEPTANCE_ENV in server.env:
        return
    settings = server.settings()
    steps = settings.draft_tokens - 1 if server.algorithm == "DFLASH" else settings.steps
    server.env[ACCEPTANCE_ENV] = f"{acceptance_length(per_token, steps):.2f}"


_REWRITES: tuple[Callable[[_Server], None], ...] = (
    _speculation_off,
    _speculation_name,
    _speculation_sizes,
    _state_cache,
    _overlap,
    _radix_cache,
    _hierarchical_cache,
    _graphs,
    _key_value_dtype,
    _acceptance,
)


def _drop_defaults(server: _Server) -> None:
    """Leave out what the engine would choose itself; the server is asked later whether it did."""
    for name in RESOLVED_FLAGS:
        if name in server.flags and server.settings() == server.settings(without=name):
            server.implied[name] = server.flags[name]
            server.drop((name,), "it is what the engine chooses here")


def _refusals(server: _Server) -> Iterator[str]:
    yield from _speculation_refusals(server)
    yield from _strategy_refusals(server)
    flags, page = server.flags, server.number("page_size") or 1
    chunk = server.number("chunked_prefill_size")
    if chunk is not None and chunk > 0 and chunk % page:
        yield f"--chunked-prefill-size {chunk} is not divisible by --page-size {page}"
    if flags.get("enable_hierarchical_cache") and not server.radix:
        yield "--enable-hierarchical-cache and --disable-radix-cache exclude each other"
    if flags.get("enable_int8_mamba_checkpoint") and flags.get("enable_hierarchical_cache"):
        yield "--enable-int8-mamba-checkpoint is not supported together with --enable-hierarchical-cache"


def _speculation_refusals(server: _Server) -> Iterator[str]:
    name, flags = server.algorithm, server.flags
    if name is None:
        return
    if name in NEEDS_DRAFT_MODEL and not server.around.draft_path:
        yield f"{name} needs a draft model: give model.draft_path=FOLDER_OR_HUB_NAME"
    if name == "NEXTN" and server.around.shape.draft is None:
        yield f"{server.around.shape.architecture} has no MTP layers: NEXTN needs model.draft_path=FOLDER_OR_HUB_NAME"
    if flags.get("weight_cache_mode"):
        yield "--weight-cache-mode is not supported together with speculative decoding"
    if name in EAGLE_FAMILY and not flags.get("speculative_adaptive"):
        yield from _tree_refusals(server)
    if name == "DFLASH":
        block, tokens = server.number("speculative_dflash_block_size"), server.number(SPECULATION[2])
        if block is not None and tokens is not None and block != tokens:
            yield f"--speculative-dflash-block-size {block} and --speculative-num-draft-tokens {tokens} differ"


def _tree_refusals(server: _Server) -> Iterator[str]:
    flags = server.flags
    steps, topk, tokens = (server.number(name) for name in SPECULATION)
    if steps is None:
        if topk is not None or tokens is not None:
            yield "--speculative-eagle-topk and --speculative-num-draft-tokens need --speculative-num-steps as well"
        return
    if topk is None or tokens is None:
        missing = listed(_option(name) for name in SPECULATION if name not in flags)
        yield f"--speculative-num-steps {steps} needs {missing} as well"
        return
    if (
        topk > 1
        and server.version < (0, 5, 11)
        and server.env.get("SGLANG_ENABLE_SPEC_V2", "") in ("1", "true", "True")
    ):
        yield f"--speculative-eagle-topk {topk} with SGLANG_ENABLE_SPEC_V2=1: 0.5.10 supports topk 1 only"
    backend = flags.get("attention_backend")
    if topk > 1 and backend == "trtllm_mha":
        yield f"the trtllm_mha backend supports --speculative-eagle-topk 1 only, seen {topk}"
    page = server.number("page_size") or 1
    if topk > 1 and page > 1 and backend is not None and backend not in PAGED_TREE_BACKENDS:
        yield f"--speculative-eagle-topk {topk} with --page-size {page} works with {listed(PAGED_TREE_BACKENDS)} only"
    if flags.get("speculative_use_rejection_sampling"):
        if topk != 1:
            yield "--speculative-use-rejection-sampling needs --speculative-eagle-topk 1"
        thresholds = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
        if any(name in flags for name in thresholds):
            yield f"--speculative-use-rejection-sampling excludes {listed(_option(name) for name in thresholds)}"


def _strategy_refusals(server: _Server) -> Iterator[str]:
    option = _option(server.strategy_flag)
    if not server.around.shape.linear_layers:
        if server.radix and server.extra_buffer:
            # 0.5.23 says so at once (model_hook.py), earlier versions crash at the first prefill.
            yield f"{option} {server.flags[server.strategy_flag]} needs a model with linear-attention state"
        return
    strategy = server.settings().strategy
    early = server.version < (0, 5, 14)
    if not server.radix:
        if early and server.flags.get(server.strategy_flag) == "extra_buffer":
            yield f"{option} extra_buffer is not compatible with --disable-radix-cache in 0.5.10 to 0.5.13"
        return
    if strategy == "no_buffer":
        yield from _no_buffer_refusals(server, option, early)
    else:
        yield from _extra_buffer_refusals(server, option, strategy)


def _no_buffer_refusals(server: _Server, option: str, early: bool) -> Iterator[str]:
    flags, explicit = server.flags, server.strategy_flag in server.flags
    if early and server.algorithm is not None:
        given = f"{option} no_buffer" if explicit else f"{option} auto, which is no_buffer here,"
        yield (
            f"{given} with speculative decoding is refused in 0.5.10 to 0.5.13 while the radix cache is on "
            f"(use {option} extra_buffer)"
        )
    if early and flags.get("linear_attn_decode_backend") == "flashinfer":
        yield f"--linear-attn-decode-backend flashinfer is not compatible with {option} no_buffer"
    if early or not explicit:
        return
    if not flags.get("disable_overlap_schedule"):
        yield f"{option} no_buffer does not support overlap scheduling from 0.5.14 on (add --disable-overlap-schedule)"
    if (server.number("page_size") or 1) > 1:
        yield f"{option} no_buffer supports --page-size 1 only, seen {flags['page_size']}"
    if flags.get("attention_backend") == "trtllm_mha":
        yield f"{option} no_buffer does not support the trtllm_mha attention backend"


def _extra_buffer_refusals(server: _Server, option: str, strategy: str) -> Iterator[str]:
    flags = server.flags
    if server.around.architecture == "cpu":
        yield f"{option} {strategy} needs a GPU"
    backend = flags.get("linear_attn_backend", "triton")
    if backend != "triton":
        yield f"{option} {strategy} needs --linear-attn-backend triton, seen {backend}"
    if strategy == "extra_buffer_lazy":
        if server.algorithm is not None and (0, 5, 14) <= server.version < (0, 5, 17):
            yield f"{option} extra_buffer_lazy is not supported with speculative decoding in 0.5.14 to 0.5.16"
        if flags.get("disable_overlap_schedule"):
            yield f"{option} extra_buffer_lazy and --disable-overlap-schedule exclude each other"
    interval = server.number("mamba_track_interval") or 256
    page, tokens = server.number("page_size"), server.settings().draft_tokens
    if tokens and interval < tokens:
        yield f"--mamba-track-interval {interval} is below the {tokens} draft tokens"
    if page is not None and interval % page:
        yield f"--mamba-track-interval {interval} is not divisible by --page-size {page}"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
