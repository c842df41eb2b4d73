"""The account of what work costs: every worker's metered time goes to the jobs and tenants it worked for.

* How an interval is shared out is decided in :mod:`rookery.scheduling.cost`; here it is metered and added up.
* A tenant's bill holds everything that its jobs, its clients' models and its questions used. A job's is a part of it.
* Bills are stored every ``usage_flush_seconds`` and when the controller stops: a crash loses what was counted since,
  of all of
  them alike. A job that goes back to its last commit keeps its bill: what was computed in vain was computed.
* Nothing waits for the account: a database that does not take it now is tried again later.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rookery import protocol
from rookery.aio import Clock
from rookery.controller.fleet.fleet import Fleet, Worker
from rookery.controller.rollout.scheduler import RolloutScheduler, SamplingRequest
from rookery.controller.training.dispatcher import TrainingDispatcher
from rookery.controller.views import CostView, FleetCost
from rookery.errors import RookeryError
from rookery.scheduling.cost import HOUR, SECOND, UNIT, Bill, Meter, ResourceUsage, SettledUsage, reserved_alone
from rookery.settings import Settings
from rookery.storage.bills import TENANT_TOTAL
from rookery.storage.store import Store

log = logging.getLogger("rookery.controller.usage")

Payer = tuple[str, str]
"""(tenant, job); the job is :data:`WHOLE` for what is no job's."""


class UsageRecord(msgspec.Struct, omit_defaults=True):
    """Of one kind of worker with one base model: what was paid for, what it was used for, what was idle. The rest of
    the money waits to be attributed."""

    time: int = 0
    money: int = 0
    idle: int = 0
    used: ResourceUsage = msgspec.field(default_factory=ResourceUsage)


Everybody = dict[str, dict[str, UsageRecord]]
"""By base model and kind."""


