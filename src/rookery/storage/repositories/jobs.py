"""Jobs, their policies, their groups and the episodes in those: the data cursor, the work that a restart finds.

* A job and its policies are created in one transaction, once per (tenant, idempotency key).
* ``finished`` is set exactly when the state is final. A finished job changes its state no more, and has no open and no
  ready group.
* A policy's lease only grows. The holder of an older one can commit nothing.
* Training ordinals have no gaps: the transaction that stores a group raises the job's cursor by one and refuses any
  other ordinal. So no prompt is skipped or used twice, whatever order groups end in.
* open → ready | failed | dropped; ready → consumed (only in :func:`~rookery.storage.repositories.versions.commit_step`)
  | dropped; nothing else.
* An episode is closed once; a group closes its remaining episodes with itself.
* Changes of groups and episodes store the job's ``counters`` where they are given, in the same transaction: after any
  crash they count exactly the stored work.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sqlalchemy import (
    ColumnElement,
    Connection,
    Update,
    bindparam,
    case,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    type_coerce,
    update,
)

from rookery.errors import Conflict, NotFound, count_of, shown_name
from rookery.storage.columns import (
    DELETED_AT_ONCE,
    JsonPart,
    Page,
    add,
    add_or_find,
    delete_some,
    fetch_all,
    find,
    fitting,
    get,
    page_of,
    rows,
)
from rookery.storage.models import (
    FINAL_JOB_STATES,
    EpisodeRow,
    EpisodeState,
    EvaluationRow,
    EventRow,
    GroupRow,
    GroupState,
    JobRow,
    JobState,
    MetaRow,
    PolicyRow,
    SpanRow,
    StepRow,
    TenantRow,
    UsageRow,
    VersionRow,
)
from rookery.storage.repositories.episodes import TEXT_BYTES
from rookery.storage.repositories.versions import DROPPED, EVALUATIONS_AT_ONCE, empty_evaluations, is_live, use_shared

_POLICIES = (
    select(PolicyRow)
    .where(PolicyRow.job == bindparam("job"), PolicyRow.tenant == bindparam("tenant"))
    .order_by(PolicyRow.name)
)
_NAMES_MODELS = type_coerce(JobRow.spec, JsonPart(("base_model", "policies")))
_OWNER = select(JobRow.tenant).where(JobRow.id == bindparam("job"))
_MOVE_CURSOR = update(JobRow).where(
    JobRow.id == bindparam("job"), JobRow.cursor == bindparam("start"), JobRow.finished.is_(None)
)
_CLOSE_GROUP = update(GroupRow).where(GroupRow.id == bindparam("group"), GroupRow.state == "open")
_CHANGE_EPISODE = update(EpisodeRow).where(EpisodeRow.id == bindparam("episode"), EpisodeRow.state == "open")
_STANDING = (
    select(
        EpisodeRow.tenant, EpisodeRow.job, EpisodeRow.agent_keys, EpisodeRow.state, EpisodeRow.error, JobRow.state,
        JobRow.finished,
    )
    .join(JobRow, JobRow.id == EpisodeRow.job)
    .where(EpisodeRow.id == bindparam("episode"))
)  # fmt: skip
_SAVE_LOGPROBS = (
    update(EpisodeRow)
    .where(EpisodeRow.id == bindparam("episode"))
    .values(train_logprobs=bindparam("train_logprobs", type_=EpisodeRow.__table__.c.train_logprobs.type))
)
_CLOSE_EPISODES = update(EpisodeRow).where(
    EpisodeRow.group_id.in_(bindparam("groups", expanding=True)), EpisodeRow.state == "open"
)
_SAVE_GROUPS_COUNTERS, _SAVE_EPISODES_COUNTERS = (
    update(JobRow).where(JobRow.id == select(kind.job).where(kind.id == bindparam("member")).scalar_subquery())
    for kind in (GroupRow, EpisodeRow)
)
"""Statements of frequent calls; the changed columns are the other parameters."""

Counters = Mapping[str, Any] | None

TRIMMED_AT_ONCE = 256
"""Groups that are trimmed by one statement."""

JOBS_AT_ONCE = 16
"""Finished jobs whose groups are deleted when another one ends."""


@dataclass(frozen=True)
class EpisodeStanding:
    """The owner of an episode, and whether it runs."""

    tenant: str
    job: str
    agent_keys: str
    state: EpisodeState
    error: str
    job_state: JobState
    job_finished: float | None

    @property
    def runs_again(self) -> bool:
        """Whether it is open, and its job may go on."""
        return self.state == "open" and self.job_finished is None


# --- jobs and policies ------------------------------------------------------------------------------------------------


def submit_job(
    connection: Connection, row: JobRow, policies: Sequence[PolicyRow], warnings: Sequence[str] = ()
) -> tuple[JobRow, bool]:
    """Store a new job and its policies, with ``warnings`` in its log; returns it and True. If the tenant used this
    idempotency key before, returns that job as it is now and False (the caller compares the specs). Raises
    :class:`NotFound` if the tenant was deleted while the job was checked, :class:`Conflict` if an adapter from which a
    policy begins was."""
    if connection.execute(select(TenantRow.deleted).filter_by(id=row.tenant)).scalar() is not None:
        raise NotFound(f"tenant {row.tenant} is deleted")
    newest = select(func.coalesce(func.max(JobRow.number), 0))
    row = replace(row, number=connection.execute(newest).scalar_one() + 1)
    stored, created = add_or_find(connection, row, tenant=row.tenant, idempotency_key=row.idempotency_key)
    if created and policies:
        for policy in policies:
            if policy.warm_start is not None and not is_live(connection, policy.warm_start):
                raise Conflict(f"policies.{policy.name}.warm_start: its version was deleted just now; give another one")
        add(connection, *policies)
    if created and warnings:
        event = {"tenant": row.tenant, "job": row.id, "time": row.created, "kind": "warning"}
        connection.execute(insert(EventRow), [{**event, "text": text} for text in warnings])
    return stored, created


def keyed_job(connection: Connection, tenant: str, key: str) -> JobRow | None:
    """The job that the tenant submitted with this idempotency key."""
    return find(connection, JobRow, tenant=tenant, idempotency_key=key)


def get_job(connection: Connection, tenant: str, job: str) -> JobRow:
    """Raises :class:`NotFound` if this tenant has no such job."""
    return get(connection, JobRow, f"job {job}", id=job, tenant=tenant)


def tenant_of(connection: Connection, job: str) -> str:
    """The tenant of a job. Raises :class:`NotFound`."""
    return get(connection, JobRow, f"job {job}", id=job).tenant


NTH_NAME = re.compile(r"(?P<name>[^~]+)(~(?P<before>[0-9]{1,9}))?")
"""``NAME``, the newest job of that name, or ``NAME~1``, the one before it."""


def find_job(connection: Connection, tenant: str, job: str) -> JobRow:
    """The job that a user names: by its id, by its name (the newest one of that name), or as ``NAME~1``, the one before
    that. Raises :class:`NotFound`."""
    row = find(connection, JobRow, id=job, tenant=tenant)
    if row is not None:
        return row
    if (parts := NTH_NAME.fullmatch(job)) is not None:
        named, before = select(JobRow).filter_by(tenant=tenant, name=parts["name"]), int(parts["before"] or 0)
        newest_first = named.order_by(JobRow.number.desc())
        if found := fetch_all(connection, JobRow, newest_first.offset(before).limit(1)):
            return found[0]
    raise NotFound(f"no job {shown_name(job)}")


def list_jobs(connection: Connection, tenant: str, page: Page | None = None) -> list[JobRow]:
    """Newest first."""
    return page_of(connection, JobRow, (JobRow.created, JobRow.id), page, descending=True, tenant=tenant)


def base_models(connection: Connection, tenant: str) -> dict[str, dict[str, Any]]:
    """The parts of the spec of each of the tenant's jobs that name the base models of its policies."""
    found = connection.execute(select(JobRow.id, _NAMES_MODELS).where(JobRow.tenant == tenant))
    return {str(id): spec for id, spec in found}


