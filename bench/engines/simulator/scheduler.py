"""Scheduler: continuous batching as SGLang does it, one step at a time, in virtual time.

Prefill goes before decode, in chunks; admission is limited by running requests, state slots (through
``max_running_requests``) and an estimate of the tokens that running requests still need; when the KV pool is full,
requests are retracted. Sources: sglang 0.5.15 managers/schedule_policy.py and schedule_batch.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.engines.sglang.memory_plan import Plan
from bench.engines.sglang.settings import Settings
from bench.engines.simulator.acceptance import Acceptance
from bench.engines.simulator.prefix_cache import PrefixCache
from bench.engines.simulator.step_time import StepTimes

# New-token ratio: what share of the tokens that requests may still generate is kept free (managers/scheduler.py).
INITIAL_NEW_TOKEN_RATIO = 0.7
LEAST_NEW_TOKEN_FACTOR = 0.14
NEW_TOKEN_DECAY_STEPS = 600
# Output beyond this is not reserved at admission (SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION).
CLIPPED_NEW_TOKENS = 4096
# A prefix of a hybrid model is found again where a state was kept: every mamba_track_interval tokens.
HYBRID_BLOCK_TOKENS = 256
BLOCK_TOKENS = 16


@dataclass(slots=True, eq=False)
class Request:
    """One request, as it passes through.

    Attributes:
        computed: prompt tokens in the KV pool so far, cached ones included.
        verify_steps, correct: of speculation; ``histogram`` counts steps by accepted drafts.
    """

    name: str
    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    keys: tuple[int, ...] = ()
    acceptance: Acceptance = field(default_factory=Acceptance)
    computed: int = 0
    cached: int = 0
    output: int = 0
    verify_steps: int = 0
    histogram: list[int] = field(default_factory=list)
    retractions: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    aborted: bool = False

    @property
    def context(self) -> int:
        return self.computed + self.output


@dataclass(slots=True)
class StepResult:
    """What one step did.

    Attributes:
        kind: ``prefill``, ``decode`` or ``idle``.
        produced: requests with how many tokens each got.
        new_requests, new_tokens, cached_tokens: of a prefill.
        retracted: requests that were thrown back before this step.
    """

    kind: str
    duration_s: float = 0.0
    produced: list[tuple[Request, int]] = field(default_factory=list)
    new_requests: int = 0
    new_tokens: int = 0
    cached_tokens: int = 0
    retracted: int = 0
    retracted_tokens: int = 0
    ratio_before: float = 0.0


class Scheduler:
    """One server's scheduler.

    Args:
        noise: relative standard deviation of step times.
        rng: the only source of chance.
    """

    def __init__(self, plan: Plan, times: StepTimes, *, hybrid: bool, rng: random.Random, noise: float = 0.0) -> None:
        self.plan = plan
        self.settings: Settings = plan.settings
        self.times = times
        self.random = rng
        self.noise = noise
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.chunked: Request | None = None
        self.used_tokens = 0
        self.ratio = self.initial_ratio = min(1.0, INITIAL_NEW_TOKEN_RATIO * self.settings.schedule_conservativeness)
        self.least_ratio = self.initial_ratio * LEAST_NEW_TOKEN_FACTOR
        host = self.settings.hicache_ratio if self.settings.hierarchical else 0.0
        self.cache = PrefixCache(block_tokens(self.settings, hybrid=hybrid), int(plan.kv_tokens * (1 + host)))
        self.decode_steps = 0
        self.generated = 0
        self.verify_steps = 0
        self.retracted = 0

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running and self.chunked is None

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Take a request out, e.g. because its client went away."""
        if request in self.running:
            self.running.remove(request)
            self.used_tokens -= request.context
        elif request is self.chunked:
            self.chunked = None
            self.used_tokens -= request.context
        elif request in self.waiting:
            self.waiting.remove(request)
        request.aborted = True

    def flush(self) -> bool:
        """Empty the prefix cache and start the counters anew; False while requests are pending."""
        if not self.idle:
            return False
        self.cache.clear()
        self.generated = self.verify_steps = 0
        return True

    def step(self, now_s: float) -> StepResult:
        """Run one step; its effects hold at ``now_s`` plus its duration."""
        batch = self._admit(now_s)
        return self._prefill(batch, now_s) if batch else self._decode(now_s) if self.running else StepResult("idle")

    # Prefill

    def _admit(self, now_s: float) -> list[tuple[Request, int]]:
        """Requests for the next prefill, each with how many tokens of it: as many as chunk, pool and slots allow."""
        if self.chunked is None and not self.waiting:
            return []
        chunk = self.settings.chunked_prefill_size
        budget = chunk if chunk > 0 else 1 << 60
        inputs = self.settings.max_prefill_tokens
        batch: list[tuple[Request, int]] = []
        if self.chunked is not None:
            request = self.chunked
            part = min(budget, request.prompt_tokens + request.output - request.computed)
            batch.append((request, part))
            budget -= part
            inputs -= part
        self._order()
        free = self.plan.kv_tokens - self.used_tokens - self._still_needed()
        limit = self.plan.max_running_requests - len(self.running) - (self.chunked is not None)
        while self.waiting and limit > 0 and budget > 0 and inputs > 0:
            request = self.waiting[0]
            whole = request.prompt_tokens + request.output
            cached = self.cache.match(request.keys, whole) if request.keys else 0
            wanted = whole - cached
            reserve = wanted + min(request.output_tokens - request.output, CLIPPED_NEW_TOKENS)
            if reserve > free and (self.running or batch or reserve > self.plan.kv_tokens):
                if not self.running and not batch and wanted < self.plan.kv_tokens:
                    pass  # alone in the pool: let it run as far as it gets
                else:
                    break
            del self.waiting[0]
            part = min(budget, wanted)
            request.cached = cached if request.admitted_s is None else request.cached
            request.computed = cached
            self.used_tokens += cached
            if request.admitted_s is None:
                request.admitted_s = now_s
            batch.append((request, part))
            free -= reserve
            budget -= part
            inputs -= part
            limit -= 1
        return batch

    def _order(self) -> None:
        policy = self.settings.schedule_policy
        if policy == "lpm" and self.cache.block_tokens and len(self.waiting) > 1:
            match = self.cache.match
            self.waiting.sort(key=lambda request: -match(request.keys, request.prompt_tokens))
        elif policy in ("lof", "hrrn"):
            self.waiting.sort(key=lambda request: -request.output_tokens)
        elif policy == "shortest-prefill-first":
            self.waiting.sort(key=lambda request: request.prompt_tokens)
        elif policy == "random":
            self.random.shuffle(self.waiting)

    def _still_needed(self) -> int:
        ratio = self.ratio
        return int(sum(min(item.output_tokens - item.output, CLIPPED_NEW_TOKENS) for item in self.running) * ratio)

    def _prefill(self, batch: list[tuple[Request, int]], now_s: float) -> StepResult:
        result = StepResult("prefill", new_requests=len(batch))
        pairs = 0.0
        self.chunked = None
        for request, part in batch:
            pairs += part * (request.computed + part / 2)
            result.new_tokens += part
            result.cached_tokens += request.cached if request.computed == request.cached else 0
            request.computed += part
            self.used_tokens += part
            if request.computed < request.prompt_tokens + request.output:
                self.chunked = request
                continue
            request.computed -= request.output  # computed anew after a retraction: still counted as output
            if request.keys:
                self.cache.insert(request.keys, self.used_tokens)
            self._produce(request, 1, result)
        result.duration_s = self.times.prefill_s(result.new_tokens, pairs) * self._noise()
        self._settle(result, now_s + result.duration_s)
        return result

    # Decode

    def _decode(self, now_s: float) -> StepResult:
        result = StepResult("decode")
        self._make_room(result)
        requests = len(self.running)
        if not requests:
            return result
        result.duration_s = self.times.decode_s(requests, self.used_tokens) * self._noise()
        self.decode_steps += 1
        decay = (self.initial_ratio - self.least_ratio) / NEW_TOKEN_DECAY_STEPS
        self.ratio = max(self.least_ratio, self.ratio - decay)
        if self.settings.speculative:
            self._verify(result)
        else:
            for request in self.running:
                self._produce(request, 1, result)
        self._settle(result, now_s + result.duration_s)
        return result

    def _verify(self, result: StepResult) -> None:
        draw = self.random.random
        for request in self.running:
            tokens = request.acceptance.tokens(draw())
            request.verify_steps += 1
            if not request.histogram:
                request.histogram = [0] * len(request.acceptance.cumulative)
            request.histogram[tokens - 1] += 1
            self._produce(request, tokens, result)
        self.verify_steps += len(self.running)

    def _make_room(self, result: StepResult) -> None:
        """Throw back those that have generated least until the next step fits."""
        per_request = max(1, self.settings.draft_tokens)
        result.ratio_before = self.ratio
        while len(self.running) > 1 and self.used_tokens + len(self.running) * per_request > self.plan.kv_tokens:
            victim = min(self.running, key=lambda request: (request.output, -request.prompt_tokens))
            self.running.remove(victim)
            self.used_tokens -= victim.context
            result.retracted_tokens += victim.context
            victim.computed = 0
            victim.retractions += 1
            self.waiting.insert(0, victim)
            result.retracted += 1
        if result.retracted:
            self.retracted += result.retracted
            done = sum(request.output for request in self.running)
            total = sum(request.output_tokens for request in self.running) or 1
            self.ratio = min(1.0, (done + 20 * len(self.running)) / (total + 1))

    def _produce(self, request: Request, tokens: int, result: StepResult) -> None:
        """Give a request its tokens, no more than it asked for."""
        tokens = min(tokens, request.output_tokens - request.output)
        request.output += tokens
        self.used_tokens += tokens
        self.generated += tokens
        result.produced.append((request, tokens))

    def _settle(self, result: StepResult, then_s: float) -> None:
        """Stamp and move the requests of a step that ends at ``then_s``."""
        finished = False
        for request, _ in result.produced:
            if request.first_token_s is None:
                request.first_token_s = then_s
            if request.output >= request.output_tokens:
                request.finished_s = then_s
                self.used_tokens -= request.context
                finished = True
            elif result.kind == "prefill":
                self.running.append(request)
        if finished and result.kind == "decode":
            self.running = [request for request in self.running if request.finished_s is None]

    def _noise(self) -> float:
        return max(0.5, 1 + self.noise * self.random.gauss(0.0, 1.0)) if self.noise else 1.0


def block_tokens(settings: Settings, *, hybrid: bool) -> int:
    """Tokens of the pieces in which a prefix is found again, 0 where none is."""
    if not settings.finds_prefixes(hybrid=hybrid):
        return 0
    return HYBRID_BLOCK_TOKENS if hybrid else BLOCK_TOKENS


def run_closed_loop(
    scheduler: Scheduler,
    concurrency: int,
    make_request: Callable[[int, float], Request],
    *,
    until_s: float,
    start_s: float = 0.0,
) -> list[Request]:
    """Keep ``concurrency`` requests in flight until ``until_s``; returns those that finished, in order.

    Args:
        make_request: a request by number and arrival.
    """
    finished: list[Request] = []
    now, number = start_s, 0
    for _ in range(concurrency):
        scheduler.submit(make_request(number, now))
        number += 1
    while now < until_s:
        result = scheduler.step(now)
        if result.kind == "idle":
            break
        now += result.duration_s
        for request, _ in result.produced:
            if request.finished_s is not None:
                finished.append(request)
                scheduler.submit(make_request(number, now))
                number += 1
    return finished
