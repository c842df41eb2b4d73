"""Clients' sessions and everything in them: models, samplers, named checkpoints, calls and their outcomes.

* A thing is created once under its id, or idempotency key; a second attempt gets the first one's row.
* A checkpoint or a kept sampler keeps its artifact. Releasing one returns the hash when nothing names it any more.
* A model whose session is over keeps nothing: only the versions that checkpoints and samplers name stay.
* A call is stored before it is acknowledged, its outcome before it is sent; the first of either stays. The calls of a
  model are its log: those behind its ``done_seq`` make its state again from the policy's head.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, bindparam, delete, exists, func, not_, or_, select, update

from rookery.errors import Conflict, NotFound
from rookery.storage.columns import (
    DELETED_AT_ONCE,
    Page,
    add,
    add_new,
    add_or_find,
    delete_some,
    fetch_all,
    find,
    get,
    page_of,
    rows,
)
from rookery.storage.models import (
    CheckpointKind,
    CheckpointRow,
    FutureRow,
    ModelRow,
    PolicyRow,
    SamplerRow,
    SessionRow,
    VersionRow,
)
from rookery.storage.repositories.versions import NextVersion, add_version, is_live, unnamed

_FINISH_FUTURE = update(FutureRow).where(FutureRow.id == bindparam("future"), FutureRow.outcome.is_(None))
_EMPTY_CALL = update(FutureRow).where(FutureRow.id == bindparam("future"), FutureRow.model.is_(None))
"""Statements of frequent calls; the changed columns are the other parameters."""

# --- sessions ---------------------------------------------------------------------------------------------------------


def add_session(connection: Connection, row: SessionRow) -> SessionRow:
    """The session; the one that this tenant made with the same idempotency key, if there is one."""
    return add_or_find(connection, row, tenant=row.tenant, idempotency_key=row.idempotency_key)[0]


def has_session(connection: Connection, tenant: str, key: str) -> bool:
    """Whether the tenant made a session with this idempotency key."""
    return find(connection, SessionRow, tenant=tenant, idempotency_key=key) is not None


def get_session(connection: Connection, tenant: str, id: str) -> SessionRow:
    """Raises :class:`NotFound` if this tenant has no such session."""
    return get(connection, SessionRow, f"session {id}", id=id, tenant=tenant)


def list_sessions(connection: Connection, tenant: str, page: Page | None = None) -> list[SessionRow]:
    """Newest first."""
    order = (SessionRow.created, SessionRow.id)
    return page_of(connection, SessionRow, order, page, descending=True, tenant=tenant)


def seen_session(connection: Connection, id: str, time: float) -> None:
    """Its client sent a heartbeat."""
    connection.execute(update(SessionRow).where(SessionRow.id == id).values(seen=time))


def finish_session(connection: Connection, id: str, status: str, time: float) -> None:
    """End a session; the first end stays."""
    alive = (SessionRow.id == id) & SessionRow.finished.is_(None)
    connection.execute(update(SessionRow).where(alive).values(finished=time, status=status))


def silent_sessions(connection: Connection, before: float) -> list[SessionRow]:
    """The unfinished sessions of every tenant whose last heartbeat came before ``before``."""
    return rows(connection, SessionRow, SessionRow.finished.is_(None), SessionRow.seen < before)


# --- models -----------------------------------------------------------------------------------------------------------


def add_model(connection: Connection, row: ModelRow, policy: PolicyRow) -> None:
    """Store a model and its policy. Raises :class:`Conflict` if the id of either is taken."""
    if add_new(connection, policy) or add_new(connection, row):
        raise Conflict(f"model {row.id} exists already")


def get_model(connection: Connection, tenant: str, id: str) -> tuple[ModelRow, PolicyRow]:
    """Raises :class:`NotFound` if this tenant has no such model."""
    row = get(connection, ModelRow, f"model {id}", id=id, tenant=tenant)
    return row, get(connection, PolicyRow, f"policy {row.policy}", id=row.policy)


def list_models(connection: Connection, tenant: str, page: Page | None = None) -> list[ModelRow]:
    """Newest first."""
    return page_of(connection, ModelRow, (ModelRow.created, ModelRow.id), page, descending=True, tenant=tenant)


def count_models(connection: Connection, tenant: str) -> int:
    return connection.execute(select(func.count()).select_from(ModelRow).filter_by(tenant=tenant)).scalar_one()


def ids_of_session(connection: Connection, tenant: str, session: str) -> tuple[list[str], list[str]]:
    """The models of a session, newest first, and its samplers, oldest first."""
    models = select(ModelRow.id).filter_by(tenant=tenant, session=session)
    samplers = select(SamplerRow.id).filter_by(tenant=tenant, session=session)
    return (
        [*connection.execute(models.order_by(ModelRow.created.desc(), ModelRow.id)).scalars()],
        [*connection.execute(samplers.order_by(SamplerRow.created, SamplerRow.id)).scalars()],
    )


def policies_of_session(connection: Connection, tenant: str, session: str) -> list[str]:
    """The policies of a session's models."""
    query = select(ModelRow.policy).filter_by(tenant=tenant, session=session)
    return list(connection.execute(query).scalars())


