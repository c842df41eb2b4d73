"""The task of a running job: assemble the job from its row, run it, report how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rookery.aio import cancel_all, close_within
from rookery.controller.context import ControllerContext
from rookery.controller.fleet.env_hosts import EnvironmentFailed
from rookery.controller.jobs.groups import JobPaused
from rookery.controller.jobs.job import TrainingJob
from rookery.controller.jobs.job_context import JobContext, JobPolicy, Progress
from rookery.controller.jobs.run_record import RunRecord
from rookery.controller.outages import Outage, outage_of, unread_dataset
from rookery.controller.training.policy_versions import PolicyVersions, Retention
from rookery.controller.validation import JobValidator
from rookery.controller.views import JobState
from rookery.errors import RookeryError, Unavailable, UserError, next_state, shortage
from rookery.spec.job import JobSpec
from rookery.storage.models import JobRow, PolicyRow
from rookery.storage.repositories import jobs
from rookery.telemetry.metrics import Sinks
from rookery.tokenization.chat import Chat
from rookery.turns import outlive_request

log = logging.getLogger("rookery.controller")


START_SECONDS = 60.0
"""A job is starting until it has trained a step or has run for this long: by then its prompts are rendered and its
first episodes run, which is where a job that kills the service does so."""

SINKS_SECONDS = 30.0
"""How long the end of a job's task waits for the operator's sinks, which may have to reach a server."""

COUNTED = (
    "episodes", "episodes_failed", "evaluation_failures", "groups_dropped_stale", "groups_failed",
    "zero_variance_groups", "trajectory_splits", "steps_skipped",
)  # fmt: skip
"""The counters of a job that the service sums over all jobs."""


RunnerState = Literal[
    "created",  # its task has not taken its first step
    "held",  # a halt came before that step
    "working",
    "halted",  # it pauses, for the reason of the halt
    "revoked",  # its owner asked for another state of the job: its task ends and stores none
    "finished",  # its work is over, and its end may not be stored yet
]
RunnerEvent = Literal["begin", "halt", "revoke", "finish"]

TRANSITIONS: dict[tuple[RunnerState, RunnerEvent], RunnerState] = {
    ("created", "begin"): "working",
    ("created", "halt"): "held",
    ("held", "begin"): "halted",
    ("held", "halt"): "held",  # a job is halted once
    ("working", "halt"): "halted",
    ("working", "finish"): "finished",
    ("halted", "halt"): "halted",
    ("halted", "finish"): "halted",
    ("finished", "halt"): "finished",  # its end counts
    ("revoked", "begin"): "revoked",
    ("revoked", "halt"): "revoked",  # the command of its owner counts
    ("revoked", "finish"): "revoked",
    **{(state, "revoke"): "revoked" for state in get_args(RunnerState)},
}
"""The next state by state and event. Any other event is a mistake of the controller."""


@dataclass(frozen=True)
class JobEnd:
    """How a job's task ended, unless its owner or the end of the service ended it."""

    state: JobState
    reason: str
    outage: Outage | None = None
    """The kind of the outage that paused it: it resumes by itself."""


