"""Calls of clients and their outcomes.

* A call is stored before it is acknowledged, its outcome before it is told; the first of either stays.
* The calls of a model are its log: those behind its ``done_seq`` make its state again from the policy's head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import asdict
from sqlalchemy import Connection, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from rookery.errors import NotFound
from rookery.protocol import Manifest
from rookery.storage import models
from rookery.storage.db import Store
from rookery.storage.rows import FutureRow, VersionRow
from rookery.storage.versions import add_version

_futures, _models = models.futures, models.models


class Futures(Store):
    def open_future(self, row: FutureRow) -> tuple[FutureRow, bool]:
        """The call, and True; or, if there is one with its id, that one as it is now and False."""
        try:
            with self._writing() as connection:
                connection.execute(insert(_futures).values(asdict(row)))
        except IntegrityError:
            with self._reading() as connection:
                known = connection.execute(select(_futures).filter_by(id=row.id)).one_or_none()
            if known is None:
                raise
            return FutureRow(**known._mapping), False
        return row, True

    def finish_future(self, id: str, outcome: bytes, time: float, *, trace: bool = True) -> None:
        """Stores an outcome, unless it has one. The call stays where a model may have to replay it: not where it left
        no ``trace`` in the model and neither did any between it and the policy's head."""
        with self._writing() as connection:
            write_outcome(connection, id, outcome, time)
            if trace:
                modelless = (_futures.c.id == id) & _futures.c.model.is_(None)
                connection.execute(update(_futures).where(modelless).values(call=b""))
            else:
                pass_over(connection, id)

    def get_future(self, tenant: str, id: str) -> FutureRow:
        """Raises :class:`NotFound` if this tenant has none by that id (any more)."""
        with self._reading() as connection:
            row = connection.execute(select(_futures).filter_by(id=id, tenant=tenant)).one_or_none()
        if row is None:
            raise NotFound(f"no future {id}")
        return FutureRow(**row._mapping)

    def open_futures(self) -> list[FutureRow]:
        """Of every tenant, those without an outcome, oldest first: what a starting controller takes up."""
        query = select(_futures).where(_futures.c.outcome.is_(None)).order_by(_futures.c.created, _futures.c.id)
        with self._reading() as connection:
            return [FutureRow(**row._mapping) for row in connection.execute(query)]

    def futures_behind(self, model: str, seq: int) -> list[FutureRow]:
        """A model's calls later than ``seq``, in order."""
        table = _futures
        query = select(table).where(table.c.model == model, table.c.seq > seq).order_by(table.c.seq)
        with self._reading() as connection:
            return [FutureRow(**row._mapping) for row in connection.execute(query)]

    def ended_samples(self, tenant: str, sampler: str, first: int, end: int) -> list[FutureRow]:
        """A sampler's requests numbered from ``first`` to before ``end`` that have an outcome, in the order of that."""
        table = _futures
        query = (
            select(table)
            .where(table.c.tenant == tenant, table.c.id.startswith(f"{sampler}/", autoescape=True))
            .where(table.c.seq >= first, table.c.seq < end, table.c.outcome.is_not(None))
            .order_by(table.c.finished, table.c.seq)
        )
        with self._reading() as connection:
            return [FutureRow(**row._mapping) for row in connection.execute(query)]

    def drop_futures(self, before: float) -> int:
        """Forgets outcomes older than ``before`` that no model may have to replay; answers how many."""
        table = _futures
        done = select(_models.c.done_seq).where(_models.c.id == table.c.model).scalar_subquery()
        free = table.c.model.is_(None) | (table.c.seq <= done)
        with self._writing() as connection:
            return connection.execute(delete(table).where(table.c.finished < before, free)).rowcount

    def commit_model(
        self,
        *,
        model: str,
        policy: str,
        lease: int,
        parent: int | None,
        manifest: Manifest,
        step: int,
        metrics: Mapping[str, Any],
        time: float,
        done_seq: int,
        outcome: tuple[str, bytes] | None = None,
    ) -> VersionRow:
        """The next version of a model's policy, with the calls up to ``done_seq`` in it and, where given, the
        ``outcome`` (future's id, its bytes) of the one that made it: all of it or nothing. Those calls need not be kept
        any more. Raises :class:`Conflict` as :meth:`Versions.commit_step` does."""
        with self._writing() as connection:
            row = add_version(
                connection, job=None, policy=policy, lease=lease, parent=parent, manifest=manifest, step=step,
                metrics=metrics, time=time,
            )  # fmt: skip
            mine = _models.c.id == model
            connection.execute(update(_models).where(mine).values(done_seq=done_seq, used=time))
            if outcome is not None:
                write_outcome(connection, *outcome, time)
            over = (_futures.c.model == model) & (_futures.c.seq <= done_seq) & _futures.c.outcome.is_not(None)
            connection.execute(update(_futures).where(over).values(call=b""))
        return row


def write_outcome(connection: Connection, id: str, outcome: bytes, time: float) -> None:
    """The first outcome of a future stays."""
    open_one = (_futures.c.id == id) & _futures.c.outcome.is_(None)
    connection.execute(update(_futures).where(open_one).values(outcome=outcome, finished=time))


def pass_over(connection: Connection, id: str) -> None:
    """The call, which has its outcome, left no trace in its model, if it has one. It is part of what need not be
    replayed if all before it is."""
    model, seq = connection.execute(select(_futures.c.model, _futures.c.seq).where(_futures.c.id == id)).one()
    if model is not None:
        follows = (_models.c.id == model) & (_models.c.done_seq == seq - 1)
        if not connection.execute(update(_models).where(follows).values(done_seq=seq)).rowcount:
            return
    connection.execute(update(_futures).where(_futures.c.id == id).values(call=b""))
