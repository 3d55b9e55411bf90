"""SGLang's faults: what its logs (0.4 to 0.5.23) look like.

Messages and places are those of its source; where one changed between releases, both wordings are here.
"""

from __future__ import annotations

from bench.engines.torch_faults import ADVICE, MOVES, SHARED_RULES
from bench.faults import Place, Rank, Rule, Rules, any_of
from bench.outcome import Cause, Phase

# The first two ask for a larger share of the memory; an allocation that fails (`Place`) asks for a smaller one.
_MEMORY = (
    Rule(
        Cause.OOM_GPU_KV_POOL,
        r"Loaded weights leave no GPU memory for the KV cache",
        moves=(("memory", "raise"),),
        phase=Phase.KV_ALLOC,
        advice="After the weights nothing is left of this share of the memory: a larger share, or smaller weights.",
    ),
    Rule(
        Cause.OOM_GPU_KV_POOL,
        r"Not enough memory.*mem.fraction|max_total_num_tokens.{0,40}(?:<= ?0|negative|too small)",
        moves=(("memory", "raise"), ("running", "lower")),
        phase=Phase.KV_ALLOC,
        advice="Nothing is left for the KV pool: a larger share of the memory, or fewer requests and a smaller state "
        "cache.",
    ),
    Rule(
        Cause.OOM_GPU_STATE_CACHE,
        any_of(r"""
            (?:mamba|linear-attention|hybrid|state cache).{0,80}(?:not enough|too small|no space)
            Not enough (?:GPU memory|space) for .{0,20}(?:mamba|hybrid|state)
        """),
        phase=Phase.KV_ALLOC,
    ),
    Rule(
        Cause.OOM_GPU_RUNTIME,
        any_of(r"""
            (?:Prefill|Decode|Extend) out of memory
            out of memory even after retracting
            alloc_req_slots runs out of memory
        """),
        moves=(("running", "lower"), ("prefill", "lower")),
    ),
    Rule(
        Cause.OOM_HOST,
        r"reduce the size of the hierarchical cache|HiCache.*(?:host memory|reserve)",
        moves=(("host_cache", "lower"),),
    ),
)

_SERVING = (
    Rule(
        Cause.ENGINE_CRASH,
        r"The expanded size of the tensor .* must match the existing size",
        where=r"speculative/|_target_verify|graph_runner",
        moves=(("running", "raise"),),
        advice="SGLang 0.5.15 with speculative decoding fails so when the running batch reaches max_running_requests: "
        "keep the load below that limit, or raise it.",
    ),
    # It recovers from this when the load falls; it only explains a death.
    Rule(
        Cause.WATCHDOG_TIMEOUT,
        r"Server couldn't get a response from (?:de)?tokenizer",
        rank=Rank.SUSPECT,
        plain=True,
    ),
)

_CONSEQUENCES = (
    Rule(
        Cause.NCCL,
        r"could finish the model loading, but there are other ranks",
        rank=Rank.CONSEQUENCE,
        advice="Another rank died or was slow while it loaded: read its log.",
    ),
    Rule(
        Cause.ENGINE_CRASH,
        any_of(r"""
            warmup error
            ^(?:\w+: )?Initialization failed\.
            scheduler(?:_\d+)? (?:is dead|died)
            subprocess exited with code
            /(?:generate|health|get_model_info|model_info)\b.*(?:refused|Max retries)
            res=<Response
        """),
        rank=Rank.CONSEQUENCE,
    ),
)

_ARGUMENTS = (
    Rule(
        Cause.UNKNOWN_ARGUMENT, r"Unknown speculative algorithm|Invalid (?:attention|sampling|grammar|moe)\w* backend"
    ),
    Rule(
        Cause.CONFIG_INCOMPATIBLE,
        r"no_buffer|extra_buffer|mamba.(?:scheduler|radix.cache).strategy",
        startup=True,
        moves=(("mamba_strategy", "change"),),
        phase=Phase.ARGS,
    ),
    Rule(
        Cause.CONFIG_INCOMPATIBLE,
        any_of(r"""
            compatible with (?:radix|overlap|cuda.?graph|speculative|torch.?compile|dp.?attention|chunked)
            KV4 \w+ expects
            context.length .{0,40}(?:greater|larger) than
            topk = 1 for speculative
            topk > 1 with page_size
            rejection.sampling requires
        """),
        startup=True,
    ),
)

