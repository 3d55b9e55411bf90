"""Steady state: what a closed loop of requests gives at a simulated server, in one formula instead of many steps.

The same step times and limits as the scheduler's, under three simplifications: requests are spread evenly over their
ages, the new-token ratio has decayed, and no request is retracted. ``tests/engines/test_virtual.py`` holds it to the
scheduler within 5 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.engines.simulator.acceptance import Acceptance
from bench.engines.simulator.model import RANDOM_IDS_ACCEPTANCE, ServerModel
from bench.engines.simulator.scheduler import (
    CLIPPED_NEW_TOKENS,
    INITIAL_NEW_TOKEN_RATIO,
    LEAST_NEW_TOKEN_FACTOR,
    block_tokens,
)
from bench.experiment import WorkloadSpec


@dataclass(frozen=True)
class SteadyState:
    """One load level in steady state; times in seconds.

    Attributes:
        running: requests that decode; the others of ``concurrency`` wait.
        step_s: one decode step, prefills left out; ``cycle_s``: with its share of them.
        steps: of one request.
        prefill_share: of decode steps that a prefill goes before; it takes ``prefill_s``.
        prefill_tokens: computed in one prefill batch.
        cached_tokens: of a prompt.
    """

    concurrency: int
    running: int
    output_tok_per_s: float
    request_per_s: float
    acceptance_length: float
    steps: float
    step_s: float
    cycle_s: float
    prefill_share: float
    prefill_s: float
    prefill_tokens: float
    cached_tokens: int
    queue_s: float

    @classmethod
    def of(cls, model: ServerModel, workload: WorkloadSpec, concurrency: int) -> SteadyState:
        """Steady state of a closed loop with ``concurrency`` requests in flight."""
        prompt, output = workload.prompts.input_tokens, workload.output_tokens
        acceptance = acceptance_of(model, workload)
        mean = acceptance.mean
        second = sum((2 * index + 1) * (1 - below) for index, below in enumerate((0.0, *acceptance.cumulative[:-1])))
        # Renewal theory: steps until at least output - 1 tokens are there, the last one overshooting.
        steps = max(1.0, (output - 1 + (second / mean - 1) / 2) / mean)
        cached = _cached(model, workload)
        running = max(1, min(concurrency, model.plan.max_running_requests, _fitting(model, prompt, output)))
        finishing = running / steps  # requests per decode step
        even = acceptance.is_certain and not workload.output_tokens_spread
        share = min(1.0, finishing) if even else 1 - math.exp(-finishing)
        together = finishing / share
        tokens = together * (prompt - cached)
        prefill = _prefill_s(model, tokens, together * (prompt - cached) * (cached + (prompt - cached) / 2))
        step = model.times.decode_s(running, int(running * (prompt + output / 2)))
        cycle = step + share * prefill
        requests = finishing / cycle
        return cls(
            concurrency=concurrency,
            running=running,
            output_tok_per_s=requests * output,
            request_per_s=requests,
            acceptance_length=mean,
            steps=steps,
            step_s=step,
            cycle_s=cycle,
            prefill_share=share,
            prefill_s=prefill,
            prefill_tokens=tokens,
            cached_tokens=cached,
            queue_s=(concurrency - running) / requests,
        )


def acceptance_of(model: ServerModel, workload: WorkloadSpec) -> Acceptance:
    """How many tokens a step yields on this workload's prompts."""
    if workload.prompts.kind == "random_ids":
        return model.acceptance(workload.temperature, RANDOM_IDS_ACCEPTANCE)
    return model.acceptance(workload.temperature)


def _cached(model: ServerModel, workload: WorkloadSpec) -> int:
    """Tokens of a prompt that the prefix cache has: of the shared part, whole blocks."""
    block = block_tokens(model.settings, hybrid=bool(model.shape.linear_layers))
    shared = workload.prompts.input_tokens * workload.prompts.shared_share
    return int(shared // block * block) if block else 0


def _fitting(model: ServerModel, prompt: int, output: int) -> int:
    """Requests that admission lets run at once: what they hold, what they may still need, and room for one more."""
    settings, plan = model.settings, model.plan
    initial = min(1.0, INITIAL_NEW_TOKEN_RATIO * settings.schedule_conservativeness)
    ratio = initial * LEAST_NEW_TOKEN_FACTOR
    held = prompt + output / 2 + ratio * min(output, CLIPPED_NEW_TOKENS) / 2
    return int((plan.kv_tokens - prompt - min(output, CLIPPED_NEW_TOKENS)) / held) + 1


def _prefill_s(model: ServerModel, tokens: float, pairs: float) -> float:
    """A prefill of so many tokens, in as many chunks as it takes."""
    chunk = model.settings.chunked_prefill_size
    if chunk <= 0 or tokens <= chunk:
        return model.times.prefill_s(math.ceil(tokens), pairs)
    whole, rest = divmod(tokens, chunk)
    seconds = whole * model.times.prefill_s(chunk, pairs * chunk / tokens)
    return seconds + (model.times.prefill_s(math.ceil(rest), pairs * rest / tokens) if rest else 0.0)
