"""Standing: which configuration of a run is the best, the baseline, a finalist, and what sets each apart."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from analysis.frames import Objective, Run, excess, metric_interval
from analysis.intervals import pool
from bench.engines.protocol import Value
from bench.load.measurement import Interval, Measurement
from bench.outcome import OutcomeKind
from bench.records import TrialRecord

PARALLEL_FLAGS = ("tp_size", "pp_size", "dp_size", "tensor_parallel_size", "pipeline_parallel_size")


@dataclass(frozen=True)
class Standing:
    """One configuration that is worth comparing.

    Attributes:
        role: ``best``, ``baseline`` or ``finalist``.
        trial: number of its trial in the search.
        launches: the launches that its numbers are taken from: those of the finalists' rounds, else the search's own.
        again: whether it was measured again.
    """

    role: str
    trial: int
    record: TrialRecord
    launches: tuple[TrialRecord, ...]
    again: bool

    @property
    def label(self) -> str:
        if self.role == "baseline":
            return "baseline"
        return f"{self.role}{'' if self.again or self.role != 'best' else ' so far'} (trial {self.trial})"


def baseline(run: Run) -> TrialRecord | None:
    """The baseline's launch, a successful one before any other."""
    found = [record for record in run.all_records if record.role == "baseline"]
    return next((record for record in found if record.measurements), found[0] if found else None)


def best(run: Run) -> TrialRecord | None:
    """The configuration that ``best.json`` names; before it exists the best of those that were measured again, and
    before that the best so far; None without any success."""
    if run.best:
        key, number = run.best.get("key"), run.best.get("trial")
        named = [record for record in run.all_records if record.config.key == key or record.number == number]
        named.sort(key=lambda record: (record.config.key != key, record.value is None))
        if named:
            return named[0]
    return _best_again(run) or best_so_far(run.records, run.objective)


def best_so_far(records: Sequence[TrialRecord], objective: Objective) -> TrialRecord | None:
    """The best complete trial that keeps the limits; where none does, the one that is nearest to them."""
    sign = -1.0 if objective.larger_is_better else 1.0
    measured = [
        (max(0.0, 0.0, *(excess(record, objective) or {}).values()), sign * record.value, record.number, record)
        for record in records
        if record.value is not None and record.outcome.kind is OutcomeKind.COMPLETE
    ]
    return min(measured, key=lambda item: item[:3])[3] if measured else None


def _best_again(run: Run) -> TrialRecord | None:
    """The best by its fresh launches alone; the search's own values are too good to be true."""
    groups: dict[str, list[TrialRecord]] = {}
    for record in run.finalist_records:
        if record.value is not None:
            groups.setdefault(record.config.key, []).append(record)
    means = [
        replace(group[0], value=statistics.fmean(item.value or 0.0 for item in group)) for group in groups.values()
    ]
    found = best_so_far(means, run.objective)
    if found is None:
        return None
    searched = [item for item in run.records if _same(item, found) and item.value is not None]
    return searched[0] if searched else groups[found.config.key][0]


def standings(run: Run) -> list[Standing]:
    """Best, baseline and the other finalists, in this order; each configuration once."""
    chosen: dict[str, tuple[str, TrialRecord]] = {}
    first_baseline, winner = baseline(run), best(run)
    if winner is not None:
        role = "baseline" if first_baseline is not None and _same(winner, first_baseline) else "best"
        chosen[winner.config.key] = (role, winner)
    if first_baseline is not None:
        chosen.setdefault(first_baseline.config.key, ("baseline", first_baseline))
    for record in run.finalist_records:
        if record.role != "ablation":
            chosen.setdefault(record.config.key, ("finalist", record))
    return [found for role, record in chosen.values() if (found := _standing(run, role, record)).launches]


def by_load(standings: Sequence[Standing], metric: str) -> dict[tuple[str, int], Interval]:
    """A metric by configuration key and concurrency, over all launches of each configuration."""
    levels = sorted({item.concurrency for standing in standings for item in measured(standing) if item.concurrency})
    found: dict[tuple[str, int], Interval] = {}
    for level in levels:
        groups = {
            standing.record.config.key: [
                value
                for item in measured(standing)
                if item.concurrency == level and (value := metric_interval(item, metric)) is not None
            ]
            for standing in standings
        }
        found |= {(key, level): interval for key, interval in pool(groups).items()}
    return found


def measured(standing: Standing) -> list[Measurement]:
    """Every valid measurement of a configuration."""
    return [item for launch in standing.launches for item in launch.measurements if item.valid]


def gpus(record: TrialRecord) -> int:
    """GPUs that one server takes, by its parallel flags."""
    flags = dict(record.config.flags)
    count = 1
    for name in PARALLEL_FLAGS:
        value = flags.get(name)
        if isinstance(value, int) and not (name == "dp_size" and flags.get("enable_dp_attention")):
            count *= value
    return count


def settings(record: TrialRecord, reference: TrialRecord | None) -> str:
    """What sets a configuration apart from another: ``mem_fraction_static 0.9, disable_radix_cache off``."""
    mine = _values(record)
    other = {} if reference is None else _values(reference)
    parts = [f"{name} {value_text(value)}" for name, value in mine.items() if other.get(name) != value]
    parts += [f"{name} default" for name in other if name not in mine]
    return ", ".join(parts) or ("engine's defaults" if not mine else "as the baseline")


def value_text(value: Value | str | None) -> str:
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _values(record: TrialRecord) -> Mapping[str, Value | str]:
    return {**dict(record.config.flags), **dict(record.config.env)}


def _same(one: TrialRecord, other: TrialRecord) -> bool:
    return one.config.key == other.config.key


def _standing(run: Run, role: str, record: TrialRecord) -> Standing:
    again = tuple(item for item in run.finalist_records if _same(item, record) and item.measurements)
    search = tuple(item for item in run.records if _same(item, record) and item.measurements)
    number = next((item.number for item in run.records if _same(item, record)), record.number)
    return Standing(role, number, record, again or search, bool(again))
