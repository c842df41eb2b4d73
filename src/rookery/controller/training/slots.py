"""Slots of client-driven policies in the memory of training workers.

* More client-driven policies than slots queue, in turns by tenant; none is refused. An idle holder frees its slot and
  is loaded again on use. Where workers leave and fewer slots remain, holders queue for their next gradient too.
* A waiting policy can be shown how many are before it.
* A policy is *out*: it has no slot; *waiting* for one; *busy* with operations in its slot; or *idle* there. Its state
  changes as :data:`TRANSITIONS` says, and in no other way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rookery.clock import Clock
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.training.policy_run import PolicyRun
from rookery.errors import count_of, next_state
from rookery.scheduling.queues import FairQueue
from rookery.scheduling.trainers import SlotUse, slots_to_free
from rookery.settings import Settings

SlotState = Literal["out", "waiting", "busy", "idle"]
SlotEvent = Literal[
    "request",  # it has an operation
    "admit",  # a slot is free, and it is the next one
    "cancel",  # its operation is cancelled before it ran
    "end",  # it has no operation now
    "free",  # its slot is for others
]

TRANSITIONS: dict[tuple[SlotState, SlotEvent], SlotState] = {
    ("out", "request"): "waiting",
    ("waiting", "admit"): "busy",
    ("waiting", "cancel"): "out",
    ("busy", "cancel"): "out",  # admitted in the moment of the cancellation
    ("busy", "request"): "busy",
    ("busy", "end"): "idle",
    ("busy", "free"): "out",
    ("idle", "request"): "busy",
    ("idle", "free"): "out",
}
"""The state that follows each event. Any other event is a mistake of the controller."""


@dataclass(eq=False)
class SlotHolder:
    """A policy that needs a slot while it trains."""

    name: str
    tenant: str
    session: str
    base_model: str
    run: PolicyRun
    """Trains the policy. After an offload it computes a gradient that it had begun again."""
    state: SlotState = "out"
    since: float = 0.0
    """When it was last busy (monotonic seconds)."""
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has a slot for which it waited."""

    def apply(self, event: SlotEvent) -> None:
        """Raises ``RuntimeError`` for an event that its state does not have."""
        self.state = next_state(TRANSITIONS, self.state, event, f"policy {self.name}")

    @property
    def busy(self) -> bool:
        return self.state == "busy"

    @property
    def has_slot(self) -> bool:
        return self.state in ("busy", "idle")


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
        """By base model and name, those that have a slot."""
        self._queues: dict[str, FairQueue[SlotHolder]] = {}

    async def acquire(self, holder: SlotHolder) -> None:
        """Returns when ``holder`` has a slot; it is busy until :meth:`idle`."""
        holders = self._holders.setdefault(holder.base_model, {})
        if len(holders) > self._capacity(holder.base_model) and not holder.run.begun:
            self.release(holder)
        holder.apply("request")
        if holder.state == "waiting":
            queue = self._queues.setdefault(holder.base_model, FairQueue(self._tenant_shares))
            holder.admitted.clear()
            queue.put(holder.tenant, holder.session, holder)
            self._admit(holder.base_model)
            try:
                await holder.admitted.wait()
            except asyncio.CancelledError:
                queue.remove(holder.tenant, holder.session, holder)
                holders.pop(holder.name, None)
                holder.apply("cancel")
                self._admit(holder.base_model)
                raise

    def idle(self, holder: SlotHolder) -> None:
        """``holder`` has no operation now: its slot may go to a waiting policy."""
        holder.apply("end")
        holder.since = self._clock.monotonic()
        self._admit(holder.base_model)

    def release(self, holder: SlotHolder) -> None:
        """``holder`` frees its slot, if it has one."""
        if holder.has_slot:
            self._free(holder)
            self._admit(holder.base_model)

    def _free(self, holder: SlotHolder) -> None:
        del self._holders[holder.base_model][holder.name]
        holder.apply("free")
        holder.run.offload()

    def wanted(self, base_model: str) -> bool:
        """Whether a policy waits for a slot."""
        return bool(self._queues.get(base_model))

    def reason(self, holder: SlotHolder) -> str:
        """Why ``holder`` waits; empty if it does not."""
        if holder.state != "waiting":
            return ""
        before = self._queues[holder.base_model].position(holder.tenant, holder.session) or 0
        return (
            f"all training slots for {holder.base_model} ({self._capacity(holder.base_model)}) are in use;"
            f" {count_of(before, 'other waits', 'others wait')} before this one"
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
            self._free(holders[name])
        while len(holders) < capacity and (taken := queue.take(lambda holder: True)) is not None:
            holder, _ = taken
            queue.counters.charge(holder.tenant, 1.0)
            holders[holder.name] = holder
            holder.apply("admit")
            holder.admitted.set()
