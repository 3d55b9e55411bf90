"""vLLM's faults: what its logs (0.4 to 0.26) look like, for `bench.explain`."""

from __future__ import annotations

from bench.engines.torch_faults import ADVICE, MOVES, SHARED_RULES
from bench.faults import Place, Rank, Rule, Rules, any_of
from bench.outcome import Cause, Phase

_MEMORY = (
    Rule(
        Cause.OOM_GPU_KV_POOL,
        any_of(r"""
            KV cache is needed
            larger than the available KV cache
            larger than the maximum number of tokens that can be stored in (?:the )?KV
        """),
        moves=(("context", "lower"), ("memory", "raise")),
        bound=r"estimated maximum model length is (\d+)",
        phase=Phase.KV_ALLOC,
        advice="The KV pool does not hold one request of full length: a shorter one, or a larger share of memory.",
    ),
    Rule(
        Cause.OOM_GPU_KV_POOL,
        r"No available memory for the cache blocks",
        moves=(("memory", "raise"), ("prefill", "lower")),
        phase=Phase.KV_ALLOC,
        advice="After weights and activations nothing is left of this share of the memory.",
    ),
    Rule(Cause.OOM_GPU_STATE_CACHE, r"mamba.*(?:cache|state).*(?:not enough|insufficient|exceeds)|not enough .*mamba"),
    Rule(
        Cause.OOM_GPU_RUNTIME,
        r"out of memory occurred when (?:warming up|profiling)",
        moves=(("running", "lower"), ("memory", "lower")),
    ),
)

_CONSEQUENCES = (
    Rule(
        Cause.ENGINE_CRASH,
        any_of(r"""
            Engine (?:core )?(?:process )?(?:initialization )?failed
            Engine(?:Dead|Generate)Error
            See (?:root cause|stack trace)
            WorkerProc (?:initialization )?failed
            Worker failed with error
            engine (?:loop|process)? ?is dead
            died unexpectedly
            Background loop (?:is stopped|has errored)
            Failed core proc
            Task finished unexpectedly
        """),
        rank=Rank.CONSEQUENCE,
    ),
    Rule(
        Cause.MISSING_DEPENDENCY,
        r"Tried to instantiate class '_?\w*C\.|'_OpNamespace' '_\w+' object has no attribute",
        rank=Rank.CONSEQUENCE,
        advice="Its compiled extension did not load: the package and this machine's PyTorch do not fit each other.",
    ),
)

_ARGUMENTS = (
    Rule(
        Cause.CONFIG_INCOMPATIBLE,
        r"Chunked MM input disabled|max_num_batched_tokens \(\d+\) is smaller",
        startup=True,
        moves=(("prefill", "raise"),),
    ),
    Rule(
        Cause.CONFIG_INCOMPATIBLE,
        r"greater than the derived max_model_len|larger than max_model_len",
        startup=True,
        moves=(("context", "lower"),),
        bound=r"derived max_model_len \(max_position_embeddings=(\d+)",
    ),
)

