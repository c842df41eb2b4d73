"""The controller as its faces see it: jobs come in, are run, paused, looked at; workers and hosts dial in.

* Everything about a job is asked with its tenant; another tenant's job answers as if it were not there.
* A submitted job is durable before it is answered. ``start`` goes on with every job that an earlier process left
  unfinished, whatever ended that process.
* What stops a job by itself and can be mended pauses it with its reason; nothing is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from rookery import wire
from rookery.controller.completions import Completions
from rookery.controller.fleet import Fleet
from rookery.controller.groups import JobPaused
from rookery.controller.hosts import BUILTIN, SERVICE, EnvironmentFailed, Hosts
from rookery.controller.intake import Intake
from rookery.controller.job import Job
from rookery.controller.links import Link
from rookery.controller.ports import Clock, Ids, Ledger
from rookery.controller.pulse import Pulse
from rookery.controller.rollouts import Rollouts
from rookery.controller.tickets import Tickets
from rookery.controller.training import Training
from rookery.controller.trajectory import outcome_decoder
from rookery.controller.views import ENDED, JobState, JobView, PolicyView, Sampled
from rookery.controller.world import World
from rookery.errors import Conflict, NotFound, RookeryError, StorageFull, Unavailable
from rookery.settings import Settings
from rookery.spec import JobSpec
from rookery.storage.artifacts import Artifacts
from rookery.storage.database import Database
from rookery.storage.rows import JobRow, PolicyRow
from rookery.telemetry.metrics import MetricsLog
from rookery.telemetry.sinks import Sinks
from rookery.text.catalogue import CATALOGUE, status
from rookery.text.chat import Chat

log = logging.getLogger("rookery.controller")

_COUNTED = (
    "episodes", "episodes_failed", "groups_dropped_stale", "groups_failed", "groups_no_variance", "steps_skipped",
)  # fmt: skip

EVENTS_SHOWN = 1000
"""Events that one question answers at most."""


@dataclass(eq=False)
class _Running:
    """A job's task. ``wanted`` is the state that a person asked for while it ran."""

    task: asyncio.Task[None]
    job: Job | None = None
    wanted: JobState | None = None
    before: Counter[str] = field(default_factory=Counter)
    """The job's counters when it was taken up, so that totals count what this process saw."""
    sinks: Sinks | None = None
    unstored: str = ""
    """Why the job rests, while the database does not take it."""

    def seen(self) -> Counter[str]:
        """What the job counted since it was taken up."""
        now = self.job.progress.counters if self.job is not None else self.before
        return Counter({name: now[name] - self.before[name] for name in _COUNTED})


