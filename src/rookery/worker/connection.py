"""A worker's link to the service: dials in, speaks the wire protocol, dials in again.

Promises:

* It dials in at once, and beats while the base model is still on its way; when that is there it says so.
* Every frame carries the epoch of the connection that it is sent on.
* The controller is told of every adapter that comes to lie in the cache, and of those that could not be had.
* Sampled tokens leave at most one flush interval later, and at once when their request has ended.
* A connection that ends loses nothing: requests stay held for who claims them, training operations are dropped (their
  sender sends anew what it still wants), what the trainer holds stays. After the grace period it is let go.
* Frames are handled in the order in which they arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import time
import uuid
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import psutil
import websockets
from websockets.asyncio.client import ClientConnection, connect

from rookery import protocol
from rookery.aio import wait_event
from rookery.settings import Settings
from rookery.worker.compute import Compute, ComputeStatus, WorkerCore
from rookery.worker.generation import GenerationManager
from rookery.worker.training_ops import TrainingOps
from rookery.worker.transfer.cache import ADAPTERS, CacheEvents
from rookery.worker.transfer.client import TransferClient
from rookery.worker.transfer.http import TransferFailed, is_loopback
from rookery.worker.transfer.peers import PeerServer
from rookery.worker.transfer.prefetch import Prefetcher

log = logging.getLogger("rookery.worker.connection")

FIRST_PAUSE_SECONDS = 0.2
"""Before dialling in again; doubles up to …"""
LONGEST_PAUSE_SECONDS = 5.0
"""… this, so that a restarted service has its workers back soon."""
OPEN_SECONDS = 10.0
"""How long a connection may take to open and to be welcomed."""
STEADY_SECONDS = 2.0
"""A connection that lasted this long was a good one: the next pause is the first again. A shorter one was ended by the
service for a reason that may still be there, such as a disk here that is full."""


class RegistrationRefused(Exception):
    """The service does not want this worker as it is."""


@dataclass(frozen=True)
class WorkerOptions:
    """What the command line says. ``base`` is the service's HTTP address."""

    base: str
    token: str
    model: str
    roles: list[Literal["rollout", "train"]]
    kind: Literal["reserved", "preemptible"]
    name: str
    price: float = 0.0
    address: str = ""
    """Where other workers may pull adapters from this one; empty where they may not."""


@dataclass(frozen=True)
class Session:
    """One connection, from its ``Welcome`` on."""

    socket: ClientConnection
    welcome: protocol.Welcome

    async def send(self, message: protocol.Message) -> None:
        """Raises ``websockets.ConnectionClosed``."""
        await self.socket.send(protocol.encode(message))


