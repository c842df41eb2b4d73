"""Support for the storage tests: rows to store, direct reads of the database, a separate PostgreSQL."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, event, func, select, text

from rookery.errors import Conflict
from rookery.protocol import Manifest, Shard, manifest_of
from rookery.storage.columns import Base
from rookery.storage.db import Database
from rookery.storage.migrations import COUNTED
from rookery.storage.models import (
    CheckpointRow,
    EpisodeRow,
    FutureRow,
    GroupRow,
    JobRow,
    ModelRow,
    PolicyRow,
    SamplerRow,
    SessionRow,
)
from rookery.storage.repositories import jobs, sessions, tenants
from rookery.storage.repositories.versions import JobCommit, NextVersion, commit_step


def manifest(name: str) -> Manifest:
    return manifest_of([Shard(name=name, size=1, sha256="0" * 64)])


def new_group(ordinal: int, members: int = 2, job: str = "job", tenant: str = "alice") -> GroupRow:
    id = f"{job}-g{ordinal}"
    owner = {"tenant": tenant, "job": job}
    episodes = tuple(
        EpisodeRow(id=f"{id}-{m}", group_id=id, member=m, seed=2**63 - 1 - m, **owner) for m in range(members)
    )
    prompt = b'{"n": %d}' % ordinal
    return GroupRow(id=id, ordinal=ordinal, prompt=prompt, seed=ordinal, created=1.0, episodes=episodes, **owner)


def submit(database: Database, tenant: str = "alice", job: str = "job", key: str | None = None) -> tuple[JobRow, bool]:
    row = JobRow(
        id=job, tenant=tenant, name="a job", spec={"base_model": "tiny", "stop": {"steps": 2}}, created=1.0,
        idempotency_key=key, rng={"seed": 1},
    )  # fmt: skip
    policy = PolicyRow(id=f"{job}-main", tenant=tenant, job=job, name="main", rank=8, alpha=16.0, targets=["q", "v"])
    return database.write(jobs.submit_job, row, [policy])


def visit(
    database: Database, tenant: str = "alice", id: str = "one", model: str = "one", key: str | None = None
) -> None:
    """A client's session with everything that can belong to one."""
    database.write(
sessions.add_session,
        SessionRow(
            id=id, tenant=tenant, idempotency_key=key, created=0.0, seen=0.0, finished=None, status="",
            sdk_version="0.38.0", name="", about={},
        )
    )  # fmt: skip
    row = ModelRow(
        id=model, tenant=tenant, session=id, base_model="tiny", requested_model="tiny",
        policy=f"{model}-policy", lora={}, about={}, created=0.0, used=0.0, done_seq=-1, inflight=None,
    )  # fmt: skip
    policy = PolicyRow(id=f"{model}-policy", tenant=tenant, name=model, rank=8, alpha=16.0, targets=["q"])
    database.write(sessions.add_model, row, policy)
    database.write(sessions.add_sampler, sampler_row(id, tenant, session=id))
    database.write(sessions.save_checkpoint, checkpoint_row(model, tenant), overwrite=False)
    database.write(sessions.open_future, future_row(id, tenant, model))


def sampler_row(id: str, tenant: str = "alice", session: str = "one", digest: str = "", used: float = 0) -> SamplerRow:
    return SamplerRow(
        id=id, tenant=tenant, session=session, base_model="tiny", requested_model="tiny", path="", model=None,
        inflight=False, policy="", version=0, hash=digest, rank=0, alpha=0.0, created=0.0, used=used, kept=True,
    )  # fmt: skip


def checkpoint_row(
    model: str = "model", tenant: str = "alice", name: str = "main", content: str = "a"
) -> CheckpointRow:
    kept = manifest(content)
    return CheckpointRow(
        model=model, kind="weights", name=name, tenant=tenant, policy=f"{model}-policy", version=0, manifest=kept,
        hash=kept.hash, size=1, created=0.0, expires=None, about={},
    )  # fmt: skip


def future_row(id: str, tenant: str = "alice", model: str | None = None, seq: int = 0, call: bytes = b"c") -> FutureRow:
    return FutureRow(
        id=id, tenant=tenant, model=model, seq=seq, digest="", call=call, outcome=None, created=0.0, finished=None
    )


def make_ready(database: Database, group: GroupRow, version: int = 0) -> str:
    for episode in group.episodes:
        database.write(jobs.finish_episode, episode.id, 2.0, trajectories=b"tokens", reward=1.0, version=version)
    database.write(jobs.finish_group, group.id, "ready", 3.0, min_version=version)
    return group.id


def commit(database: Database, lease: int, parent: int | None, groups: list[str], step: int, job: str = "job") -> int:
    row = database.write(
        commit_step,
        NextVersion(
            policy=f"{job}-main", lease=lease, parent=parent, manifest=manifest(f"{job}-{step}"), step=step, time=4.0
        ),
        JobCommit(
            job=job,
            groups=groups,
            metrics=[{"step": step, "reward": 0.5, "tokens": 7.0}],
            counters={"steps": step},
            rng={"drawn": step},
        ),
    )
    return row.version


