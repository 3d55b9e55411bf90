"""Failures: which parameters explain how the launches of a run ended."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from analysis.frames import Run
from analysis.standing import value_text
from bench.engines.protocol import Value
from bench.outcome import OutcomeKind
from bench.records import TrialRecord

MAX_CELLS = 6  # a number with more values than this is cut at its quantiles for the measure


@dataclass(frozen=True)
class Explanation:
    """Two parameters (one where only one varies) and how much of the outcomes they explain.

    Attributes:
        share: mutual information of their cells and the outcome kind over the outcome's entropy, 0 to 1, less what as
            many cells would explain by chance (Miller and Madow's correction).
    """

    parameters: tuple[str, ...]
    share: float


def counting(run: Run) -> list[TrialRecord]:
    """The trials of the search that say something about their configuration."""
    return [record for record in run.records if record.outcome.counts]


def explain(run: Run) -> Explanation | None:
    """The pair of parameters that explains the outcomes best; None where nothing varies or nothing failed."""
    records = counting(run)
    kinds = [_ended(record) for record in records]
    if len(set(kinds)) < 2:
        return None
    names = sorted({name for record in records for name in record.candidate.values})
    cells = {name: _cells([record.candidate.values.get(name) for record in records]) for name in names}
    cells = {name: values for name, values in cells.items() if len(set(values)) > 1}
    if not cells:
        return None
    if len(cells) == 1:
        (name,) = cells
        return Explanation((name,), _share(cells[name], kinds))
    scored = [
        (_share(list(zip(cells[one], cells[other], strict=True)), kinds), one, other)
        for one, other in combinations(cells, 2)
    ]
    share, one, other = max(scored, key=lambda item: (item[0], item[1], item[2]))
    return Explanation((one, other), share)


def _ended(record: TrialRecord) -> str:
    # Stopping early is no failure: the configuration ran.
    kind = record.outcome.kind
    return "ran" if kind in (OutcomeKind.COMPLETE, OutcomeKind.PRUNED) else str(kind)


def _cells(values: Sequence[Value | None]) -> list[Hashable]:
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if len(set(numbers)) <= MAX_CELLS:
        return [value_text(value) for value in values]
    edges = np.quantile(numbers, [0.25, 0.5, 0.75])
    return [
        int(np.searchsorted(edges, value)) if isinstance(value, (int, float)) else value_text(value) for value in values
    ]


def _share(cells: Sequence[Hashable], kinds: Sequence[str]) -> float:
    entropy = _entropy(kinds)
    joint = _entropy(list(zip(cells, kinds, strict=True)))
    information = _entropy(cells) + entropy - joint
    chance = (len(set(cells)) - 1) * (len(set(kinds)) - 1) / (2 * len(kinds))
    return max(0.0, (information - chance) / entropy)


def _entropy(items: Sequence[Hashable]) -> float:
    return -sum(count / len(items) * math.log(count / len(items)) for count in Counter(items).values())
