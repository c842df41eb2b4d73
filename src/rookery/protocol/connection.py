"""Connections between the service and the processes that dial it, workers and environment hosts.

Both ends see a :class:`Connection`: whole binary frames in order, until it is closed.

* The service runs :func:`serve_peer` per connection: hello, registration, messages in order, end. Its outgoing messages
  wait in the :class:`Outbox` of that connection, so a peer that does not read delays only itself. Where a peer serves
  several tenants, one with a thousand messages delays another one by a single message.
* A worker or host runs :func:`stay_connected`: dial with its key, hello, welcome, converse, dial again with backoff. A
  :class:`Channel` sends its heartbeats and handles the service's messages.
* A frame that does not decode, or that is larger than :data:`~rookery.protocol.MAX_FRAME`, ends the connection. A
  process that dials refuses to send a larger one, by the name of its message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import websockets
from msgspec.msgpack import Decoder
from websockets.asyncio.client import ClientConnection, connect

from rookery.aio import cancel_all, first_of
from rookery.clock import Clock
from rookery.network import client_tls, proxy_of, service_url
from rookery.protocol import MAX_FRAME, BadFrame, decode, encode, frame_of
from rookery.protocol.common import PROTOCOL, EpochMessage, HelloRejected, Message
from rookery.protocol.envhost import HostWelcome
from rookery.protocol.worker import Welcome
from rookery.turns import TenantLines

log = logging.getLogger("rookery.protocol.connection")

HELLO_SECONDS = 30.0
"""The service closes a connection whose hello has not arrived by then."""
OPEN_SECONDS = 10.0
"""Time limit of a dialling process for the connection to open, and for the welcome."""
BACKOFF_SECONDS = (0.2, 5.0)
"""Pauses between attempts double from the first to the second, each times a random 0.5 … 1."""
UNSENT_BYTES = 128 << 10
"""Of those written, so many wait in the system's buffer at most: on a slow link megabytes there would be ahead of each
heartbeat."""
STEADY_SECONDS = 2.0
"""After a connection that lasted this long the next pause is the shortest again. The service may have ended a shorter
one for a reason that persists, such as a full disk here."""


class ConnectionClosed(Exception):
    """The other end is gone; no frame will arrive or leave any more."""


class RegistrationRefused(Exception):
    """The service refuses this process; another attempt cannot succeed."""


def check_protocol(hello: Any, kind: type[Any]) -> None:
    """Raises :class:`RegistrationRefused` unless a first frame is of ``kind`` and of this protocol's version."""
    if not isinstance(hello, kind):
        raise RegistrationRefused(f"the first frame must be a {kind.__name__}")
    if (version := hello.protocol) != PROTOCOL:
        raise RegistrationRefused(
            f"protocol {version} is not supported (the service uses {PROTOCOL}): install the service's version"
        )


class Connection(Protocol):
    """One end of a message channel."""

    async def send(self, frame: bytes) -> None:
        """Raises :class:`ConnectionClosed`."""
        ...

    async def receive(self) -> bytes:
        """The next frame. Raises :class:`ConnectionClosed`."""
        ...

    async def close(self, reason: str) -> None:
        """Never raises; closing twice is fine."""
        ...


# --- the service's end ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Offer:
    message: Message
    sent: asyncio.Future[None]


class Outbox:
    """Messages on their way to one peer, and the time of its last frame. Each connection has its own. Those of a tenant
    are sent in order, and tenants take turns; the service's own are sent before those of tenants."""

    def __init__(self, connection: Connection, epoch: int, clock: Clock) -> None:
        self.connection = connection
        self.epoch = epoch
        self.last_frame = clock.monotonic()
        """Time of the last frame that counted; the caller sets it."""
        self._clock = clock
        self._first: deque[bytes] = deque()
        """The service's own frames."""
        self._lines: TenantLines[bytes | _Offer] = TenantLines()
        self._filled = asyncio.Event()
        """Set while something waits."""
        self._sending_since: float | None = None

    def post(self, message: Message, tenant: str | None = None) -> None:
        """Send ``message`` as soon as the connection accepts it, or in the tenant's turn after that. If the connection
        never accepts it, it ends."""
        if tenant is None:
            self._first.append(encode(message))
        else:
            self._lines.add(tenant, encode(message))
        self._filled.set()

    def offer(self, message: Message, tenant: str) -> asyncio.Future[None]:
        """Send a message of any size in the tenant's turn; its frame is made then. The future is done when the
        connection has accepted it, and has :class:`~rookery.protocol.FrameTooLarge`, or the error of a value that no
        frame can carry, where nothing of it is sent. Cancel it to withdraw a message that still waits."""
        offer = _Offer(message, asyncio.get_running_loop().create_future())
        self._lines.add(tenant, offer)
        self._filled.set()
        return offer.sent

    async def write(self) -> None:
        """Send posted messages until the connection ends."""
        with contextlib.suppress(ConnectionClosed):  # the reader of the same connection sees it and reports it
            while True:
                await self._filled.wait()
                if self._first:
                    await self._send(self._first.popleft())
                elif (waiting := self._lines.take()) is None:
                    self._filled.clear()
                elif isinstance(waiting, bytes):
                    await self._send(waiting)
                elif not waiting.sent.done():
                    await self._send_offer(waiting)

    async def _send_offer(self, offer: _Offer) -> None:
        try:
            frame = frame_of(offer.message)
        except Exception as error:  # of this message alone: the others are sent
            offer.sent.set_exception(error)
            return
        await self._send(frame)
        if not offer.sent.done():
            offer.sent.set_result(None)

    async def _send(self, frame: bytes) -> None:
        self._sending_since = self._clock.monotonic()
        await self.connection.send(frame)
        self._sending_since = None

    def problem(self, patience: float) -> str:
        """Why the peer must be considered lost, or an empty string: nothing received for ``patience`` seconds, or a
        frame not accepted for as long."""
        now = self._clock.monotonic()
        if now - self.last_frame > patience:
            return f"no heartbeat for {now - self.last_frame:.0f} s"
        if self._sending_since is not None and now - self._sending_since > patience:
            return f"it has not read a frame for {now - self._sending_since:.0f} s"
        return ""


