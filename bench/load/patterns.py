"""Patterns: when requests are sent, named by what they are for."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.load.traces import Arrival

CLOSED, BATCH, TRACE = "closed", "batch", "trace"
RATED = ("poisson", "gamma", "constant")
OPEN = (*RATED, TRACE)


@dataclass(frozen=True)
class Pattern:
    """One pattern of requests.

    Attributes:
        kind: ``closed`` keeps ``concurrency`` requests in flight; ``poisson``, ``gamma`` and ``constant`` send
            ``rate_per_s`` whatever the server does; ``batch`` sends ``requests``, ``concurrency`` at a time, and ends
            with the last of them; ``trace`` sends what was recorded, when it was.
        burstiness: shape of the gamma distribution of gaps: 1 is Poisson, less is burstier, more is more even.
        ramp_s: an open loop's rate grows from zero for so long.
    """

    kind: str
    concurrency: int | None = None
    rate_per_s: float | None = None
    burstiness: float = 1.0
    requests: int | None = None
    ramp_s: float = 0.0
    trace: tuple[Arrival, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.kind == TRACE:
            if not self.trace:
                raise ValueError("pattern trace needs a trace")
        elif self.kind in RATED:
            if not self.rate_per_s or self.rate_per_s <= 0:
                raise ValueError(f"pattern {self.kind} needs a rate above 0, got {self.rate_per_s}")
            if self.burstiness <= 0:
                raise ValueError(f"burstiness {self.burstiness}: expected more than 0 (1 is Poisson)")
        elif self.kind in (CLOSED, BATCH):
            if not self.concurrency or self.concurrency < 1:
                raise ValueError(f"pattern {self.kind} needs a concurrency of 1 or more, got {self.concurrency}")
            if self.kind == BATCH and (not self.requests or self.requests < 1):
                raise ValueError(f"pattern batch needs a number of requests of 1 or more, got {self.requests}")
        else:
            raise ValueError(f"pattern {self.kind!r}: expected one of {', '.join((CLOSED, *OPEN, BATCH))}")

    @property
    def is_open(self) -> bool:
        return self.kind in OPEN

    @property
    def mean_rate_per_s(self) -> float:
        """Of an open loop."""
        if self.trace:
            return len(self.trace) / max(self.trace[-1].due_s, 1e-3)
        return self.rate_per_s or 0.0

    def share(self, shard: int, shards: int) -> Pattern:
        """The part of it that one of several processes does (an open loop's schedule is dealt out instead)."""
        if self.concurrency is None:
            return self
        concurrency = len(range(shard, self.concurrency, shards))
        requests = None if self.requests is None else len(range(shard, self.requests, shards))
        return Pattern(self.kind, concurrency, requests=requests)

    def due_s(self, seed: int) -> Iterator[float]:
        """Seconds from the start at which an open loop's requests are due. The n-th is the sum of n gaps: whatever
        happens to one request, the next is due when it was.
        """
        if self.kind == TRACE:
            yield from (arrival.due_s for arrival in self.trace)
            return
        assert self.rate_per_s is not None
        rng = random.Random(f"arrivals/{seed}")
        rate, shape = self.rate_per_s, self.burstiness
        gaps: Iterator[float]
        if self.kind == "constant":
            gaps = itertools.repeat(1.0)
        elif self.kind == "poisson":
            gaps = (rng.expovariate(1.0) for _ in itertools.count())
        else:
            gaps = (rng.gammavariate(shape, 1 / shape) for _ in itertools.count())
        for requests in itertools.accumulate(gaps):
            # A rate that grows evenly over the ramp has sent rate * t^2 / (2 ramp) requests after t seconds.
            in_ramp = rate * self.ramp_s / 2
            if requests < in_ramp:
                yield math.sqrt(2 * requests * self.ramp_s / rate)
            else:
                yield self.ramp_s + (requests - in_ramp) / rate
