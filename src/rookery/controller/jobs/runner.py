"""A job's task in this process: the job assembled from its row, run, and how that ended."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rookery.controller.context import ControllerContext
from rookery.controller.fleet.env_hosts import SERVICE, EnvironmentFailed
from rookery.controller.jobs.groups import JobPaused
from rookery.controller.jobs.job import Job
from rookery.controller.validation import JobValidator
from rookery.controller.views import JobState
from rookery.errors import RookeryError, StorageFull, Unavailable, UserError
from rookery.spec.job import JobSpec
from rookery.storage.rows import JobRow
from rookery.telemetry.metrics import MetricsLog
from rookery.telemetry.sinks import Sinks
from rookery.tokenization.chat import Chat

log = logging.getLogger("rookery.controller")

COUNTED = (
    "episodes", "episodes_failed", "evaluation_failures", "groups_dropped_stale", "groups_failed",
    "zero_variance_groups", "trajectory_splits", "steps_skipped",
)  # fmt: skip
"""Of a job's counters, those that the service sums over all jobs."""


class JobRunner:
    task: asyncio.Task[None]
    """Set by who makes it."""

    def __init__(
        self, world: ControllerContext, intake: JobValidator, provide: Callable[[str], None], row: JobRow, folder: Path
    ) -> None:
        """``provide(model)`` asks for a worker with that model; ``folder`` is the job's, for its metrics."""
        self.row = row
        self.job: Job | None = None
        """None until its model and its environment's data are there."""
        self.wanted: JobState | None = None
        """The state that a person asked for while it ran."""
        self.unstored = ""
        """Why the job rests, while the database does not take it."""
        self._world = world
        self._intake = intake
        self._provide = provide
        self._folder = folder
        self._before = Counter(row.counters)
        """When it was taken up, so that totals count what this process saw."""
        self._sinks: Sinks | None = None

    async def run(self, begun: Callable[[], Awaitable[object]]) -> tuple[JobState, str]:
        """Run the job, which has ``begun`` when it is assembled; how it ended, and why. Only a cancellation comes out
        as an exception. What it counted is stored then: who sees that it has ended sees all of it."""
        try:
            self.job = await self._assemble()
            await begun()
            return "completed", await self.job.run()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            cause = _first(error)
            if isinstance(cause, JobPaused | Unavailable | StorageFull | EnvironmentFailed):
                return "paused", str(cause)
            if isinstance(cause, RookeryError):
                return "failed", str(cause)
            log.exception("job %s failed", self.row.id, extra={"tenant": self.row.tenant, "job": self.row.id})
            return "failed", f"{type(cause).__name__}: {cause}"
        finally:
            await self._store_counters()

    async def _assemble(self) -> Job:
        world, row = self._world, self.row
        spec = JobSpec.model_validate(row.spec)
        self._provide(spec.base_model)
        policies = await world.store.policies(row.tenant, row.id)
        await world.billing.open(row.tenant, row.id, [policy.id for policy in policies])
        self._sinks = Sinks(world.settings, self._folder, row.id, row.name)
        return Job(
            world,
            row,
            spec,
            policies[0],
            owner=row.tenant if spec.environment.hosted is not None else SERVICE,
            options=await self._intake.options(row.tenant, spec),
            chat=await self._chat(spec.base_model),
            warm_start=await self._intake.warm_start(row.tenant, spec, policies[0])
            if policies[0].head_version is None
            else None,
            metrics=MetricsLog(self._folder),
        )

    async def _chat(self, model: str) -> Chat:
        """The base model's. A job that has run before had it: what keeps it away now can be mended."""
        try:
            return await self._world.chat(model)
        except UserError as error:
            if self.row.started is None:
                raise
            raise Unavailable(str(error)) from None

    def measured(self, row: dict[str, Any]) -> None:
        """Hand a committed step's metrics to where the operator wants them."""
        if self._sinks is not None:
            self._sinks.write(row)

    def seen(self) -> Counter[str]:
        """What the job counted since it was taken up."""
        now = self.job.progress.counters if self.job is not None else self._before
        return Counter({name: now[name] - self._before[name] for name in COUNTED})

    async def close(self) -> None:
        """The task ends."""
        self._world.billing.close(self.row.id)
        if self._sinks is not None and self._sinks.used:
            await asyncio.to_thread(self._sinks.close)

    async def _store_counters(self) -> None:
        try:
            if self.job is not None:
                counters = dict(self.job.progress.counters)
                await asyncio.shield(self._world.store.save_counters(self.row.id, counters, self.job.rng()))
        except Exception:  # the job goes on without: they are shown, and its wall time is that of its last commit
            extra = {"tenant": self.row.tenant, "job": self.row.id}
            log.exception("counters of job %s are not saved", self.row.id, extra=extra)


def _first(error: BaseException) -> BaseException:
    """The cause inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
