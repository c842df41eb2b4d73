"""Calls that were acknowledged and are not answered yet, and the answers that nobody has fetched.

* A call is durable before it is acknowledged. The same call again, by its id, is the same future; another one under a
  used id is refused. One that the database took and did not say so is begun when it is sent again.
* An outcome is durable before anybody is told. Whoever waits is told the moment it is there. A database that refuses it
  is asked again until it takes it: what came of a call is not found out twice.
* Outcomes survive this process, until they expire.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from rookery.aio import Clock
from rookery.controller.sessions.operations import AnyCall, AnyOutcome, SaveSampler, calls, encode, outcomes
from rookery.errors import NotFound, RookeryError, StorageFull, Unavailable, UserError
from rookery.storage.rows import FutureRow
from rookery.storage.store import Store

log = logging.getLogger("rookery.controller.sessions.futures")

KEPT_BYTES = 64 << 20
"""Outcomes kept in memory beside the database: a client fetches its own within moments."""


class FutureExpired(RookeryError):
    """It was there, perhaps, and is not any more: what it was made from can be sent again."""

    status = 410


@dataclass(frozen=True)
class PendingOperations:
    """Why a future has no outcome yet."""

    paused: bool = False
    """It waits for room, not for its own computation."""
    reason: str = ""


@dataclass(eq=False)
class Future:
    id: str
    tenant: str
    digest: str
    seq: int = 0
    outcome: AnyOutcome | None = None
    size: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    stored: asyncio.Future[None] | None = None
    """Done when the call is durable."""
    why: Callable[[], PendingOperations] = PendingOperations


class Futures:
    def __init__(self, store: Store, clock: Clock, again_seconds: float) -> None:
        """A database that refused an outcome is asked again after ``again_seconds``."""
        self._store = store
        self._clock = clock
        self._again_seconds = again_seconds
        self._open: dict[str, Future] = {}
        """Those that somebody in this process carries out, or is about to."""
        self._kept: OrderedDict[str, Future] = OrderedDict()
        self._bytes = 0
        self._on_told: Callable[[Future], None] = lambda future: None

    def on_told(self, callback: Callable[[Future], None]) -> None:
        """``callback`` hears of each future that has its outcome now."""
        self._on_told = callback

    def __len__(self) -> int:
        """Futures without an outcome."""
        return len(self._open)

    def waits(self, model: str) -> bool:
        """Whether a call of the model's has no outcome, or is about to be durable."""
        return any(id.startswith(f"{model}/") for id in self._open)

    async def open(
        self, tenant: str, id: str, call: AnyCall, model: str | None = None, seq: int = 0
    ) -> tuple[Future, bool]:
        """The future of ``call``, durable, and whether it is to be begun: nobody does it yet. Raises
        :class:`UserError` where the id was used for another call."""
        content = encode(call)
        digest = _digest(call)
        known = self._open.get(id) or self._kept.get(id)
        if known is None:
            future = Future(id, tenant, digest, seq)
            future.stored = asyncio.get_running_loop().create_future()
            self._open[id] = future
            row = FutureRow(
                id=id, tenant=tenant, model=model, seq=seq, digest=digest, call=content, outcome=None,
                created=self._clock.time(), finished=None,
            )  # fmt: skip
            try:
                row, _ = await self._store.open_future(row)
            except BaseException as error:
                del self._open[id]
                future.stored.set_exception(error)
                future.stored.exception()  # perhaps nobody waits
                raise
            future.stored.set_result(None)
            if row.outcome is None and (row.digest, row.tenant) == (digest, tenant):
                return future, True  # new, or an earlier attempt was not told that it is durable
            del self._open[id]
            known = self._remember(row)
        elif known.stored is not None:
            await asyncio.shield(known.stored)
        if known.digest != digest or known.tenant != tenant:
            raise UserError(f"request {id} was sent before with another content; number your requests from 1 on")
        return known, False

    def recall(self, row: FutureRow) -> tuple[Future, AnyCall]:
        """A call that an earlier process acknowledged and did not answer."""
        future = self._open.get(row.id)
        if future is None:
            future = self._open[row.id] = Future(row.id, row.tenant, row.digest, row.seq)
        return future, calls.decode(row.call)

    async def settle(self, future: Future, outcome: AnyOutcome, *, trace: bool = True) -> None:
        """Make ``outcome`` durable and tell: tried until the database takes it. Without a ``trace`` in its model the
        call need not be replayed."""
        content, refused = encode(outcome), False
        while True:
            try:
                now = self._clock.time()
                await self._store.finish_future(future.id, content, now, trace=trace)
            except (StorageFull, Unavailable) as trouble:
                reason = f"it is over, but what came of it is not stored yet: {trouble}"
                if not refused:
                    log.error("call %s: %s", future.id, reason, extra={"tenant": future.tenant})
                refused = True
                future.why = partial(PendingOperations, reason=reason)
                await self._clock.sleep(self._again_seconds)
            else:
                break
        self.tell(future, outcome, len(content))

    def tell(self, future: Future, outcome: AnyOutcome, size: int) -> None:
        """``outcome`` is durable already."""
        if future.outcome is None:
            future.outcome, future.size = outcome, size
            self._open.pop(future.id, None)
            self._keep(future)
            future.done.set()
            self._on_told(future)

    async def wait(self, tenant: str, id: str, seconds: float) -> AnyOutcome | PendingOperations:
        """The outcome as soon as it is there, or after ``seconds`` why it is not. Raises :class:`Gone`."""
        future = self._open.get(id) or self._kept.get(id)
        if future is None:
            try:
                row = await self._store.get_future(tenant, id)
            except NotFound:
                raise FutureExpired(f"no request {id}: its result has expired, or was fetched long ago") from None
            future = self._open.get(id) or self._kept.get(id) or self._remember(row)
        if future.tenant != tenant:
            raise FutureExpired(f"no request {id}: its result has expired, or was fetched long ago")
        if future.outcome is None:
            try:
                async with asyncio.timeout(seconds):
                    await future.done.wait()
            except TimeoutError:
                return future.why()
        assert future.outcome is not None
        return future.outcome

    async def find(self, tenant: str, id: str) -> Future | None:
        """An open future of this tenant's."""
        future = self._open.get(id)
        return future if future is not None and future.tenant == tenant else None

    def fetched(self, tenant: str, ids: Sequence[str]) -> None:
        """The client has these results: they need not be in memory any more."""
        for id in ids:
            future = self._kept.get(id)
            if future is not None and future.tenant == tenant:
                del self._kept[id]
                self._bytes -= future.size

    def _remember(self, row: FutureRow) -> Future:
        """As it is stored. Without an outcome it is nobody's here: it is asked for anew when it is begun."""
        future = Future(row.id, row.tenant, row.digest, row.seq)
        if row.outcome is not None:
            future.outcome, future.size = outcomes.decode(row.outcome), len(row.outcome)
            future.done.set()
            self._keep(future)
        return future

    def _keep(self, future: Future) -> None:
        self._kept[future.id] = future
        self._bytes += future.size
        while self._bytes > KEPT_BYTES:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.size


def _digest(call: AnyCall) -> str:
    """The same for a call and its repetition. The SDK counts its samplers anew each time it sends a call that makes
    one: the first number is the one that stays."""
    if isinstance(call, SaveSampler):
        call = msgspec.structs.replace(call, sampler="")
    return hashlib.sha256(encode(call)).hexdigest()
