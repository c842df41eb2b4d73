"""Everything that a job needs from the service around it, in one place, given from outside."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rookery import protocol
from rookery.controller.fleet.env_hosts import EnvironmentHosts
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.offload.seeding import Seeding
from rookery.controller.rollout.scheduler import RolloutScheduler
from rookery.controller.training.dispatcher import TrainingDispatcher
from rookery.controller.usage import UsageMeter
from rookery.errors import StorageFull, Unavailable
from rookery.settings import Settings
from rookery.storage.artifacts import Artifacts
from rookery.storage.database import Database
from rookery.storage.writer import Clock, IdGenerator, Writer
from rookery.tokenization.chat import Chat

log = logging.getLogger("rookery.controller.context")


@dataclass(frozen=True)
class ControllerContext:
    settings: Settings
    clock: Clock
    ids: IdGenerator
    ledger: Writer
    database: Database
    artifacts: Artifacts
    fleet: Fleet
    rollouts: RolloutScheduler
    training: TrainingDispatcher
    seeding: Seeding
    hosts: EnvironmentHosts
    billing: UsageMeter
    chat: Callable[[str], Awaitable[Chat]]
    """The chat template and tokenizer of a base model, prepared if it was not."""
    check_environment: Callable[[str, dict[str, Any]], object]
    """Raises :class:`~rookery.errors.UserError` for a built-in environment that cannot be made with such options."""
    measured: Callable[[str, dict[str, Any]], None]
    """Takes a job's id and a metrics row as it happens, for sinks and counters."""
    read: Counter[str] = field(default_factory=Counter)
    """Artifacts that running samples read …"""
    left: set[str] = field(default_factory=set)
    """… and those among them that nothing names any more: they go with the last reader."""

    def __post_init__(self) -> None:
        self.training.on_stray(self._stray)

    @asynccontextmanager
    async def reading(self, ref: protocol.AdapterRef | None) -> AsyncIterator[None]:
        """The artifact stays within, whatever is let go meanwhile: a request may have to move to who must pull it."""
        if ref is None:
            yield
            return
        self.read[ref.hash] += 1
        try:
            yield
        finally:
            self.read[ref.hash] -= 1
            if not self.read[ref.hash]:
                del self.read[ref.hash]
                if ref.hash in self.left:
                    self.left.discard(ref.hash)
                    await self.let_go(self._unless_named, ref.hash)

    def _unless_named(self, digest: str) -> str | None:
        return None if digest in self.database.live_hashes() else digest

    async def let_go(self, call: Callable[..., str | None], *arguments: Any) -> None:
        """Carry out ``call``, which answers the hash of an artifact that nothing names any more, and delete that, here
        and at every worker."""

        def both() -> str | None:
            digest = call(*arguments)
            return digest if digest is not None and self._delete(digest) else None

        if (gone := await self.ledger(both)) is not None:
            self.fleet.evict([gone])

    def _delete(self, digest: str) -> bool:
        """Runs in the ledger: nothing names the artifact. It goes, unless it is about to be named or is read."""
        if digest in self.training.pinned:
            return False
        self.left.add(digest)  # before the look: whoever reads now finds it there afterwards
        if digest in self.read:
            return False
        self.left.discard(digest)
        self.artifacts.delete(digest)
        return True

    def _stray(self, policy: str, digest: str) -> None:
        """Runs in the ledger: the artifact was brought for ``policy`` and, as far as its job knows, never named. Where
        that cannot be found out, it is left to the next start."""
        try:
            if not self.database.names(policy, digest):
                self._delete(digest)
        except (StorageFull, Unavailable, OSError) as trouble:  # what ended the step is what its owner shall read
            log.warning("artifact %s of %s stays until the next start: %s", digest, policy, trouble,
                        extra={"policy": policy})  # fmt: skip
