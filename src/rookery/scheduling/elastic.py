"""How many rollout workers a base model needs, from the wait of its trainers: after the rule of AstraFlow (arXiv
2605.15565, equation 1).

Over some steps, ``w`` is the share of their time for which trainers waited for trajectories, and ``G`` workers had
requests for the share ``busy`` of the time: ``G · busy / (1 - w)`` workers would have had requests all the time, with
no trainer waiting. Of the trajectories that entered meanwhile, the trainers may have consumed fewer: the need is less
in proportion.

The published rule looks at a window of fixed length, in bands of ``w``. This one looks after every step, and changes
the number as soon as the difference is beyond the noise of these steps: a pool of half or of double the size changes
after three steps, one that is 15% too large after thirty. Where the need exceeds :data:`FILLED` of the wanted number,
this grows to the number that is certainly needed; where the need with :data:`HEADROOM` is certainly less, it shrinks to
that need; between the two it stays. Simulated with the same traces (``benchmarks/scale/elastic.py``) and with windows
of 10 and 30 steps for the published bands, trainers wait for half to three quarters as long as with these. This costs
1% more worker-hours where the pool begins with half of the right number, and 3 to 20% fewer where it begins with more.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

LEAST_STEPS = 3
"""Fewer steps say nothing about a pool."""
WAITS_LITTLE = 0.05
"""Share of waiting from which on no pool is made smaller."""
LONGEST_WAIT = 0.95
"""A larger share counts as this one: steps in which nothing was trained ask for twentyfold at most."""
FILLED = 0.95
"""Share of the pool that may be needed: a fuller one grows. Trainers wait where one step needs more than the others, so
they wait for about a twentieth of their time where the mean step fills the pool."""
HEADROOM = 1.05
"""More capacity than is needed, so that a pool that was made smaller does not grow again."""
SPREAD = 0.1
"""The least standard deviation of what a single step needs, as a share of the mean: lengths of replies vary, and a few
steps may be alike by chance."""
CERTAIN = 2.5
"""Standard deviations by which the need must differ. As the pool is looked at after every step, two would move it now
and then for no reason."""
REVERSED = 1.6
"""Times as many where the number would turn back: noise that moved it once must not move it to and fro."""
ROUNDING = 1e-9
"""Of floating-point sums: a need of 5.0000000001 workers is 5."""


class PoolStep(NamedTuple):
    """A step of an asynchronous policy of a base model, or the sums of several."""

    waited: float
    """The seconds for which it waited for trajectories."""
    seconds: float
    """The seconds that it took, these included."""
    entered: float
    """Trajectories that became complete since the step before."""
    consumed: float
    """Trajectories that it was trained on."""
    elapsed: float
    """The seconds since the end of the step before, of any policy of the base model."""
    busy: float
    """The seconds of these with requests, summed over the workers."""


class StepWindow(NamedTuple):
    """Some steps in a row of all asynchronous policies of a base model, while ``workers`` generated."""

    workers: int
    steps: int
    waited: float
    """The sum of the seconds for which the steps waited for trajectories."""
    seconds: float
    """The sum of the seconds that the steps took, these included."""
    entered: float
    """Trajectories that became complete."""
    consumed: float
    """Trajectories that were trained on."""
    busy: float
    """Share of the time in which the workers had requests."""
    spread: float = SPREAD
    """Standard deviation of what a single step needs, as a share of the mean."""

    @property
    def wait(self) -> float:
        """Share of the time for which trainers waited."""
        return min(self.waited / self.seconds, LONGEST_WAIT) if self.seconds > 0 else 0.0

    @property
    def need(self) -> float:
        """Workers that generate as fast as the trainers consume, on average. While workers have no requests, trainers
        wait for environments or by a bound of the job, which more workers would not change: only as much of the wait
        counts as there was time with requests."""
        used = min(1.0, self.consumed / self.entered) if self.entered else 1.0
        return self.workers * self.busy * used / (1.0 - min(self.wait, self.busy))


def step_window(workers: int, steps: Sequence[PoolStep]) -> StepWindow:
    """The window of ``steps``. Their spread is the jackknife's: by how much the need changes without each one of
    them."""
    count, total = len(steps), PoolStep(*map(sum, zip(*steps, strict=True)))
    found = _window(workers, count, total, SPREAD)
    if count < LEAST_STEPS or not found.need:
        return found
    others = [PoolStep(*map(operator.sub, total, step)) for step in steps]
    needs = [_window(workers, count - 1, other, SPREAD).need for other in others]
    mean = sum(needs) / count
    spread = math.sqrt((count - 1) * sum((need - mean) ** 2 for need in needs)) / found.need
    return _window(workers, count, total, max(SPREAD, spread))


def _window(workers: int, steps: int, total: PoolStep, spread: float) -> StepWindow:
    capacity = workers * total.elapsed
    busy = min(1.0, max(0.0, total.busy / capacity)) if capacity > 0 else 0.0
    return StepWindow(workers, steps, total.waited, total.seconds, total.entered, total.consumed, busy, spread)


def wanted_workers(
    window: StepWindow,
    wanted: int | None = None,
    change: int = 0,
    *,
    headroom: float = HEADROOM,
    filled: float = FILLED,
    certain: float = CERTAIN,
) -> int:
    """The number of rollout workers that suits the window's load. ``wanted``: the number that suited the load so far,
    by default that of the workers; it stays unless the load certainly needs another one. ``change``: the sign of its
    last change."""
    count, need = window.workers, window.need
    shown = count if wanted is None else wanted
    if not window.steps or not window.entered or not window.consumed or not need:
        return shown
    margin = certain * window.spread / math.sqrt(window.steps)
    up, down = (margin * REVERSED if change == against else margin for against in (-1, 1))
    if (least := math.ceil(need * (1.0 - up) / filled - ROUNDING)) > shown:
        return least
    if math.ceil(need * (1.0 + down) * headroom - ROUNDING) < shown:
        fewest = 1 if window.wait < WAITS_LITTLE else min(count, shown)
        return max(fewest, math.ceil(need * headroom - ROUNDING))
    return shown


def change_of(before: int, after: int, last: int) -> int:
    """The sign of the last change of a number that is now ``after``; ``last``: that sign until now."""
    return (after > before) - (after < before) or last


def within(wanted: int, least: int, most: int) -> int:
    """``wanted``, or the nearer of the two bounds."""
    return min(max(wanted, least), most)