def all_unfinished_jobs(connection: Connection) -> list[JobRow]:
    """The jobs of every tenant that a starting controller takes up, oldest first."""
    return rows(connection, JobRow, JobRow.finished.is_(None), order_by=(JobRow.number,))


_SINK = "sink/"
"""Begins the names of open sinks in the table ``meta``."""


def open_sink(connection: Connection, job: str, number: int) -> None:
    """A sink of the job is written, until :func:`close_sink`."""
    mark = _sink_mark(job, number)
    if find(connection, JobRow, id=job) is not None and find(connection, MetaRow, name=mark) is None:
        add(connection, MetaRow(name=mark, value=""))


def close_sink(connection: Connection, job: str, number: int) -> None:
    """A sink of the job, which has ended, has all of it, or was given up."""
    connection.execute(delete(MetaRow).where(MetaRow.name == _sink_mark(job, number)))


def jobs_with_open_sinks(connection: Connection, since: float) -> list[JobRow]:
    """The jobs that have not ended, ended later than ``since``, or have an open sink."""
    marks = connection.execute(select(MetaRow.name).where(MetaRow.name.startswith(_SINK))).scalars()
    marked = JobRow.id.in_({mark.split("/")[1] for mark in marks})
    which = JobRow.finished.is_(None) | (JobRow.finished > since) | marked
    return rows(connection, JobRow, which, order_by=(JobRow.number,))


