"""Limits on request bodies, and the JSON reader of every API.

* No request makes the service hold more bytes than its route's limit: reading stops at the chunk that exceeds it, with
  status 413. Uploads of workers with a ticket have no limit here; they are written to the disk in chunks.
* JSON is measured before it is parsed: a body with more items than :data:`JSON_ITEMS` gets 413, one nested deeper than
  ``JSON_DEPTH`` 422. The measuring functions run at the speed of a memory copy.
* A body in which an object has a field twice gets 422 (400 of the OpenAI and Tinker APIs) with the field's path:
  readers differ about its value, so a gateway may have checked another one than the service would use.
* A body above :data:`INLINE_BYTES` is measured, parsed and validated in a thread, one at a time of a tenant.
"""

from __future__ import annotations

import asyncio
import json
from codecs import BOM_UTF8
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import msgspec
from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rookery.aio import Portions
from rookery.errors import count_of, shortage
from rookery.network import source_of
from rookery.server.connections import Slot
from rookery.server.responses import retry_headers
from rookery.settings import Settings
from rookery.spec import values
from rookery.spec.files import decode_job
from rookery.storage.store import Writer
from rookery.turns import SPENT, metered

T = TypeVar("T")

UPLOADS = frozenset({"/api/v1/datasets", "/api/v1/adapters", "/v1/files"})
"""Paths whose bodies may have ``upload_bytes``: files, which are written to the disk as they arrive."""

TRAINING = "/tinker/api/v1/forward_backward"
"""The path whose bodies may have ``training_bytes``: tensors, in protobuf."""

JOB_ROUTES = "/api/v1/jobs"
"""Beginning of the paths whose JSON is a job, which is read as the run reads its values."""

DATASETS = frozenset({"/api/v1/datasets", "/v1/files"})
"""Paths whose bodies are written to the disk in chunks and never held."""

PROBES = frozenset({"/healthz", "/readyz"})
"""Paths that load balancers ask often, from an address that they may share with everybody: they never wait."""

SENT_SECONDS = 1e-9
"""Processor time of each byte of a response, which the event loop sends after the request."""

POLICY = b"default-src 'none'; frame-ancestors 'none'; base-uri 'none'"
DOCS_POLICY = (
    POLICY + b"; connect-src 'self'; script-src https://cdn.jsdelivr.net 'unsafe-inline';"
    b" style-src https://cdn.jsdelivr.net; img-src data: https://fastapi.tiangolo.com"
)
HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
]

BODY_RATE = 1024.0
"""Bytes per second that a body must have on average after ``body_seconds``: a slow mobile network has more."""

READ_RATE = 16 << 10
"""Bytes per second that a client must read, on average, of a response that is in memory."""

SENT_BYTES = 64 << 10
"""Of a whole response that are sent at once. uvicorn would take all of a response for sent, and the connection for one
that waits for its next request, while the client has read nothing."""

INLINE_BYTES = 32 << 10
"""A smaller body is parsed at once: a thread switch costs more."""

MEASURED_BYTES = 256 << 10
"""Of a body measured at once."""

JSON_ITEMS = 200_000
"""Most values in one JSON body, counted before it is parsed. Each token id of a prompt is one."""

JSON_DEPTH = 64
"""Deepest nesting of a JSON body."""

DIGITS = 100
"""Digits of one number: converting a longer integer takes a time that grows with their square."""

_OUTSIDE = bytes(set(range(256)) - set(b"[]{}"))
_NESTED = frozenset({dict, list})
_ZEROS = bytes(48 if 48 <= byte <= 57 else byte for byte in range(256))
"""Translates every digit to 0."""


class BodyRefused(HTTPException):
    """A body that exceeds a limit or has text that is not Unicode. It counts in the metrics."""


class BodyInvalid(HTTPException):
    """A body that its route's model refuses. FastAPI lets no other error than that of HTTP through its reader."""

    def __init__(self, error: RequestValidationError) -> None:
        super().__init__(422)
        self.error = error


