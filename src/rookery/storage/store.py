"""Every query and change of the database, as methods of :class:`~rookery.storage.db.Database` and :class:`Store`, and
the writer thread that runs them one after another.

* ``database.get_job(tenant, job)`` blocks; ``await store.get_job(tenant, job)`` runs the same in the writer, where
  calls keep their order, and a call that was handed over is carried out, also when its caller is cancelled.
* Each method is one transaction around the function of the same name.
* Methods that answer a tenant's request take ``tenant`` first and see only that tenant's rows: rows of another raise
  :class:`~rookery.errors.NotFound`, or leave the list empty, as if they did not exist.
* Methods without it are the controller's own work on ids that it got from such a request or from
  ``all_unfinished_jobs``.
* Database calls that wait in the writer at the same time share one transaction; each returns once it is durable.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from queue import Empty, SimpleQueue
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload, runtime_checkable

from sqlalchemy import Connection

from rookery.errors import StorageFull
from rookery.storage.repositories import jobs, sessions, tenants, versions

if TYPE_CHECKING:
    from rookery.storage.db import Database

P = ParamSpec("P")
T = TypeVar("T")


class Writer(Protocol):
    """Runs blocking calls one after another, off the event loop; a submitted call runs even if its caller is
    cancelled."""

    def __call__(self, call: Callable[..., T], *arguments: Any, **named: Any) -> Coroutine[Any, Any, T]: ...


GROUPED_CALLS = 64
"""Largest number of database calls in one transaction: it bounds how long the first of them waits for the last."""


@runtime_checkable
class BatchTransaction(Protocol):
    def batch_transaction(self) -> AbstractContextManager[None]:
        """Within the context, this thread's calls of the object's methods become durable together, at the end."""
        ...


@dataclass(frozen=True, eq=False)
class _Call:
    run: Callable[[], Any]
    store: BatchTransaction | None
    """The database whose method it is; None for calls that cannot share a transaction."""
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]

    def attempt(self) -> tuple[Any, BaseException | None]:
        """The result or the error."""
        try:
            return self.run(), None
        except BaseException as error:  # the caller handles it, not this thread
            return None, error

    def settle(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():  # the caller was cancelled
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class StorageWriter:
    """One thread, so a transaction never waits for another of this process. If the disk has no room for all calls of a
    shared transaction, each call gets a separate one."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="writer", daemon=True)
        self._closed = False
        self._thread.start()

    async def __call__(self, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        if self._closed:
            raise RuntimeError("the storage writer is closed")
        loop = asyncio.get_running_loop()
        owner = getattr(call, "__self__", None)
        store = owner if isinstance(owner, BatchTransaction) else None
        future: asyncio.Future[T] = loop.create_future()
        self._queue.put(_Call(partial(call, *arguments, **named), store, loop, future))
        return await future

    def close(self) -> None:
        """Return when every submitted call has run."""
        self._closed = True
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        waiting: deque[_Call | None] = deque()
        while True:
            if not waiting:
                waiting.append(self._queue.get())
            with suppress(Empty):
                while True:
                    waiting.append(self._queue.get_nowait())
            first = waiting.popleft()
            if first is None:
                return
            calls = [first]
            while waiting and len(calls) < GROUPED_CALLS and _share(first, waiting[0]):
                calls.append(waiting.popleft())  # type: ignore[arg-type]
            for call, outcome in zip(calls, _execute(calls), strict=True):
                with suppress(RuntimeError):  # its loop is closed: nobody waits for it
                    call.loop.call_soon_threadsafe(call.settle, *outcome)


def _execute(calls: list[_Call]) -> list[tuple[Any, BaseException | None]]:
    """Run the calls in one transaction; their results and errors."""
    store = calls[0].store
    if len(calls) == 1 or store is None:
        return [call.attempt() for call in calls]
    try:
        with store.batch_transaction():
            return [call.attempt() for call in calls]
    except StorageFull:  # nothing is durable: calls that need no room may still succeed
        return [call.attempt() for call in calls]
    except Exception as error:  # nothing is known to be durable
        return [(None, error) for _ in calls]


def _share(first: _Call, other: _Call | None) -> bool:
    return other is not None and first.store is not None and first.store is other.store


class Transaction(Generic[P, T]):
    """``function`` in a separate transaction, for writing or only for reading."""

    def __init__(self, function: Callable[Concatenate[Connection, P], T], *, writes: bool) -> None:
        @wraps(function)
        def blocking(database: Database, *arguments: P.args, **named: P.kwargs) -> T:
            with database.writing() if writes else database.reading() as connection:
                return function(connection, *arguments, **named)

        self._blocking = blocking
        self._writes = writes

    @overload
    def __get__(self, instance: None, owner: type) -> Callable[Concatenate[Any, P], T]: ...
    @overload
    def __get__(self, instance: Store, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, instance: Database, owner: type) -> Callable[P, T]: ...
    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        if instance is None:
            return self._blocking
        if isinstance(instance, Store):
            run = instance.run if self._writes else instance.read
            return partial(run, getattr(instance.database, self._blocking.__name__))
        return MethodType(self._blocking, instance)


def _write(function: Callable[Concatenate[Connection, P], T]) -> Transaction[P, T]:
    return Transaction(function, writes=True)


def _read(function: Callable[Concatenate[Connection, P], T]) -> Transaction[P, T]:
    return Transaction(function, writes=False)


class Transactions:
    """The methods that :class:`~rookery.storage.db.Database` and :class:`Store` share."""

    create_tenant = _write(tenants.create_tenant)
    get_tenant = _read(tenants.get_tenant)
    rename_tenant = _write(tenants.rename_tenant)
    delete_tenant = _write(tenants.delete_tenant)
    half_deleted = _read(tenants.half_deleted)
    limit_tenant = _write(tenants.limit_tenant)
    stored = _read(tenants.stored)
    metadata_bytes = _read(tenants.metadata_bytes)
    list_tenants = _read(tenants.list_tenants)
    add_key = _write(tenants.add_key)
    keys = _read(tenants.keys)
    revoke_key = _write(tenants.revoke_key)
    find_key = _read(tenants.find_key)
    valid_key = _read(tenants.valid_key)
    add_upload = _write(tenants.add_upload)
    get_upload = _read(tenants.get_upload)
    uploads = _read(tenants.uploads)
    delete_upload = _write(tenants.delete_upload)
    add_event = _write(tenants.add_event)
    events = _read(tenants.events)
    save_usage = _write(tenants.save_usage)
    tenant_usage = _read(tenants.tenant_usage)
    job_usage = _read(tenants.job_usage)
    usage_totals = _read(tenants.usage_totals)
    fleet_usage = _read(tenants.fleet_usage)
    tokens_of_day = _read(tenants.tokens_of_day)

    submit_job = _write(jobs.submit_job)
    get_job = _read(jobs.get_job)
    find_job = _read(jobs.find_job)
    list_jobs = _read(jobs.list_jobs)
    all_unfinished_jobs = _read(jobs.all_unfinished_jobs)
    unfinished_job_ids = _read(jobs.unfinished_job_ids)
    set_job_state = _write(jobs.set_job_state)
    count_crash = _write(jobs.count_crash)
    clear_crashes = _write(jobs.clear_crashes)
    save_counters = _write(jobs.save_counters)
    policies = _read(jobs.policies)
    all_policies = _read(jobs.all_policies)
    get_policy = _read(jobs.get_policy)
    next_lease = _write(jobs.next_lease)
    fence = _write(jobs.fence)

    add_groups = _write(jobs.add_groups)
    save_turns = _write(jobs.save_turns)
    finish_episode = _write(jobs.finish_episode)
    finish_group = _write(jobs.finish_group)
    drop_groups = _write(jobs.drop_groups)
    open_groups = _read(jobs.open_groups)
    ready_groups = _read(jobs.ready_groups)
    recent_episodes = _read(jobs.recent_episodes)
    trim_episodes = _write(jobs.trim_episodes)
    drop_old_groups = _write(jobs.drop_old_groups)
    delete_job = _write(jobs.delete_job)

    commit_step = _write(versions.commit_step)
    save_step = _write(versions.save_step)
    steps = _read(versions.steps)
    last_step = _read(versions.last_step)
    recent_rewards = _read(versions.recent_rewards)
    version = _read(versions.version)
    retire_version = _write(versions.retire_version)
    rollback = _write(versions.rollback)
    unnamed = _read(versions.unnamed)
    names = _write(versions.names)
    live_hashes = _read(versions.live_hashes)
    add_evaluation = _write(versions.add_evaluation)
    evaluations = _read(versions.evaluations)
    versions = _read(versions.versions)  # last: the name of the module is hidden from here on

    add_session = _write(sessions.add_session)
    get_session = _read(sessions.get_session)
    list_sessions = _read(sessions.list_sessions)
    seen_session = _write(sessions.seen_session)
    finish_session = _write(sessions.finish_session)
    silent_sessions = _read(sessions.silent_sessions)
    add_model = _write(sessions.add_model)
    get_model = _read(sessions.get_model)
    list_models = _read(sessions.list_models)
    publish_inflight = _write(sessions.publish_inflight)
    over_models = _read(sessions.over_models)
    end_model = _write(sessions.end_model)
    commit_model = _write(sessions.commit_model)
    add_sampler = _write(sessions.add_sampler)
    get_sampler = _read(sessions.get_sampler)
    list_samplers = _read(sessions.list_samplers)
    used_sampler = _write(sessions.used_sampler)
    idle_samplers = _read(sessions.idle_samplers)
    keep_sampler = _write(sessions.keep_sampler)
    release_sampler = _write(sessions.release_sampler)
    save_checkpoint = _write(sessions.save_checkpoint)
    get_checkpoint = _read(sessions.get_checkpoint)
    list_checkpoints = _read(sessions.list_checkpoints)
    expire_checkpoint = _write(sessions.expire_checkpoint)
    expired_checkpoints = _read(sessions.expired_checkpoints)
    delete_checkpoint = _write(sessions.delete_checkpoint)
    open_future = _write(sessions.open_future)
    finish_future = _write(sessions.finish_future)
    get_future = _read(sessions.get_future)
    open_futures = _read(sessions.open_futures)
    futures_behind = _read(sessions.futures_behind)
    drop_futures = _write(sessions.drop_futures)


class Store(Transactions):
    """``database`` behind ``writer``."""

    def __init__(
        self, database: Database, writer: Writer, transfers: Writer | None = None, readers: Writer | None = None
    ) -> None:
        """``transfers`` runs calls of artifacts that lie behind a network; else the writer does. ``readers`` runs calls
        that only read: they see what is durable and wait for nobody's changes; else the writer does."""
        self.database = database
        self._writer = writer
        self.read: Writer = readers or writer
        self.transfer: Writer = transfers or writer
        """Runs calls that read or write whole artifacts, one after another."""

    def run(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> Coroutine[Any, Any, T]:
        """Run any blocking call in the writer, such as one of the artifact store or several of :attr:`database`."""
        return self._writer(call, *arguments, **named)
