"""Every query and change of the database, as methods of :class:`~rookery.storage.db.Database` and :class:`Store`.

* ``database.get_job(tenant, job)`` blocks; ``await store.get_job(tenant, job)`` runs the same in the writer, where
  calls keep their order, and a call that was handed over is carried out, also when its caller is cancelled.
* Each method is one transaction around the function of the same name.
* Methods that answer a tenant's request take ``tenant`` first and see only that tenant's rows: rows of another raise
  :class:`~rookery.errors.NotFound`, or leave the list empty, as if they did not exist.
* Methods without it are the controller's own work on ids that it got from such a request or from
  ``all_unfinished_jobs``.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from sqlalchemy import Connection

from rookery.storage import groups, jobs, sessions, tenants, versions
from rookery.storage.writer import Writer

if TYPE_CHECKING:
    from rookery.storage.db import Database

P = ParamSpec("P")
T = TypeVar("T")


class Transaction(Generic[P, T]):
    """``function`` in a separate transaction, for writing or only for reading."""

    def __init__(self, function: Callable[Concatenate[Connection, P], T], *, writes: bool) -> None:
        @wraps(function)
        def blocking(database: Database, *arguments: P.args, **named: P.kwargs) -> T:
            with database.writing() if writes else database.reading() as connection:
                return function(connection, *arguments, **named)

        @wraps(function)
        def deferred(store: Store, *arguments: P.args, **named: P.kwargs) -> Coroutine[Any, Any, T]:
            return store.run(getattr(store.database, function.__name__), *arguments, **named)

        self._blocking, self._deferred = blocking, deferred

    @overload
    def __get__(self, instance: None, owner: type) -> Callable[Concatenate[Any, P], T]: ...
    @overload
    def __get__(self, instance: Store, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, instance: Database, owner: type) -> Callable[P, T]: ...
    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        if instance is None:
            return self._blocking
        return MethodType(self._deferred if isinstance(instance, Store) else self._blocking, instance)


def _write(function: Callable[Concatenate[Connection, P], T]) -> Transaction[P, T]:
    return Transaction(function, writes=True)


def _read(function: Callable[Concatenate[Connection, P], T]) -> Transaction[P, T]:
    return Transaction(function, writes=False)


class Transactions:
    """The methods that :class:`~rookery.storage.db.Database` and :class:`Store` share."""

    create_tenant = _write(tenants.create_tenant)
    get_tenant = _read(tenants.get_tenant)
    limit_tenant = _write(tenants.limit_tenant)
    list_tenants = _read(tenants.list_tenants)
    add_key = _write(tenants.add_key)
    keys = _read(tenants.keys)
    revoke_key = _write(tenants.revoke_key)
    tenant_of_key = _read(tenants.tenant_of_key)
    add_upload = _write(tenants.add_upload)
    get_upload = _read(tenants.get_upload)
    add_event = _write(tenants.add_event)
    events = _read(tenants.events)
    save_usage = _write(tenants.save_usage)
    tenant_usage = _read(tenants.tenant_usage)
    job_usage = _read(tenants.job_usage)
    usage_totals = _read(tenants.usage_totals)
    fleet_usage = _read(tenants.fleet_usage)

    submit_job = _write(jobs.submit_job)
    get_job = _read(jobs.get_job)
    list_jobs = _read(jobs.list_jobs)
    all_unfinished_jobs = _read(jobs.all_unfinished_jobs)
    unfinished_job_ids = _read(jobs.unfinished_job_ids)
    set_job_state = _write(jobs.set_job_state)
    count_start = _write(jobs.count_start)
    clear_starts = _write(jobs.clear_starts)
    save_counters = _write(jobs.save_counters)
    add_policy = _write(jobs.add_policy)
    policies = _read(jobs.policies)
    all_policies = _read(jobs.all_policies)
    get_policy = _read(jobs.get_policy)
    next_lease = _write(jobs.next_lease)
    fence = _write(jobs.fence)

    add_groups = _write(groups.add_groups)
    save_turns = _write(groups.save_turns)
    finish_episode = _write(groups.finish_episode)
    finish_group = _write(groups.finish_group)
    drop_groups = _write(groups.drop_groups)
    open_groups = _read(groups.open_groups)
    ready_groups = _read(groups.ready_groups)
    group_counts = _read(groups.group_counts)
    recent_episodes = _read(groups.recent_episodes)
    trim_episodes = _write(groups.trim_episodes)

    commit_step = _write(versions.commit_step)
    save_step = _write(versions.save_step)
    steps = _read(versions.steps)
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
    join_sampler = _write(sessions.join_sampler)
    idle_samplers = _read(sessions.idle_samplers)
    keep_sampler = _write(sessions.keep_sampler)
    release_sampler = _write(sessions.release_sampler)
    save_checkpoint = _write(sessions.save_checkpoint)
    get_checkpoint = _read(sessions.get_checkpoint)
    list_checkpoints = _read(sessions.list_checkpoints)
    expire_checkpoint = _write(sessions.expire_checkpoint)
    expired_checkpoints = _read(sessions.expired_checkpoints)
    delete_checkpoint = _write(sessions.delete_checkpoint)
    count_checkpoints = _read(sessions.count_checkpoints)
    open_future = _write(sessions.open_future)
    finish_future = _write(sessions.finish_future)
    get_future = _read(sessions.get_future)
    open_futures = _read(sessions.open_futures)
    futures_behind = _read(sessions.futures_behind)
    ended_samples = _read(sessions.ended_samples)
    drop_futures = _write(sessions.drop_futures)


class Store(Transactions):
    """``database`` behind ``writer``."""

    def __init__(self, database: Database, writer: Writer) -> None:
        self.database = database
        self._writer = writer

    def run(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> Coroutine[Any, Any, T]:
        """Run any blocking call in the writer, such as one of the artifact store or several of :attr:`database`."""
        return self._writer(call, *arguments, **named)