class BodyLimit:
    """ASGI middleware that refuses a body above the limit of its path, and one above what its tenant may have in memory
    at once; it counts refused bodies."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/wire/"):
            await self._app(scope, receive, send)
            return
        service, received, owner = scope["app"].state.context, 0, ""
        limit, reason = limit_of(scope["path"], service.context.settings)
        edge, rules = service.context.settings.edge, service.connections.rules
        most, began, whole = edge.tenant_body_bytes, 0.0, False

        async def next_part() -> Message:
            """The next part of the body. One that comes too slowly is refused."""
            nonlocal began
            if whole:
                return await receive()
            if received and (caller := scope["state"].get("caller")) is not None:
                began += await service.context.rooms.quotas.service_time.pause(caller.id)
            now = asyncio.get_running_loop().time()
            began = began or now
            try:
                async with asyncio.timeout_at(began + rules.body_seconds + received / BODY_RATE):
                    return await receive()
            except TimeoutError:
                service.refusals["bodies_slow"] += 1
                line = f"the body came with less than {BODY_RATE:g} bytes per second"
                raise BodyRefused(408, line, {"Connection": "close"}) from None

        async def counted() -> Message:
            nonlocal received, owner, whole
            message = await next_part()
            whole = not message.get("more_body", False)
            size = len(message.get("body", b""))
            received += size
            if received > limit:
                service.refusals["bodies_refused"] += 1
                raise BodyRefused(413, f"the body has more than {limit} bytes; {reason}")
            if scope["path"] not in DATASETS and size and (caller := scope["state"].get("caller")) is not None:
                owner = caller.id
                service.requests.body_bytes[owner] += size
                if service.requests.body_bytes[owner] > max(most, received):
                    service.refusals["bodies_refused"] += 1
                    line = f"bodies of this tenant's other requests are read; {most} bytes are read at once"
                    raise BodyRefused(429, f"{line} (ROOKERY_TENANT_BODY_BYTES)", {"Retry-After": "1"})
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            if owner:
                service.requests.body_bytes[owner] -= received
                if not service.requests.body_bytes[owner]:
                    del service.requests.body_bytes[owner]


class TimeKeeper:
    """ASGI middleware that measures the service's time for each request and charges its tenant, or its address where no
    key is valid, counts its end, releases its response's room, and disconnects clients that do not read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        service = scope["app"].state.context
        quotas = service.context.rooms.quotas
        service_time = quotas.service_time
        charges = service_time if scope["type"] == "http" else quotas.host_time
        state, early = scope.setdefault("state", {}), 0.0
        slot = state.get("slot")
        address = source_of((scope.get("client") or ("",))[0])

        def keyless() -> bool:
            """Whether it counts for its address. Workers sign their transfers, or have a ticket."""
            return not (state.get("caller") or state.get("signed") or scope["path"] in PROBES)

        async def pause() -> None:
            if (caller := state.get("caller")) is not None:
                await service_time.pause(caller.id)

        def spent(seconds: float) -> None:
            nonlocal early, slot
            if (caller := state.get("caller")) is None:
                early += seconds
            elif caller.role != "worker" or scope["type"] == "http":  # workers connect, and send no requests with a key
                if slot is not None:
                    slot.charge(partial(charges.spend, caller.id), partial(charges.late, caller.id))
                    slot = None
                charges.spend(caller.id, seconds + early, state.get("account") if charges is service_time else None)
                early = 0.0

        async def turn(connection: Slot) -> bool:
            """Returns when it is the turn of a response without a valid key, or of one that refuses a request before
            its tenant's turn has come, or a WebSocket. False where too many of them wait."""
            if keyless():
                connection.charge(partial(quotas.keyless_time.spend, address))
                return bool(await quotas.keyless_time.turn(address, lambda: connection.transport is None))
            if (caller := state.get("caller")) is None or (charges is service_time and "account" in state):
                return True
            came = state.get("came") if charges is service_time else None
            return bool(await charges.turn(caller.id, lambda: connection.transport is None, came))

        state["pause"] = pause
        SPENT.set(spent)

        async def sent(message: Message) -> None:
            """Sends a part of the response, and disconnects a client that reads none of it."""
            connection = state.get("slot")
            starts = message["type"].endswith("http.response.start") and connection is not None
            if starts and not await turn(connection):
                if scope["type"] != "http" or keyless():
                    service.connections.end_flood(connection)
                else:  # its client learns when to come again, and the service needs no place for it
                    message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            if keyless():
                spent(len(message.get("body", b"")) * SENT_SECONDS)
            if scope["type"] != "http":
                await send(message)
                return
            loop, stall = asyncio.get_running_loop(), service.connections.rules.stall_seconds
            size = len(message.get("body", b""))
            until = loop.time() + stall + size / READ_RATE
            if message["type"] == "http.response.body" and state.get("room", 0) > size:
                service.requests.room.give(state["caller"].id, state["room"] - size)
                state["room"] = size
            portions = Portions()
            try:
                for part in parts_of(message):
                    async with asyncio.timeout_at(min(loop.time() + stall, until)):
                        await send(part)
                    if part is not message:
                        await portions.pause()
            except TimeoutError:
                service.refusals["readers_slow"] += 1
                if connection is not None and connection.transport is not None:
                    connection.transport.abort()
                raise ClientDisconnect from None

        try:
            await metered(cast(Coroutine[Any, Any, None], self._app(scope, receive, sent)), spent)
        finally:
            if keyless():
                quotas.keyless_time.spend(address, early)
            if size := state.pop("room", 0):
                service.requests.room.give(state["caller"].id, size)
            if state.pop("open", False):
                service.requests.count[state["caller"].id] -= 1
            if (account := state.get("account")) is not None:
                service_time.end(state["caller"].id, account)


