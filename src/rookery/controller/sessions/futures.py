"""Operations that were acknowledged and have no result yet, and results that no client has fetched.

* An operation is durable before it is acknowledged. Sending it again, with the same id, returns the same future;
  another operation under a used id is refused. One that was stored but not acknowledged starts when it is sent again.
* A result is durable before any client gets it, and waiting clients get it at once. A database that refuses it is asked
  again until it accepts: an operation is never executed twice.
* Results outlive this process until they expire, or some time after they were fetched.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import dataclass, field
from itertools import islice, takewhile

import msgspec
from cachetools import LRUCache

from rookery.aio import wait_event
from rookery.controller.services import Services
from rookery.controller.sessions.operations import (
    AnyOperation,
    AnyResult,
    InvalidOperation,
    OperationFailed,
    SaveSampler,
    decode_operation,
    decode_result,
    encode,
)
from rookery.errors import NotFound, RookeryError, StorageFull, Unavailable, UserError
from rookery.storage.columns import DELETED_AT_ONCE
from rookery.storage.models import FutureRow
from rookery.storage.repositories import sessions

log = logging.getLogger("rookery.controller.sessions.futures")

INLINE_BYTES = 128 << 10
"""A larger operation is encoded and hashed in a thread."""

KEPT_BYTES = 64 << 20
"""Results kept in memory besides the database: a client fetches its result within moments."""


FETCHED_AT_ONCE = 1000
"""Fetched results that are named in one transaction."""


class FutureExpired(RookeryError):
    """The result existed, perhaps, and is deleted; the client can send the operation again."""

    status = 410


@dataclass(frozen=True)
class QueueStatus:
    """Why a future has no result yet."""

    paused: bool = False
    """It waits for room or for its client, not for its own computation."""
    reason: str = ""


CLIENT_AWAY = QueueStatus(paused=True, reason="waits for its client, whose heartbeats stopped; the next one resumes it")


@dataclass(eq=False)
class Future:
    id: str
    tenant: str
    digest: str
    seq: int = 0
    result: AnyResult | None = None
    size: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    stored: asyncio.Future[None] | None = None
    """Done when the operation is durable."""
    unstored: str = ""
    """The reason why its result is not stored yet: it is computed."""


class Futures:
    def __init__(self, services: Services, poll_seconds: float) -> None:
        self._services = services
        self._poll_seconds = poll_seconds
        self._open: dict[str, Future] = {}
        """Futures without a result that this process executes, or is about to."""
        self._kept: LRUCache[str, Future] = LRUCache(KEPT_BYTES, getsizeof=lambda future: future.size)
        self._fetched: dict[str, float] = {}
        """When a client fetched each result for the first time (monotonic seconds), the longest ago first."""

    def __len__(self) -> int:
        """Futures without a result."""
        return len(self._open)

    async def open(
        self, tenant: str, id: str, operation: AnyOperation, run: str | None = None, seq: int = 0
    ) -> tuple[Future, bool]:
        """The future of ``operation``, durable, and whether the caller must start it. Raises :class:`UserError` if the
        id was used for another operation."""
        services = self._services
        digest, call = await self._encoded(operation)
        known = self._open.get(id) or self._kept.get(id)
        if known is None:
            future = Future(id, tenant, digest, seq)
            future.stored = asyncio.get_running_loop().create_future()
            self._open[id] = future
            row = FutureRow(
                id=id, tenant=tenant, model=run, seq=seq, digest=digest, call=call, outcome=None,
                created=services.clock.time(), finished=None,
            )  # fmt: skip
            try:
                row, _ = await services.store.write(sessions.open_future, row)
            except BaseException as error:
                del self._open[id]
                future.stored.set_exception(error)
                future.stored.exception()  # marks it as retrieved: perhaps no other call waits for it
                raise
            future.stored.set_result(None)
            if row.outcome is None and (row.digest, row.tenant) == (digest, tenant):
                return future, True  # new, or an earlier attempt did not hear that it is durable
            del self._open[id]
            known = self._from_row(row)
        elif known.stored is not None:
            await asyncio.shield(known.stored)
        if known.digest != digest or known.tenant != tenant:
            raise UserError(f"request {id} was sent before with another content; number your requests from 1 on")
        return known, False

    async def digest(self, operation: AnyOperation) -> str:
        """A digest that an operation and its repetition have in common."""
        return (await self._encoded(operation))[0]

    async def _encoded(self, operation: AnyOperation) -> tuple[str, bytes]:
        if operation.size <= INLINE_BYTES:
            return _digest(operation)
        return await self._services.threads(_digest, operation)

    def reopen(self, row: FutureRow) -> tuple[Future, AnyOperation]:
        """An operation that an earlier process acknowledged and did not finish."""
        future = self._open.setdefault(row.id, Future(row.id, row.tenant, row.digest, row.seq))
        return future, decode_operation(row.call)

    async def finish(self, future: Future, result: AnyResult, *, trace: bool = True) -> None:
        """Store ``result``, again and again until the database accepts it, and deliver it. Without ``trace`` in the
        training run's state the operation need not be replayed."""
        services, content = self._services, encode(result)
        while True:
            try:
                now = services.clock.time()
                await services.store.write(sessions.finish_future, future.id, content, now, trace=trace)
            except (StorageFull, Unavailable) as error:
                reason = f"finished, but the result is not stored yet: {error}"
                if not future.unstored:
                    log.error("operation %s: %s", future.id, reason, extra={"tenant": future.tenant})
                future.unstored = reason
                await services.clock.sleep(services.settings.worker.heartbeat_seconds)
            else:
                break
        self.deliver(future, result, len(content))

    def deliver(self, future: Future, result: AnyResult, size: int) -> None:
        """Give ``result``, which is durable, to the clients that wait for it."""
        if future.result is None:
            future.result, future.size = result, size
            self._open.pop(future.id, None)
            self._keep(future)
            future.done.set()

    async def wait(self, tenant: str, id: str) -> AnyResult | Future:
        """The result as soon as it is there, or after ``poll_seconds`` the future without one. Raises
        :class:`FutureExpired`."""
        future = self._open.get(id) or self._kept.get(id)
        if future is None:
            try:
                row = await self._services.store.read(sessions.get_future, tenant, id)
                future = self._open.get(id) or self._kept.get(id) or self._from_row(row)
            except NotFound:
                pass
        if future is None or future.tenant != tenant:
            raise FutureExpired(f"no request {id}: its result has expired, or was fetched long ago")
        if future.result is None and not await wait_event(future.done, self._poll_seconds):
            return future
        assert future.result is not None
        self._fetched.setdefault(id, self._services.clock.monotonic())
        return future.result

    async def drop(self, finished: float, fetched: float) -> None:
        """Delete the stored results that are from before ``finished``, or were fetched more than ``fetched`` seconds
        ago. Those that a model may have to replay stay, and are tried again after so many seconds."""
        store, clock, count = self._services.store, self._services.clock, FETCHED_AT_ONCE
        before = clock.monotonic() - fetched
        while count == FETCHED_AT_ONCE:
            found = takewhile(lambda known: known[1] < before, self._fetched.items())
            ids = stay = [id for id, _ in islice(found, FETCHED_AT_ONCE)]
            count = len(ids)
            for id in ids:
                del self._fetched[id]
            try:
                while await store.write(sessions.drop_futures, finished, ids) == DELETED_AT_ONCE:
                    pass
                stay = await store.read(sessions.stored_futures, ids) if ids else []
            finally:
                for id in stay:
                    self._fetched.setdefault(id, clock.monotonic())

    def find(self, tenant: str, id: str) -> Future | None:
        """An open future of this tenant."""
        future = self._open.get(id)
        return future if future is not None and future.tenant == tenant else None

    async def known(self, tenant: str, id: str) -> bool:
        """Whether this tenant's request was accepted before, and its result has not expired."""
        if (future := self._open.get(id) or self._kept.get(id)) is not None:
            return future.tenant == tenant
        try:
            await self._services.store.read(sessions.get_future, tenant, id)
        except NotFound:
            return False
        return True

    def _from_row(self, row: FutureRow) -> Future:
        """A stored future; without a result it is not open here, since nothing executes it."""
        future = Future(row.id, row.tenant, row.digest, row.seq)
        if row.outcome is not None:
            future.result, future.size = decode_result(row.outcome), len(row.outcome)
            future.done.set()
            self._keep(future)
        return future

    def _keep(self, future: Future) -> None:
        if future.size <= KEPT_BYTES:
            self._kept[future.id] = future


def failure(future: Future, error: BaseException) -> OperationFailed:
    """The result of an operation that raised ``error``."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, RookeryError):
        return OperationFailed(error=str(error), category="user" if error.status < 500 else "server")
    log.error("operation %s", future.id, exc_info=error, extra={"tenant": future.tenant})
    return OperationFailed(error=f"internal error ({type(error).__name__}); the log has it", category="server")


def _digest(operation: AnyOperation) -> tuple[str, bytes]:
    """A hash, the same for an operation and its repetition, and its encoding. The SDK numbers samplers again each time
    it repeats a request that makes one; the first number stays."""
    call = same = encode(operation)
    if isinstance(operation, SaveSampler):
        same = encode(msgspec.structs.replace(operation, sampler=""))
    elif isinstance(operation, InvalidOperation) and operation.digest:
        return operation.digest, call
    return hashlib.sha256(same).hexdigest(), call
