"""Slots of client-driven policies in the memory of training workers.

* More client-driven policies than slots queue, in turns by tenant; none is refused. An idle holder frees its slot and
  is loaded again on use. Where workers leave and fewer slots remain, holders queue for their next gradient too.
* A waiting policy can be shown how many are before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from rookery.clock import Clock
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.training.policy_run import PolicyRun
from rookery.scheduling.queues import FairQueue
from rookery.scheduling.trainers import SlotUse, slots_to_free
from rookery.settings import Settings


@dataclass(eq=False)
class SlotHolder:
    """A policy that needs a slot while it trains."""

    name: str
    tenant: str
    session: str
    base_model: str
    run: PolicyRun
    """Trains the policy. After an offload it computes a gradient that it had begun again."""
    busy: bool = False
    since: float = 0.0
    """When it was last busy (monotonic seconds)."""
    waiting: asyncio.Future[None] | None = None
    """Done when it has a slot; None unless it waits for one."""


class TrainerSlots:
    """The slots of all training workers, by base model."""

    def __init__(
        self, fleet: Fleet, settings: Settings, clock: Clock, tenant_shares: Mapping[str, float], patience: float
    ) -> None:
        """``tenant_shares``: those of tenants that have another one than 1. A model with an unfinished gradient keeps
        its slot for ``patience`` seconds without a call while others wait."""
        self._tenant_shares = tenant_shares
        self._fleet = fleet
        self._settings = settings
        self._patience = patience
        self._clock = clock
        self._holders: dict[str, dict[str, SlotHolder]] = {}
        self._queues: dict[str, FairQueue[SlotHolder]] = {}

    async def acquire(self, holder: SlotHolder) -> None:
        """Returns when ``holder`` has a slot; it is busy until :meth:`idle`."""
        holders = self._holders.setdefault(holder.base_model, {})
        if len(holders) > self._capacity(holder.base_model) and not holder.run.begun:
            self.release(holder)
        if holder.name not in holders:
            queue = self._queues.setdefault(holder.base_model, FairQueue(self._tenant_shares))
            holder.waiting = asyncio.get_running_loop().create_future()
            queue.put(holder.tenant, holder.session, holder)
            self._admit(holder.base_model)
            try:
                await holder.waiting
            except asyncio.CancelledError:
                queue.remove(holder.tenant, holder.session, holder)
                holders.pop(holder.name, None)
                raise
            finally:
                holder.waiting = None
        holder.busy = True

    def idle(self, holder: SlotHolder) -> None:
        """``holder`` has no operation now: its slot may go to a waiting policy."""
        holder.busy = False
        holder.since = self._clock.monotonic()
        self._admit(holder.base_model)

    def release(self, holder: SlotHolder) -> None:
        """``holder`` frees its slot."""
        if self._holders.get(holder.base_model, {}).pop(holder.name, None) is not None:
            holder.busy = False
            holder.run.offload()
            self._admit(holder.base_model)

    def wanted(self, base_model: str) -> bool:
        """Whether a policy waits for a slot."""
        return bool(self._queues.get(base_model))

    def reason(self, holder: SlotHolder) -> str:
        """Why ``holder`` waits; empty if it does not."""
        if holder.waiting is None:
            return ""
        before = self._queues[holder.base_model].position(holder.tenant, holder.session) or 0
        return (
            f"all {self._capacity(holder.base_model)} training slots for {holder.base_model} are in use; "
            f"{before} others wait before this one"
        )

    def review(self) -> None:
        """Admit waiting policies: workers joined or left, or time has passed."""
        for base_model in self._queues:
            self._admit(base_model)

    def _capacity(self, base_model: str) -> int:
        workers = len(self._fleet.trainers(base_model))
        return self._settings.training.trainer_slots * max(1, workers)  # without one, training reports what is missing

    def _admit(self, base_model: str) -> None:
        holders, queue = self._holders.setdefault(base_model, {}), self._queues.get(base_model)
        if not queue:
            return
        uses = [SlotUse(holder.name, holder.busy, holder.run.begun, holder.since) for holder in holders.values()]
        capacity = self._capacity(base_model)
        for name in slots_to_free(
            uses,
            capacity=capacity,
            wanted=len(queue),
            now=self._clock.monotonic(),
            patience=self._patience,
        ):
            holders.pop(name).run.offload()
        while len(holders) < capacity and (holder := queue.take(lambda holder: True)) is not None:
            queue.counters.charge(holder.tenant, 1.0)
            holders[holder.name] = holder
            holder.busy = True
            if holder.waiting is not None and not holder.waiting.done():
                holder.waiting.set_result(None)
