"""How many rollout workers a base model needs, from the wait of its trainers: after the rule of AstraFlow (arXiv
2605.15565, equation 1).

Over some steps, ``w`` is the share of their time for which trainers waited for trajectories, and ``G`` workers had
requests for the share ``busy`` of the time: ``G · busy / (1 - w)`` workers would have had requests all the time, with
no trainer waiting. Of the trajectories that entered meanwhile, the trainers may have consumed fewer: the need is less
in proportion.

The published rule looks at a window of fixed length, in bands of ``w``. This one looks after every step, and acts as
soon as the difference is beyond the noise of so few steps: a pool of half or of double the size changes after three
steps, one that is 15% too large after thirty. Where the need exceeds :data:`FILLED` of the pool, the pool grows to
the number that is certainly needed; where the need with :data:`HEADROOM` is certainly less than the pool, it shrinks to
that. Simulated with the same traces (``benchmarks/scale/elastic.py``) this costs fewer worker-hours than the published
bands, and trainers wait for half as long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
"""Of what a single step needs, as a share: lengths of replies vary."""
CERTAIN = 2.5
"""Standard deviations by which the need must differ. As the pool is looked at after every step, two would move it now
and then for no reason."""
BUSY_LITTLE = 0.5
"""Workers that have requests for less of the time are not what trainers wait for, but environments or a bound of the
job: more of them would wait as well."""
ROUNDING = 1e-9
"""Of floating-point sums: a need of 5.0000000001 workers is 5."""


@dataclass(frozen=True)
class StepWindow:
    """Some steps in a row of all asynchronous policies of a base model, while ``workers`` generated."""

    workers: int
    steps: int
    waited: float
    """The sum of the seconds for which the steps waited for trajectories."""
    seconds: float
    """The sum of the seconds that the steps took, these included."""
    entered: int
    """Trajectories that became complete."""
    consumed: int
    """Trajectories that were trained on."""
    busy: float
    """Share of the time in which the workers had requests."""

    @property
    def wait(self) -> float:
        """Share of the time for which trainers waited."""
        return min(self.waited / self.seconds, LONGEST_WAIT) if self.seconds > 0 else 0.0

    @property
    def need(self) -> float:
        """Workers that generate as fast as the trainers consume, on average."""
        used = min(1.0, self.consumed / self.entered) if self.entered else 1.0
        return self.workers * self.busy * used / (1.0 - self.wait)


def wanted_workers(
    window: StepWindow, *, headroom: float = HEADROOM, filled: float = FILLED, certain: float = CERTAIN
) -> int:
    """The number of rollout workers that suits the window's load."""
    count, need = window.workers, window.need
    if not window.steps or not window.entered or not window.consumed or not need:
        return count
    margin = certain * SPREAD / math.sqrt(window.steps)
    if (least := math.ceil(need * (1.0 - margin) / filled - ROUNDING)) > count:
        return least if window.busy >= BUSY_LITTLE else count
    if window.wait < WAITS_LITTLE and math.ceil(need * (1.0 + margin) * headroom - ROUNDING) < count:
        return max(1, math.ceil(need * headroom - ROUNDING))
    return count


def within(wanted: int, least: int, most: int) -> int:
    """``wanted``, or the nearer of the two bounds."""
    return min(max(wanted, least), most)
