"""Which waiting jobs may start, and why the others may not yet."""

from __future__ import annotations

import math

from rookery.clock import Clock
from rookery.controller.jobs.registry import JobRegistry, WaitingJob
from rookery.controller.quotas import Quotas, tokens_in_memory
from rookery.errors import count_of
from rookery.settings import LimitSettings
from rookery.storage.models import JobRow


class JobAdmission:
    """How many jobs of each tenant run at once; the others wait in order."""

    def __init__(self, limits: LimitSettings, clock: Clock, jobs: JobRegistry, quotas: Quotas) -> None:
        self._quotas = quotas
        self._limits = limits
        self._clock = clock
        self._jobs = jobs
        self._held: dict[str, float] = {}
        """When jobs may start that are suspected to have ended the service."""

    def admitted(self, tenant: str) -> list[JobRow]:
        """The waiting jobs of the tenant that may start now, the first to come first; they wait no longer."""
        admitted: list[JobRow] = []
        models, running = self._quotas.models(tenant), self._running(tenant)
        for job in self._jobs.waiting.of(tenant=tenant):
            if not self._obstacle(job, models, running):
                del self._jobs.waiting[job.id]
                admitted.append(job.row)
                models |= job.models
                running.append(job.tokens)
        return admitted

    def _running(self, tenant: str) -> list[int]:
        """The tokens that each of the tenant's running jobs may hold."""
        return [tokens_in_memory(runner.row.spec) for runner in self._jobs.runners.of(tenant=tenant)]

    def waits_for(self, job: WaitingJob) -> str:
        """Why a waiting job may not start, and its position."""
        obstacle = self._obstacle(job, self._quotas.models(job.tenant), self._running(job.tenant))
        position = self._jobs.waiting.of(tenant=job.tenant).index(job) + 1
        return f"{obstacle or 'its turn'} (place {position})"

    def _obstacle(self, job: WaitingJob, models: set[str], running: list[int]) -> str:
        """``running``: the tokens of each running job of the tenant."""
        tenant, quotas = job.tenant, self._quotas
        if (left := self._held.get(job.id, 0.0) - self._clock.monotonic()) > 0:
            return f"{math.ceil(left)} s: the service ended while this job was starting, and perhaps because of it"
        if reason := quotas.used_up(tenant):
            return f"the next day: {reason}"
        if len(running) >= quotas.limit(tenant, "jobs"):
            return f"one of the tenant's {count_of(quotas.limit(tenant, 'jobs'), 'running job')} to end"
        tokens, most = sum(running), 2 * self._limits.job_tokens
        if running and tokens + job.tokens > most:
            return f"running jobs of the tenant to end, which may hold {count_of(tokens, 'token')} in memory, of {most}"
        if job.models - models and len(models | job.models) > quotas.limit(tenant, "models"):
            return f"one of the tenant's {count_of(quotas.limit(tenant, 'models'), 'base model')} in use to be free"
        return ""

    def hold(self, job: str, seconds: float) -> None:
        """The job may not start before: the service may have ended because of it."""
        self._held[job] = self._clock.monotonic() + seconds