class JobRunner:
    task: asyncio.Task[None]
    """Set by the controller."""

    def __init__(
        self,
        context: ControllerContext,
        validator: JobValidator,
        row: JobRow,
        folder: Path,
        record: RunRecord,
        on_metrics: Callable[[str, dict[str, Any]], None],
    ) -> None:
        """``folder`` is the job's, for its metrics; ``on_metrics`` is called with its id and the metrics row of each
        committed step."""
        self._record = record
        self.row = row
        self.job: TrainingJob | None = None
        """None until its model and its environment's data are there."""
        self.unstored = ""
        """The reason for its pause, while that could not be stored yet."""
        self._context = context
        self._on_metrics = on_metrics
        self._validator = validator
        self._folder = folder
        self._state: RunnerState = "created"
        """Changed by :meth:`_enter` alone."""
        self._halt_reason = ""
        self._initial = Counter(row.counters)
        """Counters at the start of this run: totals count this process only."""
        self._sinks: Sinks | None = None

    @property
    def revoked(self) -> bool:
        """Whether its owner asked for another state of the job."""
        return self._state == "revoked"

    async def run(self, begun: Callable[[], Awaitable[object]]) -> JobEnd:
        """Run the job; ``begun`` is called when it is assembled. Raises nothing but a cancellation. Its counters are
        stored before it returns, so that they are complete when the end is seen."""
        outlive_request(self.row.tenant)
        try:
            return JobEnd("completed", await self._work(begun))
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._state != "halted" or current is None or current.uncancel():
                raise
            return JobEnd("paused", self._halt_reason, "other")
        except BaseException as error:
            cause = _first(error)
            cause = shortage(cause) or await self._unread(cause) or cause
            outage = outage_of(cause)
            if detail := getattr(cause, "detail", ""):
                extra = {"tenant": self.row.tenant, "job": self.row.id}
                log.warning("job %s stops: %s (%s)", self.row.id, cause, detail, extra=extra)
            if isinstance(cause, OSError):  # its text names a path of the service
                extra = {"tenant": self.row.tenant, "job": self.row.id}
                log.warning("job %s stops", self.row.id, exc_info=cause, extra=extra)
                reason = cause.strerror or type(cause).__name__
                return JobEnd("paused", f"the service met an error of its machine ({reason})", outage)
            if outage is not None or isinstance(cause, JobPaused | EnvironmentFailed):
                return JobEnd("paused", str(cause), outage)
            if isinstance(cause, RookeryError):
                return JobEnd("failed", str(cause))
            log.exception("job %s failed", self.row.id, extra={"tenant": self.row.tenant, "job": self.row.id})
            return JobEnd("failed", f"{type(cause).__name__}: {cause}")
        finally:
            await self._store_counters()

    async def _work(self, begun: Callable[[], Awaitable[object]]) -> str:
        """Run the job; returns why it is completed."""
        self._enter("begin")
        if self._state != "working":  # it was halted or revoked before this first step of its task
            raise asyncio.CancelledError
        started: asyncio.Task[None] | None = None
        try:
            await self._record.starts(self.row.id)
            started = asyncio.create_task(self._end_start())
            self.job = await self._assemble()
            await self._record.assembled(self.row.id)
            await begun()
            return await self.job.run()
        finally:
            self._enter("finish")
            if started is not None:
                started.cancel()

    async def _unread(self, cause: BaseException) -> RookeryError | None:
        """The error of an environment that could not read the job's dataset, whose file lies among the artifacts."""
        context = self._context
        failed = isinstance(cause, EnvironmentFailed)
        return await unread_dataset(context.store, context.artifacts, cause) if failed else None

    def _enter(self, event: RunnerEvent) -> RunnerState:
        """Enter the state that follows ``event``; returns the state before it."""
        before = self._state
        self._state = next_state(TRANSITIONS, before, event, f"the task of job {self.row.id}")
        return before

    async def revoke(self) -> None:
        """End the task: the job's owner asked for another state of the job, which the caller stores."""
        if self._enter("revoke") in ("created", "held"):  # cancelled before its first step, it would release nothing
            await asyncio.wait([self.task])
        else:
            await cancel_all(self.task)

    def halt(self, reason: str) -> None:
        """Pause the job; it resumes by itself."""
        if self._enter("halt") in ("created", "working"):
            self._halt_reason = reason
            if self._state == "halted":
                self.task.cancel()

    async def _end_start(self) -> None:
        """The job has started once it has run for a while."""
        await self._context.clock.sleep(START_SECONDS)
        self._record.started(self.row.id)
        if self.row.crashes:
            with contextlib.suppress(RookeryError):
                await self._context.store.write(jobs.clear_crashes, self.row.id)

    async def _assemble(self) -> TrainingJob:
        context, row = self._context, self.row
        spec = JobSpec.model_validate(row.spec)  # as it was checked and stored at its submission
        for model in spec.base_models:
            context.rooms.models.provide(model)
            if reason := context.rooms.fleet.failure(model):
                raise Unavailable(f"worker: {reason}")
        policies = await context.store.read(jobs.policies, row.tenant, row.id)
        await context.rooms.usage.open(row.tenant, row.id, [policy.id for policy in policies])
        self._sinks = Sinks(context.settings, self._folder, row.id, row.name)
        rows = {policy.name: policy for policy in policies}
        job = JobContext(
            context,
            row,
            spec,
            environment=await self._validator.environment(row.tenant, row.id, spec),
            policies=await self._policies(spec, rows),
            progress=Progress(context.store, context.clock, row, spec, self._on_step),
        )
        return TrainingJob(job)

    async def _policies(self, spec: JobSpec, rows: Mapping[str, PolicyRow]) -> dict[str, JobPolicy]:
        chats = {model: await self._chat(model) for model in spec.base_models}
        found = {
            name: await self._policy(spec, name, rows[name], chats[spec.base_model_of(name)])
            for name in spec.policies
            if name in rows
        }
        for name, about in spec.policies.items():
            if name not in rows:  # the base model, or one that follows another
                versions = found[about.follows.policy].versions if about.follows is not None else None
                part = spec.of_policy(name)
                found[name] = JobPolicy(name, about, part, chats[part.base_model], versions)
        return {name: found[name] for name in spec.policies}

    async def _policy(self, spec: JobSpec, name: str, row: PolicyRow, chat: Chat) -> JobPolicy:
        part, start = spec.of_policy(name), None
        if row.head_version is None:
            start = await self._validator.warm_start(row.tenant, part, row)
        followers = tuple(
            other.follows.every
            for other in spec.policies.values()
            if other.follows is not None and other.follows.policy == name
        )
        retention = Retention(
            checkpoints=spec.checkpoints,
            reference=0 if part.compares_with_start else None,
            followers=followers,
            keeps_first=bool(followers and spec.evaluation.prompts),
        )
        context = self._context
        versions = PolicyVersions(context, context.records.spans, context.rooms.collector, row, retention)
        return JobPolicy(name, spec.policies[name], part, chat, versions, start)

    async def _chat(self, model: str) -> Chat:
        """The base model's chat template and tokenizer. For a job that has run before they existed: an error is
        temporary."""
        try:
            return await self._context.chat(model)
        except UserError as error:
            if self.row.started is None:
                raise
            raise Unavailable(str(error)) from None

    def _on_step(self, row: dict[str, Any]) -> None:
        """A step was committed, of which this is the metrics row."""
        self._record.started(self.row.id)
        if self._sinks is not None:
            self._sinks.write(row)
        self._on_metrics(self.row.id, row)

    def counted(self) -> Counter[str]:
        """The job's counters since this process took it up."""
        now = self.job.progress.counters if self.job is not None else self._initial
        return Counter({name: now[name] - self._initial[name] for name in COUNTED})

    async def close(self) -> None:
        """The task ends."""
        self._record.started(self.row.id)
        self._context.rooms.usage.close(self.row.id)
        if self._sinks is not None and self._sinks.active:
            sinks, name = self._sinks, f"the sinks of job {self.row.id}"
            await close_within(sinks.close, name, SINKS_SECONDS, tenant=self.row.tenant, job=self.row.id)

    async def _store_counters(self) -> None:
        try:
            if self.job is not None and not self.job.progress.unstored:
                counters = dict(self.job.progress.counters)
                await asyncio.shield(
                    self._context.store.write(jobs.save_counters, self.row.id, counters, self.job.rng())
                )
        except Exception as error:  # tolerable: counters and wall time are then those of the last commit
            known = isinstance(error, RookeryError)  # such as an outage
            extra = {"tenant": self.row.tenant, "job": self.row.id}
            log.warning("counters of job %s are not saved: %s", self.row.id, error, exc_info=not known, extra=extra)


def _first(error: BaseException) -> BaseException:
    """The cause inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
