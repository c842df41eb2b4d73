"""With how many threads a worker computes, and how long they spin, next to other programs.

Threads that compute together wait for each other several hundred times in a decode step. If another program has the
core of one of them, the other waits for a slice of the scheduler's time, some milliseconds, each time. One thread less
than there are cores waits for nobody.

Where even the remaining threads wait for cores, there are more programs than cores: each further thread gets a share
of them then, so all compute, and spin briefly.

Promises: a pure function of what was measured. The number falls at once where threads wait for cores, to what others
leave; it rises after ``QUIET_LOOKS`` looks in a row at cores that were free. Where it must not change, because results
would, threads spin briefly instead. A worker without work changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

CROWDED_SHARE = 0.25
"""Share of their time for which threads wait for a core, above which they are crowded: two threads on two cores next to
one program that always runs wait about a third of it, on a quiet machine some percent."""

QUIET_SHARE = 0.1
"""The share below which they are not …"""

QUIET_LOOKS = 5
"""… after so many looks in a row, so that a program that runs for a moment every few seconds does not switch them."""

LEAST_SECONDS = 0.1
"""Time of all threads between two looks below which nothing is decided: the worker is idle."""

LEAVES, LEFT = 0.5, 0.7
"""The part of a core that others must leave for a thread to keep it, and to get it again."""


@dataclass(frozen=True)
class CoreUse:
    """Between two looks: seconds for which this process's threads ran, and for which they waited for a core although
    they could run; and the cores that others left, on average, None where that is unknown."""

    ran: float
    waited: float
    free: float | None = None


@dataclass(frozen=True)
class Team:
    """``threads`` compute, and spin ``brief``ly or as usual. ``quiet``: looks in a row at cores that were free for more
    threads, or for threads that spin."""

    threads: int
    brief: bool = False
    quiet: int = 0


def adapt(team: Team, use: CoreUse, most: int, *, fixed: bool = False) -> Team:
    """The team after a look: at most ``most`` threads, always as many where the number is ``fixed``."""
    total = use.ran + use.waited
    if min(use.ran, use.waited) < 0 or total < LEAST_SECONDS:  # threads have ended, or the worker is idle
        return team
    share = use.waited / total
    if share > CROWDED_SHARE:
        fitting = _fitting(use.free, most, LEAVES, fixed=fixed)
        if team.brief or fitting >= team.threads:
            return Team(most, brief=most > 1)
        return Team(fitting)
    more = max(team.threads, _fitting(use.free, most, LEFT, fixed=fixed))
    if share >= QUIET_SHARE or (more == team.threads and not team.brief):
        return replace(team, quiet=0)
    return Team(more) if team.quiet + 1 >= QUIET_LOOKS else replace(team, quiet=team.quiet + 1)


def _fitting(free: float | None, most: int, part: float, *, fixed: bool) -> int:
    """Threads that have ``part`` of a core at least."""
    if free is None or fixed:
        return most
    return max(1, min(most, math.floor(free + 1 - part)))
