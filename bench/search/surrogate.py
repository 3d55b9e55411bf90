"""Surrogate: what a few measured configurations say of the many that were not, by Gaussian processes.

Two kernels are added: one that is a sum over features, so that what one parameter does is learned from trials that
differ in the others as well, and one over all features together, for what only their combination does. Physical
features (what the forecast says) may matter much; flags beside them, whose larger effects the physical ones carry,
less. The few hyperparameters are chosen on a grid by marginal likelihood, which needs no care with ten launches.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, stats

Array = NDArray[np.float64]

CONSTANT_VARIANCE = 1.0  # of the logarithm of the common factor between prior and measurements: e either way
# Standard deviations of the logarithm, of one feature each and of all together.
PHYSICAL_SCALES = (0.1, 0.2, 0.4)
FLAG_SCALES = (0.003, 0.01, 0.03)
JOINT_SCALES = (0.02, 0.05, 0.15)
ADDITIVE_LENGTH = 0.5  # of one feature, whose range is 1
JOINT_LENGTH = 1.0  # of the sum over features
JOINT_FLAG_SHARE = 0.2  # of a flag's distance in that sum
JITTER = 1e-8
SUCCESS_LENGTH = 2.0
SUCCESS_NOISE = 0.2
REGIME_GAP = 6.0  # how much more than another feature the regime says about success
REGIME_SHARE = 0.5


@dataclass(frozen=True)
class Encoding:
    """Features of configurations as columns.

    Attributes:
        numbers: values from about 0 to 1, NaN where the feature is absent.
        codes: categories as numbers.
        physical: 1 for each feature, numbers first, that comes from the forecast, 0 for flags.
    """

    numbers: Array
    codes: Array
    physical: Array


def distances(one: Encoding, other: Encoding) -> Array:
    """Distance of each row to each, by feature: features x rows x rows; an absent number is 1 away from any other."""
    found = []
    for a, b in zip(one.numbers.T, other.numbers.T, strict=True):
        gap = np.abs(a[:, None] - b[None, :])
        found.append(np.where(np.isnan(gap), (np.isnan(a)[:, None] != np.isnan(b)[None, :]) * 1.0, gap))
    for a, b in zip(one.codes.T, other.codes.T, strict=True):
        found.append((a[:, None] != b[None, :]) * 1.0)
    return np.array(found)


@dataclass(frozen=True)
class Posterior:
    """Of the logarithm of a metric, normal at each row."""

    mean: Array
    deviation: Array

    def shifted(self, prior: Array) -> Posterior:
        return Posterior(self.mean + prior, self.deviation)

    def chance_above(self, bound: Array) -> Array:
        chance: Array = stats.norm.cdf((self.mean - bound) / self.deviation)
        return chance


class Surrogate:
    """A Gaussian process over encoded configurations.

    Args:
        gaps: distances among the observed ones, by feature.
        physical: 1 for each physical feature, else 0.
        values: observed, less their prior mean.
        noise: standard deviation of each.
    """

    def __init__(self, gaps: Array, physical: Array, values: Array, noise: Array) -> None:
        self._physical = physical
        best = -np.inf
        parts = _parts(gaps, physical)
        for scales in itertools.product(PHYSICAL_SCALES, FLAG_SCALES, JOINT_SCALES):
            factor = linalg.cho_factor(_kernel(parts, scales) + np.diag(noise**2 + JITTER), lower=True)
            weights = linalg.cho_solve(factor, values)
            likelihood = -0.5 * values @ weights - np.log(np.diag(factor[0])).sum()
            if likelihood > best:
                best, self._scales, self._factor, self._weights = likelihood, scales, factor, weights

    def predict(self, gaps: Array) -> Posterior:
        """Posterior at rows whose distances to the seen ones are given (features x rows x seen)."""
        cross = _kernel(_parts(gaps, self._physical), self._scales)
        variance = float(_kernel(_parts(np.zeros((len(gaps), 1, 1)), self._physical), self._scales)[0, 0])
        solved = linalg.cho_solve(self._factor, cross.T)
        return Posterior(cross @ self._weights, np.sqrt(np.maximum(variance - (cross * solved.T).sum(axis=1), 1e-12)))


def _parts(gaps: Array, physical: Array) -> tuple[Array, Array, Array]:
    """The three kernels, each of variance 1 for each of its features."""
    alike = np.exp(-gaps / ADDITIVE_LENGTH)
    weights = physical + (1 - physical) * JOINT_FLAG_SHARE
    joint = np.exp(-np.tensordot(weights, gaps, 1) / JOINT_LENGTH)
    return np.tensordot(physical, alike, 1), np.tensordot(1 - physical, alike, 1), joint


def _kernel(parts: tuple[Array, Array, Array], scales: tuple[float, ...]) -> Array:
    total: Array = np.full_like(parts[0], CONSTANT_VARIANCE)
    for scale, part in zip(scales, parts, strict=True):
        total += scale**2 * part
    return total


def success_chance(seen_gaps: Array, gaps: Array, succeeded: Array, prior_seen: Array, prior: Array) -> Array:
    """Chance that a launch succeeds, by regression on 0 and 1 around a prior.

    Args:
        seen_gaps, gaps: distances among the launched ones, and of the others to them, by feature, the regime last.
        succeeded: 1 where a launched one did, else 0.
    """
    matrix = _alike_in_success(seen_gaps) + np.eye(len(succeeded)) * SUCCESS_NOISE**2
    told = linalg.solve(matrix, succeeded - prior_seen, assume_a="pos")
    chance: Array = np.clip(prior + _alike_in_success(gaps) @ told, 0.01, 1.0)
    return chance


def _alike_in_success(gaps: Array) -> Array:
    """What fails in one regime may fail in all of it, whatever the other flags: so much is shared."""
    regime = np.exp(-REGIME_GAP * gaps[-1] / SUCCESS_LENGTH)
    alike: Array = regime * (REGIME_SHARE + (1 - REGIME_SHARE) * np.exp(-gaps[:-1].sum(axis=0) / SUCCESS_LENGTH))
    return alike


def expected_improvement(posterior: Posterior, best: float) -> Array:
    """Of a maximum, over the best so far."""
    z = (posterior.mean - best) / posterior.deviation
    gain: Array = posterior.deviation * (z * stats.norm.cdf(z) + stats.norm.pdf(z))
    return gain