def parts_of(message: Message) -> Iterator[Message]:
    """A part of a response in pieces. The last one of a large response is empty: it is sent once the others are read,
    but for some kilobytes."""
    body = message.get("body", b"")
    if len(body) <= SENT_BYTES:
        yield message
        return
    for at in range(0, len(body), SENT_BYTES):
        yield {**message, "body": body[at : at + SENT_BYTES], "more_body": True}
    if not message.get("more_body", False):
        yield {**message, "body": b"", "more_body": False}


class SecurityHeaders:
    """ASGI middleware: no page may load or be loaded by others, but for the API's documentation, and the service's own
    page, whose policy is ``page``."""

    def __init__(self, app: ASGIApp, page: bytes) -> None:
        self._app = app
        self._policies = {"/docs": DOCS_POLICY, "/": page}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                policy = self._policies.get(scope["path"].rstrip("/") or "/", POLICY)
                message = {**message, "headers": [*message["headers"], *HEADERS, (b"content-security-policy", policy)]}
            await send(message)

        await self._app(scope, receive, headed)


def limit_of(path: str, settings: Settings) -> tuple[int, str]:
    """The most bytes of a body sent to ``path``, and the explanation of that limit."""
    upload, edge = settings.server.upload_bytes, settings.edge
    if path in UPLOADS:
        return upload, "the limit is the service's setting ROOKERY_UPLOAD_BYTES"
    most, hint = edge.json_bytes, "ROOKERY_JSON_BYTES"
    if path == TRAINING:
        most, hint = edge.training_bytes, "ROOKERY_TRAINING_BYTES"
    elif path.startswith(JOB_ROUTES):
        hint += "; rows can be uploaded instead (POST /api/v1/datasets)"
    return min(most, upload), f"the limit is the service's setting {hint}"


Validate = Callable[..., tuple[Any, list[dict[str, Any]]]]
"""From a body's JSON to the object of its model, and the errors."""


class BoundedRequest(Request):
    """A request whose :meth:`json` is bounded; FastAPI calls it for a route's body. A large body is validated by the
    route's model where it is parsed: FastAPI takes the object as it is."""

    def __init__(self, scope: Scope, receive: Receive, validate: Validate | None) -> None:
        """``validate``: FastAPI's for the whole body."""
        super().__init__(scope, receive)
        self._validate = validate

    async def body(self) -> bytes:
        with refused_shortages():
            return await super().body()

    async def json(self) -> Any:
        return await read_json(self, self._validated)

    def _validated(self, value: Any) -> Any:
        """Raises :class:`BodyInvalid`."""
        if self._validate is None:
            return value
        body, errors = self._validate(value, loc=("body",))
        if errors:
            raise BodyInvalid(RequestValidationError(errors, body=value))
        return body