class Peer(Protocol):
    """A registered worker or environment host."""

    outbox: Outbox


P = TypeVar("P", bound=Peer)
M = TypeVar("M")


async def serve_peer(
    connection: Connection,
    decoder: Decoder[Any],
    *,
    register: Callable[[Any, Connection], Awaitable[P]],
    deliver: Callable[[P, Any, float], None],
    bad_frame: Callable[[P | None, BadFrame], None],
    closed: Callable[[P, Connection], Awaitable[None]],
) -> None:
    """Serve one connection until it ends. ``register(hello, connection)`` answers the peer, its welcome posted, or
    raises :class:`RegistrationRefused`; ``deliver(peer, message, seconds)`` takes every later message and the processor
    time of its decoding. ``bad_frame(peer, error)`` is called for a frame that is no message, which ends the connection
    (peer is None before the registration, which is refused then); ``closed(peer, connection)`` at the end, for a
    registered peer."""
    peer = writer = None
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            first = await connection.receive()
        try:
            hello = decode(decoder, first)
        except BadFrame as error:  # it would dial and send the same again for ever
            bad_frame(None, error)
            raise RegistrationRefused(
                f"its first frame is none of this service's protocol ({error}): correct the value that it names, or"
                " install the service's version"
            ) from None
        peer = await register(hello, connection)
        writer = asyncio.create_task(peer.outbox.write())
        while True:
            frame = await connection.receive()
            began = time.thread_time()
            message = decode(decoder, frame)
            deliver(peer, message, time.thread_time() - began)
    except RegistrationRefused as refusal:
        with contextlib.suppress(ConnectionClosed):
            await connection.send(encode(HelloRejected(reason=str(refusal))))
    except BadFrame as error:
        bad_frame(peer, error)
    except (ConnectionClosed, TimeoutError):
        pass
    finally:
        if peer is not None:
            await closed(peer, connection)
        if writer is not None:
            await cancel_all(writer)
        await connection.close("bye")


# --- the dialling end -----------------------------------------------------------------------------------------------