def publish_inflight(connection: Connection, model: str, version: int) -> None:
    """The model's in-flight samplers follow ``version`` from now on."""
    connection.execute(update(ModelRow).where(ModelRow.id == model).values(inflight=version))


def over_models(connection: Connection, before: float) -> list[str]:
    """Ids, of every tenant, of models of sessions finished before ``before`` that have a head or calls, all of which
    were answered before ``before`` as well."""
    ended = select(SessionRow.id).where(SessionRow.finished < before)
    headed = exists().where(PolicyRow.id == ModelRow.policy, PolicyRow.head_version.is_not(None))
    called = exists().where(FutureRow.model == ModelRow.id)
    late = or_(FutureRow.finished.is_(None), FutureRow.finished >= before)
    waits = exists().where(FutureRow.model == ModelRow.id, late)
    query = select(ModelRow.id).where(ModelRow.session.in_(ended), or_(headed, called), not_(waits))
    return list(connection.execute(query).scalars())


def end_model(connection: Connection, id: str) -> list[str]:
    """Delete its calls; its policy has no head and keeps no version. Returns the hashes of the versions that it kept;
    :func:`~rookery.storage.repositories.versions.unnamed` tells which of them nothing names now."""
    policy = connection.execute(select(ModelRow.policy).where(ModelRow.id == id)).scalar_one()
    connection.execute(delete(FutureRow).where(FutureRow.model == id))
    connection.execute(update(PolicyRow).where(PolicyRow.id == policy).values(head_version=None))
    mine = (VersionRow.policy == policy) & VersionRow.kept.is_(True)
    kept = connection.execute(select(VersionRow.hash).where(mine).distinct()).scalars().all()
    connection.execute(update(VersionRow).where(mine).values(kept=False))
    return list(kept)


def commit_model(
    connection: Connection,
    version: NextVersion,
    model: str,
    done_seq: int,
    outcome: tuple[str, bytes] | None = None,
) -> VersionRow:
    """The next version of a model's policy, with the calls up to ``done_seq`` in it and, where given, the ``outcome``
    (future's id, its bytes) of the call that made it: all of it or nothing. Those calls need not be kept any more.
    Raises :class:`Conflict` as :func:`~rookery.storage.repositories.versions.commit_step` does."""
    row = add_version(connection, version)
    connection.execute(update(ModelRow).where(ModelRow.id == model).values(done_seq=done_seq, used=version.time))
    if outcome is not None:
        _write_outcome(connection, *outcome, version.time)
    over = (FutureRow.model == model) & (FutureRow.seq <= done_seq) & FutureRow.outcome.is_not(None)
    connection.execute(update(FutureRow).where(over).values(call=b""))
    return row


# --- samplers ---------------------------------------------------------------------------------------------------------


def add_sampler(connection: Connection, row: SamplerRow) -> SamplerRow:
    """The sampler; the one with its id, if there is one. Raises :class:`Conflict` if that has other weights,
    :class:`NotFound` where its weights were deleted meanwhile."""
    live = not row.hash or is_live(connection, row.hash)
    if not add_new(connection, row):
        if not live:
            raise NotFound(f"the weights of sampler {row.id} were deleted meanwhile")
        return row
    found = get_sampler(connection, row.tenant, row.id)
    if _weights(found) != _weights(row):
        raise Conflict(f"sampler {row.id} was created before, of other weights; number your samplers from 0 on")
    return found


def _weights(row: SamplerRow) -> tuple[str | bool | None, ...]:
    """The values that a repetition shares with the first request. A checkpoint may be overwritten meanwhile."""
    return row.base_model, row.path, row.model, row.inflight, "" if row.path else row.hash


def get_sampler(connection: Connection, tenant: str, id: str) -> SamplerRow:
    """Raises :class:`NotFound` if this tenant has no such sampler."""
    return get(connection, SamplerRow, f"sampler {id}", id=id, tenant=tenant)


def used_sampler(connection: Connection, id: str, time: float) -> None:
    """A client used it."""
    connection.execute(update(SamplerRow).where(SamplerRow.id == id).values(used=time))


