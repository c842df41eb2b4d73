"""Who leaves a training worker's memory when more policies want in than it has places for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SlotUse:
    """A policy that has a place. ``since``: when it was busy last."""

    name: str
    busy: bool
    gradient: bool
    """A gradient is begun: whoever leaves with one computes it again."""
    since: float


def slots_to_free(holders: Sequence[SlotUse], *, places: int, wanted: int, now: float, patience: float) -> list[str]:
    """Holders that make room for ``wanted`` newcomers, as far as they can. A busy one never leaves; among the others
    those without a gradient go first, longest idle first; one with a gradient only after ``patience`` seconds."""
    needed = len(holders) + wanted - places
    able = [holder for holder in holders if not holder.busy and (not holder.gradient or now - holder.since >= patience)]
    able.sort(key=lambda holder: (holder.gradient, holder.since, holder.name))
    return [holder.name for holder in able[: max(0, needed)]]
