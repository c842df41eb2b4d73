"""How many draft tokens a decode step verifies: none where it does not pay.

A step over ``rows`` requests that verifies drafts computes ``positions``: a token of each row and the draft tokens
after it. It yields one token of each row, and each draft token that is right and follows only right ones. The budget
is the number of draft tokens with the most tokens per second, the likeliest first, by what was measured: the time of
such steps (``StepCosts``, the table T(B, γ) of Seer, arXiv:2511.14617, corrected by every step) and the share of
draft tokens that were right (``Acceptance``). Seer gives each class of requests one length; here each draft token has
its own probability, so its marginal benefit needs no class.

Promises: decisions are pure functions of what was observed; no draft is verified for a number of rows of which no
plain step was seen, and none where the gain is less than ``LEAST_GAIN``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_GAIN = 1.03
"""Tokens per second with drafts, over those without, from which drafts are verified: less is within the error of the
moving estimates."""

AVERAGED = 10
"""Steps that a moving estimate of a cost averages over."""

OUTLIER = 2.0
"""A step counts as at most so many times as long as its estimate: another process may have had the processor."""

FORGET = 2000
"""Steps after which an estimate that no step has corrected is dropped and measured again: texts have grown since."""

REACH = 2.0
"""How far beyond the longest step that was measured, in positions, the next may go; costs are extrapolated there."""

DECAY = 0.98
"""Weight of the draft tokens before, at each further one: about the last fifty of a kind count."""


@dataclass
class _Estimate:
    """Moving averages over steps of similar size; ``at`` is the number of the last one."""

    ratio: float
    seconds: float
    count: int
    at: int


class StepCosts:
    """Seconds of a step by rows and positions, as moving estimates in buckets of half an octave of each."""

    def __init__(self) -> None:
        self._estimates: dict[int, dict[int, _Estimate]] = {}
        """By bucket of rows, then of positions over rows: 0 is a plain step. Seconds are over the rows too."""
        self._steps = 0

    def observe(self, rows: int, positions: int, seconds: float) -> None:
        """A step of so many rows and positions took so long."""
        self._steps += 1
        ratio, each = positions / rows, seconds / rows
        size = max(1, round(2 * math.log2(ratio))) if positions > rows else 0
        known = self._estimates.setdefault(_half_octave(rows), {})
        estimate = known.get(size)
        if estimate is None or self._steps - estimate.at > FORGET:
            known[size] = _Estimate(ratio, each, 1, self._steps)
            return
        estimate.count, estimate.at = min(estimate.count + 1, AVERAGED), self._steps
        estimate.ratio += (ratio - estimate.ratio) / estimate.count
        estimate.seconds += (min(each, OUTLIER * estimate.seconds) - estimate.seconds) / estimate.count

    def seconds(self, rows: int, drafts: int) -> np.ndarray:
        """Of steps of so many rows that verify 0, 1, … ``drafts`` draft tokens [drafts + 1]; infinite where none so
        large may be tried yet; empty where no plain step of about so many rows was seen."""
        known = self._estimates.get(_half_octave(rows), {})
        points = [e for _, e in sorted(known.items()) if self._steps - e.at <= FORGET]
        if not points or points[0] is not known.get(0):
            return np.empty(0)
        x, y = [e.ratio for e in points], [e.seconds for e in points]
        slope = max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2])) if len(x) > 1 else 0.0
        reach = REACH * x[-1]
        x, y = [*x, reach], [*y, y[-1] + slope * (reach - x[-1])]
        ratios = 1.0 + np.arange(drafts + 1) / rows
        return rows * np.interp(ratios, x, y, right=np.inf)


class Acceptance:
    """The share of draft tokens that were right, among those that follow only right ones: by the tokens that matched
    before it, in the text and in the draft, and by its share of what followed them."""

    def __init__(self) -> None:
        self._right = [0.0] * _KINDS
        self._tried = [0.0] * _KINDS

    def record(self, kind: int, *, right: bool) -> None:
        """A draft token of this kind was right or not, and all before it were right."""
        self._tried[kind] = DECAY * self._tried[kind] + 1.0
        self._right[kind] = DECAY * self._right[kind] + right

    def chances(self, kinds: Sequence[int]) -> list[float]:
        """The probability of each token of a draft that it and all before it are right; falls along the draft. Of each
        kind (r + ½) / (n + 1): Krichevsky and Trofimov, 1981."""
        chance, chances = 1.0, []
        for kind in kinds:
            chance *= (self._right[kind] + 0.5) / (self._tried[kind] + 1.0)
            chances.append(chance)
        return chances


_MATCHES, _SHARES = 6, 3
_KINDS = _MATCHES * _SHARES


def kind_of(matched: int, share: float) -> int:
    """The kind of a draft token after ``matched`` tokens, of which it followed in this ``share`` of all places."""
    return min(matched.bit_length(), _MATCHES - 1) * _SHARES + (share > 0.5) + (share > 0.9)


def draft_budget(chances: Sequence[Sequence[float]], costs: StepCosts, drafting: float = 0.0) -> list[int]:
    """How many tokens of each row's draft to verify [rows], from ``Acceptance.chances`` of each. ``drafting``: seconds
    that finding these drafts took, which every step with drafts takes too."""
    rows = len(chances)
    tokens = sorted(((chance, row) for row, along in enumerate(chances) for chance in along), reverse=True)
    seconds = costs.seconds(rows, len(tokens))
    lengths = [0] * rows
    if not len(seconds):
        return lengths
    speeds = (rows + np.cumsum([0.0, *(chance for chance, _ in tokens)])) / (seconds + drafting)
    best = int(speeds.argmax())
    if speeds[best] >= LEAST_GAIN * rows / seconds[0]:
        for _, row in tokens[:best]:
            lengths[row] += 1
    return lengths


def _half_octave(rows: int) -> int:
    return round(2 * math.log2(rows))
