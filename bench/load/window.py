"""Window: when a level is steady, and how well its throughput is known.

Throughput comes from batch means: the window is cut into bins, and the bins' rates are the samples. Tokens arrive in
bursts, one per decode step, so a bin with fixed ends would hold one burst more or less by chance. Bin ends are
therefore moved back to the arrival before them: each bin then holds whole steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from bench.load.measurement import Interval

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

MIN_BINS, MAX_BINS = 20, 40
STEPS_PER_BIN = 8  # of the shortest bin: enough that a step more or less is noise
_FINE_NS = 1_000_000
_LOOK_BACK = 1_000  # fine bins in which the arrival before a window is looked for
TREND_BINS, _MIN_TREND_BINS = 10, 6
_NEGLIGIBLE_CHANGE = 0.02
_SECTIONS, _MIN_PER_SECTION = 10, 5
_CUSUM_CRITICAL = 1.358  # 5 % point of the supremum of a Brownian bridge (Kolmogorov)


@dataclass(eq=False)
class Timeline:
    """Tokens by arrival time, in bins of a millisecond.

    Args:
        origin_ns: no arrival is earlier.
    """

    origin_ns: int
    _tokens: Integers = field(default_factory=lambda: np.zeros(4096, np.int64))
    _last_ns: Integers = field(default_factory=lambda: np.zeros(4096, np.int64))

    def add(self, arrival_ns: Integers, tokens: Integers) -> None:
        """Add chunks, in any order."""
        if not len(arrival_ns):
            return
        places = np.maximum((arrival_ns - self.origin_ns) // _FINE_NS, 0)
        while places.max() >= len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._last_ns = np.concatenate([self._last_ns, np.zeros_like(self._last_ns)])
        np.add.at(self._tokens, places, tokens)
        np.maximum.at(self._last_ns, places, arrival_ns)

    def tokens_between(self, start_ns: int, end_ns: int) -> int:
        first, last = self._places(np.array([start_ns, end_ns]))
        return int(self._tokens[first:last].sum())

    def rates(self, start_ns: int, end_ns: int, bins: int) -> tuple[Floats, Floats]:
        """Tokens per second and seconds of each bin, bin ends moved back to the last arrival before them.

        Bins without an arrival fall to their neighbours, so there may be fewer than asked for.
        """
        places = self._places(np.linspace(start_ns, end_ns, bins + 1))
        before = max(0, int(places[0]) - _LOOK_BACK)
        fine = slice(before, int(places[-1]))
        total = np.concatenate([[0], np.cumsum(self._tokens[fine])])
        last_ns = np.maximum.accumulate(np.concatenate([[0], self._last_ns[fine]]))
        ends_ns = last_ns[places - before]
        ends_ns[ends_ns == 0] = start_ns  # nothing arrived before it
        counts = np.diff(total[places - before])
        widths_ns = np.diff(ends_ns)
        filled = widths_ns > 0
        return counts[filled] / (widths_ns[filled] * 1e-9), widths_ns[filled] * 1e-9

    def _places(self, times_ns: npt.NDArray[np.int64 | np.float64]) -> Integers:
        places = ((times_ns - self.origin_ns) // _FINE_NS).astype(np.int64)
        return np.clip(places, 0, len(self._tokens))


def bins_for(length_s: float, step_s: float) -> int:
    """How many bins a window is cut into: they follow the step time, and are 20 at least."""
    return int(np.clip(length_s / (STEPS_PER_BIN * step_s) if step_s > 0 else MAX_BINS, MIN_BINS, MAX_BINS))


def is_steady(rates: Floats, *, tolerated_change: float = 0.10) -> bool:
    """Whether the last ten bins show neither a trend nor a shift that noise would not explain.

    Args:
        tolerated_change: relative, of a trend that noise explains as well.
    """
    recent = rates[-TREND_BINS:]
    count = len(recent)
    if count < _MIN_TREND_BINS or recent.mean() <= 0:
        return False
    mean = recent.mean()
    place = np.arange(count) - (count - 1) / 2
    slope = (place @ recent) / (place @ place)
    change = abs(slope) * (count - 1) / mean
    if change > tolerated_change:
        return False
    if change <= _NEGLIGIBLE_CHANGE:
        return True
    rest = recent - mean - slope * place
    error = np.sqrt((rest @ rest) / (count - 2) / (place @ place))
    explained = abs(slope) <= stdtrit(count - 2, 0.95) * error
    return bool(explained and shift(recent) is None)


def shift(rates: Floats) -> int | None:
    """The bin at which the level of the rates changes, by the largest cumulative sum; None where noise explains it.

    Source: CUSUM test for a change in mean (Ploberger and Krämer 1992), its 5 % point.
    """
    spread = rates.std(ddof=1) if len(rates) > 2 else 0.0
    if spread <= 0:
        return None
    sums = np.cumsum(rates - rates.mean())[:-1]
    place = int(np.abs(sums).argmax())
    if abs(sums[place]) / (spread * np.sqrt(len(rates))) <= _CUSUM_CRITICAL:
        return None
    before, after = rates[: place + 1].mean(), rates[place + 1 :].mean()
    if abs(after - before) <= _NEGLIGIBLE_CHANGE * rates.mean():
        return None
    return place + 1


def batch_means(rates: Floats, widths_s: Floats) -> Interval:
    """Mean rate with a 95 % interval: t over bins, widened for the correlation of neighbours as in an AR(1) process.

    Source: Law and Kelton, batch means; the variance of a mean of AR(1) samples is (1 + r) / (1 - r) times s^2 / n. The
    estimate of r is biased down by about (1 + 3 r) / n (Kendall 1954), which is added back.
    """
    count = len(rates)
    if count == 0:
        return Interval(0.0, 0.0, 0.0, "nothing arrived")
    mean = float((rates * widths_s).sum() / widths_s.sum())
    width = float(widths_s.mean())
    if count < 3:
        return Interval(mean, 0.0, 2 * mean, f"no interval: {count} bins of {width:.2g} s")
    rest = rates - mean
    variance = float((rest**2).sum() / (count - 1))
    correlation = float((rest[1:] @ rest[:-1]) / (rest @ rest)) if variance > 0 else 0.0
    correlation = min(max(0.0, (correlation * count + 1) / (count - 3) if count > 3 else 0.0), 0.9)
    independent = count * (1 - correlation) / (1 + correlation)
    half = float(stdtrit(max(independent - 1, 2), 0.975) * np.sqrt(variance / independent))
    method = f"batch means, {count} bins of {width:.2g} s, t"
    if correlation > 0:
        method += f", lag-1 correlation {correlation:.2f}"
    return Interval(mean, mean - half, mean + half, method)


def sectioned(values: Floats, statistic: str) -> Interval | None:
    """A statistic of samples in the order of time, with a 95 % interval; None where they are too few for one.

    Args:
        statistic: ``mean`` or a percentile, e.g. ``p95``.

    Source: sectioning (Asmussen and Glynn, Stochastic Simulation, III.5): the statistic of each of ten consecutive
    sections, spread around that of all samples, t. Sections are longer than the correlation of neighbours.
    """
    per_section = len(values) // _SECTIONS
    share = 0.5 if statistic == "mean" else float(statistic[1:]) / 100
    if per_section < max(_MIN_PER_SECTION, 1 / min(share, 1 - share)):
        return None
    sections = values[: per_section * _SECTIONS].reshape(_SECTIONS, per_section)
    if statistic == "mean":
        whole, parts = float(values.mean()), sections.mean(axis=1)
    else:
        whole, parts = float(np.quantile(values, share)), np.quantile(sections, share, axis=1)
    error = np.sqrt(((parts - whole) ** 2).sum() / (_SECTIONS - 1) / _SECTIONS)
    half = float(stdtrit(_SECTIONS - 1, 0.975) * error)
    return Interval(whole, whole - half, whole + half, f"{_SECTIONS} sections of {per_section} requests, t")
