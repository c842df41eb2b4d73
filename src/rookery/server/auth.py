"""Authentication, and the context that routes work with, as FastAPI dependencies.

One key opens HTTP routes, connections of workers and those of environment hosts, each for the roles named there. Keys
are looked up by their hash, so no comparison depends on a key's text. Every dependency is a coroutine: FastAPI would
run a plain function in a thread for every request.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar, get_origin
from weakref import WeakValueDictionary

from cachetools import LRUCache, TTLCache
from fastapi import Depends, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.requests import HTTPConnection

from rookery.clock import Clock
from rookery.controller.context import ControllerContext
from rookery.controller.controller import Controller
from rookery.controller.fleet.agents import KEY_PREFIX, AgentSession
from rookery.controller.service_time import LONGEST_WAIT, LONGEST_WORK_WAIT
from rookery.environments.checks import EnvironmentChecks
from rookery.errors import Forbidden, NotFound, RookeryError, TooManyRequests, Unauthorized, count_of
from rookery.network import source_of
from rookery.server.bodies import BodyInvalid, BoundedRequest
from rookery.server.connections import Connections
from rookery.server.grader_trials import GraderTrials
from rookery.server.readiness import Readiness
from rookery.server.response_room import LARGE_BYTES, SMALL_BYTES, ResponseRoom
from rookery.server.schema_checks import SchemaChecks
from rookery.server.signin import HEADER, SignIns
from rookery.storage.data_dir import hash_key
from rookery.storage.db import Database
from rookery.storage.models import KeyRole, KeyRow
from rookery.storage.repositories import jobs, tenants
from rookery.storage.repositories.jobs import EpisodeStanding
from rookery.storage.store import Writer, read_within
from rookery.turns import SPENT, TENANT, measured

T = TypeVar("T")

REFUSALS = (
    "bodies_refused", "connections_refused", "connections_evicted", "connections_flooding", "keys_failed",
    "keys_limited", "requests_open", "bodies_slow", "readers_slow",
)  # fmt: skip
"""Counters of the metrics page: bodies above a limit, connections closed at once, for another one, or for a head,
requests or frames without end, requests and connections with a wrong key, and those that were refused because their
address had sent too many of them; requests beyond those that a tenant may have open, bodies that came too slowly, and
responses that were not read."""

MINUTE = 60.0

KEY_SECONDS = 1.0
"""A key that was valid is not read again for so long; one that was revoked here is not valid at once."""

OPEN_RETRY_SECONDS = 4.0
"""Time after which a request is repeated, where the tenant has as many open as it may have: each may take long."""

UPLOADS_AT_ONCE = 64
"""Files that workers upload at the same time; further ones wait."""

API: tuple[KeyRole, ...] = ("tenant", "admin")
"""Roles whose keys may use the HTTP APIs."""

KEY_HEADERS = ("X-API-Key", "api-key")
"""Headers with a key where ``Authorization`` has none; the second is that of clients for Azure."""


class FailedKeys:
    """Wrong keys by address in the last minute. An address above the limit may use the keys that were valid here
    before, and those ``known`` from the start, so a client behind the same proxy as an attacker continues."""

    def __init__(self, per_minute: int, known: Iterable[str] = ()) -> None:
        self._limit = per_minute
        self._known = frozenset(known)
        self._failed: TTLCache[str, int] = TTLCache(10_000, MINUTE)
        self._valid: dict[bool, TTLCache[str, None]] = {agent: TTLCache(10_000, 86400.0) for agent in (False, True)}
        """Keys that were valid: those of tenants, and those of episodes, of which there are many more."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By address. A lock lives as long as a request holds it or waits for it."""

    def check(self, address: str, key: str) -> None:
        """Raises :class:`TooManyRequests`."""
        if self._failed.get(address, 0) >= self._limit and not self._was_valid(key):
            raise TooManyRequests(
                f"{count_of(self._limit, 'request')} with a wrong key in a minute; try again later", MINUTE
            )

    @asynccontextmanager
    async def turn(self, address: str, key: str, *, agent: bool = False) -> AsyncIterator[None]:
        """A key, of an ``agent`` or of a tenant, is looked up within, and was valid if that raises no
        :class:`Unauthorized`. Keys of an address that were not valid before are looked up one after another: of those
        that come in one moment no more are tried than one by one. Raises :class:`TooManyRequests`."""
        async with AsyncExitStack() as turn:
            if not self._was_valid(key):
                await turn.enter_async_context(self._turns.setdefault(address, asyncio.Lock()))
            self.check(address, key)
            try:
                yield
            except Unauthorized:
                self.failed(address)
                raise
            self._valid[agent][key] = None

    def failed(self, address: str) -> None:
        """A key that came from the address is wrong."""
        self._failed[address] = self._failed.get(address, 0) + 1

    def _was_valid(self, key: str) -> bool:
        return key in self._known or any(key in keys for keys in self._valid.values())