class UsageMeter:
    def __init__(
        self,
        fleet: Fleet,
        rollouts: RolloutScheduler,
        training: TrainingDispatcher,
        settings: Settings,
        clock: Clock,
        store: Store,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._store = store
        self._meters: dict[Worker, Meter[Payer]] = {}
        self._bills: dict[Payer, Bill] = {}
        """Of every tenant that has used anything, and of the open jobs."""
        self._changed: set[Payer] = set()
        self._jobs: dict[str, str] = {}
        """Of the open jobs, by policy."""
        self._fleet: Everybody = {}
        self._fleet_changed = False
        self._before = (0, 0)
        """What was used and idle when this process began."""
        fleet.on_joined(self._joined)
        fleet.on_beat(self._beat)
        fleet.on_lost(lambda worker, reason: self._lost(worker))
        rollouts.on_sampled(self._sampled)
        training.on_trained(self._trained)

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Go on from what an earlier process stored."""
        stored = await self._store.all_whole_bills()
        self._bills.update({(tenant, TENANT_TOTAL): bill_of(used) for tenant, used in stored.items()})
        fleet = await self._store.fleet_bill()
        self._fleet = msgspec.convert(fleet, Everybody)
        for kinds in self._fleet.values():
            for paid in kinds.values():
                paid.idle = paid.money - paid.used.money  # what waited then waits no more
        self._before = self._sums()

    async def watch(self) -> None:
        """Store what changed, for ever."""
        while True:
            await self._clock.sleep(self._settings.server.usage_flush_seconds)
            try:
                await self.save()
            except RookeryError as error:
                log.error("the account of costs is not stored yet: %s", error)

    async def save(self) -> None:
        """What was counted so far is durable when this returns."""
        if not (self._changed or self._fleet_changed):
            return
        changed, self._changed = self._changed, set()
        self._fleet_changed = False
        bills = {payer: msgspec.to_builtins(self._bills[payer]) for payer in changed}
        try:
            await self._store.save_bills(bills, msgspec.to_builtins(self._fleet))
        except BaseException:
            self._changed |= changed
            self._fleet_changed = True
            raise
        owing = {payer for meter in self._meters.values() for payer in meter.owes()} | self._changed
        open_jobs = set(self._jobs.values())
        for payer in [payer for payer in self._bills if payer[1] != TENANT_TOTAL and payer[1] not in open_jobs]:
            if payer not in owing:
                del self._bills[payer]

    async def stop(self) -> None:
        """Settle and store everything."""
        for worker in list(self._meters):
            self._close(worker)
        try:
            await self.save()
        except Exception:  # what is shut down must go on doing so
            log.exception(
                "the account of costs since the last %g s is not stored", self._settings.server.usage_flush_seconds
            )

    async def open(self, tenant: str, job: str, policies: Sequence[str]) -> None:
        """The job runs from now on: what its requests and ``policies`` use is put on its bill."""
        if (tenant, job) not in self._bills:
            stored = await self._store.bill(tenant, job)
            self._bills.setdefault((tenant, job), bill_of(stored))
        self._jobs.update(dict.fromkeys(policies, job))

    def close(self, job: str) -> None:
        """The job rests or has ended."""
        self._jobs = {policy: open_job for policy, open_job in self._jobs.items() if open_job != job}

    # --- metered ------------------------------------------------------------------------------------------------------

    def _joined(self, worker: Worker) -> None:
        self._meters[worker] = Meter(worker.hello.price, self._clock.monotonic())

    def _beat(self, worker: Worker, beat: protocol.Heartbeat) -> None:
        meter = self._meters.get(worker)
        if meter is not None:
            settled = meter.beat(
                self._clock.monotonic(),
                beat.decode_seconds,
                beat.train_seconds,
                decoding=beat.active + beat.waiting > 0,
                training=beat.training > 0,
            )
            self._add(worker, settled)

    def _lost(self, worker: Worker) -> None:
        if worker.state != "draining":  # it is here, and paid for, until its link ends
            self._close(worker)

    def _close(self, worker: Worker) -> None:
        meter = self._meters.pop(worker, None)
        if meter is not None:
            self._add(worker, meter.close(self._clock.monotonic()))

    def _sampled(self, worker: Worker, request: SamplingRequest, tokens: int) -> None:
        if worker in self._meters:
            job = request.job if (request.tenant, request.job) in self._bills else TENANT_TOTAL
            self._meters[worker].sampled((request.tenant, job), tokens)

    def _trained(self, worker: Worker, tenant: str, policy: str, tokens: float, seconds: float) -> None:
        if worker in self._meters:
            self._meters[worker].trained((tenant, self._jobs.get(policy, TENANT_TOTAL)), tokens, seconds)

    def _add(self, worker: Worker, settled: SettledUsage[Payer]) -> None:
        kind = worker.hello.kind
        paid = self._fleet.setdefault(worker.hello.model, {}).setdefault(kind, UsageRecord())
        paid.time += settled.time
        paid.money += settled.money
        paid.idle += settled.idle
        self._fleet_changed |= bool(settled.time)
        for payer, used in settled.used.items():
            paid.used.add(used)
            for sharer in {payer, (payer[0], TENANT_TOTAL)}:
                self._bills.setdefault(sharer, {}).setdefault(kind, ResourceUsage()).add(used)
                self._changed.add(sharer)

    # --- shown --------------------------------------------------------------------------------------------------------

    async def bills(self, tenant: str) -> Mapping[str, Bill]:
        """A tenant's, by job: those that are stored, and what was counted since."""
        here = {job: bill for (owner, job), bill in self._bills.items() if owner == tenant}
        stored = await self._store.bills(tenant)
        return {**{job: bill_of(used) for job, used in stored.items()}, **here}

    async def bill(self, tenant: str, job: str) -> Bill:
        """A job's."""
        here = self._bills.get((tenant, job))
        return here if here is not None else bill_of(await self._store.bill(tenant, job))

    def cost(self, tenant: str, job: str) -> float:
        """What an open job has cost so far, in price units."""
        return sum(used.money for used in self._bills.get((tenant, job), {}).values()) / UNIT

    def whole(self, tenant: str) -> CostView:
        """Everything that a tenant used. What it would have cost on reserved capacity is asked job by job: its jobs may
        be of several base models."""
        return cost_view(self._bills.get((tenant, TENANT_TOTAL), {}), None)

    def view(self, bill: Bill, model: str) -> CostView:
        """A job's bill as it is shown."""
        everybody = {kind: paid.used for kind, paid in self._fleet.get(model, {}).items()}
        return cost_view(bill, reserved_alone(bill, everybody))  # type: ignore[arg-type]

    def fleet(self) -> list[FleetCost]:
        """What the workers cost, by base model and kind; used, idle and waiting are all of it."""
        return [
            FleetCost(
                model=model,
                kind=kind,
                hours=paid.time / HOUR,
                cost=paid.money / UNIT,
                used=paid.used.money / UNIT,
                idle=paid.idle / UNIT,
                waiting=(paid.money - paid.used.money - paid.idle) / UNIT,
            )
            for model, kinds in sorted(self._fleet.items())
            for kind, paid in sorted(kinds.items())
        ]

    def totals(self) -> dict[str, float]:
        """Since this process began: what was used, and what was nobody's."""
        used, idle = self._sums()
        return {"cost_used": (used - self._before[0]) / UNIT, "cost_idle": (idle - self._before[1]) / UNIT}

    def price(self) -> float:
        """What an hour of the present fleet costs."""
        return sum(worker.hello.price for worker in self._meters)

    def _sums(self) -> tuple[int, int]:
        paid = [paid for kinds in self._fleet.values() for paid in kinds.values()]
        return sum(one.used.money for one in paid), sum(one.idle for one in paid)


def bill_of(stored: Any) -> Bill:
    """A bill as the database keeps it."""
    return msgspec.convert(stored, Bill)


def cost_view(bill: Bill, alone: int | None) -> CostView:
    money = {kind: used.money / UNIT for kind, used in bill.items()}
    cost = sum(money.values())
    sampled = sum(used.decode.tokens for used in bill.values())
    return CostView(
        cost=cost,
        reserved=money.get("reserved", 0.0),
        preemptible=money.get("preemptible", 0.0),
        seconds=sum(used.time for used in bill.values()) / SECOND,
        tokens_per_unit=sampled / cost if cost else None,
        reserved_alone=alone / UNIT if alone is not None else None,
    )
