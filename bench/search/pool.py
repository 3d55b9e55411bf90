"""Pool: candidates that are cheap to forecast and dear to launch, ranked by what a launch of each promises.

A candidate costs half a millisecond to write in canonical form and to forecast, and minutes to launch. So thousands
are drawn, and the one with the largest expected improvement is launched: expected by a surrogate over what was
measured, whose prior mean is the roofline of the forecast.
"""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.engines.protocol import Calibration, Candidate, Engine, Forecast, RefusedError, ServerConfig, Value
from bench.experiment import Experiment
from bench.outcome import OUT_OF_MEMORY
from bench.records import TrialRecord
from bench.search import feasibility, objective
from bench.search.roofline import Roofline, accepted_share, roofline
from bench.search.space import Space
from bench.search.surrogate import Array, Encoding, Surrogate, distances, expected_improvement, success_chance

DRAWN = 1500  # random points at the start; a space of no more points is taken whole
DEFAULT_SHARE = 0.7  # of the parameters of half of them, that are left to the engine
# What a setting beyond the engine's default is taken to cost (of the logarithm) until it proves itself: defaults are
# chosen with care, and of equals the simplest is wanted.
SETTING_COST = 0.01
ASCENTS = 3  # rounds of neighbours of the most promising, at the start
# Climbs on the prior alone, at the start: each from the best of so many random points, one change at a time. They find
# the corners that take several settings at once, which no random point shows.
CLIMBS, CLIMB_FROM, CLIMB_STEPS = 8, 150, 8
MUTATIONS = 60  # of each parent, beside its neighbours
PARENTS = (3, 2)  # whose neighbours join in each round, of the start and later
FRONT = 500  # of the ranking, that are forecast anew when launches teach something
LOG_RANGE = 8.0  # a parameter whose values span at least this factor is taken logarithmically
LEAST_NOISE = 0.01  # relative; launches of one configuration differ by more than their windows tell
# Chance that a launch succeeds, by the forecast's verdict, before any launch has shown it.
SUCCESS = {"fits": 0.95, "edge": 0.6, "does_not_fit": 0.02, "refused": 0.02}
PHYSICAL_NUMBERS, PHYSICAL_CODES = 6, 3
# A chance of success below which a launch is made only when little else is left to learn.
UNLIKELY, LAST = 0.25, 1e-3
# Of that chance, where the forecast leaves less memory than to a launch that ran out of it. It is whole again with as
# much more as a host takes that no forecast sees (the simulator's hosts: up to 1 GiB; of real ones an assumption).
PAST_EDGE, UNSEEN_BYTES = 0.05, float(1 << 30)


@dataclass
class _Entry:
    candidate: Candidate
    config: ServerConfig
    forecast: Forecast | None = None
    roofline: Roofline | None = None