class Keys:
    """Valid keys by their hash, of tenants and of episodes. Either kind is read in a thread that does nothing else, and
    is known for :data:`KEY_SECONDS`: authentication waits for nobody's work, and delays nobody's. The request is
    charged for the time."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._known: TTLCache[str, KeyRow] = TTLCache(10_000, KEY_SECONDS, clock.monotonic)
        self._revoked = 0
        """Revocations so far: a row that was read before one is read again after it."""
        self._episodes: TTLCache[str, EpisodeStanding] = TTLCache(10_000, KEY_SECONDS, clock.monotonic)
        self._thread, self._agents = ThreadPoolExecutor(1, "keys"), ThreadPoolExecutor(1, "agents' keys")

    async def find(self, key: str) -> KeyRow | None:
        """The row of a key that is valid now, after all revocations that have ended."""
        now = self._clock.time()
        row = self._known.get(key)
        if row is None:
            revoked: int | None = None
            while revoked != self._revoked:
                revoked = self._revoked
                row = await self._read(self._thread, tenants.valid_key, key, now)
            if row is not None:
                self._known[key] = row
        return row if row is not None and (row.expires is None or now < row.expires) else None

    async def stored(self, key: str) -> KeyRow | None:
        """The row of a key that may be valid no more."""
        return await self._read(self._thread, tenants.find_key, key)

    async def episode(self, key: str, episode: str) -> EpisodeStanding | None:
        """The episode that a key is to open, as it is stored. One that has ended is known for a while."""
        found = self._episodes.get(episode)
        if found is None or key not in found.agent_keys.split():
            found = await self._read(self._agents, jobs.find_episode, episode)
            if found is not None and not found.runs_again:
                self._episodes[episode] = found
        return found

    async def _read(self, thread: ThreadPoolExecutor, function: Callable[..., T], *given: Any) -> T:
        taken: list[float] = []
        read = partial(measured, partial(self._database.read, function, *given), taken.append)
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, read)
        finally:
            if (spent := SPENT.get()) is not None:
                spent(sum(taken))

    def forget(self, key: str) -> None:
        """The key was revoked."""
        self._revoked += 1
        self._known.pop(key, None)

    def close(self) -> None:
        self._thread.shutdown()
        self._agents.shutdown()


Cursor = tuple[str | float, ...]
"""Of a row in a list: the values of the columns by which the list is ordered."""

DELETED, DELETING_TENANTS = 1_000, 1_000
"""Deleted files and jobs of a tenant whose cursors are known, and tenants of which some are."""


class DeletedCursors:
    """The cursors of files and fine-tuning jobs that were deleted: their clients continue the lists there. Each tenant
    has its last ones."""

    def __init__(self) -> None:
        self._of: LRUCache[str, LRUCache[str, Cursor]] = LRUCache(DELETING_TENANTS)

    def add(self, tenant: str, id: str, cursor: Cursor) -> None:
        """The file or job ``id`` was deleted from the list that had it there."""
        self._of.setdefault(tenant, LRUCache(DELETED))[id] = cursor

    def find(self, tenant: str, id: str) -> Cursor:
        """Empty for an unknown one."""
        return self._of[tenant].get(id, ()) if tenant in self._of else ()


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """How callers are known: by their keys, or by a browser's sign-in."""

    keys: Keys
    failures: FailedKeys
    signins: SignIns


@dataclass(frozen=True, kw_only=True)
class Checks:
    """Checks of texts of tenants, in separate processes."""

    environments: EnvironmentChecks
    schemas: SchemaChecks
    graders: GraderTrials


