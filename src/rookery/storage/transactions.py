"""Every query and change of the database as a method: blocking on a database, awaited on a store.

* Each method is one transaction around the function of the same name.
* Methods that answer a tenant's request take ``tenant`` first and see only that tenant's rows: rows of another raise
  :class:`~rookery.errors.NotFound`, or leave the list empty, as if they did not exist.
* Methods without it are the controller's work on ids that it got from such a request or from ``all_unfinished_jobs``.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from functools import partial, wraps
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from sqlalchemy import Connection

from rookery.storage.repositories import episodes, jobs, runs, sessions, tenants, versions

P = ParamSpec("P")
T = TypeVar("T")


class BlockingDatabase(Protocol):
    """A database, whose methods block."""

    def writing(self) -> AbstractContextManager[Connection]: ...

    def reading(self) -> AbstractContextManager[Connection]: ...


class AsyncCalls:
    """A database behind threads, whose methods are awaited."""

    database: Any
    run: Callable[..., Coroutine[Any, Any, Any]]
    """Runs a blocking call that writes."""
    read: Callable[..., Coroutine[Any, Any, Any]]
    """Runs a blocking call that only reads."""


class Transaction(Generic[P, T]):
    """``function`` in a separate transaction, for writing or only for reading."""

    def __init__(self, function: Callable[Concatenate[Connection, P], T], *, writes: bool) -> None:
        @wraps(function)
        def blocking(database: BlockingDatabase, *arguments: P.args, **named: P.kwargs) -> T:
            with database.writing() if writes else database.reading() as connection:
                return function(connection, *arguments, **named)

        self._blocking = blocking
        self._writes = writes

    @overload
    def __get__(self, instance: None, owner: type) -> Callable[Concatenate[Any, P], T]: ...
    @overload
    def __get__(self, instance: AsyncCalls, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, instance: BlockingDatabase, owner: type) -> Callable[P, T]: ...
    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        if instance is None:
            return self._blocking
        if isinstance(instance, AsyncCalls):
            run = instance.run if self._writes else instance.read
            return partial(run, getattr(instance.database, self._blocking.__name__))
        return MethodType(self._blocking, instance)


def _write(function: Callable[Concatenate[Connection, P], T]) -> Transaction[P, T]:
    return Transaction(function, writes=True)


def _read(function: Callable[Concatenate[Connection, P], T]) -> Transaction[P, T]:
    return Transaction(function, writes=False)


class Transactions:
    """The methods that :class:`~rookery.storage.db.Database` and :class:`~rookery.storage.store.Store` share."""

    create_tenant = _write(tenants.create_tenant)
    get_tenant = _read(tenants.get_tenant)
    rename_tenant = _write(tenants.rename_tenant)
    delete_tenant = _write(tenants.delete_tenant)
    half_deleted = _read(tenants.half_deleted)
    limit_tenant = _write(tenants.limit_tenant)
    stored = _read(tenants.stored)
    metadata_bytes = _read(tenants.metadata_bytes)
    list_tenants = _read(tenants.list_tenants)
    tenants_of = _read(tenants.tenants_of)
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
    policies_of = _read(jobs.policies_of)
    get_policy = _read(jobs.get_policy)
    next_lease = _write(jobs.next_lease)
    fence = _write(jobs.fence)

    chosen_jobs = _read(runs.chosen_jobs)
    any_job = _read(runs.any_job)
    rewards_of = _read(runs.rewards_of)
    usage_of = _read(runs.usage_of)
    state_times = _read(runs.state_times)

    version_of_step = _read(episodes.version_of_step)
    groups_page = _read(episodes.groups_page)
    get_group = _read(episodes.get_group)
    get_episode = _read(episodes.get_episode)
    episodes_page = _read(episodes.episodes_page)
    failure_counts = _read(episodes.failure_counts)
    save_train_logprobs = _write(jobs.save_train_logprobs)

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
    version = _read(versions.version)
    retire_version = _write(versions.retire_version)
    rollback = _write(versions.rollback)
    unnamed = _read(versions.unnamed)
    names = _write(versions.names)
    live_hashes = _read(versions.live_hashes)
    add_evaluation = _write(versions.add_evaluation)
    evaluations = _read(versions.evaluations)
    last_evaluation = _read(versions.last_evaluation)
    kept_versions = _read(versions.kept_versions)
    steps_of_versions = _read(versions.steps_of_versions)
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
    count_models = _read(sessions.count_models)
    publish_inflight = _write(sessions.publish_inflight)
    over_models = _read(sessions.over_models)
    end_model = _write(sessions.end_model)
    commit_model = _write(sessions.commit_model)
    add_sampler = _write(sessions.add_sampler)
    get_sampler = _read(sessions.get_sampler)
    ids_of_session = _read(sessions.ids_of_session)
    used_sampler = _write(sessions.used_sampler)
    idle_samplers = _read(sessions.idle_samplers)
    keep_sampler = _write(sessions.keep_sampler)
    release_sampler = _write(sessions.release_sampler)
    save_checkpoint = _write(sessions.save_checkpoint)
    get_checkpoint = _read(sessions.get_checkpoint)
    list_checkpoints = _read(sessions.list_checkpoints)
    count_checkpoints = _read(sessions.count_checkpoints)
    newest_checkpoints = _read(sessions.newest_checkpoints)
    expire_checkpoint = _write(sessions.expire_checkpoint)
    expired_checkpoints = _read(sessions.expired_checkpoints)
    delete_checkpoint = _write(sessions.delete_checkpoint)
    open_future = _write(sessions.open_future)
    finish_future = _write(sessions.finish_future)
    get_future = _read(sessions.get_future)
    open_futures = _read(sessions.open_futures)
    futures_behind = _read(sessions.futures_behind)
    drop_futures = _write(sessions.drop_futures)
