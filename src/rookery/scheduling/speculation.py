"""How many draft tokens a decode step verifies: none where it does not pay.

A step over ``rows`` requests that verifies drafts computes ``positions``: a token of each row and the draft tokens
after it. It yields one token of each row, and each draft token that is right and follows only right ones. The budget
is the number of draft tokens with the most tokens per second, the likeliest first, by what was measured: the time of
such steps (``StepCosts``, the table T(B, γ) of Seer, arXiv:2511.14617, corrected by every step) and the share of
draft tokens that were right (``Acceptance``). Seer gives each class of requests one length; here each draft token has
its own probability, so its marginal benefit needs no class.

A prediction is an estimate, so its outcome is measured too. ``DraftAccount`` counts the seconds that drafts cost: those
of the steps in which drafts were looked for, less those that plain steps would have taken for the same tokens.

Promises: decisions are pure functions of what was observed; no draft is verified for a number of rows of which no
plain step was seen, and none where the gain is less than :func:`least_gain`. For each number of rows, drafts cost at
most ``TRIAL_STEPS`` plain steps, the last step with drafts, and ``TRIAL_SHARE`` of the time of plain steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_GAIN = 1.03
"""Tokens per second with drafts, over those without, from which drafts are verified: less is within the error of the
moving estimates."""

MANY_ROWS, LEAST_GAIN_OF_MANY = 16, 1.1
"""The same for more than so many rows. With drafts, the texts of a batch end at different times and leave it emptier:
at 64 rows a predicted gain of 3 to 7% was a loss of 5%."""

AVERAGED = 10
"""Steps that a moving estimate of a cost averages over."""

OUTLIER = 2.0
"""A step counts as at most so many times as long as its estimate: another process may have had the processor."""

FORGET = 2000
"""Steps after which an estimate that no step has corrected is dropped and measured again: texts have grown since."""

REACH = 2.0
"""How far beyond the longest step that was measured, in positions, the next may go; costs are extrapolated there."""

TRIAL_STEPS = 2.0
"""Plain steps' time that drafts may cost before they are off: the moving estimates need some steps with drafts."""

TRIAL_SHARE = 0.005
"""Of the time of plain steps makes up for what drafts cost, so trials that fail cost so much in the long run."""

SAVED_STEPS = 4.0
"""Plain steps' time that drafts may cost again of what they have saved: one that fails for a while, as where texts
begin, does not turn them off, and what was saved long ago does not pay for drafts that have stopped to be right."""

PLAIN_EVERY = 64
"""Steps with drafts after which one is plain, so that the two are compared at the present length of texts."""

AVERAGED_AGAIN = 3
"""Plain steps that the average counts as at one that follows steps with drafts: texts have grown meanwhile."""

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


class DraftAccount:
    """The seconds that looking for drafts and verifying them has cost, by rows in buckets of half an octave. Drafts are
    on while they are few, and off until plain steps have made up for them."""

    def __init__(self) -> None:
        self._accounts: dict[int, _Account] = {}

    def allows(self, rows: int) -> bool:
        """Whether the next step of so many rows may look for drafts."""
        account = self._accounts.get(_half_octave(rows))
        return account is not None and account.on and account.since_plain < PLAIN_EVERY

    def observe(self, rows: int, tokens: int, drafts: int, seconds: float, looking: float) -> None:
        """A step of so many rows that verified so many drafts and gave so many tokens took so long, and ``looking`` for
        its drafts before; 0.0 where none were looked for."""
        account = self._accounts.setdefault(_half_octave(rows), _Account())
        each = seconds / rows
        if drafts:
            account.since_plain += 1
            expected = tokens * account.plain
            account.add(looking + min(seconds, OUTLIER * (rows + drafts) * account.plain) - expected, rows)
            return
        most = AVERAGED_AGAIN if account.since_plain else AVERAGED
        account.count, account.since_plain = min(account.count + 1, most), 0
        slow = OUTLIER * account.plain if account.count > 1 else each
        account.plain += (min(each, slow) - account.plain) / account.count
        if looking:
            account.add(looking, rows)
        elif not account.on:
            account.cost -= TRIAL_SHARE * seconds
            account.on = account.cost <= 0.0


@dataclass
class _Account:
    plain: float = 0.0
    """Seconds of a plain step over its rows, a moving average."""
    count: int = 0
    """Plain steps in it."""
    cost: float = 0.0
    """Seconds; negative where drafts have saved some."""
    on: bool = True
    since_plain: int = 0
    """Steps with drafts since the last plain one."""

    def add(self, seconds: float, rows: int) -> None:
        step = rows * self.plain
        self.cost = max(self.cost + seconds, -SAVED_STEPS * step)
        self.on = self.cost <= TRIAL_STEPS * step


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


def least_gain(rows: int) -> float:
    """Tokens per second with drafts, over those without, from which a step of so many rows verifies drafts."""
    return LEAST_GAIN if rows <= MANY_ROWS else LEAST_GAIN_OF_MANY


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
    if speeds[best] >= least_gain(rows) * rows / seconds[0]:
        for _, row in tokens[:best]:
            lengths[row] += 1
    return lengths


def _half_octave(rows: int) -> int:
    return round(2 * math.log2(rows))