@dataclass(frozen=True)
class OpenRequests:
    """The requests that are not answered whole yet, and the memory that they hold."""

    count: Counter[str] = field(default_factory=Counter)
    """By tenant."""
    body_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of request bodies in memory, by tenant."""
    room: ResponseRoom = field(default_factory=ResponseRoom)


@dataclass(frozen=True, kw_only=True)
class ServiceContext:
    """The parts of a running service that routes use."""

    controller: Controller
    connections: Connections
    credentials: Credentials
    checks: Checks
    readiness: Readiness
    refusals: Counter[str]
    """Requests and connections refused at the edge, by the name of the metric."""
    requests: OpenRequests = field(default_factory=OpenRequests)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the service begins to stop, so that streams end and do not delay it."""

    deleted: DeletedCursors = field(default_factory=DeletedCursors)
    uploading: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(UPLOADS_AT_ONCE, "upload"))
    """Threads that write what workers upload, each for as long as that takes."""

    def revoked(self, key: str) -> None:
        """The key of this hash is not valid any more, as is stored."""
        self.credentials.keys.forget(key)
        self.connections.cut(key)

    @property
    def threads(self) -> Writer:
        """Threads in which tenants take turns."""
        return self.context.threads

    @property
    def encoders(self) -> Writer:
        """Threads that write responses, in which tenants take turns: these wait for no other work."""
        return self.context.threads.encoders

    @property
    def openers(self) -> Writer:
        """Threads that open files of artifacts, which may be slow, in which tenants take turns."""
        return self.context.threads.openers

    @property
    def context(self) -> ControllerContext:
        """The services of the controller."""
        return self.controller.context


@dataclass(frozen=True)
class Caller:
    """The sender of a request: the tenant's ``id``, and the role and the hash of the key."""

    id: str
    role: KeyRole
    key: str
    ends: float = math.inf
    """When the key expires, or the browser's sign-in, Unix seconds: what it opened ends then."""


async def service_context(connection: HTTPConnection) -> ServiceContext:
    context: ServiceContext = connection.app.state.context
    return context


def address_of(connection: HTTPConnection) -> str:
    """The address by which limits count a request; empty where it has none."""
    return source_of(connection.client.host) if connection.client is not None else ""


async def authenticate(connection: HTTPConnection, roles: tuple[KeyRole, ...] = API) -> Caller:
    """The owner of the API key that a request or a WebSocket brings, looked up once. Raises :class:`Unauthorized` for a
    missing and for a wrong key, :class:`Forbidden` for a key of another role, :class:`TooManyRequests`."""
    caller: Caller | None = getattr(connection.state, "caller", None)
    service = await service_context(connection)
    key, ends = _key_hash(connection), math.inf
    if caller is None and not key:
        key, ends = service.credentials.signins.key_of(connection)
    if caller is None and key:
        address = address_of(connection)
        async with read_within(), _looked_up(service, address, key):
            row = await service.credentials.keys.find(key)
            if row is None and _key_text(connection).startswith(KEY_PREFIX):
                raise Unauthorized(
                    f"this is an agent's key ({KEY_PREFIX}…): it opens its own episode's base_url, and no other address"
                )
            if row is None:
                raise Unauthorized(refusal_of(await service.credentials.keys.stored(key)))
        ends = min(ends, math.inf if row.expires is None else row.expires)
        caller = await admit(service, connection, Caller(row.tenant, row.role, key, ends))
    if caller is None:
        if HEADER in connection.headers:
            raise Unauthorized("this browser is signed in no more; sign in again with an API key")
        raise Unauthorized("no API key; send 'Authorization: Bearer tml-…' or 'X-API-Key: tml-…'")
    if caller.role not in roles:
        if roles == ("admin",):
            raise Forbidden("this needs the administrator's key (admin.key in the service's data folder)")
        raise Forbidden(f"this is a key of the role {caller.role}; this needs one of the role {' or '.join(roles)}")
    return caller


@asynccontextmanager
async def _looked_up(service: ServiceContext, address: str, key: str, *, agent: bool = False) -> AsyncIterator[None]:
    """As :meth:`FailedKeys.turn`, with the counters of the metrics page."""
    try:
        async with service.credentials.failures.turn(address, key, agent=agent):
            yield
    except (Unauthorized, TooManyRequests) as error:
        service.refusals["keys_failed" if isinstance(error, Unauthorized) else "keys_limited"] += 1
        raise


