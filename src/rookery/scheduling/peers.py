"""The order in which a worker asks others for an adapter. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


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
