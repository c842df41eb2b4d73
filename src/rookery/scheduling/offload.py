"""RLBoost's adaptive rollout offload (arXiv 2510.19225, Algorithm 1): for how long a training worker generates before
it trains, and how many preemptible workers pay off.

A *cycle* of a training worker is a seed phase, in which it generates (*seeding*), then a train phase, in which it
leaves generation to others. With one on-policy job a cycle is the paper's step. Per cycle, as published::

    T_seed += (trainer_wait - remote_wait) / eta
    N_prem  = (t_remote * n + T_seed * N_reserved) / t_train
    if n == n': memory[n'] = T_seed
    if n' in memory: T_seed = memory[n']

n is the mean number of remote instances during the cycle, n' how many the next one begins with. N_prem is how many of
them would do all the generating in the time that training takes: more would wait. Where the paper is silent: T_seed is
never below 0; the correction applies to the time for which the cycle did generate, where that ended before T_seed was
over; N_prem is rounded up, at least 1, and stays as it is by a cycle in which nothing was generated
or trained.

A change d of T_seed changes trainer_wait - remote_wait by -(1 + r) d, where r is the training worker's generation speed
over that of all remote instances together. So each cycle multiplies the error by 1 - (1 + r) / eta: it shrinks while
r < 2 eta - 1, and does not change its sign while r <= eta - 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

RELATIVE_TOLERANCE = 1e-9
"""Rounding error of a mean of equal counts."""


@dataclass(frozen=True, slots=True)
class Cycle:
    """Measurements of one cycle, from the first token generated in it to its end. Times are in seconds."""

    seeded: float
    """Seconds of the seed phase: T_seed, or the whole cycle where that was shorter."""
    trainer_wait: float
    """Seconds of the train phase without training work."""
    remote_wait: float
    """For which a mean remote instance had nothing to generate."""
    train: float
    """Seconds with training work (t_train)."""
    remote: float
    """For which a mean remote instance generated (t_remote)."""
    instances: float
    """Remote instances in use, the mean over the cycle (n)."""


class OffloadPlanner:
    """State of Algorithm 1 for one training worker: how long it seeds, and how many remote workers pay off."""

    def __init__(self, *, initial: float, eta: float, reserved: int) -> None:
        """``initial`` is T_init in seconds; ``reserved`` is N_reserved, which N_prem begins with."""
        self.seconds = initial
        """T_seed: how long the next cycle generates before it trains."""
        self.worthwhile = float(reserved)
        """N_prem, before rounding."""
        self.memory: dict[int, float] = {}
        """T_seed by the number of remote instances, where that number held for a whole cycle."""
        self._eta = eta

    @property
    def max_remote(self) -> int:
        """Remote instances that are worth using: N_prem, rounded up, at least 1."""
        return max(1, math.ceil(self.worthwhile * (1 - RELATIVE_TOLERANCE)))

    def learn(self, cycle: Cycle, *, available: int, reserved: int) -> None:
        """Update from a finished cycle. The next one has ``available`` remote instances, of which at most
        :attr:`max_remote` are used; ``reserved`` is N_reserved now."""
        change = (cycle.trainer_wait - cycle.remote_wait) / self._eta
        self.seconds = max(0.0, min(self.seconds, cycle.seeded) + change)
        work = cycle.remote * cycle.instances + self.seconds * reserved
        if work > 0 and cycle.train > 0:
            self.worthwhile = work / cycle.train
        following = min(available, self.max_remote)
        if math.isclose(cycle.instances, following, rel_tol=RELATIVE_TOLERANCE):
            self.memory[following] = self.seconds
        self.begin(following)

    def begin(self, instances: int) -> None:
        """The next cycle begins with so many remote instances."""
        self.seconds = self.memory.get(instances, self.seconds)
