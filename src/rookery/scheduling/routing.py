"""Which training worker trains a policy. Who generates is decided in :mod:`rookery.scheduling.balancing`."""

from __future__ import annotations


def lease(load: dict[str, int], aside: str | None = None) -> str | None:
    """The training worker for a policy that has none: the one with the fewest policies, of several that one which still
    has its state ``aside``. ``load`` maps serving training workers to how many policies they hold."""
    return min(load, key=lambda name: (load[name], name != aside, name), default=None)


def crowded(load: dict[str, int], holder: str) -> bool:
    """Whether one of ``holder``'s policies should train elsewhere: another worker has at least two fewer, so that after
    the move it has no more than the holder. ``load`` as of :func:`lease`."""
    return holder in load and load[holder] - min(load.values()) >= 2
