"""Startup: from a parsed command line to captured graphs, or to the failure that the plan (or somebody) demands."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.engines.sglang.memory_plan import Graphs, Step, regime_of
from bench.engines.sglang.settings import GIB, MIB
from bench.engines.simulator.clock import Clock
from bench.engines.simulator.faults import Faults
from bench.engines.simulator.log import Log
from bench.engines.simulator.model import CAPTURE_S, IMPORT_S, ServerModel
from bench.engines.simulator.options import Options
from bench.engines.simulator.process import Process
from bench.engines.simulator.refusal import refusal

ORPHAN_LIFE_S = 120
# The steps of a plan at which a demanded failure of a phase strikes.
_PHASES = {"weights": "load", "kv_pool": "kv_alloc", "target graphs": "graph_capture"}
_MEMORY_FAULTS = {
    "load": ("oom_weights",),
    "kv_alloc": ("oom_state_cache", "oom_kv_pool"),
    "graph_capture": ("oom_graph_capture",),
}


@dataclass(frozen=True)
class Startup:
    """One start.

    Attributes:
        given: flags that were passed; ``values``: all arguments as they are resolved.
        warnings: of deprecated flags.
    """

    model: ServerModel
    options: Options
    faults: Faults
    given: Mapping[str, Any]
    values: Mapping[str, Any]
    warnings: tuple[str, ...]
    env: Mapping[str, str]
    log: Log
    clock: Clock
    process: Process

    async def run(self) -> None:
        """Print what SGLang prints, in its time; does not return where the start fails."""
        self._check_arguments()
        self.log.server_args(self.values)
        self.log.line(
            f"This server is simulated: SGLang {self.options.version} on {self.options.hardware.name}, "
            f"{self.options.time_scale:g} virtual seconds a second."
        )
        if "orphan" in self.faults:
            self._leave_orphan()
        await self.clock.sleep(IMPORT_S + self.faults.values.get("slow_start", 0.0))
        await self._take_memory()
        self.log.limits(self.model.plan, self.model.settings.context_length)

    def _leave_orphan(self) -> None:
        code = f"import time; time.sleep({ORPHAN_LIFE_S})"
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdin=subprocess.DEVNULL)

    def _check_arguments(self) -> None:
        settings = self.model.settings
        for warning in self.warnings:
            self.log.raw(warning)
        if "crash_args" in self.faults:
            self.process.refuse("ValueError: simulated failure of the command line")
        refused = refusal(self.given, settings, self.model.shape, self.env, self.options.hardware.architecture)
        if refused is not None:
            self.process.refuse(refused)
        if settings.speculative and self.given.get("max_running_requests") is None:
            self.log.line(
                f"Max running requests is reset to {settings.max_running_requests} for speculative decoding. "
                "You can override this by explicitly setting --max-running-requests."
            )
        asked = self.given.get("speculative_num_draft_tokens")
        if asked is not None and settings.topk == 1 and asked != settings.draft_tokens:
            self.log.line(
                "speculative_num_draft_tokens is adjusted to speculative_num_steps + 1 when speculative_eagle_topk == 1"
            )

    async def _take_memory(self) -> None:
        """Go through the plan; end where it does."""
        plan = self.model.plan
        free = plan.steps[0].free_bytes + plan.steps[0].taken_bytes
        failure = plan.failure
        for step in plan.steps:
            self._before(step, free)
            await self._demanded(step)
            if failure and failure.step == step.name:
                break
            await self._after(step, free)
            free = step.free_bytes
        if failure and (
            regime_of(self.model.settings.version).checks_state or "no request can run" not in failure.message
        ):
            self.process.run_out(failure.message, free, capturing=failure.step.endswith(("graphs", "workspace")))
        if self.model.settings.hierarchical:
            if "oom_host" in self.faults:
                self.process.die(
                    f"ValueError: Not enough host memory available. Requesting {plan.host_bytes / 1e9:.2f} GB but only "
                    "have 1.00 GB free. Please reduce the size of the hierarchical cache."
                )
            self.log.line(f"Allocating {plan.host_bytes / 1e9:.2f} GB host memory for hierarchical KV cache.")

    async def _demanded(self, step: Step) -> None:
        """Failures on demand that belong to a step."""
        faults, phase = self.faults, _PHASES.get(step.name)
        if phase is None:
            return
        if phase == "load" and "start_hang" in faults:
            await asyncio.Event().wait()
        if phase == "load" and "oom_kernel" in faults:
            self.log.line(
                "Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common "
                "cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check."
            )
            self.process.kill()
        if f"crash_{phase}" in faults:
            self.process.die(f"RuntimeError: simulated engine failure ({phase})")
        for name in _MEMORY_FAULTS[phase]:
            if name in faults:
                self._run_out(name, phase)

    def _run_out(self, name: str, phase: str) -> None:
        """Run out of memory on demand."""
        shape, settings = self.model.shape, self.model.settings
        if name == "oom_state_cache" and shape.linear_layers:
            self.process.die(
                "RuntimeError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache. Computed "
                "max_mamba_cache_size=0 (total_rest_memory=0.10 GB, "
                f"mamba_cache_per_req={shape.state_bytes(settings.ssm_dtype) / MIB:.2f} MB). Try: "
                "(1) reduce --max-running-requests, (2) increase --mem-fraction-static, "
                "(3) reduce --speculative-num-draft-tokens, or (4) use GPUs with more memory."
            )
        if phase == "kv_alloc":
            self.process.die(
                "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
                f"Current value: mem_fraction_static={settings.mem_fraction_static}"
            )
        message = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
        self.process.run_out(message, 0.2 * GIB, capturing=phase == "graph_capture")

    def _before(self, step: Step, free: float) -> None:
        if step.name in ("weights", "draft_weights"):
            self.log.load_begin(free)
        elif step.name == "state_cache":
            self.log.limits_warning(self.model.plan, self.model.shape)
        elif (graphs := self._graphs(step)) is not None:
            self.log.capture_begin(graphs, self.model.settings, free)

    async def _after(self, step: Step, free: float) -> None:
        plan, log = self.model.plan, self.log
        if step.name in ("weights", "draft_weights"):
            elapsed = self.model.load_s(step.taken_bytes)
            await self.clock.sleep(elapsed)
            kind = self.model.shape.architecture if step.name == "weights" else self._draft_architecture()
            log.load_end(kind, elapsed, step.free_bytes, step.taken_bytes)
        elif step.name == "state_cache" and self.model.shape.linear_layers:
            log.state_cache(plan)
        elif step.name in ("kv_pool", "draft_kv_pool"):
            size = plan.kv_bytes if step.name == "kv_pool" else plan.draft_kv_bytes
            log.kv_cache(plan.kv_tokens, size, self.model.settings.kv_cache_dtype)
            log.pools_end(step.free_bytes)
        elif (graphs := self._graphs(step)) is not None:
            await self._capture(graphs, step, free)

    async def _capture(self, graphs: Graphs, step: Step, free: float) -> None:
        count = len(graphs.batch_sizes)
        for index in range(count):
            await self.clock.sleep(CAPTURE_S[graphs.kind])
            self.log.capturing(graphs, index, free - step.taken_bytes * (index + 1) / count)
        self.log.capture_end(graphs, self.model.settings, CAPTURE_S[graphs.kind] * count, step.free_bytes)

    def _graphs(self, step: Step) -> Graphs | None:
        return next((item for item in self.model.plan.graphs if f"{item.kind} graphs" == step.name), None)

    def _draft_architecture(self) -> str:
        if self.values.get("speculative_draft_model_path"):
            return f"{self.model.settings.algorithm}DraftModel"
        family = self.model.shape.architecture.removesuffix("ForConditionalGeneration").removesuffix("ForCausalLM")
        return f"{family}ForCausalLMMTP"
