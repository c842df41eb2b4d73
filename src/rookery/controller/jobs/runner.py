"""The task of a running job: assemble the job from its row, run it, report how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from rookery import protocol
from rookery.aio import Signal
from rookery.clock import Clock
from rookery.controller.context import ControllerContext
from rookery.controller.fleet.env_hosts import EnvironmentFailed
from rookery.controller.jobs.groups import JobPaused
from rookery.controller.jobs.job import TrainingJob
from rookery.controller.jobs.job_context import JobContext, Progress
from rookery.controller.jobs.run_record import RunRecord
from rookery.controller.outages import Outage, outage_of
from rookery.controller.quotas import Quotas, tokens_in_memory
from rookery.controller.training.policy_versions import PolicyVersions
from rookery.controller.validation import JobValidator
from rookery.controller.views import JobState
from rookery.errors import (
    ArtifactMissing,
    RookeryError,
    Unavailable,
    UserError,
    shortage,
)
from rookery.settings import LimitSettings
from rookery.spec.job import stored_job
from rookery.storage.models import JobRow
from rookery.telemetry.metrics import Sinks
from rookery.tokenization.chat import Chat
from rookery.turns import TENANT

log = logging.getLogger("rookery.controller")

LONGEST_RETRY_SECONDS = 600.0
"""Between two attempts to resume a job that an outage paused."""

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 60.0
"""Where the service asks whether an outage is over, a job resumes at the first answer. If it finds the outage again
before it has trained a step, as with a store that fails now and then, it pauses for so long in addition."""

COUNTED = (
    "episodes", "episodes_failed", "evaluation_failures", "groups_dropped_stale", "groups_failed",
    "zero_variance_groups", "trajectory_splits", "steps_skipped",
)  # fmt: skip
"""The counters of a job that the service sums over all jobs."""


class JobRunner:
    task: asyncio.Task[None]
    """Set by the controller."""

    def __init__(
        self, context: ControllerContext, validator: JobValidator, row: JobRow, folder: Path, record: RunRecord
    ) -> None:
        """``folder`` is the job's, for its metrics."""
        self._record = record
        self.row = row
        self.job: TrainingJob | None = None
        """None until its model and its environment's data are there."""
        self.wanted: JobState | None = None
        """The state that its owner asked for while it ran."""
        self.unstored = ""
        """The reason for its pause, while that could not be stored yet."""
        self.outage: Outage | None = None
        """The kind of the outage that paused it: retrying later can help."""
        self._context = context
        self._validator = validator
        self._folder = folder
        self._halted = ""
        """The reason for its pause by :meth:`halt`."""
        self._initial = Counter(row.counters)
        """Counters at the start of this run: totals count this process only."""
        self._sinks: Sinks | None = None

    async def run(self, begun: Callable[[], Awaitable[object]]) -> tuple[JobState, str]:
        """Run the job and return its new state and the reason; ``begun`` is called when it is assembled. Raises nothing
        but a cancellation. Its counters are stored before the end, so that they are complete when the end is seen."""
        TENANT.set(self.row.tenant)
        started: asyncio.Task[None] | None = None
        try:
            self._record.starts(self.row.id)
            started = asyncio.create_task(self._end_start())
            self.job = await self._assemble()
            self._record.assembled(self.row.id)
            await begun()
            return "completed", await self.job.run()
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if not self._halted or self.wanted is not None or current is None or current.uncancel():
                raise
            self.outage = "other"
            return "paused", self._halted
        except BaseException as error:
            cause = _first(error)
            cause = shortage(cause) or await self._unread_dataset(cause) or cause
            self.outage = outage_of(cause)
            if detail := getattr(cause, "detail", ""):
                extra = {"tenant": self.row.tenant, "job": self.row.id}
                log.warning("job %s stops: %s (%s)", self.row.id, cause, detail, extra=extra)
            if self.outage is not None or isinstance(cause, JobPaused | EnvironmentFailed):
                return "paused", str(cause)
            if isinstance(cause, RookeryError):
                return "failed", str(cause)
            log.exception("job %s failed", self.row.id, extra={"tenant": self.row.tenant, "job": self.row.id})
            return "failed", f"{type(cause).__name__}: {cause}"
        finally:
            if started is not None:
                started.cancel()
            await self._store_counters()

    async def _unread_dataset(self, cause: BaseException) -> RookeryError | None:
        """The error of an environment that could not read the job's dataset, whose file lies among the artifacts."""
        artifacts = self._context.artifacts
        if not isinstance(cause, EnvironmentFailed) or str(artifacts.root) not in str(cause):
            return None
        try:
            await self._context.store.transfer(artifacts.check)
        except RookeryError as away:
            return away
        return ArtifactMissing("the job's dataset could not be read", str(cause))

    def halt(self, reason: str) -> None:
        """Pause the job; it resumes by itself."""
        if not self._halted:
            self._halted = reason
            self.task.cancel()

    async def _end_start(self) -> None:
        """The job has started once it has run for a while."""
        await self._context.clock.sleep(self._context.settings.limits.start_seconds)
        self._record.started(self.row.id)
        if self.row.crashes:
            with contextlib.suppress(RookeryError):
                await self._context.store.clear_crashes(self.row.id)

    async def _assemble(self) -> TrainingJob:
        context, row = self._context, self.row
        spec = await self._validator.store_rows(row.tenant, stored_job(row.spec))
        context.models.provide(spec.base_model)
        if reason := context.fleet.failure(spec.base_model):
            raise Unavailable(f"worker: {reason}")
        policies = await context.store.policies(row.tenant, row.id)
        await context.usage.open(row.tenant, row.id, [policy.id for policy in policies])
        self._sinks = Sinks(context.settings, self._folder, row.id, row.name)
        new, warm_start = policies[0].head_version is None, self._validator.warm_start
        job = JobContext(
            context,
            row,
            spec,
            environment=await self._validator.environment(row.tenant, row.id, spec),
            chat=await self._chat(spec.base_model),
            policy=PolicyVersions(
                context, policies[0], spec.checkpoints, reference=0 if spec.compares_with_start else None
            ),
            progress=Progress(context, row, spec),
            warm_start=await warm_start(row.tenant, spec, policies[0]) if new else None,
        )
        return TrainingJob(job)

    async def _chat(self, model: str) -> Chat:
        """The base model's chat template and tokenizer. For a job that has run before they existed: an error is
        temporary."""
        try:
            return await self._context.chat(model)
        except UserError as error:
            if self.row.started is None:
                raise
            raise Unavailable(str(error)) from None

    def publish(self, row: dict[str, Any]) -> None:
        """Send a committed step's metrics to the operator's sinks."""
        if self._sinks is not None:
            self._sinks.write(row)

    def counted(self) -> Counter[str]:
        """The job's counters since this process took it up."""
        now = self.job.progress.counters if self.job is not None else self._initial
        return Counter({name: now[name] - self._initial[name] for name in COUNTED})

    async def close(self) -> None:
        """The task ends."""
        self._record.started(self.row.id)
        self._context.usage.close(self.row.id)
        if self._sinks is not None and self._sinks.active:
            await asyncio.to_thread(self._sinks.close)

    async def _store_counters(self) -> None:
        try:
            if self.job is not None:
                counters = dict(self.job.progress.counters)
                await asyncio.shield(self._context.store.save_counters(self.row.id, counters, self.job.rng()))
        except Exception:  # tolerable: counters and wall time are then those of the last commit
            extra = {"tenant": self.row.tenant, "job": self.row.id}
            log.exception("counters of job %s are not saved", self.row.id, extra=extra)


