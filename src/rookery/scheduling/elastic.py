"""How many rollout workers a base model needs, from the wait of its trainers: the rule of AstraFlow (arXiv 2605.15565,
equation 1).

Over a window of steps, ``w`` is the share of their time for which trainers waited for trajectories. Above
:data:`WAITS_LONG` workers are missing, unless most of their time is idle: ``G / (1 - w)``. Below :data:`WAITS_LITTLE`
there may be too many: as many stay as the trainers consume, with :data:`HEADROOM`. In between the number stays.

There, the surplus shows in trajectories that enter the buffer and are evicted. Here admission stops before: the
surplus shows in workers without a request. So the trajectories that they can produce are those that entered, divided by
the share of the time in which the workers had requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WAITS_LONG = 0.10
"""Share of waiting above which workers are missing."""
WAITS_LITTLE = 0.05
"""Share of waiting below which there may be too many workers. Between the two the number stays: it is the dead band
that keeps a noisy share from moving workers to and fro."""
LONGEST_WAIT = 0.95
"""A larger share counts as this one: a window in which nothing was trained asks for twentyfold at most."""
HEADROOM = 1.10
"""More capacity than is consumed, so that a pool that was made smaller does not make trainers wait again."""
BUSY_LITTLE = 0.5
"""Workers that have requests for less of the time are not what trainers wait for, but environments or a bound of the
job: more of them would wait as well. Not in the published rule, whose workers always have requests."""
ROUNDING = 1e-9
"""Of floating-point sums: a need of 5.0000000001 workers is 5."""


@dataclass(frozen=True)
class StepWindow:
    """Some steps in a row of all asynchronous policies of a base model, while ``workers`` generated."""

    workers: int
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


def wanted_workers(window: StepWindow, *, headroom: float = HEADROOM, long: float = WAITS_LONG) -> int:
    """The number of rollout workers that suits the window's load."""
    count, wait = window.workers, window.wait
    if wait > long:
        if window.busy < BUSY_LITTLE:
            return count
        return math.ceil(count / (1.0 - wait) - ROUNDING)
    producible = window.entered / window.busy if window.busy > 0 else 0.0
    if wait < WAITS_LITTLE and producible > 0 and window.consumed > 0:
        return max(1, min(count, math.ceil(count * (window.consumed / producible) * headroom - ROUNDING)))
    return count


def within(wanted: int, least: int, most: int) -> int:
    """``wanted``, or the nearer of the two bounds."""
    return min(max(wanted, least), most)
