"""The controller as its faces see it: jobs come in, are run, paused, ended; workers and hosts dial in. What only looks
at them is in :mod:`rookery.controller.queries`.

* Everything about a job is asked with its tenant; another tenant's job answers as if it were not there.
* A submitted job is durable before it is answered. ``start`` goes on with every job that an earlier process left
  unfinished, whatever ended that process.
* What stops a job by itself and can be mended pauses it with its reason; nothing is lost.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from rookery import protocol
from rookery.aio import Clock, IdGenerator
from rookery.controller.context import ControllerContext
from rookery.controller.fleet.env_hosts import EnvironmentHosts
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.jobs.runner import JobRunner
from rookery.controller.parts import SHIPPED, Overrides
from rookery.controller.queries import JobQueries
from rookery.controller.rollout.completions import Completions
from rookery.controller.sessions.sessions import Sessions
from rookery.controller.training.dispatcher import TrainingDispatcher
from rookery.controller.usage import UsageMeter
from rookery.controller.validation import JobValidator
from rookery.controller.views import Completion, JobState, JobView
from rookery.controller.weights.gc import ArtifactCollector
from rookery.controller.weights.pull_failures import PullFailures
from rookery.controller.weights.tickets import Tickets
from rookery.errors import Conflict, StorageFull, Unavailable
from rookery.protocol.connection import Connection
from rookery.settings import Settings
from rookery.storage.artifacts import Artifacts
from rookery.storage.rows import FINAL_JOB_STATES, JobRow
from rookery.storage.store import Store
from rookery.tokenization.chat import Chat

log = logging.getLogger("rookery.controller")


class Controller(JobQueries):
    def __init__(
        self,
        store: Store,
        artifacts: Artifacts,
        settings: Settings,
        *,
        clock: Clock,
        ids: IdGenerator,
        chat: Callable[[str], Awaitable[Chat]],
        check_environment: Callable[[str, dict[str, Any]], object],
        provide: Callable[[str], None],
        authenticate: Callable[[str], Awaitable[str | None]],
        worker_token: str,
        jobs_folder: Path,
        parts: Overrides = SHIPPED,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        """``chat(model)`` answers a base model's template and tokenizer, preparing the model if need be;
        ``check_environment(id, options)`` raises :class:`UserError` for a built-in that cannot be made like that;
        ``provide(model)`` asks for a local worker with that model if none is meant to be there;
        ``authenticate(token)`` answers a host's tenant, or :data:`~rookery.controller.fleet.env_hosts.SERVICE`, or
        None;
        ``random_bytes(n)`` is what tickets are made of, and nobody's to guess where anybody else can reach them."""
        self._ids = ids
        self._provide = provide
        self.tickets = Tickets(artifacts, clock, settings.server.ticket_seconds, random_bytes)
        fleet = Fleet(settings, clock, worker_token, self.tickets)
        rollouts = parts.rollouts(fleet, settings, clock)
        training = TrainingDispatcher(fleet, self.tickets, settings, clock, ids, store.run)
        collector = ArtifactCollector(store, artifacts, fleet, training.pinned)
        training.on_stray(collector.delete_stray)
        world = ControllerContext(
            settings=settings,
            clock=clock,
            ids=ids,
            store=store,
            artifacts=artifacts,
            fleet=fleet,
            rollouts=rollouts,
            training=training,
            seeding=parts.seeding(fleet, rollouts, training, settings, clock),
            hosts=EnvironmentHosts(settings, clock, ids, authenticate, store.unfinished_job_ids),
            billing=UsageMeter(fleet, rollouts, training, settings, clock, store),
            collector=collector,
            chat=chat,
            check_environment=check_environment,
            measured=self._measured,
        )
        super().__init__(world, jobs_folder)
        self._intake = JobValidator(self.world)
        self.completions = Completions(self.world, self._intake, self._pinned)
        self.sessions = Sessions(self.world, self._intake, provide)
        self._absences = PullFailures(fleet, artifacts, store.run)
        fleet.in_use = self._in_use
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Clear what a crash left half-written, take up every unfinished job, begin to watch the fleet."""
        await self._store.fence()
        await self._store.run(self._artifacts.sweep)
        live = await self._store.live_hashes()
        for digest in await self._store.run(self._artifacts.prune, live):
            log.info("removed artifact %s, whose commit never came", digest)
        billing = self.world.billing
        await billing.start()
        watches = [self._fleet.watch, self._rollouts.watch, self.world.seeding.watch, self._hosts.watch,
                   self.sessions.watch, billing.watch]  # fmt: skip
        for watch in watches:
            self._tasks.append(asyncio.create_task(watch()))
        await self.sessions.start()
        for row in await self._store.all_unfinished_jobs():
            self._states[row.state] += 1
            if row.state != "paused":
                self._rollouts.expect_resumptions()
                self._launch(row)

    async def stop(self) -> None:
        """End everything; jobs stay as they are and go on at the next start."""
        self._stopping = True
        tasks = [running.task for running in self._running.values()] + self._tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.sessions.stop()
        await self._absences.close()
        await self.world.billing.stop()

    async def serve_worker(self, link: Connection) -> None:
        await self._fleet.serve(link)

    def _in_use(self, model: str) -> list[protocol.AdapterRef]:
        """The versions that running jobs of a base model sample from now."""
        jobs = [running.job for running in self._running.values() if running.job is not None]
        return [ref for job in jobs if job.spec.base_model == model for ref in job.policy.in_use()]

    async def serve_host(self, link: Connection) -> None:
        await self._hosts.serve(link)

    # --- jobs: in, on, out --------------------------------------------------------------------------------------------

    async def submit(self, tenant: str, data: Any, key: str | None = None) -> tuple[JobView, bool]:
        """Check a job, make it durable, start it. The same ``key`` again answers the first one and False."""
        spec, policies = await self._intake.check(tenant, data)
        dumped = spec.model_dump(mode="json")
        row, created = await self._store.submit_job(
            id=self._ids.new("job"),
            tenant=tenant,
            name=spec.name,
            spec=dumped,
            created=self._clock.time(),
            policies=policies,
            idempotency_key=key,
        )
        if created:
            self._states["queued"] += 1
            log.info("job %s submitted", row.name, extra={"tenant": tenant, "job": row.id})
            self._launch(row)
        elif row.spec != dumped:
            raise Conflict(f"the key {key!r} was used for another job ({row.id}); use a new key for a new job")
        elif row.state == "queued":
            async with self._changing(row.id):
                await self._take_up(tenant, row.id)
        return await self._shown(row), created

    async def dry_run(self, tenant: str, data: Any) -> dict[str, Any]:
        """The job with every default filled in, and three of its prompts as the policy would read them."""
        spec, _ = await self._intake.check(tenant, data)
        return {"spec": spec.model_dump(mode="json"), "prompts": await self._intake.preview(tenant, spec)}

    async def pause(self, tenant: str, job: str) -> None:
        """Stop working on the job until it is resumed; what it has stays."""
        await self._want(tenant, job, "paused")

    async def cancel(self, tenant: str, job: str) -> None:
        """End the job for good; its versions stay."""
        await self._want(tenant, job, "cancelled")

    async def resume(self, tenant: str, job: str) -> None:
        async with self._changing(job):
            row = await self._store.get_job(tenant, job)
            if job in self._running and (reason := self._running[job].unstored):
                raise Unavailable(f"job {job} cannot be resumed before the database takes that it rests: {reason}")
            if row.state in FINAL_JOB_STATES:
                raise Conflict(f"job {job} is {row.state}: submit a new one, with warm_start to go on from its weights")
            if row.state == "paused":
                if job in self._running:  # it paused itself just now
                    await asyncio.wait([self._running[job].task])
                self._launch(await self._set_state(row, "queued", ""))
            else:
                await self._take_up(tenant, job)

    async def _take_up(self, tenant: str, job: str) -> None:
        """Launch a job that is queued and that nobody runs: the database had taken that it is, and failed before it
        said so."""
        row = await self._store.get_job(tenant, job)
        if row.state == "queued" and job not in self._running:
            self._launch(row)

    def _changing(self, job: str) -> asyncio.Lock:
        """Held by whoever changes the job's state from outside: one at a time."""
        lock = self._locks.get(job)
        if lock is None:
            lock = self._locks[job] = asyncio.Lock()
        return lock

    async def _want(self, tenant: str, job: str, state: JobState) -> None:
        async with self._changing(job):
            await self._bring(tenant, job, state)

    async def _bring(self, tenant: str, job: str, state: JobState) -> None:
        row = await self._store.get_job(tenant, job)
        if row.state in FINAL_JOB_STATES or row.state == state:
            if row.state == state:
                return
            raise Conflict(f"job {job} is {row.state} already")
        running = self._running.get(job)
        reason = "paused by its owner" if state == "paused" else "cancelled by its owner"
        if running is not None:
            running.wanted = state
            running.task.cancel()
            await asyncio.gather(running.task, return_exceptions=True)
            row = await self._store.get_job(tenant, job)
            if row.state in FINAL_JOB_STATES:
                return
        try:
            await self._set_state(row, state, reason)
        except (StorageFull, Unavailable):
            if running is not None:
                self._launch(row)  # it is not what was wanted: it goes on, or says itself why it cannot
            raise

    async def _set_state(self, row: JobRow, state: JobState, reason: str, error: str = "") -> JobRow:
        new = row
        if row.state != state or state not in FINAL_JOB_STATES:  # else an attempt before this one got that far
            new = await self._store.set_job_state(row.id, state, reason, self._clock.time(), error)
        self._states[row.state] -= 1
        self._states[state] += 1
        if state in FINAL_JOB_STATES:
            self._rollouts.close_job(row.id)
            self._hosts.close_job(row.id)
        log.info("job %s is %s %s", row.name, state, reason, extra={"tenant": row.tenant, "job": row.id})
        self._beat(row.id)
        return new

    # --- a job's task -------------------------------------------------------------------------------------------------

    def _launch(self, row: JobRow) -> None:
        running = JobRunner(self.world, self._intake, self._provide, row, self._jobs_folder / row.id)
        self._running[row.id] = running
        running.task = asyncio.create_task(self._run(running), name=f"job {row.id}")

    async def _run(self, running: JobRunner) -> None:
        row = running.row
        try:
            state, reason = await running.run(partial(self._begun, row))
            await self._record(running, state, reason)
        except asyncio.CancelledError:
            if running.wanted is None and not self._stopping:
                raise
        except Exception:  # as after a crash, the job goes on at the next start
            log.exception("job %s stopped", row.id, extra={"tenant": row.tenant, "job": row.id})
        finally:
            try:
                await running.close()
            finally:
                self._totals.update(running.counted())
                del self._running[row.id]

    async def _begun(self, row: JobRow) -> None:
        current = await self._store.get_job(row.tenant, row.id)
        await asyncio.shield(self._set_state(current, "running", ""))  # stored or not, it is counted as what it is

    async def _record(self, running: JobRunner, state: JobState, reason: str) -> None:
        """Make durable how the job ended: tried until the database takes it. Until then it shows as paused."""
        row, error = running.row, reason if state == "failed" else ""
        while True:
            try:
                current = await self._store.get_job(row.tenant, row.id)
                await asyncio.shield(self._set_state(current, state, reason, error))
            except (StorageFull, Unavailable) as trouble:
                if not running.unstored:
                    extra = {"tenant": row.tenant, "job": row.id}
                    log.error("job %s is %s (%s), not stored yet: %s", row.id, state, reason, trouble, extra=extra)
                running.unstored = reason if state == "paused" else f"it is {state} ({reason}), but {trouble}"
                self._beat(row.id)
                await self._clock.sleep(self._settings.worker.heartbeat_seconds)
            else:
                return

    def _measured(self, job: str, row: dict[str, Any]) -> None:
        self._totals["steps"] += 1
        self._totals["trained_tokens"] += int(row.get("tokens", 0))
        running = self._running.get(job)
        if running is not None:
            running.publish(row)
        self._beat(job)

    # --- sampling and uploads -----------------------------------------------------------------------------------------

    async def sample(
        self, tenant: str, target: str, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, Any]
    ) -> Completion:
        """One reply of a base model, of ``JOB`` (its newest version) or of ``JOB@VERSION``."""
        found, chat = await self.completions.open(tenant, target)
        question = await asyncio.to_thread(self.completions.prepare, found, chat, messages)
        reply = await self.completions.generate(
            tenant,
            question,
            max_tokens=sampling["max_tokens"],
            temperature=sampling["temperature"],
            seed=sampling.get("seed"),
            stop=sampling["stop"],
        )
        ref = found.adapter
        return Completion(
            text=chat.decode(reply.tokens),
            tokens=reply.tokens,
            logprobs=reply.logprobs,
            finish=reply.finish,
            version=ref.version if ref is not None else 0,
            policy=ref.policy if ref is not None else "",
            prompt_tokens=len(question.prompt),
        )

    def _pinned(self, ref: protocol.AdapterRef | None) -> AbstractContextManager[object]:
        """A running job's retention leaves the version alone within."""
        jobs = [running.job for running in self._running.values() if running.job is not None]
        policy = next((job.policy for job in jobs if ref is not None and job.policy.row.id == ref.policy), None)
        if ref is None or policy is None or policy.version(ref.version) is None:
            return nullcontext()
        return policy.pinned(ref.version)

    async def add_dataset(self, tenant: str, content: bytes) -> str:
        """Keep the rows of a ``jsonl`` environment; answers the hash that jobs name."""
        return await self._intake.upload(tenant, "dataset", {"rows.jsonl": content})

    async def add_adapter(self, tenant: str, files: Mapping[str, bytes]) -> str:
        """Keep a PEFT folder; answers the hash that jobs name under ``warm_start.upload``."""
        return await self._intake.upload(tenant, "adapter", files)