def _sink_mark(job: str, number: int | str) -> str:
    return f"{_SINK}{job}/{number}"


def unfinished_job_ids(connection: Connection, tenant: str) -> set[str]:
    """The jobs of a tenant, of all with an empty ``tenant``, whose episodes an environment host may still hold."""
    query = select(JobRow.id).where(JobRow.finished.is_(None))
    return set(connection.execute(query.filter_by(tenant=tenant) if tenant else query).scalars())


def set_job_state(
    connection: Connection,
    job: str,
    state: JobState,
    reason: str,
    time: float,
    error: str = "",
    resumes: bool = False,
) -> JobRow:
    """Returns the job afterwards, and logs the change as an event. ``started`` is set the first time it runs. Raises
    :class:`Conflict` if it is finished, :class:`NotFound`."""
    values: dict[str, Any] = {"state": state, "reason": reason, "error": error, "resumes": resumes}
    if state != "running":
        values["crashes"] = 0
    if state in FINAL_JOB_STATES:
        values["finished"] = time
    if state == "running":
        values["started"] = func.coalesce(JobRow.started, time)
    changed = connection.execute(update(JobRow).where(JobRow.id == job, JobRow.finished.is_(None)).values(values))
    row = get(connection, JobRow, f"job {job}", id=job)
    if changed.rowcount == 0:
        raise Conflict(f"job {job} is {row.state} already")
    text = f"{state}: {reason}".rstrip(": ")
    event = {"tenant": row.tenant, "job": job, "time": time, "kind": "state", "text": text}
    connection.execute(insert(EventRow), event)
    if state in FINAL_JOB_STATES:
        drop_alive(connection, GroupRow.job == job, time, f"its job is {state}")
    return row


def count_crash(connection: Connection, job: str) -> None:
    """The job was shown to have ended the service."""
    connection.execute(update(JobRow).where(JobRow.id == job).values(crashes=JobRow.crashes + 1))


def clear_crashes(connection: Connection, job: str) -> None:
    """The job has run for a while."""
    connection.execute(update(JobRow).where(JobRow.id == job).values(crashes=0))


def save_counters(connection: Connection, job: str, counters: Mapping[str, Any], rng: Mapping[str, Any]) -> None:
    """Store counters and running time between commits; a commit stores its own. Raises :class:`NotFound`."""
    values = {"counters": dict(counters), "rng": dict(rng)}
    if connection.execute(update(JobRow).where(JobRow.id == job).values(values)).rowcount == 0:
        raise NotFound(f"no job {job}")


def policies(connection: Connection, tenant: str, job: str) -> list[PolicyRow]:
    """The policies of a job by name; empty for a job that is not this tenant's."""
    return fetch_all(connection, PolicyRow, _POLICIES, {"job": job, "tenant": tenant})


def policies_of(connection: Connection, tenant: str, jobs: Sequence[str]) -> dict[str, list[PolicyRow]]:
    """The policies of these jobs of this tenant, by job, each job's by name."""
    found: dict[str, list[PolicyRow]] = {}
    for row in rows(connection, PolicyRow, PolicyRow.job.in_(jobs), tenant=tenant, order_by=(PolicyRow.name,)):
        found.setdefault(str(row.job), []).append(row)
    return found


