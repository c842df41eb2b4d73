"""The services that every room of the controller may use: settings, time, names, storage, threads; and the service's
records about itself, parts of which a room gets by themselves. Fields only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rookery.clock import Clock, IdGenerator
from rookery.settings import Settings
from rookery.storage.artifacts import Artifacts
from rookery.storage.store import Store, Writer
from rookery.telemetry.spans import SpanRing
from rookery.telemetry.tracing import EpisodeTracer
from rookery.tokenization.chat import Chat
from rookery.turns import in_thread

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Records:
    """The service's records about itself, for operators. Nothing decides by it."""

    refused: Counter[str] = field(default_factory=Counter)
    """Refusals by the limit that caused them, since the service started."""
    spans: SpanRing = field(default_factory=SpanRing)
    """The recent work of workers, environments and the trainer."""
    tracer: EpisodeTracer | None = None
    """Sends episodes to a collector, where a setting names one."""


@dataclass(frozen=True, kw_only=True)
class Threads:
    """Run blocking calls of tenants, off the event loop. A call of one kind waits for none of another."""

    work: Writer = in_thread
    """All that is none of the following."""
    encoders: Writer = in_thread
    """Responses that are encoded: lists wait for no work."""
    openers: Writer = in_thread
    """Files of artifacts that are opened or read whole, perhaps from a store that is slow or away."""
    checkers: Writer = in_thread
    """Checks of environments and datasets, which wait for separate processes."""
    senders: Writer = in_thread
    """Requests to the sinks of jobs."""

    def __call__(self, call: Callable[..., T], *arguments: Any, **named: Any) -> Coroutine[Any, Any, T]:
        """A call of ``work``."""
        return self.work(call, *arguments, **named)


@dataclass(frozen=True, kw_only=True)
class Services:
    settings: Settings
    clock: Clock
    ids: IdGenerator
    store: Store
    artifacts: Artifacts
    chat: Callable[[str], Awaitable[Chat]]
    """The chat template and tokenizer of a base model, prepared if they were not."""
    threads: Threads = field(default_factory=Threads)
