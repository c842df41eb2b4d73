"""When jobs that outages paused are tried again."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from rookery.clock import Clock
from rookery.controller.outages import Outage
from rookery.controller.quotas import Quotas
from rookery.settings import LimitSettings

LONGEST_RETRY_SECONDS = 600.0
"""Between two attempts to resume a job that an outage paused."""

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 60.0
"""Where the service asks whether an outage is over, a job resumes at the first answer. If it finds the outage again
before it has trained a step, as with a store that fails now and then, it pauses for so long in addition."""


@dataclass
class _Retry:
    """An attempt to resume a job."""

    tenant: str
    kind: Outage
    pause: float
    """The seconds before it."""
    due: float
    """Its time; infinite once it began."""


class OutageRetries:
    """The jobs that outages paused, and when each is tried again."""

    def __init__(self, limits: LimitSettings, clock: Clock, quotas: Quotas) -> None:
        self._limits = limits
        self._clock = clock
        self._quotas = quotas
        self._retries: dict[str, _Retry] = {}
        """By job."""

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
