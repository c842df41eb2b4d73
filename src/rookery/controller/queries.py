"""The read side of the controller: jobs, policies, workers and the service itself.

* Every query about a job is scoped by its tenant; another tenant's job answers "not found".
* The view of a running job comes from its task, that of any other job from the database.
* The cost of a view does not grow with the job's history. A follower is woken by its own job only.
"""

from __future__ import annotations

import asyncio
import builtins
import math
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from itertools import chain
from typing import Any, Literal

from sqlalchemy import Connection

from rookery import protocol
from rookery.controller.activity import ActivityQueries
from rookery.controller.context import ControllerContext
from rookery.controller.episodes import EpisodeQueries
from rookery.controller.feeds import FeedRow, JobFeeds
from rookery.controller.jobs.admission import JobAdmission
from rookery.controller.jobs.job_context import SHOWN_REWARDS
from rookery.controller.jobs.registry import JobRegistry
from rookery.controller.jobs.runner import COUNTED
from rookery.controller.quotas import REFUSED
from rookery.controller.stored_spans import StoredSpans
from rookery.controller.targets import find_policy, find_version, may_name
from rookery.controller.usage import cost_view
from rookery.controller.views import (
    BY_OWNER,
    AlarmView,
    BaseModelView,
    Costs,
    EvaluationView,
    Health,
    HeartbeatView,
    JobEvent,
    JobHealthView,
    JobView,
    PolicyView,
    PoolView,
    TenantCost,
    VersionView,
    WorkerView,
)  # fmt: skip
from rookery.protocol.gauges import over_workers
from rookery.scheduling.health import JobHealth, advice_lines, alarms, max_tokens_of, several
from rookery.scheduling.usage import Usage
from rookery.spec.job import needed_models, scored_policy
from rookery.storage.columns import Page
from rookery.storage.models import (
    FINAL_JOB_STATES,
    EvaluationRow,
    JobRow,
    PolicyRow,
    TenantRow,
    VersionRow,
)
from rookery.storage.repositories import jobs as job_rows
from rookery.storage.repositories import tenants as tenant_rows
from rookery.storage.repositories import versions as version_rows
from rookery.storage.repositories.runs import RunChoice, chosen_jobs, rewards_of, state_times, usage_of
from rookery.telemetry.metrics import finite
from rookery.tokenization.registry import CATALOGUE, Status, status
from rookery.turns import in_thread, service_task

HEALTH_STEPS = 50
"""Newest steps of each policy that alarms are computed from."""

MODEL_SECONDS = 1.0
"""Between two looks at the files of base models: each asks the disk some fifty times."""

LATE_MODEL_SECONDS = 10.0
"""A list of base models shows the last look, if it is not older than this, while the next one is under way: a busy
machine takes a tenth of a second for it."""

EVENTS_SHOWN = 1000
"""Largest number of events in one reply."""