class JobRegistry:
    """The jobs of this process: their tasks, counts, and the signals that wake their followers."""

    def __init__(self) -> None:
        self.runners: dict[str, JobRunner] = {}
        """By the job's id, while it has a task."""
        self.waiting: dict[str, JobRow] = {}
        """Queued jobs that wait for a place among those of their tenant, the first to come first."""
        self.totals: Counter[str] = Counter()
        """Counters of the jobs whose tasks have ended, and of all steps."""
        self.states: Counter[str] = Counter()
        """How many jobs are in which state."""
        self._signals: WeakValueDictionary[str, Signal] = WeakValueDictionary()

    def running(self) -> list[TrainingJob]:
        """The jobs that are assembled and run."""
        return [runner.job for runner in self.runners.values() if runner.job is not None]

    def tenants(self) -> set[str]:
        """The tenants whose jobs have a task."""
        return {runner.row.tenant for runner in self.runners.values()}

    def models(self, tenant: str | None = None) -> set[str]:
        """The base models of the jobs that have a task, of one tenant or of all."""
        rows = [runner.row for runner in self.runners.values()]
        return {str(row.spec["base_model"]) for row in rows if tenant in (None, row.tenant)}

    def versions_in_use(self, model: str) -> list[protocol.AdapterRef]:
        """The versions that running jobs of a base model sample from."""
        return [ref for job in self.running() if job.spec.base_model == model for ref in job.policy.in_use()]

    def pinned(self, ref: protocol.AdapterRef | None) -> contextlib.AbstractContextManager[object]:
        """The retention of a running job keeps the version within."""
        policies = (job.policy for job in self.running() if ref is not None and job.policy.row.id == ref.policy)
        policy = next(policies, None)
        if ref is None or policy is None or policy.version(ref.version) is None:
            return contextlib.nullcontext()
        return policy.pinned(ref.version)

    def waiting_of(self, tenant: str) -> list[JobRow]:
        """The tenant's jobs that wait for a place, in order."""
        return [row for row in self.waiting.values() if row.tenant == tenant]

    def signal(self, job: str) -> Signal:
        """Notified when the job's state or metrics changed. Kept while somebody holds it."""
        return self._signals.setdefault(job, Signal())

    def followed(self) -> int:
        """How many jobs somebody follows."""
        return len(self._signals)

    def notify(self, job: str) -> None:
        signal = self._signals.get(job)
        if signal is not None:
            signal.notify()