class ServiceConnection:
    """Belongs to the I/O thread."""

    def __init__(self, options: WorkerOptions, settings: Settings, compute: Compute, lender: PeerServer | None) -> None:
        """``lender`` hands out what the controller says, where this worker offers an address."""
        self._options = options
        self._lender = lender
        self._core: WorkerCore | None = None
        self._model_hash = ""
        self._loaded = asyncio.Event()
        self._news = CacheEvents()
        self._settings = settings
        self._compute = compute
        self._name = options.name
        self._instance = uuid.uuid4().hex
        self._session: Session | None = None
        self._pause = FIRST_PAUSE_SECONDS
        self._unlinked = time.monotonic()
        """When the last connection ended."""
        self._output = asyncio.Event()
        self._urgent = asyncio.Event()
        self._granted: dict[str, asyncio.Future[str]] = {}
        self._transfers = TransferClient(
            options.base,
            settings.cache / ADAPTERS,
            settings.worker.adapter_cache_bytes,
            self._want,
            self._news,
            timeout_seconds=settings.worker.transfer_seconds,
            peer_seconds=settings.worker.peer_seconds,
        )
        self._ahead = Prefetcher(self._transfers)
        self._requests = GenerationManager(compute, self._transfers, self._has_output)
        self._operations = TrainingOps(compute, self._transfers, self._answer)

    def loaded(self, core: WorkerCore, model_hash: str) -> None:
        """The base model is there."""
        self._core, self._model_hash = core, model_hash
        self._loaded.set()

    def collect(self) -> None:
        """Take what computing brought forth."""
        chunks, finished = self._compute.take()
        self._requests.collect(chunks)
        self._operations.collect(finished)

    async def finish(self) -> None:
        """Computing is over: send what there is to send, and say goodbye."""
        self.collect()
        if self._session is not None:
            await self._flush()
            await self._operations.settle(self._settings.worker.drain_seconds)
        if self._session is not None:
            with contextlib.suppress(websockets.ConnectionClosed):
                await self._session.send(protocol.Draining(epoch=self._session.welcome.epoch))
                await self._session.socket.close()

    async def close(self) -> None:
        await self._transfers.close()

    # --- the link ---------------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Dial in, again and again. Raises :class:`Refusal`."""
        url = urlsplit(self._options.base)
        target = urlunsplit(("wss" if url.scheme == "https" else "ws", url.netloc, f"{url.path}/wire/worker", "", ""))
        while True:
            try:
                async with connect(
                    target,
                    max_size=None,
                    compression=None,
                    open_timeout=OPEN_SECONDS,
                    proxy=None if is_loopback(self._options.base) else True,
                    ping_interval=self._settings.worker.heartbeat_seconds,
                    ping_timeout=self._settings.worker.suspect_seconds,
                ) as connection:
                    await self._converse(connection)
                log.info("the service ended the link")
            except (OSError, TimeoutError, websockets.WebSocketException, protocol.BadFrame) as error:
                log.warning("no link to %s: %s", target, " ".join(str(error).split()) or type(error).__name__)
            await asyncio.sleep(self._pause * random.uniform(0.5, 1.0))
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)

    async def _converse(self, connection: ClientConnection) -> None:
        """One connection, from hello to its end."""
        hello = self._hello()
        self._news.reset(hello.adapters)
        await connection.send(protocol.encode(hello))
        async with asyncio.timeout(OPEN_SECONDS):
            welcome = protocol.decode(protocol.to_worker, _binary(await connection.recv()))
        if isinstance(welcome, protocol.HelloRejected):
            raise RegistrationRefused(f"the service refuses this worker: {welcome.reason}")
        if not isinstance(welcome, protocol.Welcome):
            raise protocol.BadFrame(f"{type(welcome).__name__} came before Welcome")
        self._session = session = Session(connection, welcome)
        self._name = welcome.name
        began = time.monotonic()
        log.info("linked as %s, epoch %d", welcome.name, welcome.epoch)
        work = (self._receive(session), self._beat(session), self._send_output(session), self._tell(session, hello))
        tasks = [asyncio.create_task(part) for part in work]
        claims = asyncio.get_running_loop().call_later(self._settings.worker.resume_seconds, self._requests.release)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._session = None
            claims.cancel()
            if time.monotonic() - began > STEADY_SECONDS:
                self._pause = FIRST_PAUSE_SECONDS
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for future in self._granted.values():
                future.set_exception(TransferFailed("the link was lost while a new ticket was asked for"))
            self._granted.clear()
            self._unlinked = time.monotonic()
            self._requests.unclaim(self._unlinked)
            self._operations.drop()
            self._ahead.clear()

    def _hello(self) -> protocol.Hello:
        core = self._core
        return protocol.Hello(
            protocol=protocol.PROTOCOL,
            token=self._options.token,
            name=self._name,
            instance=self._instance,
            model=self._options.model,
            model_hash=self._model_hash,
            roles=self._options.roles,
            kind=self._options.kind,
            price=self._options.price,
            address=self._options.address,
            loading=core is None,
            max_rows=self._settings.engine.max_rows,
            max_context=core.decoder.config.context if core is not None else 0,
            max_rank=self._settings.engine.max_rank,
            device=_device(core),
            dtype=_dtype(core),
            pid=os.getpid(),
            host=socket.gethostname(),
            adapters=sorted({*self._compute.status.adapters, *self._transfers.cached()}),
            running=self._requests.running(),
        )

    async def _receive(self, session: Session) -> None:
        """Handle frames until the connection ends."""
        async for frame in session.socket:
            self._handle(protocol.decode(protocol.to_worker, _binary(frame)))

    def _handle(self, message: protocol.ToWorker) -> None:
        match message:
            case protocol.Generate():
                self._requests.generate(message)
            case protocol.Abort():
                self._requests.abort(message.request)
            case protocol.SwitchAdapter():
                self._requests.switch(message)
            case protocol.TicketGrant():
                self._transfers.set_ticket(message.hash, message.ticket, message.peers)
                if (waiting := self._granted.pop(message.hash, None)) is not None and not waiting.done():
                    waiting.set_result(message.ticket)
            case protocol.PrefetchAdapters():
                self._news.report_again(ref.hash for ref in message.refs)
                self._ahead.prefetch(message.refs)
            case protocol.ServeArtifact():
                if self._lender is not None:
                    self._lender.serve(message.hash, message.ticket, message.seconds)
            case protocol.ForwardBackward() | protocol.OptimStep() | protocol.VersionCommitted():
                self._operations.accept(message)
            case protocol.InitAdapter():
                self._operations.initialise(message)
            case protocol.CancelOperation():
                self._operations.cancel(message.op)
            case protocol.EvictArtifacts():
                for digest in message.hashes:
                    self._forget(digest)
                self._compute.call(lambda core: core.forget(*message.hashes))
                if message.policy:
                    self._operations.forget(message.policy, aside=message.offload)
            case protocol.HelloRejected():
                raise RegistrationRefused(f"the service refuses this worker: {message.reason}")
            case protocol.Welcome():
                raise protocol.BadFrame("a second Welcome")

    def _forget(self, digest: str) -> None:
        self._ahead.discard(digest)
        self._transfers.evict(digest)
        if self._lender is not None:
            self._lender.revoke(digest)

    # --- outgoing ---------------------------------------------------------------------------------------------------

    def _has_output(self, urgent: bool) -> None:
        self._output.set()
        if urgent:
            self._urgent.set()

    async def _send_output(self, session: Session) -> None:
        """Send tokens no later than the flush interval after they were sampled, and at once when a request ended."""
        while True:
            await self._output.wait()
            await wait_event(self._urgent, session.welcome.flush_seconds)
            await self._flush()

    async def _flush(self) -> None:
        self._output.clear()
        self._urgent.clear()
        if self._session is not None and (chunks := self._requests.take(time.monotonic())):
            with contextlib.suppress(websockets.ConnectionClosed):  # they stay held for who claims them
                await self._session.send(protocol.Output(epoch=self._session.welcome.epoch, chunks=chunks))

    async def _tell(self, session: Session, hello: protocol.Hello) -> None:
        """Say when the base model is there, and which adapters have come to lie here or could not be had."""
        if hello.loading:
            await self._loaded.wait()
            assert self._core is not None
            log.info("serving %s", self._options.model)
            await session.send(
                protocol.Ready(
                    epoch=session.welcome.epoch,
                    model_hash=self._model_hash,
                    max_context=self._core.decoder.config.context,
                    device=_device(self._core),
                    dtype=_dtype(self._core),
                )
            )
        while True:
            await self._news.pending.wait()
            await self._send_news(session)

    async def _send_news(self, session: Session) -> None:
        for message in self._news.take(session.welcome.epoch):
            await session.send(message)

    async def _beat(self, session: Session) -> None:
        process = psutil.Process()
        while True:
            status = self._compute.status
            await session.send(
                protocol.Heartbeat(
                    epoch=session.welcome.epoch,
                    progress=progress(status, self._transfers.bytes_from_service + self._transfers.bytes_from_peers),
                    active=status.active,
                    waiting=status.waiting + self._requests.waiting(),
                    training=status.training,
                    adapters=len(status.adapters),
                    generated=status.generated,
                    trained=status.trained,
                    decode_seconds=status.decode_seconds,
                    train_seconds=status.train_seconds,
                    memory_bytes=process.memory_info().rss,
                    pulled_from_peers=self._transfers.bytes_from_peers,
                    pulled_from_service=self._transfers.bytes_from_service,
                )
            )
            await asyncio.sleep(session.welcome.heartbeat_seconds)

    async def _answer(self, op: str, **fields: Any) -> None:
        if self._session is not None:
            with contextlib.suppress(websockets.ConnectionClosed):  # the controller sends anew what it still wants
                await self._send_news(self._session)  # what it publishes now is known to be here
                await self._session.send(protocol.OperationDone(epoch=self._session.welcome.epoch, op=op, **fields))

    async def _want(self, digest: str) -> str:
        """A new ticket for an artifact."""
        if self._session is None:
            raise TransferFailed(f"artifact {digest[:12]}: the ticket is over and there is no link to ask for another")
        waiting = self._granted.setdefault(digest, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(self._settings.worker.transfer_seconds):
                await self._session.send(protocol.TicketRequest(epoch=self._session.welcome.epoch, hash=digest))
                return await asyncio.shield(waiting)
        except (TimeoutError, websockets.ConnectionClosed):
            self._granted.pop(digest, None)
            raise TransferFailed(f"artifact {digest[:12]}: no new ticket came") from None

    async def housekeeping(self) -> None:
        """Let go, after the grace period, of what nobody claims."""
        while True:
            await asyncio.sleep(self._settings.worker.rejoin_seconds / 2)
            before = time.monotonic() - self._settings.worker.rejoin_seconds
            self._requests.expire(before)
            if self._session is None and self._unlinked < before:
                self._operations.forget_all()


def _device(core: WorkerCore | None) -> str:
    return str(core.decoder.device) if core is not None else ""


def _dtype(core: WorkerCore | None) -> str:
    return str(core.decoder.dtype).removeprefix("torch.") if core is not None else ""


def _binary(frame: bytes | str) -> bytes:
    if isinstance(frame, str):
        raise protocol.BadFrame("a text frame")
    return frame


def progress(status: ComputeStatus, pulled: int) -> int:
    """What a beat tells: slices, and the bytes ``pulled`` where nothing computes. Who only waits for adapters gets on
    with their bytes; a slice that hangs must not look alive because of them."""
    computes = status.active + status.waiting + status.training
    return status.progress if computes else status.progress + pulled
