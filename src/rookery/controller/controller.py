"""The controller's commands: submit, pause, resume and cancel jobs; serve workers and environment hosts;
sample; upload. The read side is :mod:`rookery.controller.queries`.

* Every command about a job is scoped by its tenant; another tenant's job answers "not found".
* A submitted job is durable before the reply. ``start`` resumes every job that an earlier process left unfinished,
  whatever ended that process.
* A job that hits a repairable problem is paused with the reason; nothing is lost.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from weakref import WeakValueDictionary

from rookery import protocol
from rookery.aio import cancel_all, restarting
from rookery.controller.completions import Completions
from rookery.controller.context import ControllerContext, Rooms
from rookery.controller.deletions import Deletions
from rookery.controller.episode_views import DryRun
from rookery.controller.fleet.agents import Agents
from rookery.controller.fleet.env_hosts import EnvironmentHosts
from rookery.controller.fleet.events import (
    AdaptersChanged,
    HeartbeatReceived,
    MessageReceived,
    RolesChanged,
    WorkerCatchingUp,
    WorkerDraining,
    WorkerEvent,
    WorkerFailed,
    WorkerGone,
    WorkerJoined,
    WorkerLoaded,
    WorkerReady,
    WorkerSuspect,
)
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.fleet.worker import Worker
from rookery.controller.job_sinks import JobSinks
from rookery.controller.jobs.admission import JobAdmission
from rookery.controller.jobs.registry import JobRegistry, WaitingJob
from rookery.controller.jobs.run_record import RunRecord
from rookery.controller.jobs.runner import JobEnd, JobRunner
from rookery.controller.options import ControllerOptions
from rookery.controller.outages import OutageRetries, Outages, outage_of
from rookery.controller.planned import PlanFollower, train_speeds
from rookery.controller.queries import JobQueries
from rookery.controller.quotas import Quotas
from rookery.controller.rollout.elastic import ElasticPool, ModelUse
from rookery.controller.rollout.scheduler import TokensReceived
from rookery.controller.services import Records, Services
from rookery.controller.sessions.sessions import Sessions
from rookery.controller.stored_spans import StoredSpans
from rookery.controller.targets import Targets
from rookery.controller.timeline import WorkerTimeline
from rookery.controller.training.dispatcher import OperationSent, OperationSucceeded, TrainingDispatcher
from rookery.controller.training.policy_versions import PolicyVersions
from rookery.controller.training.slots import TrainerSlots
from rookery.controller.uploads import Uploads
from rookery.controller.usage import UsageMeter
from rookery.controller.validation import JobValidator, with_defaults
from rookery.controller.views import BY_OWNER, JobState, JobView
from rookery.controller.weights.gc import ArtifactCollector
from rookery.controller.weights.store import WeightStore
from rookery.controller.weights.tickets import TICKET_SECONDS, ReadKeys, Tickets
from rookery.environments.base import SplitSizes
from rookery.errors import Conflict, RookeryError, StorageFull, Unavailable, shortages
from rookery.protocol.connection import Connection
from rookery.scheduling import crashes
from rookery.spec.job import JobSpec, stored_base_models
from rookery.spec.parsing import request_hash
from rookery.storage.models import FINAL_JOB_STATES, JobRow, TenantRow
from rookery.storage.repositories import jobs, tenants
from rookery.storage.repositories import versions as version_rows
from rookery.telemetry.spans import SpanRing
from rookery.telemetry.tracing import EpisodeTracer
from rookery.turns import work_of

log = logging.getLogger("rookery.controller")

START_CRASHES = (
    "the service ended {} times in a row while it started this job alone: make the job smaller, or resume it"
)
"""The reason for the pause of a job that is not taken up again."""


class Controller:
    def __init__(
        self,
        services: Services,
        *,
        check_environment: Callable[[str, dict[str, Any]], SplitSizes | None],
        jobs_folder: Path,
        options: ControllerOptions | None = None,
    ) -> None:
        """``check_environment(id, options)`` raises :class:`UserError` for a built-in that cannot be made with these
        options."""
        options = options or ControllerOptions()
        store, artifacts, settings, clock = services.store, services.artifacts, services.settings, services.clock
        rules, plan, workers = options.rollout_rules, options.plan, options.workers
        self.jobs = JobRegistry()
        self.timeline = WorkerTimeline(clock)
        url = settings.server.otlp_url
        self.records = Records(spans=SpanRing(begun=clock.time()), tracer=EpisodeTracer(url) if url else None)
        self.record = RunRecord(jobs_folder.with_name("running.json"), clock)
        self._jobs_folder = jobs_folder
        self._orphan_keep_seconds = options.orphan_keep_seconds
        self.tickets = Tickets(artifacts, clock, TICKET_SECONDS, options.random_bytes)
        fleet = Fleet(settings, clock, self.on_event)
        self._fleet = fleet
        self.reads = ReadKeys(fleet.signing_time)
        weights = WeightStore(fleet, artifacts, store.transfer, clock, settings.worker.site)
        collector = ArtifactCollector(store, artifacts, weights)
        quotas = Quotas(settings.limits, clock, store, self.records.refused, self._models_of, self.jobs.tenants)
        rollouts = options.scheduler(fleet, weights, settings, clock, quotas.tenant_shares, rules)
        speeds = train_speeds(plan) if plan is not None else {}
        training = TrainingDispatcher(services, fleet, weights, collector, self.tickets, quotas.tenant_shares, speeds)
        rooms = Rooms(
            fleet=fleet,
            weights=weights,
            rollouts=rollouts,
            training=training,
            seeding=options.seeding(fleet, rollouts, training, settings, clock),
            hosts=EnvironmentHosts(
                settings,
                clock,
                services.ids,
                lambda owner: store.read(jobs.unfinished_job_ids, owner),
                Agents(clock, options.random_bytes, lambda episode: store.read(jobs.find_episode, episode)),
                services.threads.work,
            ),
            usage=UsageMeter(clock, store, quotas),
            models=ModelUse(
                settings,
                clock,
                workers.provide,
                workers.release,
                ElasticPool(settings, rules.scale_window, clock, fleet, rollouts.pool.busy_seconds, workers.scale),
            ),
            quotas=quotas,
            collector=collector,
        )
        self.context = ControllerContext(
            **vars(services),
            rooms=rooms,
            records=self.records,
            outages=Outages(store, artifacts, clock, settings.worker.heartbeat_seconds),
        )
        self.admission = JobAdmission(settings.limits, clock, self.jobs, quotas)
        self.retries = OutageRetries(settings.limits, clock, quotas.used_up)
        self.sinks = JobSinks(self.context, self.jobs.signal, self.jobs.totals, options.sink_rules)
        self._stored_spans = StoredSpans(
            store, self.records.spans, clock, services.threads, settings.server.timeline_bytes, fleet.open_spans
        )
        self.queries = JobQueries(self.context, self.jobs, self.admission, self._stored_spans)
        targets = Targets(self.context, fleet, self.records.refused)
        uploads = Uploads(self.context, quotas, collector)
        self.add_dataset, self.add_adapter, self.checked = uploads.add_dataset, uploads.add_adapter, uploads.checked
        self._validator = JobValidator(
            self.context, targets, uploads, rooms.hosts, quotas, check_environment, self.records.refused
        )
        self.completions = Completions(
            services, fleet, rollouts, rooms.models, quotas, targets, self._keeping, options.answer_tokens
        )
        self._slots = TrainerSlots(fleet, settings, clock, quotas.tenant_shares, options.session_rules.slot_wait)
        self.sessions = Sessions(self.context, targets, self._slots, options.session_rules)
        self._deletions = Deletions(store, clock, quotas, collector, self.sessions, self)
        self.plan: PlanFollower | None = None
        if plan is not None:
            self.plan = PlanFollower(plan, fleet, clock, services.threads.work, self.jobs.steps_left)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    @asynccontextmanager
    async def _keeping(self, ref: protocol.AdapterRef | None) -> AsyncIterator[None]:
        """Within, the retention of a running job keeps the version, and its artifact is not deleted."""
        async with self.context.rooms.collector.referenced(ref):
            with self.jobs.using(ref):
                yield

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Delete what a crash left half-written, resume every unfinished job, start the background tasks."""
        context, store = self.context, self.context.store
        await store.write(jobs.fence)
        for key_hash in await store.read(tenants.worker_keys):  # workers may read before they have connected again
            self.reads.add(key_hash)
        await context.rooms.collector.collect_all(self._orphan_keep_seconds)
        await context.rooms.usage.start()
        await context.rooms.quotas.start()
        rooms, watch_models = context.rooms, partial(context.rooms.models.watch, self._models_in_use)
        for watch in (rooms.fleet.watch, rooms.rollouts.watch, rooms.seeding.watch, rooms.hosts.watch,
                      self.sessions.watch, self.sessions.watch_lifetimes, rooms.usage.watch, self._watch_jobs,
                      watch_models, self._stored_spans.watch,
                      partial(rooms.collector.count_time, context.clock)):  # fmt: skip
            self._tasks.append(asyncio.create_task(restarting(watch, context.clock)))
        if self.plan is not None:
            self._tasks.append(asyncio.create_task(restarting(self.plan.watch, context.clock)))
        await self.sessions.start()
        blamed = await self._hold_suspects()
        for row in sorted(await store.read(jobs.all_unfinished_jobs), key=lambda row: row.state != "running"):
            self.jobs.states[row.state] += 1
            if row.state == "paused":
                if row.resumes:
                    self.retries.restarted(row.tenant, row.id)
                continue
            if row.id in blamed and row.crashes >= context.settings.limits.start_crashes:
                context.records.refused["start_crashes"] += 1
                await self._set_state(row, "paused", START_CRASHES.format(row.crashes))
            else:
                context.rooms.rollouts.expect_resumptions()
                self._admit(row)
        await self.sinks.start()
        self._tasks.append(asyncio.create_task(restarting(self._deletions.watch, context.clock)))

    async def _hold_suspects(self) -> list[str]:
        """If the service did not end in order, hold the jobs that may have ended it. Returns the one that was shown to
        have done so, if there is one."""
        last, boot = await self.record.begin()
        if last is None:
            return []
        rows = {row.id: row for row in await self.context.store.read(jobs.all_unfinished_jobs) if row.state != "paused"}
        found = crashes.in_order(rows, crashes.suspects(last, boot))
        if len(found) == 1:
            await self.context.store.write(jobs.count_crash, found[0])
        count = rows[found[0]].crashes + 1 if len(found) == 1 else 0
        for job, seconds in crashes.delays(found, count).items():
            self.admission.hold(job, seconds)
            extra = {"tenant": rows[job].tenant, "job": job}
            log.warning("job %s waits %.0f s: the service ended while it was starting", job, seconds, extra=extra)
        return found if len(found) == 1 else []

    async def stop(self) -> None:
        """Stop everything; jobs stay as they are and are resumed at the next start."""
        self._stopping = True
        tasks = [runner.task for runner in self.jobs.runners.values()] + self._tasks
        await cancel_all(*tasks)
        await self.sinks.stop()
        await self.record.close()
        await self.sessions.stop()
        await self.context.rooms.weights.close()
        await self.context.rooms.usage.stop()
        await self._stored_spans.save()
        if self.records.tracer is not None:
            await asyncio.to_thread(self.records.tracer.close, self.context.settings.server.stop_seconds)

    async def serve_worker(self, connection: Connection, key_hash: str = "") -> None:
        """Serve one worker, whose API key has this hash, until its connection ends."""
        await self._fleet.serve(connection, self.reads.add(key_hash))

    async def serve_host(self, connection: Connection, owner: str) -> None:
        """Serve one environment host of ``owner`` until its connection ends."""
        await self.context.rooms.hosts.serve(connection, owner, self.completions.answer_host)

    # --- events of workers --------------------------------------------------------------------------------------------

    def on_event(self, event: WorkerEvent) -> None:
        """Call those whom an event of a worker concerns, in the written order. What they emit in turn is handled before
        the next one is called."""
        rooms, worker = self.context.rooms, event.worker
        rollouts, training, seeding, usage = rooms.rollouts, rooms.training, rooms.seeding, rooms.usage
        payer = usage.payer_of(event.policy) if event.policy else ("", "")
        if event.shown:
            self.timeline.add(event, *payer)
        self.records.spans.record(event.spans, *payer)
        match event:
            case MessageReceived():
                self._on_message(worker, event.message)
            case TokensReceived():
                seeding.on_tokens(event.request)
                usage.on_tokens(worker, event.request, event.tokens)
            case HeartbeatReceived():
                rooms.weights.on_heartbeat(worker, event.beat)
                rollouts.on_heartbeat(worker, event.beat)
                usage.on_heartbeat(worker, event.beat)
            case OperationSent():
                seeding.on_operation(worker, event.operation, None)
            case OperationSucceeded():
                seeding.on_operation(worker, event.operation, event.done)
                usage.on_operation(worker, event.operation, event.done)
            case WorkerJoined():
                rooms.weights.on_worker_joined(worker)
                if self.plan is not None:
                    self.plan.on_worker_joined(worker)
                seeding.on_worker_joined(worker)
                usage.on_worker_joined(worker)
            case WorkerLoaded():
                rooms.weights.on_worker_loaded(worker, self.jobs.versions_in_use(worker.hello.model))
                rooms.fleet.admit(worker)
            case WorkerReady() | WorkerCatchingUp() | AdaptersChanged() | RolesChanged():
                rollouts.on_worker_changed(worker)
                training.on_worker_changed(worker)
                seeding.on_worker_changed(worker)
                self._slots.review()
            case WorkerFailed():
                if event.last:
                    self.model_failed(worker.hello.model, event.reason, worker.name)
            case WorkerDraining() | WorkerSuspect() | WorkerGone():
                rooms.weights.on_worker_lost(worker)
                rollouts.on_worker_changed(worker)  # before others react: it gets no work any more
                seeding.on_worker_changed(worker)
                rollouts.on_worker_lost(worker)
                training.on_worker_lost(worker)
                if not isinstance(event, WorkerDraining):  # it is paid for until its connection ends
                    usage.on_worker_lost(worker)
                if self.plan is not None:
                    self.plan.on_worker_lost(worker)

    def _on_message(self, worker: Worker, message: protocol.WorkMessage) -> None:
        rooms = self.context.rooms
        match message:
            case protocol.Output():
                rooms.rollouts.on_output(worker, message)
            case protocol.OperationDone():
                rooms.training.on_done(worker, message)
            case protocol.AdaptersCached():
                rooms.weights.on_cached(worker, message)
            case protocol.AdaptersEvicted():
                rooms.weights.on_evicted(worker, message)
            case protocol.VersionStaged():
                rooms.training.on_staged(worker, message)
            case protocol.HandedOver():
                rooms.weights.on_handed_over(worker, message)
            case protocol.SourcesRequest():
                rooms.weights.on_sources_request(worker, message)
            case protocol.PullFailed():
                rooms.weights.on_pull_failed(worker, message)

    def _models_of(self, tenant: str) -> set[str]:
        """The base models that a tenant's jobs and training runs use now."""
        return self.jobs.models(tenant) | self.sessions.models_in_use(tenant)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    async def submit(self, tenant: str, data: Any, key: str | None = None, request: Any = None) -> tuple[JobView, bool]:
        """Validate a job, make it durable, start it; returns it and True. A repeated ``key`` returns the first job and
        False. ``request``: the client's, where it is not ``data`` itself."""
        known, digest = await self._keyed(tenant, key, data if request is None else request)
        if known is None:
            with self.context.rooms.quotas.queueing(tenant, len(self.jobs.waiting.of(tenant=tenant))):
                row, created = await self._store_job(tenant, data, key, digest)
        elif known.request_hash == digest:
            row, created = known, False
        else:
            row, created = await self._store_job(tenant, data, key, digest, known)
        return await (self.queries.show(tenant, row.id) if created else self._repeated(row)), created

    async def repeated(self, tenant: str, key: str | None, request: Any) -> JobView | None:
        """The job of the same ``request`` with this ``key``, whatever has become of the things that it names and of the
        tenant's limits; None where there is none."""
        known, digest = await self._keyed(tenant, key, request)
        return None if known is None or known.request_hash != digest else await self._repeated(known)

    async def _keyed(self, tenant: str, key: str | None, request: Any) -> tuple[JobRow | None, str]:
        """The job that the tenant submitted with this key, and the hash of the ``request``; empty without a key."""
        if key is None:
            return None, ""
        known = await self.context.store.read(jobs.keyed_job, tenant, key)
        return known, await self.context.threads(request_hash, request)

    async def _store_job(
        self, tenant: str, data: Any, key: str | None, digest: str, known: JobRow | None = None
    ) -> tuple[JobRow, bool]:
        """The durable row of a job, and whether it is new; it is started then. ``digest``: the hash of its request;
        ``known``: the job with that key."""
        spec, policies, warnings = await self._validator.check(tenant, data, known=known is not None)
        dumped, id, now = spec.model_dump(mode="json"), self.context.ids.new("job"), self.context.clock.time()
        async with AsyncExitStack() as reserved:
            if known is None:
                await reserved.enter_async_context(self.context.rooms.quotas.describing(tenant, dumped))
            new = JobRow(
                id=id, tenant=tenant, name=spec.name, spec=dumped, created=now, idempotency_key=key, request_hash=digest
            )
            row, created = await self.context.store.write(
                jobs.submit_job,
                new,
                [replace(policy, job=id) for policy in policies],
                warnings,
            )
        if created:
            self.jobs.states["queued"] += 1
            log.info("job %s submitted", row.name, extra={"tenant": tenant, "job": row.id})
            self.sinks.follow(row)
            self._admit(row)
        elif row.spec != dumped:
            raise Conflict(f"the key {key!r} was used for another job ({row.id}); use a new key for a new job")
        return row, created

    async def _repeated(self, row: JobRow) -> JobView:
        """A job that was submitted before. Its first submission may have ended before the job was launched."""
        if row.state == "queued":
            async with self._lock(row.id):
                await self._launch_if_queued(row.tenant, row.id)
        return await self.queries.show(row.tenant, row.id)

    async def dry_run(self, tenant: str, data: Any) -> DryRun:
        """The job with every default filled in, the warnings about it, three of its prompts as the policy would read
        them, and the reward of the best constant reply."""
        spec, _, warnings = await self._validator.check(tenant, data)
        prompts, constants, notes = await self._validator.preview(tenant, spec)
        whole = await self.context.threads(with_defaults, spec)
        return DryRun(spec=whole, warnings=[*warnings, *notes], prompts=prompts, constants=constants)

    async def differences(self, tenant: str, stored: Mapping[str, Any], data: Any) -> list[str]:
        """The fields in which a stored job differs from ``data``, which is validated as at a submission."""
        spec, _, _ = await self._validator.check(tenant, data)

        def differing() -> list[str]:
            found, other = with_defaults(spec), with_defaults(JobSpec.model_validate(stored))
            return [name for name in found if found[name] != other[name]]

        return await self.context.threads(differing)

    async def pause(self, tenant: str, job: str) -> None:
        """Stop working on the job until it is resumed; its groups and versions stay."""
        await self._end(tenant, job, "paused")

    async def cancel(self, tenant: str, job: str) -> None:
        """End the job for good; its versions stay."""
        await self._end(tenant, job, "cancelled")

    async def delete_job(self, tenant: str, job: str) -> None:
        """Delete an ended job with its results and weights. Raises :class:`Conflict`, :class:`NotFound`."""
        context = self.context
        async with self._lock(job):
            runner = self.jobs.runners.get(job)
            if runner is not None and (await context.store.read(jobs.get_job, tenant, job)).state in FINAL_JOB_STATES:
                await asyncio.wait([runner.task])
            await context.rooms.usage.save()  # else the next one would store the job's row again
            while await context.store.write(jobs.delete_history, tenant, job):
                pass
            await context.rooms.collector.delete_unnamed(jobs.delete_job, tenant, job)
        await context.threads(shutil.rmtree, self._jobs_folder / job, ignore_errors=True)
        log.info("job %s is deleted by its owner", job, extra={"tenant": tenant, "job": job})

    async def delete_upload(self, tenant: str, digest: str) -> None:
        """Delete a dataset or an adapter that the tenant uploaded. Raises :class:`Conflict` where a job that has not
        ended uses it, :class:`NotFound`."""
        await self.context.rooms.collector.delete_unnamed(tenants.delete_upload, tenant, digest)

    async def limit_tenant(self, tenant: str, changes: Mapping[str, float | None]) -> TenantRow:
        """Change limits of a tenant, or its weight; None is the service's setting. Running jobs continue. Raises
        :class:`NotFound`."""
        row = await self.context.store.write(tenants.limit_tenant, tenant, changes)
        self.context.rooms.quotas.override(tenant, row.limits)
        self._launch_admitted(tenant)
        return row

    async def delete_tenant(self, tenant: str, force: bool) -> None:
        """Delete a tenant with its keys, jobs, uploads and checkpoints; its clients are finished. ``force`` cancels
        jobs that have not ended. Raises :class:`Conflict`, :class:`NotFound`."""
        await self._deletions.delete_tenant(tenant, force)

    def model_failed(self, model: str, reason: str, worker: str = "") -> None:
        """The ``worker`` of a base model, or without a name all that one process started, does not work. Jobs that have
        no other one are paused with the reason; like other outages, this one may pass."""
        if failure := self.context.rooms.fleet.fail(model, reason, worker):
            log.error("%s", failure)
            for runner in list(self.jobs.runners.values()):
                if model in stored_base_models(runner.row.spec):
                    runner.halt(f"worker: {failure}")

    def host_failed(self, reason: str) -> None:
        """The host of the built-in environments does not work: jobs that find none show the reason."""
        self.context.rooms.hosts.fail(reason)

    async def _watch_jobs(self) -> None:
        """Pause the jobs of tenants without tokens for today, launch those that may start now, resume those that an
        outage or a limit paused; until cancelled."""
        while True:
            await self.context.clock.sleep(self.context.settings.worker.heartbeat_seconds)
            self.context.rooms.models.pool.keep(self.jobs.models())
            for runner in list(self.jobs.runners.values()):
                if reason := self.context.rooms.quotas.used_up(runner.row.tenant):
                    runner.halt(reason)
            for tenant in self.jobs.waiting.groups("tenant"):
                self._launch_admitted(tenant)
            kinds = self.retries.outages()
            answers = await asyncio.gather(*map(self.context.outages.lasts, kinds))
            for tenant, job in self.retries.due([kind for kind, lasts in zip(kinds, answers, strict=True) if lasts]):
                try:
                    with work_of(tenant):
                        await self.resume(tenant, job, by_itself=True)
                except RookeryError as error:
                    log.warning("job %s cannot resume yet: %s", job, error, extra={"tenant": tenant, "job": job})
                    self.retries.outage(tenant, job, outage_of(error) or "other")

    async def resume(self, tenant: str, job: str, by_itself: bool = False) -> None:
        """Continue a paused job; ``by_itself`` only if it resumes by itself."""
        async with self._lock(job):
            row = await self.context.store.read(jobs.get_job, tenant, job)
            if by_itself and not row.resumes:
                return
            if not by_itself:
                self.admission.hold(job, 0.0)
            with self.context.rooms.quotas.queueing(tenant, len(self.jobs.waiting.of(tenant=tenant))):
                await self._resume(row, by_itself)

    async def _resume(self, row: JobRow, by_itself: bool) -> None:
        runner = self.jobs.runners.get(row.id)
        if runner is not None and runner.unstored:
            raise Unavailable(f"job {row.id} cannot resume: its pause could not be stored yet: {runner.unstored}")
        if row.state in FINAL_JOB_STATES:
            raise Conflict(f"job {row.id} is {row.state}: submit a new one, with warm_start to go on from its weights")
        if row.state == "paused":
            if runner is not None:  # it paused itself just now
                await asyncio.wait([runner.task])
            self.jobs.totals["jobs_resumed"] += by_itself
            self._admit(await self._set_state(row, "queued", ""))
        else:
            await self._launch_if_queued(row.tenant, row.id)

    async def rollback(self, tenant: str, job: str) -> None:
        """Go back from a version whose bytes are absent to the newest one that is there, and resume the paused job.
        Raises :class:`Conflict` if it is not paused, or its newest version is there."""
        async with self._lock(job):
            row = await self.context.store.read(jobs.get_job, tenant, job)
            if row.state != "paused":
                raise Conflict(f"job {job} is {row.state}: only a paused job goes back to an earlier version")
            runner = self.jobs.runners.get(job)
            if runner is not None:
                await asyncio.wait([runner.task])
            lines, context = list[str](), self.context
            for policy in await context.store.read(jobs.policies, tenant, job):
                versions = PolicyVersions(context, context.records.spans, context.rooms.collector, policy)
                lines += await versions.load_intact(absent=True)
            if not lines:
                raise Conflict(f"the newest version of job {job} is there: resume it")
            for line in lines:
                await self.context.store.write(
                    tenants.add_event, tenant, job, self.context.clock.time(), "corrupt", line
                )
        await self.resume(tenant, job)

    async def _launch_if_queued(self, tenant: str, job: str) -> None:
        """Launch a queued job without a task: the database stored it, and failed before it confirmed that."""
        row = await self.context.store.read(jobs.get_job, tenant, job)
        if row.state == "queued" and job not in self.jobs.runners and job not in self.jobs.waiting:
            self._admit(row)

    def _lock(self, job: str) -> asyncio.Lock:
        """Serialises the commands that change one job's state."""
        return self._locks.setdefault(job, asyncio.Lock())

    async def _end(self, tenant: str, job: str, state: Literal["paused", "cancelled"]) -> None:
        """Bring the job into ``state`` at its owner's request."""
        async with self._lock(job):
            row = await self.context.store.read(jobs.get_job, tenant, job)
            if row.state == state and not row.resumes:
                return
            if row.state in FINAL_JOB_STATES:
                raise Conflict(f"job {job} is {row.state} already")
            runner, waiting = self.jobs.runners.get(job), self.jobs.waiting.pop(job, None)
            try:
                if runner is not None:
                    await runner.revoke()
                    row = await self.context.store.read(jobs.get_job, tenant, job)
                    if row.state in FINAL_JOB_STATES:
                        return
                await self._set_state(row, state, BY_OWNER.format(state=state))
            except (StorageFull, Unavailable):  # the command failed: the job continues, or reports why it cannot
                if row.resumes:
                    self.retries.restarted(tenant, job)
                elif row.state != "paused" and (runner is not None or waiting is not None):
                    self._admit(row)
                raise
            self.retries.progress(job)  # it resumes by itself no more

    async def _set_state(
        self, row: JobRow, state: JobState, reason: str, error: str = "", resumes: bool = False
    ) -> JobRow:
        context, new = self.context, row
        if row.state != state or state not in FINAL_JOB_STATES:  # else an earlier attempt stored it already
            new = await context.store.write(
                jobs.set_job_state, row.id, state, reason, context.clock.time(), error, resumes
            )
        self.jobs.states[row.state] -= 1
        self.jobs.states[state] += 1
        if state in FINAL_JOB_STATES:
            self.retries.progress(row.id)
            context.rooms.rollouts.close_job(row.id)
            context.rooms.hosts.close_job(row.id)
            with suppress(StorageFull, Unavailable):  # the end of the next job, or the next start, tries again
                if any(about.get("warm_start") for about in row.spec.get("policies", {}).values()):
                    await context.rooms.collector.delete_unnamed(version_rows.unnamed_starts, row.id)
                keep = context.settings.server.finished_jobs_keep
                while await context.store.write(jobs.drop_old_groups, row.tenant, keep):
                    pass
        log.info("job %s is %s %s", row.name, state, reason, extra={"tenant": row.tenant, "job": row.id})
        self.jobs.notify(row.id)
        return new

    # --- a job's task -------------------------------------------------------------------------------------------------

    def _admit(self, row: JobRow) -> None:
        """Launch the job when its tenant may run one more."""
        self.jobs.waiting[row.id] = WaitingJob.of(row)
        self._launch_admitted(row.tenant)

    def _launch_admitted(self, tenant: str) -> None:
        for row in self.admission.admitted(tenant):
            self._launch(row)

    def _launch(self, row: JobRow) -> None:
        runner = JobRunner(
            self.context, self._validator, row, self._jobs_folder / row.id, self.record, self._on_metrics
        )
        self.jobs.runners[row.id] = runner
        runner.task = asyncio.create_task(self._run(runner), name=f"job {row.id}")

    async def _run(self, runner: JobRunner) -> None:
        row = runner.row
        try:
            await self._record_end(runner, await runner.run(partial(self._mark_running, row)))
        except asyncio.CancelledError:
            if not runner.revoked and not self._stopping:
                raise
        except Exception:  # as after a crash, the job is resumed at the next start
            log.exception("job %s stopped", row.id, extra={"tenant": row.tenant, "job": row.id})
        finally:
            try:
                await runner.close()
            finally:
                self.jobs.totals.update(runner.counted())
                del self.jobs.runners[row.id]
                if not self._stopping:
                    self._launch_admitted(row.tenant)

    async def _mark_running(self, row: JobRow) -> None:
        current = await self.context.store.read(jobs.get_job, row.tenant, row.id)
        await asyncio.shield(self._set_state(current, "running", ""))  # the state counts must match the database

    async def _record_end(self, runner: JobRunner, end: JobEnd) -> None:
        """Store how the job ended; retried until the database takes it. Until then it shows as paused."""
        row, state, reason, outage = runner.row, end.state, end.reason, end.outage
        error = reason if state == "failed" else ""
        while True:
            try:
                with shortages():
                    current = await self.context.store.read(jobs.get_job, row.tenant, row.id)
                    await asyncio.shield(self._set_state(current, state, reason, error, outage is not None))
                if outage is not None:
                    self.retries.outage(row.tenant, row.id, outage)
            except (StorageFull, Unavailable) as problem:
                if not runner.unstored:
                    extra = {"tenant": row.tenant, "job": row.id}
                    log.error("job %s is %s (%s), not stored yet: %s", row.id, state, reason, problem, extra=extra)
                runner.unstored = reason if state == "paused" else f"it is {state} ({reason}), but {problem}"
                self.jobs.notify(row.id)
                await self.context.clock.sleep(self.context.settings.worker.heartbeat_seconds)
            else:
                return

    def _on_metrics(self, job: str, row: dict[str, Any]) -> None:
        """A step of the job was committed."""
        self.retries.progress(job)
        self.jobs.totals["steps"] += 1
        self.jobs.totals["trained_tokens"] += int(row.get("tokens", 0))
        self.jobs.notify(job)

    def _models_in_use(self) -> set[str]:
        """The base models of jobs, of clients that are not idle, and of requests."""
        return self.jobs.models() | self.context.rooms.rollouts.models() | self.sessions.models_in_use()
