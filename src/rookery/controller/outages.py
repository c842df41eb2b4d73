"""Outages: which errors report one, the wait for its end, and the next attempt of a job that one paused.

An outage is no fault of the work that meets it. A job pauses with the reason and resumes by itself
(:class:`OutageRetries`); an operation of a client waits in :meth:`Outages.over` and is executed again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from rookery.clock import Clock
from rookery.errors import (
    ArtifactMissing,
    ArtifactsAway,
    CorruptArtifact,
    DatabaseAway,
    DatabaseReadOnly,
    LeaseLost,
    RookeryError,
    StorageFull,
    TooManyRequests,
    Unavailable,
    UnreadableArtifact,
)
from rookery.settings import LimitSettings
from rookery.storage.artifacts import Artifacts
from rookery.storage.store import Store, Writer
from rookery.turns import in_thread, service_task

Outage = Literal["database", "artifacts", "writes", "other"]
"""Kinds of outages: the database or the place of the artifacts is away, or a disk takes no writes, as one that is full
or read-only. Of these the service asks whether they are over."""

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 30.0
"""An operation that meets an outage again and again, such as a store that denies one object, is executed again after so
long, each time after twice as long."""

LONGEST_RETRY_SECONDS = 600.0
"""Between two attempts to resume a job that an outage paused."""

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 60.0
"""Where the service asks whether an outage is over, a job resumes at the first answer. If it finds the outage again
before it has trained a step, as with a store that fails now and then, it pauses for so long in addition."""

PATIENCE_SECONDS = 2.0
"""An outage is taken to last where its question has no answer within this time: those who ask wait for nothing else."""


def outage_of(cause: BaseException) -> Outage | None:
    """The kind of the outage that ``cause`` reports; None for an error of the work itself. Stored bytes that are
    absent, damaged or cannot be read are no fault of a job; nor is another trainer that took its policy over."""
    if isinstance(cause, StorageFull | UnreadableArtifact | DatabaseReadOnly):
        return "writes"
    if isinstance(cause, DatabaseAway):
        return "database"
    if isinstance(cause, ArtifactsAway):
        return "artifacts"
    waits = isinstance(cause, Unavailable | TooManyRequests | CorruptArtifact | LeaseLost | OSError)
    return "other" if waits else None


def storage_outage(cause: BaseException) -> bool:
    """Whether ``cause`` reports that the database or the place of the artifacts does not answer."""
    return isinstance(cause, DatabaseAway | ArtifactsAway | UnreadableArtifact)


async def unread_dataset(store: Store, artifacts: Artifacts, cause: BaseException) -> RookeryError | None:
    """The error for a tenant in the place of ``cause``, which names a file among the artifacts: an environment could
    not read it. None for any other cause."""
    if str(artifacts.root) not in str(cause):
        return None
    try:
        await store.transfer(artifacts.check)
    except RookeryError as away:
        return away
    return ArtifactMissing("the job's dataset could not be read", str(cause))


class Outages:
    """Asks the database and the place of the artifacts whether they answer again. However many wait for one of them,
    one question is asked at a time."""

    def __init__(
        self,
        store: Store,
        artifacts: Artifacts,
        clock: Clock,
        seconds: float,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """``seconds``: between two questions."""
        self._patience = patience_seconds
        self._store = store
        self._artifacts = artifacts
        self._clock = clock
        self._seconds = seconds
        self._questions: dict[Outage, tuple[asyncio.Task[bool], float]] = {}
        """The questions under way, and when the patience for each ends (seconds of the loop)."""
        # A request for a large file, which hangs, must not delay the question whether the place answers again.
        self._transfer: Writer = in_thread if artifacts.remote else store.transfer

    async def lasts(self, kind: Outage) -> bool:
        """Whether the outage is not over, as far as the service can ask. Returns within its patience, and
        at once where a question has had no answer for so long."""
        now = asyncio.get_running_loop().time()
        if kind not in self._questions:
            asked = service_task(self._ask(kind))
            self._questions[kind] = asked, now + self._patience
            asked.add_done_callback(lambda _: self._questions.pop(kind))
        question, until = self._questions[kind]
        await asyncio.wait([question], timeout=max(0.0, until - now))
        return question.result() if question.done() else True

    async def over(self, error: BaseException, attempt: int) -> None:
        """Return when the outage that ``error`` reports is over, or may be: the work met one ``attempt`` times before
        without a success in between."""
        kind, longest = outage_of(error) or "other", LONGEST_WAIT_SECONDS
        await self._clock.sleep(self._seconds if attempt == 0 else min(FIRST_WAIT_SECONDS * 2**attempt, longest))
        while await self.lasts(kind):
            await self._clock.sleep(self._seconds)

    async def _ask(self, kind: Outage) -> bool:
        store = self._store
        try:
            if kind == "database":
                await store.run(store.database.ping)
            elif kind == "artifacts":
                await self._transfer(self._artifacts.check)
            elif kind == "writes":
                await store.run(store.database.check_writes)
                await self._transfer(self._artifacts.check_writes)
        except RookeryError:
            return True
        return False


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

    def __init__(self, limits: LimitSettings, clock: Clock, used_up: Callable[[str], str]) -> None:
        """``used_up(tenant)``: why its jobs may not work today; empty if they may."""
        self._limits = limits
        self._clock = clock
        self._used_up = used_up
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
            if retry.due <= now and retry.kind not in lasting and not self._used_up(retry.tenant)
        ]
        for job in found:
            self._retries[job].due = math.inf
        return [(self._retries[job].tenant, job) for job in found]