class JobQueries:
    def __init__(
        self, context: ControllerContext, jobs: JobRegistry, admission: JobAdmission, spans: StoredSpans
    ) -> None:
        self._admission = admission
        self._context = context
        self._store = context.store
        self._jobs = jobs
        self._models: tuple[float, dict[str, Status]] = (0.0, {})
        """When the states of base models were read, and what they were."""
        self._look: asyncio.Task[None] | None = None
        """The present look at the files of base models."""
        rooms, threads = context.rooms, context.threads
        self.episodes = EpisodeQueries(context.store, context.chat, threads, context.settings.cache)
        self.activity = ActivityQueries(
            spans,
            context.records.spans.snapshot,
            lambda: chain(rooms.rollouts.open_spans(), rooms.training.open_spans(), rooms.fleet.open_spans()),
            rooms.usage.payer_of,
            threads,
        )
        self.feeds = JobFeeds(self.show, self._rows, self._last_step, jobs.signal, threads.encoders)

    async def _last_step(self, tenant: str, job: str) -> int:
        return await self._store.read(version_rows.last_step, tenant, job)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    async def list(self, tenant: str, page: Page = Page()) -> Sequence[JobView]:  # noqa: B008 (frozen)
        """A page of the tenant's jobs, newest first."""
        return await self.views(tenant, await self._store.read(job_rows.list_jobs, tenant, page))

    async def views(self, tenant: str, rows: Sequence[JobRow]) -> Sequence[JobView]:
        """Views of these jobs of the tenant."""
        owner, policies = await asyncio.gather(
            self._store.read(tenant_rows.get_tenant, tenant),
            self._store.read(job_rows.policies_of, tenant, [row.id for row in rows]),
        )
        return await self._views(rows, {tenant: owner}, policies)

    async def completed(self, tenant: str, page: Page) -> tuple[str, Sequence[JobRow]]:
        """The tenant's name, and the completed jobs of a page of its jobs, as they are stored, newest first."""
        owner, rows = await asyncio.gather(
            self._store.read(tenant_rows.get_tenant, tenant), self._store.read(job_rows.list_jobs, tenant, page)
        )
        return owner.name, [row for row in rows if row.state == "completed"]

    async def runs(self, chosen: RunChoice) -> tuple[Sequence[JobView], int]:
        """A page of jobs in short, without policies, and the number of all that are chosen."""
        rows, total = await self._store.read(chosen_jobs, chosen)
        owners = await self._store.read(tenant_rows.tenants_of, sorted({row.tenant for row in rows}))
        return await self._views(rows, owners, {}), total

    async def show(self, tenant: str, job: str) -> JobView:
        row = await self._store.read(job_rows.get_job, tenant, job)
        policies = await self._store.read(job_rows.policies, tenant, job)
        owner = await self._store.read(tenant_rows.get_tenant, tenant)
        [view] = await self._views([row], {tenant: owner}, {job: policies})
        return view

    async def _views(
        self, rows: Sequence[JobRow], owners: Mapping[str, TenantRow], policies: Mapping[str, Sequence[PolicyRow]]
    ) -> Sequence[JobView]:
        """Jobs with their ``owners`` by id, and their ``policies``, where these are shown, by job."""
        jobs = [row.id for row in rows]
        usage, rewards, since = await asyncio.gather(
            self._store.read(usage_of, jobs),
            self._store.read(rewards_of, jobs, SHOWN_REWARDS),
            self._store.read(state_times, None, jobs),
        )
        shown = {row.id: await self._policies(row, policies.get(row.id, [])) for row in rows}
        current = self._context.rooms.usage.current
        return [
            self._view(
                row,
                owners[row.tenant],
                shown[row.id],
                current(row.tenant, row.id, usage.get(row.id, {})),
                rewards.get(row.id, []),
                since.get(row.id),
            )
            for row in rows
        ]

    async def _policies(self, job: JobRow, rows: Sequence[PolicyRow]) -> Sequence[PolicyView]:
        """Views of a job's policies, after them those that follow one of them."""
        known = {row.name: row for row in rows}
        views = [_policy_view(row) for row in rows]
        running = self._jobs.runners.get(job.id)
        job_now = running.job if running is not None else None
        policies = job_now.policies if job_now is not None and job_now.recovered else {}
        for name, about in job.spec.get("policies", {}).items():
            follows = about.get("follows")
            if follows is None or (row := known.get(follows["policy"])) is None:
                continue
            if name in policies:
                newest = policies[name].newest
                version = newest.version if newest is not None else None
            else:
                version = await self._store.read(version_rows.followed, job.tenant, row.id, follows["every"])
            found = _policy_view(row).model_copy(update={"name": name, "version": version or 0, "follows": row.name})
            views.append(found)
        return [await self._with_last_step(job, view) for view in views] if several(job.spec) else views

    async def _with_last_step(self, job: JobRow, view: PolicyView) -> PolicyView:
        """The view of one of several policies with the figures of its last step, where it trains and has one."""
        if view.follows or view.version == 0:
            return view
        found = await self._store.read(version_rows.steps_of_versions, job.tenant, job.id, view.name, [view.version])
        row = finite(found.get(view.version, {}))
        step = row.get("policy_step", row.get("step"))  # the job's where it alone trains
        figures = {"step": step, "reward": row.get("reward"), "loss": row.get("loss"),
                   "staleness": row.get("staleness_mean")}  # fmt: skip
        return view.model_copy(update=figures)

    async def metrics(
        self, tenant: str, job: str, after: int = -1, limit: int | None = None
    ) -> Sequence[dict[str, Any]]:
        """One row per committed step later than ``after``, the first ``limit``."""
        await self._store.read(job_rows.get_job, tenant, job)
        return await self._rows(tenant, job, after, limit)

    async def _rows(self, tenant: str, job: str, after: int, limit: int | None) -> builtins.list[dict[str, Any]]:
        return await self._store.read(_finite_steps, tenant, job, after, limit)

    async def follow(self, tenant: str, job: str, after: int = -1) -> AsyncIterator[dict[str, Any]]:
        """Metrics rows of later steps than ``after`` as they are committed, until the job has ended."""
        async with aclosing(self.feeds.follow(tenant, job, after)) as events:
            async for _, data in events:
                if isinstance(data, FeedRow):
                    yield data.metrics

    async def wait(self, tenant: str, job: str, *, until_fault: bool = False) -> JobView:
        """The job when it has ended; with ``until_fault`` also when it is paused for a fault."""
        signal = self._jobs.signal(job)
        while True:
            change = signal.next
            view = await self.show(tenant, job)
            if view.state in FINAL_JOB_STATES or (until_fault and view.paused_by == "fault"):
                return view
            await change.wait()

    async def events(self, tenant: str, job: str, limit: int = 100) -> Sequence[JobEvent]:
        await self._store.read(job_rows.get_job, tenant, job)
        found, _ = await self.events_before(tenant, job, limit)
        return found

    async def events_before(
        self, tenant: str, job: str, limit: int, before: int | None = None
    ) -> tuple[Sequence[JobEvent], int | None]:
        """The newest events older than the event ``before``, oldest first; and the first of them, if there are older
        ones."""
        limit = min(limit, EVENTS_SHOWN)
        rows = await self._store.read(tenant_rows.events, tenant, job, limit + 1, before)
        shown = rows[-limit:]
        view = [JobEvent(time=row.time, kind=row.kind, text=row.text) for row in shown]
        return view, shown[0].id if len(rows) > limit else None

    async def versions(self, tenant: str, job: str, policy: str, page: Page | None = None) -> Sequence[VersionView]:
        """The versions of a policy, oldest first, each with the metrics of its last step."""
        row = await find_policy(self._store, tenant, job, policy)
        rows = await self._store.read(version_rows.versions, tenant, row.id, page)
        return await self._version_views(tenant, job, policy, rows)

    async def checkpoints(
        self, tenant: str, job: str, policy: PolicyView, page: Page
    ) -> Sequence[tuple[VersionView, float | None]]:
        """A page of the kept versions of a policy that contain a step, newest first, with the loss on held-out rows."""
        rows = await self._store.read(version_rows.kept_of_policy, tenant, policy.id, page)
        numbers = [row.version for row in rows]
        losses = await self._store.read(version_rows.held_out_losses, tenant, policy.id, numbers)
        views = await self._version_views(tenant, job, policy.name, rows)
        return [(view, losses.get(view.version)) for view in views]

    async def _version_views(
        self, tenant: str, job: str, policy: str, versions: Sequence[VersionRow]
    ) -> Sequence[VersionView]:
        """Versions of a policy, each with the metrics of its last step."""
        found = await self._store.read(
            version_rows.steps_of_versions, tenant, job, policy, [version.version for version in versions]
        )
        metrics = {number: finite(step) for number, step in found.items()}
        return [
            VersionView(
                version=row.version, parent=row.parent, hash=row.hash, step=row.step, created=row.created,
                metrics=metrics.get(row.version, {}), kept=row.kept, lost=row.lost, evaluation=row.evaluation,
            )
            for row in versions
        ]  # fmt: skip

    async def evaluations(self, tenant: str, job: str) -> Sequence[EvaluationView]:
        return await self.evaluation_views(tenant, job, await self.evaluation_rows(tenant, job))

    async def evaluation_views(self, tenant: str, job: str, rows: Sequence[EvaluationRow]) -> Sequence[EvaluationView]:
        names = await self.policy_names(tenant, job)
        return [evaluation_view(names, row) for row in rows]

    async def policy_names(self, tenant: str, job: str) -> dict[str, str]:
        """The names of a job's policies by their ids."""
        return {policy.id: policy.name for policy in await self._store.read(job_rows.policies, tenant, job)}

    async def job_health(self, tenant: str, job: str) -> JobHealthView:
        """Alarms of a job; advice where there are none."""
        view = await self.show(tenant, job)
        policies = several(view.spec)
        rows = await self._rows(tenant, job, view.step - HEALTH_STEPS * max(1, len(policies)), None)
        evaluations = await self._store.read(
            version_rows.last_evaluations, tenant, job, after=0
        )  # version 0 has not learned anything yet
        known = JobHealth(
            now=view.finished or self._context.clock.time(),
            state=view.state,
            rows=rows,
            episodes=await self.episodes.recent(tenant, job),
            counters=view.counters,
            evaluations=[view.model_dump() for view in await self.evaluation_views(tenant, job, evaluations)],
            group_size=view.spec["algorithm"]["group_size"],
            waits_for=view.waits_for,
            policies=policies,
            max_tokens={
                name: most for name in policies or [""] if (most := max_tokens_of(view.spec, name)) is not None
            },
        )
        found = alarms(known)
        return JobHealthView(
            alarms=[AlarmView.model_validate(alarm) for alarm in found],
            advice=[] if found else advice_lines(rows, view.spec),
        )

    async def evaluation_rows(
        self, tenant: str, job: str, page: Page | None = None, answers: bool = True
    ) -> Sequence[EvaluationRow]:
        """The evaluations of a job, by policy and version; ``answers``: with the prompts and answers."""
        await self._store.read(job_rows.get_job, tenant, job)
        return await self._store.read(version_rows.evaluations, tenant, job, page, answers)

    async def adapter(self, tenant: str, job: str, policy: str, version: int | None) -> tuple[int, protocol.Manifest]:
        """The number and the artifact of a version (the newest for None). Raises :class:`NotFound` where it is not
        kept, :class:`CorruptArtifact` where its bytes are not what its hash says."""
        _, found = await find_version(self._store, tenant, job, policy, version)
        return found.version, await self._context.threads.openers(self._context.artifacts.verify, found.hash)

    def _view(
        self,
        row: JobRow,
        tenant: TenantRow,
        policies: Sequence[PolicyView],
        usage: Usage,
        stored: Sequence[float],
        since: float | None,
    ) -> JobView:
        running = self._jobs.runners.get(row.id)
        job = running.job if running is not None and row.state not in FINAL_JOB_STATES else None
        if job is not None and job.recovered:
            rewards, step, counters = list(job.progress.rewards), job.step, dict(job.progress.counters)
        else:
            rewards, step, counters = [*stored], row.step, row.counters
        state, reason, waits = row.state, row.reason, ""
        host = row.spec["environment"].get("hosted")
        by_owner = reason == BY_OWNER.format(state="paused")
        paused_by: Literal["", "owner", "outage", "fault"] = ""
        if state == "paused":
            paused_by = "outage" if row.resumes else "owner" if by_owner else "fault"
        if running is not None and running.unstored:
            state, reason, paused_by = "paused", running.unstored, "outage"
        elif (waiting := self._jobs.waiting.get(row.id)) is not None:
            waits = self._admission.waits_for(waiting)
        elif row.state in ("queued", "running"):
            waits = job.waits_for() if job is not None else f"{needed_models(row.spec)} to be ready"
        return JobView(
            id=row.id,
            name=row.name,
            tenant=tenant.name,
            state=state,
            reason=reason,
            paused_by=paused_by,
            waits_for=waits,
            since=since or row.created,
            base_model=row.spec["base_model"],
            step=step,
            steps=_steps(row.spec),
            policy=scored_policy(row.spec),
            reward=rewards[-1] if rewards else None,
            rewards=rewards,
            tokens_per_second=job.progress.tokens_per_second() if job is not None else 0.0,
            staleness=job.progress.staleness if job is not None else None,
            hosted=self._context.rooms.hosts.connected(row.tenant, host) if host is not None else None,
            groups_in_flight=job.groups.in_flight if job is not None else 0,
            groups_ready=max((len(loop.buffer.ready) for loop in job.loops), default=0) if job is not None else 0,
            tokens=counters.get("tokens", 0),
            counters=counters,
            cost=cost_view(usage),
            policies=[*policies],
            created=row.created,
            started=row.started or 0.0,
            finished=row.finished or 0.0,
            spec=row.spec,
        )

    # --- the service itself -------------------------------------------------------------------------------------------

    async def models(self, tenant: str | None = None) -> Sequence[BaseModelView]:
        """Base models that the tenant may name: loaded, known (can be prepared), or refused and why."""
        admin = tenant is None or (await self._store.read(tenant_rows.get_tenant, tenant)).admin
        fleet = self._context.rooms.fleet
        loaded = Counter(w.hello.model for w in fleet.all() if w.working)
        rows = []
        settings = self._context.settings
        for name, state in (await self._model_states({*CATALOGUE, *loaded, *fleet.failures})).items():
            if not may_name(settings, name, admin):
                continue
            reason = "" if loaded[name] else state.reason or fleet.failure(name)
            shown: Any = "loaded" if loaded[name] else "refused" if reason else state.state
            backends = state.backends(settings.engine.inference_engine, settings.training.trainer)
            rows.append(
                BaseModelView(
                    name=name, state=shown, reason=reason, note=state.note, workers=loaded[name], **asdict(backends)
                )
            )
        return rows

    async def _model_states(self, names: set[str]) -> dict[str, Status]:
        """The states of base models by name, in order of the names, read from files. Requests that come together share
        one look."""
        while True:
            since, found = self._models
            age = self._context.clock.monotonic() - since if found.keys() == names else math.inf
            if age > MODEL_SECONDS and self._look is None:
                self._look = service_task(self._look_at_models(names))
            if age <= LATE_MODEL_SECONDS:
                return found
            assert self._look is not None
            await asyncio.shield(self._look)

    async def _look_at_models(self, names: set[str]) -> None:
        cache = self._context.settings.cache
        try:
            found = await in_thread(lambda: {name: status(cache, name) for name in sorted(names)})
            self._models = self._context.clock.monotonic(), found
        finally:
            self._look = None

    def workers(self) -> Sequence[WorkerView]:
        """Every connected worker, with its last heartbeat."""
        context, now, rows = self._context, self._context.clock.monotonic(), []
        for worker in context.rooms.fleet.all():
            beat = worker.beat
            rows.append(WorkerView.of(
                worker.hello, state=worker.state, seconds=now - worker.since, roles=[*worker.roles],
                adapters=len(worker.cached), requests=context.rooms.rollouts.pool.outstanding(worker),
                tokens_per_second=worker.tokens_per_second() if worker.working else 0.0, note=worker.note,
                max_flush_tokens=worker.max_flush_tokens,
                beat=HeartbeatView.of(beat) if beat is not None else None,
            ))  # fmt: skip
        return rows

    def pools(self) -> Sequence[PoolView]:
        """The number of rollout workers of each base model, and the wanted one."""
        return [PoolView(**pool) for pool in self._context.rooms.models.pool.pools()]

    async def costs(self) -> Costs:
        """The cost of each tenant, of deleted ones where they caused any, and of the workers."""
        tenants = await self._store.read(tenant_rows.list_tenants, deleted=True)
        usage = self._context.rooms.usage
        seconds = self._context.rooms.quotas.service_seconds
        bills = [
            TenantCost(tenant=row.id, name=row.name, deleted=row.deleted, cost=cost, **seconds(row.id))
            for row in tenants
            if (cost := usage.tenant_view(row.id)).seconds or row.deleted is None
        ]
        return Costs(tenants=bills, workers=usage.fleet())

    def health(self) -> Health:
        """Counts of jobs, totals and gauges of the service."""
        context, fleet, rollouts = self._context, self._context.rooms.fleet, self._context.rooms.rollouts
        serving = [worker for worker in fleet.all() if worker.working]
        beats = [worker.beat for worker in serving if worker.beat is not None]
        figures = over_workers(beat.gauges for beat in beats)
        counted = sum((running.counted() for running in self._jobs.runners.values()), Counter(self._jobs.totals))
        return Health(
            jobs={state: count for state, count in sorted(self._jobs.states.items()) if count},
            totals={
                "steps": self._jobs.totals["steps"],
                "jobs_resumed": self._jobs.totals["jobs_resumed"],
                "sink_failures": self._jobs.totals["sink_failures"],
                "trained_tokens": self._jobs.totals["trained_tokens"],
                "sampled_tokens": rollouts.sampled_tokens,
                "requests_migrated": rollouts.migrated,
                "migrated_tokens": rollouts.migrated_tokens,
                **{f"requests_requeued_{reason}": count for reason, count in rollouts.requeues.items()},
                "rollout_probes": rollouts.queues.probes,
                "late_chunks": rollouts.late_chunks,
                "training_retries": context.rooms.training.retries,
                "worker_losses": fleet.losses,
                "trainer_wait_seconds": context.rooms.seeding.waits["trainer"],
                "remote_wait_seconds": context.rooms.seeding.waits["remote"],
                "failed_pulls": context.rooms.weights.failed_pulls,
                "frames_ignored": fleet.ignored_frames,
                "frames_bad": fleet.bad_frames,
                **{f"refused_{limit}": context.records.refused[limit] for limit in REFUSED},
                **context.rooms.usage.totals(),
                **{name: counted[name] for name in COUNTED},
            },
            gauges={
                "jobs_waiting": len(self._jobs.waiting),
                "requests_waiting": rollouts.waiting(),
                "rollout_orders_active": (active := rollouts.queues.active_orders()),
                "rollout_orders_inactive": len(rollouts.queues.orders) - active,
                "requests_running": sum(rollouts.pool.outstanding(worker) for worker in fleet.all()),
                "environment_hosts": context.rooms.hosts.count(),
                "decoding_rows": sum(beat.active for beat in beats),
                "training_operations": sum(beat.training for beat in beats),
                **figures,
                "draft_acceptance": figures["draft_tokens_accepted"] / max(1.0, figures["draft_tokens"]),
                "slo_slack_seconds": min((beat.slo_slack for beat in beats if beat.interactive), default=0.0),
                "workers_stalled": sum(bool(beat.stalled) for beat in beats),
                "flush_seconds": context.settings.worker.flush_seconds,
                "price_per_hour": context.rooms.usage.price(),
                "max_flush_tokens": max((worker.max_flush_tokens for worker in serving), default=0),
                **context.rooms.seeding.gauges(),
            },
        )


def _steps(spec: Mapping[str, Any]) -> int | None:
    """The optimizer steps after which a stored job ends, of all its policies."""
    wanted = [
        (policy.get("stop") or {}).get("steps") or spec["stop"]["steps"]
        for policy in spec.get("policies", {"main": {}}).values()
        if policy.get("train", True)
    ]
    return None if None in wanted else sum(wanted)


def evaluation_view(policies: Mapping[str, str], row: EvaluationRow) -> EvaluationView:
    """``policies``: names by id."""
    return EvaluationView(
        policy=policies[row.policy], version=row.version, prompts=row.prompts, mean=row.score, stderr=row.error,
        kept=row.kept, **{"held_out": [], **row.results},
    )  # fmt: skip


def _finite_steps(connection: Connection, tenant: str, job: str, after: int, limit: int | None) -> list[dict[str, Any]]:
    return [finite(row) for row in version_rows.steps(connection, tenant, job, after, limit)]


def _policy_view(row: PolicyRow) -> PolicyView:
    return PolicyView(name=row.name, id=row.id, rank=row.rank, alpha=row.alpha, version=row.head_version or 0)
