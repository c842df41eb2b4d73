"""Everything that a job needs from the service around it, in one place, given from outside."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rookery.controller.billing import Billing
from rookery.controller.fleet import Fleet
from rookery.controller.hosts import Hosts
from rookery.controller.ports import Clock, Ids, Ledger
from rookery.controller.rollouts import Rollouts
from rookery.controller.seeding import Seeding
from rookery.controller.training import Training
from rookery.settings import Settings
from rookery.storage.artifacts import Artifacts
from rookery.storage.database import Database
from rookery.text.chat import Chat


@dataclass(frozen=True)
class World:
    settings: Settings
    clock: Clock
    ids: Ids
    ledger: Ledger
    database: Database
    artifacts: Artifacts
    fleet: Fleet
    rollouts: Rollouts
    training: Training
    seeding: Seeding
    hosts: Hosts
    billing: Billing
    chat: Callable[[str], Awaitable[Chat]]
    """The chat template and tokenizer of a base model, prepared if it was not."""
    check_environment: Callable[[str, dict[str, Any]], object]
    """Raises :class:`~rookery.errors.UserError` for a built-in environment that cannot be made with such options."""
    measured: Callable[[str, dict[str, Any]], None]
    """Takes a job's id and a metrics row as it happens, for sinks and counters."""

    async def let_go(self, call: Callable[..., str | None], *arguments: Any) -> None:
        """Carry out ``call``, which answers the hash of an artifact that nothing names any more, and delete that."""

        def both() -> str | None:
            digest = call(*arguments)
            if digest is None or digest in self.training.unnamed:
                return None
            self.artifacts.delete(digest)
            return digest

        if (gone := await self.ledger(both)) is not None:
            self.forget_artifacts([gone])

    def forget_artifacts(self, hashes: Sequence[str]) -> None:
        """Tell every worker that these will not be named again."""
        self.fleet.forget(hashes)
