"""From which batch size on a worker's throughput is flat: the B of RLBoost's Algorithm 2, learned from its beats.

Two beats between which about equally many rows decoded give a sample (rows, tokens per second of decoding). Samples are
kept by half-octaves of rows, the newest of each. With the medians of those half-octaves that have enough of them, in
order b₁ < b₂ < … with rates r₁, r₂, …:

    B = min { bᵢ : rᵢ ≥ FLAT · max r },  known once a bⱼ ≥ 2 · B was measured

Until twice as many rows have been seen to give hardly more, throughput may still be growing, and B is None. Medians
keep single beats (a prompt among the decoding, a machine that did something else) from deciding; old samples go, so a
class of workers that changes is learned anew.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

FLAT = 0.9
"""The share of the best throughput that counts as all of it: what a machine's own noise hides."""

STEADY = 0.25
"""Rows at the two beats differ by at most this share: else the sample belongs to no batch size."""

LEAST_SECONDS = 0.2
"""Decoding between two beats that is worth a sample: about ten steps."""

ENOUGH = 5
"""Samples of a half-octave before its median counts."""

KEPT = 25
"""Samples kept of each half-octave: under a minute of beats."""


class Plateau:
    """One class of workers: equal model and device."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[float, float]]] = {}
        self._curve: dict[int, tuple[float, float]] = {}
        self._flat: int | None = None

    @property
    def flat(self) -> int | None:
        """B in rows, or None while it is not known."""
        return self._flat

    def add(self, before: int, after: int, tokens: int, seconds: float) -> None:
        """Between two beats of one worker with ``before`` and ``after`` rows active, ``tokens`` were sampled in
        ``seconds`` of decoding."""
        rows = (before + after) / 2
        if min(before, after) < 1 or abs(before - after) > STEADY * rows or seconds < LEAST_SECONDS or tokens < 1:
            return
        octave = math.floor(2 * math.log2(rows))
        samples = self._samples.setdefault(octave, deque(maxlen=KEPT))
        samples.append((rows, tokens / seconds))
        if len(samples) >= ENOUGH:
            self._curve[octave] = median(rows for rows, _ in samples), median(rate for _, rate in samples)
            self._flat = self._measure()

    def _measure(self) -> int | None:
        curve = [point for _, point in sorted(self._curve.items())]
        best = max(rate for _, rate in curve)
        flat = next(rows for rows, rate in curve if rate >= FLAT * best)
        return max(1, round(flat)) if curve[-1][0] >= 2 * flat else None