class Controller:
    def __init__(
        self,
        database: Database,
        artifacts: Artifacts,
        settings: Settings,
        *,
        clock: Clock,
        ids: Ids,
        ledger: Ledger,
        chat: Callable[[str], Awaitable[Chat]],
        check_environment: Callable[[str, dict[str, Any]], object],
        provide: Callable[[str], None],
        authenticate: Callable[[str], Awaitable[str | None]],
        worker_token: str,
        jobs_folder: Path,
    ) -> None:
        """``chat(model)`` answers a base model's template and tokenizer, preparing the model if need be;
        ``check_environment(id, options)`` raises :class:`UserError` for a built-in that cannot be made like that;
        ``provide(model)`` asks for a local worker with that model if none is meant to be there;
        ``authenticate(token)`` answers a host's tenant, or :data:`~rookery.controller.hosts.SERVICE`, or None."""
        self._settings = settings
        self._clock = clock
        self._ids = ids
        self._ledger = ledger
        self._database = database
        self._artifacts = artifacts
        self._provide = provide
        self._jobs_folder = jobs_folder
        self.tickets = Tickets(artifacts, clock, settings.ticket_seconds)
        self._fleet = Fleet(settings, clock, worker_token)
        self._rollouts = Rollouts(self._fleet, self.tickets, settings, clock)
        self._training = Training(self._fleet, self.tickets, settings, clock, ids, ledger)
        self._hosts = Hosts(settings, clock, ids, authenticate)
        self.world = World(
            settings=settings,
            clock=clock,
            ids=ids,
            ledger=ledger,
            database=database,
            artifacts=artifacts,
            fleet=self._fleet,
            rollouts=self._rollouts,
            training=self._training,
            hosts=self._hosts,
            chat=chat,
            check_environment=check_environment,
            measured=self._measured,
        )
        self._intake = Intake(self.world)
        self.completions = Completions(self.world, self._intake, self._pinned)
        self._running: dict[str, _Running] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: list[asyncio.Task[None]] = []
        self._totals: Counter[str] = Counter()
        self._states: Counter[str] = Counter()
        self._pulse = Pulse()
        self._stopping = False

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Clear what a crash left half-written, take up every unfinished job, begin to watch the fleet."""
        await self._ledger(self._artifacts.sweep)
        live = await self._ledger(self._database.live_hashes)
        for digest in await self._ledger(self._artifacts.prune, live):
            log.info("removed artifact %s, whose commit never came", digest)
        for watch in (self._fleet.watch, self._rollouts.watch, self._hosts.watch):
            self._tasks.append(asyncio.create_task(watch()))
        for row in await self._ledger(self._database.all_unfinished_jobs):
            self._states[row.state] += 1
            if row.state != "paused":
                self._launch(row)

    async def stop(self) -> None:
        """End everything; jobs stay as they are and go on at the next start."""
        self._stopping = True
        tasks = [running.task for running in self._running.values()] + self._tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def serve_worker(self, link: Link) -> None:
        await self._fleet.serve(link)

    async def serve_host(self, link: Link) -> None:
        await self._hosts.serve(link)

    # --- jobs: in, on, out --------------------------------------------------------------------------------------------

    async def submit(self, tenant: str, data: Any, key: str | None = None) -> tuple[JobView, bool]:
        """Check a job, make it durable, start it. The same ``key`` again answers the first one and False."""
        spec, policies = await self._intake.check(tenant, data)
        dumped = spec.model_dump(mode="json")
        row, created = await self._ledger(
            self._database.submit_job,
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
        return await self._view(row), created

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
            row = await self._ledger(self._database.get_job, tenant, job)
            if job in self._running and (reason := self._running[job].unstored):
                raise Unavailable(f"job {job} cannot be resumed before the database takes that it rests: {reason}")
            if row.state in ENDED:
                raise Conflict(f"job {job} is {row.state}: submit a new one, with warm_start to go on from its weights")
            if row.state == "paused":
                if job in self._running:  # it paused itself just now
                    await asyncio.wait([self._running[job].task])
                self._launch(await self._set_state(row, "queued", ""))

    async def wait(self, tenant: str, job: str) -> JobView:
        """The job when it has ended."""
        while True:
            change = self._pulse.next
            view = await self.show(tenant, job)
            if view.state in ENDED:
                return view
            await change.wait()

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
        row = await self._ledger(self._database.get_job, tenant, job)
        if row.state in ENDED or row.state == state:
            if row.state == state:
                return
            raise Conflict(f"job {job} is {row.state} already")
        running = self._running.get(job)
        reason = "paused by its owner" if state == "paused" else "cancelled by its owner"
        if running is not None:
            running.wanted = state
            running.task.cancel()
            await asyncio.gather(running.task, return_exceptions=True)
            row = await self._ledger(self._database.get_job, tenant, job)
            if row.state in ENDED:
                return
        try:
            await self._set_state(row, state, reason)
        except (StorageFull, Unavailable):
            if running is not None:
                self._launch(row)  # it is not what was wanted: it goes on, or says itself why it cannot
            raise

    async def _set_state(self, row: JobRow, state: JobState, reason: str, error: str = "") -> JobRow:
        new = await self._ledger(self._database.set_job_state, row.id, state, reason, self._clock.time(), error)
        self._states[row.state] -= 1
        self._states[state] += 1
        await self._ledger(
            self._database.add_event, row.tenant, row.id, self._clock.time(), "state", f"{state}: {reason}".rstrip(": ")
        )
        if state in ENDED:
            self._rollouts.forget(row.id)
            self._hosts.close_job(row.id)
            left = [*await self._ledger(self._database.open_groups, row.id),
                    *await self._ledger(self._database.ready_groups, row.id)]  # fmt: skip
            names = [group.id for group in left]
            await self._ledger(self._database.drop_groups, names, f"its job is {state}", self._clock.time())
        log.info("job %s is %s %s", row.name, state, reason, extra={"tenant": row.tenant, "job": row.id})
        self._pulse.beat()
        return new

    # --- a job's task -------------------------------------------------------------------------------------------------

    def _launch(self, row: JobRow) -> None:
        task = asyncio.create_task(self._run(row), name=f"job {row.id}")
        self._running[row.id] = _Running(task)

    async def _run(self, row: JobRow) -> None:
        running = self._running[row.id]
        running.before = Counter(row.counters)
        try:
            state, reason = await self._carry_out(row, running)
            await self._record(row, running, state, reason)
        except asyncio.CancelledError:
            if running.wanted is None and not self._stopping:
                raise
        except Exception:  # as after a crash, the job goes on at the next start
            log.exception("job %s stopped", row.id, extra={"tenant": row.tenant, "job": row.id})
        finally:
            if running.sinks is not None:
                running.sinks.close()
            try:
                if running.job is not None:
                    counters = dict(running.job.progress.counters)
                    await asyncio.shield(self._ledger(self._database.save_counters, row.id, counters))
            except Exception:  # they are only shown
                log.exception("counters of job %s are not saved", row.id, extra={"tenant": row.tenant, "job": row.id})
            finally:
                self._totals.update(running.seen())
                del self._running[row.id]

    async def _carry_out(self, row: JobRow, running: _Running) -> tuple[JobState, str]:
        """Run the job; how it ended, and why. Only a cancellation comes out as an exception."""
        try:
            running.job = await self._assemble(row, running)
            current = await self._ledger(self._database.get_job, row.tenant, row.id)
            await self._set_state(current, "running", "")
            return "completed", await running.job.run()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            cause = _first(error)
            if isinstance(cause, JobPaused | Unavailable | StorageFull | EnvironmentFailed):
                return "paused", str(cause)
            if isinstance(cause, RookeryError):
                return "failed", str(cause)
            log.exception("job %s failed", row.id, extra={"tenant": row.tenant, "job": row.id})
            return "failed", f"{type(cause).__name__}: {cause}"

    async def _record(self, row: JobRow, running: _Running, state: JobState, reason: str) -> None:
        """Make durable how the job ended: tried until the database takes it. Until then it shows as paused."""
        while True:
            try:
                current = await self._ledger(self._database.get_job, row.tenant, row.id)
                await asyncio.shield(self._set_state(current, state, reason, reason if state == "failed" else ""))
            except (StorageFull, Unavailable) as error:
                if not running.unstored:
                    extra = {"tenant": row.tenant, "job": row.id}
                    log.error("job %s is %s (%s), not stored yet: %s", row.id, state, reason, error, extra=extra)
                running.unstored = reason if state == "paused" else f"it is {state} ({reason}), but {error}"
                self._pulse.beat()
                await self._clock.sleep(self._settings.heartbeat_seconds)
            else:
                return

    async def _assemble(self, row: JobRow, running: _Running) -> Job:
        spec = JobSpec.model_validate(row.spec)
        self._provide(spec.base_model)
        policies = await self._ledger(self._database.policies, row.tenant, row.id)
        folder = self._jobs_folder / row.id
        running.sinks = Sinks(self._settings, folder, row.id, row.name)
        return Job(
            self.world,
            row,
            spec,
            policies[0],
            owner=row.tenant if spec.environment.hosted is not None else SERVICE,
            options=await self._intake.options(row.tenant, spec),
            chat=await self.world.chat(spec.base_model),
            warm_start=await self._intake.warm_start(row.tenant, spec, policies[0])
            if policies[0].head_version is None
            else None,
            metrics=MetricsLog(folder),
        )

    def _measured(self, job: str, row: dict[str, Any]) -> None:
        self._totals["steps"] += 1
        self._totals["trained_tokens"] += int(row.get("tokens", 0))
        running = self._running.get(job)
        if running is not None and running.sinks is not None:
            running.sinks.write(row)
        self._pulse.beat()

    # --- looking ------------------------------------------------------------------------------------------------------

    async def list(self, tenant: str) -> Sequence[JobView]:
        return [await self._view(row) for row in await self._ledger(self._database.list_jobs, tenant)]

    async def show(self, tenant: str, job: str) -> JobView:
        return await self._view(await self._ledger(self._database.get_job, tenant, job))

    async def metrics(self, tenant: str, job: str, after: int = -1) -> Sequence[dict[str, Any]]:
        """One row per committed step later than ``after``."""
        await self._ledger(self._database.get_job, tenant, job)
        return await asyncio.to_thread(MetricsLog(self._jobs_folder / job).read, after)

    async def follow(self, tenant: str, job: str, after: int = -1) -> AsyncIterator[dict[str, Any]]:
        """Metrics rows as they come, until the job has ended."""
        while True:
            change = self._pulse.next
            view = await self.show(tenant, job)
            for row in await self.metrics(tenant, job, after):
                after = row["step"]
                yield row
            if view.state in ENDED:
                return
            await change.wait()

    async def events(self, tenant: str, job: str, limit: int = 100) -> Sequence[dict[str, Any]]:
        await self._ledger(self._database.get_job, tenant, job)
        rows = await self._ledger(self._database.events, tenant, job, min(limit, EVENTS_SHOWN))
        return [{"time": row.time, "kind": row.kind, "text": row.text} for row in rows]

    async def trajectories(
        self, tenant: str, job: str, limit: int, version: int | None = None
    ) -> Sequence[dict[str, Any]]:
        """The episodes that ended last: text, tokens, log-probs, versions, reward."""
        await self._ledger(self._database.get_job, tenant, job)
        found = await self._ledger(self._database.recent_episodes, tenant, job, limit, version)
        rows = []
        for group, episode in found:
            row: dict[str, Any] = {
                "episode": episode.id,
                "group": group.id,
                "ordinal": group.ordinal,
                "group_state": group.state,
                "consumed_by": group.consumed_by,
                "prompt": msgspec.json.decode(group.prompt),
                "state": episode.state,
                "version": episode.version,
                "reward": episode.reward,
                "metrics": episode.metrics,
                "error": episode.error,
                "finished": episode.finished,
            }
            if episode.trajectories:
                outcome = outcome_decoder.decode(episode.trajectories)
                row["messages"] = msgspec.to_builtins(outcome.turns)
                row["trajectories"] = msgspec.to_builtins(outcome.trajectories)
                row["finish"] = outcome.finish
            rows.append(row)
        return rows

    async def versions(self, tenant: str, job: str, policy: str) -> Sequence[dict[str, Any]]:
        row = await self._ledger(self._database.get_policy, tenant, job, policy)
        versions = await self._ledger(self._database.versions, tenant, row.id)
        shown = ("version", "parent", "hash", "step", "created", "metrics", "kept", "lost", "evaluation")
        return [{name: getattr(version, name) for name in shown} for version in versions]

    async def evaluations(self, tenant: str, job: str) -> Sequence[dict[str, Any]]:
        await self._ledger(self._database.get_job, tenant, job)
        rows = await self._ledger(self._database.evaluations, tenant, job)
        return [
            {"version": r.version, "prompts": r.prompts, "mean": r.mean, "stderr": r.stderr, **r.results} for r in rows
        ]

    async def adapter(self, tenant: str, job: str, policy: str, version: int | None) -> wire.Manifest:
        """The artifact of a version (the newest for None). Raises :class:`NotFound` where it is not kept,
        :class:`CorruptArtifact` where its bytes are not what its hash says."""
        row = await self._ledger(self._database.get_policy, tenant, job, policy)
        number = row.head_version if version is None else version
        if number is None:
            raise NotFound(f"job {job} has no version yet")
        found = await self._ledger(self._database.version, tenant, row.id, number)
        if not found.kept:
            raise NotFound(
                f"version {number} of job {job} is not kept any more; checkpoints.keep_last says how many are"
            )
        return await asyncio.to_thread(self._artifacts.verify, found.hash)

    async def _view(self, row: JobRow) -> JobView:
        running = self._running.get(row.id)
        job = running.job if running is not None else None
        policies = await self._ledger(self._database.policies, row.tenant, row.id)
        tenant = await self._ledger(self._database.get_tenant, row.tenant)
        if job is not None:
            rewards, step, counters = list(job.progress.rewards), job.step, dict(job.progress.counters)
        else:
            rows = await asyncio.to_thread(MetricsLog(self._jobs_folder / row.id).read)
            rewards, step, counters = [entry["reward"] for entry in rows], row.step, row.counters
        state, reason, waits = row.state, row.reason, ""
        if running is not None and running.unstored:
            state, reason = "paused", running.unstored
        elif row.state in ("queued", "running"):
            waits = job.progress.waits_for() if job is not None else f"base model {row.spec['base_model']} to be ready"
        return JobView(
            id=row.id,
            name=row.name,
            tenant=tenant.name,
            state=state,
            reason=reason,
            waits_for=waits,
            base_model=row.spec["base_model"],
            step=step,
            steps=row.spec["stop"]["steps"],
            reward=rewards[-1] if rewards else None,
            rewards=rewards,
            tokens_per_second=job.progress.tokens_per_second() if job is not None else 0.0,
            staleness=job.progress.staleness if job is not None else None,
            groups_in_flight=job.groups.in_flight if job is not None else 0,
            groups_ready=len(job.groups.ready) if job is not None else 0,
            tokens=counters.get("tokens", 0),
            counters=counters,
            policies=[_policy_view(policy) for policy in policies],
            created=row.created,
            started=row.started or 0.0,
            finished=row.finished or 0.0,
            spec=row.spec,
        )

    # --- sampling and uploads -----------------------------------------------------------------------------------------

    async def sample(
        self, tenant: str, target: str, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, Any]
    ) -> Sampled:
        """One reply of a base model, of ``JOB`` (its newest version) or of ``JOB@VERSION``."""
        found, chat = await self.completions.open(tenant, target)
        question = self.completions.question(found, chat, messages)
        reply = await self.completions.answer(
            tenant,
            question,
            max_tokens=sampling["max_tokens"],
            temperature=sampling["temperature"],
            seed=sampling.get("seed"),
            stop=sampling["stop"],
        )
        ref = found.adapter
        return Sampled(
            text=chat.decode(reply.tokens),
            tokens=reply.tokens,
            logprobs=reply.logprobs,
            finish=reply.finish,
            version=ref.version if ref is not None else 0,
            policy=ref.policy if ref is not None else "",
            prompt_tokens=len(question.prompt),
        )

    def _pinned(self, ref: wire.AdapterRef | None) -> AbstractContextManager[object]:
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

    # --- the service itself -------------------------------------------------------------------------------------------

    def models(self) -> Sequence[dict[str, Any]]:
        """Base models: loaded, known (can be prepared), or refused and why."""
        loaded = Counter(w.hello.model for w in self._fleet.all() if w.state == "serving")
        rows = []
        for name in sorted({*CATALOGUE, *loaded}):
            state = status(self._settings.cache, name)
            shown = "loaded" if loaded[name] else state.state
            rows.append({"name": name, "state": shown, "reason": state.reason, "note": state.note,
                         "workers": loaded[name]})  # fmt: skip
        return rows

    def workers(self) -> Sequence[dict[str, Any]]:
        now = self._clock.monotonic()
        rows = []
        for worker in self._fleet.all():
            beat = worker.beat
            rows.append({
                "name": worker.name, "state": worker.state, "model": worker.hello.model, "roles": worker.hello.roles,
                "kind": worker.hello.kind, "device": worker.hello.device, "host": worker.hello.host,
                "pid": worker.hello.pid, "requests": self._rollouts.executing(worker), "seconds": now - worker.since,
                "beat": msgspec.to_builtins(beat) if beat is not None else None,
            })  # fmt: skip
        return rows

    def health(self) -> dict[str, Any]:
        return {
            "jobs": {state: count for state, count in sorted(self._states.items()) if count},
            "totals": {
                "steps": self._totals["steps"],
                "trained_tokens": self._totals["trained_tokens"],
                "sampled_tokens": self._rollouts.sampled,
                "requests_migrated": self._rollouts.migrated,
                "late_chunks": self._rollouts.late_chunks,
                "training_retries": self._training.retries,
                "worker_losses": self._fleet.losses,
                "frames_ignored": self._fleet.ignored_frames,
                "frames_bad": self._fleet.bad_frames,
                **{name: self._totals[name] + sum(r.seen()[name] for r in self._running.values()) for name in _COUNTED},
            },
            "gauges": {
                "requests_waiting": self._rollouts.waiting(),
                "requests_running": sum(self._rollouts.executing(worker) for worker in self._fleet.all()),
                "environment_hosts": self._hosts.count(),
            },
        }

    def offers(self, environment: str) -> bool:
        """Whether the service's own hosts offer a built-in now."""
        return self._hosts.offers(SERVICE, BUILTIN + environment)


def _first(error: BaseException) -> BaseException:
    """The cause inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _policy_view(row: PolicyRow) -> PolicyView:
    return PolicyView(name=row.name, id=row.id, rank=row.rank, alpha=row.alpha, version=row.head_version or 0)
