"""How the fault reader weighs what stands in a log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.engines.vllm_faults import RULES as VLLM
from bench.faults import LogReader
from bench.outcome import Cause, Fault, Phase
from tests.faults.logs import SGLANG, made_log, read

SERVER_ARGS = "[2026-01-02 03:04:00] server_args=ServerArgs(model_path='m', mem_fraction_static=0.8)"
READY = "[2026-01-02 03:05:00] The server is fired up and ready to roll!"
SIGQUIT = "[2026-01-02 03:04:05] Received sigquit from a child process. It usually means the child failed."

FIXTURES = Path(__file__).parents[1] / "fixtures" / "logs"
# Lines of the kinds that servers print which come up and serve.
STARTUP_NOISE = (FIXTURES / "noise_of_a_start.txt").read_text().splitlines()
SERVING_NOISE = (FIXTURES / "noise_while_serving.txt").read_text().splitlines()


def oom(where: str) -> Fault:
    message = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB."
    return read(made_log("sglang", where, message))[0]


def directions(fault: Fault) -> dict[str, str]:
    return {flag.flag: flag.direction for flag in fault.flags}


def test_noise_of_servers_that_work_is_no_fault() -> None:
    verdict, decisive = read([SERVER_ARGS, *STARTUP_NOISE, READY, *SERVING_NOISE])
    assert decisive is None
    assert verdict.cause == Cause.HEALTHY


def test_noise_does_not_hide_the_fault() -> None:
    crash = made_log("sglang", "serving", "IndexError: list index out of range")
    verdict, _ = read([SERVER_ARGS, *STARTUP_NOISE, READY, *SERVING_NOISE, *crash])
    assert (verdict.cause, verdict.phase) == (Cause.ENGINE_CRASH, Phase.SERVING)
    assert verdict.line == "IndexError: list index out of range"


@pytest.mark.parametrize(
    "hint",
    [
        "Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common cause is "
        "the OS OOM killer.",
        "Possible solutions:\n1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n2. disable torch "
        "compile\n4. disable CUDA graph by --disable-cuda-graph. (CUDA out of memory)",
        "Killed",
    ],
)
def test_hints_never_decide(hint: str) -> None:
    lines = made_log("sglang", "graph", "RuntimeError: Ninja build failed. Ninja output:")
    before, _ = read(lines)
    after, _ = read([*lines, *hint.split("\n")])
    within, _ = read([*lines[:-2], *hint.split("\n"), *lines[-2:]])
    assert before.cause == after.cause == within.cause == Cause.KERNEL_BUILD
    assert before.line == after.line == within.line


def test_kernels_killed_by_the_engine_itself_are_not_taken_for_the_kernel_s_killer() -> None:
    assert read([SERVER_ARGS, SIGQUIT, "Killed"])[0].cause == Cause.ENGINE_CRASH


def test_a_kill_from_outside_is_told_from_one_of_its_own() -> None:
    lines = [
        SERVER_ARGS,
        "Loading safetensors checkpoint shards:  50% Completed | 4/8 [00:10<00:10,  2.5s/it]",
        "[2026-01-02 03:04:30] Rank 0 scheduler is dead. Please check if there are relevant logs.",
        "[2026-01-02 03:04:30] Exit code: -9",
        "Traceback (most recent call last):",
        '  File "/opt/sglang/launch_server.py", line 14, in <module>',
        "    launch_server(server_args)",
        "EOFError",
    ]
    assert read(lines)[0].cause == Cause.OOM_HOST


def test_memory_messages_that_ask_for_opposite_moves_are_told_apart() -> None:
    too_small = read(
        made_log("sglang", "kv", "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.")
    )[0]
    too_large = oom("kv")
    assert too_small.cause == too_large.cause == Cause.OOM_GPU_KV_POOL
    assert directions(too_small)["--mem-fraction-static"] == "raise"
    assert directions(too_large)["--mem-fraction-static"] == "lower"


def test_a_bound_that_the_engine_names_is_read() -> None:
    message = (
        "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.5. Raise "
        "--mem-fraction-static above 0.742 (minimum viable = 1 - available/pre = 0.7412)."
    )
    (flag,) = read(made_log("sglang", "kv", message))[0].flags
    assert (flag.flag, flag.direction, flag.bound) == ("--mem-fraction-static", "raise", 0.742)


def test_each_part_of_a_list_of_remedies_keeps_its_direction() -> None:
    message = (
        "RuntimeError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache. Computed "
        "max_mamba_cache_size=-1. Try: (1) reduce --max-running-requests, (2) increase --mem-fraction-static, (3) "
        "reduce --speculative-num-draft-tokens, or (4) use GPUs with more memory."
    )
    fault = read(made_log("sglang", "kv", message))[0]
    assert fault.cause == Cause.OOM_GPU_STATE_CACHE
    assert directions(fault) == {
        "--max-running-requests": "lower",
        "--mem-fraction-static": "raise",
        "--speculative-num-draft-tokens": "lower",
    }


def test_vllm_s_advice_names_vllm_s_flags() -> None:
    message = (
        "ValueError: To serve at least one request with the model's max seq len (262144), (18.35 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (8.72 GiB). Based on the available memory, the "
        "estimated maximum model length is 121840. Try increasing `gpu_memory_utilization` or decreasing "
        "`max_model_len`."
    )
    fault = read(made_log("vllm", "kv", message), VLLM)[0]
    assert directions(fault) == {"--max-model-len": "lower", "--gpu-memory-utilization": "raise"}
    assert fault.flags[0].bound == 121840


@pytest.mark.parametrize(
    ("where", "cause"),
    [
        ("load", Cause.OOM_GPU_WEIGHTS),
        ("kv", Cause.OOM_GPU_KV_POOL),
        ("graph", Cause.OOM_GPU_GRAPH_CAPTURE),
        ("serving", Cause.OOM_GPU_RUNTIME),
    ],
)
def test_the_same_message_is_placed_by_the_code_that_raised_it(where: str, cause: Cause) -> None:
    assert oom(where).cause == cause


def test_a_message_without_frames_is_placed_by_the_last_milestone() -> None:
    lines = [
        SERVER_ARGS,
        "[2026-01-02 03:04:02] Load weight begin. avail mem=70.00 GB",
        "RuntimeError: CUDA out of memory",
    ]
    assert read([*lines, SIGQUIT])[0].cause == Cause.OOM_GPU_WEIGHTS
    capture = "[2026-01-02 03:04:03] Capture cuda graph begin. avail mem=1.00 GB"
    assert read([*lines[:2], capture, lines[2], SIGQUIT])[0].cause == Cause.OOM_GPU_GRAPH_CAPTURE


def test_the_exception_under_a_wrapper_is_the_root() -> None:
    lines = made_log("sglang", "graph", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.")
    wrapped = [
        *lines[:-2],
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "Traceback (most recent call last):",
        '  File "/opt/sglang/srt/managers/scheduler.py", line 7, in run_scheduler_process',
        "    scheduler = Scheduler(",
        "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 1.00 GiB.",
        "Possible solutions:",
        "1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)",
        *lines[-2:],
    ]
    fault = read(wrapped)[0]
    assert fault.line == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB."
    assert fault.cause == Cause.OOM_GPU_GRAPH_CAPTURE


def test_a_victim_s_message_gives_way_to_the_root_that_another_rank_prints_later() -> None:
    victim = made_log(
        "sglang", "serving", "RuntimeError: [/gloo/transport/tcp/pair.cc:544] Connection closed by peer [::1]:1"
    )
    root = made_log("sglang", "serving", "RuntimeError: CUDA error: an illegal memory access was encountered")
    assert read(victim + root)[0].cause == Cause.ILLEGAL_MEMORY_ACCESS
    assert read(victim)[0].cause == Cause.NCCL


def test_a_warning_explains_a_consequence_but_not_a_crash_of_its_own() -> None:
    warning = (
        "WARNING 02-28 20:57:36 _core_ext.py:180] Failed to import from vllm._C with ImportError('libx.so: missing')"
    )
    consequence = made_log("vllm", "load", "AttributeError: '_OpNamespace' '_C' object has no attribute 'rms_norm'")
    assert read([warning, *consequence], VLLM)[0].line == warning
    crash = made_log("vllm", "load", "IndexError: list index out of range")
    assert read([warning, *crash], VLLM)[0].cause == Cause.ENGINE_CRASH


def test_processes_that_print_at_the_same_time_keep_their_tracebacks_apart() -> None:
    def printed_by(pid: int, message: str) -> list[str]:
        prefix = f"(Worker pid={pid}) ERROR 08-03 21:49:23 [executor.py:1] "
        texts = [
            "WorkerProc failed to start.",
            "Traceback (most recent call last):",
            '  File "/opt/vllm/v1/worker/gpu_worker.py", line 7, in load_model',
            "    self.model_runner.load_model()",
            message,
        ]
        return [prefix + text for text in texts]

    first = printed_by(1, "ValueError: There is no module or parameter named 'x.bias' in LlamaForCausalLM")
    second = printed_by(2, "RuntimeError: [/gloo/transport/tcp/pair.cc:544] Connection closed by peer [::1]:1")
    mixed = [line for pair in zip(second, first, strict=True) for line in pair]
    fault = read(mixed, VLLM)[0]
    assert (fault.cause, fault.line) == (Cause.WEIGHTS_MISMATCH, first[-1])


def test_an_assertion_without_a_message_is_proved_by_its_condition() -> None:
    lines = made_log("sglang", "load", "AssertionError")
    lines[-4] = "    assert self.total_num_heads % tp_size == 0"
    fault = read(lines)[0]
    assert (fault.cause, fault.line) == (Cause.CONFIG_INCOMPATIBLE, "assert self.total_num_heads % tp_size == 0")


def test_a_crash_at_the_running_limit_names_the_limit() -> None:
    message = "RuntimeError: The expanded size of the tensor (8) must match the existing size (9) at dimension 0."
    lines = made_log("sglang", "serving", message)
    frame = '  File "/opt/sglang/srt/speculative/eagle_utils.py", line 527, in eagle_prepare_for_verify'
    fault = read([*lines[:-3], frame, "    load_batch(", *lines[-3:]])[0]
    assert fault.cause == Cause.ENGINE_CRASH
    assert "--max-running-requests" in directions(fault)
    assert "below that limit" in fault.advice


def test_somebody_else_s_memory_is_not_the_configuration_s_fault() -> None:
    message = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total capacity of 79.15 "
        "GiB of which 12.00 MiB is free. Process 4711 has 61.00 GiB memory in use. Including non-PyTorch memory, this "
        "process has 18.00 GiB memory in use."
    )
    assert read(made_log("sglang", "load", message))[0].cause == Cause.GPU_BUSY
    own_helper = message.replace("61.00 GiB", "612.00 MiB")
    assert read(made_log("sglang", "load", own_helper))[0].cause == Cause.OOM_GPU_WEIGHTS


@pytest.mark.parametrize(
    "stop",
    [
        "[2026-01-02 03:07:00] SIGTERM received. signum=None frame=None. Draining requests and shutting down...",
        "KeyboardInterrupt",
    ],
)
def test_a_stop_after_serving_is_healthy_and_one_before_is_not(stop: str) -> None:
    aftermath = "[2026-01-02 03:07:01] Subprocess scheduler_0 (pid=588) crashed with exit code -15. Triggering SIGQUIT."
    assert read([SERVER_ARGS, READY, stop, aftermath, SIGQUIT])[0].cause == Cause.HEALTHY
    assert read([SERVER_ARGS, stop])[0].cause == Cause.OTHER


def test_a_log_that_ends_in_the_middle_of_a_traceback_is_still_placed() -> None:
    lines = made_log("sglang", "weights", "AssertionError")
    fault = read(lines[:-3])[0]
    assert (fault.cause, fault.line) == (Cause.WEIGHTS_MISMATCH, "assert param_data.shape == loaded_weight.shape")


def test_a_log_that_begins_in_the_middle_of_a_traceback_is_still_read() -> None:
    lines = made_log("sglang", "weights", "RuntimeError: The size of tensor a (1) must match the size of tensor b (2)")
    assert read(lines[4:])[0].cause == Cause.WEIGHTS_MISMATCH


def test_a_start_that_never_became_ready_and_shows_no_error_is_a_hang() -> None:
    fault = read([SERVER_ARGS, "[2026-01-02 03:04:02] Load weight begin. avail mem=70.00 GB"])[0]
    assert (fault.cause, fault.phase) == (Cause.STARTUP_HANG, Phase.LOAD)


def test_text_that_is_no_server_s_log_is_unknown_with_its_most_telling_line() -> None:
    fault = read(["hello", "the frobnicator has failed", "bye"])[0]
    assert (fault.cause, fault.line, fault.line_number) == (Cause.UNKNOWN, "the frobnicator has failed", 2)
    assert read([])[0] == read([""])[0]


def test_a_traceback_inside_one_json_line_is_read() -> None:
    text = "\n".join(made_log("sglang", "load", "KeyError: 'model.layers.3.mlp.gate.weight'")[1:-2])
    line = json.dumps({"level": "error", "message": text})
    fault = read([SERVER_ARGS, line])[0]
    assert (fault.cause, fault.line_number) == (Cause.WEIGHTS_MISMATCH, 2)
    assert fault.line == "KeyError: 'model.layers.3.mlp.gate.weight'"


def test_a_progress_bar_s_line_is_cut_to_the_part_that_proves() -> None:
    bar = "Loading shards:   0% | 0/2\rLoading shards: 100% | 2/2\rRuntimeError: CUDA error: out of memory"
    fault = read([SERVER_ARGS, bar, SIGQUIT])[0]
    assert fault.line == "RuntimeError: CUDA error: out of memory"


def test_the_second_server_in_one_log_is_read_after_the_first_was_stopped() -> None:
    stop = "[2026-01-02 03:07:00] SIGTERM received. signum=None frame=None. Draining requests and shutting down..."
    second = made_log("sglang", "kv", "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.")
    assert read([SERVER_ARGS, READY, stop, *second])[0].cause == Cause.OOM_GPU_KV_POOL


def test_asking_for_a_verdict_does_not_change_what_is_read_later() -> None:
    lines = made_log("sglang", "load", "KeyError: 'model.layers.3.mlp.gate.weight'")
    reader = LogReader(SGLANG)
    for line in lines:
        reader.feed(line)
        reader.verdict()
    assert reader.verdict() == read(lines)[0]


@pytest.mark.parametrize(
    ("report", "cause"),
    [
        ("Value error, Bfloat16 is only supported on GPUs with compute capability of 8.0.", Cause.UNSUPPORTED_HARDWARE),
        ("Value error, Invalid repository ID or local directory specified: 'x'.", Cause.MODEL_NOT_FOUND),
        ("Value error, Model architectures ['X'] failed to be inspected.", Cause.CONFIG_INCOMPATIBLE),
        ("Input should be less than or equal to 1 [type=less_than_equal, input_value=1.5]", Cause.CONFIG_INCOMPATIBLE),
    ],
)
def test_a_validation_report_is_read_by_its_content(report: str, cause: Cause) -> None:
    lines = made_log("vllm", "args", "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig")
    fault = read([*lines, f"(APIServer pid=1)   {report}"], VLLM)[0]
    assert fault.cause == cause
    assert fault.line == f"(APIServer pid=1)   {report}"
