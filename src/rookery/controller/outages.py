"""Outages: which errors report one, and the wait for its end.

An outage is no fault of the work that meets it. A job pauses with the reason and resumes by itself
(:class:`~rookery.controller.jobs.outage_retries.OutageRetries`); an operation of a client waits in
:meth:`Outages.over` and is executed again.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from rookery.clock import Clock
from rookery.errors import (
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
from rookery.storage.artifacts import Artifacts
from rookery.storage.store import Store

Outage = Literal["database", "artifacts", "writes", "other"]
"""Kinds of outages: the database or the place of the artifacts is away, or a disk takes no writes, as one that is full
or read-only. Of these the service asks whether they are over."""

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 30.0
"""An operation that meets an outage again and again, such as a store that denies one object, is executed again after so
long, each time after twice as long."""


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


class Outages:
    """Asks the database and the place of the artifacts whether they answer again. However many wait for one of them,
    one question is asked at a time."""

    def __init__(self, store: Store, artifacts: Artifacts, clock: Clock, seconds: float) -> None:
        """``seconds``: between two questions."""
        self._store = store
        self._artifacts = artifacts
        self._clock = clock
        self._seconds = seconds
        self._questions: dict[Outage, asyncio.Task[bool]] = {}

    async def lasts(self, kind: Outage) -> bool:
        """Whether the outage is not over, as far as the service can ask."""
        question = self._questions.get(kind)
        if question is None:
            question = self._questions[kind] = asyncio.create_task(self._ask(kind))
            question.add_done_callback(lambda _: self._questions.pop(kind))
        return await asyncio.shield(question)

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
                await store.transfer(self._artifacts.check)
            elif kind == "writes":
                await store.run(store.database.check_writes)
                await store.transfer(self._artifacts.check_writes)
        except RookeryError:
            return True
        return False
