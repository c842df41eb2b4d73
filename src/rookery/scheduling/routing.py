"""Which worker takes the next request: the one with the least pending, among those that have room."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A serving worker as routing sees it."""

    name: str
    pending: int
    """Requests it was given and has not finished."""
    room: int
    """Requests it may hold at all."""
    holds: bool = False
    """It already holds this very request (its controller was replaced): its tokens need not be computed again."""


def route(candidates: Iterable[Candidate]) -> str | None:
    """The worker for one request, or None to hold it until something completes. Ties go to the first name, so that the
    same state gives the same choice."""
    able = [candidate for candidate in candidates if candidate.holds or candidate.pending < candidate.room]
    if not able:
        return None
    return min(able, key=lambda candidate: (not candidate.holds, candidate.pending, candidate.name)).name


def lease(load: dict[str, int]) -> str | None:
    """The training worker for a policy that has none: the one with the fewest policies. ``load`` maps serving training
    workers to how many policies they hold."""
    return min(load, key=lambda name: (load[name], name), default=None)