@contextmanager
def connected(url: str, **options: Any) -> Iterator[Connection]:
    """A connection beside the database's own, for what its methods do not show."""
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"), **options)
    with engine.begin() as connection:
        yield connection
    engine.dispose()


def everything(url: str) -> dict[str, list[str]]:
    """All rows of all tables."""
    with connected(url) as connection:
        return {t.name: sorted(map(repr, connection.execute(select(t)))) for t in Base.metadata.tables.values()}


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Runs ``work(i)`` for i < count, all beginning together; exceptions other than Conflict come out."""
    barrier = threading.Barrier(count)
    failures: list[BaseException] = []

    def run(i: int) -> None:
        barrier.wait()
        try:
            work(i)
        except Conflict:
            pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def postgres_programs() -> Path:
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    if versions:
        return versions[-1].parent
    if found := shutil.which("initdb"):
        return Path(found).parent
    pytest.skip("no PostgreSQL server here: install Debian's package postgresql (or put initdb on the PATH)")


class PostgresCluster:
    """A server that can be stopped and started. ``url``: up to the database's name, ``NAME``."""

    def __init__(self, folder: Path) -> None:
        self.url = f"postgresql://rookery@/NAME?host={folder}"
        self._cluster, self._programs = folder / "cluster", postgres_programs()
        self._run: dict[str, Any] = {
            "check": True, "cwd": folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE,
        }  # fmt: skip
        if os.geteuid() == 0:  # the server refuses to run as root
            nobody = pwd.getpwnam("nobody")
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
            self._run |= {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        make = [self._programs / "initdb", "-D", self._cluster, "-U", "rookery", "-A", "trust", "--no-sync"]
        subprocess.run(make, **self._run)

    def start(self) -> None:
        folder = self._cluster.parent
        self._control("-l", folder / "log", "-o", f"-k {folder} -c listen_addresses='' -c fsync=off", "start")

    def stop(self) -> None:
        """At once, as when it crashes."""
        self._control("-m", "immediate", "stop")

    def runs(self) -> bool:
        return (self._cluster / "postmaster.pid").exists()

    def _control(self, *arguments: Any) -> None:
        subprocess.run([self._programs / "pg_ctl", "-D", self._cluster, "-w", *arguments], **self._run)


@contextmanager
def postgres_cluster() -> Iterator[PostgresCluster]:
    """A started server in a temporary folder, reachable through a socket in it."""
    pytest.importorskip("psycopg", reason="psycopg is missing: pip install 'rookery[postgres]'")
    with tempfile.TemporaryDirectory(prefix="rookery-pg-") as folder:
        cluster = PostgresCluster(Path(folder))
        cluster.start()
        try:
            yield cluster
        finally:
            if cluster.runs():
                cluster.stop()


@contextmanager
def running_postgres() -> Iterator[str]:
    """The URL of a :func:`postgres_cluster`."""
    with postgres_cluster() as cluster:
        yield cluster.url


def new_database(server: str) -> str:
    """The URL of a new, empty database."""
    name = f"d{uuid.uuid4().hex}"
    with connected(server.replace("NAME", "postgres"), isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    return server.replace("NAME", name)


def check_counted_bytes(url: str) -> None:
    """The database counts the bytes of each tenant's rows as they are."""
    with connected(url) as connection:
        stored = {row.id: row.stored for row in connection.execute(text("SELECT id, stored FROM tenants"))}
        found = dict.fromkeys(stored, 0)
        for table, columns in COUNTED.items():
            rows = f'SELECT tenant, {", ".join(columns)} FROM "{table}"'
            rows += " WHERE finished IS NOT NULL" if table == "episodes" else ""
            for tenant, *values in connection.execute(text(rows)):
                found[tenant] += tenants.ROW_BYTES + sum(map(len, filter(None, values)))
    assert stored == found


class FaultyDatabase(Database):
    """A database whose calls of chosen repository functions a test replaces. It waits for no disk: what a test kills is
    a controller, and the file stays as the system has it."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        event.listen(self.engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=OFF"))
        self._replaced: dict[str, Callable[..., Any]] = {}

    def intercept(self, name: str, call: Callable[..., Any]) -> None:
        """From now on ``call(real, *arguments, **named)`` runs in place of the repository function ``name``."""
        self._replaced[name] = call

    def write(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return self._run(partial(super().write, function), function.__name__, *arguments, **named)

    def read(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return self._run(partial(super().read, function), function.__name__, *arguments, **named)

    def _run(self, real: Callable[..., Any], name: str, *arguments: Any, **named: Any) -> Any:
        replaced = self._replaced.get(name)
        return real(*arguments, **named) if replaced is None else replaced(real, *arguments, **named)


def group_counts(database: Database, job: str) -> dict[str, int]:
    """The number of the job's groups in each state."""
    query = select(GroupRow.state, func.count()).filter_by(job=job).group_by(GroupRow.state)
    with database.reading() as connection:
        return {row[0]: row[1] for row in connection.execute(query)}
