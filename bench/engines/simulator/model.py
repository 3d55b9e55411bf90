"""Model: a configured server without a process: its memory plan, its step times, its acceptance."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from bench.engines.protocol import Calibration, Value
from bench.engines.sglang.memory import expected_host
from bench.engines.sglang.memory_plan import Host, Plan, make_plan
from bench.engines.sglang.model_shape import ModelShape
from bench.engines.sglang.settings import Settings
from bench.engines.simulator.acceptance import Acceptance
from bench.engines.simulator.options import Disturbance
from bench.engines.simulator.step_time import StepTimes
from bench.experiment import HardwareSpec

ACCEPTANCE_ENV = "SGLANG_SIMULATE_ACC_LEN"
# What a prefill really takes, over the least that the forecast counts (assumption: no launch has shown it yet).
ACTIVATION_FACTOR = 2.5
# The version in which a full batch kills a server that speculates (seen with the triton backend; other backends than
# triton and the default are taken to be free of it).
FULL_BATCH_CRASH_VERSION = (0, 5, 15)
# Chance that the first drafted token is accepted after random ids, which follow no text (assumption).
RANDOM_IDS_ACCEPTANCE = 0.5
# Start-up, in seconds: imports and process start, kernels of the first requests, capture of one batch size, and the
# rate at which weights are read (the first three from launches of the 27B shape on the H200, the last an assumption).
IMPORT_S = 21.0
FIRST_KERNELS_S = 8.0
CAPTURE_S = {"target": 0.9, "draft decode": 0.35, "draft extend": 0.13}
LOAD_BYTES_PER_S = 3e9
DUMMY_LOAD_S = 0.3


@dataclass(frozen=True)
class ServerModel:
    """What a configuration comes to on a host."""

    settings: Settings
    shape: ModelShape
    plan: Plan
    times: StepTimes
    first_acceptance: float | None
    simulated_acceptance: float | None
    dummy_weights: bool

    @classmethod
    def of(
        cls,
        flags: Mapping[str, Value],
        *,
        version: str,
        shape: ModelShape,
        hardware: HardwareSpec,
        env: Mapping[str, str],
        disturbance: Disturbance,
        first_acceptance: float | None = None,
    ) -> ServerModel:
        """The model of a server.

        Args:
            flags: by destination name.
            shape: of the whole model.
            env: environment variables of the server; SGLANG_SIMULATE_ACC_LEN is honoured.
        """
        settings = Settings.resolve(
            flags, version=version, shape=shape, gpu_memory_bytes=hardware.memory_bytes, env=env
        )
        shape = shape.sharded(settings.tp_size)
        plan = make_plan(settings, shape, disturbed_host(shape, hardware, disturbance))
        target = next((graphs for graphs in plan.graphs if graphs.kind == "target"), None)
        times = StepTimes.of(
            settings,
            shape,
            hardware,
            largest_graph=max(target.batch_sizes) if target else 0,
            write_policy=str(flags.get("hicache_write_policy") or "write_through"),
            scale=disturbance.step_scale,
        )
        simulated = env.get(ACCEPTANCE_ENV)
        return cls(
            settings=settings,
            shape=shape,
            plan=plan,
            times=times,
            first_acceptance=first_acceptance,
            simulated_acceptance=float(simulated) if simulated else None,
            dummy_weights=flags.get("load_format") == "dummy",
        )

    def acceptance(self, temperature: float, first_probability: float | None = None) -> Acceptance:
        return Acceptance.of(
            self.settings,
            temperature=temperature,
            first_probability=self.first_acceptance or first_probability,
            simulated_length=self.simulated_acceptance,
        )

    @property
    def crashes_at_full_batch(self) -> bool:
        """Whether this is the server that dies when as many requests run as can."""
        return (
            self.settings.version[:3] == FULL_BATCH_CRASH_VERSION
            and self.settings.has_draft_model
            and self.settings.attention_backend in ("auto", "triton")
        )

    def full_batch_crash(self) -> str:
        """Its last words (mask buffers of the triton backend, sized without the draft tokens of the context)."""
        rows = self.plan.max_running_requests * self.settings.draft_tokens
        expected, seen = (
            rows * self.settings.context_length,
            rows * (self.settings.context_length + self.settings.draft_tokens),
        )
        return (
            f"RuntimeError: The expanded size of the tensor ({expected}) must match the existing size ({seen}) at "
            f"non-singleton dimension 0.  Target sizes: [{expected}].  Tensor sizes: [{seen}]"
        )

    def prefill_missing_bytes(self, tokens: int) -> float:
        """GPU memory that a prefill batch lacks; negative where it fits."""
        return tokens * self.shape.activation_bytes_per_token * ACTIVATION_FACTOR - self.plan.free_bytes

    def load_s(self, weight_bytes: float) -> float:
        return DUMMY_LOAD_S if self.dummy_weights else DUMMY_LOAD_S + weight_bytes / LOAD_BYTES_PER_S

    def start_s(self) -> float:
        """From launch to ready, or to the step that fails."""
        total = IMPORT_S
        for step in self.plan.steps:
            if step.name in ("weights", "draft_weights"):
                total += self.load_s(step.taken_bytes)
        total += sum(CAPTURE_S[graphs.kind] * len(graphs.batch_sizes) for graphs in self.plan.graphs)
        return total if self.plan.failure else total + FIRST_KERNELS_S


def disturbed_host(shape: ModelShape, hardware: HardwareSpec, disturbance: Disturbance) -> Host:
    """What a launch really meets: what is expected, and the disturbance."""
    host = expected_host(shape, hardware, Calibration())
    return dataclasses.replace(
        host,
        available_bytes=host.available_bytes - disturbance.overhead_bytes,
        weight_bytes=host.weight_bytes * disturbance.weight_scale,
        draft_weight_bytes=host.draft_weight_bytes * disturbance.weight_scale,
    )
