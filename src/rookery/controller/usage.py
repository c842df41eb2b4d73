"""Usage accounting: every worker's paid time goes to the jobs and tenants that it worked for.

* How an interval is shared is decided in :mod:`rookery.scheduling.usage`; here it is metered and added up.
* A tenant's total holds all that its jobs, its clients' models and its chat requests used. A job's usage is a part.
* Counters are stored every :data:`FLUSH_SECONDS` and when the controller stops: a crash loses the counts since then,
  of all accounts alike. A job that goes back to its last commit keeps its usage: that work was computed.
* Nothing waits for the accounting: a database that refuses it now is tried again later.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from rookery import protocol
from rookery.clock import Clock
from rookery.controller.fleet.worker import Worker
from rookery.controller.quotas import Quotas
from rookery.controller.rollout.request import SamplingRequest
from rookery.controller.views import CostView, FleetCost
from rookery.errors import RookeryError
from rookery.scheduling.usage import HOUR, Interval, Kind, Usage, UsageRecord, WorkerMeter
from rookery.storage.repositories import tenants
from rookery.storage.repositories.tenants import TENANT_TOTAL
from rookery.storage.store import Store
from rookery.turns import work_of

log = logging.getLogger("rookery.controller.usage")

Account = tuple[str, str]
"""(tenant, job); the job is :data:`TENANT_TOTAL` for work that is no job's."""


class FleetUsage(msgspec.Struct, omit_defaults=True):
    """The paid time of the workers of one kind with one base model. Cost that is neither used nor idle is pending."""

    seconds: float = 0.0
    cost: float = 0.0
    idle: float = 0.0
    used: UsageRecord = msgspec.field(default_factory=UsageRecord)


FleetUsages = dict[str, dict[Kind, FleetUsage]]
"""By base model and kind."""


FLUSH_SECONDS = 30.0
"""Interval at which the counters are stored: the most of them that a crash can lose."""