async def admit(service: ServiceContext, connection: HTTPConnection, caller: Caller) -> Caller:
    """Count a request of a caller whose key is valid, whether or not its role may send it, and a WebSocket by a key of
    the APIs. Raises :class:`TooManyRequests`."""
    connection.state.caller = caller
    TENANT.set(caller.id)
    if (slot := getattr(connection.state, "slot", None)) is not None:
        service.connections.opened(slot, caller.key, caller.ends)
    is_request = connection.scope["type"] == "http"
    if is_request or caller.role in API:
        quotas = service.context.rooms.quotas
        quotas.count_request(caller.id)
        if is_request:
            _open_request(service, connection, caller.id)
        reads = connection.scope.get("method") in ("GET", "HEAD")
        longest = LONGEST_WAIT if reads else LONGEST_WORK_WAIT
        connection.state.came = service.context.clock.monotonic()
        connection.state.account = await quotas.service_time.begin(caller.id, longest)
    return caller


async def admit_ticket(service: ServiceContext, connection: HTTPConnection, ticket: str, digest: str) -> Caller:
    """The tenant in whose name a download ticket for ``digest`` is used, whose request this is: without one, tickets
    would do work that no tenant's limits count. Raises :class:`NotFound`, :class:`TooManyRequests`."""
    tenant = service.controller.tickets.reader(ticket, digest)
    if tenant is None:
        raise NotFound("nothing at this address, or it has expired")
    return await admit(service, connection, Caller(tenant, "tenant", ""))


async def authenticate_agent(connection: HTTPConnection) -> AgentSession:
    """The session of the episode in a request's path, which its key opens; its tenant is the caller. Raises
    :class:`Unauthorized`, :class:`TooManyRequests`, :class:`~rookery.errors.Unavailable`, and
    :class:`~rookery.controller.fleet.agents.EpisodeEnded`."""
    service, key = await service_context(connection), _key_hash(connection)
    if not key:
        raise Unauthorized("no API key; send 'Authorization: Bearer tml-ep-…', the key of the episode")
    address = address_of(connection)
    agents, episode = service.context.rooms.hosts.agents, str(connection.path_params["episode"])
    async with read_within(), _looked_up(service, address, key, agent=True):
        tenant, session = await agents.find(episode, key, partial(service.credentials.keys.episode, key))
    await admit(service, connection, Caller(tenant, "tenant", key))
    if isinstance(session, RookeryError):
        raise session
    connection.state.session = session
    return session


def refusal_of(row: KeyRow | None) -> str:
    """Why a key is not valid. Only who has the text of a key learns that it was valid once: any other is unknown."""
    if row is None:
        return "the API key is unknown: keys begin with tml-; this one is mistyped, or that of another service"
    when, what = (row.revoked, "was revoked") if row.revoked is not None else (row.expires or 0.0, "expired")
    day = time.strftime("%Y-%m-%d %H:%M", time.gmtime(when))
    label = f" {row.label!r}" if row.label else ""
    return f"the API key{label} {what} on {day} UTC; ask the administrator for a new one (rookery tenants key)"


async def make_room(service: ServiceContext, request: Request, size: int = LARGE_BYTES) -> None:
    """Returns when the response of an admitted request has room for ``size`` bytes, for which it asks once. It keeps as
    many as it has until it is sent (:class:`~rookery.server.bodies.TimeKeeper`). Raises :class:`TooManyRequests`."""
    if size > SMALL_BYTES:
        await service.requests.room.take(request.state.caller.id, size)
        request.state.room = size


def room_for(size: int = LARGE_BYTES) -> Any:
    """An entry of ``dependencies=[…]`` of a route whose response may be large, or is made of much: see
    :func:`make_room`."""

    async def roomy(request: Request, service: Service, owner: Owner) -> None:
        await make_room(service, request, size)

    return Depends(roomy)


def _open_request(service: ServiceContext, connection: HTTPConnection, tenant: str) -> None:
    """Count an open request of the tenant; :class:`~rookery.server.bodies.TimeKeeper` counts its end. Raises
    :class:`TooManyRequests`."""
    most = service.connections.per_tenant
    if service.requests.count[tenant] >= most:
        service.refusals["requests_open"] += 1
        opened = count_of(most, "request of yours is", "requests of yours are")
        line = f"{opened} open (a quarter of ROOKERY_CONNECTIONS); end some first"
        raise TooManyRequests(line, OPEN_RETRY_SECONDS)
    service.requests.count[tenant] += 1
    connection.state.open = True


