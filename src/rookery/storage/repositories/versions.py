"""Versions of policies, the commit that makes them, and the metrics of the steps in them.

* :func:`commit_step` is one transaction: version, hashes, consumed groups, steps, counters and random state become
  visible together or not at all. It is refused unless the committer holds the policy's lease, started from its head,
  and every group it trained on is ready: so a policy's versions are a chain, and no group is in two of them.
* The adapter from which a policy begins is named from the submission of its job until version 0 is committed.
* A job has a row in ``steps`` for every committed optimizer step and for no other.
* A group on which several policies train is consumed at most once by each: ``uses`` says by which version.
* Version numbers have no gaps and are never reused, even when a head's bytes turn out to be corrupt.
* A version's row is never removed or rewritten; ``kept`` says whether its bytes must still be there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    bindparam,
    delete,
    func,
    select,
    tuple_,
    type_coerce,
    update,
)
from sqlalchemy.orm import aliased

from rookery.errors import Conflict, LeaseLost, count_of
from rookery.protocol import Manifest
from rookery.storage.columns import JsonPart, Page, add, fetch_all, fetch_one, get, page_of, paged, rows
from rookery.storage.models import (
    CheckpointRow,
    EvaluationRow,
    GroupRow,
    JobRow,
    PolicyRow,
    SamplerRow,
    StepRow,
    UploadRow,
    VersionRow,
)

_CHANGE_JOB = update(JobRow).where(JobRow.id == bindparam("job"), JobRow.finished.is_(None))
_LOCKED_POLICY = select(PolicyRow).where(PolicyRow.id == bindparam("policy")).with_for_update()
_CHANGE_POLICY = update(PolicyRow).where(PolicyRow.id == bindparam("policy"))
_LAST_VERSION = select(func.max(VersionRow.version)).where(VersionRow.policy == bindparam("policy"))
_DELETE_STEPS = delete(StepRow).where(StepRow.job == bindparam("of"), StepRow.step > bindparam("after"))
_CONSUME = update(GroupRow).where(
    GroupRow.id.in_(bindparam("groups", expanding=True)),
    GroupRow.job == bindparam("of"),
    GroupRow.state == "ready",
    GroupRow.uses == {},
)
"""Statements of a commit; the changed columns are the other parameters."""


DROPPED = -1
"""In ``GroupRow.uses``: the policy will not train on the group."""


@dataclass(frozen=True, kw_only=True)
class NextVersion:
    """A version that is about to be committed. Its artifact is durable."""

    policy: str
    lease: int
    """Under which the policy trained."""
    parent: int | None
    """The version from which its steps began; None makes version 0."""
    manifest: Manifest
    step: int
    """Optimizer steps of the policy so far."""
    time: float


@dataclass(frozen=True, kw_only=True)
class JobCommit:
    """The part of a job that becomes visible with a version of one of its policies."""

    job: str
    groups: Sequence[str] = ()
    """Ids of the groups in the batches of its steps."""
    metrics: Sequence[Mapping[str, Any]] = ()
    """One row per step since the parent, each with its number in the job under ``step``."""
    counters: Mapping[str, Any]
    rng: Mapping[str, Any]
    job_step: int | None = None
    """Optimizer steps of all policies of a job of which several train; None where one does."""


def commit_step(connection: Connection, version: NextVersion, of: JobCommit) -> VersionRow:
    """The next version of a job's policy, committed. Raises :class:`Conflict`, and changes nothing, if the job is
    finished or the policy is not its, the lease is not the newest, the head is not the parent, or a group is not
    ready."""
    state: dict[str, Any] = {"counters": dict(of.counters), "rng": dict(of.rng)}
    state["step"] = version.step if of.job_step is None else of.job_step
    if of.groups:
        state["crashes"] = 0
    if connection.execute(_CHANGE_JOB, {"job": of.job, **state}).rowcount == 0:
        raise Conflict(f"job {of.job} is finished or does not exist")
    rewards = [row["reward"] for row in of.metrics if row.get("reward") is not None]
    row = add_version(connection, version, of.job, max(rewards, default=None))
    if of.metrics:
        owner = "" if of.job_step is None else version.policy
        steps = [_step_row(row.tenant, of.job, row.version, taken, owner) for taken in of.metrics]
        connection.execute(_DELETE_STEPS, {"of": of.job, "after": steps[0].step - 1})
        add(connection, *steps)
    _consume(connection, of.job, version.policy, of.groups, row.version)
    return row


def add_version(
    connection: Connection, version: NextVersion, job: str | None = None, reward: float | None = None
) -> VersionRow:
    """The next version of a policy, of a ``job`` or of a client's model, now its head. Raises :class:`Conflict` unless
    lease and parent are the newest."""
    policy, manifest = version.policy, version.manifest
    owner = _check_head(connection, job, policy, version.lease, version.parent)
    last = connection.execute(_LAST_VERSION, {"policy": policy}).scalar()
    number = 0 if last is None else last + 1
    begun = {} if number else {"warm_start": None}
    connection.execute(_CHANGE_POLICY, {"policy": policy, "head_version": number, **begun})
    row = VersionRow(
        policy=policy, version=number, tenant=owner.tenant, parent=version.parent, manifest=manifest,
        hash=manifest.hash, size=manifest.size, step=version.step, created=version.time, reward=reward,
    )  # fmt: skip
    add(connection, row)
    return row


def save_step(connection: Connection, job: str, version: int, metrics: Mapping[str, Any]) -> None:
    """Replace the metrics of a committed step, with the figures that are known only after its commit."""
    mine = (StepRow.job == job) & (StepRow.step == metrics["step"]) & (StepRow.version == version)
    connection.execute(update(StepRow).where(mine).values(metrics=dict(metrics)))


def steps(
    connection: Connection, tenant: str, job: str, after: int = -1, limit: int | None = None
) -> list[dict[str, Any]]:
    """The metrics of the committed steps later than ``after``, in order, the first ``limit``, each with the ``version``
    that contains it; empty for a job that is not this tenant's."""
    query = select(StepRow).where(StepRow.step > after).filter_by(tenant=tenant, job=job)
    found = fetch_all(connection, StepRow, query.order_by(StepRow.step).limit(limit))
    return [{**row.metrics, "version": row.version} for row in found]