def get_policy(connection: Connection, tenant: str, job: str | None, name: str) -> PolicyRow:
    """Raises :class:`NotFound` if this tenant has no such job, or the job no such policy. ``job`` None: a client's."""
    found = rows(connection, PolicyRow, job=job, tenant=tenant, name=name)
    if not found:
        raise NotFound(f"no policy {name} of job {job}")
    return found[0]


def next_lease(connection: Connection, policy: str) -> int:
    """A lease greater than all before; from now on only its holder can commit. Raises :class:`NotFound`."""
    connection.execute(update(PolicyRow).where(PolicyRow.id == policy).values(lease=PolicyRow.lease + 1))
    lease = connection.execute(select(PolicyRow.lease).where(PolicyRow.id == policy)).scalar()
    if lease is None:
        raise NotFound(f"no policy {policy}")
    return lease


def fence(connection: Connection) -> None:
    """Raise every lease, so that a commit of an earlier process is refused, even where the database server gets to it
    only after that process died. A starting controller does this before it reads anything."""
    connection.execute(update(PolicyRow).values(lease=PolicyRow.lease + 1))


# --- groups and episodes ----------------------------------------------------------------------------------------------


def add_groups(connection: Connection, job: str, groups: Sequence[GroupRow]) -> None:
    """Store new groups with their episodes, all open. Raises :class:`Conflict`, and stores none, if their ordinals are
    not the next ones, or the job is finished; :class:`NotFound` for a job that is not their tenant's."""
    if not groups:
        return
    if connection.execute(_OWNER, {"job": job}).scalar() != groups[0].tenant:
        raise NotFound(f"no job {job}")
    _raise_cursor(connection, job, [group.ordinal for group in groups])
    add(connection, *groups)
    if episodes := [episode for group in groups for episode in group.episodes]:
        add(connection, *episodes)


def save_turns(
    connection: Connection,
    episode: str,
    turns: Sequence[bytes],
    *,
    version: int | None = None,
    host_instance: str | None = None,
    agent_keys: str | None = None,
    counters: Counters = None,
) -> bool:
    """Make the completed turns durable (all of them, encoded in parts: they replace those stored before), and, where
    given, the version that the episode runs on, the host that holds it, and the hashes of its agent's keys. False if
    the episode is closed: it changes no more."""
    values: dict[str, Any] = {"turns": b"".join(turns)}
    if version is not None:
        values["version"] = version
    if host_instance is not None:
        values["host_instance"] = host_instance
    if agent_keys is not None:
        values["agent_keys"] = agent_keys
    return _change_open_episode(connection, episode, values, counters)


def finish_episode(
    connection: Connection,
    episode: str,
    time: float,
    *,
    trajectories: bytes,
    reward: float | None = None,
    metrics: Mapping[str, Any] | None = None,
    version: int | None = None,
    counters: Counters = None,
) -> bool:
    """Close an episode that is complete; the first call of this function or :func:`fail_episode` wins. False if it was
    closed before."""
    values: dict[str, Any] = {
        "state": "done", "trajectories": trajectories, "reward": reward, "metrics": dict(metrics or {}),
        "finished": time,
    }  # fmt: skip
    if version is not None:
        values["version"] = version
    return _change_open_episode(connection, episode, values, counters)


def fail_episode(connection: Connection, episode: str, time: float, error: str, *, counters: Counters = None) -> bool:
    """As :func:`finish_episode`, of an episode that will not be complete."""
    return _change_open_episode(connection, episode, {"state": "failed", "error": error, "finished": time}, counters)


def find_episode(connection: Connection, episode: str) -> EpisodeStanding | None:
    """The standing of an episode of any tenant; the caller knows whether it may be named."""
    found = connection.execute(_STANDING, {"episode": episode}).one_or_none()
    return EpisodeStanding(*found) if found is not None else None


def save_train_logprobs(connection: Connection, logprobs: Mapping[str, bytes]) -> None:
    """Store the trainer's log-probabilities of the tokens of these episodes."""
    if logprobs:
        values = [{"episode": episode, "train_logprobs": stored} for episode, stored in logprobs.items()]
        connection.execute(_SAVE_LOGPROBS, values)


