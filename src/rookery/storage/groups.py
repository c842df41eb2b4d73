"""Groups and their episodes: the data cursor, what a restart finds, what was trained on.

* Training ordinals are handed out without gaps: the transaction that stores a group raises the job's cursor by one,
  and refuses any other ordinal. So no prompt is skipped or used twice, whatever order groups end in.
* open → ready | failed | dropped; ready → consumed (only in :meth:`Versions.commit_step`) | dropped; nothing else.
* An episode is closed once; a group closes its remaining episodes with itself.
* What changes groups or episodes takes the job's ``counters`` along where they are given, in the same transaction:
  after any crash they count what is stored, nothing twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Select, func, insert, select, update

from rookery.errors import Conflict, NotFound
from rookery.storage import models
from rookery.storage.db import Store
from rookery.storage.rows import EpisodeRow, GroupRow, GroupState, NewGroup

_groups, _episodes = models.groups, models.episodes


class Groups(Store):
    def add_groups(self, job: str, groups: Sequence[NewGroup]) -> None:
        """Stores groups with their episodes, all open. Raises :class:`Conflict`, and stores none, if the training
        ordinals are not the next ones, or the job is finished."""
        if not groups:
            return
        ordinals = [group.ordinal for group in groups if group.split == "train"]
        with self._writing() as connection:
            owner = connection.execute(select(models.jobs.c.tenant).where(models.jobs.c.id == job)).scalar()
            if owner is None:
                raise NotFound(f"no job {job}")
            if ordinals:
                _raise_cursor(connection, job, ordinals)
            connection.execute(insert(_groups), [_group_values(owner, job, group) for group in groups])
            members = [_episode_values(owner, job, group) for group in groups]
            if rows := [row for group_rows in members for row in group_rows]:
                connection.execute(insert(_episodes), rows)

    def save_turns(
        self,
        episode: str,
        turns: bytes,
        *,
        version: int | None = None,
        host_instance: str | None = None,
        counters: Mapping[str, Any] | None = None,
    ) -> bool:
        """Makes completed turns durable (all of them: they replace those saved before), and, where given, the version
        that the episode runs on and the host that holds it. False if the episode is closed: it changes no more."""
        values: dict[str, Any] = {"turns": turns}
        if version is not None:
            values["version"] = version
        if host_instance is not None:
            values["host_instance"] = host_instance
        return self._change_open_episode(episode, values, counters)

    def finish_episode(
        self,
        episode: str,
        state: Literal["done", "failed"],
        time: float,
        *,
        trajectories: bytes = b"",
        reward: float | None = None,
        metrics: Mapping[str, Any] | None = None,
        version: int | None = None,
        error: str = "",
        counters: Mapping[str, Any] | None = None,
    ) -> bool:
        """Closes an episode; the first one to do so wins. False if it was closed before."""
        values: dict[str, Any] = {
            "state": state,
            "trajectories": trajectories,
            "reward": reward,
            "metrics": dict(metrics or {}),
            "error": error,
            "finished": time,
        }
        if version is not None:
            values["version"] = version
        return self._change_open_episode(episode, values, counters)

    def finish_group(
        self,
        group: str,
        state: Literal["ready", "failed", "dropped"],
        time: float,
        *,
        min_version: int | None = None,
        reason: str = "",
        counters: Mapping[str, Any] | None = None,
    ) -> None:
        """Closes an open group. Raises :class:`Conflict` if it is not open, or is to be ready with an open episode."""
        with self._writing() as connection:
            values = {"state": state, "min_version": min_version, "reason": reason, "finished": time}
            is_open = (_groups.c.id == group) & (_groups.c.state == "open")
            if connection.execute(update(_groups).where(is_open).values(values)).rowcount == 0:
                raise Conflict(f"group {group} is not open")
            unfinished = _drop_open_episodes(connection, [group], time, reason)
            if state == "ready" and unfinished:
                raise Conflict(f"group {group} still has {unfinished} open episodes")
            _save_counters(connection, select(_groups.c.job).where(_groups.c.id == group), counters)

    def drop_groups(
        self, groups: Sequence[str], reason: str, time: float, *, counters: Mapping[str, Any] | None = None
    ) -> list[str]:
        """Drops those that are open or ready; answers which (the others were closed before and stay as they are)."""
        with self._writing() as connection:
            found = drop_alive(connection, _groups.c.id.in_(groups), time, reason)
            _save_counters(connection, select(_groups.c.job).where(_groups.c.id.in_(groups[:1])), counters)
        return sorted(found, key=list(groups).index)

    def open_groups(self, job: str) -> list[GroupRow]:
        """With episodes and their turns, by split and ordinal: what a restarted controller goes on with."""
        return self._groups_in(job, "open")

    def ready_groups(self, job: str) -> list[GroupRow]:
        """With episodes and their trajectories, by split and ordinal: what waits to be trained on."""
        return self._groups_in(job, "ready")

    def group_counts(self, tenant: str, job: str, split: str = "train") -> dict[GroupState, int]:
        """How many groups of the split are in each state."""
        query = select(_groups.c.state, func.count()).filter_by(tenant=tenant, job=job, split=split)
        with self._reading() as connection:
            return {row[0]: row[1] for row in connection.execute(query.group_by(_groups.c.state))}

    def recent_episodes(
        self, tenant: str, job: str, limit: int, version: int | None = None
    ) -> list[tuple[GroupRow, EpisodeRow]]:
        """The episodes that ended last (on one version, where given), newest first, each with its group. Those whose
        text was trimmed are left out."""
        query = select(_episodes).filter_by(tenant=tenant, job=job).where(_episodes.c.state.in_(("done", "failed")))
        query = query.where((func.length(_episodes.c.trajectories) > 0) | (_episodes.c.error != ""))
        if version is not None:
            query = query.where(_episodes.c.version == version)
        query = query.order_by(_episodes.c.finished.desc(), _episodes.c.id).limit(limit)
        with self._reading() as connection:
            ended = [EpisodeRow(**row._mapping) for row in connection.execute(query)]
            wanted = select(_groups).where(_groups.c.id.in_({episode.group_id for episode in ended}))
            groups = {row.id: GroupRow(**row._mapping) for row in connection.execute(wanted)}
        return [(groups[episode.group_id], episode) for episode in ended]

    def trim_episodes(self, job: str, keep: int) -> int:
        """Empties turns and trajectories of all but the ``keep`` episodes that ended last, where nothing needs them any
        more (their group is closed and not waiting to be trained on). Answers how many it emptied."""
        closed = select(_groups.c.id).where(_groups.c.job == job, _groups.c.state.not_in(("open", "ready")))
        recent = select(_episodes.c.id).where(_episodes.c.job == job, _episodes.c.finished.is_not(None))
        recent = recent.order_by(_episodes.c.finished.desc(), _episodes.c.id).limit(keep)
        full = (func.length(_episodes.c.turns) > 0) | (func.length(_episodes.c.trajectories) > 0)
        old = _episodes.c.group_id.in_(closed) & _episodes.c.id.not_in(recent) & full
        with self._writing() as connection:
            return connection.execute(
                update(_episodes).where(_episodes.c.job == job, old).values(turns=b"", trajectories=b"")
            ).rowcount

    def _groups_in(self, job: str, state: GroupState) -> list[GroupRow]:
        query = select(_groups).filter_by(job=job, state=state).order_by(_groups.c.split, _groups.c.ordinal)
        members = select(_episodes).join(_groups, _groups.c.id == _episodes.c.group_id)
        members = members.where(_groups.c.job == job, _groups.c.state == state).order_by(_episodes.c.member)
        with self._reading() as connection:
            groups = connection.execute(query).all()
            episodes: dict[str, list[EpisodeRow]] = {}
            for row in connection.execute(members):
                episodes.setdefault(row.group_id, []).append(EpisodeRow(**row._mapping))
        return [GroupRow(**row._mapping, episodes=tuple(episodes.get(row.id, ()))) for row in groups]

    def _change_open_episode(self, episode: str, values: Mapping[str, Any], counters: Mapping[str, Any] | None) -> bool:
        is_open: ColumnElement[bool] = (_episodes.c.id == episode) & (_episodes.c.state == "open")
        with self._writing() as connection:
            _save_counters(connection, select(_episodes.c.job).where(_episodes.c.id == episode), counters)
            return connection.execute(update(_episodes).where(is_open).values(dict(values))).rowcount == 1


def _raise_cursor(connection: Connection, job: str, ordinals: Sequence[int]) -> None:
    start = min(ordinals)
    if sorted(ordinals) != list(range(start, start + len(ordinals))):
        raise Conflict(f"training groups must have consecutive ordinals, given {sorted(ordinals)}")
    free = (models.jobs.c.id == job) & (models.jobs.c.cursor == start) & models.jobs.c.finished.is_(None)
    moved = connection.execute(update(models.jobs).where(free).values(cursor=start + len(ordinals)))
    if moved.rowcount == 0:
        raise Conflict(f"job {job} is finished, or its next training group is not number {start}")


def _save_counters(connection: Connection, job: Select[tuple[str]], counters: Mapping[str, Any] | None) -> None:
    if counters is not None:
        mine = models.jobs.c.id == job.scalar_subquery()
        connection.execute(update(models.jobs).where(mine).values(counters=dict(counters)))


def drop_alive(connection: Connection, which: ColumnElement[bool], time: float, reason: str) -> Sequence[str]:
    """Drops the open and the ready ones of these groups, with their open episodes; answers which they were."""
    alive = which & _groups.c.state.in_(("open", "ready"))
    found = connection.execute(select(_groups.c.id).where(alive).with_for_update()).scalars().all()
    values = {"state": "dropped", "reason": reason, "finished": time}
    connection.execute(update(_groups).where(_groups.c.id.in_(found)).values(values))
    _drop_open_episodes(connection, found, time, reason)
    return found


def _drop_open_episodes(connection: Connection, groups: Sequence[str], time: float, reason: str) -> int:
    left = _episodes.c.group_id.in_(groups) & (_episodes.c.state == "open")
    values = {"state": "dropped", "error": reason, "finished": time}
    return connection.execute(update(_episodes).where(left).values(values)).rowcount


def _group_values(tenant: str, job: str, group: NewGroup) -> dict[str, Any]:
    return {
        "id": group.id,
        "tenant": tenant,
        "job": job,
        "ordinal": group.ordinal,
        "split": group.split,
        "prompt": group.prompt,
        "seed": group.seed,
        "state": "open",
        "created": group.created,
        "reason": "",
    }


def _episode_values(tenant: str, job: str, group: NewGroup) -> list[dict[str, Any]]:
    return [
        {
            "id": episode.id,
            "tenant": tenant,
            "job": job,
            "group_id": group.id,
            "member": episode.member,
            "state": "open",
            "version": episode.version,
            "seed": episode.seed,
            "turns": b"",
            "trajectories": b"",
            "metrics": {},
            "host_instance": "",
            "error": "",
        }
        for episode in group.episodes
    ]