class UsageMeter:
    """The counters of every tenant and of the open jobs, and the fleet's."""

    def __init__(self, clock: Clock, store: Store, quotas: Quotas) -> None:
        """``quotas`` learns of the tokens of each tenant."""
        self._quotas = quotas
        self._clock = clock
        self._store = store
        self._meters: dict[Worker, WorkerMeter[Account]] = {}
        self._usage: dict[Account, Usage] = {}
        self._changed: set[Account] = set()
        self._jobs: dict[str, Account] = {}
        """The open jobs by policy."""
        self._fleet: FleetUsages = {}
        self._before = (0.0, 0.0)
        """Used and idle cost when this process started."""

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the counters that an earlier process stored."""
        stored = await self._store.read(tenants.usage_totals)
        self._usage.update({(tenant, TENANT_TOTAL): _decode(used) for tenant, used in stored.items()})
        self._fleet = msgspec.convert(await self._store.read(tenants.fleet_usage), FleetUsages)
        for kinds in self._fleet.values():
            for paid in kinds.values():
                paid.idle = paid.cost - paid.used.cost  # work that was pending then gets no account any more
        self._before = self._sums()

    async def watch(self) -> None:
        """Store the changes periodically, forever."""
        while True:
            await self._clock.sleep(FLUSH_SECONDS)
            try:
                if self._meters or self._changed:
                    await self.save()
            except RookeryError as error:
                log.error("usage is not stored yet: %s", error)

    async def save(self) -> None:
        """Store the counters; they are durable when this returns. It is the service's work, whatever asks for it: in
        one line, earlier counters never replace later ones."""
        changed, self._changed = self._changed, set()
        usage = {account: msgspec.to_builtins(self._usage[account]) for account in changed}
        try:
            with work_of(""):
                await self._store.write(tenants.save_usage, usage, msgspec.to_builtins(self._fleet), self._quotas.day())
        except BaseException:
            self._changed |= changed
            raise
        needed = {account for meter in self._meters.values() for account in meter.accounts()} | self._changed
        open_jobs = {TENANT_TOTAL, *(job for _, job in self._jobs.values())}
        self._usage = {
            account: usage for account, usage in self._usage.items() if account[1] in open_jobs or account in needed
        }

    async def stop(self) -> None:
        """Charge and store everything."""
        for worker in list(self._meters):
            self.on_worker_lost(worker)
        try:
            await self.save()
        except Exception:  # the shutdown must continue
            log.exception("usage of the last %g s is not stored", FLUSH_SECONDS)

    async def open(self, tenant: str, job: str, policies: Sequence[str]) -> None:
        """The job runs from now on: usage by its requests and ``policies`` is charged to it."""
        if (tenant, job) not in self._usage:
            stored = await self._store.read(tenants.job_usage, tenant, job)
            self._usage.setdefault((tenant, job), _decode(stored))
        self._jobs.update(dict.fromkeys(policies, (tenant, job)))

    def close(self, job: str) -> None:
        """The job is paused or has ended."""
        self._jobs = {policy: account for policy, account in self._jobs.items() if account[1] != job}

    def payer_of(self, policy: str) -> Account:
        """The tenant and the open job that train a policy; both empty where none does."""
        return self._jobs.get(policy, ("", ""))

    # --- metering -----------------------------------------------------------------------------------------------------

    def on_worker_joined(self, worker: Worker) -> None:
        self._meters[worker] = WorkerMeter(worker.hello.price, self._clock.monotonic())

    def on_heartbeat(self, worker: Worker, beat: protocol.Heartbeat) -> None:
        meter = self._meters.get(worker)
        if meter is not None:
            decoding, training = beat.active + beat.waiting > 0, beat.training > 0
            now, decoded, trained = self._clock.monotonic(), beat.decode_seconds, beat.train_seconds
            self._add(worker, meter.heartbeat(now, decoded, trained, decoding=decoding, training=training))

    def on_worker_lost(self, worker: Worker) -> None:
        """It is suspect or gone; a draining worker is paid for until then."""
        meter = self._meters.pop(worker, None)
        if meter is not None:
            self._add(worker, meter.close(self._clock.monotonic()))

    def on_tokens(self, worker: Worker, request: SamplingRequest, tokens: int) -> None:
        self._quotas.add_tokens(request.tenant, tokens)
        if worker in self._meters:
            job = request.job if (request.tenant, request.job) in self._usage else TENANT_TOTAL
            self._meters[worker].sampled((request.tenant, job), tokens)

    def on_operation(self, worker: Worker, operation: protocol.TrainingOperation, done: protocol.OperationDone) -> None:
        if isinstance(operation, protocol.InitAdapter) or worker not in self._meters:
            return
        self._quotas.add_tokens(operation.tenant, done.metrics.get("tokens", 0.0))
        payer = self._jobs.get(operation.policy, (operation.tenant, TENANT_TOTAL))
        self._meters[worker].trained(payer, done.metrics.get("tokens", 0.0), done.metrics.get("seconds", 0.0))

    def _add(self, worker: Worker, interval: Interval[Account]) -> None:
        kind = worker.hello.kind
        paid = self._fleet.setdefault(worker.hello.model, {}).setdefault(kind, FleetUsage())
        paid.seconds += interval.seconds
        paid.cost += interval.cost
        paid.idle += interval.idle
        for account, used in interval.used.items():
            paid.used.add(used)
            for owner in {account, (account[0], TENANT_TOTAL)}:
                self._usage.setdefault(owner, {}).setdefault(kind, UsageRecord()).add(used)
                self._changed.add(owner)

    # --- reports ------------------------------------------------------------------------------------------------------

    def current(self, tenant: str, job: str, stored: object) -> Usage:
        """A job's usage, of which ``stored`` was read: with the counts that are not stored yet."""
        known = self._usage.get((tenant, job))
        return known if known is not None else _decode(stored)

    def cost(self, tenant: str, job: str) -> float:
        """The cost of an open job so far, in price units."""
        return sum(used.cost for used in self._usage.get((tenant, job), {}).values())

    def tenant_view(self, tenant: str) -> CostView:
        """The total of a tenant."""
        return cost_view(self._usage.get((tenant, TENANT_TOTAL), {}))

    def fleet(self) -> list[FleetCost]:
        """The cost of the workers, by base model and kind: the sum of used, idle and waiting."""
        return [
            FleetCost(
                model=model,
                kind=kind,
                hours=paid.seconds / HOUR,
                cost=paid.cost,
                used=paid.used.cost,
                idle=paid.idle,
                waiting=max(0.0, paid.cost - paid.used.cost - paid.idle),
            )
            for model, kinds in sorted(self._fleet.items())
            for kind, paid in sorted(kinds.items())
        ]

    def totals(self) -> dict[str, float]:
        """Used and idle cost since this process started."""
        used, idle = self._sums()
        return {"cost_used": used - self._before[0], "cost_idle": idle - self._before[1]}

    def price(self) -> float:
        """The price of an hour of the connected workers."""
        return sum(worker.hello.price for worker in self._meters)

    def _sums(self) -> tuple[float, float]:
        paid = [paid for kinds in self._fleet.values() for paid in kinds.values()]
        return sum(one.used.cost for one in paid), sum(one.idle for one in paid)


def _decode(stored: object) -> Usage:
    return msgspec.convert(stored, Usage)


def cost_view(usage: Usage) -> CostView:
    costs = {kind: used.cost for kind, used in usage.items()}
    cost, sampled = sum(costs.values()), sum(used.decode.tokens for used in usage.values())
    return CostView(
        cost=cost,
        reserved=costs.get("reserved", 0.0),
        preemptible=costs.get("preemptible", 0.0),
        seconds=sum(used.seconds for used in usage.values()),
        tokens_per_unit=sampled / cost if cost else None,
    )
