"""The measuring of one training worker's cycle: what the clocks say when it begins, when its train phase does, and when
it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from rookery.controller.offload.pool import UsageTotals
from rookery.scheduling.offload import Cycle


@dataclass(frozen=True, slots=True)
class CycleSample:
    """Seconds: of the clock, of the training worker with something to train, and of the remote workers in use."""

    now: float
    trained: float
    remotes: UsageTotals


@dataclass
class CycleTimer:
    """A cycle under way."""

    began: CycleSample | None = None
    """With its first token."""
    trains: CycleSample | None = None
    """With its train phase."""
    stepped: set[str] = field(default_factory=set)
    """Policies that took an optimizer step in it."""

    def end(self, now: CycleSample) -> Cycle | None:
        """What there is to learn from; None where nothing was generated, or nobody remote was there."""
        began, trains = self.began, self.trains or now
        if began is None or now.now <= began.now:
            return None
        used, busy = now.remotes.used - began.remotes.used, now.remotes.busy - began.remotes.busy
        if used <= 0:
            return None
        instances = used / (now.now - began.now)
        return Cycle(
            seeded=trains.now - began.now,
            trainer_wait=max(0.0, now.now - trains.now - (now.trained - trains.trained)),
            remote_wait=max(0.0, used - busy) / instances,
            train=now.trained - began.trained,
            remote=busy / instances,
            instances=instances,
        )