class JobAdmission:
    """The places of each tenant's jobs, and the outages that paused jobs."""

    def __init__(self, limits: LimitSettings, clock: Clock, jobs: JobRegistry, quotas: Quotas) -> None:
        self._quotas = quotas
        self._limits = limits
        self._clock = clock
        self._jobs = jobs
        self._retries: dict[str, _Retry] = {}
        """By job."""
        self._held: dict[str, float] = {}
        """When jobs may start that are suspected to have ended the service."""

    # --- places -------------------------------------------------------------------------------------------------------

    def admitted(self, tenant: str) -> list[JobRow]:
        """The waiting jobs of the tenant that may start now, the first to come first; they wait no longer."""
        admitted: list[JobRow] = []
        models, running = self._quotas.models(tenant), self._running(tenant)
        for row in self._jobs.waiting_of(tenant):
            if not self._obstacle(row, models, running):
                del self._jobs.waiting[row.id]
                admitted.append(row)
                models.add(row.spec["base_model"])
                running.append(tokens_in_memory(row.spec))
        return admitted

    def _running(self, tenant: str) -> list[int]:
        """The tokens that each of the tenant's running jobs may hold."""
        rows = [runner.row for runner in self._jobs.runners.values()]
        return [tokens_in_memory(row.spec) for row in rows if row.tenant == tenant]

    def waits_for(self, row: JobRow) -> str:
        """Why a waiting job may not start, and its place."""
        obstacle = self._obstacle(row, self._quotas.models(row.tenant), self._running(row.tenant))
        place = [one.id for one in self._jobs.waiting_of(row.tenant)].index(row.id) + 1
        return f"{obstacle or 'its turn'} (place {place})"

    def _obstacle(self, row: JobRow, models: set[str], running: list[int]) -> str:
        """``running``: the tokens of each running job of the tenant."""
        tenant, quotas = row.tenant, self._quotas
        if (left := self._held.get(row.id, 0.0) - self._clock.monotonic()) > 0:
            return f"{math.ceil(left)} s: the service ended while this job was starting, and perhaps because of it"
        if reason := quotas.used_up(tenant):
            return f"the next day: {reason}"
        if len(running) >= quotas.limit(tenant, "jobs"):
            return f"one of the tenant's {quotas.limit(tenant, 'jobs'):g} running jobs to end"
        tokens, most = sum(running), 2 * self._limits.job_tokens
        if running and tokens + tokens_in_memory(row.spec) > most:
            return f"running jobs of the tenant to end, which may hold {tokens} tokens in memory, of {most}"
        if row.spec["base_model"] not in models and len(models) >= quotas.limit(tenant, "models"):
            return f"one of the tenant's {quotas.limit(tenant, 'models'):g} base models in use to be free"
        return ""

    def hold(self, job: str, seconds: float) -> None:
        """The job may not start before: the service may have ended because of it."""
        self._held[job] = self._clock.monotonic() + seconds

    # --- outages ------------------------------------------------------------------------------------------------------

    def outage(self, tenant: str, job: str, kind: Outage) -> None:
        """An outage has paused the job: try again when it is over, or after a while, each time after twice as long."""
        known = self._retries.get(job)
        last = known.pause if known is not None and known.kind == kind else None
        if kind == "other":
            pause = min(2 * last, LONGEST_RETRY_SECONDS) if last else self._limits.outage_retry_seconds
        else:
            pause = 0.0 if last is None else min(2 * last, LONGEST_PAUSE_SECONDS) or FIRST_PAUSE_SECONDS
        self._retries[job] = _Retry(tenant, kind, pause, self._clock.monotonic() + pause)

    def restarted(self, tenant: str, job: str) -> None:
        """An outage paused the job before the service started: try again now."""
        self._retries[job] = _Retry(tenant, "other", 0.0, self._clock.monotonic())

    def outages(self) -> set[Outage]:
        """The kinds of outages that jobs wait for."""
        return {retry.kind for retry in self._retries.values() if retry.due != math.inf}

    def progress(self, job: str) -> None:
        """The job works again, or is not to be tried again."""
        self._retries.pop(job, None)

    def due(self, lasting: Collection[Outage] = ()) -> list[tuple[str, str]]:
        """(tenant, job) of the jobs to try again now; each is returned once. Outages ``lasting`` are not over."""
        now = self._clock.monotonic()
        found = [
            job
            for job, retry in self._retries.items()
            if retry.due <= now and retry.kind not in lasting and not self._quotas.used_up(retry.tenant)
        ]
        for job in found:
            self._retries[job].due = math.inf
        return [(self._retries[job].tenant, job) for job in found]


@dataclass
class _Retry:
    """An attempt to resume a job."""

    tenant: str
    kind: Outage
    pause: float
    """The seconds before it."""
    due: float
    """Its time; infinite once it began."""


def _first(error: BaseException) -> BaseException:
    """The cause inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
