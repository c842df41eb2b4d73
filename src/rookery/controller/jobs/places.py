"""Which jobs may run now: each tenant has a number of places, and jobs that an outage paused are tried again."""

from __future__ import annotations

from dataclasses import dataclass

from rookery.aio import Clock
from rookery.controller.jobs.runner import JobRegistry
from rookery.settings import LimitSettings
from rookery.storage.models import JobRow

LONGEST_RETRY_SECONDS = 600.0


@dataclass
class _Retry:
    tenant: str
    pause: float
    due: float | None


class JobAdmission:
    """The places of each tenant's jobs, and the outages that paused jobs."""

    def __init__(self, limits: LimitSettings, clock: Clock, jobs: JobRegistry) -> None:
        self.jobs_limits: dict[str, int | None] = {}
        """Limits of tenants that have one of their own."""
        self._limits = limits
        self._clock = clock
        self._jobs = jobs
        self._retries: dict[str, _Retry] = {}

    # --- places -------------------------------------------------------------------------------------------------------

    def limit(self, tenant: str) -> int:
        """Jobs of the tenant that run at once."""
        return self.jobs_limits.get(tenant) or self._limits.tenant_jobs

    def admitted(self, tenant: str) -> list[JobRow]:
        """The waiting jobs of the tenant that may start now, the first to come first; they wait no longer."""
        running = sum(runner.row.tenant == tenant for runner in self._jobs.runners.values())
        rows = self._jobs.waiting_of(tenant)[: max(0, self.limit(tenant) - running)]
        for row in rows:
            del self._jobs.waiting[row.id]
        return rows

    # --- outages ------------------------------------------------------------------------------------------------------

    def outage(self, tenant: str, job: str) -> None:
        """An outage has paused the job: try again after a while, each time after twice as long."""
        known = self._retries.get(job)
        pause = min(2 * known.pause, LONGEST_RETRY_SECONDS) if known is not None else self._limits.outage_retry_seconds
        self._retries[job] = _Retry(tenant, pause, self._clock.monotonic() + pause)

    def progress(self, job: str) -> None:
        """The job works again, or is not to be tried again."""
        self._retries.pop(job, None)

    def due(self) -> list[tuple[str, str]]:
        """(tenant, job) of the jobs to try again now; each is returned once."""
        now, found = self._clock.monotonic(), []
        for job, retry in self._retries.items():
            if retry.due is not None and retry.due <= now:
                retry.due = None
                found.append((retry.tenant, job))
        return found