def idle_samplers(connection: Connection, before: float) -> list[SamplerRow]:
    """Kept samplers with an artifact that nobody used since ``before``."""
    return rows(connection, SamplerRow, SamplerRow.kept.is_(True), SamplerRow.hash != "", SamplerRow.used < before)


def keep_sampler(connection: Connection, id: str) -> None:
    """Its artifact exists, and stays. Raises :class:`NotFound` where it was deleted meanwhile."""
    digest = connection.execute(select(SamplerRow.hash).where(SamplerRow.id == id)).scalar()
    if not digest or not is_live(connection, digest):
        raise NotFound(f"the weights of sampler {id} were deleted meanwhile")
    connection.execute(update(SamplerRow).where(SamplerRow.id == id).values(kept=True))


def release_sampler(connection: Connection, id: str) -> str | None:
    """Its weights need not be kept. Returns their hash if nothing names them now."""
    connection.execute(update(SamplerRow).where(SamplerRow.id == id).values(kept=False))
    return unnamed(connection, connection.execute(select(SamplerRow.hash).where(SamplerRow.id == id)).scalar() or "")


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save_checkpoint(
    connection: Connection, row: CheckpointRow, overwrite: bool, outcome: tuple[str, bytes] | None = None
) -> str | None:
    """Keep a version under a name, and store the ``outcome`` (future's id, its bytes) of the call that asked for it.
    Returns the hash of the artifact that it replaces, if nothing names that now. Raises :class:`Conflict` where the
    name is taken and ``overwrite`` is False."""
    key = {"model": row.model, "kind": row.kind, "name": row.name}
    known = find(connection, CheckpointRow, **key)
    if known is not None and not overwrite:
        over = known.expires is not None and known.expires <= row.created
        state = "has expired and is about to be deleted" if over else "exists already"
        raise Conflict(f"{row.path} {state}; choose another name, or overwrite")
    connection.execute(delete(CheckpointRow).filter_by(**key))
    add(connection, row)
    if outcome is not None:
        _write_outcome(connection, *outcome, row.created)
        _pass_over(connection, outcome[0])
    return unnamed(connection, known.hash) if known is not None else None


def _unexpired(at: float) -> ColumnElement[bool]:
    return or_(CheckpointRow.expires.is_(None), CheckpointRow.expires > at)


def get_checkpoint(connection: Connection, tenant: str, model: str, kind: str, name: str) -> CheckpointRow:
    """Raises :class:`NotFound` if this tenant has none there."""
    key = {"model": model, "kind": kind, "name": name, "tenant": tenant}
    return get(connection, CheckpointRow, f"checkpoint tinker://{model}/{kind}/{name}", **key)


def list_checkpoints(
    connection: Connection, tenant: str, model: str | None = None, page: Page | None = None, at: float | None = None
) -> list[CheckpointRow]:
    """Newest first; those of one model where it is given. ``at``: without those that have expired by then."""
    key = {"tenant": tenant} | ({} if model is None else {"model": model})
    order = (CheckpointRow.created, CheckpointRow.model, CheckpointRow.kind, CheckpointRow.name)
    there = () if at is None else (_unexpired(at),)
    return page_of(connection, CheckpointRow, order, page, *there, descending=True, **key)


def checkpoint_cursor(row: CheckpointRow) -> tuple[float, str, str, str]:
    """Its values in the order of :func:`list_checkpoints`."""
    return row.created, row.model, row.kind, row.name


def count_checkpoints(connection: Connection, tenant: str, at: float) -> int:
    """The number of a tenant's checkpoints, without those that have expired at the time ``at``."""
    query = select(func.count()).select_from(CheckpointRow).where(_unexpired(at)).filter_by(tenant=tenant)
    return connection.execute(query).scalar_one()


def newest_checkpoints(
    connection: Connection, tenant: str, models: Sequence[str], at: float
) -> dict[tuple[str, CheckpointKind], CheckpointRow]:
    """The newest checkpoint of each kind of these models that has not expired at the time ``at``."""
    mine = (CheckpointRow.tenant == tenant) & CheckpointRow.model.in_(models) & _unexpired(at)
    rank = func.row_number().over(
        partition_by=(CheckpointRow.model, CheckpointRow.kind),
        order_by=(CheckpointRow.created.desc(), CheckpointRow.name.desc()),
    )
    ranked = select(CheckpointRow.model, CheckpointRow.kind, CheckpointRow.name, rank.label("rank")).where(mine)
    first = ranked.subquery()
    key = (CheckpointRow.model == first.c.model) & (CheckpointRow.kind == first.c.kind)
    query = select(CheckpointRow).join(first, key & (CheckpointRow.name == first.c.name)).where(first.c.rank == 1)
    return {(row.model, row.kind): row for row in fetch_all(connection, CheckpointRow, query)}