def finish_group(
    connection: Connection,
    group: str,
    state: Literal["ready", "failed", "dropped"],
    time: float,
    *,
    min_version: int | None = None,
    policies: Sequence[str] = (),
    reason: str = "",
    counters: Counters = None,
) -> None:
    """Close an open group; ``policies`` are those that train on it, where there may be several.
    Raises :class:`Conflict` if it is not open, or is to be ready with an open episode."""
    values: dict[str, Any] = {"state": state, "min_version": min_version, "reason": reason, "finished": time}
    values["uses"] = dict.fromkeys(policies)
    if connection.execute(_CLOSE_GROUP, {"group": group, **values}).rowcount == 0:
        raise Conflict(f"group {group} is not open")
    unfinished = _drop_open_episodes(connection, [group], time, reason)
    if state == "ready" and unfinished:
        raise Conflict(f"group {group} still has {count_of(unfinished, 'open episode')}")
    _save_counters(connection, _SAVE_GROUPS_COUNTERS, group, counters)


def drop_groups(
    connection: Connection,
    groups: Sequence[str],
    reason: str,
    time: float,
    *,
    policy: str = "",
    counters: Counters = None,
) -> list[str]:
    """Drop the groups that are open or ready; returns their ids (the others were closed before and do not change).
    With ``policy``, ready ones of which several policies make use are dropped for that one."""
    if policy and groups:
        job = connection.execute(select(GroupRow.job).where(GroupRow.id == groups[0])).scalar()
        if use_shared(connection, str(job), policy, groups, DROPPED):
            _save_counters(connection, _SAVE_GROUPS_COUNTERS, groups[0], counters)
            return [*groups]
    found = drop_alive(connection, GroupRow.id.in_(groups), time, reason)
    if groups:
        _save_counters(connection, _SAVE_GROUPS_COUNTERS, groups[0], counters)
    return sorted(found, key=list(groups).index)


def open_groups(connection: Connection, job: str) -> list[GroupRow]:
    """The groups that a restarted controller resumes, with episodes and their turns, by ordinal."""
    return _groups_in(connection, job, "open")


def ready_groups(connection: Connection, job: str) -> list[GroupRow]:
    """The groups that wait to be trained on, with episodes and their trajectories, by ordinal."""
    return _groups_in(connection, job, "ready")


def recent_episodes(
    connection: Connection, tenant: str, job: str, limit: int, version: int | None = None, most: float = math.inf
) -> list[tuple[GroupRow, EpisodeRow]]:
    """The episodes that ended last (on one version, where given), newest first, each with its group: up to ``limit``,
    and as many as have ``most`` bytes, at least one. Those whose text was trimmed are left out."""
    which = [
        EpisodeRow.tenant == tenant, EpisodeRow.job == job, EpisodeRow.state.in_(("done", "failed")),
        (func.length(EpisodeRow.trajectories) > 0) | (EpisodeRow.error != ""),
    ]  # fmt: skip
    if version is not None:
        which.append(EpisodeRow.version == version)
    order = (EpisodeRow.finished.desc(), EpisodeRow.id)
    sizes = connection.execute(select(TEXT_BYTES).where(*which).order_by(*order).limit(limit)).scalars()
    found = select(EpisodeRow).where(*which).order_by(*order).limit(fitting(sizes, most))
    ended = fetch_all(connection, EpisodeRow, found)
    wanted = select(GroupRow).where(GroupRow.id.in_({episode.group_id for episode in ended}))
    groups = {group.id: group for group in fetch_all(connection, GroupRow, wanted)}
    return [(groups[episode.group_id], episode) for episode in ended]


