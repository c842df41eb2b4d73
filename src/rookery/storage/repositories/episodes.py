"""Pages of a job's groups and episodes, for readers. Every query is of one job of one tenant.

Texts are in the stored trajectories and turns, which the encoding keeps as plain UTF-8: a search looks for those bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Text,
    and_,
    bindparam,
    func,
    literal,
    or_,
    select,
    type_coerce,
)

from rookery.storage.columns import fetch_all, fitting, get
from rookery.storage.models import EpisodeRow, GroupRow, GroupState, StepRow

_BRIEF = [
    column for column in EpisodeRow.__table__.columns if column.name not in ("turns", "trajectories", "train_logprobs")
]
"""All but the texts and tokens of an episode, which may be megabytes."""

TEXT_BYTES = func.length(EpisodeRow.trajectories) + func.length(EpisodeRow.turns)
"""Of an episode, as it is stored."""

GROUP_BYTES = 16 << 20
"""Of the texts of a group that are read at once, as they are stored."""

SEARCH_SECONDS = 0.08
"""After which a search ends with a place to continue from: it holds up nobody, and a page can show how far it is."""

SEARCHED_AT_ONCE = 1000
"""Episodes of one query of a search."""

FAILURES_COUNTED = 10_000
"""Failed episodes whose errors are counted."""


@dataclass(frozen=True)
class EpisodeChoice:
    """Which episodes of a job that have ended; None and empty: any."""

    step: int | None = None
    version: int | None = None
    group: str | None = None
    failed: bool | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    text: str = ""
    """Part of a text of the episode, or of its error."""
    before: tuple[float, str] | None = None
    """Only those that come after this one (its end and its id), newest first."""
    limit: int = 25


def version_of_step(connection: Connection, tenant: str, job: str, step: int) -> tuple[int, str] | None:
    """The version that contains a step, and the policy that took it, which is empty for the only one of a job; None for
    a step that is not committed."""
    query = select(StepRow.version, StepRow.policy).filter_by(tenant=tenant, job=job, step=step)
    found = connection.execute(query).one_or_none()
    return None if found is None else (found.version, found.policy)


def _consumed_by(version: int, policy: str) -> ColumnElement[bool]:
    """Whether the group was consumed by this version of this policy, as :func:`version_of_step` names them."""
    if not policy:
        return GroupRow.consumed_by == version
    uses, use = type_coerce(GroupRow.uses, Text), f'"{policy}":{version}'  # compact JSON: a comma or the end follows
    return or_(*(uses.contains(use + after, autoescape=True) for after in ",}"))


def groups_page(
    connection: Connection,
    tenant: str,
    job: str,
    *,
    consumed_by: tuple[int, str] | None = None,
    state: GroupState | None = None,
    offset: int = 0,
    limit: int = 50,
) -> tuple[list[GroupRow], int]:
    """Groups, newest first, with their episodes but without texts, and the number of all. ``consumed_by``: of
    this version and policy only (:func:`version_of_step`)."""
    where: list[ColumnElement[bool]] = [GroupRow.tenant == tenant, GroupRow.job == job]
    if consumed_by is not None:
        where.append(_consumed_by(*consumed_by))
    if state is not None:
        where.append(GroupRow.state == state)
    query = select(GroupRow).where(*where).order_by(GroupRow.ordinal.desc()).offset(offset).limit(limit)
    total = connection.execute(select(func.count()).select_from(GroupRow).where(*where)).scalar() or 0
    groups = fetch_all(connection, GroupRow, query)
    members = select(*_BRIEF).where(EpisodeRow.group_id.in_([group.id for group in groups]))
    by_group: dict[str, list[EpisodeRow]] = {}
    for episode in fetch_all(connection, EpisodeRow, members.order_by(EpisodeRow.member)):
        by_group.setdefault(episode.group_id, []).append(episode)
    for group in groups:
        group.episodes = tuple(by_group.get(group.id, ()))
    return groups, total


def get_group(connection: Connection, tenant: str, job: str, group: str, most: int = GROUP_BYTES) -> GroupRow:
    """A group with its episodes and their texts, without those of the last ones where all have more than ``most``
    bytes. Raises :class:`NotFound`."""
    row = get(connection, GroupRow, f"group {group} of job {job}", id=group, tenant=tenant, job=job)
    of_group, order = EpisodeRow.group_id == group, EpisodeRow.member
    sizes = connection.execute(select(TEXT_BYTES).where(of_group).order_by(order)).scalars()
    whole = fitting(sizes, most)
    texts = select(EpisodeRow).where(of_group).order_by(order).limit(whole)
    others = select(*_BRIEF).where(of_group).order_by(order).offset(whole)
    row.episodes = (*fetch_all(connection, EpisodeRow, texts), *fetch_all(connection, EpisodeRow, others))
    return row


def get_episode(connection: Connection, tenant: str, job: str, episode: str) -> tuple[GroupRow, EpisodeRow]:
    """An episode with its texts, and its group with all of that group's episodes, without theirs. Raises
    :class:`NotFound`."""
    row = get(connection, EpisodeRow, f"episode {episode} of job {job}", id=episode, tenant=tenant, job=job)
    group = get(connection, GroupRow, f"group {row.group_id}", id=row.group_id, tenant=tenant)
    members = select(*_BRIEF).where(EpisodeRow.group_id == group.id).order_by(EpisodeRow.member)
    group.episodes = tuple(fetch_all(connection, EpisodeRow, members))
    return group, row


@dataclass(frozen=True)
class FoundEpisodes:
    episodes: list[tuple[GroupRow, EpisodeRow]]
    """Each with its group."""
    next: tuple[float, str] | None
    """The place of the last episode that was looked at, for :attr:`EpisodeChoice.before`; None at the end of all."""


def episodes_page(
    connection: Connection, tenant: str, job: str, chosen: EpisodeChoice, *, seconds: float = SEARCH_SECONDS,
    at_once: int = SEARCHED_AT_ONCE,
) -> FoundEpisodes:  # fmt: skip
    """The episodes that ended last, newest first, with their texts. A search of a text, by queries of ``at_once``
    episodes, ends after so many ``seconds``, with what it found until then."""
    where: list[ColumnElement[bool]] = [EpisodeRow.tenant == tenant, EpisodeRow.job == job]
    if chosen.failed is None:
        where.append(EpisodeRow.state.in_(("done", "failed")))
    else:
        where.append(EpisodeRow.state == ("failed" if chosen.failed else "done"))
    version = chosen.version
    if chosen.step is not None:
        consumed = version_of_step(connection, tenant, job, chosen.step)
        if consumed is None:
            return FoundEpisodes([], None)
        of_step = select(GroupRow.id).where(GroupRow.job == job, _consumed_by(*consumed))
        where.append(EpisodeRow.group_id.in_(of_step))
    if version is not None:
        where.append(EpisodeRow.version == version)
    if chosen.group is not None:
        where.append(EpisodeRow.group_id == chosen.group)
    if chosen.min_reward is not None:
        where.append(EpisodeRow.reward >= chosen.min_reward)
    if chosen.max_reward is not None:
        where.append(EpisodeRow.reward <= chosen.max_reward)
    newest = (EpisodeRow.finished.desc(), EpisodeRow.id)
    if not chosen.text:
        query = select(EpisodeRow).where(*where, *_after(chosen.before)).order_by(*newest).limit(chosen.limit)
        ended = fetch_all(connection, EpisodeRow, query)
        cursor = (ended[-1].finished or 0.0, ended[-1].id) if len(ended) == chosen.limit else None
        return FoundEpisodes(_with_groups(connection, ended), cursor)
    contains = [_contains(connection, column) for column in (EpisodeRow.trajectories, EpisodeRow.turns)]
    found = or_(*contains, EpisodeRow.error.contains(chosen.text, autoescape=True))
    values, ended, cursor = {"searched": chosen.text.encode("utf-8", "replace")}, list[EpisodeRow](), chosen.before
    until = time.monotonic() + seconds
    while True:
        after = _after(cursor)
        looked_at = select(EpisodeRow.finished, EpisodeRow.id).where(*where, *after).order_by(*newest)
        last = connection.execute(looked_at.offset(at_once - 1).limit(1)).one_or_none()
        part = where + after if last is None else [*where, *after, _up_to(last.finished, last.id)]
        query = select(EpisodeRow).where(*part, found).order_by(*newest).limit(chosen.limit - len(ended))
        ended += fetch_all(connection, EpisodeRow, query, values)
        if len(ended) == chosen.limit:
            cursor = (ended[-1].finished or 0.0, ended[-1].id)
            break
        cursor = (last.finished, last.id) if last is not None else None
        if cursor is None or time.monotonic() > until:
            break
    return FoundEpisodes(_with_groups(connection, ended), cursor)


def _after(cursor: tuple[float, str] | None) -> list[ColumnElement[bool]]:
    """Behind a place in the order of episodes, newest first; None is its beginning."""
    if cursor is None:
        return []
    end, id = cursor  # the first condition is of an index alone
    return [EpisodeRow.finished <= end, or_(EpisodeRow.finished < end, EpisodeRow.id > id)]


def _up_to(end: float, id: str) -> ColumnElement[bool]:
    """Up to a place in that order, with it."""
    return and_(EpisodeRow.finished >= end, or_(EpisodeRow.finished > end, EpisodeRow.id <= id))


def _with_groups(connection: Connection, episodes: Sequence[EpisodeRow]) -> list[tuple[GroupRow, EpisodeRow]]:
    wanted = select(GroupRow).where(GroupRow.id.in_({episode.group_id for episode in episodes}))
    groups = {group.id: group for group in fetch_all(connection, GroupRow, wanted)}
    return [(groups[episode.group_id], episode) for episode in episodes]


def failure_counts(connection: Connection, tenant: str, job: str, limit: int) -> Sequence[tuple[str, int]]:
    """The most frequent errors of the newest :data:`FAILURES_COUNTED` failed episodes, with their numbers."""
    failed = select(EpisodeRow.error).where(
        EpisodeRow.tenant == tenant, EpisodeRow.job == job, EpisodeRow.state == "failed"
    )
    newest = failed.order_by(EpisodeRow.finished.desc()).limit(FAILURES_COUNTED).subquery()
    query = select(newest.c.error, func.count()).group_by(newest.c.error)
    query = query.order_by(func.count().desc(), newest.c.error).limit(limit)
    return [(str(error), int(number)) for error, number in connection.execute(query)]


def _contains(connection: Connection, column: Any) -> ColumnElement[bool]:
    """Whether the bytes of the parameter ``searched`` are part of the column."""
    searched = bindparam("searched", type_=column.type)
    if connection.dialect.name == "postgresql":
        return func.position(searched.op("IN")(column)) > literal(0)
    return func.instr(column, searched) > literal(0)
