"""Bounds on open connections: how many there are, of one address and in all, and how long each may wait for a request.

* A connection in excess closes the oldest that is idle, which has sent no whole request head or no accepted hello. So
  clients that open connections and send nothing do not make the service unreachable. If none is idle, the new one is
  closed.
* A connected worker or environment host is never closed for another connection and does not count for its address.
* A WebSocket reads only small messages until its hello was accepted.
* The requests and WebSockets that a key opened end when it is revoked or expires.
* :data:`RESERVED_DESCRIPTORS` file descriptors stay free for workers, running jobs and the database.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import ssl
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import get_remote_addr
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from rookery.clock import Clock
from rookery.errors import shortage
from rookery.network import source_of

log = logging.getLogger("rookery.server.connections")

DESCRIPTORS = 65536
"""Limit of open files that the service asks for; the system may allow fewer."""

RESERVED_DESCRIPTORS = 256
"""File descriptors that connections leave free; half of them where the system allows fewer than twice as many: a
service whose connected worker takes its only place would answer nobody."""

FEW_DESCRIPTORS = 1024
"""A limit of open files below it is reported: containers and init systems give more."""

HEAD_BYTES = 64 << 10
"""Largest head of a request: its address and headers. The connection is closed for a larger one."""

HELLO_BYTES = 1 << 20
"""Largest message of a worker or environment host that is not welcomed yet. A hello lists the worker's cached adapters,
70 bytes each."""

ACCEPTED_AT_ONCE = 64
"""Connections taken from the listening socket before the first of them is counted; far fewer than the reserve."""

EXPIRY_SECONDS = 1.0
"""How often the connections are looked at whose keys expire."""

PIECE_BYTES, TURN_SECONDS = 1024, 2e-3
"""Read from a WebSocket before the clock is looked at, and the time after which others get their turn. A small frame
takes 10 µs, so that a piece full of them takes 2 ms and a read of the socket half a second; a request of another client
needs some ten turns of the event loop."""

FRAGMENTS, PINGS = 8192, 64
"""Parts of one message, and pings and pongs that may come before the next one is complete. Peers send a message whole,
and a ping or two in a minute."""


QUEUED, QUEUED_BYTES = 64, 1 << 17
"""Messages of a WebSocket that wait for the service before more of them are read, and their bytes: a read of the socket
has 40,000. What waits is handled however late its tenant is: 64 messages of 100 kB take as long as its whole burst."""


PIPELINED = 16
"""Requests of one connection that may wait for the response to an earlier one. Clients wait for it before they send the
next; a read of the socket has thousands, and each takes 200 µs."""


UPGRADE_HEADERS = (b"upgrade", b"http2-settings")
"""Headers by which a client asks for another protocol on its connection; ``Connection`` names them too."""


BODY_HEADERS = (b"content-length", b"transfer-encoding")
"""Headers of a request with a body, apart from a length of 0."""


@dataclass(frozen=True, kw_only=True)
class EdgeRules:
    """The patience of the service with a client's connection. Tests pass another one to the service."""

    head_seconds: float = 15.0
    """Time that a connection has for a TLS handshake, and to send the head of a request."""
    body_seconds: float = 30.0
    """Time that a body may take whatever its size; after it, its average rate is bounded."""
    stall_seconds: float = 60.0
    """A client that takes none of a response for so long, while 64 kB of it wait, is disconnected."""
    hello_sockets: int = 128
    """Most WebSockets that are not welcomed yet; the oldest is closed for one more."""
    failed_keys_per_minute: int = 60
    """Requests with a wrong key that one address may send per minute. Above it, keys that were not valid before are
    refused unchecked: a person mistypes a key a few times, and a program that guesses sends thousands."""


EDGE_RULES = EdgeRules()
"""The values that a service uses."""

ADDRESS_SHARE, TENANT_SHARE = 0.5, 0.25
"""Shares of all connections that one address may have open, apart from connected workers and environment hosts, and
that one tenant's requests may take. Others behind a tenant's address are connected, too; a client of the OpenAI
or Tinker SDK opens up to 1,000, a quarter of the default."""


CONNECTION_SECONDS, READ_SECONDS, BYTE_SECONDS = 100e-6, 30e-6, 0.15e-9
"""Processor time that the event loop takes for a new connection, for one read of a socket, and for each byte of it,
before the connection sees any of it: estimates from requests in a closed loop, whose measured time they complete."""


