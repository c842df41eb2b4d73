"""Lists by the page.

A list's route takes ``limit`` and ``after`` and returns the first rows behind the place ``after``. Where more follow,
the response's header :data:`NEXT` is the ``after`` of the next page. The place is that of the last row of the page in
the list's order, so a row that is added or deleted meanwhile moves no other into or out of the next page.

Rows may be large, such as jobs with their specs: :func:`encoded_page` makes the response in a thread, a row at a time,
and a page of them ends at :data:`PAGE_BYTES`.
"""

from __future__ import annotations

import json
import math
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Query, Response

from rookery.errors import UserError
from rookery.storage.columns import LONGEST_PAGE, PAGE, Page
from rookery.storage.store import Writer

T = TypeVar("T")

NEXT = "X-Next-Page"
"""The header with the place of the next page."""

PAGE_BYTES = 4 << 20
"""A page of rows that may be large ends with the row that reaches it, also before its ``limit``."""

FIRST_ROWS, MOST_ROWS = 8, 256
"""Rows that are read first of such a page, and at most at once: their size decides how many follow."""

Limit = Annotated[int, Query(ge=1, le=LONGEST_PAGE, description="Rows of the page")]
Cursor = Annotated[str, Query(max_length=2000, description=f"The {NEXT} header of the page before")]


class Paging:
    """The page that a request asks for."""

    def __init__(self, response: Response, limit: int, after: str) -> None:
        self._response = response
        self._limit = limit
        self._after = after

    async def read(
        self,
        fetch: Callable[[Page], Awaitable[Sequence[T]]],
        cursor: Callable[[T], tuple[str | float, ...]],
        *kinds: type,
    ) -> Sequence[T]:
        """The rows of the page, which ``fetch`` reads; ``cursor(row)`` has the values of the list's order, which are of
        these ``kinds``, texts (``str``) or numbers (``float``). Raises :class:`UserError`."""
        found = await fetch(Page(self._limit + 1, decoded(self._after, kinds)))
        if len(found) > self._limit:
            found = found[: self._limit]
            mark_next(self._response, encoded(cursor(found[-1])))
        return found

    async def encoded(
        self,
        threads: Writer,
        fetch: Callable[[Page], Awaitable[Sequence[T]]],
        encode: Callable[[T], bytes],
        cursor: Callable[[T], tuple[str | float, ...]],
        *kinds: type,
    ) -> Response:
        """The response with the rows of the page, as :func:`encoded_page` makes it. Raises :class:`UserError`."""
        start = decoded(self._after, kinds)

        async def read(count: int, last: T | None) -> Sequence[T]:
            return await fetch(Page(count, start if last is None else cursor(last)))

        return await encoded_page(threads, self._limit, read, encode, lambda row: encoded(cursor(row)))


async def encoded_page(
    threads: Writer,
    limit: int,
    fetch: Callable[[int, T | None], Awaitable[Sequence[T]]],
    encode: Callable[[T], bytes],
    cursor: Callable[[T], object],
    most: int = PAGE_BYTES,
) -> Response:
    """A page of up to ``limit`` rows as a JSON list, which ends where it reaches ``most`` bytes. ``fetch(count, last)``
    reads up to ``count`` rows behind the row ``last``; ``encode(row)`` makes JSON of one in one of the ``threads``.
    Where more follow, the header :data:`NEXT` is the ``cursor(row)`` of the last one."""
    parts: list[bytes] = []
    last: T | None = None
    size, more = 0, True
    while more and len(parts) < limit and size < most:
        fitting = (most - size) * len(parts) // max(1, size) if parts else FIRST_ROWS
        count = max(1, min(limit - len(parts), fitting, MOST_ROWS))
        rows = await fetch(count + 1, last)
        more, rows = len(rows) > count, rows[:count]
        made = await threads(lambda found: [*map(encode, found)], rows)
        parts += made
        size += sum(map(len, made))
        last = rows[-1] if rows else last
    response = Response(b"[" + b",".join(parts) + b"]", media_type="application/json")
    if more and last is not None:
        mark_next(response, cursor(last))
    return response


async def paging(response: Response, limit: Limit = PAGE, after: Cursor = "") -> Paging:
    return Paging(response, limit, after)


Paged = Annotated[Paging, Depends(paging)]


def mark_next(response: Response, cursor: object) -> None:
    """More rows follow behind ``cursor``."""
    response.headers[NEXT] = str(cursor)


def encoded(cursor: tuple[str | float, ...]) -> str:
    """A place as the header :data:`NEXT` has it."""
    return urlsafe_b64encode(json.dumps(cursor).encode()).decode().rstrip("=")


def decoded(
    text: str, kinds: Sequence[type], name: str = "after", source: str = f"the header {NEXT}"
) -> tuple[Any, ...]:
    """The place that :func:`encoded` wrote; empty for the empty text. Raises :class:`UserError`, which names the
    parameter and what gives it."""
    if not text:
        return ()
    try:
        cursor = json.loads(urlsafe_b64decode(text.encode() + b"=" * (-len(text) % 4)))
    except (ValueError, RecursionError):
        cursor = None
    if isinstance(cursor, list) and len(cursor) == len(kinds) and all(map(_fits, cursor, kinds)):
        return tuple(cursor)
    raise UserError(f"{name}: given no place in this list; give {source} of the page before")


def _fits(value: object, kind: type) -> bool:
    if kind is str:
        return isinstance(value, str) and value.isprintable() and value.isascii()
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and abs(value) < 2**63
    )