def expire_checkpoint(
    connection: Connection, tenant: str, model: str, kind: str, name: str, expires: float | None, at: float
) -> None:
    """Set when it expires; None is never. Raises :class:`NotFound`, also for one that has expired at the time
    ``at``."""
    key = {"model": model, "kind": kind, "name": name, "tenant": tenant}
    mine = update(CheckpointRow).where(_unexpired(at)).filter_by(**key)
    if connection.execute(mine.values(expires=expires)).rowcount == 0:
        raise NotFound(f"no checkpoint tinker://{model}/{kind}/{name}")


def expired_checkpoints(connection: Connection, time: float) -> list[CheckpointRow]:
    """The expired checkpoints of every tenant."""
    return rows(connection, CheckpointRow, CheckpointRow.expires <= time)


def delete_checkpoint(connection: Connection, tenant: str, model: str, kind: str, name: str) -> str | None:
    """Returns its artifact's hash if nothing names that now. Raises :class:`NotFound`."""
    row = get_checkpoint(connection, tenant, model, kind, name)
    connection.execute(delete(CheckpointRow).filter_by(model=model, kind=kind, name=name))
    return unnamed(connection, row.hash)


# --- calls and their outcomes -----------------------------------------------------------------------------------------


def open_future(connection: Connection, row: FutureRow) -> tuple[FutureRow, bool]:
    """Store a call; returns it and True. If there is one with its id, returns that one as it is now and False."""
    return add_or_find(connection, row, id=row.id)


def finish_future(connection: Connection, id: str, outcome: bytes, time: float, *, trace: bool = True) -> None:
    """Store an outcome, unless there is one. The call stays where a model may have to replay it: not where it left no
    ``trace`` in the model and neither did any between it and the policy's head."""
    _write_outcome(connection, id, outcome, time)
    if trace:
        connection.execute(_EMPTY_CALL, {"future": id, "call": b""})
    else:
        _pass_over(connection, id)


def get_future(connection: Connection, tenant: str, id: str) -> FutureRow:
    """Raises :class:`NotFound` if this tenant has none by that id (any more)."""
    return get(connection, FutureRow, f"future {id}", id=id, tenant=tenant)


def open_futures(connection: Connection) -> list[FutureRow]:
    """The futures of every tenant without an outcome, oldest first: the calls that a starting controller takes up."""
    return rows(connection, FutureRow, FutureRow.outcome.is_(None), order_by=(FutureRow.created, FutureRow.id))


def futures_behind(connection: Connection, model: str, seq: int) -> list[FutureRow]:
    """A model's calls later than ``seq``, in order."""
    return rows(connection, FutureRow, FutureRow.model == model, FutureRow.seq > seq, order_by=(FutureRow.seq,))


def drop_futures(connection: Connection, before: float, fetched: Sequence[str] = ()) -> int:
    """Delete outcomes older than ``before``, and those of the futures ``fetched``, that no model may have to replay, up
    to :data:`~rookery.storage.columns.DELETED_AT_ONCE` of them; returns their number."""
    done = select(ModelRow.done_seq).where(ModelRow.id == FutureRow.model).scalar_subquery()
    free = FutureRow.model.is_(None) | (FutureRow.seq <= done)
    over = (FutureRow.finished < before) | (FutureRow.id.in_(fetched) & FutureRow.finished.is_not(None))
    return delete_some(connection, FutureRow, DELETED_AT_ONCE, over, free)


def stored_futures(connection: Connection, ids: Sequence[str]) -> list[str]:
    """The ids among ``ids`` of the futures that are stored."""
    return list(connection.execute(select(FutureRow.id).where(FutureRow.id.in_(ids))).scalars())


def _write_outcome(connection: Connection, id: str, outcome: bytes, time: float) -> None:
    """The first outcome of a future stays."""
    connection.execute(_FINISH_FUTURE, {"future": id, "outcome": outcome, "finished": time})


def _pass_over(connection: Connection, id: str) -> None:
    """The call, which has its outcome, left no trace in its model, if it has one. It need not be replayed if that holds
    of all calls before it."""
    model, seq = connection.execute(select(FutureRow.model, FutureRow.seq).where(FutureRow.id == id)).one()
    if model is not None:
        follows = (ModelRow.id == model) & (ModelRow.done_seq == seq - 1)
        if not connection.execute(update(ModelRow).where(follows).values(done_seq=seq)).rowcount:
            return
    connection.execute(update(FutureRow).where(FutureRow.id == id).values(call=b""))
