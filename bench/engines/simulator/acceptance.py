"""Acceptance: how many tokens one verify step of speculative decoding yields."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from bench.engines.sglang.settings import Settings

# Probability that a drafted token is accepted, given that those before it were, and what each further position keeps
# of it. Assumptions within published ranges; real acceptance depends on the text. Two MTP steps of the 27B models are
# reported to yield 2.3 to 2.6 tokens, three 2.7 to 3.2.
FIRST_PROBABILITY = {"EAGLE": 0.82, "EAGLE3": 0.80, "STANDALONE": 0.75, "NGRAM": 0.45, "DFLASH": 0.80}
DEFAULT_PROBABILITY = 0.8
POSITION_FACTOR = 0.95
# A second, third … branch at a position halves what the ones before it missed, about.
BRANCH_MISS = 0.6
# Sampling at temperature 1 accepts this share less than greedy decoding (assumption).
TEMPERATURE_COST = 0.1


@dataclass(frozen=True)
class Acceptance:
    """Distribution of the tokens of one verify step.

    Attributes:
        cumulative: probability of at most 1, 2, … tokens.
        simulated: the engine was told to (SGLANG_SIMULATE_ACC_LEN), so the number says nothing about any text.
    """

    cumulative: tuple[float, ...] = (1.0,)
    simulated: bool = False

    @classmethod
    def of(
        cls,
        settings: Settings,
        *,
        temperature: float = 0.0,
        first_probability: float | None = None,
        simulated_length: float | None = None,
    ) -> Acceptance:
        """Acceptance of a configuration.

        Args:
            first_probability: of the first drafted token, where a text or a model is known to have another one.
            simulated_length: mean tokens of a step to pretend (SGLANG_SIMULATE_ACC_LEN).
        """
        if not settings.speculative:
            return cls()
        depth = settings.draft_tokens - 1
        if settings.algorithm not in ("NGRAM", "DFLASH"):
            depth = min(settings.steps, depth)
        if simulated_length is not None:
            return cls._simulated(min(simulated_length, depth + 1))
        probability = first_probability or FIRST_PROBABILITY.get(settings.algorithm or "", DEFAULT_PROBABILITY)
        probability *= 1 - TEMPERATURE_COST * min(1.0, temperature)
        branches = max(1.0, min(settings.topk, (settings.draft_tokens - 1) / max(1, depth)))
        probability = 1 - (1 - probability) * BRANCH_MISS ** (branches - 1)
        chances = [probability * POSITION_FACTOR**position for position in range(depth)]
        reached = [1.0, *accumulate(chances, lambda before, chance: before * chance)]
        return cls((*(1 - beyond for beyond in reached[1:]), 1.0))

    @classmethod
    def _simulated(cls, length: float) -> Acceptance:
        """As SGLang's match-expected method: the whole number below, or the one above as often as the mean wants."""
        below = math.floor(length)
        cumulative = [0.0] * (below - 1) + [1 - (length - below)]
        if length > below:
            cumulative.append(1.0)
        return cls(tuple(cumulative), simulated=True)

    @property
    def mean(self) -> float:
        """Mean tokens of a step."""
        return len(self.cumulative) - sum(self.cumulative[:-1])

    @property
    def is_certain(self) -> bool:
        """Whether every step yields the same."""
        return all(value in (0.0, 1.0) for value in self.cumulative)

    def tokens(self, uniform: float) -> int:
        """Tokens of one step, from a number drawn evenly from 0 to 1."""
        return bisect_right(self.cumulative, uniform) + 1
