"""Virtual host: launches and measures simulated servers in this process and in virtual time.

For everything that needs thousands of launches: the search is measured on it. Deterministic: the same seed,
configuration, level and attempt give the same numbers, whatever was launched before.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from bench.engines.protocol import LaunchFacts, ServerConfig
from bench.engines.sglang.faults import RULES
from bench.engines.sglang.memory_plan import regime_of
from bench.engines.sglang.model_shape import ModelShape
from bench.engines.sglang.settings import GIB
from bench.engines.simulator.model import ServerModel
from bench.engines.simulator.options import DEFAULT_VERSION, Disturbance
from bench.engines.simulator.refusal import refusal
from bench.engines.simulator.steady_state import SteadyState
from bench.experiment import HardwareSpec, WorkloadSpec
from bench.faults import LogReader
from bench.load.measurement import Interval, Measurement, Summary
from bench.outcome import Cause, Outcome, Phase, kind_of

# A level runs this many request times before its window, and its window is looked at so often.
WARMUP_REQUESTS = 1.5
BINS = 20
WARMUP_BINS = 2  # of them are as much as is seen of its steady part half-way through the warm-up
NOT_DISTURBED = Disturbance()

ShouldStop = Callable[[float, Interval | None], bool]


@dataclass(frozen=True)
class SimulatedLevel:
    """What one load level gave: a measurement, or the outcome that ended the server.

    Attributes:
        duration_s: virtual seconds that it took.
        stopped: ``should_stop`` said so, and the measurement is of what was seen until then.
    """

    measurement: Measurement | None
    outcome: Outcome | None
    duration_s: float
    stopped: bool = False


@dataclass(frozen=True)
class SimulatedLaunch:
    """One launched server.

    Attributes:
        outcome: why it is not ready, None when it is.
        facts: what its log says, rounded as it is printed.
        start_s: virtual seconds to ready, or to the failure.
    """

    model: ServerModel
    outcome: Outcome | None
    facts: LaunchFacts
    start_s: float
    config: ServerConfig
    seed: str
    noise: float

    def steady_state(self, workload: WorkloadSpec, concurrency: int) -> SteadyState:
        """The truth without noise."""
        return SteadyState.of(self.model, workload, concurrency)

    def crash(self, workload: WorkloadSpec, concurrency: int) -> Outcome | None:
        """How this level kills the server, None where it does not."""
        if not concurrency:
            return None
        state = self.steady_state(workload, concurrency)
        if self.model.crashes_at_full_batch and state.running >= self.model.plan.max_running_requests:
            return _outcome(self.model.full_batch_crash(), Phase.SERVING)
        # At the start of a level all its prompts come at once.
        tokens = state.running * (workload.prompts.input_tokens - state.cached_tokens)
        chunk = self.model.settings.chunked_prefill_size
        batch = min(tokens, chunk) if chunk > 0 else tokens
        missing = self.model.prefill_missing_bytes(int(batch))
        if missing <= 0:
            return None
        message = f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {missing / GIB:.2f} GiB."
        return _outcome(message, Phase.SERVING)

    def measure(
        self, workload: WorkloadSpec, concurrency: int, *, attempt: int = 0, should_stop: ShouldStop | None = None
    ) -> SimulatedLevel:
        """Measure one level, with noise.

        Args:
            attempt: another one draws other noise.
            should_stop: asked half-way through the warm-up and after each part of the window, with seconds since its
                start (0 before) and the interval so far.
        """
        state = self.steady_state(workload, concurrency)
        request_s = state.steps * state.cycle_s
        warmup = min(workload.max_warmup_s, WARMUP_REQUESTS * request_s)
        crash = self.crash(workload, concurrency)
        if crash is not None:
            return SimulatedLevel(None, crash, min(warmup, state.prefill_s + state.step_s))
        rng = random.Random(f"{self.seed} {self.config.key} {concurrency} {attempt}")
        truth = state.output_tok_per_s * (1 + self.noise * rng.gauss(0, 1))
        window = min(workload.max_window_s, max(workload.min_window_s, 2 * request_s))
        interval, seen_s, stopped = _interval(truth, self.noise, BINS), window, False
        if should_stop is not None:
            for bins in (0, *range(2, BINS + 1, 2)):
                seen_bins = bins or WARMUP_BINS
                so_far = truth * (1 + self.noise * rng.gauss(0, 1) * math.sqrt(1 / seen_bins - 1 / BINS))
                interval = _interval(so_far, self.noise, seen_bins)
                if should_stop(window * bins / BINS, interval):
                    stopped = bins < BINS
                    seen_s = window * seen_bins / BINS
                    warmup = warmup if bins else max(0.0, warmup / 2 - seen_s)
                    break
        measurement = _measurement(self.model, workload, state, interval, warmup, seen_s)
        return SimulatedLevel(measurement, None, warmup + seen_s, stopped)


class SimulatedHost:
    """A card with its model, on which servers are launched.

    Args:
        shape: of the whole model.
        disturbance: how the host differs from what is expected of it.
        seed: of all noise.
    """

    def __init__(
        self,
        shape: ModelShape,
        hardware: HardwareSpec,
        *,
        version: str = DEFAULT_VERSION,
        disturbance: Disturbance = NOT_DISTURBED,
        seed: int = 0,
    ) -> None:
        self.shape = shape
        self.hardware = hardware
        self.version = version
        self.disturbance = disturbance
        self.seed = seed

    def launch(self, config: ServerConfig) -> SimulatedLaunch:
        """Launch a server; its ``outcome`` says whether it came up."""
        flags, env = dict(config.flags), dict(config.env)
        model = ServerModel.of(
            flags,
            version=self.version,
            shape=self.shape,
            hardware=self.hardware,
            env=env,
            disturbance=self.disturbance,
        )
        outcome = None
        refused = refusal(flags, model.settings, self.shape, env, self.hardware.architecture)
        if refused is not None:
            outcome = _outcome(refused, Phase.ARGS)
        elif model.plan.failure is not None:
            outcome = self._failed(model)
        return SimulatedLaunch(
            model=model,
            outcome=outcome,
            facts=_facts(model) if refused is None else LaunchFacts(),
            start_s=model.start_s() if refused is None else 0.5 * model.start_s(),
            config=config,
            seed=f"{self.seed}",
            noise=self.disturbance.noise,
        )

    def _failed(self, model: ServerModel) -> Outcome:
        failure = model.plan.failure
        assert failure is not None
        if not regime_of(model.settings.version).checks_state and "no request can run" in failure.message:
            return Outcome(kind_of(Cause.SERVING_HANG), Cause.SERVING_HANG, Phase.SERVING, failure.message)
        return _outcome(failure.message, failure.phase)


def _outcome(message: str, phase: Phase) -> Outcome:
    """What the log reader makes of the line that a server dies with."""
    reader = LogReader(RULES)
    lines = {
        Phase.LOAD: ["[2026-01-01 00:00:00] Load weight begin. avail mem=1.00 GB"],
        Phase.KV_ALLOC: [
            "[2026-01-01 00:00:00] Load weight end. elapsed=1.00 s, type=M, avail mem=1 GB, mem usage=1 GB."
        ],
        Phase.GRAPH_CAPTURE: [
            "[2026-01-01 00:00:00] Capture target decode CUDA graph begin. backend=full, avail mem=1 GB"
        ],
        Phase.SERVING: ["[2026-01-01 00:00:00] The server is fired up and ready to roll!"],
    }.get(phase, [])
    if phase is Phase.ARGS:
        lines += ["Traceback (most recent call last):", message]
    else:
        lines += ["[2026-01-01 00:00:00] Scheduler hit an exception: Traceback (most recent call last):", message, ""]
        told = "SIGQUIT received. signum=None, frame=None. It usually means one child failed."
        early = "Received sigquit from a child process. It usually means the child failed."
        lines.append(f"[2026-01-01 00:00:00] {told if phase is Phase.SERVING else early}")
    for line in lines:
        reader.feed(line)
    fault = reader.verdict()
    return Outcome(kind_of(fault.cause), fault.cause, fault.phase, message, fault.line, fault.line_number, fault.flags)


def _facts(model: ServerModel) -> LaunchFacts:
    plan = model.plan
    sizes = {step.name: step for step in plan.steps}
    weights, draft = sizes["weights"], sizes.get("draft_weights")
    pools = sizes.get("draft_kv_pool") or sizes.get("kv_pool")
    graphs = [round(item.size_bytes / GIB, 2) for item in plan.graphs]
    ready = plan.failure is None
    return LaunchFacts(
        available_bytes=_printed(weights.free_bytes + weights.taken_bytes),
        weight_bytes=_printed(weights.taken_bytes),
        draft_weight_bytes=_printed(draft.taken_bytes) if draft else None,
        kv_tokens=plan.kv_tokens if "kv_pool" in sizes else None,
        kv_bytes=_printed(plan.kv_bytes) if "kv_pool" in sizes else None,
        draft_kv_bytes=_printed(plan.draft_kv_bytes) if "draft_kv_pool" in sizes else None,
        state_slots=plan.state_slots if model.shape.linear_layers and "state_cache" in sizes else None,
        state_bytes=_printed(plan.conv_bytes + plan.ssm_bytes + plan.draft_ssm_bytes + plan.draft_conv_bytes),
        max_running_requests=plan.max_running_requests if ready else None,
        graph_bytes=sum(graphs) * GIB if graphs else None,
        available_after_pools_bytes=_printed(pools.free_bytes) if pools else None,
        available_after_start_bytes=_printed(plan.free_bytes) if ready else None,
    )


def _printed(size: float) -> float:
    """As a log prints it, to a hundredth of a GiB."""
    return round(size / GIB, 2) * GIB


def _interval(mean: float, noise: float, bins: int) -> Interval:
    half = 2 * noise * mean * math.sqrt(BINS / bins)
    return Interval(mean, mean - half, mean + half, f"simulated, {bins} bins")


def _measurement(
    model: ServerModel,
    workload: WorkloadSpec,
    state: SteadyState,
    interval: Interval,
    warmup_s: float,
    window_s: float,
) -> Measurement:
    scale = interval.mean / state.output_tok_per_s  # a run that is slower by chance is slower in every figure
    requests = max(1, int(state.request_per_s * scale * window_s))
    output = int(interval.mean * window_s)
    first = (state.queue_s + state.prefill_s) / scale
    per_token = state.steps * state.cycle_s / max(1, workload.output_tokens - 1) / scale
    gap = state.step_s / scale
    stalled = (state.step_s + state.prefill_s) / scale
    chunk = _gaps(gap, stalled, state.prefill_share, int(requests * state.steps))
    mean = state.acceptance_length
    speculative = model.settings.speculative
    kind = Counter(prompt=requests * workload.prompts.input_tokens, cached=requests * state.cached_tokens)
    return Measurement(
        pattern="closed",
        valid=True,
        window_s=window_s,
        warmup_s=warmup_s,
        duration_s=warmup_s + window_s,
        output_tok_per_s=interval,
        request_per_s=state.request_per_s * scale,
        ttft_s=_around(first, 0.25, requests),
        tpot_s=_around(per_token, 0.04, requests),
        itl_s=_gaps(gap / mean, stalled / mean, state.prefill_share, output),
        icl_s=chunk,
        e2e_s=_around(first + per_token * (workload.output_tokens - 1), 0.05, requests),
        in_flight_mean=float(state.concurrency),
        requests_ok=requests,
        requests_failed=0,
        prompt_tokens=kind["prompt"],
        output_tokens=output,
        cached_tokens=kind["cached"],
        retractions=0,
        prompts_hash="simulated",
        seed=workload.seed,
        concurrency=state.concurrency,
        acceptance_length=mean if speculative else None,
        verify_steps=int(requests * state.steps) if speculative else None,
        acceptance_simulated=speculative,
        step_time_s=state.concurrency * mean / interval.mean,
    )


def _around(mean: float, spread: float, count: int) -> Summary:
    """A summary of values that lie about normally around their mean (an assumption of form, not of place)."""
    at = [mean * (1 + sigmas * spread) for sigmas in (0.0, 1.28, 1.64, 2.33, 3.1)]
    return Summary(count, mean, *at)


def _gaps(usual: float, stalled: float, share: float, count: int) -> Summary:
    """Gaps of which a share was stretched by a prefill."""

    def at(quantile: float) -> float:
        return stalled if quantile > 1 - share else usual

    return Summary(count, usual * (1 - share) + stalled * share, at(0.5), at(0.9), at(0.95), at(0.99), stalled)
