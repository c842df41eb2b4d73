"""The database as the controller calls it: ``await store.get_job(tenant, job)``.

Each method of :class:`Store` runs the method of :class:`~rookery.storage.database.Database` of the same name in the
writer: calls keep their order, and a call that was handed over is carried out, also when its caller is cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from rookery.storage.database import Database
from rookery.storage.writer import Writer

P = ParamSpec("P")
T = TypeVar("T")


def _written(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Store, P], Coroutine[Any, Any, T]]:
    name = method.__name__

    def call(self: Store, *arguments: P.args, **named: P.kwargs) -> Coroutine[Any, Any, T]:
        return self.run(getattr(self.database, name), *arguments, **named)

    call.__name__, call.__doc__ = name, method.__doc__
    return call


class Store:
    """``database`` behind ``writer``."""

    def __init__(self, database: Database, writer: Writer) -> None:
        self.database = database
        self._writer = writer

    def run(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> Coroutine[Any, Any, T]:
        """Run any blocking call in the writer, such as one of the artifact store or several of :attr:`database`."""
        return self._writer(call, *arguments, **named)

    create_tenant = _written(Database.create_tenant)
    get_tenant = _written(Database.get_tenant)
    list_tenants = _written(Database.list_tenants)
    add_key = _written(Database.add_key)
    keys = _written(Database.keys)
    revoke_key = _written(Database.revoke_key)
    tenant_of_key = _written(Database.tenant_of_key)
    add_upload = _written(Database.add_upload)
    get_upload = _written(Database.get_upload)
    add_event = _written(Database.add_event)
    events = _written(Database.events)

    submit_job = _written(Database.submit_job)
    get_job = _written(Database.get_job)
    list_jobs = _written(Database.list_jobs)
    all_unfinished_jobs = _written(Database.all_unfinished_jobs)
    unfinished_job_ids = _written(Database.unfinished_job_ids)
    set_job_state = _written(Database.set_job_state)
    save_counters = _written(Database.save_counters)
    add_policy = _written(Database.add_policy)
    policies = _written(Database.policies)
    all_policies = _written(Database.all_policies)
    get_policy = _written(Database.get_policy)
    next_lease = _written(Database.next_lease)
    fence = _written(Database.fence)

    add_groups = _written(Database.add_groups)
    save_turns = _written(Database.save_turns)
    finish_episode = _written(Database.finish_episode)
    finish_group = _written(Database.finish_group)
    drop_groups = _written(Database.drop_groups)
    open_groups = _written(Database.open_groups)
    ready_groups = _written(Database.ready_groups)
    group_counts = _written(Database.group_counts)
    recent_episodes = _written(Database.recent_episodes)
    trim_episodes = _written(Database.trim_episodes)

    commit_step = _written(Database.commit_step)
    versions = _written(Database.versions)
    version = _written(Database.version)
    retire_version = _written(Database.retire_version)
    unnamed = _written(Database.unnamed)
    rollback = _written(Database.rollback)
    names = _written(Database.names)
    live_hashes = _written(Database.live_hashes)
    add_evaluation = _written(Database.add_evaluation)
    evaluations = _written(Database.evaluations)

    add_session = _written(Database.add_session)
    get_session = _written(Database.get_session)
    list_sessions = _written(Database.list_sessions)
    seen_session = _written(Database.seen_session)
    finish_session = _written(Database.finish_session)
    silent_sessions = _written(Database.silent_sessions)
    add_model = _written(Database.add_model)
    get_model = _written(Database.get_model)
    list_models = _written(Database.list_models)
    publish_inflight = _written(Database.publish_inflight)
    over_models = _written(Database.over_models)
    end_model = _written(Database.end_model)
    add_sampler = _written(Database.add_sampler)
    get_sampler = _written(Database.get_sampler)
    list_samplers = _written(Database.list_samplers)
    used_sampler = _written(Database.used_sampler)
    join_sampler = _written(Database.join_sampler)
    idle_samplers = _written(Database.idle_samplers)
    keep_sampler = _written(Database.keep_sampler)
    let_sampler_go = _written(Database.let_sampler_go)
    save_checkpoint = _written(Database.save_checkpoint)
    get_checkpoint = _written(Database.get_checkpoint)
    list_checkpoints = _written(Database.list_checkpoints)
    expire_checkpoint = _written(Database.expire_checkpoint)
    expired_checkpoints = _written(Database.expired_checkpoints)
    delete_checkpoint = _written(Database.delete_checkpoint)
    count_checkpoints = _written(Database.count_checkpoints)

    open_future = _written(Database.open_future)
    finish_future = _written(Database.finish_future)
    get_future = _written(Database.get_future)
    open_futures = _written(Database.open_futures)
    futures_behind = _written(Database.futures_behind)
    ended_samples = _written(Database.ended_samples)
    drop_futures = _written(Database.drop_futures)
    commit_model = _written(Database.commit_model)

    save_bills = _written(Database.save_bills)
    bills = _written(Database.bills)
    bill = _written(Database.bill)
    all_whole_bills = _written(Database.all_whole_bills)
    fleet_bill = _written(Database.fleet_bill)