class Pool:
    """Candidates of one study.

    Args:
        seed: of what is drawn.
    """

    def __init__(self, experiment: Experiment, engine: Engine, space: Space, seed: int) -> None:
        self._experiment = experiment
        self._engine = engine
        self._space = space
        self._seed = seed
        self._entries: dict[str, _Entry] = {}
        self._calibration, self._accepted = Calibration(), 0.0
        self._expanded: set[str] = set()
        self._ranking: list[_Entry] = []
        self._stale: frozenset[int] = frozenset()

    def choose(
        self,
        records: Sequence[TrialRecord],
        seen: Iterable[str],
        calibration: Calibration,
        stale: frozenset[int] = frozenset(),
    ) -> Candidate | None:
        """The most promising candidate that was not seen; None when the pool holds no other.

        Args:
            records: of the search so far.
            seen: keys of configurations that must not be launched again.
            stale: numbers of the records whose values are not comparable any more.
        """
        self._stale = stale
        accepted, done = accepted_share(records), set(seen)
        rounds, parents = 1, PARENTS[1]
        if not self._entries:
            self._draw()
            rounds, parents = ASCENTS, PARENTS[0]
            self._foresee(calibration, accepted)
            self._climb()
            self._rank(records, done)
        for _ in range(rounds):
            self._expand(records, parents)
            self._foresee(calibration, accepted)
            self._rank(records, done)
        for entry in self._ranking:
            if feasibility.dominating(entry.candidate, records, self._experiment.space) is None:
                return entry.candidate
        return None

    def _draw(self) -> None:
        whole = self._space.size is not None and self._space.size <= 2 * DRAWN
        if whole:
            self._add(self._space.enumerate())
        else:
            self._add(self._space.sample(DRAWN // 2, seed=self._seed))
            self._add(self._space.sample(DRAWN // 2, seed=self._seed, default_share=DEFAULT_SHARE))
        self._add(Candidate(dict(recipe)) for recipe in self._experiment.space.recipes)
        self._columns = _Columns([entry.config for entry in self._entries.values()])

    def _climb(self) -> None:
        """Take in what climbs on the prior pass by."""
        generator = random.Random(self._seed)
        drawn = list(self._entries.values())
        if self._space.size is not None and self._space.size <= len(drawn):
            return
        for _ in range(CLIMBS):
            here = max(generator.sample(drawn, min(CLIMB_FROM, len(drawn))), key=_promise)
            for _ in range(CLIMB_STEPS):
                best = max(self._around(here.config.key, here.candidate), key=_promise, default=here)
                if _promise(best) <= _promise(here):
                    break
                here = best

    def _around(self, key: str, candidate: Candidate) -> list[_Entry]:
        """Take in the points around one, once, with their forecasts."""
        if key in self._expanded:
            return []
        self._expanded.add(key)
        before = len(self._entries)
        self._add(self._space.neighbours(candidate, seed=self._seed))
        self._add(self._space.mutations(candidate, MUTATIONS, seed=self._seed + len(self._expanded)))
        added = list(itertools.islice(self._entries.values(), before, None))
        for entry in added:
            entry.forecast, entry.roofline = self._foreseen(entry.config)
        return added

    def _add(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            try:
                config = self._engine.canonical(candidate)
            except RefusedError:
                continue
            if config.key not in self._entries and self._space.contains(candidate):
                self._entries[config.key] = _Entry(candidate, config)

    def _expand(self, records: Sequence[TrialRecord], parents: int) -> None:
        """Take in the neighbours of the most promising and of the best measured."""
        measured = sorted(
            (
                record
                for record in records
                if record.value is not None
                and record.number not in self._stale
                and self._space.contains(record.candidate)
            ),
            key=lambda record: -_goodness(self._experiment, record.value or 0.0),
        )
        unexpanded = (entry for entry in self._ranking if entry.config.key not in self._expanded)
        found = [(entry.config.key, entry.candidate) for entry in itertools.islice(unexpanded, parents)]
        fresh = [(record.config.key, record.candidate) for record in measured[:parents]]
        found += fresh
        for key, candidate in dict(found).items():
            self._around(key, candidate)

    def _foresee(self, calibration: Calibration, accepted: float) -> None:
        """Forecast what is new, and the front again once launches have taught something that matters: what stands
        far behind does not come to the front by a GiB."""
        stale = _rounded(calibration) != _rounded(self._calibration)
        again = abs(accepted - self._accepted) > 0.01
        if stale:
            self._calibration = calibration
        if again:
            self._accepted = accepted
        front = {entry.config.key for entry in self._ranking[:FRONT]}
        for entry in self._entries.values():
            if entry.forecast is None or (stale and entry.config.key in front):
                entry.forecast, entry.roofline = self._foreseen(entry.config)
            elif again:
                entry.roofline = self._roofline(entry.forecast)

    def _foreseen(self, config: ServerConfig) -> tuple[Forecast, Roofline | None]:
        if self._experiment.search.forecast == "off":
            return Forecast("fits"), None
        forecast = self._engine.forecast(config, self._calibration)
        return forecast, self._roofline(forecast)

    def _roofline(self, forecast: Forecast) -> Roofline | None:
        experiment = self._experiment
        level = objective.level(experiment)
        return roofline(forecast, experiment.hardware, experiment.workload, level, self._accepted)

    def _rank(self, records: Sequence[TrialRecord], done: set[str]) -> None:
        """Put those that can be launched in order, most promising first."""
        pruning = self._experiment.search.forecast == "prune"
        entries = [
            entry
            for entry in self._entries.values()
            if entry.config.key not in done
            and entry.forecast is not None
            and not (pruning and entry.forecast.verdict in ("does_not_fit", "refused"))
        ]
        self._ranking = []
        if not entries:
            return
        tried = [
            (record, _Entry(record.candidate, record.config, *self._foreseen(record.config)))
            for record in records
            if record.launched and record.outcome.counts
        ]
        scores = self._scores(entries, tried)
        self._ranking = [entries[index] for index in np.argsort(-scores)]

    def _scores(self, entries: Sequence[_Entry], tried: Sequence[tuple[TrialRecord, _Entry]]) -> Array:
        prior = np.array([_prior(entry) for entry in entries])
        new = self._columns.encode(entries)
        measured = [
            (record, entry, score, _noise(record, self._experiment))
            for record, entry in tried
            if record.number not in self._stale
            and (score := objective.score(self._experiment, record.measurements)) is not None
        ]
        chance = self._success(entries, new, tried)
        if not measured:
            return prior + np.log(chance)
        everything = [entry for _, entry, _, _ in measured]
        seen = self._columns.encode(everything)
        seen_gaps, gaps = distances(seen, seen), distances(new, seen)
        noise = np.array([deviation for *_, deviation in measured])
        base = np.array([_prior(entry) for entry in everything])

        meets, meets_seen = np.ones(len(entries)), np.array([record.outcome.started for record, *_ in measured])
        for index in range(len(self._experiment.objective.limits)):
            room = np.array([-math.log1p(min(max(score.excess[index][1], -0.99), 1e3)) for *_, score, _ in measured])
            model = Surrogate(seen_gaps, seen.physical, room - base, noise * 3)
            meets = meets * model.predict(gaps).chance_above(-prior)
            meets_seen = meets_seen & (room >= 0)
        values = np.array([_goodness(self._experiment, score.value) for *_, score, _ in measured])
        model = Surrogate(seen_gaps, seen.physical, values - base, noise)
        if not meets_seen.any():
            return meets * chance
        smoothed = (model.predict(seen_gaps).mean + base)[meets_seen]
        gain = expected_improvement(model.predict(gaps).shifted(prior), float(smoothed.max()))
        return gain * meets * np.where(chance < UNLIKELY, chance * LAST, chance)

    def _success(self, entries: Sequence[_Entry], new: Encoding, tried: Sequence[tuple[TrialRecord, _Entry]]) -> Array:
        advise = self._experiment.search.forecast != "prune"
        prior = np.array([_chance(entry, advise) for entry in entries])
        if not tried:
            return prior
        seen = self._columns.encode([entry for _, entry in tried])
        chance = success_chance(
            distances(seen, seen),
            distances(new, seen),
            np.array([float(record.outcome.started) for record, _ in tried]),
            np.array([_chance(entry, advise) for _, entry in tried]),
            prior,
        )
        lowest = max((_margin(entry) for record, entry in tried if _ran_out(record, entry)), default=None)
        if lowest is not None:
            more = np.array([_margin(entry) for entry in entries]) - lowest
            chance = chance * np.clip(more / UNSEEN_BYTES, PAST_EDGE, 1.0)
        return chance


class _Columns:
    """How configurations are written as numbers: flags and variables, and what the forecast says of them."""

    def __init__(self, configs: Sequence[ServerConfig]) -> None:
        values: dict[str, set[Value]] = {}
        for config in configs:
            for name, value in _items(config).items():
                values.setdefault(name, set()).add(value)
        self._numbers: dict[str, tuple[float, float, bool]] = {}
        self._codes: list[str] = []
        for name, found in sorted(values.items()):
            if all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in found):
                low, high = min(map(float, found)), max(map(float, found))  # type: ignore[arg-type]
                log = low > 0 and high / low >= LOG_RANGE
                self._numbers[name] = (math.log(low), math.log(high), True) if log else (low, high, False)
            else:
                self._codes.append(name)
        self._rows: dict[str, tuple[list[float], list[float]]] = {}

    def encode(self, entries: Sequence[_Entry]) -> Encoding:
        rows = [self._row(entry.config) for entry in entries]
        numbers = [row[0] + _physics(entry) for row, entry in zip(rows, entries, strict=True)]
        codes = [[*row[1], *_regime(entry)] for row, entry in zip(rows, entries, strict=True)]
        flags, physical = len(self._numbers), PHYSICAL_NUMBERS
        groups = np.repeat([0.0, 1.0, 0.0, 1.0, 0.0], [flags, physical, len(self._codes), PHYSICAL_CODES - 1, 1])
        return Encoding(np.array(numbers), np.array(codes), groups)

    def _row(self, config: ServerConfig) -> tuple[list[float], list[float]]:
        if config.key not in self._rows:
            items = _items(config)
            numbers = [self._number(name, items.get(name)) for name in self._numbers]
            codes = [float(zlib.crc32(str(items[name]).encode())) if name in items else -1.0 for name in self._codes]
            self._rows[config.key] = (numbers, codes)
        return self._rows[config.key]

    def _number(self, name: str, value: Value | None) -> float:
        low, high, log = self._numbers[name]
        if value is None or not isinstance(value, (int, float)):
            return math.nan
        return ((math.log(max(value, 1e-9)) if log else value) - low) / ((high - low) or 1.0)


def _items(config: ServerConfig) -> Mapping[str, Value]:
    flags = {name: str(value) if isinstance(value, list) else value for name, value in config.flags}
    return {**flags, **dict(config.env)}


def _physics(entry: _Entry) -> list[float]:
    found = entry.roofline
    if found is None:
        return [0.0] * PHYSICAL_NUMBERS
    return [
        math.log(found.tok_per_s) / 3,
        math.log(found.running) / 3,
        found.step_tokens / 8,
        found.depth / 5,
        found.branches / 4,
        math.log(found.running * found.step_tokens) / 3,
    ]


def _regime(entry: _Entry) -> list[float]:
    """Whether the batch is within what was captured, whether it speculates, and what success may depend on: these, the
    verdict, and whether the server is filled to its limit."""
    found, verdict = entry.roofline, entry.forecast.verdict if entry.forecast else ""
    if found is None:
        return [0.0] * PHYSICAL_CODES
    speculates = float(found.step_tokens > 1)
    return [float(found.captured), speculates, 4.0 * (verdict == "edge") + 2.0 * found.saturated + speculates]


def _prior(entry: _Entry) -> float:
    cost = SETTING_COST * (len(entry.config.flags) + len(entry.config.env))
    return (math.log(entry.roofline.tok_per_s) if entry.roofline else 0.0) - cost


def _promise(entry: _Entry) -> float:
    """What the prior alone says of a candidate."""
    return _prior(entry) + math.log(_chance(entry, advise=False))


def _margin(entry: _Entry) -> float:
    margin = entry.forecast.margin_bytes if entry.forecast else None
    return math.inf if margin is None else margin


def _ran_out(record: TrialRecord, entry: _Entry) -> bool:
    """Whether a launch failed for want of memory: by its own words, or because the forecast left it none (a server
    whose pools come out empty may start, and then serve nothing)."""
    failed = not record.outcome.started
    return record.outcome.cause in OUT_OF_MEMORY or (failed and _margin(entry) <= 0)


def _chance(entry: _Entry, advise: bool) -> float:
    return SUCCESS.get(entry.forecast.verdict, 0.9) if entry.forecast and not advise else SUCCESS["fits"]


def _goodness(experiment: Experiment, value: float) -> float:
    """Logarithm of the objective, larger is better."""
    return math.log(max(value, 1e-12)) * (1 if objective.maximized(experiment.objective) else -1)


def _noise(record: TrialRecord, experiment: Experiment) -> float:
    """Relative standard deviation of a trial's value: half the half-width of its window's 95 % interval."""
    for item in record.measurements:
        if item.concurrency == objective.level(experiment) and item.valid:
            return max(LEAST_NOISE, min(item.output_tok_per_s.relative_half_width / 2, 1.0))
    return 1.0


def _rounded(calibration: Calibration) -> tuple[object, ...]:
    """To a quarter of a GiB (weights, which are many times as large as what is left, to a sixteenth): a smaller change
    is not worth forecasting thousands of candidates again."""
    sizes = (
        (calibration.available_bytes, 1 << 26),
        (calibration.weight_bytes, 1 << 26),
        (calibration.draft_weight_bytes, 1 << 26),
        (calibration.runtime_bytes, 1 << 28),
    )
    return tuple(None if size is None else round(size / unit) for size, unit in sizes)
