"""Column types, the base class of the tables, and the way from rows to values.

* Text columns take any Python string: characters that PostgreSQL or SQLite cannot hold (NUL, lone surrogates) are
  replaced, so that an environment's strange error message never fails a transaction.
* JSON columns are text with ASCII escapes. They keep NaN and infinities, which a metric may be, and characters that
  PostgreSQL cannot hold: no statement reads them with the database's functions of JSON, which refuse both.
* Queries are Core statements on the mapped classes. Loading through an ORM ``Session`` takes a third more time, and no
  query here needs a unit of work.
* Building a statement takes about 100 µs, executing one that was built before 12 µs. Statements of frequent calls are
  therefore constants with bound parameters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import msgspec
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Dialect,
    Double,
    Insert,
    Select,
    Text,
    bindparam,
    delete,
    insert,
    literal,
    select,
    tuple_,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, InstrumentedAttribute, MappedAsDataclass
from sqlalchemy.types import TypeDecorator

from rookery.errors import NotFound
from rookery.protocol import Manifest


class SafeText(TypeDecorator[str]):
    """Any string; NUL and lone surrogates become replacement characters."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None:
            return None
        return value.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")


class JsonText(TypeDecorator[Any]):
    """Any JSON value, plus NaN and infinities."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str:
        return json.dumps(value, separators=(",", ":"))

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


class JsonPart(JsonText):
    """An object of JSON, of which only ``fields`` are read: others, which may be large, are passed over."""

    cache_ok = True

    def __init__(self, fields: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.fields = fields
        self._decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        try:
            found = {name: json.loads(bytes(raw)) for name, raw in self._decode(value).items() if name in self.fields}
        except msgspec.DecodeError:  # it has a NaN or an infinity
            found = {name: part for name, part in json.loads(value).items() if name in self.fields}
        return found


class ManifestJson(TypeDecorator[Manifest]):
    """A manifest, as the JSON of its fields."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Manifest | None, dialect: Dialect) -> str:
        return msgspec.json.encode(value).decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> Manifest | None:
        return None if value is None else msgspec.json.decode(value, type=Manifest)


class Base(MappedAsDataclass, DeclarativeBase, kw_only=True):
    type_annotation_map = {  # noqa: RUF012
        str: SafeText,
        int: BigInteger,
        float: Double,
        dict[str, Any]: JsonText,
        list[str]: JsonText,
        Manifest: ManifestJson,
    }


Row = TypeVar("Row", bound=Base)

PAGE, LONGEST_PAGE = 100, 1000
"""Rows of one page of a list, unless a request asks for another number, and at most."""


@dataclass(frozen=True)
class Page:
    """A part of a list: the first ``limit`` rows behind the one whose values in the list's order are ``after``. Reading
    it costs the same wherever it lies. ``offset`` rows are left out before it, for a protocol that counts rows."""

    limit: int = PAGE
    after: tuple[str | float, ...] = ()
    offset: int = 0


def columns(row: Base) -> dict[str, Any]:
    """The values of ``row`` by column."""
    return {name: getattr(row, name) for name in row.__table__.columns.keys()}  # noqa: SIM118


def add(connection: Connection, *rows: Base) -> None:
    """Insert rows of one table."""
    connection.execute(_insert(type(rows[0])), [columns(row) for row in rows])


def add_new(connection: Connection, row: Base) -> IntegrityError | None:
    """Insert ``row``, or return the error if that violates a constraint; the transaction continues either way."""
    try:
        with connection.begin_nested():
            add(connection, row)
    except IntegrityError as error:
        return error
    return None


def add_or_find(connection: Connection, row: Row, /, **key: Any) -> tuple[Row, bool]:
    """Insert ``row``; returns it and True. If that violates a constraint because there is a row with these values of
    ``key``, returns that row and False."""
    collision = add_new(connection, row)
    if collision is None:
        return row, True
    known = find(connection, type(row), **key)
    if known is None:
        raise collision
    return known, False


