"""Failures: which parameters explain how the launches of a run ended."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from analysis.frames import Run
from analysis.standing import value_text
from bench.engines.protocol import Value
from bench.outcome import OutcomeKind
from bench.records import TrialRecord

MAX_CELLS = 6  # a number with more values than this is cut at its sextiles for the measure
SHUFFLES = 50  # the mean over these is known to about a seventh of its spread, far below what tells pairs apart

Codes: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Explanation:
    """Two parameters (one where only one varies) and how much of the outcomes they explain.

    Attributes:
        share: adjusted mutual information of their cells and the way a trial ended, relative to the entropy of the
            latter: 0 is what shuffled outcomes give (many cells explain much by chance), 1 is everything.
    """

    parameters: tuple[str, ...]
    share: float


def counting(run: Run) -> list[TrialRecord]:
    """The trials of the search that say something about their configuration."""
    return [record for record in run.records if record.outcome.counts]


def explain(run: Run) -> Explanation | None:
    """The pair of parameters that explains the outcomes best; None where nothing varies or all ended alike."""
    records = counting(run)
    kinds = _codes(endings(records))
    if len(np.unique(kinds)) < 2:
        return None
    names = sorted({name for record in records for name in record.candidate.values})
    cells = {name: _codes(_cells([record.candidate.values.get(name) for record in records])) for name in names}
    cells = {name: codes for name, codes in cells.items() if len(np.unique(codes)) > 1}
    if not cells:
        return None
    shuffler = np.random.default_rng(0)  # the same run gives the same map
    shuffled = [shuffler.permutation(kinds) for _ in range(SHUFFLES)]
    if len(cells) == 1:
        (name,) = cells
        return Explanation((name,), _share(cells[name], kinds, shuffled))
    scored = [
        (_share(cells[one] * (cells[other].max() + 1) + cells[other], kinds, shuffled), one, other)
        for one, other in combinations(cells, 2)
    ]
    share, one, other = max(scored)
    return Explanation((one, other), share)


def endings(records: Sequence[TrialRecord]) -> list[str]:
    """How each trial ended: its kind, or its cause where all are of one kind."""
    # Stopping early is no failure: the configuration ran.
    kinds = [OutcomeKind.COMPLETE if r.outcome.kind is OutcomeKind.PRUNED else r.outcome.kind for r in records]
    return [str(r.outcome.cause) for r in records] if len(set(kinds)) == 1 else [str(kind) for kind in kinds]


def _cells(values: Sequence[Value | None]) -> list[Hashable]:
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if len(set(numbers)) <= MAX_CELLS:
        return [value_text(value) for value in values]
    edges = np.quantile(numbers, np.arange(1, MAX_CELLS) / MAX_CELLS)
    return [
        int(np.searchsorted(edges, value)) if isinstance(value, (int, float)) else value_text(value) for value in values
    ]


def _codes(items: Sequence[Hashable]) -> Codes:
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(item, len(numbers)) for item in items], dtype=np.int64)


def _share(cells: Codes, kinds: Codes, shuffled: Sequence[Codes]) -> float:
    chance = float(np.mean([_information(cells, other) for other in shuffled]))
    room = _entropy(kinds) - chance
    return max(0.0, (_information(cells, kinds) - chance) / room) if room > 1e-9 else 0.0


def _information(cells: Codes, kinds: Codes) -> float:
    return _entropy(cells) + _entropy(kinds) - _entropy(cells * (kinds.max() + 1) + kinds)


def _entropy(codes: Codes) -> float:
    shares = np.unique(codes, return_counts=True)[1] / len(codes)
    return float(-(shares * np.log(shares)).sum())