def latest_steps(connection: Connection, tenant: str, job: str, page: Page) -> list[StepRow]:
    """A page of the committed steps in the order of their times and numbers, the latest first."""
    order = (StepRow.time, StepRow.step)
    return page_of(connection, StepRow, order, page, descending=True, tenant=tenant, job=job)


def trained_tokens(connection: Connection, tenant: str, job: str) -> int:
    """The tokens of all committed steps."""
    query = select(type_coerce(StepRow.metrics, JsonPart(("tokens",)))).filter_by(tenant=tenant, job=job)
    found = connection.execute(query).scalars()
    return sum(int(metrics.get("tokens") or 0) for metrics in found)


def last_step(connection: Connection, tenant: str, job: str) -> int:
    """The newest committed step; -1 before the first, and for a job that is not this tenant's."""
    found = connection.execute(select(func.max(StepRow.step)).filter_by(tenant=tenant, job=job)).scalar()
    return -1 if found is None else int(found)


def steps_of_versions(
    connection: Connection, tenant: str, job: str, policy: str, versions: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """The metrics of the last step of each of these versions of the policy of this name."""
    if not versions:
        return {}
    query = select(StepRow).filter_by(tenant=tenant, job=job).where(StepRow.version.in_(versions))
    found = fetch_all(connection, StepRow, query)
    found.sort(key=lambda row: row.step)  # the database would sort by an index, and read all steps of the job
    rows = [row for row in found if row.metrics.get("policy", policy) == policy]
    return {row.version: {**row.metrics, "version": row.version} for row in rows}


def kept_versions(connection: Connection, tenant: str) -> list[tuple[str, str, int, int, float]]:
    """The kept versions of the tenant's jobs, the newest job first, of each policy the newest version first: job,
    policy's name, number of the job's policies, version, when it was made."""
    other = aliased(PolicyRow)
    count = select(func.count()).where(other.job == JobRow.id).scalar_subquery()
    query = select(JobRow.id, PolicyRow.name, count, VersionRow.version, VersionRow.created)
    query = query.join(PolicyRow, PolicyRow.job == JobRow.id).join(VersionRow, VersionRow.policy == PolicyRow.id)
    query = query.where(JobRow.tenant == tenant, VersionRow.kept.is_(True))
    query = query.order_by(JobRow.number.desc(), PolicyRow.name, VersionRow.version.desc())
    return [tuple(row) for row in connection.execute(query)]


def versions(connection: Connection, tenant: str, policy: str, page: Page | None = None) -> list[VersionRow]:
    """Oldest first; empty for a policy that is not this tenant's."""
    return page_of(connection, VersionRow, (VersionRow.version,), page, policy=policy, tenant=tenant)


_STEP = VersionRow.step + 0
"""For a condition on kept versions, which are few: by an index of the column, the database would read all versions."""


def kept_of_policy(connection: Connection, tenant: str, policy: str, page: Page) -> list[VersionRow]:
    """A page of the kept versions of a policy that contain a step, newest first."""
    key: dict[str, Any] = {"tenant": tenant, "policy": policy, "kept": True}
    return page_of(connection, VersionRow, (VersionRow.version,), page, _STEP > 0, descending=True, **key)


def followed(connection: Connection, tenant: str, policy: str, every: int) -> int | None:
    """The version with which a follower of the policy replies, as
    :func:`~rookery.scheduling.job_rules.followed_version` chooses it: every kept version is the head or one of its
    ancestors. None without a version."""
    head = aliased(VersionRow)
    begun = select(head.step - head.step % every).join(PolicyRow, PolicyRow.id == head.policy)
    begun = begun.where(head.policy == policy, head.version == PolicyRow.head_version)
    query = select(func.min(VersionRow.version)).filter_by(tenant=tenant, policy=policy, kept=True)
    found = connection.execute(query.where(begun.scalar_subquery() <= _STEP)).scalar()
    return None if found is None else int(found)


def newest_of_step(connection: Connection, tenant: str, policy: str, step: int) -> int | None:
    """The newest version after ``step`` steps of the policy that is not lost."""
    query = select(VersionRow.version).filter_by(tenant=tenant, policy=policy, step=step, lost="")
    return max(connection.execute(query).scalars(), default=None)


def version(connection: Connection, tenant: str, policy: str, version: int) -> VersionRow:
    """Raises :class:`NotFound` if this tenant has no such policy, or the policy no such version."""
    return get(
        connection, VersionRow, f"version {version} of policy {policy}", policy=policy, tenant=tenant, version=version
    )


def retire_version(connection: Connection, policy: str, version: int) -> str | None:
    """Its bytes need not be kept any more. Returns its hash if nothing names that now, so that the artifact can be
    deleted. Raises :class:`Conflict` for a head, :class:`NotFound`."""
    row = _version(connection, policy, version)
    head = connection.execute(select(PolicyRow.head_version).where(PolicyRow.id == policy)).scalar()
    if head == version:
        raise Conflict(f"version {version} of policy {policy} is its head")
    connection.execute(update(VersionRow).filter_by(policy=policy, version=version).values(kept=False))
    return unnamed(connection, row.hash)


def rollback(connection: Connection, policy: str, version: int, why: str, time: float = 0.0) -> VersionRow:
    """The head's bytes are corrupt: the newest kept version before it becomes the head again, and the job's step goes
    back with it. The groups that the lost version consumed stay consumed. Later steps of other policies stay, with this
    ``time`` as ``renewed``: by that a reader of the steps knows that some before them are deleted. Returns the new
    head. Raises :class:`Conflict` if ``version`` is not the head, or nothing before it is kept."""
    lost = _version(connection, policy, version)
    owner = connection.execute(select(PolicyRow).where(PolicyRow.id == policy).with_for_update()).one()
    if owner.head_version != version:
        raise Conflict(f"version {version} of policy {policy} is not its head")
    ancestor = lost
    while not ancestor.kept or ancestor.version == version:
        if ancestor.parent is None:
            raise Conflict(f"policy {policy} has no version before {version} that is kept")
        ancestor = _version(connection, policy, ancestor.parent)
    dead = {"kept": False, "lost": why}
    connection.execute(update(VersionRow).filter_by(policy=policy, version=version).values(dead))
    connection.execute(update(PolicyRow).filter_by(id=policy).values(head_version=ancestor.version))
    mine = (StepRow.job == owner.job) & (StepRow.version > ancestor.version) & StepRow.policy.in_(("", policy))
    first = connection.execute(select(func.min(StepRow.step)).where(mine)).scalar()
    connection.execute(delete(StepRow).where(mine))
    if first is not None:
        for row in fetch_all(connection, StepRow, select(StepRow).filter_by(job=owner.job).where(StepRow.step > first)):
            renewed = {**row.metrics, "renewed": time}
            connection.execute(update(StepRow).filter_by(job=row.job, step=row.step).values(metrics=renewed))
    several = select(func.count()).where(StepRow.job == owner.job, StepRow.policy != "")
    job_step = max(ancestor.step, connection.execute(several).scalar() or 0)
    connection.execute(update(JobRow).filter_by(id=owner.job).values(step=job_step))
    return ancestor


def unnamed(connection: Connection, digest: str) -> str | None:
    """The hash itself if nothing names it."""
    return None if digest and is_live(connection, digest) else digest or None


def unnamed_starts(connection: Connection, job: str) -> list[str]:
    """The policies of a finished job begin from no adapter any more. Returns those adapters from which they were to
    begin that nothing names now."""
    starts = [policy.warm_start for policy in rows(connection, PolicyRow, job=job) if policy.warm_start]
    if starts:
        connection.execute(update(PolicyRow).where(PolicyRow.job == job).values(warm_start=None))
    return [digest for digest in starts if not is_live(connection, digest)]


def names(connection: Connection, policy: str, digest: str) -> bool:
    """Whether anything names the artifact. Waits for a commit to ``policy`` whose outcome is not known: that holds the
    policy's row."""
    connection.execute(select(PolicyRow.id).where(PolicyRow.id == policy).with_for_update())
    return is_live(connection, digest)


def live_hashes(connection: Connection) -> set[str]:
    """Hashes of every artifact that must be kept: of versions, named checkpoints, samplers, uploads, and adapters from
    which policies will begin. All others were written by a process that died before their commit."""
    return {digest for query in _NAMING for digest in connection.execute(query).scalars() if digest is not None}


def add_evaluation(
    connection: Connection,
    *,
    policy: str,
    version: int,
    prompts: int,
    mean: float,
    stderr: float,
    results: Mapping[str, Any],
    created: float,
) -> EvaluationRow:
    """Store a version's held-out figures (those of a repeated evaluation replace them), their rank also as the
    version's ``evaluation``. Raises :class:`NotFound`."""
    _version(connection, policy, version)
    owner = connection.execute(select(PolicyRow).where(PolicyRow.id == policy)).one()
    row = EvaluationRow(
        policy=policy, version=version, tenant=owner.tenant, job=owner.job, prompts=prompts, mean=mean, stderr=stderr,
        results=dict(results), created=created,
    )  # fmt: skip
    connection.execute(delete(EvaluationRow).filter_by(policy=policy, version=version))
    add(connection, row)
    connection.execute(update(VersionRow).filter_by(policy=policy, version=version).values(evaluation=row.rank))
    return row


def add_counted_evaluation(connection: Connection, counters: Mapping[str, Any], **figures: Any) -> EvaluationRow:
    """:func:`add_evaluation` with these ``figures``, and the ``counters`` of its job, which count its failures."""
    row = add_evaluation(connection, **figures)
    connection.execute(_CHANGE_JOB, {"job": row.job, "counters": dict(counters)})
    return row


_EVALUATIONS = EvaluationRow.__table__
_BRIEF = JsonPart(("split", "seed", "loss", "accuracy", "constant"))
_RESULTS = type_coerce(_EVALUATIONS.c.results, _BRIEF).label("results")
"""The results without the prompts and answers, of which there may be megabytes in each evaluation."""

_FIGURES = select(*(column for column in _EVALUATIONS.c if column.name != "results"), _RESULTS)


def evaluations(
    connection: Connection, tenant: str, job: str, page: Page | None = None, answers: bool = True
) -> list[EvaluationRow]:
    """The evaluations of a job by policy and version; empty for a job that is not this tenant's. ``answers``: with the
    prompts and answers."""
    query = (select(EvaluationRow) if answers else _FIGURES).where(EvaluationRow.tenant == tenant)
    order = (EvaluationRow.policy, EvaluationRow.version)
    return paged(connection, EvaluationRow, query.where(EvaluationRow.job == job), order, page)


def held_out_losses(
    connection: Connection, tenant: str, policy: str, versions: Sequence[int]
) -> dict[int, float | None]:
    """The losses on held-out rows of those of the policy's ``versions`` that were evaluated."""
    query = _FIGURES.where(EvaluationRow.tenant == tenant, EvaluationRow.policy == policy)
    found = fetch_all(connection, EvaluationRow, query.where(EvaluationRow.version.in_(versions)))
    return {row.version: row.results.get("loss") for row in found}


def evaluated(connection: Connection, tenant: str, job: str) -> set[tuple[str, int]]:
    """The policy and the version of each of :func:`evaluations` with a completed episode."""
    query = select(EvaluationRow.policy, EvaluationRow.version).filter_by(tenant=tenant, job=job)
    return {(policy, version) for policy, version in connection.execute(query.where(EvaluationRow.prompts > 0))}


def first_evaluation(connection: Connection, tenant: str, job: str) -> EvaluationRow | None:
    """The evaluation of the first version whose prompts are kept: all have the same. None for a job without one."""
    query = select(EvaluationRow).filter_by(tenant=tenant, job=job, kept=True)
    order = (EvaluationRow.version, EvaluationRow.policy)
    return fetch_one(connection, EvaluationRow, query.order_by(*order).limit(1))


EVALUATIONS_AT_ONCE = 16
"""A transaction empties at most so many evaluations, each of which may have megabytes of answers: a backlog of them
holds up nobody."""


def trim_evaluations(connection: Connection, job: str, keep: int) -> int:
    """Delete the prompts and answers of all but the evaluations of the job's newest versions, of ``keep`` prompts
    together, and the first, the newest and the best one of each policy. One without a completed episode is kept only as
    the first or the newest. Returns the number of those that were emptied: there may be more of them after
    :data:`EVALUATIONS_AT_ONCE`."""
    key = (EvaluationRow.policy, EvaluationRow.version)
    query = select(*key, EvaluationRow.prompts, EvaluationRow.mean).filter_by(job=job, kept=True)
    found = connection.execute(query.order_by(EvaluationRow.version.desc(), EvaluationRow.policy)).all()
    newest = {row.policy: row for row in reversed(found)}
    first = {row.policy: row for row in found}
    best: dict[str, Any] = {}
    for row in found:
        if row.prompts and (row.policy not in best or row.mean > best[row.policy].mean):
            best[row.policy] = row
    needed, old = [*newest.values(), *first.values(), *best.values()], []
    for row in found:
        keep -= row.prompts
        if (keep < 0 or not row.prompts) and row not in needed:
            old.append((row.policy, row.version))
    return empty_evaluations(connection, tuple_(*key).in_(old)) if old else 0


def empty_evaluations(connection: Connection, which: ColumnElement[bool]) -> int:
    """Delete the prompts and answers of the first :data:`EVALUATIONS_AT_ONCE` of these evaluations; returns the number
    of those that were emptied."""
    key = (EvaluationRow.policy, EvaluationRow.version)
    query = select(*key).where(which, EvaluationRow.kept.is_(True)).order_by(*key).limit(EVALUATIONS_AT_ONCE)
    found = connection.execute(query).all()
    for policy, version in found:
        results = connection.execute(select(_RESULTS).filter_by(policy=policy, version=version)).scalar_one()
        values = {"results": results, "kept": False}
        connection.execute(update(EvaluationRow).filter_by(policy=policy, version=version).values(values))
    return len(found)


def last_evaluations(connection: Connection, tenant: str, job: str, after: int = -1) -> list[EvaluationRow]:
    """The last of each policy's :func:`evaluations`, of a version later than ``after``, without the answers."""
    of_job = (EvaluationRow.tenant == tenant, EvaluationRow.job == job)
    newest = select(EvaluationRow.policy, func.max(EvaluationRow.version).label("version"))
    last = newest.where(*of_job, EvaluationRow.version > after).group_by(EvaluationRow.policy).subquery()
    same = (EvaluationRow.policy == last.c.policy) & (EvaluationRow.version == last.c.version)
    query = _FIGURES.join(last, same).where(*of_job)
    return fetch_all(connection, EvaluationRow, query.order_by(EvaluationRow.policy))


_NAMING: tuple[Select[Any], ...] = (
    select(VersionRow.hash).where(VersionRow.kept.is_(True)),
    select(UploadRow.hash),
    select(CheckpointRow.hash),
    select(SamplerRow.hash).where(SamplerRow.kept.is_(True)),
    select(PolicyRow.warm_start.label("hash"))
    .join(JobRow, JobRow.id == PolicyRow.job)
    .where(PolicyRow.warm_start.is_not(None), JobRow.finished.is_(None)),
)
"""The hashes of the artifacts that must be kept. Each has an index of all of its conditions on the table with the hash,
so that a look-up costs the same however many rows had the hash before: equal content of all tenants is one artifact."""


def is_live(connection: Connection, digest: str) -> bool:
    """Whether anything names the artifact."""
    return any(
        connection.execute(query.where(query.selected_columns.hash == digest).limit(1)).one_or_none() is not None
        for query in _NAMING
    )


def _check_head(connection: Connection, job: str | None, policy: str, lease: int, parent: int | None) -> PolicyRow:
    owner = fetch_one(connection, PolicyRow, _LOCKED_POLICY, {"policy": policy})
    if owner is None or owner.job != job:
        raise Conflict(f"job {job} has no policy {policy}")
    if owner.lease != lease:
        raise LeaseLost(f"policy {policy} is leased as {owner.lease}, not {lease}: another trainer took over")
    if owner.head_version != parent:
        raise Conflict(f"policy {policy} is at version {owner.head_version}, not {parent}: the step is stale")
    return owner


def _step_row(tenant: str, job: str, version: int, metrics: Mapping[str, Any], policy: str) -> StepRow:
    return StepRow(
        job=job, step=metrics["step"], tenant=tenant, version=version, reward=metrics.get("reward"),
        metrics=dict(metrics), policy=policy, time=metrics.get("time", 0.0),
    )  # fmt: skip


def use_shared(connection: Connection, job: str, policy: str, groups: Sequence[str], version: int) -> int:
    """Record that ``policy`` consumed in ``version`` (or, with -1, dropped) those of ``groups`` on which it may still
    train with others. A group on which nobody may train any more is closed. Returns how many there were."""
    mine = GroupRow.id.in_(groups) & (GroupRow.job == job) & (GroupRow.state == "ready")
    query = select(GroupRow.id, GroupRow.uses, GroupRow.consumed_by).where(mine).with_for_update()
    found = 0
    for group, uses, consumed_by in connection.execute(query).all():
        if uses.get(policy, DROPPED) is not None:
            continue
        found += 1
        uses = {**uses, policy: version}
        values: dict[str, Any] = {"uses": uses, "consumed_by": consumed_by if version == DROPPED else version}
        if None not in uses.values():
            values["state"] = "consumed" if values["consumed_by"] is not None else "dropped"
        connection.execute(update(GroupRow).where(GroupRow.id == group).values(values))
    return found


def _consume(connection: Connection, job: str, policy: str, groups: Sequence[str], version: int) -> None:
    values = {"groups": groups, "of": job, "state": "consumed", "consumed_by": version}
    consumed = connection.execute(_CONSUME, values).rowcount
    if consumed < len(groups):
        consumed += use_shared(connection, job, policy, groups, version)
    if consumed != len(groups):
        raise Conflict(f"{len(groups) - consumed} of {count_of(len(groups), 'group')} are not ready, or named twice")


def _version(connection: Connection, policy: str, version: int) -> VersionRow:
    return get(connection, VersionRow, f"version {version} of policy {policy}", policy=policy, version=version)
