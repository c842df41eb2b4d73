"""Places for client-driven policies in the training workers' memory: who has one, who waits.

* More policies than places queue, tenants by turns; nobody is refused. An idle one makes room and comes back on use.
  Where there are fewer places than there were, those that have one queue for their next gradient too.
* Who waits can be told how many are before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from rookery.aio import Clock
from rookery.controller.fleet.fleet import Fleet
from rookery.scheduling.fairness import DeficitRoundRobin
from rookery.scheduling.placement import SlotUse, slots_to_free
from rookery.settings import Settings


@dataclass(eq=False)
class SlotHolder:
    """A policy that wants a place now and then. ``rest`` takes its state out of its worker."""

    name: str
    tenant: str
    session: str
    base_model: str
    rest: Callable[[], None]
    gradient: Callable[[], bool]
    busy: bool = False
    since: float = 0.0
    waiting: asyncio.Future[None] | None = field(default=None)


class TrainerSlots:
    def __init__(self, fleet: Fleet, settings: Settings, clock: Clock) -> None:
        self._fleet = fleet
        self._settings = settings
        self._clock = clock
        self._seated: dict[str, dict[str, SlotHolder]] = {}
        self._queues: dict[str, DeficitRoundRobin[SlotHolder]] = {}
        fleet.on_change(self.review)

    async def acquire(self, guest: SlotHolder) -> None:
        """Returns when ``guest`` has a place; it is busy until :meth:`idle`."""
        seated = self._seated.setdefault(guest.base_model, {})
        if len(seated) > self._capacity(guest.base_model) and not guest.gradient():
            self.release(guest)
        if guest.name not in seated:
            queue = self._queues.setdefault(guest.base_model, DeficitRoundRobin())
            guest.waiting = asyncio.get_running_loop().create_future()
            queue.put(guest.tenant, guest.session, guest)
            self._admit(guest.base_model)
            try:
                await guest.waiting
            except asyncio.CancelledError:
                queue.remove(guest.tenant, guest.session, guest)
                seated.pop(guest.name, None)
                raise
            finally:
                guest.waiting = None
        guest.busy = True

    def idle(self, guest: SlotHolder) -> None:
        """``guest`` has nothing to do now; its place may go to who waits."""
        guest.busy = False
        guest.since = self._clock.monotonic()
        self._admit(guest.base_model)

    def release(self, guest: SlotHolder) -> None:
        """``guest`` gives its place back."""
        if self._seated.get(guest.base_model, {}).pop(guest.name, None) is not None:
            guest.busy = False
            guest.rest()
            self._admit(guest.base_model)

    def wanted(self, base_model: str) -> bool:
        """Whether somebody waits for a place."""
        return bool(self._queues.get(base_model))

    def reason(self, guest: SlotHolder) -> str:
        """What a waiting guest waits for; empty where it does not."""
        if guest.waiting is None:
            return ""
        before = self._queues[guest.base_model].position(guest.tenant, guest.session) or 0
        return (
            f"all {self._capacity(guest.base_model)} training places for {guest.base_model} are in use; "
            f"{before} others wait before this one"
        )

    def review(self) -> None:
        """Look again: workers came or went, or time has passed."""
        for base_model in self._queues:
            self._admit(base_model)

    def _capacity(self, base_model: str) -> int:
        workers = len(self._fleet.trainers(base_model))
        return self._settings.training.trainer_slots * max(1, workers)  # without one, training says who is missing

    def _admit(self, base_model: str) -> None:
        seated, queue = self._seated.setdefault(base_model, {}), self._queues.get(base_model)
        if not queue:
            return
        holders = [SlotUse(guest.name, guest.busy, guest.gradient(), guest.since) for guest in seated.values()]
        capacity = self._capacity(base_model)
        for name in slots_to_free(
            holders,
            places=capacity,
            wanted=len(queue),
            now=self._clock.monotonic(),
            patience=self._settings.training.slot_wait_seconds,
        ):
            seated.pop(name).rest()
        while len(seated) < capacity and (guest := queue.take(lambda guest: True)) is not None:
            seated[guest.name] = guest
            guest.busy = True
            if guest.waiting is not None and not guest.waiting.done():
                guest.waiting.set_result(None)
