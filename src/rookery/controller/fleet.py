"""The workers that dialled in, and what is known of their health.

* A worker's frames count only under the epoch of its present connection.
* A lost link, a bad frame, missed beats or compute without progress make it *suspect*: everything it owes goes on
  elsewhere at once. If its process dials in again it gets a new epoch and keeps its adapters; after a grace period
  without it, it is *gone*, and forgotten after another one.
* Nobody waits on a worker: whoever gave it work is told by ``lost`` callbacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from rookery import wire
from rookery.controller.links import Link, LinkClosed
from rookery.controller.ports import Clock
from rookery.settings import Settings

log = logging.getLogger("rookery.controller.fleet")

State = Literal["serving", "suspect", "draining", "gone"]

HELLO_SECONDS = 30.0
"""A connection that has not said hello by then is closed: it is no worker."""


@dataclass(eq=False)
class Worker:
    """One worker process, across its connections."""

    hello: wire.Hello
    epoch: int
    link: Link
    state: State
    since: float
    last_beat: float
    beat: wire.Beat | None = None
    last_progress: float = 0.0
    unsent_most: int = 0
    """The most tokens that one of its flushes brought on this connection: what its death just before had cost."""
    outbox: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    """Frames on their way out: a worker that does not read delays nobody but itself."""
    named: set[str] = field(default_factory=set)
    """Hashes of artifacts that its work named: what it may ask a new ticket for."""
    held: set[str] = field(default_factory=set)
    """Requests that the process brought along from a controller before this one."""

    @property
    def name(self) -> str:
        return self.hello.name

    def plays(self, role: str, model: str) -> bool:
        return self.state == "serving" and role in self.hello.roles and self.hello.model == model


class Fleet:
    """Registers workers, delivers their frames, watches their health."""

    def __init__(self, settings: Settings, clock: Clock, token: str) -> None:
        self._settings = settings
        self._clock = clock
        self._token = token
        self._workers: dict[str, Worker] = {}
        self._epoch = int(clock.time() * 1000)
        self.ignored_frames = 0
        self.bad_frames = 0
        self.losses = 0
        self._handlers: dict[type, Callable[[Worker, Any], None]] = {}
        self._on_change: list[Callable[[], None]] = []
        self._on_lost: list[Callable[[Worker, str], None]] = []
        self._on_joined: list[Callable[[Worker], None]] = []
        self._on_beat: list[Callable[[Worker, wire.Beat], None]] = []

    # --- who listens ------------------------------------------------------------------------------------------------

    def handle(self, kind: type, handler: Callable[[Worker, Any], None]) -> None:
        """Frames of type ``kind`` go to ``handler(worker, message)``."""
        self._handlers[kind] = handler

    def on_change(self, callback: Callable[[], None]) -> None:
        """Called when a worker begins to serve or has room again."""
        self._on_change.append(callback)

    def on_lost(self, callback: Callable[[Worker, str], None]) -> None:
        """Called once per connection that ends or is given up, with the reason."""
        self._on_lost.append(callback)

    def on_joined(self, callback: Callable[[Worker], None]) -> None:
        """Called once per connection, when it has said hello."""
        self._on_joined.append(callback)

    def on_beat(self, callback: Callable[[Worker, wire.Beat], None]) -> None:
        """Called with every beat that counts."""
        self._on_beat.append(callback)

    def changed(self) -> None:
        for callback in self._on_change:
            callback()

    # --- who is there -----------------------------------------------------------------------------------------------

    def serving(self, role: str, model: str) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.plays(role, model)]

    def all(self) -> list[Worker]:
        return list(self._workers.values())

    def named(self, name: str) -> Worker | None:
        return self._workers.get(name)

    def missing(self, role: str, model: str) -> str:
        """Why no worker plays ``role`` on ``model`` now, naming who is stuck."""
        of_model = [worker for worker in self._workers.values() if worker.hello.model == model]
        others = [f"{worker.name} is {worker.state}" for worker in of_model]
        return f"no worker serves {model} for {role}" + (f" ({', '.join(others)})" if others else "")

    # --- a connection -----------------------------------------------------------------------------------------------

    async def serve(self, link: Link) -> None:
        """Speak with one worker until its connection is over."""
        worker = None
        writer = None
        try:
            worker = await self._greet(link)
            if worker is None:
                return
            writer = asyncio.create_task(self._write(link, worker.outbox))
            while True:
                self._deliver(worker, wire.decode(wire.from_worker, await link.receive()))
        except (LinkClosed, TimeoutError):
            pass
        except wire.BadFrame as error:
            self.bad_frames += 1
            name = worker.name if worker else "?"
            log.warning("worker %s sent a bad frame: %s", name, error, extra={"worker": name})
        finally:
            if worker is not None:
                self._lose(worker, "its connection closed")
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            await link.close("bye")

    @staticmethod
    async def _write(link: Link, outbox: asyncio.Queue[bytes]) -> None:
        with contextlib.suppress(LinkClosed):  # the reader of the same link hears of it and says so
            while True:
                await link.send(await outbox.get())

    async def _greet(self, link: Link) -> Worker | None:
        async with asyncio.timeout(HELLO_SECONDS):
            hello = wire.decode(wire.from_worker, await link.receive())
        reason = self._refusal(hello)
        if reason:
            await link.send(wire.encode(wire.Refused(reason=reason)))
            return None
        assert isinstance(hello, wire.Hello)
        name = hello.name
        known = self._workers.get(name)
        if known is not None and known.hello.instance != hello.instance and known.state in ("serving", "draining"):
            name = f"{name}-{hello.instance[:6]}"  # two processes chose one name: both may work
            hello.name = name
            known = self._workers.get(name)
        if known is not None and known.state in ("serving", "draining"):
            self._lose(known, "it connected anew")
        self._epoch += 1
        now = self._clock.monotonic()
        worker = Worker(hello, self._epoch, link, "serving", now, now, last_progress=now, held=set(hello.running))
        self._workers[name] = worker
        for told in self._on_joined:
            told(worker)
        self.post(
            worker,
            wire.Welcome(
                name=name,
                epoch=worker.epoch,
                heartbeat_seconds=self._settings.heartbeat_seconds,
                flush_seconds=self._settings.flush_seconds,
            ),
        )
        log.info("worker %s serves %s (%s)", name, hello.model, ", ".join(hello.roles), extra={"worker": name})
        self.changed()
        return worker

    def _refusal(self, hello: Any) -> str:
        if not isinstance(hello, wire.Hello):
            return "the first frame is a Hello"
        if hello.protocol != wire.PROTOCOL:
            return f"protocol {hello.protocol} is not spoken here ({wire.PROTOCOL} is): install the service's version"
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return "the worker token is wrong: it lies in the service's data folder, file worker.token"
        return ""

    def _deliver(self, worker: Worker, message: Any) -> None:
        if isinstance(message, wire.Hello) or message.epoch != worker.epoch or worker.state in ("suspect", "gone"):
            self.ignored_frames += 1
            return
        now = self._clock.monotonic()
        worker.last_beat = now
        if isinstance(message, wire.Beat):
            busy = message.active + message.waiting + message.training
            if worker.beat is None or message.progress != worker.beat.progress or not busy:
                worker.last_progress = now
            worker.beat = message
            for told in self._on_beat:
                told(worker, message)
        elif isinstance(message, wire.Bye):
            worker.state = "draining"
            worker.since = now
            self._tell_lost(worker, "it drains")
        else:
            self._handlers[type(message)](worker, message)

    @staticmethod
    def post(worker: Worker, message: wire.Message) -> None:
        """Send ``message`` when the link takes it. If it never does, the worker is lost and ``lost`` tells."""
        worker.outbox.put_nowait(wire.encode(message))

    # --- health -----------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Look after everybody's health, for ever."""
        while True:
            await self._clock.sleep(self._settings.heartbeat_seconds / 2)
            now = self._clock.monotonic()
            for worker in list(self._workers.values()):
                if worker.state in ("serving", "draining"):
                    if now - worker.last_beat > self._settings.suspect_seconds:
                        self._lose(worker, f"no beat for {now - worker.last_beat:.0f} s")
                        await worker.link.close("no heartbeat")
                    elif now - worker.last_progress > self._settings.stuck_seconds:
                        self._lose(worker, f"no compute progress for {now - worker.last_progress:.0f} s")
                        await worker.link.close("no compute progress")
                elif worker.state == "suspect" and now - worker.since > self._settings.grace_seconds:
                    worker.state = "gone"
                    worker.since = now
                    log.info("worker %s is gone", worker.name, extra={"worker": worker.name})
                elif worker.state == "gone" and now - worker.since > self._settings.grace_seconds:
                    del self._workers[worker.name]

    def _lose(self, worker: Worker, reason: str) -> None:
        if worker.state in ("suspect", "gone"):
            return
        drained = worker.state == "draining"
        worker.state = "gone" if drained else "suspect"
        worker.since = self._clock.monotonic()
        if not drained:
            self.losses += 1
            log.warning("worker %s is suspect: %s", worker.name, reason, extra={"worker": worker.name})
        self._tell_lost(worker, reason)

    def _tell_lost(self, worker: Worker, reason: str) -> None:
        for callback in self._on_lost:
            callback(worker, reason)