def trim_episodes(connection: Connection, job: str, keep: int, at_once: int = TRIMMED_AT_ONCE) -> int:
    """Empty turns and trajectories of all but the last ``keep`` episodes that have ended, by the ordinals of their
    groups, and the prompts of groups without one of these, where nothing needs them any more (the group is closed and
    does not wait to be trained on). Returns the number of emptied episodes. Read are the groups since the last call,
    not the job's whole history: the text of a group that waited much longer than others to be trained on may stay until
    the job ends."""
    newest = select(EpisodeRow.id, EpisodeRow.group_id).join(GroupRow, GroupRow.id == EpisodeRow.group_id)
    newest = newest.where(GroupRow.job == job, EpisodeRow.finished.is_not(None))
    recent = newest.order_by(GroupRow.ordinal.desc(), EpisodeRow.member).limit(keep).subquery()
    full = (func.length(EpisodeRow.turns) > 0) | (func.length(EpisodeRow.trajectories) > 0)
    columns = (GroupRow.id, GroupRow.ordinal, GroupRow.state, func.length(GroupRow.prompt).label("asked"))
    newest_first = select(*columns).where(GroupRow.job == job).order_by(GroupRow.ordinal.desc())
    count, groups = 0, connection.execute(newest_first.limit(at_once)).all()
    while groups:
        members = EpisodeRow.group_id.in_([group.id for group in groups])
        texts = select(exists().where(members, full))
        some = any(group.asked for group in groups) or connection.execute(texts).scalar()
        closed = [group.id for group in groups if group.state not in ("open", "ready")]
        old = EpisodeRow.group_id.in_(closed) & EpisodeRow.id.not_in(select(recent.c.id)) & full
        emptied = update(EpisodeRow).where(old).values(turns=b"", trajectories=b"", train_logprobs=b"")
        count += connection.execute(emptied).rowcount
        asked = GroupRow.id.in_(closed) & (func.length(GroupRow.prompt) > 0)
        asked &= GroupRow.id.not_in(select(recent.c.group_id))
        connection.execute(update(GroupRow).where(asked).values(prompt=b""))
        if not some:
            break
        earlier = newest_first.where(GroupRow.ordinal < groups[-1].ordinal)
        groups = connection.execute(earlier.limit(at_once)).all()
    return count


def drop_old_groups(connection: Connection, tenant: str, keep: int) -> bool:
    """Delete the groups, episodes, timelines and held-out answers of finished jobs of the tenant, but for the ``keep``
    that finished last by the numbers of their events, whose order a wall clock that is set does not change; of the
    newest :data:`JOBS_AT_ONCE` others. Returns whether these may have more, since
    :data:`~rookery.storage.columns.DELETED_AT_ONCE` rows were deleted or :data:`EVALUATIONS_AT_ONCE` evaluations
    emptied: neither a backlog nor a long job holds up others."""
    answered = exists().where(EvaluationRow.job == JobRow.id, EvaluationRow.kept.is_(True))
    full = or_(exists().where(GroupRow.job == JobRow.id), answered)
    ended = select(JobRow.id).where(JobRow.tenant == tenant, JobRow.finished.is_not(None), full)
    last = select(func.coalesce(func.max(EventRow.id), 0)).where(EventRow.job == JobRow.id).scalar_subquery()
    old = connection.execute(ended.order_by(last.desc(), JobRow.id).offset(keep).limit(JOBS_AT_ONCE))
    jobs = old.scalars().all()
    connection.execute(delete(SpanRow).where(SpanRow.tenant == tenant, SpanRow.job.in_(jobs)))
    left = DELETED_AT_ONCE  # of rows by which the next call finds a job
    for kind in (EpisodeRow, GroupRow):
        left -= delete_some(connection, kind, left, kind.job.in_(jobs))
        if not left:
            return True
    return empty_evaluations(connection, EvaluationRow.job.in_(jobs)) == EVALUATIONS_AT_ONCE


def delete_history(connection: Connection, tenant: str, job: str) -> bool:
    """Delete some of the history of a finished job that is about to be deleted; returns whether there may be more. A
    long one is deleted in many transactions. Raises as :func:`delete_job`."""
    _check_finished(get_job(connection, tenant, job))
    if delete_some(connection, EvaluationRow, EVALUATIONS_AT_ONCE, EvaluationRow.job == job):
        return True
    left = DELETED_AT_ONCE
    for kind in (EpisodeRow, GroupRow, StepRow, EventRow):
        left -= delete_some(connection, kind, left, kind.__table__.c.job == job)
        if not left:
            return True
    released = VersionRow.policy.in_(select(PolicyRow.id).where(PolicyRow.job == job)) & VersionRow.kept.is_(False)
    return delete_some(connection, VersionRow, left, released) == left


