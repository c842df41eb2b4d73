"""A worker's link to the service: dials in, speaks the wire protocol, dials in again.

Promises:

* Every frame carries the epoch of the connection that it is sent on.
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

from rookery import wire
from rookery.settings import Settings
from rookery.worker.compute import Compute, Core
from rookery.worker.operations import Operations
from rookery.worker.requests import Requests
from rookery.worker.transfer import TransferFailed, Transfers, is_loopback

log = logging.getLogger("rookery.worker.link")

FIRST_PAUSE_SECONDS = 0.2
"""Before dialling in again; doubles up to …"""
LONGEST_PAUSE_SECONDS = 5.0
"""… this, so that a restarted service has its workers back soon."""
OPEN_SECONDS = 10.0
"""How long a connection may take to open and to be welcomed."""


class Refusal(Exception):
    """The service does not want this worker as it is."""


@dataclass(frozen=True)
class Options:
    """What the command line says. ``base`` is the service's HTTP address."""

    base: str
    token: str
    model: str
    model_hash: str
    roles: list[Literal["rollout", "train"]]
    kind: Literal["reserved", "preemptible"]
    name: str


@dataclass(frozen=True)
class Session:
    """One connection, from its ``Welcome`` on."""

    socket: ClientConnection
    welcome: wire.Welcome

    async def send(self, message: wire.Message) -> None:
        """Raises ``websockets.ConnectionClosed``."""
        await self.socket.send(wire.encode(message))