def _key_text(connection: HTTPConnection) -> str:
    """The key in a request's headers; empty without one."""
    scheme, _, key = connection.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return next((given for name in KEY_HEADERS if (given := connection.headers.get(name))), "")


def _key_hash(connection: HTTPConnection) -> str:
    """The hash of the key in a request's headers; empty without one."""
    key = _key_text(connection)
    return hash_key(key) if key else ""


def _needed(dependant: Dependant) -> Iterator[Dependant]:
    """A route's function and the functions on which it depends."""
    yield dependant
    for inner in dependant.dependencies:
        yield from _needed(inner)


def query_parameters(dependant: Dependant) -> dict[str, bool]:
    """By name, the parameters of the address that a route has, and whether each may be given several times."""
    return {
        parameter.alias: get_origin(parameter.field_info.annotation) is list
        for needed in _needed(dependant)
        for parameter in needed.query_params
    }


def misused_parameters(request: Request, known: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """The parameters of a request's address that its route does not have, and those that are given twice though it
    takes one: without a filter that is written wrong, or with the last of two, a list has other rows than those that
    were asked for."""
    given = Counter(name for name, _ in request.query_params.multi_items())
    twice = (name for name, count in given.items() if count > 1 and not known.get(name, True))
    return sorted(given.keys() - known), sorted(twice)


class AuthenticatedRoute(APIRoute):
    """A route that needs an API key and checks it before it reads the body. FastAPI alone would read and parse a JSON
    body before any dependency, so a client without a key could make the service do that work. A parameter of the
    address that the route does not have is refused, as is one that is given twice."""

    strict = True
    """Whether other parameters of the address than the route's are refused."""

    passed = re.compile("(?!)")
    """The names of those that are accepted all the same."""

    @staticmethod
    async def authenticate(request: Request) -> object:
        return await authenticate(request)

    def parameters(self) -> list[str]:
        """The parameters of the address that the route has."""
        return list(query_parameters(self.dependant))

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, body = super().get_route_handler(), self.body_field
        whole = any(body is param for param in self.dependant.body_params)  # not a field of the body
        validate = body.validate if body is not None and whole else None
        known = query_parameters(self.dependant)

        async def handler(request: Request) -> Response:
            await self.authenticate(request)
            unknown, twice = misused_parameters(request, known)
            wrong = [name for name in unknown if not self.passed.fullmatch(name)] if self.strict else []
            if wrong:
                raise RequestValidationError(
                    [{"type": "extra_forbidden", "loc": ("query", name), "msg": ""} for name in wrong]
                )
            if twice:
                line = "given twice; keep one of them"
                raise RequestValidationError(
                    [{"type": "value_error", "loc": ("query", name), "msg": line} for name in twice]
                )
            try:
                return await handle(BoundedRequest(request.scope, request.receive, validate))
            except BodyInvalid as refused:
                raise refused.error from None

        return handler


async def caller(
    connection: HTTPConnection,
    bearer: Annotated[Any, Depends(HTTPBearer(auto_error=False, description="An API key, tml-…"))],
    header: Annotated[Any, Depends(APIKeyHeader(name="X-API-Key", auto_error=False, description="An API key, tml-…"))],
) -> Caller:
    """The sender that :class:`AuthenticatedRoute` authenticated. The other parameters document how a key is sent."""
    return await authenticate(connection)


async def key_holder(connection: HTTPConnection, caller: Annotated[Caller, Depends(caller)]) -> Caller:
    """A caller that sent its key. Raises :class:`Unauthorized` for a browser with a cookie alone, which would else give
    itself another one, without end."""
    if not _key_hash(connection):
        raise Unauthorized("this needs the API key itself, also where the page is signed in")
    return caller


async def administrator(connection: HTTPConnection, caller: Annotated[Caller, Depends(caller)]) -> Caller:
    """Raises :class:`Forbidden` for a tenant's key: the existence of these routes is not secret."""
    return await authenticate(connection, ("admin",))


Service = Annotated[ServiceContext, Depends(service_context)]
Owner = Annotated[Caller, Depends(caller)]
KeyHolder = Annotated[Caller, Depends(key_holder)]
Administrator = Annotated[Caller, Depends(administrator)]