RULES = Rules(
    engine="sglang",
    rules=(*_MEMORY, *_SERVING, *_CONSEQUENCES, *_ARGUMENTS, *SHARED_RULES),
    milestones=(
        (
            r"Init torch distributed|Load weight (?:begin|end)|(?:checkpoint|loading) shards|model weights format",
            Phase.LOAD,
        ),
        (
            r"(?:KV|Mamba) Cache is allocated|VA upper bound|Memory pool end|memory pool\. full_layer_tokens",
            Phase.KV_ALLOC,
        ),
        (
            r"Capture .{0,60}graph (?:begin|end)|Capture cuda graph bs|Capturing (?:batches|num tokens)",
            Phase.GRAPH_CAPTURE,
        ),
        (r"max_total_num_tokens=\d+, ", Phase.SERVING),
        (r"server_args=", Phase.ARGS),
    ),
    ready=any_of(r"""
        fired up and ready
        Application startup complete
        Uvicorn running on
        Started server process
    """),
    serving=any_of(r"""
        (?:Decode|Prefill) batch[,. ]
        "(?:POST|GET) \S+ HTTP/[\d.]+" 200
    """),
    fatal_headers=r"hit an exception|Initialization failed|warmup error|Exception in (?:ModelTpServer|scheduler)",
    handled=r"ASGI application|Ignore import error|Exception ignored in|Task exception was never",
    entries=any_of(r"""
        run_\w+_process
        launch_server
        sglang/cli/
        bin/sglang
        :_launch_subprocesses:
        http_server\.py
        entrypoints/engine\.py
    """),
    deaths=any_of(r"""
        received sigquit
        SIGQUIT received
        scheduler(?:_\d+)? (?:is dead|died)
        crashed with exit code
        died during initialization
        Child process unexpectedly failed
        Application startup failed
        Initialization failed
    """),
    cleanup=r"sigquit|kill_process_tree",
    stops=r"SIGTERM received|Gracefully exiting|^Shutting down|Received (?:signal|SIG(?:INT|TERM))",
    hints=any_of(r"""
        Possible solutions
        If exit code is -9
        OS OOM killer
        Open an issue on GitHub
        There are some potential root causes
        If reserved but unallocated
    """),
    places=(
        Place(r"event_loop|:process_batch_result\w*:", Phase.SERVING, Cause.OOM_GPU_RUNTIME),
        Place(
            any_of(r"""
                (?:memory_pool\w*|mamba\w*)\.py:.*(?:conv_state|temporal_state|ssm_state|intermediate_(?:ssm|conv))
                mamba_pool
                handle_max_mamba
            """),
            Phase.KV_ALLOC,
            Cause.OOM_GPU_STATE_CACHE,
        ),
        Place(
            any_of(r"""
                memory_pool\w*\.py:(?:__init__|_?create\w*|_?init\w*|_?alloc\w*):
                :init_memory_pool:
                :_?profile_\w+:
                kv_cache_(?:configurator|mixin)
                pool_configurator
                allocator\w*\.py:__init__
                pool_host
            """),
            Phase.KV_ALLOC,
            Cause.OOM_GPU_KV_POOL,
        ),
        Place(
            any_of(r"""
                graph_runner\w*\.py:(?:__init__|warmup\w*):
                :_?capture\w*:
                :init_(?:cuda|device|decode|prefill)\w*_graphs?:
                :kernel_warmup:
            """),
            Phase.GRAPH_CAPTURE,
            Cause.OOM_GPU_GRAPH_CAPTURE,
        ),
        Place(
            any_of(r"""
                model_loader/
                :load_model:
                :load_weights?\w*:
                :weight_loader\w*:
                :create_weights:
                process_weights_after_loading
                srt/models/\w+\.py:__init__:
                :init_torch_distributed:
                init_distributed_environment
                pynccl\w*\.py
                parallel_state\.py:__init__
            """),
            Phase.LOAD,
            Cause.OOM_GPU_WEIGHTS,
        ),
        Place(r"server_args\.py|arg_groups/|:prepare_server_args:", Phase.ARGS, Cause.OOM_GPU_WEIGHTS),
    ),
    knobs={
        "memory": "--mem-fraction-static",
        "running": "--max-running-requests",
        "graph": "--cuda-graph-max-bs-decode",
        "graph_off": "--disable-cuda-graph",
        "prefill": "--chunked-prefill-size",
        "tensor_parallel": "--tensor-parallel-size",
        "quantization": "--quantization",
        "attention": "--attention-backend",
        "port": "--port",
        "host": "--host",
        "model": "--model-path",
        "custom_all_reduce": "--disable-custom-all-reduce",
        "trust": "--trust-remote-code",
        "watchdog": "--watchdog-timeout",
        "host_cache": "--hicache-ratio",
        "mamba_strategy": "--mamba-radix-cache-strategy",
    },
    options=frozenset(
        {
            "attention_backend",
            "chunked_prefill_size",
            "context_length",
            "cuda_graph_max_bs",
            "disable_cuda_graph",
            "disable_overlap_schedule",
            "disable_radix_cache",
            "enable_dp_attention",
            "kv_cache_dtype",
            "mamba_full_memory_ratio",
            "max_mamba_cache_size",
            "max_prefill_tokens",
            "max_running_requests",
            "max_total_tokens",
            "mem_fraction_static",
            "moe_runner_backend",
            "page_size",
            "speculative_algorithm",
            "speculative_eagle_topk",
            "speculative_num_draft_tokens",
            "speculative_num_steps",
            "trust_remote_code",
        }
    ),
    moves=MOVES,
    advice=ADVICE,
)