@contextmanager
def refused_shortages() -> Iterator[None]:
    """A body is read within: where memory runs out, the response is 503. FastAPI answers other errors with 400."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if (short_of := shortage(error)) is None:
            raise
        raise HTTPException(short_of.status, str(short_of), retry_headers(short_of)) from None


async def read_json(request: Request, large: Callable[[Any], Any] | None = None) -> Any:
    """The value of a JSON body; ``large`` converts that of a large body, in the same thread. Raises
    :class:`BodyRefused`, and :class:`json.JSONDecodeError` for other text."""
    service = request.app.state.context
    try:
        with refused_shortages():
            body = await request.body()
            decode = decode_job if request.url.path.startswith(JOB_ROUTES) else msgspec.json.decode

            def work() -> Any:
                value = parse(body, JSON_ITEMS, JSON_DEPTH, decode)
                return value if large is None or len(body) <= INLINE_BYTES else large(value)

            return await off_loop(service.threads, len(body), work)
    except BodyRefused:
        service.refusals["bodies_refused"] += 1
        raise


async def off_loop(threads: Writer, size: int, work: Callable[[], T]) -> T:
    """The result of ``work``, which takes a time that grows with ``size`` bytes: at once for a small size, else in one
    of the ``threads``, in the tenant's turn."""
    return work() if size <= INLINE_BYTES else await threads(work)


def measure(body: bytes, items: int, depth: int, digits: int = DIGITS, name: str = "the body") -> int:
    """The number of fields in all objects of the JSON ``name``. Raises :class:`BodyRefused` as :func:`parse` does. It
    looks at a piece at a time: each is a matter of a millisecond, between which other threads have their turn."""
    at, within, quotes, fields, opened, closed, level, last = 0, 0, 0, 0, 0, 0, 0, b""
    while at < len(body):
        piece = body[at : at + MEASURED_BYTES]
        escapes = len(piece) - len(piece.rstrip(b"\\"))
        end = at + len(piece) + escapes % 2  # an escape stays whole
        piece = body[at:end].replace(b"\\\\", b"").replace(b'\\"', b"")  # now a quote begins or ends a string
        at = end
        quotes += (ends := piece.count(b'"'))
        if quotes > 4 * items + 4:  # a key and a text for each item
            raise BodyRefused(413, f"{name} has more than {count_of(items, 'item')}; send fewer in a request")
        bare = b"".join(piece.split(b'"')[within::2])
        within = (within + ends) % 2
        fields += bare.count(b":")
        opened += bare.count(b",") + bare.count(b"[") + bare.count(b"{")
        closed += bare.count(b"]") + bare.count(b"}")
        if max(opened, closed) > items:
            raise BodyRefused(413, f"{name} has more than {count_of(items, 'item')}; send fewer in a request")
        last += bare.translate(_ZEROS)
        if b"0" * (digits + 1) in last:
            raise BodyRefused(422, f"{name} has a number of more than {count_of(digits, 'digit')}; give a shorter one")
        last = last[-digits:]
        for bracket in bare.translate(None, _OUTSIDE):
            level += 1 if bracket in b"[{" else -1
            if level > depth:
                raise BodyRefused(422, f"{name} is nested more than {depth} deep; give a flatter one")
    return fields


def has_fields(value: Any, count: int) -> bool:
    """Whether the objects in a JSON value have ``count`` fields together, and not fewer: the last of two of one name
    takes the place of the first. It ends with the last field that it looks for, and so reads few lists that begin with
    a number or a text."""
    nested, flat = [value] if type(value) in _NESTED else [], list[Any]()
    while count and (nested or flat):
        inner = nested.pop() if nested else flat.pop()
        if type(inner) is dict:
            count -= len(inner)
            inner = inner.values()
        if not _NESTED.isdisjoint(map(type, inner)):
            for one in inner:
                if type(one) is dict:
                    nested.append(one)
                elif type(one) is list and one:
                    (nested if type(one[0]) in _NESTED else flat).append(one)
    return not count


def parse(body: bytes, items: int, depth: int, decode: Callable[[bytes], Any] = msgspec.json.decode) -> Any:
    """The JSON value in ``body``, which has at most ``items`` commas and brackets, nested at most ``depth`` deep, and
    numbers of at most :data:`DIGITS` digits, as ``decode`` reads it. No object has a field twice. A byte order mark,
    with which programs of Windows begin a file, means nothing. Raises as :func:`read_json` does."""
    body = body.removeprefix(BOM_UTF8)
    fields, problem = measure(body, items, depth), "a field is given twice"
    try:
        value = decode(body)
        if has_fields(value, fields):
            return value
    except values.ValueRefused as error:
        raise BodyRefused(422, str(error)) from None
    except (msgspec.MsgspecError, ValueError) as error:
        problem = str(error)
    try:
        values.decode(body)  # names the field
    except values.ValueRefused as error:
        raise BodyRefused(422, str(error)) from None
    except ValueError:
        pass
    raise json.JSONDecodeError(" ".join(problem.split()), "", 0)
