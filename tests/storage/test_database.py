"""The database, on SQLite and on PostgreSQL: atomic commits, the data cursor, owners, the state after a restart."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import os
import pwd
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import event, func, make_url, select, text, update
from sqlalchemy.exc import OperationalError
from tests.support.disks import small_files
from tests.support.draws import examples
from tests.support.faces import served
from tests.support.storing import (
    check_counted_bytes,
    commit,
    connected,
    everything,
    future_row,
    group_counts,
    in_threads,
    make_ready,
    manifest,
    new_database,
    new_group,
    running_postgres,
    sampler_row,
    submit,
    visit,
)
from tests.support.waiting import until

from rookery.client import Client
from rookery.controller.outages import outage_of
from rookery.errors import (
    Conflict,
    DatabaseAway,
    DatabaseReadOnly,
    DatabaseRefuses,
    NotFound,
    RookeryError,
    StorageFull,
    Unavailable,
    UserError,
)
from rookery.scheduling.job_rules import followed_version
from rookery.server.launcher import Service, ServiceRules
from rookery.settings import Settings
from rookery.storage import db, models
from rookery.storage.columns import DELETED_AT_ONCE, Base, Page, add, rows
from rookery.storage.data_dir import hash_key, new_key
from rookery.storage.db import Database, DatabaseInUse
from rookery.storage.models import EpisodeRow, JobRow, PolicyRow, SessionRow, SpanRow, StepRow, UsageRow
from rookery.storage.repositories import episodes, jobs, runs, secrets, sessions, spans, tenants
from rookery.storage.repositories import versions as version_rows
from rookery.storage.repositories.episodes import EpisodeChoice, FoundEpisodes
from rookery.storage.repositories.versions import JobCommit, NextVersion


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/rookery.db"
    return new_database(request.getfixturevalue("postgres"))


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    """With tenants alice and bob."""
    database = Database(url)
    database.create()
    for tenant in ("alice", "bob"):
        database.write(tenants.create_tenant, tenant, tenant.title(), 0.0)
    yield database
    database.close()
    check_counted_bytes(url)


# --- tenants and keys -------------------------------------------------------------------------------------------------


def test_a_key_names_its_tenant_until_it_is_revoked_or_expires(database: Database) -> None:
    key, brief = hash_key(new_key()), hash_key(new_key())
    database.write(tenants.add_key, key, "alice", "laptop", 1.0)
    database.write(tenants.add_key, brief, "bob", "guest", 1.5, "host", 5.0)
    found, guest = database.read(tenants.valid_key, key, 2.0), database.read(tenants.valid_key, brief, 4.9)
    assert found is not None and (found.tenant, found.role) == ("alice", "tenant")
    assert guest is not None and (guest.tenant, guest.role) == ("bob", "host")
    assert database.read(tenants.valid_key, brief, 5.0) is None
    assert database.read(tenants.valid_key, hash_key(new_key()), 2.0) is None
    for owner in ("alice", "bob", "nobody"):
        with pytest.raises(Conflict):
            database.write(tenants.add_key, key, owner, "again", 1.0)
    with pytest.raises(NotFound):
        database.write(tenants.revoke_key, "bob", key, 2.0)
    database.write(tenants.revoke_key, "alice", key, 2.0)
    assert database.read(tenants.valid_key, key, 2.0) is None
    assert [(row.label, row.revoked) for row in database.read(tenants.keys, "alice")] == [("laptop", 2.0)]
    with pytest.raises(Conflict):
        database.write(tenants.create_tenant, "alice", "another", 3.0)
    assert [row.id for row in database.read(tenants.list_tenants)] == ["alice", "bob"]
    with pytest.raises(NotFound):
        database.read(tenants.get_tenant, "carol")


def test_a_name_means_one_live_tenant(database: Database) -> None:
    for taken in ("Alice", "alice", "bob"):
        with pytest.raises(Conflict, match="give another name"):
            database.write(tenants.create_tenant, "carol", taken, 3.0)
    with pytest.raises(Conflict, match="give another name"):
        database.write(tenants.rename_tenant, "bob", "Alice")
    assert database.write(tenants.rename_tenant, "bob", "Bob").name == "Bob", "the same name again is no conflict"
    assert database.write(tenants.rename_tenant, "bob", "Robert").name == "Robert"
    assert database.write(tenants.create_tenant, "carol", "Bob", 3.0).name == "Bob", "the old name is free"
    with pytest.raises(NotFound):
        database.write(tenants.rename_tenant, "nobody", "Nobody")


def test_a_deleted_tenant_has_no_valid_key_and_its_name_is_free(database: Database) -> None:
    key = hash_key(new_key())
    database.write(tenants.add_key, key, "alice", "laptop", 1.0)
    submit(database, job="left")
    database.write(tenants.delete_tenant, "alice", 2.0)
    assert database.read(tenants.valid_key, key, 2.0) is None
    with pytest.raises(NotFound, match="is deleted"):  # a job that was checked while its tenant was deleted
        submit(database, job="late")
    with pytest.raises(NotFound):
        database.read(tenants.get_tenant, "alice")
    with pytest.raises(NotFound):
        database.write(tenants.delete_tenant, "alice", 3.0)
    assert [row.id for row in database.read(tenants.list_tenants)] == ["bob"]
    assert [row.id for row in database.read(tenants.list_tenants, True)] == ["alice", "bob"]
    assert {id: row.deleted for id, row in database.read(tenants.tenants_of, ["alice", "carol"]).items()} == {
        "alice": 2.0
    }
    assert database.write(tenants.create_tenant, "another", "Alice", 3.0).name == "Alice"
    assert database.read(tenants.half_deleted) == {"alice"}, "its job is still there"
    database.write(jobs.set_job_state, "left", "cancelled", "", 4.0)
    database.write(jobs.delete_job, "alice", "left")
    assert database.read(tenants.half_deleted) == set()
    database.write(tenants.create_tenant, "admins", "admin", 0.0, admin=True)
    with pytest.raises(Conflict, match="administrator"):
        database.write(tenants.delete_tenant, "admins", 2.0)


# --- a SQLite file ----------------------------------------------------------------------------------------------------


def remove(path: Path) -> None:
    for part in path.parent.glob(f"{path.name}*"):
        part.unlink()


def move(path: Path) -> None:
    path.rename(path.with_name("moved"))


def replace_by_a_copy(path: Path) -> None:
    """With the same identity: that of a backup."""
    shutil.copy(path, path.with_name("copy"))
    move(path)
    path.with_name("copy").rename(path)


@pytest.mark.parametrize("take", [remove, move, replace_by_a_copy])
def test_a_sqlite_file_that_is_deleted_or_replaced_is_noticed(take: Callable[[Path], None], tmp_path: Path) -> None:
    """Also by connections that were open before: their writes would go to a file without a name."""
    path = tmp_path / "rookery.db"
    with closing(Database(f"sqlite:///{path}")) as database:
        database.create()
        database.write(tenants.create_tenant, "alice", "Alice", 0.0)
        take(path)
        for call in (
            database.ping,
            database.check_writes,
            lambda: database.write(tenants.create_tenant, "bob", "Bob", 0.0),
            lambda: database.read(tenants.list_tenants),
        ):
            with pytest.raises(DatabaseAway) as raised:
                call()
            assert str(path) not in str(raised.value) and outage_of(raised.value) == "database"
        if take is not remove:
            path.with_name("moved").rename(path)
            database.ping()
            assert [row.id for row in database.read(tenants.list_tenants)] == ["alice"]


def test_a_disk_without_room_is_named_whichever_error_sqlite_reports(tmp_path: Path) -> None:
    """Of a quota, a limit of a file's size, and a failed growth of its shared memory it says only "disk I/O error"."""
    with closing(Database(f"sqlite:///{tmp_path}/rookery.db")) as database:
        database.create()
        with small_files(8192), pytest.raises(StorageFull, match="the database's disk is full") as full:
            database.write(tenants.create_tenant, "alice", "Alice", 0.0)
        assert outage_of(full.value) == "writes"
        database.write(tenants.create_tenant, "bob", "Bob", 0.0)
        assert [row.id for row in database.read(tenants.list_tenants)] == ["bob"]


@pytest.mark.parametrize("name", ["rookery.db", "link.db", "rookery.db?timeout=60"])
def test_a_sqlite_file_has_one_service(name: str, tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "rookery.db")
    with closing(Database(f"sqlite:///{tmp_path}/rookery.db")) as one:
        one.claim()
        one.create()
        one.claim()
        with closing(Database(f"sqlite:///{tmp_path}/{name}")) as other:
            with pytest.raises(DatabaseInUse, match="in use by another service"):
                other.claim()
            one.close()
            other.claim()
    with closing(Database("sqlite://")) as memory, pytest.raises(UserError, match="cannot be locked"):
        memory.claim()
        Database(f"sqlite:///{tmp_path}/nowhere/rookery.db").claim()


# --- jobs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", [1.0, 0.0, -1.0])
def test_a_name_means_the_newest_job_of_that_name(database: Database, clock: float) -> None:
    """Whatever ids and names are like, and where the wall clock is set back; so do the jobs that a start takes up."""
    for number, (id, name) in enumerate(
        [("j1", "sums"), ("j2", "sums"), ("j3", "j1"), ("j4", "sums"), ("j5", "other")]
    ):
        row = JobRow(id=id, tenant="alice", name=name, spec={}, created=clock * number)
        database.write(jobs.submit_job, row, [])
    assert [row.id for row in database.read(jobs.all_unfinished_jobs)] == ["j1", "j2", "j3", "j4", "j5"]
    database.write(jobs.submit_job, JobRow(id="b1", tenant="bob", name="sums", spec={}, created=99.0), [])
    named = {"sums": "j4", "sums~0": "j4", "sums~1": "j2", "sums~2": "j1", "j1": "j1", "j1~0": "j3", "j3": "j3",
             "other": "j5", "b1": None, "sums~3": None, "sums~": None, "sums~-1": None, "sums~1~1": None, "~1": None,
             "sums~9999999999": None, "": None, "nobody": None, "sums~１": None}  # fmt: skip
    for asked, id in named.items():
        if id is None:
            with pytest.raises(NotFound):
                database.read(jobs.find_job, "alice", asked)
        else:
            assert database.read(jobs.find_job, "alice", asked).id == id, asked
    assert database.read(jobs.find_job, "bob", "sums").id == "b1"


def test_submitting_is_idempotent_by_key(database: Database) -> None:
    first, created = submit(database, key="k")
    assert created and first.state == "queued"
    assert submit(database, job="again", key="k") == (first, False)
    assert submit(database, job="other", key="another")[1]
    assert submit(database, tenant="bob", job="bobs", key="k")[1], "keys are each tenant's own"
    assert submit(database, job="free")[1] and submit(database, job="free2")[1], "no key, no bond"
    assert [policy.job for policy in database.read(jobs.policies, "alice", "job")] == ["job"]
    assert database.read(jobs.policies, "alice", "again") == []


def test_one_key_submitted_at_once_makes_one_job(database: Database) -> None:
    results: list[tuple[JobRow, bool]] = []
    in_threads(6, lambda i: results.append(submit(database, job=f"job{i}", key="k")))
    assert len(results) == 6 and sum(created for _, created in results) == 1
    assert len({row.id for row, _ in results}) == len(database.read(jobs.list_jobs, "alice")) == 1


