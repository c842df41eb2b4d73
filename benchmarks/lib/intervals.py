"""Means, standard errors and intervals of a few numbers. Pure.

Two samples are compared as Welch does (Biometrika 34, 1947): independent, their variances not taken to be equal. With
three or five runs an interval is wide; that is what so few runs can say."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
"""Of every interval: of twenty comparisons in which nothing differs, one is expected to seem to."""


@dataclass(frozen=True)
class Mean:
    """``error`` is its standard error; NaN for one value alone."""

    mean: float
    error: float
    count: int


@dataclass(frozen=True)
class Interval:
    """A difference with its confidence interval. Bounds are infinite where there are too few values to tell."""

    difference: float
    low: float
    high: float

    @property
    def null(self) -> bool:
        """Whether no difference lies within."""
        return self.low <= 0 <= self.high


def mean(values: Sequence[float]) -> Mean:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Mean(statistics.fmean(values), error, len(values))


def alternated(ratios: Sequence[float]) -> float:
    """Of two arms that are measured in turns, one of them first in every other turn: the geometric mean of the medians
    of both orders. What comes second may be slower by itself; with an odd number of turns, the median of all would be
    of the order that is there once more."""
    return statistics.geometric_mean(statistics.median(ratios[at::2]) for at in range(min(2, len(ratios))))


def t_quantile(probability: float, freedom: float) -> float:
    """The ``probability`` quantile of Student's t with ``freedom`` degrees of freedom."""
    return float(stats.t.ppf(probability, freedom))


def welch(first: Sequence[float], second: Sequence[float]) -> Interval:
    """mean(second) − mean(first)."""
    difference = statistics.fmean(second) - statistics.fmean(first)
    if min(len(first), len(second)) < 2:
        return Interval(difference, -math.inf, math.inf)
    parts = [statistics.variance(values) / len(values) for values in (first, second)]
    whole = sum(parts)
    if whole == 0:
        return Interval(difference, difference, difference)
    shares = [part / whole for part in parts]  # squares of the parts themselves may be too small to be told from 0
    freedom = 1 / sum(s * s / (len(v) - 1) for s, v in zip(shares, (first, second), strict=True))
    return _around(difference, math.sqrt(whole), freedom)


def paired(differences: Sequence[float]) -> Interval:
    """The mean of differences of pairs."""
    found = mean(differences)
    if found.count < 2:
        return Interval(found.mean, -math.inf, math.inf)
    return _around(found.mean, found.error, found.count - 1)


def bootstrap(values: Sequence[float], draws: int = 2000) -> tuple[float, float, float]:
    """The median of one figure per seed, and its percentile bootstrap interval; equal for equal values."""
    drawn = np.random.default_rng(0).choice(np.asarray(values), (draws, len(values)))
    tails = 50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)
    low, high = np.percentile(np.median(drawn, axis=1), tails)
    return statistics.median(values), float(low), float(high)


def _around(difference: float, error: float, freedom: float) -> Interval:
    half = t_quantile((1 + CONFIDENCE) / 2, freedom) * error
    return Interval(difference, difference - half, difference + half)
