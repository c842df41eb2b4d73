"""Which worker has which artifact, and who reads from whom, as the frames between them and the controller show it.

* **holders** – a worker is told to read an artifact only from another process, which is connected, has it or receives
  it, answers at that address now, and has not failed this receiver in the same transfer. First sources make no circle.
  It reads from another site only what no worker of its site has complete.
  A version that is not committed goes only to workers of the trainer's machine and cache.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.events import Events

from rookery import protocol
from rookery.controller.fleet.worker import Worker

COMPOSED_SECONDS = 0.1
"""A training operation names its sources, then waits for the batch to be written: a source may be lost meanwhile."""

SERVICE_SITE = ""
"""Where the service runs: no worker is there."""


@dataclass(eq=False)
class Holder:
    """A worker's connection."""

    worker: Worker
    alive: bool = True
    lost_at: float = 0.0
    has: set[str] = field(default_factory=set)
    moving: dict[str, str] = field(default_factory=dict)
    """By hash, the first source of what it was told to receive: an address, or empty for the service."""
    failed: defaultdict[str, dict[str, Holder]] = field(default_factory=lambda: defaultdict(dict))
    """By hash and address, processes that had or received it and failed this receiver. A new process there may be
    read from."""

    def offers(self, digest: str) -> bool:
        """Whether it has the artifact or receives it."""
        return digest in self.has or digest in self.moving

    @property
    def place(self) -> tuple[str, str]:
        return self.worker.hello.host, self.worker.hello.cache


class Holders:
    """Of one controller's life."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._holders: dict[Worker, Holder] = {}
        self._answering: dict[str, Holder] = {}
        """By address, who came there last."""
        self._staged: dict[str, tuple[str, str]] = {}
        """By hash of a version that a trainer has announced: its host and cache."""

    def joined(self, worker: Worker) -> None:
        self._holders[worker] = holder = Holder(worker, has=set(worker.hello.adapters))
        self._answering[worker.hello.address] = holder

    def lost(self, worker: Worker) -> None:
        if (holder := self._holders.get(worker)) is not None:
            holder.alive, holder.lost_at = False, asyncio.get_running_loop().time()

    # --- frames to workers --------------------------------------------------------------------------------------------

    def posted(self, worker: Worker, message: protocol.Message) -> None:
        holder = self._holders[worker]
        match message:
            case protocol.Sources():
                self._told(holder, message.hash, message.sources)
                self._check_site(holder, message.hash, message.sources)
            case protocol.EvictArtifacts():
                for digest in message.hashes:
                    holder.has.discard(digest)
                    holder.moving.pop(digest, None)
            case protocol.HandOver():
                if self._staged.get(message.ref.hash) != holder.place:
                    self._fail(holder, f"is handed {message.ref.hash[:8]}, which is on another machine")
                self._events.note("handed", worker.name)
            case _:
                for ref in _refs(message):
                    if ref.hash not in holder.has:
                        fresh = ref.hash not in holder.moving
                        self._told(holder, ref.hash, ref.sources)
                        if fresh:
                            self._check_site(holder, ref.hash, ref.sources)

    def _told(self, holder: Holder, digest: str, sources: list[str]) -> None:
        holder.moving[digest] = sources[0] if sources else ""
        for address in sources:
            source = self._answering.get(address)
            what = f"is told to read {digest[:8]} from {address}, "
            if address == holder.worker.hello.address:
                self._fail(holder, what + "its own address")
            elif source is None or not (source.alive or self._just_lost(source)):
                self._fail(holder, what + "where nobody is connected")
            elif not source.offers(digest):
                self._fail(holder, what + f"where {source.worker.name} neither has nor receives it")
            elif holder.failed[digest].get(address) is source:
                self._fail(holder, what + "which failed")
        if sources:
            self._events.note("source")
        self._follow(holder, digest)

    def _just_lost(self, source: Holder) -> bool:
        return asyncio.get_running_loop().time() - source.lost_at < COMPOSED_SECONDS

    def _check_site(self, holder: Holder, digest: str, sources: list[str]) -> None:
        """Nothing crosses between sites that a worker of the receiver's site has complete."""
        site = holder.worker.hello.site
        first = self._answering.get(sources[0]) if sources else None
        if (first.worker.hello.site if first is not None else SERVICE_SITE) == site:
            return
        if self._staged.get(digest) == holder.place:  # it was handed to it, which then asks for what it has
            return
        for address, other in self._answering.items():
            near = other.alive and other.worker.working and other.worker.hello.site == site
            own = address == holder.worker.hello.address  # of a process that came after it
            if near and not own and digest in other.has and address not in holder.failed[digest]:
                self._fail(holder, f"reads {digest[:8]} from another site, {other.worker.name} of its site has it")

    def _follow(self, holder: Holder, digest: str) -> None:
        """First sources lead to a worker that has it, or to the service."""
        at: Holder | None = holder
        for _ in range(len(self._holders) + 1):
            if at is None or not at.alive or digest in at.has or not at.moving.get(digest):
                return
            at = self._answering.get(at.moving[digest])
        self._fail(holder, f"reads {digest[:8]} in a circle")

    def _fail(self, holder: Holder, what: str) -> None:
        self._events.fail("holders", f"{holder.worker.name} {what}", holder.worker.name)

    # --- frames from workers ------------------------------------------------------------------------------------------

    def arrived(self, worker: Worker, message: Any) -> None:
        holder = self._holders[worker]
        match message:
            case protocol.AdaptersCached():
                holder.has.update(message.hashes)
                for digest in message.hashes:
                    holder.moving.pop(digest, None)
                    holder.failed.pop(digest, None)
            case protocol.AdaptersEvicted():
                holder.has.difference_update(message.hashes)
                self._events.note("evicted", worker.name)
            case protocol.PullFailed():
                holder.moving.pop(message.hash, None)
                holder.failed.pop(message.hash, None)
            case protocol.SourcesRequest():
                source = self._answering.get(message.failed)
                if source is not None and source.offers(message.hash) and message.hash in holder.moving:
                    holder.failed[message.hash][message.failed] = source
                self._events.note("source failed", worker.name)
            case protocol.VersionStaged():
                self._staged[message.hash] = holder.place
                holder.moving.setdefault(message.hash, "")
            case protocol.HandedOver():
                holder.moving.setdefault(message.hash, "")


def _refs(message: protocol.Message) -> Iterator[protocol.AdapterRef]:
    """The artifacts that a message names for reading."""
    match message:
        case protocol.Generate(adapter=ref) if ref is not None:
            yield ref
        case protocol.SwitchAdapter():
            yield message.adapter
        case protocol.Replicate():
            yield from message.refs
        case protocol.ForwardBackward() | protocol.OptimStep():
            yield message.parent
            yield from getattr(message, "gradients", ())
