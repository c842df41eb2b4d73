"""Predicted seconds of a worker's slices, from those that it measured."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from operator import truediv
from typing import Literal

Kind = Literal["prefill", "decode", "train"]
"""Kinds of slices. Sizes are tokens; a training slice has size 1."""

Curves = dict[Kind, list[tuple[float, float]]]

NEWEST = 0.2
"""Weight of the newest slice in a cost: it follows growing contexts within a few steps."""

QUANTILE = 0.95
"""Of the relative errors of the last predictions: the margin that is added to each prediction."""

WINDOW = 100
"""Errors kept of each kind."""

FIRST_MARGIN = 0.25
"""The margin until a tenth of a window is known."""


class CostTable:
    """The seconds of a slice, by kind and size: means of recent slices by half-octaves of size, linear between them, in
    proportion above them."""

    def __init__(self) -> None:
        self._means: defaultdict[Kind, dict[int, tuple[float, float]]] = defaultdict(dict)
        """By kind and half-octave: (size, seconds)."""
        self._curves: dict[Kind, tuple[list[float], list[float]]] = {}
        self._errors: defaultdict[Kind, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._margins: dict[Kind, float] = {}

    @classmethod
    def of(cls, curves: Curves) -> CostTable:
        """The table of another process, which reports its :attr:`curves`."""
        table = cls()
        for kind, points in curves.items():
            table._curves[kind] = [size for size, _ in points], [seconds for _, seconds in points]
        return table

    @property
    def curves(self) -> Curves:
        """(size, expected seconds) in order of size, by kind."""
        return {kind: list(zip(*curve, strict=True)) for kind, curve in self._curves.items()}

    def margin(self, kind: Kind) -> float:
        """The share by which slices of this kind take longer than predicted, at the 95th percentile."""
        return self._margins.get(kind, FIRST_MARGIN)

    def predict(self, kind: Kind, size: int) -> float:
        """The expected seconds; 0 for a kind that was never recorded, or without tokens."""
        sizes, seconds = self._curves.get(kind, ([], []))
        return interpolate(sizes, seconds, size) if sizes and size > 0 else 0.0

    def throughput(self, kind: Kind) -> float:
        """The most of its size that a recorded slice does in a second; 0 for a kind that was never recorded."""
        sizes, seconds = self._curves.get(kind, ([], []))
        return max(map(truediv, sizes, seconds), default=0.0)

    def seconds(self, kind: Kind, size: int) -> float:
        """The prediction with its margin."""
        return self.predict(kind, size) * (1 + self.margin(kind))

    def record(self, kind: Kind, size: int, seconds: float, *, first: bool = False) -> None:
        """A slice took so long. ``first``: measured at the start, which tells nothing of later errors."""
        expected = self.predict(kind, size)
        if expected and not first:
            errors = self._errors[kind]
            errors.append(max(0.0, seconds / expected - 1))
            if len(errors) >= WINDOW // 10:
                self._margins[kind] = sorted(errors)[min(len(errors) - 1, int(QUANTILE * len(errors)))]
        means = self._means[kind]
        octave = math.floor(2 * math.log2(size))
        mean_size, mean = means.get(octave, (size, seconds))
        means[octave] = mean_size + NEWEST * (size - mean_size), mean + NEWEST * (seconds - mean)
        points = sorted(means.values())
        self._curves[kind] = [at for at, _ in points], isotonic([took for _, took in points])


def interpolate(sizes: Sequence[float], seconds: Sequence[float], size: float) -> float:
    """The seconds for ``size``, on the lines that join the points, of which there is one at least, in order of size.
    Below them as much as at the first, above them in proportion to the last."""
    at = bisect_left(sizes, size)
    if at == 0:
        return seconds[0]
    if at == len(sizes):
        return seconds[-1] * size / sizes[-1]
    share = (size - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
    return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])


def isotonic(values: list[float]) -> list[float]:
    """The sequence that never falls and is nearest to ``values`` in squares: neighbours that fall are replaced by their
    mean (pool adjacent violators; Ayer and others, 1955)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]
