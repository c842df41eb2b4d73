"""What every room of the controller may use: settings, time, names, storage, threads. Fields only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rookery.clock import Clock, IdGenerator
from rookery.controller.outages import Outages
from rookery.settings import Settings
from rookery.storage.artifacts import Artifacts
from rookery.storage.store import Store, Writer
from rookery.tokenization.chat import Chat


@dataclass(frozen=True, kw_only=True)
class Services:
    settings: Settings
    clock: Clock
    ids: IdGenerator
    store: Store
    artifacts: Artifacts
    chat: Callable[[str], Awaitable[Chat]]
    """The chat template and tokenizer of a base model, prepared if they were not."""
    threads: Writer
    """Runs blocking calls of a tenant's work, off the event loop."""
    refused: Counter[str]
    """Refusals by the limit that caused them, since the service started."""
    outages: Outages