class Link:
    """Belongs to the I/O thread."""

    def __init__(self, options: Options, settings: Settings, compute: Compute) -> None:
        self._options = options
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
        self._transfers = Transfers(
            options.base,
            settings.cache / "adapters",
            settings.adapter_cache_bytes,
            self._want,
            timeout_seconds=settings.transfer_seconds,
        )
        self._requests = Requests(compute, self._transfers, self._has_output)
        self._operations = Operations(compute, self._transfers, self._answer)

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
            await self._operations.settle(self._settings.drain_seconds)
        if self._session is not None:
            with contextlib.suppress(websockets.ConnectionClosed):
                await self._session.send(wire.Bye(epoch=self._session.welcome.epoch))
                await self._session.socket.close()

    async def close(self) -> None:
        await self._transfers.close()

    # --- the link ---------------------------------------------------------------------------------------------------

    async def serve(self, core: Core) -> None:
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
                    ping_interval=self._settings.heartbeat_seconds,
                    ping_timeout=self._settings.suspect_seconds,
                ) as connection:
                    await self._converse(connection, self._hello(core))
                log.info("the service ended the link")
            except (OSError, TimeoutError, websockets.WebSocketException, wire.BadFrame) as error:
                log.warning("no link to %s: %s", target, " ".join(str(error).split()) or type(error).__name__)
            await asyncio.sleep(self._pause * random.uniform(0.5, 1.0))
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)

    async def _converse(self, connection: ClientConnection, hello: wire.Hello) -> None:
        """One connection, from hello to its end."""
        await connection.send(wire.encode(hello))
        async with asyncio.timeout(OPEN_SECONDS):
            welcome = wire.decode(wire.to_worker, _binary(await connection.recv()))
        if isinstance(welcome, wire.Refused):
            raise Refusal(f"the service refuses this worker: {welcome.reason}")
        if not isinstance(welcome, wire.Welcome):
            raise wire.BadFrame(f"{type(welcome).__name__} came before Welcome")
        self._session = session = Session(connection, welcome)
        self._name = welcome.name
        log.info("serving %s as %s, epoch %d", self._options.model, welcome.name, welcome.epoch)
        self._pause = FIRST_PAUSE_SECONDS
        work = (self._receive(session), self._beat(session), self._send_output(session))
        tasks = [asyncio.create_task(part) for part in work]
        claims = asyncio.get_running_loop().call_later(self._settings.claim_seconds, self._requests.release)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._session = None
            claims.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for future in self._granted.values():
                future.set_exception(TransferFailed("the link was lost while a new ticket was asked for"))
            self._granted.clear()
            self._unlinked = time.monotonic()
            self._requests.unclaim(self._unlinked)
            self._operations.drop()

    def _hello(self, core: Core) -> wire.Hello:
        return wire.Hello(
            protocol=wire.PROTOCOL,
            token=self._options.token,
            name=self._name,
            instance=self._instance,
            model=self._options.model,
            model_hash=self._options.model_hash,
            roles=self._options.roles,
            kind=self._options.kind,
            max_rows=self._settings.max_rows,
            max_context=core.decoder.config.context,
            max_rank=self._settings.max_rank,
            device=str(core.decoder.device),
            dtype=str(core.decoder.dtype).removeprefix("torch."),
            pid=os.getpid(),
            host=socket.gethostname(),
            adapters=sorted({*self._compute.status.adapters, *self._transfers.here()}),
            running=self._requests.running(),
        )

    async def _receive(self, session: Session) -> None:
        """Handle frames until the connection ends."""
        async for frame in session.socket:
            self._handle(wire.decode(wire.to_worker, _binary(frame)))

    def _handle(self, message: wire.ToWorker) -> None:
        match message:
            case wire.Generate():
                self._requests.generate(message)
            case wire.Abort():
                self._requests.abort(message.request)
            case wire.Switch():
                self._requests.switch(message)
            case wire.Granted():
                self._transfers.granted(message.hash, message.ticket)
                if (waiting := self._granted.pop(message.hash, None)) is not None and not waiting.done():
                    waiting.set_result(message.ticket)
            case wire.ForwardBackward() | wire.OptimStep() | wire.Committed():
                self._operations.accept(message)
            case wire.InitAdapter():
                self._operations.initialise(message)
            case wire.Cancel():
                self._operations.cancel(message.op)
            case wire.Forget():
                for digest in message.hashes:
                    self._transfers.forget(digest)
                self._compute.call(lambda core: core.forget(*message.hashes))
                if message.policy:
                    self._operations.forget(message.policy)
            case wire.Refused():
                raise Refusal(f"the service refuses this worker: {message.reason}")
            case wire.Welcome():
                raise wire.BadFrame("a second Welcome")

    # --- outgoing ---------------------------------------------------------------------------------------------------

    def _has_output(self, urgent: bool) -> None:
        self._output.set()
        if urgent:
            self._urgent.set()

    async def _send_output(self, session: Session) -> None:
        """Send tokens no later than the flush interval after they were sampled, and at once when a request ended."""
        while True:
            await self._output.wait()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), session.welcome.flush_seconds)
            await self._flush()

    async def _flush(self) -> None:
        self._output.clear()
        self._urgent.clear()
        if self._session is not None and (chunks := self._requests.take(time.monotonic())):
            with contextlib.suppress(websockets.ConnectionClosed):  # they stay held for who claims them
                await self._session.send(wire.Output(epoch=self._session.welcome.epoch, chunks=chunks))

    async def _beat(self, session: Session) -> None:
        process = psutil.Process()
        while True:
            status = self._compute.status
            await session.send(
                wire.Beat(
                    epoch=session.welcome.epoch,
                    progress=status.progress,
                    active=status.active,
                    waiting=status.waiting + self._requests.waiting(),
                    training=status.training,
                    adapters=len(status.adapters),
                    generated=status.generated,
                    trained=status.trained,
                    decode_seconds=status.decode_seconds,
                    train_seconds=status.train_seconds,
                    memory_bytes=process.memory_info().rss,
                )
            )
            await asyncio.sleep(session.welcome.heartbeat_seconds)

    async def _answer(self, op: str, **fields: Any) -> None:
        if self._session is not None:
            with contextlib.suppress(websockets.ConnectionClosed):  # the controller sends anew what it still wants
                await self._session.send(wire.Done(epoch=self._session.welcome.epoch, op=op, **fields))

    async def _want(self, digest: str) -> str:
        """A new ticket for an artifact."""
        if self._session is None:
            raise TransferFailed(f"artifact {digest[:12]}: the ticket is over and there is no link to ask for another")
        waiting = self._granted.setdefault(digest, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(self._settings.transfer_seconds):
                await self._session.send(wire.Want(epoch=self._session.welcome.epoch, hash=digest))
                return await asyncio.shield(waiting)
        except (TimeoutError, websockets.ConnectionClosed):
            self._granted.pop(digest, None)
            raise TransferFailed(f"artifact {digest[:12]}: no new ticket came") from None

    async def housekeeping(self) -> None:
        """Let go, after the grace period, of what nobody claims."""
        while True:
            await asyncio.sleep(self._settings.grace_seconds / 2)
            before = time.monotonic() - self._settings.grace_seconds
            self._requests.expire(before)
            if self._session is None and self._unlinked < before:
                self._operations.forget_all()


def _binary(frame: bytes | str) -> bytes:
    if isinstance(frame, str):
        raise wire.BadFrame("a text frame")
    return frame