class DialledConnection:
    """A WebSocket that this process dialled, as a :class:`Connection`."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket

    async def send(self, frame: bytes) -> None:
        try:
            await self._socket.send(frame)
        except websockets.ConnectionClosed as error:
            raise ConnectionClosed(str(error)) from None

    async def receive(self) -> bytes:
        try:
            frame = await self._socket.recv()
        except websockets.ConnectionClosed as error:
            raise ConnectionClosed(str(error)) from None
        if isinstance(frame, str):
            raise BadFrame("a text frame")
        return frame

    async def close(self, reason: str) -> None:
        await self._socket.close(reason=reason)


class Channel(Generic[M]):
    """A welcomed connection as a worker or host uses it: typed messages of its epoch."""

    def __init__(
        self, connection: Connection, decoder: Decoder[M], welcome: Welcome | HostWelcome, base: str = ""
    ) -> None:
        self.base = base
        """Address of the service that this process is connected to."""
        self.epoch = welcome.epoch
        self.heartbeat_seconds = welcome.heartbeat_seconds
        self.welcome = welcome
        self._connection = connection
        self._decoder = decoder

    async def send(self, message: EpochMessage) -> None:
        """Send it under the epoch of this connection. Raises :class:`ConnectionClosed`, and
        :class:`~rookery.protocol.FrameTooLarge`, of which nothing is sent."""
        message.epoch = self.epoch
        await self._connection.send(frame_of(message))

    async def close(self, reason: str) -> None:
        await self._connection.close(reason)

    async def run(
        self, handle: Callable[[M], None], heartbeat: Callable[[], EpochMessage], *work: Coroutine[Any, Any, None]
    ) -> None:
        """Handle messages in the order in which they arrive, send a heartbeat at once and at each interval, and run
        ``work``, until one of these ends; the others are cancelled and its exception propagates."""
        async with first_of(self._receive(handle), self._beat(heartbeat), *work) as parts:
            for part in parts:
                if part.done():
                    part.result()

    async def _receive(self, handle: Callable[[M], None]) -> None:
        while True:
            message = decode(self._decoder, await self._connection.receive())
            if isinstance(message, HelloRejected):
                raise RegistrationRefused(message.reason)
            if isinstance(message, Welcome | HostWelcome):
                raise BadFrame("a second welcome")
            handle(message)

    async def _beat(self, heartbeat: Callable[[], EpochMessage]) -> None:
        while True:
            await self.send(heartbeat())
            await asyncio.sleep(self.heartbeat_seconds)


async def introduce(connection: Connection, hello: Message, decoder: Decoder[Any]) -> Any:
    """Send the first frame of this process; returns the welcome. Raises :class:`RegistrationRefused`,
    :class:`BadFrame`, :class:`ConnectionClosed`, ``TimeoutError``."""
    await connection.send(frame_of(hello))
    async with asyncio.timeout(OPEN_SECONDS):
        answer = decode(decoder, await connection.receive())
    if isinstance(answer, HelloRejected):
        raise RegistrationRefused(answer.reason)
    if not isinstance(answer, Welcome | HostWelcome):
        raise BadFrame(f"{type(answer).__name__} arrived before the welcome")
    return answer


@dataclass(frozen=True)
class ServiceEndpoint:
    """Where a process dials in."""

    base: str
    """The service's address, or those of a service and its standbys, comma-separated."""
    path: str
    token: str
    """The key of the process."""
    ca_file: str = ""
    """As in :func:`~rookery.network.client_tls`."""


async def stay_connected(
    endpoint: ServiceEndpoint,
    decoder: Decoder[M],
    *,
    hello: Callable[[], Message],
    converse: Callable[[Channel[M]], Awaitable[None]],
    ping_seconds: float,
    ping_timeout: float,
) -> None:
    """Dial the service, introduce this process with ``hello()``, run ``converse(channel)`` until the connection ends,
    and dial again, until cancelled; each attempt takes the next address. Raises :class:`RegistrationRefused` where the
    service refuses the key or the process. A silent other end is noticed within ``ping_seconds + ping_timeout``."""
    targets = [
        (
            each,
            service_url(each, "the service's address", "ws", endpoint.path),
            client_tls(each, endpoint.ca_file),
            proxy_of(each),
        )
        for each in endpoint.base.split(",")
    ]
    headers = {"Authorization": f"Bearer {endpoint.token}"}
    shortest, longest = BACKOFF_SECONDS
    pause = shortest
    for address, target, tls, proxy in cycle(targets):
        welcomed = None
        try:
            async with connect(
                target,
                additional_headers=headers,
                ssl=tls,
                max_size=MAX_FRAME,
                compression=None,
                open_timeout=OPEN_SECONDS,
                proxy=proxy,
                ping_interval=ping_seconds,
                ping_timeout=ping_timeout,
            ) as dialled:
                _bound_unsent(dialled)
                connection = DialledConnection(dialled)
                welcome = await introduce(connection, hello(), decoder)
                welcomed = time.monotonic()
                await converse(Channel(connection, decoder, welcome, address))
        except (OSError, TimeoutError, websockets.WebSocketException, ConnectionClosed, BadFrame) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, websockets.InvalidStatus):
                refusal = refusal_of(error.response.body)
                if refusal is not None and error.response.status_code in (401, 403):
                    raise RegistrationRefused(refusal) from None
                reason = refusal or f"{error.response.status_code}, not from a Rookery service"
            log.warning("no connection to %s, retrying: %s", target, reason)
        if welcomed is not None and time.monotonic() - welcomed > STEADY_SECONDS:
            pause = shortest
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, longest)


def _bound_unsent(connection: ClientConnection) -> None:
    """Hold what is written back, as far as the system can, until it is about to be sent."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        end = connection.transport.get_extra_info("socket")
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def refusal_of(body: bytes | bytearray) -> str | None:
    """The reason in the service's HTTP answer to a connection that it refuses. None where the answer comes from
    something before it, such as a proxy whose own rules are being changed: its 403 says nothing about the key."""
    try:
        error = msgspec.json.decode(body, type=dict[str, Any]).get("error")
    except msgspec.MsgspecError:
        return None
    return error if isinstance(error, str) else None
