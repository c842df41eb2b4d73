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
plain step was seen, and none where the gain is less than ``LEAST_GAIN``. Drafts cost at most ``TRIAL_STEPS`` plain
steps and ``TRIAL_SHARE`` of the time, for all numbers of rows together, and for each one the last step with drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

LEAST_GAIN = 1.03
"""Tokens per second with drafts, over those without, from which drafts are verified: less is within the error of the
moving estimates."""

MANY_ROWS, SPREAD = 16, 0.1
"""Of the time of a step with drafts is lost, for more than so many rows, or for several where no further request is
there. With drafts, the texts of a batch end at different times and leave it emptier: at 64 rows a predicted gain of 3
to 7% was a loss of 5%."""

EXACT_ROWS = 16
"""Up to so many, each number of rows has its own estimates: there a row more costs anything from nothing to its part.
Beyond, half an octave of rows shares them."""

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
"""Of the time may be spent on drafts that lose, for all numbers of rows together. A number of rows for which they did
does not try again before so much of its plain steps' time has made up for it."""

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

    rows: float
    ratio: float
    seconds: float
    count: int
    at: int


class StepCosts:
    """Seconds of a step by rows and positions, as moving estimates in buckets of half an octave of positions over rows.
    A step of more positions than were measured for its rows takes longer by as much as plain steps of so many rows."""

    def __init__(self) -> None:
        self._estimates: dict[int, dict[int, _Estimate]] = {}
        """By bucket of rows, then of positions over rows: 0 is a plain step. Seconds are over the rows too."""
        self._steps = 0

    def observe(self, rows: int, positions: int, seconds: float) -> None:
        """A step of so many rows and positions took so long."""
        self._steps += 1
        ratio, each = positions / rows, seconds / rows
        size = max(1, round(2 * math.log2(ratio))) if positions > rows else 0
        known = self._estimates.setdefault(_bucket(rows), {})
        estimate = known.get(size)
        if estimate is None or self._steps - estimate.at > FORGET:
            known[size] = _Estimate(rows, ratio, each, 1, self._steps)
            return
        estimate.count, estimate.at = min(estimate.count + 1, AVERAGED), self._steps
        estimate.rows += (rows - estimate.rows) / estimate.count
        estimate.ratio += (ratio - estimate.ratio) / estimate.count
        estimate.seconds += (min(each, OUTLIER * estimate.seconds) - estimate.seconds) / estimate.count

    def seconds(self, rows: int, drafts: int) -> np.ndarray:
        """The seconds of steps of so many rows that verify 0, 1, … ``drafts`` draft tokens [drafts + 1]; infinite where
        none so large may be tried yet; empty where no plain step of about so many rows was seen."""
        known = self._estimates.get(_bucket(rows), {})
        points = [e for _, e in sorted(known.items()) if self._steps - e.at <= FORGET]
        if not points or points[0] is not known.get(0):
            return np.empty(0)
        x, y = [e.ratio for e in points], [e.seconds for e in points]
        slope = max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2])) if len(x) > 1 else 0.0
        reach = REACH * x[-1]
        longer = max(slope * (reach - x[-1]), self._longer(rows * x[-1], rows * reach) / rows)
        x, y = [*x, reach], [*y, y[-1] + longer]
        ratios = 1.0 + np.arange(drafts + 1) / rows
        return rows * np.interp(ratios, x, y, right=np.inf)

    def _longer(self, few: float, many: float) -> float:
        """The seconds by which a plain step of ``many`` rows takes longer than one of ``few``. Beyond the most rows
        that were seen it grows as before them, if at all."""
        plain = [e for known in self._estimates.values() if (e := known.get(0)) and self._steps - e.at <= FORGET]
        points = sorted((e.rows, e.rows * e.seconds) for e in plain)
        x, y = [rows for rows, _ in points], list(accumulate((seconds for _, seconds in points), max))
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2]) if len(x) > 1 else 0.0
        x, y = [*x, x[-1] + many], [*y, y[-1] + slope * many]
        return float(np.interp(many, x, y) - np.interp(few, x, y))


