"""The number of rows at which a worker's throughput stops growing: B of RLBoost's Algorithm 2 (arXiv 2510.19225)."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from rookery.scheduling.costs import isotonic

FLAT = 0.9
"""The share of the best throughput that counts as all of it: the rest is within a machine's noise."""

STEADY = 0.25
"""Rows at the two heartbeats differ by at most this share: else the sample belongs to no batch size."""

LEAST_SECONDS = 0.2
"""Least decoding time of a sample: about ten steps."""

ENOUGH = 5
"""Samples of a half-octave before its median counts."""

KEPT = 25
"""Samples kept of each half-octave: under a minute of heartbeats."""


class SaturationEstimator:
    """The saturation of one class of workers (equal model, device and kind), learned from heartbeats.

    Two heartbeats between which about equally many rows decoded give a sample (rows, tokens per second of decoding).
    Samples are kept by half-octaves of rows, the newest of each. The medians of the half-octaves that have enough
    samples are points b₁ < b₂ < … < bₙ with rates; r₁ ≤ r₂ ≤ … ≤ rₙ is the growing curve nearest to the rates in
    squares. Then

        B = min { bᵢ : rᵢ ≥ FLAT · rₙ },  known once bₙ ≥ 2 · B

    Until twice as many rows have been seen to give hardly more, throughput may still be growing, and B is None. Medians
    remove single outliers (a prompt among the decoding rows, another load of the machine), the growing curve removes
    single outlying points. Old samples are dropped, so a class of workers that changes is learned again.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[float, float]]] = {}
        self._curve: dict[int, tuple[float, float]] = {}
        self._saturated_rows: int | None = None

    @property
    def saturated_rows(self) -> int | None:
        """B in rows, None while unknown."""
        return self._saturated_rows

    def add(self, before: int, after: int, tokens: int, seconds: float) -> None:
        """Add a sample: between two heartbeats of one worker, with ``before`` and ``after`` active rows, ``tokens``
        were sampled in ``seconds`` of decoding."""
        rows = (before + after) / 2
        if min(before, after) < 1 or abs(before - after) > STEADY * rows or seconds < LEAST_SECONDS or tokens < 1:
            return
        octave = math.floor(2 * math.log2(rows))
        samples = self._samples.setdefault(octave, deque(maxlen=KEPT))
        samples.append((rows, tokens / seconds))
        if len(samples) >= ENOUGH:
            self._curve[octave] = median(rows for rows, _ in samples), median(rate for _, rate in samples)
            self._saturated_rows = self._measure()

    def _measure(self) -> int | None:
        points = [point for _, point in sorted(self._curve.items())]
        rates = isotonic([rate for _, rate in points])
        flat = next(rows for (rows, _), rate in zip(points, rates, strict=True) if rate >= FLAT * rates[-1])
        return max(1, round(flat)) if points[-1][0] >= 2 * flat else None