def delete_job(connection: Connection, tenant: str, job: str) -> list[str]:
    """Delete a finished job with all that belongs to it but the tenant's total usage. Returns the hashes of the
    versions that it kept; :func:`~rookery.storage.repositories.versions.unnamed` tells which of them nothing names now.
    Raises :class:`Conflict` for a job that is not finished, :class:`NotFound`."""
    _check_finished(get_job(connection, tenant, job))
    of_job = select(PolicyRow.id).where(PolicyRow.job == job)
    mine = VersionRow.policy.in_(of_job)
    kept = connection.execute(select(VersionRow.hash).where(mine, VersionRow.kept.is_(True)).distinct())
    hashes = list(kept.scalars())
    connection.execute(delete(VersionRow).where(mine))
    for kind in (EpisodeRow, GroupRow, EvaluationRow, StepRow, EventRow, UsageRow, PolicyRow):
        connection.execute(delete(kind).where(kind.__table__.c.job == job))
    connection.execute(delete(SpanRow).where(SpanRow.tenant == tenant, SpanRow.job == job))
    connection.execute(delete(MetaRow).where(MetaRow.name.startswith(_sink_mark(job, ""), autoescape=True)))
    connection.execute(delete(JobRow).where(JobRow.id == job))
    return hashes


def _check_finished(row: JobRow) -> None:
    """Raises :class:`Conflict`."""
    if row.finished is None:
        raise Conflict(f"job {row.id} is {row.state}: cancel it first (rookery jobs cancel {row.id})")


def drop_alive(connection: Connection, which: ColumnElement[bool], time: float, reason: str) -> Sequence[str]:
    """Drop the open and the ready ones of these groups, with their open episodes; returns their ids."""
    alive = which & GroupRow.state.in_(("open", "ready"))
    found = connection.execute(select(GroupRow.id).where(alive).with_for_update()).scalars().all()
    state = case((GroupRow.consumed_by.is_not(None), "consumed"), else_="dropped")
    values = {"state": state, "reason": reason, "finished": time}
    connection.execute(update(GroupRow).where(GroupRow.id.in_(found)).values(values))
    _drop_open_episodes(connection, found, time, reason)
    return found


def _groups_in(connection: Connection, job: str, state: GroupState) -> list[GroupRow]:
    query = select(GroupRow).filter_by(job=job, state=state).order_by(GroupRow.ordinal)
    members = select(EpisodeRow).join(GroupRow, GroupRow.id == EpisodeRow.group_id)
    members = members.where(GroupRow.job == job, GroupRow.state == state).order_by(EpisodeRow.member)
    groups = fetch_all(connection, GroupRow, query)
    episodes: dict[str, list[EpisodeRow]] = {}
    for episode in fetch_all(connection, EpisodeRow, members):
        episodes.setdefault(episode.group_id, []).append(episode)
    for group in groups:
        group.episodes = tuple(episodes.get(group.id, ()))
    return groups


def _change_open_episode(connection: Connection, episode: str, values: dict[str, Any], counters: Counters) -> bool:
    _save_counters(connection, _SAVE_EPISODES_COUNTERS, episode, counters)
    return connection.execute(_CHANGE_EPISODE, {"episode": episode, **values}).rowcount == 1


def _raise_cursor(connection: Connection, job: str, ordinals: Sequence[int]) -> None:
    start = min(ordinals)
    if sorted(ordinals) != list(range(start, start + len(ordinals))):
        raise Conflict(f"groups must have consecutive ordinals, given {sorted(ordinals)}")
    values = {"job": job, "start": start, "cursor": start + len(ordinals)}
    if connection.execute(_MOVE_CURSOR, values).rowcount == 0:
        raise Conflict(f"job {job} is finished, or its next training group is not number {start}")


def _save_counters(connection: Connection, statement: Update, member: str, counters: Counters) -> None:
    if counters is not None:
        connection.execute(statement, {"member": member, "counters": dict(counters)})


def _drop_open_episodes(connection: Connection, groups: Sequence[str], time: float, reason: str) -> int:
    values = {"groups": groups, "state": "dropped", "error": reason, "finished": time}
    return connection.execute(_CLOSE_EPISODES, values).rowcount