def test_a_finished_job_stays_finished(database: Database) -> None:
    submit(database)
    assert database.write(jobs.set_job_state, "job", "running", "", 5.0).started == 5.0
    database.write(jobs.set_job_state, "job", "paused", "asked to", 6.0)
    assert database.write(jobs.set_job_state, "job", "running", "", 7.0).started == 5.0
    assert [job.id for job in database.read(jobs.all_unfinished_jobs)] == ["job"]
    assert database.read(jobs.unfinished_job_ids, "") == {"job"}
    done = database.write(
        jobs.set_job_state, "job", "failed", "the environment is broken", 8.0, error="ValueError: \x00\ud800"
    )
    assert (done.finished, done.reason) == (8.0, "the environment is broken")
    assert database.read(jobs.all_unfinished_jobs) == []
    assert database.read(jobs.unfinished_job_ids, "") == set()
    for state in ("running", "cancelled", "completed"):
        with pytest.raises(Conflict, match="failed already"):
            database.write(jobs.set_job_state, "job", state, "", 9.0)
    with pytest.raises(NotFound):
        database.write(jobs.set_job_state, "other", "running", "", 9.0)
    with pytest.raises(Conflict):
        database.write(jobs.add_groups, "job", [new_group(0)])
    with pytest.raises(Conflict):
        commit(database, 0, None, [], 0)


def test_the_end_of_a_job_is_logged_and_closes_its_groups(database: Database) -> None:
    for job in ("job", "other"):
        submit(database, job=job)
        database.write(jobs.set_job_state, job, "running", "", 5.0)
    database.write(jobs.add_groups, "job", [new_group(n) for n in range(3)])
    database.write(jobs.add_groups, "other", [new_group(0, job="other")])
    make_ready(database, new_group(1))
    database.write(jobs.finish_group, "job-g2", "failed", 6.0)
    database.write(jobs.set_job_state, "job", "failed", "the environment is broken", 8.0)
    said = [(event.time, event.kind, event.text) for event in database.read(tenants.events, "alice", "job", 10)]
    assert said == [(5.0, "state", "running"), (8.0, "state", "failed: the environment is broken")]
    assert group_counts(database, "job") == {"dropped": 2, "failed": 1}
    assert not database.write(jobs.save_turns, "job-g0-0", [b"late"]), "a dropped group's episodes are closed"
    assert group_counts(database, "other") == {"open": 1}


def test_leases_only_grow(database: Database) -> None:
    submit(database)
    leases: list[int] = []
    in_threads(8, lambda i: leases.append(database.write(jobs.next_lease, "job-main")))
    assert sorted(leases) == list(range(1, 9))
    with pytest.raises(Conflict, match="another trainer took over") as raised:
        commit(database, 7, None, [], 0)
    assert outage_of(raised.value) == "other", "its job is paused, and does not fail"
    with pytest.raises(NotFound):
        database.write(jobs.next_lease, "other")


# --- groups and the cursor --------------------------------------------------------------------------------------------


def test_the_cursor_moves_only_with_the_next_ordinals(database: Database, url: str) -> None:
    submit(database)
    database.write(jobs.add_groups, "job", [new_group(1), new_group(0)])
    database.write(jobs.add_groups, "job", [])
    before = everything(url)
    for ordinals in ([0], [1], [3], [2, 4], [2, 2]):
        with pytest.raises(Conflict):
            database.write(jobs.add_groups, "job", [new_group(ordinal) for ordinal in ordinals])
    with pytest.raises(NotFound):
        database.write(jobs.add_groups, "nothing", [new_group(2)])
    assert everything(url) == before
    database.write(jobs.add_groups, "job", [new_group(2)])
    assert database.read(jobs.get_job, "alice", "job").cursor == 3
    assert [group.ordinal for group in database.read(jobs.open_groups, "job")] == [0, 1, 2]


def test_an_ordinal_is_used_once(database: Database) -> None:
    submit(database)
    won: list[int] = []

    def add(i: int) -> None:
        for ordinal in range(5):
            group = new_group(ordinal)
            renamed = replace(group, id=f"{i}-{ordinal}", episodes=())
            try:
                database.write(jobs.add_groups, "job", [renamed])
                won.append(ordinal)
            except Conflict:
                continue

    in_threads(4, add)
    assert sorted(won) == sorted({group.ordinal for group in database.read(jobs.open_groups, "job")})
    assert sorted(won) == list(range(database.read(jobs.get_job, "alice", "job").cursor))


def test_a_restart_finds_open_and_ready_groups_with_their_turns(url: str, database: Database) -> None:
    submit(database)
    database.write(jobs.add_groups, "job", [new_group(0), new_group(1), new_group(2)])
    assert database.write(jobs.save_turns, "job-g0-1", [b"one turn"], version=3, host_instance="host")
    assert database.write(jobs.save_turns, "job-g0-1", [b"two turns"])
    make_ready(database, new_group(1), version=2)
    database.write(jobs.fail_episode, "job-g2-0", 5.0, "TimeoutError: late")
    database.write(jobs.finish_group, "job-g2", "failed", 6.0, reason="one member left")
    database.close()

    again = Database(url)
    again.create()
    (open_group,) = again.read(jobs.open_groups, "job")
    assert (open_group.id, open_group.prompt, open_group.tenant) == ("job-g0", b'{"n": 0}', "alice")
    assert [episode.seed for episode in open_group.episodes] == [2**63 - 1, 2**63 - 2]
    fresh, running = open_group.episodes
    assert (fresh.turns, fresh.version, fresh.state) == (b"", None, "open")
    assert (running.turns, running.version, running.host_instance) == (b"two turns", 3, "host")
    (ready,) = again.read(jobs.ready_groups, "job")
    assert (ready.min_version, [episode.trajectories for episode in ready.episodes]) == (2, [b"tokens"] * 2)
    assert group_counts(again, "job") == {"open": 1, "ready": 1, "failed": 1}
    again.close()


def test_closed_groups_and_episodes_do_not_change(database: Database) -> None:
    submit(database)
    database.write(jobs.add_groups, "job", [new_group(n) for n in range(4)])
    assert database.write(jobs.finish_episode, "job-g0-0", 2.0, trajectories=b"", reward=1.0)
    assert not database.write(jobs.fail_episode, "job-g0-0", 3.0, "late")
    assert not database.write(jobs.save_turns, "job-g0-0", [b"late"])
    assert not database.write(jobs.save_turns, "nothing", [b""])
    with pytest.raises(Conflict, match="1 open episode"):
        database.write(jobs.finish_group, "job-g0", "ready", 3.0)
    assert [group.id for group in database.read(jobs.open_groups, "job")] == [f"job-g{n}" for n in range(4)]
    make_ready(database, new_group(1))
    with pytest.raises(Conflict):
        database.write(jobs.finish_group, "job-g1", "failed", 3.0)
    lease = database.write(jobs.next_lease, "job-main")
    commit(database, lease, None, ["job-g1"], 0)
    asked = ["job-g2", "job-g1", "job-g0", "nothing"]
    assert database.write(jobs.drop_groups, asked, "too old", 4.0) == ["job-g2", "job-g0"]
    assert database.write(jobs.drop_groups, asked, "again", 5.0) == []
    assert not database.write(jobs.save_turns, "job-g2-0", [b"late"]), "a dropped group's episodes are closed"
    assert group_counts(database, "job") == {"consumed": 1, "dropped": 2, "open": 1}


def test_recent_episodes_and_their_trimming(database: Database) -> None:
    submit(database)
    groups = [new_group(n, members=1) for n in range(4)]
    database.write(jobs.add_groups, "job", groups)
    for n, group in enumerate(groups):
        database.write(jobs.save_turns, group.episodes[0].id, [b"turns"])
        database.write(
            jobs.finish_episode,
            group.episodes[0].id,
            10.0 + n,
            trajectories=b"t%d" % n,
            reward=n / 2,
            version=n % 2,
        )
        database.write(jobs.finish_group, group.id, "ready", 20.0)

    def texts(version: int | None = None) -> list[bytes]:
        return [episode.trajectories for _, episode in database.read(jobs.recent_episodes, "alice", "job", 3, version)]

    assert texts() == [b"t3", b"t2", b"t1"]
    assert texts(0) == [b"t2", b"t0"]
    assert [group.ordinal for group, _ in database.read(jobs.recent_episodes, "alice", "job", 2)] == [3, 2]
    assert database.write(jobs.trim_episodes, "job", 0) == 0, "they wait to be trained on"
    commit(database, database.write(jobs.next_lease, "job-main"), None, [group.id for group in groups[:3]], 0)
    assert database.write(jobs.trim_episodes, "job", 2) == 2
    assert database.write(jobs.trim_episodes, "job", 2) == 0
    assert texts() == [b"t3", b"t2"]
    shown, _ = database.read(episodes.groups_page, "alice", "job")
    assert [bool(group.prompt) for group in shown] == [True, True, False, False], "newest first"
    (last,) = database.read(jobs.ready_groups, "job")
    assert last.episodes[0].turns == b"turns"


def test_trimming_keeps_the_newest_text_that_has_ended_and_all_that_is_needed() -> None:
    """Whatever order episodes end in, whatever the wall clock says: as a look at the whole history would."""
    database, names = Database("sqlite://"), (f"job{number}" for number in itertools.count())
    database.create()
    database.write(tenants.create_tenant, "alice", "alice", 0.0)

    @settings(max_examples=examples(30), deadline=None)
    @given(data=st.data())
    def check(data: Any) -> None:
        job = next(names)
        submit(database, job=job)
        members = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
        groups = [new_group(number, members=count, job=job) for number, count in enumerate(members)]
        database.write(jobs.add_groups, job, groups)
        places = {one.id: (-group.ordinal, one.member) for group in groups for one in group.episodes}
        ended: set[str] = set()
        states: dict[str, str] = {}
        for member in data.draw(st.permutations([one for group in groups for one in group.episodes])):
            if data.draw(st.booleans()):
                time, texts = float(data.draw(st.integers(1, 4))), data.draw(st.sampled_from([b"", b"text"]))
                ended.add(member.id)
                database.write(jobs.finish_episode, member.id, time, trajectories=texts)
        for group in groups:
            complete = all(one.id in ended for one in group.episodes)
            states[group.id] = data.draw(st.sampled_from(["open", "failed", *(["ready"] if complete else [])]))
            if states[group.id] != "open":
                database.write(jobs.finish_group, group.id, states[group.id], 5.0)
                ended |= {one.id for one in group.episodes}
        keep = data.draw(st.integers(0, 8))
        before = {episode.id: episode.trajectories for episode in stored_rows(database, EpisodeRow, job)}
        recent = {*sorted(ended, key=places.__getitem__)[:keep]}
        trimmed = {one.id for group in groups for one in group.episodes
                   if states[group.id] == "failed" and one.id not in recent}  # fmt: skip
        assert database.write(jobs.trim_episodes, job, keep) == len([id for id in trimmed if before[id]])
        for episode in stored_rows(database, EpisodeRow, job):
            assert episode.trajectories == (b"" if episode.id in trimmed else before[episode.id])
        for group in stored_rows(database, models.GroupRow, job):
            of_group = {one.id for one in groups[group.ordinal].episodes}
            assert bool(group.prompt) == (states[group.id] != "failed" or bool(of_group & recent))
        assert database.write(jobs.trim_episodes, job, keep) == 0

    check()
    database.close()


def stored_rows(database: Database, kind: type[Any], job: str) -> list[Any]:
    with database.reading() as connection:
        return rows(connection, kind, job=job)


