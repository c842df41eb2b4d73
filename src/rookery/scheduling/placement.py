"""Placement decisions: the trainer of a policy, the policies that leave a trainer's memory, the peers that serve an
adapter. Requests are placed by :mod:`rookery.scheduling.balancing`.

Every function is pure and deterministic: ties are decided by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


def assign_trainer(policies: dict[str, int], offloaded_at: str | None = None) -> str | None:
    """The training worker for a policy that has none: the one with the fewest policies; among equals the worker
    ``offloaded_at``, which still has the policy's state in main memory. ``policies`` maps serving training workers to
    the number of policies that they hold."""
    return min(policies, key=lambda name: (policies[name], name != offloaded_at, name), default=None)


def is_overloaded(policies: dict[str, int], holder: str) -> bool:
    """Whether one of ``holder``'s policies should train elsewhere: another worker has at least two fewer, so that after
    the move it has no more than the holder. ``policies`` as in :func:`assign_trainer`."""
    return holder in policies and policies[holder] - min(policies.values()) >= 2


@dataclass(frozen=True)
class SlotUse:
    """A policy that occupies a slot of a trainer's memory. ``since``: when it was busy last, in seconds."""

    name: str
    busy: bool
    gradient: bool
    """A gradient is accumulated: evicting the policy means to compute it again."""
    since: float


def slots_to_free(holders: Sequence[SlotUse], *, places: int, wanted: int, now: float, patience: float) -> list[str]:
    """Holders to evict for ``wanted`` newcomers, as far as possible. A busy holder is never evicted; among the others
    those without a gradient go first, longest idle first; one with a gradient only after ``patience`` seconds."""
    needed = len(holders) + wanted - places
    able = [holder for holder in holders if not holder.busy and (not holder.gradient or now - holder.since >= patience)]
    able.sort(key=lambda holder: (holder.gradient, holder.since, holder.name))
    return [holder.name for holder in able[: max(0, needed)]]


class PeerCandidate(NamedTuple):
    """A worker that has the adapter."""

    name: str
    near: bool
    """On the receiver's machine."""
    last_served: float
    """When it was last chosen to serve any artifact, in seconds."""


def select_peers(candidates: Iterable[PeerCandidate], limit: int) -> list[str]:
    """At most ``limit`` of them, in the order in which to ask: workers on the same machine first, then those chosen
    longest ago."""
    ranked = sorted(candidates, key=lambda peer: (not peer.near, peer.last_served, peer.name))
    return [peer.name for peer in ranked[:limit]]