RULES = Rules(
    engine="vllm",
    rules=(*_MEMORY, *_CONSEQUENCES, *_ARGUMENTS, *SHARED_RULES),
    milestones=(
        (
            r"Starting to load model|Loading (?:safetensors|pt) checkpoint|world_size=\d+ rank=|model weights format",
            Phase.LOAD,
        ),
        (r"Model loading took|Loading model weights took|Available KV cache memory|Memory profiling", Phase.KV_ALLOC),
        (r"Capturing (?:the model|CUDA graph)|Graph capturing|CUDA graph captur", Phase.GRAPH_CAPTURE),
        (r"vLLM (?:API server )?version|non-default args|Initializing an? (?:V1 )?LLM engine", Phase.ARGS),
    ),
    ready=any_of(r"""
        Application startup complete
        Uvicorn running on
        Started server process
    """),
    serving=any_of(r"""
        Avg (?:prompt|generation) throughput
        "(?:POST|GET) \S+ HTTP/[\d.]+" 200
    """),
    fatal_headers=any_of(r"""
        EngineCore (?:failed to start|encountered|hit an exception)
        WorkerProc (?:failed to start|hit an exception)
        Exception in worker
        Engine background task failed
        AsyncLLM output_handler failed
        Error executing method
        Engine (?:loop|process) (?:is|has)
    """),
    handled=any_of(r"""
        ASGI application
        Exception ignored in
        Error in (?:preprocessing|applying|parsing)
        Invocation of \w+ method
    """),
    entries=any_of(r"""
        run_engine_core
        worker_main
        run_(?:server|headless|mp_engine|rpc_server)
        api_server\.py
        cli/main\.py
        bin/vllm
    """),
    deaths=any_of(r"""
        Engine core initialization failed
        EngineDeadError
        Engine process failed to start
        Failed core proc
        EngineCore encountered an issue
        (?:Engine core proc|Worker)\w* .*died
        died unexpectedly
        Application startup failed
    """),
    cleanup=r"terminating (?:all )?workers|killing local",
    stops=r"Shutting down|Received (?:signal|SIG)|SIGTERM|Shutdown initiated|Gracefully (?:stopping|exiting)",
    hints=any_of(r"""
        Possible solutions
        There are some potential root causes
        If reserved but unallocated
        For further information visit
    """),
    places=(
        Place(
            any_of(r"""
                _allocate_kv_cache
                :initialize_kv_cache:
                initialize_from_config
                cache_engine
                _reshape_kv_cache
            """),
            Phase.KV_ALLOC,
            Cause.OOM_GPU_KV_POOL,
        ),
        Place(
            r":_?capture\w*:|cuda_graph\.py|:compile_or_warm_up_model:",
            Phase.GRAPH_CAPTURE,
            Cause.OOM_GPU_GRAPH_CAPTURE,
        ),
        # A forward pass of the longest batch, run to measure what it needs.
        Place(
            r":profile_run:|:determine_(?:available_memory|num_available_blocks):|:_initialize_kv_caches:",
            Phase.KV_ALLOC,
            Cause.OOM_GPU_RUNTIME,
        ),
        Place(
            r"model_loader/|:load_model:|weight_utils|:load_weights:|:create_weights:|models/\w+\.py:__init__:",
            Phase.LOAD,
            Cause.OOM_GPU_WEIGHTS,
        ),
        Place(
            r":execute_model:|:run_busy_loop:|:_process_engine_step:|:step:|async_llm\.py:(?!__init__|from_)",
            Phase.SERVING,
            Cause.OOM_GPU_RUNTIME,
        ),
        Place(r"arg_utils|:create_engine_config:|vllm/config", Phase.ARGS, Cause.OOM_GPU_WEIGHTS),
    ),
    knobs={
        "memory": "--gpu-memory-utilization",
        "running": "--max-num-seqs",
        "graph": "--max-cudagraph-capture-size",
        "graph_off": "--enforce-eager",
        "prefill": "--max-num-batched-tokens",
        "context": "--max-model-len",
        "tensor_parallel": "--tensor-parallel-size",
        "quantization": "--quantization",
        "attention": "--attention-backend",
        "port": "--port",
        "host": "--host",
        "model": "--model",
        "custom_all_reduce": "--disable-custom-all-reduce",
        "trust": "--trust-remote-code",
    },
    options=frozenset(
        {
            "attention_backend",
            "block_size",
            "cpu_offload_gb",
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "enforce_eager",
            "gpu_memory_utilization",
            "kv_cache_dtype",
            "max_model_len",
            "max_num_batched_tokens",
            "max_num_seqs",
            "num_speculative_tokens",
            "pipeline_parallel_size",
            "swap_space",
            "tensor_parallel_size",
            "trust_remote_code",
        }
    ),
    moves=MOVES,
    advice=ADVICE,
)
