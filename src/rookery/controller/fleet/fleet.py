"""The workers that dialled in, and what is known of their health.

* A worker's frames count only under the epoch of its present connection.
* It is *joining* until its base model is loaded, then *catching up* while it pulls the versions that jobs sample from,
  then *serving*. While it catches up it may be given what it can begin at once (:meth:`Worker.takes`).
* A lost link, a bad frame, missed beats, compute without progress, a frame that it does not read or an adapter that it
  alone cannot pull make it *suspect*: everything it owes goes on elsewhere at once. If its process dials in again it
  gets a new epoch and keeps its adapters; after a grace period without it, it is *gone*, and forgotten after another
  one. A worker that says goodbye is *draining* until its link ends.
* Nobody waits on a worker: whoever gave it work is told by ``lost`` callbacks, and frames for one that does not read
  wait in its own outbox, for no longer than missed beats would be waited for.
* What a frame costs does not grow with the number of workers; a worker that comes or goes costs a look at the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from rookery import protocol
from rookery.aio import Clock
from rookery.controller.fleet.worker import LINKED, State
from rookery.controller.fleet.worker import Worker as Worker
from rookery.controller.weights.distribution import AdapterResidency
from rookery.controller.weights.peers import PeerDirectory
from rookery.controller.weights.tickets import Tickets
from rookery.protocol.connection import Connection, ConnectionClosed
from rookery.settings import Settings

log = logging.getLogger("rookery.controller.fleet.fleet")

HELLO_SECONDS = 30.0
"""A connection that has not said hello by then is closed: it is no worker."""


class Fleet:
    """Registers workers, delivers their frames, watches their health."""

    def __init__(self, settings: Settings, clock: Clock, token: str, tickets: Tickets) -> None:
        self._settings = settings
        self._clock = clock
        self._token = token
        self._workers: dict[str, Worker] = {}
        self._able: dict[tuple[str, str], list[Worker]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._epoch = int(clock.time() * 1000)
        self.lending = PeerDirectory(tickets, clock, settings.server.ticket_seconds)
        self._holdings = AdapterResidency(self.lending, clock)
        self.in_use: Callable[[str], Sequence[protocol.AdapterRef]] = lambda model: ()
        """The versions that running jobs of a base model sample from now; set by who knows."""
        self.ignored_frames = 0
        self.bad_frames = 0
        self.losses = 0
        self.failed_pulls = 0
        """Artifacts that a worker was to have and could not."""
        self._handlers: dict[type, Callable[[Worker, Any], None]] = {}
        self._on_change: list[Callable[[], None]] = []
        self._on_joined: list[Callable[[Worker], None]] = []
        self._on_state: list[Callable[[Worker], None]] = []
        self._on_beat: list[Callable[[Worker, protocol.Heartbeat], None]] = []
        self._on_lost: list[Callable[[Worker, str], None]] = []

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

    def on_state(self, callback: Callable[[Worker], None]) -> None:
        """Called when a worker's state has changed, or what it :meth:`takes <Worker.takes>`."""
        self._on_state.append(callback)

    def on_beat(self, callback: Callable[[Worker, protocol.Heartbeat], None]) -> None:
        """Called with every beat that counts."""
        self._on_beat.append(callback)

    def changed(self) -> None:
        for callback in self._on_change:
            callback()

    # --- who is there -----------------------------------------------------------------------------------------------

    def serving(self, role: str, model: str) -> Sequence[Worker]:
        """Who :meth:`plays <Worker.plays>` the role now. The list stays as it is when that changes."""
        return self._able.get((role, model), [])

    def trainers(self, model: str) -> Sequence[Worker]:
        """Who is given policies to train now: of those that may be, the ones that stay, where there are any."""
        able = self.serving("train", model)
        return [worker for worker in able if worker.hello.kind == "reserved"] or able

    def all(self) -> list[Worker]:
        return list(self._workers.values())

    def named(self, name: str) -> Worker | None:
        return self._workers.get(name)

    def expects(self, role: str, model: str) -> bool:
        """Whether one plays the role, or is about to: it loads the model, or may dial in again."""
        there = (worker for worker in self._workers.values() if worker.state not in ("draining", "gone"))
        return any(role in worker.hello.roles and worker.hello.model == model for worker in there)

    def missing(self, role: str, model: str) -> str:
        """Why no worker plays ``role`` on ``model`` now, naming who is stuck."""
        of_model = [worker for worker in self._workers.values() if worker.hello.model == model]
        others = [f"{worker.name} is {worker.state}" for worker in of_model]
        return f"no worker serves {model} for {role}" + (f" ({', '.join(others)})" if others else "")

    # --- what they hold ---------------------------------------------------------------------------------------------

    def adapter_ref(self, worker: Worker, ref: protocol.AdapterRef) -> protocol.AdapterRef:
        """``ref`` as ``worker`` may read it: with a ticket, and with peers that were told to lend it."""
        return self.lending.adapter_ref(worker, ref)

    def announce(self, model: str, ref: protocol.AdapterRef) -> None:
        """``ref`` is published: whoever generates with ``model`` pulls it ahead of need. Returns at once; nobody is
        waited for."""
        for worker in self.serving("rollout", model):
            if ref.hash not in worker.cached:
                self._holdings.prefetch(worker, [ref])
                self._settle(worker)

    def evict(self, hashes: Sequence[str]) -> None:
        """No work will name these artifacts again."""
        workers = [worker for worker in self._workers.values() if worker.state == "joining" or worker.working]
        self._holdings.evict(workers, hashes)
        for worker in workers:
            self._settle(worker)

    def clear_missing(self, worker: Worker, digest: str) -> None:
        """It need not have this artifact after all."""
        self._holdings.clear_missing(worker, digest)
        self._settle(worker)

    def _ready(self, worker: Worker) -> None:
        """Its base model is loaded."""
        self.lending.holds(worker, worker.cached)
        lacks = []
        if "rollout" in worker.hello.roles:
            lacks = [ref for ref in self.in_use(worker.hello.model) if ref.hash not in worker.cached]
        if lacks:
            worker.lagging = {ref.hash for ref in lacks}
            self._become(worker, "catching up")
            log.info("worker %s pulls %d versions in use", worker.name, len(lacks), extra={"worker": worker.name})
            self._holdings.prefetch(worker, lacks)
        else:
            self._serves(worker)

    def _settle(self, worker: Worker) -> None:
        """What it was asked for or has is not what it was."""
        if worker.state == "catching up" and not worker.lagging:
            self._serves(worker)
        elif worker.working:
            self._tell_state(worker)

    def _serves(self, worker: Worker) -> None:
        self._become(worker, "serving")
        roles = ", ".join(worker.hello.roles)
        log.info("worker %s serves %s (%s)", worker.name, worker.hello.model, roles, extra={"worker": worker.name})
        self.changed()

    def _become(self, worker: Worker, state: State) -> None:
        worker.state = state
        worker.since = self._clock.monotonic()
        for role in worker.hello.roles:
            key = (role, worker.hello.model)
            others = [other for other in self._able.get(key, ()) if other is not worker]
            self._able[key] = [*others, worker] if worker.has_role(*key) else others
        if not worker.working:
            self.lending.remove_worker(worker)
        self._tell_state(worker)

    def _tell_state(self, worker: Worker) -> None:
        for told in self._on_state:
            told(worker)

    # --- a connection -----------------------------------------------------------------------------------------------

    async def serve(self, link: Connection) -> None:
        """Speak with one worker until its connection is over."""
        worker = None
        writer = None
        try:
            worker = await self._greet(link)
            if worker is None:
                return
            writer = asyncio.create_task(self._write(worker))
            while True:
                self._deliver(worker, protocol.decode(protocol.from_worker, await link.receive()))
        except (ConnectionClosed, TimeoutError):
            pass
        except protocol.BadFrame as error:
            self.bad_frames += 1
            name = worker.name if worker else "?"
            log.warning("worker %s sent a bad frame: %s", name, error, extra={"worker": name})
        finally:
            if worker is not None:
                self._disconnect(worker, "its connection closed")
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            await link.close("bye")

    async def _write(self, worker: Worker) -> None:
        with contextlib.suppress(ConnectionClosed):  # the reader of the same link hears of it and says so
            while True:
                frame = await worker.outbox.get()
                worker.sending = self._clock.monotonic()
                await worker.connection.send(frame)
                worker.sending = None

    async def _greet(self, link: Connection) -> Worker | None:
        async with asyncio.timeout(HELLO_SECONDS):
            hello = protocol.decode(protocol.from_worker, await link.receive())
        reason = self._refusal(hello)
        if reason:
            await link.send(protocol.encode(protocol.HelloRejected(reason=reason)))
            return None
        assert isinstance(hello, protocol.Hello)
        name = hello.name
        known = self._workers.get(name)
        if known is not None and known.hello.instance != hello.instance and known.state in LINKED:
            name = f"{name}-{hello.instance[:6]}"  # two processes chose one name: both may work
            hello.name = name
            known = self._workers.get(name)
        if known is not None and known.state in LINKED:
            self._disconnect(known, "it connected anew")
        self._epoch += 1
        now = self._clock.monotonic()
        worker = Worker(
            hello,
            self._epoch,
            link,
            "joining",
            now,
            now,
            last_progress=now,
            active_requests=set(hello.running),
            cached=set(hello.adapters),
        )
        self._workers[name] = worker
        for told in self._on_joined:
            told(worker)
        worker.post(
            protocol.Welcome(
                name=name,
                epoch=worker.epoch,
                heartbeat_seconds=self._settings.worker.heartbeat_seconds,
                flush_seconds=self._settings.worker.flush_seconds,
            )
        )
        if hello.loading:
            log.info("worker %s loads %s", name, hello.model, extra={"worker": name})
        else:
            self._ready(worker)
        return worker

    def _refusal(self, hello: Any) -> str:
        if not isinstance(hello, protocol.Hello):
            return "the first frame is a Hello"
        if hello.protocol != protocol.PROTOCOL:
            return (
                f"protocol {hello.protocol} is not spoken here ({protocol.PROTOCOL} is): install the service's version"
            )
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return "the worker token is wrong: it lies in the service's data folder, file worker.token"
        if not 0 <= hello.price < math.inf:
            return f"a price of {hello.price} an hour is none: give 0 or more"
        return ""

    def _deliver(self, worker: Worker, message: Any) -> None:
        if isinstance(message, protocol.Hello) or message.epoch != worker.epoch or worker.state in ("suspect", "gone"):
            self.ignored_frames += 1
            return
        now = self._clock.monotonic()
        worker.last_beat = now
        match message:
            case protocol.Heartbeat():
                busy = message.active + message.waiting + message.training
                if worker.beat is None or message.progress != worker.beat.progress or not busy:
                    worker.last_progress = now
                worker.beat = message
                worker.generated.append((now, message.generated))
                for told in self._on_beat:
                    told(worker, message)
            case protocol.Ready() if worker.state == "joining":
                hello = worker.hello
                hello.model_hash, hello.max_context = message.model_hash, message.max_context
                hello.device, hello.dtype = message.device, message.dtype
                self._ready(worker)
            case protocol.Ready():
                raise protocol.BadFrame("Ready came twice")
            case protocol.AdaptersCached():
                self._holdings.on_cached(worker, message.hashes)
                self._settle(worker)
            case protocol.TicketRequest():
                if message.hash in worker.named:  # a hash is no authority: only what this worker was given to do
                    worker.post(self.lending.grant(worker, message.hash))
            case protocol.Draining():
                self._become(worker, "draining")
                self._tell_lost(worker, "it drains")
            case _:
                self._handlers[type(message)](worker, message)

    # --- health -----------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Look after everybody's health, for ever."""
        while True:
            await self._clock.sleep(self._settings.worker.heartbeat_seconds / 2)
            now = self._clock.monotonic()
            for worker in list(self._workers.values()):
                if worker.state in LINKED:
                    if reason := self._health_problem(worker, now):
                        self.suspect(worker, reason)
                elif worker.state == "suspect" and now - worker.since > self._settings.worker.rejoin_seconds:
                    self._become(worker, "gone")
                    log.info("worker %s is gone", worker.name, extra={"worker": worker.name})
                elif worker.state == "gone" and now - worker.since > self._settings.worker.rejoin_seconds:
                    del self._workers[worker.name]

    def _health_problem(self, worker: Worker, now: float) -> str:
        """What is wrong with it, if anything."""
        patience = self._settings.worker.suspect_seconds
        if now - worker.last_beat > patience:
            return f"no beat for {now - worker.last_beat:.0f} s"
        if worker.sending is not None and now - worker.sending > patience:
            return f"it has not read a frame for {now - worker.sending:.0f} s"
        if now - worker.last_progress > self._settings.worker.stuck_seconds:
            return f"no compute progress for {now - worker.last_progress:.0f} s"
        return ""

    def suspect(self, worker: Worker, reason: str) -> None:
        """Give this connection up: what the worker owes goes on elsewhere, and it shall dial in anew."""
        self._disconnect(worker, reason)
        closing = asyncio.create_task(worker.connection.close(reason))  # a link that hangs may hang in closing too
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _disconnect(self, worker: Worker, reason: str) -> None:
        if worker.state in ("suspect", "gone"):
            return
        drained = worker.state == "draining"
        self._become(worker, "gone" if drained else "suspect")
        if not drained:
            self.losses += 1
            log.warning("worker %s is suspect: %s", worker.name, reason, extra={"worker": worker.name})
        self._tell_lost(worker, reason)

    def _tell_lost(self, worker: Worker, reason: str) -> None:
        for callback in self._on_lost:
            callback(worker, reason)
