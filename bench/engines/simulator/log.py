"""Log: the lines that SGLang prints, in the words of a version."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from bench.engines.sglang.memory_plan import Graphs, Plan
from bench.engines.sglang.model_shape import ModelShape
from bench.engines.sglang.settings import GIB, Settings
from bench.engines.simulator.scheduler import Scheduler, StepResult

KV_DTYPES = {"auto": "torch.bfloat16", "bfloat16": "torch.bfloat16", "bf16": "torch.bfloat16"}
KV_DTYPES |= {"fp8_e4m3": "torch.float8_e4m3fn", "fp8_e5m2": "torch.float8_e5m2"}


class Log:
    """Prints SGLang's lines to standard error, where its logging goes."""

    def __init__(self, version: tuple[int, ...]) -> None:
        self.version = version

    def line(self, text: str) -> None:
        self.raw(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}")

    def raw(self, text: str) -> None:
        """A line without time, e.g. of a traceback."""
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def server_args(self, values: Mapping[str, Any]) -> None:
        if self.version >= (0, 5, 20):
            self.line(f"server_args={dict(values)!r}")
        else:
            self.line(f"server_args=ServerArgs({', '.join(f'{name}={value!r}' for name, value in values.items())})")

    # Start-up

    def load_begin(self, free_bytes: float) -> None:
        self.line("Init torch distributed begin.")
        self.line("Init torch distributed ends. elapsed=0.19 s, mem usage=0.09 GB")
        self.line(f"Load weight begin. avail mem={_gib(free_bytes)} GB")

    def load_end(self, model: str, elapsed_s: float, free_bytes: float, used_bytes: float) -> None:
        self.line(
            f"Load weight end. elapsed={elapsed_s:.2f} s, type={model}, avail mem={_gib(free_bytes)} GB, "
            f"mem usage={_gib(used_bytes)} GB."
        )

    def limits_warning(self, plan: Plan, shape: ModelShape) -> None:
        asked = plan.settings.max_running_requests
        limit = plan.max_running_requests
        slots = plan.state_slots // plan.settings.slots_per_request
        capped = bool(shape.linear_layers) and slots == limit
        if capped and self.version >= (0, 5, 16) and (asked is None or asked > limit):
            self.line(
                f"max_running_requests is capped to {limit} by the mamba state cache "
                f"(max_mamba_cache_size={plan.state_slots}, {plan.settings.slots_per_request} state slots per request)"
                ". To raise it: increase --mamba-full-memory-ratio or --max-mamba-cache-size, or halve the state size "
                "with --mamba-ssm-dtype bfloat16."
            )
        elif asked is not None and asked > limit and self.version >= (0, 5, 14):
            self.line(
                f"max_running_requests was reduced from the requested {asked} to {limit} (per dp worker) due to the "
                "available KV cache capacity."
            )

    def state_cache(self, plan: Plan) -> None:
        text = (
            f"Mamba Cache is allocated. max_mamba_cache_size: {plan.state_slots}, "
            f"conv_state size: {_gib(plan.conv_bytes)}GB, ssm_state size: {_gib(plan.ssm_bytes)}GB "
        )
        if plan.draft_ssm_bytes:
            text += (
                f"intermediate_ssm_state_cache size: {_gib(plan.draft_ssm_bytes)}GB "
                f"intermediate_conv_window_cache size: {_gib(plan.draft_conv_bytes)}GB "
            )
        self.line(text)

    def kv_cache(self, tokens: int, size_bytes: float, dtype: str) -> None:
        named = f"dtype: {KV_DTYPES.get(dtype, dtype)}, " if self.version >= (0, 5, 13) else ""
        half = _gib(size_bytes / 2)
        self.line(f"KV Cache is allocated. {named}#tokens: {tokens}, K size: {half} GB, V size: {half} GB")

    def pools_end(self, free_bytes: float) -> None:
        self.line(f"Memory pool end. avail mem={_gib(free_bytes)} GB")

    def capture_begin(self, graphs: Graphs, settings: Settings, free_bytes: float) -> None:
        free = f"avail mem={_gib(free_bytes)} GB"
        if self.version < (0, 5, 14):
            self.line(f"Capture {_old_name(graphs.kind)} begin. This can take up to several minutes. {free}")
            return
        tokens = 1 if graphs.kind == "draft decode" else max(1, settings.draft_tokens)
        per = "req" if self.version >= (0, 5, 17) else "bs"
        self.line(
            f"Capture {_name(graphs.kind, settings)} CUDA graph begin. backend=full, num_tokens_per_{per}={tokens}, "
            f"bs={list(graphs.batch_sizes)}, {free}"
        )

    def capturing(self, graphs: Graphs, index: int, free_bytes: float) -> None:
        total = len(graphs.batch_sizes)
        size = graphs.batch_sizes[total - 1 - index]
        share = 100 * (index + 1) // total
        self.raw(f"Capturing batches (bs={size} avail_mem={_gib(free_bytes)} GB): {share:3d}%| {index + 1}/{total}")

    def capture_end(self, graphs: Graphs, settings: Settings, elapsed_s: float, free_bytes: float) -> None:
        used, free = _gib(graphs.size_bytes), _gib(free_bytes)
        if self.version < (0, 5, 14):
            self.line(
                f"Capture {_old_name(graphs.kind)} end. Time elapsed: {elapsed_s:.2f} s. mem usage={used} GB. "
                f"avail mem={free} GB."
            )
            return
        self.line(
            f"Capture {_name(graphs.kind, settings)} CUDA graph end. elapsed={elapsed_s:.2f} s, mem usage={used} GB, "
            f"avail mem={free} GB."
        )

    def limits(self, plan: Plan, context_length: int) -> None:
        settings = plan.settings
        self.line(
            f"max_total_num_tokens={plan.kv_tokens}, chunked_prefill_size={settings.chunked_prefill_size}, "
            f"max_prefill_tokens={settings.max_prefill_tokens}, max_running_requests={plan.max_running_requests}, "
            f"context_len={context_length}, available_gpu_mem={_gib(plan.free_bytes)} GB"
        )

    # Failing

    def scheduler_died(self, message: str, *, serving: bool) -> None:
        """The traceback of a scheduler, and what the main process makes of it."""
        self.line("Scheduler hit an exception: Traceback (most recent call last):")
        self.raw('  File "sglang/srt/managers/scheduler.py", in run_scheduler_process')
        self.raw(message + "\n")
        self.main_was_told(serving=serving)

    def main_was_told(self, *, serving: bool) -> None:
        if serving:
            self.line("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
        else:
            self.line("Received sigquit from a child process. It usually means the child failed.")
        self.line(f"kill_process_tree called: parent_pid={os.getpid()}, include_parent=True, pid={os.getpid()}")

    # Serving

    def prefill(self, result: StepResult, scheduler: Scheduler, hybrid: bool, rate: float) -> None:
        running = len(scheduler.running) - sum(request.finished_s is None for request, _ in result.produced)
        pending = "" if self.version < (0, 5, 11) else f"#pending-token: {_pending(scheduler)}, "
        self.line(
            f"Prefill batch, #new-seq: {result.new_requests}, #new-token: {result.new_tokens}, "
            f"#cached-token: {result.cached_tokens}, {self._usage(scheduler, hybrid)}, "
            f"#running-req: {max(0, running)}, #queue-req: {len(scheduler.waiting)}, {pending}"
            f"cuda graph: False, input throughput (token/s): {rate:.2f}"
        )

    def decode(self, scheduler: Scheduler, hybrid: bool, rate: float, accepted: float | None) -> None:
        running = len(scheduler.running)
        used = scheduler.used_tokens
        total = scheduler.plan.kv_tokens
        if hybrid:
            slots, usage = _slots(scheduler)
            text = f"#full token: {used}, full token usage: {used / total:.2f}, mamba num: {slots}, "
            text += f"mamba usage: {usage:.2f}, "
        else:
            text = f"#token: {used}, token usage: {used / total:.2f}, "
        if accepted is not None:
            drafts = scheduler.settings.draft_tokens - 1
            # Until 0.5.10 the bonus token and the root of the draft counted as well.
            share = accepted / (drafts + 1) if self.version < (0, 5, 11) else (accepted - 1) / max(1, drafts)
            text += f"accept len: {accepted:.2f}, accept rate: {share:.2f}, "
        graph = running <= scheduler.times.largest_graph
        self.line(
            f"Decode batch, #running-req: {running}, {text}cuda graph: {graph}, "
            f"gen throughput (token/s): {rate:.2f}, #queue-req: {len(scheduler.waiting)}"
        )

    def retracted(self, result: StepResult, ratio: float) -> None:
        self.line(
            f"KV cache pool is full. Retract requests. #retracted_reqs: {result.retracted}, "
            f"#new_tokens_gained: {result.retracted_tokens}, #new_token_ratio: {result.ratio_before:.4f} -> {ratio:.4f}"
        )

    def _usage(self, scheduler: Scheduler, hybrid: bool) -> str:
        share = scheduler.used_tokens / scheduler.plan.kv_tokens
        if not hybrid:
            return f"token usage: {share:.2f}"
        return f"full token usage: {share:.2f}, mamba usage: {_slots(scheduler)[1]:.2f}"


def _slots(scheduler: Scheduler) -> tuple[int, float]:
    """State slots in use: one less than is budgeted for a request where there are spare ones (4 of 5, seen)."""
    used = len(scheduler.running) * max(1, scheduler.settings.slots_per_request - 1)
    return used, used / max(1, scheduler.plan.state_slots)


def _pending(scheduler: Scheduler) -> int:
    request = scheduler.chunked
    return request.prompt_tokens - request.computed if request is not None else 0


def _name(kind: str, settings: Settings) -> str:
    if kind == "target":
        return "target verify" if settings.speculative else "target decode"
    return kind


def _old_name(kind: str) -> str:
    return {"target": "cuda graph", "draft decode": "draft cuda graph"}.get(kind, "draft extend cuda graph")


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"
