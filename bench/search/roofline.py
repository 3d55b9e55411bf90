"""Roofline: how fast a card could run a configuration at best, from what its engine says a decode step asks of it.

A prior for the search, not a prediction: nominal bandwidth and compute, no overheads, nothing fitted. It orders what
nobody has measured yet; measurements overrule it (``surrogate.py`` models what they differ by).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from bench.engines.protocol import DecodeDemand, Forecast
from bench.experiment import HardwareSpec, WorkloadSpec
from bench.records import TrialRecord

# Chance that a drafted token is accepted, given that those before it were, until a launch has shown it. Published
# acceptance lengths of MTP and EAGLE heads lie at 2.3 to 3.2 tokens with 2 to 3 steps, which is 0.75 to 0.85; taken
# lower, so that deep drafts have to prove themselves.
ACCEPTED = 0.7
# Where several tokens are drafted for one place, each further one keeps this share of the misses (assumption: the
# runner-up of a language model is right about a third of the times that the first is wrong).
BRANCH_MISS = 0.7
# Tokens of its answer at most, for which a request needs room to be let in (sglang 0.5.15 schedule_policy,
# SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION).
RESERVED_TOKENS = 4096


@dataclass(frozen=True)
class Roofline:
    """A configuration at one load level.

    Attributes:
        running: requests that run at once: the level, or what memory and limits allow.
        saturated: the level fills the server to its limit.
        captured: the running batch is within what graphs were captured for.
        branches: tokens drafted for each place, on average.
        tok_per_s: output tokens per second at best.
    """

    running: int
    saturated: bool
    captured: bool
    step_tokens: int
    depth: int
    branches: float
    tok_per_s: float


def roofline(
    forecast: Forecast, hardware: HardwareSpec, workload: WorkloadSpec, concurrency: int, accepted: float = ACCEPTED
) -> Roofline | None:
    """The roofline of a configuration at a load level; None where its engine does not tell what a step asks."""
    demand = forecast.demand
    if demand is None:
        return None
    prompt, output = workload.prompts.input_tokens, workload.output_tokens
    context = prompt + output / 2
    limit = forecast.max_running_requests or concurrency
    # A request is let in while there is room for all that it may still say, beside what the others hold.
    newcomer = prompt + min(output, RESERVED_TOKENS)
    tokens = forecast.kv_tokens
    fitting = concurrency if tokens is None else 1 + int((tokens - newcomer) / context)
    running = max(1, min(concurrency, limit, fitting))
    flops = hardware.flops_bf16
    moved = demand.step_bytes + running * (demand.request_bytes + context * demand.token_bytes)
    step_s = moved / hardware.bandwidth_bytes_per_s + running * demand.step_tokens * demand.token_flops / flops
    branches = _branches(demand)
    chance = 1 - (1 - accepted) * BRANCH_MISS ** (branches - 1)
    yielded = sum(chance**depth for depth in range(demand.depth + 1))
    cached = prompt * workload.prompts.shared_share if demand.prefix_cache else 0.0
    prefill_s = (prompt - cached) * demand.token_flops / flops
    request_s = output / yielded * step_s + running * prefill_s  # others' prefills hold it up
    captured = running <= demand.graph_requests
    tok_per_s = running * output / request_s
    return Roofline(running, concurrency >= limit, captured, demand.step_tokens, demand.depth, branches, tok_per_s)


def accepted_share(records: Iterable[TrialRecord]) -> float:
    """Chance of acceptance that explains the acceptance lengths seen so far, ``ACCEPTED`` before there are any."""
    chances = []
    for record in records:
        demand = record.forecast.demand if record.forecast else None
        lengths = [item.acceptance_length for item in record.measurements if item.acceptance_length]
        if demand is not None and demand.depth and lengths:
            chance = _chance(statistics.fmean(lengths), demand.depth)
            chances.append(1 - (1 - chance) / BRANCH_MISS ** (_branches(demand) - 1))
    return max(0.0, statistics.median(chances)) if chances else ACCEPTED


def _branches(demand: DecodeDemand) -> float:
    return max(1.0, (demand.step_tokens - 1) / demand.depth) if demand.depth else 1.0


def _chance(length: float, depth: int) -> float:
    """The p at which ``1 + p + ... + p**depth`` is the length, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**n for n in range(depth + 1)) < length else (low, middle)
    return low