class DraftAccount:
    """The seconds that looking for drafts and verifying them has cost, by rows. Drafts are on where they save time, and
    where they are tried while there is time for trials."""

    def __init__(self) -> None:
        self._accounts: dict[int, _Account] = {}
        self._trials: float | None = None
        """Seconds that drafts may cost beyond what they have saved, for all numbers of rows; negative after a trial
        that cost more."""

    def allows(self, rows: int) -> bool:
        """Whether the next step of so many rows may look for drafts."""
        account = self._accounts.get(_bucket(rows))
        if account is None or not account.on or account.since_plain >= PLAIN_EVERY:
            return False
        return account.cost < 0.0 or (self._trials or 0.0) > 0.0

    def observe(
        self, rows: int, tokens: int, drafts: int, seconds: float, looking: float, *, others: bool = True
    ) -> None:
        """A step of so many rows that verified so many drafts and gave so many tokens took so long, and ``looking`` for
        its drafts before; 0.0 where none were looked for. ``others``: further requests were there."""
        account = self._accounts.setdefault(_bucket(rows), _Account())
        trials = TRIAL_STEPS * seconds if self._trials is None else self._trials
        self._trials = max(trials, min(trials + TRIAL_SHARE * seconds, TRIAL_STEPS * seconds))
        if not drafts:
            account.see_plain(rows, seconds)
            if looking:
                self._charge(account, looking, account.step(rows))
            elif not account.on:
                account.cost -= TRIAL_SHARE * seconds
                account.on = account.cost <= 0.0
            return
        account.since_plain += 1
        step = account.step(rows)
        took = min(seconds, OUTLIER * (rows + drafts) / rows * step) * (1 + spread(rows, others=others))
        self._charge(account, looking + took - tokens / rows * step, step)

    def _charge(self, account: _Account, seconds: float, step: float) -> None:
        """Drafts have cost so much, negative where they saved it; what was saved before pays first."""
        before = max(account.cost, 0.0)
        account.cost = max(account.cost + seconds, -SAVED_STEPS * step)
        account.on = account.cost <= TRIAL_STEPS * step
        self._trials = (self._trials or 0.0) - (max(account.cost, 0.0) - before)


@dataclass
class _Account:
    rows: float = 0.0
    plain: float = 0.0
    """Rows and seconds of a plain step, moving averages."""
    count: int = 0
    """Plain steps in them."""
    cost: float = 0.0
    """Seconds; negative where drafts have saved some."""
    on: bool = True
    since_plain: int = 0
    """Steps with drafts since the last plain one."""

    def step(self, rows: int) -> float:
        """Seconds of a plain step of so many rows, at the least: more rows take longer, but not in proportion."""
        return self.plain * min(1.0, rows / self.rows) if self.count else 0.0

    def see_plain(self, rows: int, seconds: float) -> None:
        most = AVERAGED_AGAIN if self.since_plain else AVERAGED
        self.count, self.since_plain = min(self.count + 1, most), 0
        slow = OUTLIER * self.plain * max(1.0, rows / self.rows) if self.count > 1 else seconds
        self.rows += (rows - self.rows) / self.count
        self.plain += (min(seconds, slow) - self.plain) / self.count


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


def spread(rows: int, *, others: bool) -> float:
    """The share of the time of a step with drafts that is lost because its rows end at different times; ``others``:
    further requests are there, which take their places."""
    return SPREAD if rows > MANY_ROWS or (rows > 1 and not others) else 0.0


def draft_budget(
    chances: Sequence[Sequence[float]],
    costs: StepCosts,
    drafting: float = 0.0,
    *,
    others: bool = True,
    texts: Sequence[int] = (),
) -> list[int]:
    """How many tokens of each row's draft to verify [rows], from ``Acceptance.chances`` of each. ``drafting``: seconds
    that finding these drafts took, which every step with drafts takes too. ``others``: as in :func:`spread`.
    ``texts``: the tokens of each row's text; among equally likely drafts, those of the shortest texts come first, so
    that the rows stay level."""
    rows = len(chances)
    done = texts or [0] * rows
    tokens = sorted((-chance, done[row], row) for row, along in enumerate(chances) for chance in along)
    lengths = [0] * rows
    if not tokens or not len(seconds := costs.seconds(rows, len(tokens))):
        return lengths
    speeds = (rows - np.cumsum([0.0, *(negative for negative, _, _ in tokens)])) / (seconds + drafting)
    best = int(speeds.argmax())
    if speeds[best] >= LEAST_GAIN * (1 + spread(rows, others=others)) * rows / seconds[0]:
        for _, _, row in tokens[:best]:
            lengths[row] += 1
    return lengths


def _bucket(rows: int) -> int:
    return rows if rows <= EXACT_ROWS else EXACT_ROWS + round(2 * math.log2(rows / EXACT_ROWS))