@pytest.mark.parametrize("clock", [1.0, -1.0])
@pytest.mark.parametrize("empty", [False, True])
def test_trimming_reads_episodes_that_ended_since_the_last_time(empty: bool, clock: float) -> None:
    """Not the whole history of its job, also where all episodes of a time failed without a text, and where the clock
    was set back."""
    database = Database("sqlite://")
    database.create()
    database.write(tenants.create_tenant, "alice", "alice", 0.0)
    submit(database)
    made, steps = 0, Counter[int]()

    def trimmed(count: int) -> int:
        """The work of a call after so many further episodes, in thousands of SQLite's instructions."""
        nonlocal made
        groups = [new_group(n, members=2) for n in range(made, made + count // 2)]
        made += len(groups)
        database.write(jobs.add_groups, "job", groups)
        for group in groups:
            for one in group.episodes:
                text = b"" if empty else b"t"
                database.write(jobs.finish_episode, one.id, clock * group.ordinal, trajectories=text)
            database.write(jobs.finish_group, group.id, "failed", clock * group.ordinal)
        with database.writing() as connection:
            driver: Any = connection.connection.driver_connection
            driver.set_progress_handler(lambda: steps.update([made]), 10)
            jobs.trim_episodes(connection, "job", 20, 10)
            driver.set_progress_handler(None, 0)
        return steps[made]

    trimmed(60)
    first = trimmed(60)
    trimmed(600)
    assert trimmed(60) <= 1.5 * first
    kept = [episode for episode in stored_rows(database, EpisodeRow, "job") if episode.trajectories]
    assert len(kept) == (0 if empty else 20)
    assert len([group for group in stored_rows(database, models.GroupRow, "job") if group.prompt]) == 10
    database.close()


def test_only_the_last_finished_jobs_keep_their_groups(database: Database) -> None:
    """Also where the wall clock was set back meanwhile."""
    names = [f"job{n}" for n in range(4)]
    for number, name in enumerate(names):
        submit(database, job=name)
        database.write(jobs.add_groups, name, [new_group(0, job=name)])
        lease = database.write(jobs.next_lease, f"{name}-main")
        commit(database, lease, None, [make_ready(database, new_group(0, job=name))], 1, job=name)
        if name != "job1":
            database.write(jobs.set_job_state, name, "completed", "", 9.0 - number)
    submit(database, "bob", "bobs")
    database.write(jobs.add_groups, "bobs", [new_group(0, job="bobs", tenant="bob")])
    database.write(jobs.set_job_state, "bobs", "cancelled", "", 0.0)

    database.write(jobs.drop_old_groups, "alice", 1)
    assert [name for name in [*names, "bobs"] if group_counts(database, name)] == ["job1", "job3", "bobs"]
    assert database.read(jobs.recent_episodes, "alice", "job0", 9) == []
    assert [row["step"] for row in database.read(version_rows.steps, "alice", "job0")] == [1]
    assert [row.version for row in database.read(version_rows.versions, "alice", "job0-main")] == [0]
    database.write(jobs.drop_old_groups, "alice", 0)
    assert [name for name in [*names, "bobs"] if group_counts(database, name)] == ["job1", "bobs"], "job1 runs"


def test_deleted_job_leaves_no_row_and_other_jobs_stay(database: Database) -> None:
    for name in ("job", "other"):
        submit(database, job=name)
        database.write(jobs.add_groups, name, [new_group(0, job=name)])
        lease = database.write(jobs.next_lease, f"{name}-main")
        commit(database, lease, None, [make_ready(database, new_group(0, job=name))], 1, job=name)
        database.write(
            version_rows.add_evaluation, policy=f"{name}-main", version=0, prompts=1, mean=0.0, stderr=0.0, results={},
            created=0.0,
        )  # fmt: skip
        database.write(tenants.add_event, "alice", name, 0.0, "kind", "text")
    database.write(
        tenants.save_usage, {("alice", "job"): {"reserved": {}}, ("alice", ""): {"reserved": {}}}, {}, (0, {})
    )
    digest = database.read(version_rows.version, "alice", "job-main", 0).hash
    with pytest.raises(Conflict, match="cancel it first"):
        database.write(jobs.delete_job, "alice", "job")
    database.write(jobs.set_job_state, "job", "cancelled", "", 1.0)
    with pytest.raises(NotFound):
        database.write(jobs.delete_job, "bob", "job")

    assert database.write(jobs.delete_job, "alice", "job") == [digest]
    with database.reading() as connection:
        for table in Base.metadata.sorted_tables:
            if "job" in table.columns:
                assert "job" not in connection.execute(select(table.c.job)).scalars().all(), table.name
    assert database.read(version_rows.versions, "alice", "job-main") == []
    assert [row.version for row in database.read(version_rows.versions, "alice", "other-main")] == [0]
    assert [(row.job, row.used) for row in database.read(rows, UsageRow, tenant="alice")] == [("", {"reserved": {}})]
    with pytest.raises(NotFound):
        database.write(jobs.delete_job, "alice", "job")
    submit(database)  # its idempotency key is free again


def test_a_view_reads_as_many_texts_as_memory_is_to_hold(database: Database) -> None:
    """A group may have thousands of episodes, and each of them megabytes."""
    submit(database)
    group = new_group(0, members=5)
    database.write(jobs.add_groups, "job", [group])
    for number, episode in enumerate(group.episodes):
        database.write(jobs.finish_episode, episode.id, float(number), trajectories=b"x" * 100, reward=1.0)
    for most, texts in ((50, 1), (100, 1), (299, 2), (300, 3), (10_000, 5)):
        found = database.read(episodes.get_group, "alice", "job", group.id, most).episodes
        assert [len(one.trajectories) for one in found] == [100] * texts + [0] * (5 - texts)
        assert [one.member for one in found] == [*range(5)] and {one.reward for one in found} == {1.0}
        newest = database.read(jobs.recent_episodes, "alice", "job", 9, None, most)
        assert [one.member for _, one in newest] == [*range(5)][::-1][:texts]


def row_counts(database: Database) -> Counter[str]:
    """By table."""
    with database.reading() as connection:
        return Counter({
            table.name: connection.execute(select(func.count()).select_from(table)).scalar_one()
            for table in Base.metadata.sorted_tables
        })  # fmt: skip


@pytest.mark.parametrize("ends", ["deleted", "old", "expired"])
def test_a_long_history_is_deleted_in_short_transactions(database: Database, ends: str) -> None:
    """Everybody's writes wait for each of them."""
    submit(database, job="other")
    database.write(jobs.add_groups, "other", [new_group(0, job="other")])
    before, count = row_counts(database), DELETED_AT_ONCE + 7
    if ends == "expired":
        for number in range(2 * count):
            database.write(sessions.open_future, future_row(f"f{number}"))
            database.write(sessions.finish_future, f"f{number}", b"text", 1.0)
        shorten = partial(database.write, sessions.drop_futures, 2.0)
    else:
        submit(database)
        lease, head = database.write(jobs.next_lease, "job-main"), None
        database.write(jobs.add_groups, "job", [new_group(number) for number in range(count)])
        for _ in range(count):
            database.write(tenants.add_event, "alice", "job", 0.0, "kind", "text")
        for step in range(count if ends == "deleted" else 2):
            head = commit(database, lease, head, [], step)
            if head:
                database.write(version_rows.retire_version, "job-main", head - 1)
        database.write(jobs.set_job_state, "job", "cancelled", "", 1.0)
        shorten = (
            partial(database.write, jobs.delete_history, "alice", "job")
            if ends == "deleted"
            else partial(database.write, jobs.drop_old_groups, "alice", 0)
        )
    stored, calls, more = row_counts(database), 0, True
    while more:
        more = bool(shorten())
        left = row_counts(database)
        assert (stored - left).total() <= DELETED_AT_ONCE + version_rows.EVALUATIONS_AT_ONCE
        stored, calls = left, calls + 1
    assert calls >= (3 if ends == "old" else 2)
    if ends == "deleted":
        assert (left - before) == Counter({"jobs": 1, "policies": 1, "versions": 1})
        database.write(jobs.delete_job, "alice", "job")
        assert row_counts(database) == before
    assert left["groups"] == before["groups"] and left["futures"] == before["futures"]


# --- the commit -------------------------------------------------------------------------------------------------------


def test_a_commit_is_visible_as_a_whole(database: Database) -> None:
    submit(database)
    lease = database.write(jobs.next_lease, "job-main")
    assert commit(database, lease, None, [], 0) == 0
    database.write(jobs.add_groups, "job", [new_group(0), new_group(1)])
    ids = [make_ready(database, new_group(n)) for n in range(2)]
    assert commit(database, lease, 0, ids, 1) == 1
    job, policy = database.read(jobs.get_job, "alice", "job"), database.read(jobs.get_policy, "alice", "job", "main")
    assert (job.step, job.counters, job.rng) == (1, {"steps": 1}, {"drawn": 1})
    assert policy.head_version == 1
    assert [
        (v.version, v.parent, v.step, v.kept) for v in database.read(version_rows.versions, "alice", policy.id)
    ] == [
        (0, None, 0, True),
        (1, 0, 1, True),
    ]
    head = database.read(version_rows.version, "alice", policy.id, 1)
    assert (head.manifest, head.hash, head.tenant) == (manifest("job-1"), manifest("job-1").hash, "alice")
    assert group_counts(database, "job") == {"consumed": 2}
    assert database.read(jobs.ready_groups, "job") == []


_WRONG_COMMITS: dict[str, dict[str, Any]] = {
    "parent": {"parent": 0},
    "first again": {"parent": None},
    "lease": {"newer": 1},
    "old lease": {"newer": -1},
    "open group": {"group": "job-g3"},
    "consumed group": {"group": "job-g0"},
    "named twice": {"group": "job-g1"},
    "unknown": {"group": "nothing"},
    "another's": {"group": "bobs-g0"},
}


@pytest.mark.parametrize("wrong", _WRONG_COMMITS)
def test_a_refused_commit_changes_nothing(database: Database, url: str, wrong: str) -> None:
    submit(database)
    submit(database, tenant="bob", job="bobs")
    database.write(jobs.add_groups, "bobs", [new_group(0, job="bobs", tenant="bob")])
    make_ready(database, new_group(0, job="bobs", tenant="bob"))
    database.write(jobs.add_groups, "job", [new_group(n) for n in range(4)])
    ready = [make_ready(database, new_group(n)) for n in range(3)]
    database.write(jobs.next_lease, "job-main")
    lease = database.write(jobs.next_lease, "job-main")
    commit(database, lease, None, [], 0)
    commit(database, lease, 0, [ready[0]], 1)
    given = {"parent": 1, "newer": 0, "group": None, **_WRONG_COMMITS[wrong]}
    groups = [group for group in (ready[1], given["group"]) if group]
    before = everything(url)
    with pytest.raises(Conflict):
        commit(database, lease + given["newer"], given["parent"], groups, 2)
    assert everything(url) == before


def test_of_many_committers_one_wins(database: Database) -> None:
    submit(database)
    database.write(jobs.add_groups, "job", [new_group(0)])
    group = make_ready(database, new_group(0))
    lease = database.write(jobs.next_lease, "job-main")
    commit(database, lease, None, [], 0)
    won: list[int] = []
    in_threads(6, lambda i: won.append(commit(database, lease, 0, [group], i + 1)))
    assert won == [1]
    assert [v.version for v in database.read(version_rows.versions, "alice", "job-main")] == [0, 1]


def test_whether_an_artifact_is_named_is_known_after_the_present_commit(database: Database, url: str) -> None:
    """The commit's connection broke: the server may still carry it out."""
    submit(database)
    commit(database, database.write(jobs.next_lease, "job-main"), None, [], 0)
    digest, other = manifest("job-0").hash, manifest("job-1").hash
    assert database.write(version_rows.names, "job-main", digest)
    assert not database.write(version_rows.names, "job-main", other)
    told: list[bool] = []
    asking = threading.Thread(target=lambda: told.append(database.write(version_rows.names, "job-main", other)))
    with connected(url) as under_way:
        under_way.execute(update(models.PolicyRow).values(head_version=1))
        asking.start()
        asking.join(0.2)
        assert not told
        under_way.execute(update(models.VersionRow).values(hash=other))
    asking.join()
    assert told == [True]


def test_retiring_versions_and_evaluating_them(database: Database) -> None:
    submit(database)
    lease = database.write(jobs.next_lease, "job-main")
    for step in range(3):
        commit(database, lease, step - 1 if step else None, [], step)
    same = database.write(
        version_rows.commit_step,
        NextVersion(policy="job-main", lease=lease, parent=2, manifest=manifest("job-0"), step=3, time=5.0),
        JobCommit(job="job", counters={}, rng={}),
    )
    assert same.hash == manifest("job-0").hash
    with pytest.raises(Conflict):
        database.write(version_rows.retire_version, "job-main", 3)
    assert database.write(version_rows.retire_version, "job-main", 0) is None, "version 3 has the same bytes"
    assert database.write(version_rows.retire_version, "job-main", 1) == manifest("job-1").hash
    database.write(tenants.add_upload, "alice", "adapter", manifest("job-2").hash, 5, 1.0)
    assert database.write(version_rows.retire_version, "job-main", 2) is None, "an upload has the same bytes"
    assert database.read(version_rows.live_hashes) == {manifest("job-0").hash, manifest("job-2").hash}
    figures = {"prompts": 64, "stderr": 0.1, "results": {"rewards": [1.0, math.nan]}, "created": 6.0}
    database.write(version_rows.add_evaluation, policy="job-main", version=3, mean=0.25, **figures)  # type: ignore[arg-type]
    database.write(version_rows.add_evaluation, policy="job-main", version=3, mean=0.5, **figures)  # type: ignore[arg-type]
    (evaluation,) = database.read(version_rows.evaluations, "alice", "job")
    assert (evaluation.mean, evaluation.job) == (0.5, "job")
    assert math.isnan(evaluation.results["rewards"][1])
    assert database.read(version_rows.version, "alice", "job-main", 3).evaluation == 0.5
    with pytest.raises(NotFound):
        database.write(version_rows.add_evaluation, policy="job-main", version=4, mean=0.5, **figures)  # type: ignore[arg-type]


def test_a_corrupt_head_is_replaced_by_the_newest_kept_version(database: Database) -> None:
    submit(database)
    lease = database.write(jobs.next_lease, "job-main")
    for step in range(4):
        commit(database, lease, step - 1 if step else None, [], step)
    database.write(version_rows.retire_version, "job-main", 2)
    with pytest.raises(Conflict):
        database.write(version_rows.rollback, "job-main", 2, "not the head")
    assert database.write(version_rows.rollback, "job-main", 3, "bad hash").version == 1
    assert database.read(jobs.get_job, "alice", "job").step == 1
    assert database.read(version_rows.version, "alice", "job-main", 3).lost == "bad hash"
    with pytest.raises(Conflict):
        commit(database, lease, 3, [], 4)
    assert commit(database, lease, 1, [], 2) == 4, "numbers are never used again"
    assert database.write(version_rows.rollback, "job-main", 4, "bad hash").version == 1
    assert database.write(version_rows.rollback, "job-main", 1, "bad hash").version == 0
    with pytest.raises(Conflict, match="no version before"):
        database.write(version_rows.rollback, "job-main", 0, "bad hash")


@settings(max_examples=examples(20), deadline=None)
@given(data=st.data())
def test_versions_are_found_by_their_steps_as_in_the_whole_line(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    """Whatever was retired and lost: the queries give what a look at all versions gives."""
    database = Database(f"sqlite:///{tmp_path_factory.mktemp('line')}/rookery.db")
    with closing(database):
        database.create()
        database.write(tenants.create_tenant, "alice", "alice", 0.0)
        submit(database)
        lease, head, step = database.write(jobs.next_lease, "job-main"), None, 0
        for change in data.draw(st.lists(st.sampled_from(["commit", "commit", "retire", "rollback"]), max_size=20)):
            kept = [one for one in all_versions(database) if one.kept]
            if change == "commit" or head is None:
                step += data.draw(st.integers(1, 3)) if head is not None else 0
                head = commit(database, lease, head, [], step)
            elif change == "retire":
                if older := [one.version for one in kept if one.version != head]:
                    database.write(version_rows.retire_version, "job-main", data.draw(st.sampled_from(older)))
            elif len(kept) > 1:
                back = database.write(version_rows.rollback, "job-main", head, "bad hash")
                head, step = back.version, back.step
        found = {one.version: one for one in all_versions(database)}
        line, at = [], head
        while at is not None:
            line.append((at, found[at].step, found[at].kept))
            at = found[at].parent
        for every in range(1, 6):
            assert database.read(version_rows.followed, "alice", "job-main", every) == followed_version(line, every)
        for wanted in range(-1, step + 2):
            newest = max((one.version for one in found.values() if one.step == wanted and not one.lost), default=None)
            assert database.read(version_rows.newest_of_step, "alice", "job-main", wanted) == newest
        shown = [one.version for one in found.values() if one.kept and one.step][::-1]
        limit = data.draw(st.integers(1, 4))
        pages, after = list[int](), ()
        while page := database.read(version_rows.kept_of_policy, "alice", "job-main", Page(limit, after)):
            pages += [one.version for one in page]
            after = (page[-1].version,)
        assert pages == shown
        hashes = {one.hash: one.size for one in found.values() if one.kept}
        assert database.read(tenants.stored, "alice") == (len(hashes), sum(hashes.values()))


def all_versions(database: Database) -> list[models.VersionRow]:
    return database.read(version_rows.versions, "alice", "job-main")


def test_a_use_of_the_database_waits_for_no_other_one_that_hangs(tmp_path: Path) -> None:
    """While a server stands still each thread holds a connection: a further one is to meet the same silence, not
    another error."""
    with closing(Database(f"sqlite:///{tmp_path}/a.db")) as database, ExitStack() as hanging:
        database.create()
        for _ in range(40):
            hanging.enter_context(database.reading())
        database.ping()
        database.check_writes()


# --- owners -----------------------------------------------------------------------------------------------------------

_NOT_FOUND = """revoke_key get_upload get_job find_job get_policy version get_session get_model get_sampler
get_group get_episode
get_checkpoint expire_checkpoint delete_checkpoint get_future delete_history delete_job delete_upload secret
delete_secret""".split()
_EMPTY: dict[str, Any] = {
    "keys": [],
    "events": [],
    "latest_events": [],
    "latest_steps": [],
    "list_jobs": [],
    "policies": [],
    "recent_episodes": [],
    "versions": [],
    "evaluations": [],
    "list_sessions": [],
    "list_models": [],
    "list_checkpoints": [],
    "steps": [],
    "keyed_job": None,
    "has_session": False,
    "uploads": [],
    "datasets": [],
    "kept_versions": [],
    "base_models": {},
    "episodes_page": FoundEpisodes([], None),
    "failure_counts": [],
    "newest_checkpoints": {},
    "job_usage": {},
    "trained_tokens": 0,
    "state_times": {},
    "policies_of": {},
    "steps_of_versions": {},
    "unfinished_job_ids": set(),
    "metadata_bytes": 0,
    "database_bytes": 0,
    "count_models": 0,
    "count_checkpoints": 0,
    "stored": (0, 0),
    "ids_of_session": ([], []),
    "policies_of_session": [],
    "groups_page": ([], 0),
    "last_step": -1,
    "version_of_step": None,
    "last_evaluations": [],
    "evaluated": set(),
    "first_evaluation": None,
    "secrets": [],
    "kept_of_policy": [],
    "followed": None,
    "newest_of_step": None,
    "held_out_losses": {},
}
_NAMES_NO_ROW = "add_key add_upload add_event drop_old_groups set_secret".split()
"""The reply of each function that takes a tenant when bob names alice's rows."""


def test_rows_of_another_tenant_are_not_visible(database: Database) -> None:
    submit(database, key="one")
    database.write(tenants.add_key, "hash", "alice", "", 0.0)
    database.write(jobs.add_groups, "job", [new_group(0), new_group(1)])
    group = make_ready(database, new_group(0))
    failed = new_group(1).episodes[0].id
    database.write(jobs.fail_episode, failed, 2.0, "ValueError")
    lease = database.write(jobs.next_lease, "job-main")
    commit(database, lease, None, [group], 0)
    assert commit(database, lease, 0, [], 1) == 1
    database.write(
        version_rows.add_evaluation,
        policy="job-main",
        version=0,
        prompts=1,
        mean=0.0,
        stderr=0.0,
        results={},
        created=0.0,
    )
    database.write(tenants.add_upload, "alice", "dataset", "d" * 64, 1, 0.0)
    database.write(tenants.add_event, "alice", "job", 0.0, "state", "text")
    database.write(secrets.set_secret, "alice", "main", "very-secret", 0.0)
    database.write(tenants.save_usage, {("alice", "job"): {"reserved": {}}}, {}, (0, {}))
    visit(database, key="one")
    database.write(sessions.open_future, future_row("one/0", "alice", None))
    database.write(sessions.finish_future, "one/0", b"text", 1.0)
    named: dict[str, Any] = {
        "id": "one",
        "sampler": "one",
        "first": 0,
        "end": 10,
        "session": "one",
        "model": "one",
        "expires": 1.0,
        "at": 0.0,
        "job": "job",
        "policy": "job-main",
        "name": "main",
        "version": 0,
        "limit": 10,
        "kind": "dataset",
        "hash": "d" * 64,
        "key_hash": "hash",
        "time": 1.0,
        "count": 10,
        "jobs": ["job"],
        "models": ["one"],
        "versions": [0],
        "group": group,
        "episode": failed,
        "step": 1,
        "chosen": EpisodeChoice(),
        "key": "one",
        "page": Page(10),
        "descending": True,
        "every": 1,
    }
    scoped = {
        name: (function, inspect.signature(function))
        for module in (episodes, jobs, runs, secrets, sessions, tenants, version_rows)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
        and "tenant" in inspect.signature(function).parameters
        and not name.startswith("_")
    }
    assert scoped.keys() == {*_NOT_FOUND, *_EMPTY, *_NAMES_NO_ROW}, "a new function: add its reply to another tenant"
    for name in (*_NOT_FOUND, *_EMPTY):
        function, signature = scoped[name]
        arguments = {p: named[p] for p in signature.parameters if p in named}
        if name == "recent_episodes":
            del arguments["version"]
        if "checkpoint" in name and "kind" in arguments:
            arguments["kind"] = "weights"
        method = partial(database.write, function)
        if name in _NOT_FOUND:
            with pytest.raises(NotFound):
                method(tenant="bob", **arguments)
        else:
            assert method(tenant="bob", **arguments) == _EMPTY[name], name
        if name not in ("revoke_key", "expire_checkpoint", *(n for n in _NOT_FOUND if n.startswith("delete_"))):
            shown = method(tenant="alice", **arguments)
            assert shown and shown != _EMPTY.get(name), f"{name} shows them to their owner"
    database.write(tenants.add_upload, "bob", "dataset", "d" * 64, 1, 5.0)
    assert database.read(tenants.get_upload, "bob", "dataset", "d" * 64).created == 5.0, (
        "who brings the same bytes has them too"
    )
    assert database.read(tenants.get_upload, "alice", "dataset", "d" * 64).created == 0.0
    with pytest.raises(NotFound):
        database.read(tenants.get_upload, "bob", "adapter", "d" * 64)


# --- reading episodes, timelines --------------------------------------------------------------------------------------


def end_episodes(database: Database, texts: Sequence[str], failed: Collection[int] = ()) -> list[str]:
    """Episodes that ended one after another, two at the same time; returns their ids, newest first."""
    submit(database)
    group = new_group(0, len(texts))
    database.write(jobs.add_groups, "job", [group])
    for number, (episode, words) in enumerate(zip(group.episodes, texts, strict=True)):
        time = float(number // 2)
        if number in failed:
            database.write(jobs.fail_episode, episode.id, time, words)
        else:
            database.write(jobs.finish_episode, episode.id, time, trajectories=words.encode())
    return [f"job-g0-{n}" for n in sorted(range(len(texts)), key=lambda n: (-(n // 2), f"job-g0-{n}"))]


@pytest.mark.parametrize("seconds", [10.0, 0.0], ids=["one answer", "an answer for each part"])
def test_search_of_a_text_finds_each_episode_once(database: Database, seconds: float) -> None:
    def read(chosen: EpisodeChoice) -> episodes.FoundEpisodes:
        return database.read(episodes.episodes_page, "alice", "job", chosen, seconds=seconds, at_once=3)

    newest = end_episodes(database, [f"{'needle' if n % 4 == 0 else 'hay'} {n}" for n in range(25)], failed={8, 9})
    wanted = [id for id in newest if int(id.rpartition("-")[2]) % 4 == 0]
    for limit in (1, 2, 100):
        found, cursor, answers = list[str](), None, 0
        while True:
            chosen = EpisodeChoice(text="needle", before=cursor, limit=limit)
            page = read(chosen)
            assert len(page.episodes) <= limit
            found += [episode.id for _, episode in page.episodes]
            cursor, answers = page.next, answers + 1
            if cursor is None:
                break
        assert found == wanted
        assert (answers == 1) == (limit == 100 and seconds > 0)
    none = read(EpisodeChoice(text="nothing like that"))
    assert none.episodes == [] and (none.next is None) == (seconds > 0)


@pytest.mark.parametrize("odd", ["\x00", "a\x00b", "\ud800", "%", "_", "\\", "'", "\u0130", "x" * 10_000])
def test_any_text_can_be_searched_for(odd: str, database: Database) -> None:
    end_episodes(database, ["needle"] * 3, failed={1})
    found = database.read(episodes.episodes_page, "alice", "job", EpisodeChoice(text=odd))
    assert [episode for _, episode in found.episodes] == []
    assert database.read(runs.chosen_jobs, runs.RunChoice("alice", text=odd)) == ([], 0)
    assert database.read(runs.chosen_jobs, runs.RunChoice("alice", text="JOB"))[1] == 1


def submit_two(database: Database, job: str, policies: dict[str, bool]) -> dict[str, int]:
    """A job with these policies, each of which trains or does not, at version 0; returns the leases of those."""
    spec = {"base_model": "tiny", "policies": {name: {"train": train} for name, train in policies.items()}}
    row = JobRow(id=job, tenant="alice", name=job, spec=spec, created=1.0)
    mine = [PolicyRow(id=f"{job}-{name}", tenant="alice", job=job, name=name, rank=8, alpha=16.0, targets=["q"])
            for name in sorted(policies)]  # fmt: skip
    database.write(jobs.submit_job, row, mine)
    return {name: database.write(jobs.next_lease, f"{job}-{name}") for name, train in policies.items() if train}


def take_step(
    database: Database, job: str, policy: str, lease: int, step: int, number: int, reward: float | None, several: bool
) -> None:
    """Commit the policy's step ``step``, the job's step ``number``; 0 is version 0."""
    database.write(
        version_rows.commit_step,
        NextVersion(
            policy=f"{job}-{policy}", lease=lease, parent=step - 1 if step else None,
            manifest=manifest(f"{job}-{policy}-{step}"), step=step, time=4.0,
        ),
        JobCommit(
            job=job, metrics=[{"step": number, "reward": reward}] if step else [], counters={}, rng={},
            job_step=number if several else None,
        ),
    )  # fmt: skip


def test_the_rewards_of_a_job_are_those_of_its_first_policy_that_trains(database: Database) -> None:
    taken = {
        "low": ([("a", 9.0), ("b", 1.0), ("a", 9.0), ("b", 2.0), ("a", 9.0)], {"z": False, "b": True, "a": True}),
        "high": ([("b", 3.0), ("a", 0.0), ("a", 0.0), ("a", 0.0)], {"b": True, "a": True}),
        "one": ([("a", 4.0), ("a", 5.0)], {"b": False, "a": True}),
        "mid": ([("main", 0.5), ("main", 2.5)], {"main": True}),
        "none": ([("b", 7.0)], {"a": True, "b": True}),
    }
    for job, (rewards, policies) in taken.items():
        leases, several = submit_two(database, job, policies), sum(policies.values()) > 1
        steps = dict.fromkeys(leases, 0)
        for policy, lease in leases.items():
            take_step(database, job, policy, lease, 0, 0, None, several)
        for number, (policy, reward) in enumerate(rewards, 1):
            steps[policy] += 1
            take_step(database, job, policy, leases[policy], steps[policy], number, reward, several)
    expected = {"low": [1.0, 2.0], "high": [3.0], "one": [4.0, 5.0], "mid": [0.5, 2.5]}
    assert database.read(runs.rewards_of, [*taken], 64) == expected
    assert database.read(runs.rewards_of, [*taken], 1) == {job: rewards[-1:] for job, rewards in expected.items()}
    listed, _ = database.read(runs.chosen_jobs, runs.RunChoice("alice", order="reward"))
    assert [row.id for row in listed] == ["one", "high", "mid", "low", "none"]


def test_a_job_that_is_deleted_between_two_pages_moves_no_other(database: Database) -> None:
    names = [f"job-{number}" for number in range(7)]
    for name in names:
        submit_two(database, name, {"a": True})
    found: list[str] = []
    place = None
    while True:
        choice = runs.RunChoice("alice", order="created", descending=False, after=place, limit=2)
        page, total = database.read(runs.chosen_jobs, choice)
        found += [row.id for row in page]
        assert total == 7 - (len(found) > 2)
        if not page:
            break
        place = (page[-1].created, page[-1].id)
        if len(found) == 2:
            database.write(jobs.set_job_state, "job-0", "cancelled", "", 1.0)
            database.write(jobs.delete_job, "alice", "job-0")
    assert found == names


def test_a_rollback_takes_the_steps_of_its_policy_from_those_of_the_job(database: Database) -> None:
    leases = submit_two(database, "job", {"a": True, "b": True})
    for policy, lease in leases.items():
        take_step(database, "job", policy, lease, 0, 0, None, several=True)
    for number, (policy, step) in enumerate([("a", 1), ("a", 2), ("b", 1), ("a", 3), ("b", 2)], 1):
        take_step(database, "job", policy, leases[policy], step, number, 1.0, several=True)
    assert database.write(version_rows.rollback, "job-a", 3, "bad hash", 9.0).version == 2
    assert database.read(jobs.get_job, "alice", "job").step == 4
    left = [(row["step"], row.get("renewed")) for row in database.read(version_rows.steps, "alice", "job")]
    assert left == [(1, None), (2, None), (3, None), (5, 9.0)], "readers of step 5 read again what is before it"


def test_failed_episodes_are_counted_and_listed_by_their_index(database: Database) -> None:
    newest = end_episodes(database, [f"error {n % 2}" for n in range(9)], failed={0, 2, 3, 8})
    assert database.read(episodes.failure_counts, "alice", "job", 5) == [("error 0", 3), ("error 1", 1)]
    assert database.read(episodes.failure_counts, "alice", "job", 1) == [("error 0", 3)]
    listed = database.read(episodes.episodes_page, "alice", "job", EpisodeChoice(failed=True)).episodes
    assert [row.id for _, row in listed] == [id for id in newest if int(id[-1]) in {0, 2, 3, 8}]
    if database.engine.dialect.name == "sqlite":
        queries = list[tuple[str, Any]]()
        with database.reading() as connection:
            event.listen(connection, "before_cursor_execute", lambda *about: queries.append(about[2:4]))
            episodes.failure_counts(connection, "alice", "job", 5)
            [(query, values)] = queries
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", values).fetchall()
        assert any("episodes_by_state" in row[3] for row in plan)


def hour(job: str, hour: int, tenant: str = "alice", size: int = 100) -> SpanRow:
    return SpanRow(tenant=tenant, job=job, hour=hour, begins=3600.0 * hour, count=1, spans=b"x" * size)


def test_hours_of_a_timeline_are_deleted_with_their_job_and_their_tenant(database: Database) -> None:
    submit(database)
    submit(database, "bob", "other")
    stored = [hour("job", 1), hour("job", 2), hour("other", 1, "bob"), hour("", 1, ""), hour("", 1, "bob")]
    gone = [hour("deleted", 1), hour("job", 3, "nobody")]
    database.write(spans.save_spans, [*stored, *gone], 10**6)

    def names() -> set[tuple[str, str, int]]:
        return {found.key for found in database.read(spans.hours_between, 0.0, 1e6)}

    assert names() == {(row.tenant, row.job, row.hour) for row in stored}
    assert database.read(spans.oldest_span, "alice") == 3600.0
    database.write(jobs.set_job_state, "job", "cancelled", "", 5.0)
    database.write(jobs.delete_job, "alice", "job")
    assert names() == {("bob", "other", 1), ("", "", 1), ("bob", "", 1)}
    database.write(tenants.delete_tenant, "bob", 6.0)
    database.write(spans.save_spans, [hour("other", 2, "bob")], 10**6)
    assert names() == {("", "", 1)}


def test_hours_of_a_timeline_go_with_the_episodes_of_an_old_job(database: Database) -> None:
    for number in range(3):
        submit(database, job=f"job{number}")
        database.write(jobs.add_groups, f"job{number}", [new_group(0, job=f"job{number}")])
        database.write(jobs.set_job_state, f"job{number}", "cancelled", "", float(number))
    database.write(spans.save_spans, [hour(f"job{number}", 1) for number in range(3)], 10**6)
    database.write(jobs.drop_old_groups, "alice", 1)
    assert [found.job for found in database.read(spans.hours_between, 0.0, 1e6)] == ["job2"]


def test_hours_of_many_old_jobs_go_with_their_groups(database: Database) -> None:
    """Some call deletes the last groups of one and not those of the other."""
    for name in ("one", "other"):
        submit(database, job=name)
        count = DELETED_AT_ONCE // 2 + 7
        database.write(jobs.add_groups, name, [new_group(number, job=name) for number in range(count)])
        database.write(jobs.set_job_state, name, "cancelled", "", 1.0)
    database.write(spans.save_spans, [hour(name, 1) for name in ("one", "other")], 10**6)
    while database.write(jobs.drop_old_groups, "alice", 0):
        pass
    assert not database.read(spans.hours_between, 0.0, 1e6)


def test_oldest_hours_of_a_tenant_beyond_its_bytes_are_deleted(database: Database) -> None:
    submit(database)
    submit(database, "bob", "other")
    database.write(spans.save_spans, [hour("other", 1, "bob")], 250)
    for number in range(1, 6):
        database.write(spans.save_spans, [hour("job", number)], 250)
    kept = [found.key for found in database.read(spans.hours_between, 0.0, 1e6, "other")]
    assert kept == [("bob", "other", 1), ("alice", "job", 5), ("alice", "job", 4)]
    database.write(spans.save_spans, [hour("job", 5, size=90)], 250)
    assert [len(row.spans) for row in database.read(spans.span_rows, [("alice", "job", 5)])] == [90]


def test_hours_of_a_tenants_timeline_come_before_those_of_others(database: Database) -> None:
    submit(database)
    submit(database, "bob", "other")
    database.write(spans.save_spans, [hour("", at, "bob") for at in (1, 2)], 10**6)
    database.write(spans.save_spans, [hour("other", 1, "bob"), hour("job", 8), hour("", 9, "")], 10**6)
    found = database.read(spans.hours_between, 0.0, 1e6, "other", "bob")
    assert [(row.job, row.hour) for row in found] == [("other", 1), ("", 2), ("", 1), ("", 9), ("job", 8)]
    newest = database.read(spans.hours_between, 0.0, 1e6)
    assert [row.hour for row in newest] == [9, 8, 2, 1, 1]


# --- evaluations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", [0.5, math.nan])
def test_evaluations_are_read_without_their_answers(database: Database, metric: float) -> None:
    submit(database)
    commit(database, database.write(jobs.next_lease, "job-main"), None, [], 0)
    figures = {"split": "eval", "seed": 2**62 + 1, "constant": {"reply": "a", "reward": metric, "prompts": 1}}
    database.write(
        version_rows.add_evaluation, policy="job-main", version=0, prompts=1, mean=0.0, stderr=0.0, created=0.0,
        results={**figures, "held_out": [{"answer": '"held_out":[', "metrics": {"m": metric}}]},
    )  # fmt: skip
    [whole], [brief], [last] = (
        database.read(version_rows.evaluations, "alice", "job"),
        database.read(version_rows.evaluations, "alice", "job", Page(5, ("job-main", -1)), answers=False),
        database.read(version_rows.last_evaluations, "alice", "job"),
    )
    assert str(brief.results) == str(last.results) == str(figures) and len(whole.results["held_out"]) == 1
    assert replace(whole, results={}) == replace(brief, results={}) == replace(last, results={})


@pytest.mark.parametrize(
    ("means", "keep", "whole"),
    [
        ([3.0, 1.0, 2.0, 0.0, 1.0, 0.5], 0, [0, 5]),
        ([0.0, 1.0, 2.0, 0.0, 1.0, 0.5], 0, [0, 2, 5]),
        ([0.0, 1.0, 2.0, 0.0, 1.0, 0.5], 9, [0, 2, 4, 5]),
        ([0.0, 1.0, 2.0, 0.0, 1.0, 0.5], 12, [0, 2, 3, 4, 5]),
        ([0.0, 1.0, 2.0, 0.0, 1.0, 0.5], 100, [0, 1, 2, 3, 4, 5]),
        ([1.0], 0, [0]),
        ([0.0] * 40 + [1.0], 0, [0, 40]),
        ([0.0] * 41, 1000, list(range(41))),
    ],
)
@pytest.mark.parametrize("clock", [1.0, -1.0])
def test_answers_of_old_evaluations_are_deleted(
    database: Database, means: list[float], keep: int, whole: list[int], clock: float
) -> None:
    """Also where the wall clock was set back meanwhile."""
    submit(database)
    lease = database.write(jobs.next_lease, "job-main")
    held_out = [{"prompt": "a" * 1000, "answer": "b"}]
    for version, mean in enumerate(means):
        commit(database, lease, version - 1 if version else None, [], version)
        database.write(
            version_rows.add_evaluation, policy="job-main", version=version, prompts=4, mean=mean, stderr=0.0,
            created=clock * version, results={"split": "eval", "seed": 1, "loss": mean, "held_out": held_out},
        )  # fmt: skip
    emptied = list(iter(partial(database.write, version_rows.trim_evaluations, "job", keep), 0))
    assert sum(emptied) == len(means) - len(whole)
    assert all(number <= version_rows.EVALUATIONS_AT_ONCE for number in emptied)

    def kept() -> list[int]:
        rows = database.read(version_rows.evaluations, "alice", "job")
        assert [row.results["loss"] for row in rows] == means and [row.version for row in rows if row.kept] == [
            row.version for row in rows if "held_out" in row.results
        ]
        return [row.version for row in rows if row.kept]

    assert kept() == whole
    first = database.read(version_rows.first_evaluation, "alice", "job")
    assert first is not None and first.version == 0 and first.results["held_out"] == held_out
    assert database.read(version_rows.evaluated, "alice", "job") == {("job-main", n) for n in range(len(means))}
    database.write(jobs.drop_old_groups, "alice", 0)
    assert kept() == whole, "the job runs"
    database.write(jobs.set_job_state, "job", "completed", "", 9.0)
    while database.write(jobs.drop_old_groups, "alice", 0):
        whole = whole[version_rows.EVALUATIONS_AT_ONCE :]
        assert kept() == whole
    assert kept() == []


def test_the_last_evaluation_is_that_of_the_newest_version(database: Database) -> None:
    submit(database)
    lease = database.write(jobs.next_lease, "job-main")
    for version in range(3):
        commit(database, lease, version - 1 if version else None, [], version)
    for evaluated, last in ((0, None), (2, 2), (1, 2)):
        database.write(
            version_rows.add_evaluation,
            policy="job-main",
            version=evaluated,
            prompts=1,
            mean=0.0,
            stderr=0.0,
            results={},
            created=0.0,
        )
        found = database.read(version_rows.last_evaluations, "alice", "job", after=0)
        assert [row.version for row in found] == ([] if last is None else [last])
    assert database.read(version_rows.last_evaluations, "alice", "other", after=0) == []
    assert database.read(version_rows.last_evaluations, "bob", "job", after=0) == []


# --- what a step trained on -------------------------------------------------------------------------------------------


def test_a_step_shows_the_groups_that_its_policy_trained_on(database: Database) -> None:
    """Two policies train on the same groups, in an order of their own each; both have versions of the same numbers."""
    row = JobRow(id="job", tenant="alice", name="job", spec={"base_model": "tiny", "stop": {"steps": 9}}, created=1.0)
    names = ("job-a", "job-b")
    about: dict[str, Any] = {"tenant": "alice", "job": "job", "rank": 8, "alpha": 16.0, "targets": ["q"]}
    database.write(jobs.submit_job, row, [PolicyRow(id=name, name=name, **about) for name in names])
    groups = [new_group(number) for number in range(12)]
    database.write(jobs.add_groups, "job", groups)
    for group in groups:
        for episode in group.episodes:
            database.write(jobs.finish_episode, episode.id, 2.0, trajectories=b"tokens", reward=1.0, version=0)
        database.write(jobs.finish_group, group.id, "ready", 3.0, min_version=0, policies=names)
    leases, wanted, step = {name: database.write(jobs.next_lease, name) for name in names}, {}, 0
    for version in range(12):
        for name, taken in zip(names, ([version], [11 - version]), strict=True):
            ids = [groups[number].id for number in taken] if version < 11 or name == "job-b" else []
            step += 1
            made = database.write(
                version_rows.commit_step,
                NextVersion(
                    policy=name, lease=leases[name], parent=version - 1 if version else None,
                    manifest=manifest(f"{name}-{version}"), step=version + 1, time=4.0,
                ),
                JobCommit(
                    job="job", groups=ids, metrics=[{"step": step, "reward": 0.5}], counters={}, rng={}, job_step=step
                ),
            )  # fmt: skip
            assert database.read(episodes.version_of_step, "alice", "job", step) == (made.version, name)
            wanted[step] = set(ids)
    for number, ids in wanted.items():
        page, total = database.read(
            episodes.groups_page,
            "alice",
            "job",
            consumed_by=database.read(episodes.version_of_step, "alice", "job", number),
        )
        assert ({group.id for group in page}, total) == (ids, len(ids))
        found = database.read(episodes.episodes_page, "alice", "job", EpisodeChoice(step=number)).episodes
        assert ({group.id for group, _ in found}, len(found)) == (ids, 2 * len(ids))


def test_a_step_that_is_not_committed_has_no_episodes(database: Database) -> None:
    submit(database)
    database.write(jobs.add_groups, "job", [new_group(0)])
    make_ready(database, new_group(0))
    assert len(database.read(episodes.episodes_page, "alice", "job", EpisodeChoice()).episodes) == 2
    assert database.read(episodes.episodes_page, "alice", "job", EpisodeChoice(step=1)).episodes == []


def test_usage_of_a_job_that_was_deleted_is_its_tenants_alone(database: Database) -> None:
    used = {"reserved": {}}
    database.write(tenants.save_usage, {("alice", "deleted"): used, ("alice", ""): used}, {}, (0, {}))
    with database.reading() as connection:
        assert [row.job for row in rows(connection, UsageRow)] == [""]


# --- values that a database refuses -----------------------------------------------------------------------------------


def test_statement_that_the_database_refuses_fails_alone_and_is_no_outage(database: Database) -> None:
    def session(key: str) -> SessionRow:
        return SessionRow(
            id=key[:9], tenant="alice", idempotency_key=key, created=0.0, seen=0.0, sdk_version="", name="", about={}
        )

    words = random.Random(0).choices("0123456789abcdefghijklmnopqrstuvwxyz", k=9000)
    refuses = database.engine.dialect.name == "postgresql"  # its indexes take no value of 3 kB that does not compress
    with database.batch_transaction():
        database.write(tenants.add_event, "bob", None, 0.0, "text", "before")
        with pytest.raises(OperationalError) if refuses else nullcontext():
            database.write(sessions.add_session, session("".join(words)))
        database.write(tenants.add_event, "bob", None, 0.0, "text", "after")
    assert [event.text for event in database.read(tenants.events, "bob", None, 9)] == ["before", "after"]
    with pytest.raises(OperationalError) if refuses else nullcontext():
        database.write(sessions.add_session, session("".join(words[::-1])))


def test_figures_of_jobs_are_read_from_json_that_databases_refuse(database: Database) -> None:
    submit(database)
    with database.writing() as connection:
        connection.execute(update(JobRow).values(spec={"base_model": "tiny", "stop": ["\0", "\ud800", math.nan]}))
        for step, tokens in enumerate((3, 4, None)):
            metrics = {"step": step, "tokens": tokens, "grad_norm": math.inf, "reward/x": math.nan, "note": "\0"}
            add(connection, StepRow(job="job", step=step, tenant="alice", version=0, reward=None, metrics=metrics))
    assert database.read(version_rows.trained_tokens, "alice", "job") == 7
    assert database.read(version_rows.trained_tokens, "bob", "job") == 0
    assert database.read(jobs.base_models, "alice") == {"job": {"base_model": "tiny"}}


# --- one service ------------------------------------------------------------------------------------------------------


def test_a_claimed_database_is_refused_to_others_until_its_claim_ends(postgres: str) -> None:
    url = new_database(postgres)
    one, other, elsewhere = Database(url), Database(url), Database(new_database(postgres))
    for database in (one, other, elsewhere):
        database.create()
    one.claim()
    one.claim()
    elsewhere.claim()
    with pytest.raises(UserError, match="in use by another service") as refused:
        other.claim()
    assert len(str(refused.value).splitlines()) == 1
    one.close()
    other.claim()

    # The claim's connection is cut, as when the server restarts: it is taken again, unless somebody was faster.
    kill = text("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND database ="
                " (SELECT oid FROM pg_database WHERE datname = current_database())")  # fmt: skip
    with connected(url) as connection:
        connection.execute(kill)
    other.claim()
    with pytest.raises(UserError, match="in use"):
        one.claim()
    with connected(url) as connection:
        connection.execute(kill)
    one.claim()
    with pytest.raises(UserError, match="in use"):
        other.claim()
    for database in (one, other, elsewhere):
        database.close()


def test_a_service_that_finds_its_claim_free_after_another_one_had_it_does_not_take_it(postgres: str) -> None:
    url = new_database(postgres)
    cut = text("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND database ="
               " (SELECT oid FROM pg_database WHERE datname = current_database())")  # fmt: skip
    with ExitStack() as opened:
        one, other = (opened.enter_context(closing(Database(url))) for _ in range(2))
        one.claim()
        one.create()
        one.used_place("/shared", "first")
        with connected(url) as connection:
            connection.execute(cut)
        one.claim()  # its own
        with connected(url) as connection:
            connection.execute(cut)
            epoch = connection.execute(text("SELECT value FROM meta WHERE name = 'epoch'")).scalar_one()
            for name, value in {"epoch": f"{int(epoch) + 1}", "service": f"{int(epoch) + 1} first"}.items():
                connection.execute(text(f"UPDATE meta SET value = '{value}' WHERE name = '{name}'"))
            connection.commit()
        one.claim()  # its own, of which it had no answer
        with connected(url) as connection:
            connection.execute(cut)
        other.claim()
        other.create()
        other.used_place("/shared", "second")
        other.close()
        for _ in range(2):
            with pytest.raises(DatabaseInUse, match=r"had another service since .* start this one again"):
                one.claim()
        with pytest.raises(Unavailable, match="another service since"):
            one.write(tenants.create_tenant, "alice", "Alice", 0.0)


def test_a_service_whose_epoch_was_passed_learns_it_although_it_has_its_lock(postgres: str) -> None:
    """Else it would live on, and every write would be refused."""
    with closing(Database(url := new_database(postgres))) as one:
        one.claim()
        one.create()
        one.claim()
        with connected(url) as connection:
            connection.execute(text("UPDATE meta SET value = '99' WHERE name = 'epoch'"))
        with pytest.raises(DatabaseInUse, match=r"had another service since \(epoch 99, not 1\); start this one again"):
            one.claim()


@contextmanager
def pooler(url: str, folder: Path, mode: str, size: int) -> Iterator[str]:
    """The address of a database behind pgbouncer."""
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin") or pytest.skip("no pgbouncer here")
    server = make_url(url)
    lines = ["[databases]", f"* = host={server.query['host']} user=rookery", "[pgbouncer]", "listen_port = 6432",
             f"unix_socket_dir = {folder}", "auth_type = any", f"pool_mode = {mode}",
             f"default_pool_size = {size}"]  # fmt: skip
    (folder / "pgbouncer.ini").write_text("\n".join(lines))
    user: dict[str, Any] = {}
    if os.geteuid() == 0:  # it refuses to run as root
        nobody = pwd.getpwnam("nobody")
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    with subprocess.Popen([program, folder / "pgbouncer.ini"], stderr=subprocess.DEVNULL, **user) as process:
        try:
            until(lambda: (folder / ".s.PGSQL.6432").exists(), "pgbouncer does not listen")
            yield str(server.set(query={"host": str(folder), "port": "6432"}))
        finally:
            process.kill()


@pytest.mark.parametrize(("mode", "size"), [("transaction", 1), ("transaction", 5), ("session", 5)])
def test_pooler_whose_clients_share_sessions_is_refused(postgres: str, mode: str, size: int) -> None:
    """A claim there would be everybody's. Nothing has changed."""
    url = new_database(postgres)
    with closing(Database(url)) as direct, tempfile.TemporaryDirectory(prefix="rookery-pool-") as folder:
        direct.claim()
        direct.create()
        with pooler(url, Path(folder), mode, size) as pooled, ExitStack() as opened:
            one, other = (opened.enter_context(closing(Database(pooled))) for _ in range(2))
            if mode == "session":
                direct.close()
                one.claim()
                one.claim()
            with pytest.raises(UserError, match=r"pooler in transaction mode|in use by another service") as refused:
                other.claim()
            assert ("pooler" in str(refused.value)) == (mode == "transaction")
        direct.claim()


def test_a_second_service_on_the_same_postgresql_is_refused(postgres: str, tmp_path: Path) -> None:
    url = new_database(postgres)
    """It stays refused when the first one has ended: the artifacts are the first one's."""
    url, wrong = new_database(postgres), r"two/data/artifacts on .* is not the place .* used .*one/data/artifacts"
    with served(tmp_path / "one", database=url), pytest.raises(UserError, match=wrong):
        served(tmp_path / "two", database=url).__enter__()
    with pytest.raises(UserError, match=wrong):
        served(tmp_path / "two", database=url).__enter__()
    with served(tmp_path / "one", database=url) as again:
        assert Client(again.url, again.key).jobs() == []


def test_a_service_whose_database_was_taken_ends(postgres: str, tmp_path: Path) -> None:
    url = new_database(postgres)

    async def main() -> None:
        settings = Settings.load({}, data=tmp_path, port=0, models="", workers=0, database=url)
        async with Service(settings, rules=ServiceRules(claim_seconds=0.05)) as service:
            serving = asyncio.ensure_future(service.serving())
            with connected(url) as connection:  # what frees it has it, in one go
                connection.execute(text(
                    "SELECT pg_terminate_backend(pid), pg_advisory_lock(objid::bigint | (classid::bigint << 32))"
                    " FROM pg_locks WHERE locktype = 'advisory' AND database ="
                    " (SELECT oid FROM pg_database WHERE datname = current_database())"
                ))  # fmt: skip
                with pytest.raises(Unavailable, match="in use by another service"):  # again, it is a standby
                    await serving

    asyncio.run(main())


@pytest.mark.parametrize("writes", [True, False])
def test_lost_server_is_reported_as_such_by_the_call_and_its_batch(postgres: str, writes: bool) -> None:
    """Whichever call meets the loss: a job whose call it is pauses, and does not fail."""
    url = new_database(postgres)
    database = Database(url)
    database.create()

    def fail() -> None:
        with pytest.raises(Unavailable, match="does not answer"):
            if writes:
                database.write(tenants.create_tenant, "bob", "Bob", 0.0)
            else:
                database.read(tenants.list_tenants)

    with pytest.raises(Unavailable, match="does not answer"), database.batch_transaction():
        database.write(tenants.create_tenant, "alice", "Alice", 0.0)
        with connected(url) as connection:
            connection.execute(text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            ))  # fmt: skip
        fail()
        fail()
    assert database.read(tenants.list_tenants) == []
    database.close()


@pytest.mark.parametrize(("option", "expected"), [("", "30000"), ("&tcp_user_timeout=7000&application_name=x", "7000")])
def test_a_connection_notices_that_its_server_has_vanished(postgres: str, option: str, expected: str) -> None:
    database = Database(new_database(postgres) + option)
    database.create()
    with database.reading() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        options = driver.info.get_parameters()
        read_waits = connection.execute(text("SHOW lock_timeout")).scalar()
    with database.writing() as connection:
        write_waits = connection.execute(text("SHOW lock_timeout")).scalar()
    database.close()
    assert options["tcp_user_timeout"] == expected and (read_waits, write_waits) == ("5s", "1min")
    assert int(options["keepalives_idle"]) + 3 * int(options["keepalives_interval"]) <= 30


def test_a_lock_of_another_session_ends_reads_and_no_claim(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an administrator who repairs the table that has the epoch and the identity: a new connection waited for it
    a minute, longer than any client, and after two seconds the claim was given up."""
    monkeypatch.setattr(db, "READ_LOCK_SECONDS", 0.2)
    url = new_database(postgres)
    with ExitStack() as opened:
        one, other = (opened.enter_context(closing(Database(url, claim_wait=0.2))) for _ in range(2))
        one.claim()
        one.create()
        with connected(url) as administrator:
            administrator.execute(text("LOCK TABLE meta IN ACCESS EXCLUSIVE MODE"))
            with one.reading() as reading:
                assert reading.execute(text("SELECT count(*) FROM tenants")).scalar() == 0, "it needs no such table"
                for _ in range(2):
                    with pytest.raises(DatabaseAway, match="the database does not answer"):
                        one.read(tenants.list_tenants)  # in a new connection
            for ask in (one.ping, one.claim):
                with pytest.raises(DatabaseAway, match="the database does not answer"):
                    ask()
            with pytest.raises(DatabaseInUse):
                other.claim()
        one.claim()
        one.ping()
        with pytest.raises(DatabaseInUse):
            other.claim()


def set_read_only(url: str, database: Database, value: str) -> None:
    """As the server of a replica, or a file system after an error; new and old connections alike."""
    if url.startswith("sqlite"):
        with database.reading() as connection:
            connection.exec_driver_sql(f"PRAGMA query_only={value}")
        return
    with connected(url, isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("SET default_transaction_read_only = off"))
        name = connection.execute(text("SELECT current_database()")).scalar()
        connection.execute(text(f"ALTER DATABASE {name} SET default_transaction_read_only = {value}"))
        connection.execute(text(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        ))  # fmt: skip


def test_a_read_only_database_is_an_outage_of_writes_that_lasts_until_it_takes_them(
    database: Database, url: str
) -> None:
    set_read_only(url, database, "on")
    for fail in (database.check_writes, partial(database.write, tenants.create_tenant, "carol", "Carol", 0.0)):
        with pytest.raises(DatabaseReadOnly, match="takes no writes") as refused:
            fail()
        assert outage_of(refused.value) == "writes"
    database.ping()  # it answers: the outage would seem to be over
    set_read_only(url, database, "off")
    database.check_writes()
    database.write(tenants.create_tenant, "carol", "Carol", 0.0)


def test_a_standby_knows_the_service_whose_claim_it_took_over(postgres: str) -> None:
    """Not one that a service which never had the place of the artifacts took over from, as on a copy of a database."""
    url = new_database(postgres)
    with ExitStack() as opened:
        one, standby, later = (opened.enter_context(closing(Database(url))) for _ in range(3))
        one.claim()
        one.create()
        one.used_place("/shared", "first")
        for waiting in (standby, later):
            with pytest.raises(DatabaseInUse):
                waiting.claim()
        one.close()
        standby.claim()
        assert standby.ended == "first"
        standby.close()
        later.claim()
        assert later.ended == ""


def test_claim_on_a_server_that_became_read_only_is_given_up(postgres: str) -> None:
    """The address may lead to the new primary by then, where nobody has it; the connection to a server that was demoted
    can stay open."""
    url = new_database(postgres)
    database, opened = Database(url), dict[int, Any]()

    @event.listens_for(database.engine, "connect")
    def remember(connection: Any, _: object) -> None:
        opened[connection.info.backend_pid] = connection

    def holder() -> int:
        """The process of the server that has the claim."""
        query = ("SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND database ="
                 " (SELECT oid FROM pg_database WHERE datname = current_database())")  # fmt: skip
        with connected(url) as connection:
            return int(connection.execute(text(query)).scalar_one())

    database.create()
    database.claim()
    before = holder()
    database.claim()
    assert holder() == before
    opened[before].execute("SET default_transaction_read_only = on")
    database.claim()
    assert opened[before].closed and holder() != before
    set_read_only(url, database, "on")
    with pytest.raises(DatabaseReadOnly):
        database.claim()
    set_read_only(url, database, "off")
    database.claim()
    database.write(tenants.create_tenant, "carol", "Carol", 0.0)
    database.close()


# --- odd values, odd places -------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters()), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=examples(40))
@given(values=st.dictionaries(st.text(), json_values, max_size=4), words=st.text(st.characters()), blob=st.binary())
def test_any_json_and_any_text_can_be_stored(values: dict[str, Any], words: str, blob: bytes) -> None:
    _round_trip("sqlite://", values, words, blob)


def test_odd_values_on_both_databases(url: str) -> None:
    _round_trip(url, {"nul \x00": ["\ud800", math.inf, -math.inf, 2**70]}, "\x00 \ud800 \U0001f426", bytes(range(256)))


def _round_trip(url: str, values: dict[str, Any], words: str, blob: bytes) -> None:
    database = Database(url)
    database.create()
    database.write(tenants.create_tenant, "alice", words, 0.0)
    row, _ = database.write(
        jobs.submit_job,
        JobRow(id="job", tenant="alice", name=words, spec=values, created=0.0, idempotency_key=words),
        [],
    )
    again, created = database.write(
        jobs.submit_job, JobRow(id="job2", tenant="alice", name="", spec={}, created=0.0, idempotency_key=words), []
    )
    assert not created and again.spec == row.spec == values
    database.write(jobs.add_groups, "job", [new_group(0)])
    episode = "job-g0-0"
    database.write(jobs.save_turns, episode, [blob])
    database.write(jobs.finish_episode, episode, 1.0, trajectories=blob + b"t", reward=0.1, metrics={"x": math.nan})
    database.write(jobs.fail_episode, "job-g0-1", 0.5, words + "!")
    ((_, stored),) = database.read(jobs.recent_episodes, "alice", "job", 1)
    assert isinstance(stored, EpisodeRow)
    assert (stored.turns, stored.trajectories, stored.reward) == (blob, blob + b"t", 0.1)
    assert math.isnan(stored.metrics["x"])
    with pytest.raises(NotFound):
        database.read(jobs.get_job, "alice", words + "\x00")
    database.write(tenants.add_event, "alice", None, 0.0, "text", words)
    clean = words.replace("\x00", "\ufffd").encode("utf-8", "replace").decode()
    assert database.read(tenants.events, "alice", None, 1)[0].text == clean
    database.close()


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ("nonsense", UserError),
        ("nodb://x", UserError),
        ("mysql://rookery:secret@host/x", UserError),
        ("postgres://rookery:secret@host:port/x", UserError),
        ("sqlite:////nowhere/to/be/found.db", UserError),
        ("postgresql://rookery:secret@/x?host=/nowhere/to/be/found", Unavailable),
        ("postgresql://rookery:secret@127.0.0.1:1/x", Unavailable),
        ("postgresql://rookery:a@secret@127.0.0.1:1/x", UserError),
        ("postgresql://rookery:secret@127.0.0.1:1/x?sslmod=require", UserError),
        ("postgresql://rookery:secret@127.0.0.1:1/x?sslmode=always", UserError),
    ],
)
def test_a_database_that_cannot_be_opened_is_refused_in_one_line(bad: str, error: type[RookeryError]) -> None:
    """A server may be started later."""
    with pytest.raises(error) as refused:
        database = Database(bad)
        database.create()
    assert "\n" not in str(refused.value) and "secret" not in str(refused.value)


ROLES = """
CREATE ROLE sealed LOGIN PASSWORD 'right'; CREATE ROLE closed NOLOGIN; CREATE ROLE guest LOGIN;
CREATE ROLE full LOGIN CONNECTION LIMIT 0;
"""


@pytest.fixture(scope="module")
def many_roles(postgres: str) -> str:
    """The server with some roles, of which one has a password."""
    rules = Path(str(make_url(postgres).query["host"])) / "cluster" / "pg_hba.conf"
    rules.write_text("local all sealed scram-sha-256\nlocal all stranger reject\n" + rules.read_text())
    with connected(postgres.replace("NAME", "postgres"), isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(ROLES))
        connection.execute(text("SELECT pg_reload_conf()"))
    return postgres


@pytest.mark.parametrize(
    ("user", "before", "error"),
    [
        ("sealed:wrong", "", UserError),
        ("sealed", "", UserError),
        ("nobody_of_this_name", "", UserError),
        ("stranger", "", UserError),
        ("closed", "", UserError),
        ("rookery", "ALTER DATABASE {0} RENAME TO {0}_other", UserError),
        ("guest", "REVOKE CONNECT ON DATABASE {0} FROM PUBLIC", UserError),
        ("guest", "REVOKE ALL ON SCHEMA public FROM PUBLIC", UserError),
        ("full", "", Unavailable),
        ("rookery", "ALTER DATABASE {0} ALLOW_CONNECTIONS false", Unavailable),
        ("guest", "ALTER DATABASE {0} CONNECTION LIMIT 0", Unavailable),
    ],
)
def test_a_server_that_refuses_a_start_is_a_mistake_and_a_busy_one_is_away(
    many_roles: str, tmp_path: Path, user: str, before: str, error: type[RookeryError]
) -> None:
    """A supervisor starts the service again for ever where a later start can succeed, and only there."""
    url = new_database(many_roles)
    name = make_url(url).database
    assert name is not None
    within = many_roles.replace("NAME", name if "SCHEMA" in before else "postgres")
    if before:
        with connected(within, isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text(before.format(name)))
    with pytest.raises(error) as refused:
        served(tmp_path, database=url.replace("rookery@", f"{user}@")).__enter__()
    assert "\n" not in str(refused.value) and "wrong" not in str(refused.value)


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        ('connection failed: connection to server at "10.0.0.1", port 6432 failed: FATAL:  no such database: x', True),
        ("connection failed: FATAL:  no such user: rookery", True),
        ("connection failed: FATAL:  SASL authentication failed", True),
        ('FATAL:  Peer authentication failed for user "rookery"', True),
        ('FATAL:  no pg_hba.conf entry for host "10.0.0.9", user "rookery", database "x", no encryption', True),
        ("connection to server failed: server does not support SSL, but SSL was required", True),
        ("connection failed: SSL error: certificate verify failed", True),
        ("connection failed: FATAL:  the database system is starting up", False),
        ("connection failed: FATAL:  the database system is in recovery mode", False),
        ("connection failed: FATAL:  sorry, too many clients already", False),
        ("connection failed: FATAL:  terminating connection due to administrator command", False),
        ("connection failed: Connection refused\n\tIs the server running on that host?", False),
        ("failed to resolve host 'db.internal': [Errno -2] Name or service not known", False),
        ("connection timeout expired", False),
    ],
)
def test_errors_of_connections_that_no_later_start_makes(answer: str, refused: bool) -> None:
    """Of PostgreSQL and of poolers: these errors carry no code."""
    driver = pytest.importorskip("psycopg")

    def fail(*_: object) -> None:
        raise driver.OperationalError(answer)

    with closing(Database("postgresql://rookery@127.0.0.1:1/x")) as database:
        event.listen(database.engine, "do_connect", fail)
        with pytest.raises(DatabaseAway) as raised:
            database.ping()
        assert isinstance(raised.value, DatabaseRefuses) == database.stays_away(raised.value) == refused


@pytest.mark.parametrize("driver", ["postgres", "postgresql", "postgresql+psycopg2", "postgresql+asyncpg"])
def test_driver_of_another_program_in_an_address_does_not_matter(driver: str) -> None:
    assert Database(f"{driver}://u@127.0.0.1:1/x").engine.dialect.driver == "psycopg"


# --- kill -9 ----------------------------------------------------------------------------------------------------------

_TRAIN_FOREVER = """
import os, sys
sys.path.insert(0, sys.argv[2])
from rookery.storage.repositories import jobs
from tests.support.storing import Database, commit, make_ready, new_group
database = Database(sys.argv[1])
lease = database.write(jobs.next_lease, "job-main")
job, policy = database.read(jobs.get_job, "alice", "job"), database.read(jobs.get_policy, "alice", "job", "main")
cursor, head, step = job.cursor, policy.head_version, job.step
while True:
    ready = [group.id for group in database.read(jobs.ready_groups, "job")]
    for group in database.read(jobs.open_groups, "job"):
        ready.append(make_ready(database, new_group(group.ordinal), version=head or 0))
    if ready:
        head, step = commit(database, lease, head, ready, step + 1), step + 1
        os.write(1, f"{head} {' '.join(ready)}\\n".encode())
    database.write(jobs.add_groups, "job", [new_group(cursor), new_group(cursor + 1)])
    cursor += 2
"""


def test_kill_9_keeps_a_gapless_chain_and_trains_each_group_once(database: Database, url: str) -> None:
    """A process commits steps as fast as it can and is killed at random moments; the next goes on."""
    submit(database)
    moment = random.Random(11)
    command = [sys.executable, "-c", _TRAIN_FOREVER, url, str(Path(__file__).parents[2])]
    acknowledged: dict[int, set[str]] = {}
    for _ in range(5):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as trainer:
            assert trainer.stdout is not None
            lines = [trainer.stdout.readline() for _ in range(moment.randint(1, 20))]
            trainer.kill()
            lines += trainer.stdout.read().splitlines()
        for line in lines:
            head, *groups = line.decode().split()
            acknowledged[int(head)] = set(groups)
    versions = database.read(version_rows.versions, "alice", "job-main")
    assert [v.version for v in versions] == list(range(len(versions)))
    assert [v.parent for v in versions] == [None, *range(len(versions) - 1)]
    assert [v.step for v in versions] == list(range(1, len(versions) + 1))
    job = database.read(jobs.get_job, "alice", "job")
    assert (job.step, job.counters) == (len(versions), {"steps": len(versions)})
    assert database.read(jobs.get_policy, "alice", "job", "main").head_version == len(versions) - 1
    with connected(url) as connection:
        rows = connection.execute(select(models.GroupRow).order_by(models.GroupRow.ordinal)).all()
    assert [row.ordinal for row in rows] == list(range(job.cursor)), "no prompt skipped or used twice"
    consumed: dict[int, set[str]] = {}
    for row in rows:
        assert (row.state == "consumed") == (row.consumed_by is not None)
        if row.consumed_by is not None:
            consumed.setdefault(row.consumed_by, set()).add(row.id)
    assert acknowledged.items() <= consumed.items()
    assert len(consumed) == len(versions) > 5


def sqlite_steps(database: Database, function: Callable[..., Any], *arguments: Any) -> int:
    """The instructions of SQLite's machine that a call takes."""
    taken: list[None] = []
    with database.reading() as connection:
        raw: Any = connection.connection.driver_connection
        raw.set_progress_handler(lambda: taken.append(None), 1)
        try:
            function(connection, *arguments)
        finally:
            raw.set_progress_handler(None, 0)
    return len(taken)


def test_whether_an_artifact_is_named_costs_the_same_after_a_long_history(tmp_path: Path) -> None:
    digest = manifest("shared").hash

    def steps(history: int) -> int:
        """After ``history`` jobs, versions and samplers of a tenant whose artifact was the same one."""
        database = Database(f"sqlite:///{tmp_path}/{history}.db")
        database.create()
        database.write(tenants.create_tenant, "alice", "Alice", 0.0)
        submit(database)
        visit(database)
        row = JobRow(id="", tenant="alice", name="", spec={}, created=0.0, state="cancelled", finished=1.0)
        begun = {"tenant": "alice", "rank": 8, "alpha": 1.0, "targets": ["q"], "warm_start": digest}
        version = models.VersionRow(
            policy="job-main", version=0, tenant="alice", parent=None, manifest=manifest("shared"), hash=digest,
            size=1, step=0, created=0.0, kept=False,
        )  # fmt: skip
        with database.writing() as connection:
            for n in range(history):
                job, sampler = replace(row, id=f"job-{n}"), sampler_row(f"sampler-{n}", digest=digest)
                for one in (job, replace(version, version=n), replace(sampler, kept=False)):
                    add(connection, one)
                add(connection, PolicyRow(id=f"policy-{n}", job=job.id, name="main", **begun))
        for n in range(history):
            assert database.write(version_rows.unnamed_starts, f"job-{n}") == [digest]
        assert not database.read(version_rows.is_live, digest)
        found = sqlite_steps(database, version_rows.is_live, digest)
        database.close()
        return found

    assert steps(400) <= steps(4) + 20
