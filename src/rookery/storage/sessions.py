"""Clients' sessions and what belongs to them: models, samplers, named checkpoints.

* A thing is made once under its id, or idempotency key; the second attempt gets the first one's row.
* A checkpoint or a kept sampler keeps its artifact. Letting one go answers the hash when nothing names it any more.
* A model whose session is over keeps nothing: only what checkpoints and samplers name stays of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import asdict
from sqlalchemy import Connection, delete, exists, func, insert, not_, or_, select, update
from sqlalchemy.exc import IntegrityError

from rookery.errors import Conflict, NotFound
from rookery.storage import models
from rookery.storage.db import Store
from rookery.storage.futures import pass_over, write_outcome
from rookery.storage.rows import CheckpointRow, ModelRow, NewPolicy, PolicyRow, SamplerRow, SessionRow
from rookery.storage.versions import is_live

_sessions, _models, _samplers = models.sessions, models.models, models.samplers
_checkpoints, _policies, _versions, _futures = models.checkpoints, models.policies, models.versions, models.futures


class Sessions(Store):
    # --- sessions ---------------------------------------------------------------------------------------------------

    def add_session(self, row: SessionRow) -> SessionRow:
        """The session; the one that this tenant made with the same idempotency key, if there is one."""
        try:
            with self._writing() as connection:
                connection.execute(insert(_sessions).values(asdict(row)))
        except IntegrityError:
            with self._reading() as connection:
                key = {"tenant": row.tenant, "idempotency_key": row.idempotency_key}
                known = connection.execute(select(_sessions).filter_by(**key)).one_or_none()
            if known is None:
                raise
            return SessionRow(**known._mapping)
        return row

    def get_session(self, tenant: str, id: str) -> SessionRow:
        """Raises :class:`NotFound` if this tenant has no such session."""
        with self._reading() as connection:
            row = connection.execute(select(_sessions).filter_by(id=id, tenant=tenant)).one_or_none()
        if row is None:
            raise NotFound(f"no session {id}")
        return SessionRow(**row._mapping)

    def list_sessions(self, tenant: str) -> list[SessionRow]:
        """Newest first."""
        query = select(_sessions).filter_by(tenant=tenant).order_by(_sessions.c.created.desc(), _sessions.c.id)
        with self._reading() as connection:
            return [SessionRow(**row._mapping) for row in connection.execute(query)]

    def seen_session(self, id: str, time: float) -> None:
        with self._writing() as connection:
            connection.execute(update(_sessions).where(_sessions.c.id == id).values(seen=time))

    def finish_session(self, id: str, status: str, time: float) -> None:
        """The first end stays."""
        alive = (_sessions.c.id == id) & _sessions.c.finished.is_(None)
        with self._writing() as connection:
            connection.execute(update(_sessions).where(alive).values(finished=time, status=status))

    def silent_sessions(self, before: float) -> list[SessionRow]:
        """Of every tenant, those under way whose client was last heard of before ``before``."""
        silent = _sessions.c.finished.is_(None) & (_sessions.c.seen < before)
        with self._reading() as connection:
            return [SessionRow(**row._mapping) for row in connection.execute(select(_sessions).where(silent))]

    # --- models -----------------------------------------------------------------------------------------------------

    def add_model(self, row: ModelRow, policy: NewPolicy) -> None:
        """A model and its policy. Raises :class:`Conflict` if its id is taken."""
        owned = PolicyRow(
            id=policy.id, tenant=row.tenant, job=None, name=policy.name, rank=policy.rank, alpha=policy.alpha,
            targets=list(policy.targets), head_version=None, lease=0,
        )  # fmt: skip
        try:
            with self._writing() as connection:
                connection.execute(insert(_policies).values(asdict(owned)))
                connection.execute(insert(_models).values(asdict(row)))
        except IntegrityError:
            raise Conflict(f"model {row.id} exists already") from None

    def get_model(self, tenant: str, id: str) -> tuple[ModelRow, PolicyRow]:
        """Raises :class:`NotFound` if this tenant has no such model."""
        with self._reading() as connection:
            row = connection.execute(select(_models).filter_by(id=id, tenant=tenant)).one_or_none()
            if row is None:
                raise NotFound(f"no model {id}")
            policy = connection.execute(select(_policies).filter_by(id=row.policy)).one()
        return ModelRow(**row._mapping), PolicyRow(**policy._mapping)

    def list_models(self, tenant: str, session: str | None = None) -> list[ModelRow]:
        """Newest first; those of one session where it is given."""
        query = select(_models).filter_by(tenant=tenant).order_by(_models.c.created.desc(), _models.c.id)
        if session is not None:
            query = query.filter_by(session=session)
        with self._reading() as connection:
            return [ModelRow(**row._mapping) for row in connection.execute(query)]

    def publish_inflight(self, model: str, version: int) -> None:
        """The model's in-flight samplers follow ``version`` from now on."""
        with self._writing() as connection:
            connection.execute(update(_models).where(_models.c.id == model).values(inflight=version))

    def over_models(self, before: float) -> list[str]:
        """Ids, of every tenant, of models of sessions finished before ``before`` that have a head or calls, all of them
        answered before ``before`` as well."""
        ended = select(_sessions.c.id).where(_sessions.c.finished < before)
        headed = exists().where(_policies.c.id == _models.c.policy, _policies.c.head_version.is_not(None))
        called = exists().where(_futures.c.model == _models.c.id)
        late = or_(_futures.c.finished.is_(None), _futures.c.finished >= before)
        waits = exists().where(_futures.c.model == _models.c.id, late)
        query = select(_models.c.id).where(_models.c.session.in_(ended), or_(headed, called), not_(waits))
        with self._reading() as connection:
            return list(connection.execute(query).scalars())

    def end_model(self, id: str) -> list[str]:
        """Its calls are forgotten, its policy has no head and keeps no version. Answers the hashes of those that it
        kept; which of them nothing names now, :meth:`Versions.unnamed` tells."""
        with self._writing() as connection:
            policy = connection.execute(select(_models.c.policy).where(_models.c.id == id)).scalar_one()
            connection.execute(delete(_futures).where(_futures.c.model == id))
            connection.execute(update(_policies).where(_policies.c.id == policy).values(head_version=None))
            mine = (_versions.c.policy == policy) & _versions.c.kept.is_(True)
            kept = connection.execute(select(_versions.c.hash).where(mine).distinct()).scalars().all()
            connection.execute(update(_versions).where(mine).values(kept=False))
            return list(kept)

    # --- samplers ---------------------------------------------------------------------------------------------------

    def add_sampler(self, row: SamplerRow) -> SamplerRow:
        """The sampler; the one with its id, if there is one."""
        try:
            with self._writing() as connection:
                connection.execute(insert(_samplers).values(asdict(row)))
        except IntegrityError:
            return self.get_sampler(row.tenant, row.id)
        return row

    def get_sampler(self, tenant: str, id: str) -> SamplerRow:
        """Raises :class:`NotFound` if this tenant has no such sampler."""
        with self._reading() as connection:
            row = connection.execute(select(_samplers).filter_by(id=id, tenant=tenant)).one_or_none()
        if row is None:
            raise NotFound(f"no sampler {id}")
        return SamplerRow(**row._mapping)

    def list_samplers(self, tenant: str, session: str) -> list[SamplerRow]:
        """Oldest first."""
        query = select(_samplers).filter_by(tenant=tenant, session=session)
        with self._reading() as connection:
            rows = connection.execute(query.order_by(_samplers.c.created, _samplers.c.id))
            return [SamplerRow(**row._mapping) for row in rows]

    def used_sampler(self, id: str, time: float) -> None:
        with self._writing() as connection:
            connection.execute(update(_samplers).where(_samplers.c.id == id).values(used=time))

    def join_sampler(self, tenant: str, id: str) -> int:
        """A number that no other client of this sampler has: 1, 2, …"""
        with self._writing() as connection:
            mine = (_samplers.c.id == id) & (_samplers.c.tenant == tenant)
            connection.execute(update(_samplers).where(mine).values(clones=_samplers.c.clones + 1))
            count = connection.execute(select(_samplers.c.clones).where(mine)).scalar()
        if count is None:
            raise NotFound(f"no sampler {id}")
        return int(count)

    def idle_samplers(self, before: float) -> list[SamplerRow]:
        """Kept samplers with weights of their own that nobody used since ``before``."""
        table = _samplers
        idle = table.c.kept.is_(True) & (table.c.hash != "") & (table.c.used < before)
        with self._reading() as connection:
            return [SamplerRow(**row._mapping) for row in connection.execute(select(table).where(idle))]

    def keep_sampler(self, id: str) -> None:
        """What it is made of is there, and stays."""
        with self._writing() as connection:
            connection.execute(update(_samplers).where(_samplers.c.id == id).values(kept=True))

    def let_sampler_go(self, id: str) -> str | None:
        """Its weights need not be kept. Answers their hash if nothing names them now."""
        with self._writing() as connection:
            connection.execute(update(_samplers).where(_samplers.c.id == id).values(kept=False))
            digest = connection.execute(select(_samplers.c.hash).where(_samplers.c.id == id)).scalar()
            return _freed(connection, digest)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, row: CheckpointRow, overwrite: bool, outcome: tuple[str, bytes] | None = None
    ) -> str | None:
        """Keeps a version under a name, and stores the ``outcome`` (future's id, its bytes) of the call that asked for
        it. Answers the hash of what it replaces, if nothing names that now. Raises :class:`Conflict` where the name is
        taken and not to be overwritten."""
        key = {"model": row.model, "kind": row.kind, "name": row.name}
        with self._writing() as connection:
            known = connection.execute(select(_checkpoints).filter_by(**key)).one_or_none()
            if known is not None and not overwrite:
                raise Conflict(f"{row.path} exists already; choose another name, or overwrite")
            connection.execute(delete(_checkpoints).filter_by(**key))
            connection.execute(insert(_checkpoints).values(asdict(row)))
            if outcome is not None:
                write_outcome(connection, *outcome, row.created)
                pass_over(connection, outcome[0])
            return _freed(connection, known.hash) if known is not None else None

    def get_checkpoint(self, tenant: str, model: str, kind: str, name: str) -> CheckpointRow:
        """Raises :class:`NotFound` if this tenant has none there."""
        key = {"model": model, "kind": kind, "name": name, "tenant": tenant}
        with self._reading() as connection:
            row = connection.execute(select(_checkpoints).filter_by(**key)).one_or_none()
        if row is None:
            raise NotFound(f"no checkpoint tinker://{model}/{kind}/{name}")
        return CheckpointRow(**row._mapping)

    def list_checkpoints(self, tenant: str, model: str | None = None) -> list[CheckpointRow]:
        """Newest first; those of one model where it is given."""
        table = _checkpoints
        query = select(table).filter_by(tenant=tenant).order_by(table.c.created.desc(), table.c.model, table.c.name)
        if model is not None:
            query = query.filter_by(model=model)
        with self._reading() as connection:
            return [CheckpointRow(**row._mapping) for row in connection.execute(query)]

    def expire_checkpoint(self, tenant: str, model: str, kind: str, name: str, expires: float | None) -> None:
        """Raises :class:`NotFound`."""
        key = {"model": model, "kind": kind, "name": name, "tenant": tenant}
        with self._writing() as connection:
            if connection.execute(update(_checkpoints).filter_by(**key).values(expires=expires)).rowcount == 0:
                raise NotFound(f"no checkpoint tinker://{model}/{kind}/{name}")

    def expired_checkpoints(self, time: float) -> list[CheckpointRow]:
        """Of every tenant."""
        with self._reading() as connection:
            rows = connection.execute(select(_checkpoints).where(_checkpoints.c.expires < time))
            return [CheckpointRow(**row._mapping) for row in rows]

    def delete_checkpoint(self, tenant: str, model: str, kind: str, name: str) -> str | None:
        """Answers its artifact's hash if nothing names that now. Raises :class:`NotFound`."""
        row = self.get_checkpoint(tenant, model, kind, name)
        with self._writing() as connection:
            connection.execute(delete(_checkpoints).filter_by(model=model, kind=kind, name=name))
            return _freed(connection, row.hash)

    def count_checkpoints(self, tenant: str) -> Mapping[str, int]:
        """By model."""
        table = _checkpoints
        query = select(table.c.model, func.count()).where(table.c.tenant == tenant).group_by(table.c.model)
        with self._reading() as connection:
            return {model: int(count) for model, count in connection.execute(query)}


def _freed(connection: Connection, digest: Any) -> str | None:
    return str(digest) if digest and not is_live(connection, str(digest)) else None
