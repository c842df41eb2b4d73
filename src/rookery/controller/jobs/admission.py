"""Which waiting jobs may start, and why the others may not yet."""

from __future__ import annotations

import math

from rookery.clock import Clock
from rookery.controller.jobs.registry import JobRegistry
from rookery.controller.quotas import Quotas, tokens_in_memory
from rookery.settings import LimitSettings
from rookery.spec.job import stored_base_models
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
        for row in self._jobs.waiting_of(tenant):
            if not self._obstacle(row, models, running):
                del self._jobs.waiting[row.id]
                admitted.append(row)
                models |= stored_base_models(row.spec)
                running.append(tokens_in_memory(row.spec))
        return admitted

    def _running(self, tenant: str) -> list[int]:
        """The tokens that each of the tenant's running jobs may hold."""
        return [tokens_in_memory(runner.row.spec) for runner in self._jobs.runners.of(tenant=tenant)]

    def waits_for(self, row: JobRow) -> str:
        """Why a waiting job may not start, and its place."""
        obstacle = self._obstacle(row, self._quotas.models(row.tenant), self._running(row.tenant))
        position = [one.id for one in self._jobs.waiting_of(row.tenant)].index(row.id) + 1
        return f"{obstacle or 'its turn'} (place {position})"

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
        needed = stored_base_models(row.spec)
        if needed - models and len(models | needed) > quotas.limit(tenant, "models"):
            return f"one of the tenant's {quotas.limit(tenant, 'models'):g} base models in use to be free"
        return ""

    def hold(self, job: str, seconds: float) -> None:
        """The job may not start before: the service may have ended because of it."""
        self._held[job] = self._clock.monotonic() + seconds
