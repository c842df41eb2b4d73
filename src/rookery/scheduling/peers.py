"""Which workers lend an adapter to another one that needs it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class PeerCandidate(NamedTuple):
    """A worker that holds the adapter."""

    name: str
    near: bool
    """On the receiver's own machine."""
    lent: float
    """When it was last told to lend anything."""


def select_peers(able: Iterable[PeerCandidate], most: int) -> list[str]:
    """At most ``most`` of them, in the order in which to ask: those on the same machine first, then whoever has been
    left in peace for longest."""
    ranked = sorted(able, key=lambda lender: (not lender.near, lender.lent, lender.name))
    return [lender.name for lender in ranked[:most]]