DELETED_AT_ONCE = 256
"""Rows of a long history that one transaction deletes: the writes of everybody wait for it."""


def delete_some(connection: Connection, kind: type[Base], most: int, /, *where: ColumnElement[bool]) -> int:
    """Delete up to ``most`` of the rows of ``kind`` for which all of ``where`` hold; returns their number."""
    keys = [*kind.__table__.primary_key]
    found = select(*keys).where(*where).limit(most)
    chosen = keys[0].in_(found) if len(keys) == 1 else tuple_(*keys).in_(found)
    return connection.execute(delete(kind).where(chosen)).rowcount


def fetch_all(
    connection: Connection, kind: type[Row], query: Select[Any], values: Mapping[str, Any] | None = None
) -> list[Row]:
    """The rows of ``query``, which selects ``kind``. ``values``: of its bound parameters."""
    return [kind(**row._mapping) for row in connection.execute(query, values)]


def rows(
    connection: Connection, kind: type[Row], /, *where: ColumnElement[bool], order_by: Iterable[Any] = (), **key: Any
) -> list[Row]:
    """The rows of ``kind`` for which all of ``where`` hold and whose columns have the values of ``key``."""
    return fetch_all(connection, kind, select(kind).where(*where).filter_by(**key).order_by(*order_by))


def page_of(
    connection: Connection,
    kind: type[Row],
    order: Sequence[InstrumentedAttribute[Any]],
    page: Page | None,
    /,
    *where: ColumnElement[bool],
    descending: bool = False,
    **key: Any,
) -> list[Row]:
    """A page of the rows of ``kind`` for which all of ``where`` hold and whose columns have the values of ``key``, all
    of them for None. ``order`` identifies a row."""
    return paged(connection, kind, select(kind).where(*where).filter_by(**key), order, page, descending)


def paged(
    connection: Connection,
    kind: type[Row],
    query: Select[Any],
    order: Sequence[InstrumentedAttribute[Any]],
    page: Page | None,
    descending: bool = False,
) -> list[Row]:
    """A page of the rows of ``query``, which selects ``kind``; all of them for None. ``order`` identifies a row."""
    query = query.order_by(*(column.desc() if descending else column for column in order))
    if page is not None:
        query = query.limit(page.limit).offset(page.offset or None)
        if page.after:
            cursor, found = tuple_(*order), tuple_(*map(literal, page.after, (column.type for column in order)))
            query = query.where(cursor < found if descending else cursor > found)
    return fetch_all(connection, kind, query)


def fitting(lengths: Iterable[int], most: float) -> int:
    """How many of the first rows, of these lengths, have up to ``most`` bytes together; one at least, where there is
    one."""
    count = 0
    for length in lengths:
        most -= length
        if count and most < 0:
            break
        count += 1
    return count


def fetch_one(
    connection: Connection, kind: type[Row], query: Select[Any], values: Mapping[str, Any] | None = None
) -> Row | None:
    """The only row of ``query``, which selects ``kind``, or None. ``values``: of its bound parameters."""
    row = connection.execute(query, values).one_or_none()
    return None if row is None else kind(**row._mapping)


def find(connection: Connection, kind: type[Row], /, **key: Any) -> Row | None:
    """The row of ``kind`` whose columns have these values (not None), of which there is at most one, or None."""
    return fetch_one(connection, kind, _select(kind, *key), key)


def get(connection: Connection, kind: type[Row], name: str, /, **key: Any) -> Row:
    """The row that :func:`find` finds. Raises :class:`NotFound`, saying "no ``name``"."""
    row = find(connection, kind, **key)
    if row is None:
        raise NotFound(f"no {name}")
    return row


@cache
def _insert(kind: type[Base]) -> Insert:
    return insert(kind)


@cache
def _select(kind: type[Base], *names: str) -> Select[Any]:
    columns = kind.__table__.columns
    return select(kind).where(*(columns[name] == bindparam(name) for name in names))
