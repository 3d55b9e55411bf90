"""Logs made for the tests of the fault reader."""

from __future__ import annotations

from bench.engines.sglang.faults import RULES as SGLANG
from bench.faults import LogReader, Rules
from bench.outcome import Fault


def read(lines: list[str], rules: Rules = SGLANG) -> tuple[Fault, Fault | None]:
    """The verdict, and the fault that was decisive while the log grew."""
    reader = LogReader(rules)
    decisive = None
    for line in lines:
        fault = reader.feed(line)
        decisive = decisive or fault
    return reader.verdict(), decisive


_SCHEDULER = ("srt/managers/scheduler.py", "run_scheduler_process", "scheduler = Scheduler(")
_SGLANG_FRAMES = {
    "args": [
        ("launch_server.py", "<module>", "server_args = prepare_server_args(sys.argv[1:])"),
        ("srt/server_args.py", "__post_init__", "self._handle_cache()"),
        ("srt/server_args.py", "_handle_cache", "raise ValueError("),
    ],
    "import": [
        ("launch_server.py", "<module>", "from sglang.srt.server_args import prepare_server_args"),
        ("srt/layers/linear.py", "<module>", "import kernels"),
        ("srt/layers/kernels.py", "<module>", "from library import kernel"),
    ],
    "load": [
        _SCHEDULER,
        ("srt/model_executor/model_runner.py", "load_model", "self.model = get_model("),
        ("srt/model_loader/loader.py", "load_model", "model = _initialize_model("),
        ("srt/models/qwen3.py", "__init__", "self.mlp = Qwen3MLP("),
    ],
    "weights": [
        _SCHEDULER,
        ("srt/model_loader/loader.py", "load_model", "model.load_weights(iterator)"),
        ("srt/models/qwen3.py", "load_weights", "weight_loader(param, loaded_weight)"),
        ("srt/layers/linear.py", "weight_loader", "assert param_data.shape == loaded_weight.shape"),
    ],
    "kv": [
        _SCHEDULER,
        ("srt/model_executor/model_runner.py", "init_memory_pool", "self.token_to_kv_pool = MHATokenToKVPool("),
        ("srt/mem_cache/memory_pool.py", "_create_buffers", "torch.zeros("),
    ],
    "graph": [
        _SCHEDULER,
        ("srt/model_executor/cuda_graph_runner.py", "__init__", "self.capture()"),
        ("srt/model_executor/cuda_graph_runner.py", "capture_one_batch_size", "run_once()"),
        ("srt/layers/activation.py", "forward", "output = gate("),
    ],
    "serving": [
        ("srt/managers/scheduler.py", "run_scheduler_process", "scheduler.event_loop_overlap()"),
        ("srt/managers/scheduler.py", "event_loop_overlap", "batch_result = self.run_batch(batch)"),
        ("srt/layers/activation.py", "forward", "output = gate("),
    ],
}
_CORE = ("v1/engine/core.py", "run_engine_core", "engine_core = EngineCoreProc(*args)")
_PROFILE = ("v1/engine/core.py", "_initialize_kv_caches", "self.model_executor.determine_available_memory()")
_VLLM_FRAMES = {
    "args": [
        ("entrypoints/cli/main.py", "main", "args.dispatch_function(args)"),
        ("engine/arg_utils.py", "create_engine_config", "config = VllmConfig("),
        ("config/model.py", "__post_init__", "raise ValueError("),
    ],
    "import": [
        ("bin/vllm", "<module>", "from vllm.entrypoints.cli.main import main"),
        ("entrypoints/api.py", "<module>", "from transformers import AutoVideoProcessor"),
        ("transformers/auto.py", "<module>", "import kernels"),
    ],
    "load": [
        _CORE,
        ("v1/worker/gpu_worker.py", "load_model", "self.model_runner.load_model()"),
        ("model_executor/model_loader/base_loader.py", "load_model", "model = initialize_model("),
        ("model_executor/models/llama.py", "__init__", "self.mlp = LlamaMLP("),
    ],
    "weights": [
        _CORE,
        ("model_executor/model_loader/base_loader.py", "load_model", "self.load_weights(model)"),
        ("model_executor/models/utils.py", "load_weights", "autoloaded_weights = set("),
        ("model_executor/models/utils.py", "_load_module", "raise ValueError(msg)"),
    ],
    "kv": [
        _CORE,
        ("v1/engine/core.py", "_initialize_kv_caches", "self.model_executor.initialize_from_config("),
        ("v1/worker/gpu_model_runner.py", "_allocate_kv_cache_tensors", "torch.zeros("),
    ],
    "profile": [
        _CORE,
        _PROFILE,
        ("v1/worker/gpu_model_runner.py", "profile_run", "self._dummy_run("),
        ("model_executor/layers/activation.py", "forward", "output = gate("),
    ],
    "graph": [
        _CORE,
        ("v1/worker/gpu_worker.py", "compile_or_warm_up_model", "self.model_runner.capture_model()"),
        ("model_executor/layers/activation.py", "forward", "output = gate("),
    ],
    "serving": [
        ("v1/engine/core.py", "run_engine_core", "engine_core.run_busy_loop()"),
        ("v1/engine/core.py", "run_busy_loop", "self._process_engine_step()"),
        ("model_executor/layers/activation.py", "forward", "output = gate("),
    ],
}


def made_log(engine: str, where: str, message: str) -> list[str]:
    """A short log in which this part of an engine raises this message; ``plain`` is the message alone."""
    if where == "plain":
        return [message]
    return _sglang_log(where, message) if engine == "sglang" else _vllm_log(where, message)


def _frames(root: str, frames: list[tuple[str, str, str]], prefix: str = "") -> list[str]:
    return [
        prefix + text
        for path, function, source in frames
        for text in (f'  File "{root}/{path}", line 7, in {function}', f"    {source}")
    ]


def _sglang_log(where: str, message: str) -> list[str]:
    frames = _frames("/opt/sglang", _SGLANG_FRAMES[where])
    if where in ("args", "import"):
        return ["Traceback (most recent call last):", *frames, message]
    return [
        "[2026-01-02 03:04:00] server_args=ServerArgs(model_path='m', mem_fraction_static=0.8, watchdog_timeout=300)",
        *(["[2026-01-02 03:04:01] The server is fired up and ready to roll!"] if where == "serving" else []),
        "[2026-01-02 03:04:05 TP0] Scheduler hit an exception: Traceback (most recent call last):",
        *frames,
        message,
        "",
        "[2026-01-02 03:04:05] Received sigquit from a child process. It usually means the child failed.",
    ]


def _vllm_log(where: str, message: str) -> list[str]:
    api, core = "(APIServer pid=1) ", "(EngineCore pid=9) ERROR 08-03 21:49:23 [core.py:1231] "
    if where in ("args", "import"):
        return [
            f"{api}Traceback (most recent call last):",
            *_frames("/opt/vllm", _VLLM_FRAMES[where], api),
            api + message,
        ]
    return [
        f"{core}EngineCore {'encountered a fatal error' if where == 'serving' else 'failed to start'}.",
        f"{core}Traceback (most recent call last):",
        *_frames("/opt/vllm", _VLLM_FRAMES[where], core),
        core + message,
        "(EngineCore pid=9) Process EngineCore:",
        f"{api}Traceback (most recent call last):",
        f'{api}  File "/opt/venv/bin/vllm", line 10, in <module>',
        f"{api}    sys.exit(main())",
        f"{api}RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}",
    ]