class Slot:
    """One open connection. ``idle`` while it may be closed for another one."""

    def __init__(self, transport: asyncio.Transport, address: str) -> None:
        self.transport = transport
        self.address = address
        self.idle = True
        self.key = ""
        """The hash of the key that its last request brought."""
        self.ends = math.inf
        """When that key expires, Unix seconds."""
        self._spend: Callable[[float], None] | None = None
        self._late: Callable[[], float] | None = None
        self._uncharged = CONNECTION_SECONDS

    def spent(self, seconds: float) -> None:
        """The service has read from the connection. The tenant of its last request is charged, also for the rest of a
        body that was refused; before the first one, whoever owns that."""
        if self._spend is None:
            self._uncharged += seconds
        else:
            self._spend(seconds)

    def late(self) -> float:
        """Seconds until more may be read of a WebSocket, whose tenant is beyond its share."""
        return 0.0 if self._late is None else self._late()

    def charge(self, spend: Callable[[float], None], late: Callable[[], float] | None = None) -> None:
        """A request belongs to the tenant that ``spend`` charges, and whose next read waits for ``late()`` seconds."""
        self._spend, self._late = spend, late
        spend(self._uncharged)
        self._uncharged = 0.0


class Connections:
    """The open connections of one service."""

    def __init__(
        self, most: int, refusals: Counter[str], rules: EdgeRules = EDGE_RULES, tls: ssl.SSLContext | None = None
    ) -> None:
        """``most``: open connections in all. ``tls``: the service's certificate, where it serves https."""
        self.rules = rules
        self.tls = tls
        self._refusals = refusals
        descriptors = raise_descriptor_limit()
        self._limit = max(1, min(most, descriptors - min(RESERVED_DESCRIPTORS, descriptors // 2)))
        if descriptors < FEW_DESCRIPTORS:
            log.warning(
                "this process may open %d files, so at most %d connections; raise the limit (ulimit -n, LimitNOFILE)",
                descriptors, self._limit,
            )  # fmt: skip
        self._per_address = max(1, int(self._limit * ADDRESS_SHARE))
        self.per_tenant = max(1, int(self._limit * TENANT_SHARE))
        """Most open requests of one tenant."""
        self._open: dict[str, dict[Slot, None]] = {}
        """By address, oldest first, without welcomed peers."""
        self._sockets: dict[Slot, None] = {}
        """WebSockets that are not welcomed yet, oldest first."""
        self._of_keys: dict[str, dict[Slot, None]] = {}
        """By the key of the last request."""
        self._ending: dict[Slot, None] = {}
        """The connections whose key expires."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def admit(self, transport: asyncio.Transport, address: str) -> Slot | None:
        """The place of a new connection; None if it has to be closed."""
        mine = self._open.get(address, {})
        if len(mine) >= self._per_address and not self._evict(mine):
            self._refusals["connections_refused"] += 1
            return None
        if self._count >= self._limit and not self._evict(max(self._open.values(), key=len, default={})):
            self._refusals["connections_refused"] += 1
            return None
        slot = Slot(transport, address)
        self._open.setdefault(address, {})[slot] = None
        self._count += 1
        return slot

    def upgraded(self, slot: Slot) -> None:
        """The connection became a WebSocket, which is not welcomed yet."""
        if len(self._sockets) >= self.rules.hello_sockets:
            self._evict(self._sockets)
        self._sockets[slot] = None

    def opened(self, slot: Slot, key: str, ends: float = math.inf) -> None:
        """A request on the connection brought a valid key of this hash, which expires at ``ends``."""
        if slot.transport is None or (key, ends) == (slot.key, slot.ends):
            return
        self._forget_key(slot)
        slot.key, slot.ends = key, ends
        self._of_keys.setdefault(key, {})[slot] = None
        if ends < math.inf:
            self._ending[slot] = None

    def cut(self, key: str) -> None:
        """The key is revoked: requests and WebSockets that it opened end."""
        self._cut(self._of_keys.get(key, ()))

    async def watch(self, clock: Clock) -> None:
        """As :meth:`cut` for each key that expires; until cancelled."""
        while True:
            self._cut(slot for slot in self._ending if slot.ends <= clock.time())
            await clock.sleep(EXPIRY_SECONDS)

    def _cut(self, slots: Iterable[Slot]) -> None:
        """End the requests and WebSockets of these connections. One that waits for its next request stays, since a
        proxy may have it for others."""
        for slot in [slot for slot in slots if not slot.idle or slot in self._sockets]:
            transport = slot.transport
            self.release(slot)
            transport.abort()

    def welcome(self, slot: Slot) -> None:
        """The WebSocket's hello was accepted."""
        slot.idle = False
        self._sockets.pop(slot, None)
        self._forget(slot)

    def end_flood(self, slot: Slot) -> None:
        """The connection brings a head or frames without end."""
        self._end(slot, "connections_flooding")

    def end_unread(self, slot: Slot) -> None:
        """The client does not read the end of its response."""
        self._end(slot, "readers_slow")

    def _end(self, slot: Slot, reason: str) -> None:
        if slot.transport is not None:
            self._refusals[reason] += 1
            slot.transport.abort()
            self.release(slot)

    def release(self, slot: Slot) -> None:
        """The connection has ended. It may be released twice."""
        if slot.transport is not None:
            slot.transport = None  # type: ignore[assignment]
            self._count -= 1
            self._sockets.pop(slot, None)
            self._forget(slot)
            self._forget_key(slot)

    def _forget_key(self, slot: Slot) -> None:
        self._ending.pop(slot, None)
        mine = self._of_keys.get(slot.key, {})
        mine.pop(slot, None)
        if not mine:
            self._of_keys.pop(slot.key, None)

    def _forget(self, slot: Slot) -> None:
        mine = self._open.get(slot.address, {})
        mine.pop(slot, None)
        if not mine:
            self._open.pop(slot.address, None)

    def _evict(self, slots: dict[Slot, None]) -> bool:
        """Close the oldest idle connection of ``slots``; False if none is idle."""
        oldest = next((slot for slot in slots if slot.idle), None)
        if oldest is None:
            return False
        self._refusals["connections_evicted"] += 1
        transport = oldest.transport
        self.release(oldest)
        transport.abort()
        return True


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's HTTP connection in a slot, with a time limit for a TLS handshake and for the head of each request.
    uvicorn's own TLS would begin a connection, and count it, only after its handshake."""

    slot: Slot | None = None
    _head_bytes = 0
    """Received of a head that is not complete."""
    _timer: asyncio.TimerHandle | None = None
    _handshake: asyncio.Task[None] | None = None
    _early = b""
    """Received with the end of the handshake."""
    _fed = b""
    """The bytes that the parser reads now."""
    _responses = 0
    """After which the connection waited for its next request."""
    _last_answer: bytes | None = None
    """To a request that reaches no route. It waits for the responses to earlier ones and ends the connection."""

    @property
    def _bounds(self) -> Connections:
        connections: Connections = self.config.app.state.context.connections  # type: ignore[union-attr]
        return connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self.slot is None:
            address = get_remote_addr(transport)
            self.slot = self._bounds.admit(transport, source_of(address[0]) if address else "")
            if self.slot is None:
                transport.abort()
                return
            if self._bounds.tls is not None:
                transport.pause_reading()
                self._handshake = self.loop.create_task(self._secure(self.slot, self._bounds.tls))
                return
        self.app_state = {**self.app_state, "slot": self.slot}
        super().connection_made(transport)
        self._await_head()

    async def _secure(self, slot: Slot, tls: ssl.SSLContext) -> None:
        raw, seconds = slot.transport, self._bounds.rules.head_seconds
        try:
            secure = await self.loop.start_tls(raw, self, tls, server_side=True, ssl_handshake_timeout=seconds)
        except OSError:  # no TLS, or none that is accepted here
            raw.abort()
            self._bounds.release(slot)
            return
        assert secure is not None
        slot.transport = secure
        self.connection_made(secure)
        if self._early:
            self.data_received(self._early)

    def data_received(self, data: bytes) -> None:
        began = time.thread_time()
        try:
            self._parse(data)
        finally:
            if self.slot is not None:
                self.slot.spent(time.thread_time() - began + READ_SECONDS + len(data) * BYTE_SECONDS)

    def _parse(self, data: bytes) -> None:
        if self._last_answer is not None:
            return
        if self.transport is None:
            self._early += data
            return
        if self._timer is not None and (self.cycle is None or not self.cycle.more_body):  # else a body without a reader
            self._head_bytes += len(data)
        self._fed = data
        super().data_received(data)
        if self.slot is None or not self.slot.idle or self.transport.get_protocol() is not self:
            return  # in a request, or a WebSocket now
        if self._timer is None and self.timeout_keep_alive_task is None:
            self._await_head()
        if self._head_bytes > HEAD_BYTES:
            self._bounds.end_flood(self.slot)

    def _should_upgrade(self) -> bool:
        """A WebSocket begins with GET and has no body (RFC 6455, section 4.1), and few paths take one. A request for
        any other protocol is answered as if it did not ask for one (RFC 9110, section 7.8): Java's client and ``curl
        --http2`` ask for h2c with every POST, and a proxy may set ``Upgrade: websocket`` in every request."""
        has_body = any(name in BODY_HEADERS and value.strip() != b"0" for name, value in self.headers)
        if self.scope["method"] != "GET" or has_body or not super()._should_upgrade():
            return False
        path = unquote((httptools.parse_url(self.url).path or b"").decode("ascii"))
        return path.removesuffix("/") in self.config.app.state.sockets  # type: ignore[union-attr]

    def _unsupported_upgrade_warning(self) -> None:
        """The parser ends after the head of a request that asks for another protocol. A new one reads the same request
        without that wish, and the bytes that follow. CONNECT ends it without a wish."""
        if not {*UPGRADE_HEADERS} & {name for name, _ in self.headers}:
            method = self.scope["method"]
            self._end_with(b"501 Not Implemented", f"the service is no proxy and takes no {method}; send GET or POST")
            return
        stopped = sys.exc_info()[1]
        assert isinstance(stopped, httptools.HttpParserUpgrade)
        rest = self._fed[stopped.args[0] :]
        version = self.scope["http_version"].encode()
        head = [self.scope["method"].encode(), b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(part for part in value.split(b",") if part.strip().lower() not in UPGRADE_HEADERS)
            if name not in UPGRADE_HEADERS:
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self._parse(b"".join([*head, b"\r\n", rest]))

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # else there is no request yet, see above, or it is a WebSocket
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn could not parse a request: that it found no memory for it is no mistake of the client's."""
        error = sys.exc_info()[1]
        known = shortage(error.__context__) if error is not None and error.__context__ is not None else None
        if known is None:
            self._end_with(b"400 Bad Request", msg)
        else:
            self._end_with(b"503 Service Unavailable\r\nretry-after: 1", str(known))

    def _end_with(self, status: bytes, error: str) -> None:
        """Answer a request that reaches no route, after the responses to earlier ones, and close the connection."""
        body = msgspec.json.encode({"error": error})
        head = b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-type: application/json\r\n" % status
        self._last_answer = head + b"content-length: %d\r\n\r\n" % len(body) + body
        latest = self.cycle
        if latest is not None and latest.more_body:  # it is the one that is answered here: its body cannot be read
            if not self.pipeline:
                self._send_last_answer(begun=latest.response_started)
                return
            self.pipeline.popleft()
        if latest is None or latest.response_complete:
            self._send_last_answer()

    def _send_last_answer(self, begun: bool = False) -> None:
        if self._last_answer is not None and not self.transport.is_closing():
            if not begun:
                self.transport.write(self._last_answer)
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._head_arrived()
        if self.slot is not None and len(self.pipeline) >= PIPELINED:
            self._bounds.end_flood(self.slot)
        self.scope["method"] = self.parser.get_method().decode("ascii")
        if not self.transport.is_closing() and (not self.parser.should_upgrade() or self._should_upgrade()):
            super().on_headers_complete()

    def on_response_complete(self) -> None:
        last = not self.pipeline
        if self.slot is not None and last:
            self.slot.idle = True
            self._responses += 1
            if self.transport.get_write_buffer_size():
                self.loop.call_later(self._bounds.rules.stall_seconds, self._abort_unread, self._responses)
        super().on_response_complete()
        if last:
            self._send_last_answer()

    def _abort_unread(self, responses: int) -> None:
        """The client has had time to read the end of the response with this number, which may be its last: asyncio
        would wait for it for ever, also to close the connection."""
        slot = self.slot
        if slot is not None and slot.idle and self._responses == responses and self.transport.get_write_buffer_size():
            self._bounds.end_unread(slot)

    def handle_websocket_upgrade(self) -> None:
        if self.slot is None:
            return
        self._head_arrived()
        self.slot.idle = True
        self._bounds.upgraded(self.slot)
        self.app_state = {**self.app_state, "slot": self.slot}
        super().handle_websocket_upgrade()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.transport is not None:
            super().connection_lost(exc)
        self._head_arrived()
        if self.slot is not None:
            self._bounds.release(self.slot)

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._timer = self.loop.call_later(self._bounds.rules.head_seconds, self.transport.abort)

    def _head_arrived(self) -> None:
        self._head_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.slot is not None:
            self.slot.idle = False


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket in the slot of its HTTP connection. Routes find it as ``socket.state.connection``."""

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any]) -> None:
        super().__init__(config, server_state, {**app_state, "connection": self})
        self._slot: Slot = app_state["slot"]
        self._bounds: Connections = config.app.state.context.connections
        self._unread: deque[memoryview] = deque()
        self._turn: asyncio.Handle | None = None
        """The next reading of ``_unread``."""
        self._pings = 0
        self._queued_bytes = 0
        """Of the messages that wait for the service."""
        self.conn.max_message_size = HELLO_BYTES

    def welcomed(self, most: int) -> None:
        """The peer's hello was accepted: messages may have ``most`` bytes, and the connection stays."""
        self.conn.max_message_size = most
        self._bounds.welcome(self._slot)

    def data_received(self, data: bytes) -> None:
        idle, view = not self._unread, memoryview(data)
        self._unread.extend(view[at : at + PIECE_BYTES] for at in range(0, len(view), PIECE_BYTES))
        self._slot.spent(READ_SECONDS + len(data) * BYTE_SECONDS)
        if idle:
            self._read_turn()
        else:
            self.transport.pause_reading()

    def _read_turn(self) -> None:
        self._turn = None
        began = now = time.thread_time()
        late = self._slot.late()
        while self._may_read() and not late and now - began < TURN_SECONDS:
            super().data_received(self._unread[0])  # type: ignore[arg-type]
            self._unread.popleft()
            now = time.thread_time()
        self._slot.spent(now - began)
        if self.transport.is_closing():
            self._unread.clear()
        elif self._unread:
            self.transport.pause_reading()
            if self._may_read():  # else the next turn comes when the messages are taken
                self._turn = self.loop.call_later(late, self._read_turn)
        elif not self.read_paused:
            self.transport.resume_reading()

    def _may_read(self) -> bool:
        room = self.queue.qsize() < QUEUED and self._queued_bytes < QUEUED_BYTES
        discarded = self.close_sent  # nobody takes them, and the peer's own close comes after them
        return bool(self._unread) and (room or discarded) and not self.transport.is_closing()

    def _read_on(self) -> None:
        """Reading was paused, and resumes."""
        if not self._unread:
            self.transport.resume_reading()
        elif self._turn is None:
            self._turn = self.loop.call_soon(self._read_turn)

    def handle_cont(self, event: Frame) -> None:
        if self._is_bounded(len(self.frames) < FRAGMENTS):
            super().handle_cont(event)

    def handle_ping(self) -> None:
        self._pings += 1
        if self._is_bounded(self._pings <= PINGS):
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        self._pings += 1
        if self._is_bounded(self._pings <= PINGS):
            super().handle_pong(event)

    def _is_bounded(self, bounded: bool) -> bool:
        """``bounded``; if false the connection ends."""
        if not bounded:
            self._bounds.end_flood(self._slot)
        return bounded

    def send_receive_event_to_app(self) -> None:
        self._pings = 0
        self._queued_bytes += sum(map(len, self.frames))
        super().send_receive_event_to_app()

    async def receive(self) -> Any:
        message = await self.queue.get()
        if self.queue.empty():
            self._queued_bytes = 0
            if self.read_paused:
                self.read_paused = False
                self._read_on()
        return message

    def abort(self) -> None:
        """End the connection without the peer, which has what it has."""
        self.transport.abort()

    async def send(self, message: Any) -> None:
        await super().send(message)
        if self._unread and not self.read_paused:  # a close, after which nobody takes the messages
            self._read_on()
        if self.close_timer is not None:  # uvicorn would wait for the peer to read what was sent before
            self.close_timer.cancel()
            self.close_timer = self.loop.call_later(self.close_timeout, self.abort)
        if message["type"] == "websocket.http.response.body":  # a refusal, which uvicorn would log as an error
            self.handshake_complete = True

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._bounds.release(self._slot)


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files towards :data:`DESCRIPTORS`, as far as the system allows; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
