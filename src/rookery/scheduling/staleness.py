"""Bounded staleness: how many groups may be in flight, which groups train next, which are too old.

A version's *step* is the number of optimizer steps behind it; a group's staleness is the job's step minus the step of
the version that sampled its oldest token. With ``max_staleness`` k, groups are started only while
``(step + 1 + k) · groups_per_step`` exceeds the groups already consumed or in flight (AReaL's admission rule): a group
that starts now is then trained at most k steps later, if groups complete in order. Groups that do not are dropped by
:func:`select_batch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def admission_budget(
    *, step: int, durable_step: int, in_flight: int, ready: int, per_step: int, max_staleness: int
) -> int:
    """How many groups may start now on a version of step ``durable_step`` in a job at ``step``: all groups in flight,
    ready and new must fit the steps up to ``durable_step + max_staleness``."""
    steps_left = durable_step + max_staleness + 1 - step
    return max(0, steps_left * per_step - in_flight - ready)


@dataclass(frozen=True)
class ReadyGroup:
    """A complete group in the buffer."""

    group: str
    ordinal: int
    step: int
    """Step of the oldest version among its tokens."""
    responses: int = 1
    """Episodes in it."""


def select_batch(
    ready: Sequence[ReadyGroup], *, step: int, count: int, max_staleness: int, enough: int = 0
) -> tuple[list[ReadyGroup], list[ReadyGroup]]:
    """``(batch, stale)`` for a step at ``step``. ``batch``: the groups that would expire first, ``count`` of them, or
    fewer if they have ``enough`` responses together (0: never fewer), or none. ``stale``: groups that are too old."""
    stale = [group for group in ready if step - group.step > max_staleness]
    fresh = sorted((group for group in ready if step - group.step <= max_staleness), key=lambda g: (g.step, g.ordinal))
    batch = fresh[:count]
    suffices = len(batch) == count or 0 < enough <= sum(group.responses for group in batch)
    return (batch if suffices else []), stale
