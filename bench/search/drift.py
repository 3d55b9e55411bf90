"""Drift: whether a host still gives what it gave, seen by its baseline launched again.

A fresh host compiles kernels during its first launches, steadily enough that each window looks steady: a baseline on an
H200 read 691 tok/s at first and 912 eleven minutes later (``docs/runs/h200-mtp``). So the baseline is launched once
more after a few trials. Where it reads differently, the values measured before are not comparable with later ones: the
search forgets them, and launches again those among them that still promise something.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from bench.experiment import Experiment
from bench.load.measurement import Interval
from bench.records import TrialRecord
from bench.search import objective

BASELINES = ("baseline", "anchor")
# Launches before the baseline is launched again. The H200 compiled during the first two.
ANCHOR_AFTER = 10
# A shorter search has no launch to spare; its finalists tell.
LEAST_TRIALS = 20
# Relative difference that is taken for a drift, if the windows' intervals lie apart as well. Launches of one
# configuration on one host were seen to differ by 1 to 3 %.
LEAST_CHANGE = 0.05


def anchor_is_due(experiment: Experiment, records: Sequence[TrialRecord]) -> bool:
    """Whether the baseline is to be launched again now."""
    launches = [record for record in records if record.launched and record.outcome.counts]
    measured = [record for record in launches if record.role == "baseline" and record.value is not None]
    anchored = any(record.role == "anchor" for record in launches)
    enough = len(launches) >= ANCHOR_AFTER and experiment.search.trials >= LEAST_TRIALS
    return enough and bool(measured) and not anchored


def differs(experiment: Experiment, one: TrialRecord, other: TrialRecord) -> bool:
    """Whether two launches of one configuration differ by more than their noise."""
    if not one.value or not other.value or abs(other.value / one.value - 1) <= LEAST_CHANGE:
        return False
    first, second = _interval(experiment, one), _interval(experiment, other)
    if first is None or second is None:
        return True
    relative = first.relative_half_width + second.relative_half_width
    return abs(other.value / one.value - 1) > relative


def not_comparable(experiment: Experiment, records: Sequence[TrialRecord]) -> frozenset[int]:
    """Numbers of the trials that were measured before the host changed, as far as the baselines tell."""
    readings = [record for record in records if record.role in BASELINES and record.value is not None]
    changed = [later for earlier, later in pairwise(readings) if differs(experiment, earlier, later)]
    if not changed:
        return frozenset()
    return frozenset(record.number for record in records[: records.index(changed[-1])])


def sentence(experiment: Experiment, records: Sequence[TrialRecord]) -> str | None:
    """What the last anchor showed, for a person; None without a drift."""
    stale = not_comparable(experiment, records)
    before = [record for record in records if record.role in BASELINES and record.value and record.number in stale]
    after = [record for record in records if record.role in BASELINES and record.value and record.number not in stale]
    if not before or not after:
        return None
    return (
        f"the host changed: the baseline read {before[-1].value:.4g} (trial {before[-1].number}) and now "
        f"{after[0].value:.4g} (trial {after[0].number}); a fresh host compiles kernels during its first launches. "
        f"The {len(stale)} trials before are not comparable with what follows, and may be launched again"
    )


def _interval(experiment: Experiment, record: TrialRecord) -> Interval | None:
    """Of the throughput at the deciding level: the noise of the window, whatever the metric."""
    for measurement in record.measurements:
        if measurement.concurrency == objective.level(experiment):
            return measurement.output_tok_per_s
    return None
