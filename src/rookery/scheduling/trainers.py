"""Placement on training workers: which one trains a policy, which ones compute shares of its batches, which policies
keep the slots of their memory. Every function is pure and deterministic: ties are decided by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

HALF_LIFE_SECONDS = 300.0
"""Of a policy's training seconds: several steps of most jobs, so that one long step moves no policy."""

WORTH_MOVING = 0.9
"""A policy moves where the target then has less than this share of the load that its worker has now: smaller
differences are noise, and a move costs a reload."""


class TrainingLoad:
    """How busy each policy keeps its training worker: its training seconds, halved with every
    :data:`HALF_LIFE_SECONDS` since. Where workers have unlike speeds these are seconds of one of speed 1."""

    def __init__(self) -> None:
        self._seconds: dict[str, tuple[float, float]] = {}
        """Seconds by policy, and when they were counted."""

    def add(self, policy: str, seconds: float, now: float) -> None:
        """``policy`` has trained for ``seconds`` until ``now``."""
        before = self._now(policy, now) if policy in self._seconds else 0.0
        self._seconds[policy] = before + seconds, now

    def forget(self, policy: str) -> None:
        self._seconds.pop(policy, None)

    def of(self, policies: Iterable[str], now: float) -> dict[str, float]:
        """The load of each of ``policies``. One that has not trained yet counts as the mean of those that have, or as 1
        where there is none."""
        known = {policy: self._now(policy, now) for policy in policies if policy in self._seconds}
        mean = sum(known.values()) / len(known) if known else 1.0
        return {policy: known.get(policy, mean) for policy in policies}

    def _now(self, policy: str, now: float) -> float:
        seconds, at = self._seconds[policy]
        return seconds * 2 ** ((at - now) / HALF_LIFE_SECONDS)


EQUAL: Mapping[str, float] = MappingProxyType({})
"""Speeds of workers of which nothing is known."""


def assign_trainer(
    load: dict[str, float], policy: float = 1.0, offloaded_at: str | None = None, speeds: Mapping[str, float] = EQUAL
) -> str | None:
    """The training worker for a policy that has none and brings the load ``policy``: the worker ``offloaded_at``, which
    has the policy's state in main memory, unless it would be overloaded; else the one that ends first. ``load`` maps
    serving training workers to their loads, ``speeds`` workers to how much they do in a second, 1 where they are not
    in it."""
    if offloaded_at in load:
        back = load | {offloaded_at: load[offloaded_at] + policy}
        if not is_overloaded(back, offloaded_at, policy, speeds):
            return offloaded_at
    ends = _ends(load, policy, speeds)
    return min(ends, key=lambda name: (ends[name], name), default=None)


def is_overloaded(
    load: dict[str, float], holder: str, policy: float = 1.0, speeds: Mapping[str, float] = EQUAL
) -> bool:
    """Whether the policy with the load ``policy`` on ``holder`` should train elsewhere: another worker ends so much
    sooner that after the move it has less to do than the holder has now. Constant loads so move nothing twice."""
    others = {name: value for name, value in load.items() if name != holder}
    if holder not in load or not others:
        return False
    return min(_ends(others, policy, speeds).values()) < WORTH_MOVING * load[holder] / speeds.get(holder, 1.0)


def select_helpers(
    load: dict[str, float], count: int, share: float = 1.0, speeds: Mapping[str, float] = EQUAL
) -> list[str]:
    """At most ``count`` workers to compute shares of a batch, each of the load ``share``: those that end first.
    ``load`` maps training workers, without the one that trains the batch's policy, to their loads."""
    ends = _ends(load, share, speeds)
    return sorted(ends, key=lambda name: (ends[name], name))[:count]


def _ends(load: dict[str, float], more: float, speeds: Mapping[str, float]) -> dict[str, float]:
    """Seconds in which each worker does its load and ``more``."""
    return {name: (value + more) / speeds.get(name, 1.0) for name, value in load.items()}


def divide(sizes: Sequence[float], parts: int) -> list[slice]:
    """At most ``parts`` consecutive shares of items with these sizes, none empty: each has about an equal part of the
    total, and none exceeds that by a whole item."""
    total, at, members = sum(sizes), 0.0, list[int]()
    for size in sizes:
        members.append(int(parts * (at + size / 2) / total))
        at += size
    edges = [i for i, part in enumerate(members) if not i or part != members[i - 1]]
    return [slice(start, stop) for start, stop in pairwise([*edges, len(sizes)])]


@dataclass(frozen=True)
class SlotUse:
    """A policy that occupies a slot of a trainer's memory. ``since``: when it was busy last, in seconds."""

    name: str
    busy: bool
    gradient: bool
    """A gradient is accumulated: evicting the policy means to compute it again."""
    since: float


def slots_to_free(holders: Sequence[SlotUse], *, capacity: int, wanted: int, now: float, patience: float) -> list[str]:
    """Holders to evict for ``wanted`` newcomers, as far as possible. A busy holder is never evicted; among the others
    those without a gradient go first, longest idle first; one with a gradient only after ``patience`` seconds."""
    needed = len(holders) + wanted - capacity
    able = [holder for holder in holders if not holder.busy and (not holder.gradient or now - holder.since >= patience)]
    able.sort(key=lambda holder: (holder.gradient, holder.since, holder.name))
    return [holder.name for holder in able[: max(0, needed)]]
