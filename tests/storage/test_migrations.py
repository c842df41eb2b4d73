"""A data folder of an earlier version opens, is migrated, and its jobs and clients continue.

``tests/data/data_folder_0001.tar.xz`` is a data folder of the initial revision, which a killed process left. It was
made with ``tests/support/peers.py``, ``tests/support/driven.py`` and the worker of ``tests/scheduling/test_usage.py``:

1. a ``Service`` with one worker at a price of 3600 an hour, and one host;
2. keys ``tml-alice`` of alice, ``tml-old`` of bob (revoked at 2.0);
3. a job of alice with ``evaluation={"prompts": 2}`` that ran to its end (two steps);
4. a heartbeat after 10 s with 4 s of decoding;
5. a client of bob: gradient, step, checkpoints ``kept`` (weights) and ``sampled`` (sampler weights), one more gradient,
   a sampler of ``sampled`` and one sample from it; a heartbeat after 10 s with 1 s of decoding;
6. a second job of alice, ``stop__steps=6``, ``max_staleness=2``, ``commit_every=2``, up to its second step; a heartbeat
   after 10 s with 4 s of decoding; the usage was saved and the process crashed.

``postgresql.sql`` in it makes the tables of the initial revision on PostgreSQL.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Column, Connection, MetaData, Text, create_engine, insert, inspect, select, text
from tests.support.driven import Client, join
from tests.support.peers import Service
from tests.support.storing import check_counted_bytes, connected, running_postgres

from rookery.controller.jobs.trajectory import decode_result, decode_turns
from rookery.controller.sessions import operations
from rookery.errors import UserError
from rookery.storage import migrations
from rookery.storage.columns import Base, Page
from rookery.storage.data_dir import hash_key
from rookery.storage.db import Database
from rookery.storage.migrations import HEAD
from rookery.storage.repositories import jobs, runs, sessions, tenants, versions

FINISHED, UNFINISHED = "job-1027c4d1c386bbc4cd613e30", "job-c69d4bd8b3fa7aa7e1fab9d7"
SESSION = "session-e1ea24c4f9341c68966baea1"
MODEL, SAMPLER = f"{SESSION}:train:0", f"{SESSION}:sample:0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    archive = Path(__file__).parents[1] / "data" / "data_folder_0001.tar.xz"
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.fixture(params=["sqlite", "postgresql"])
def old_url(request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    """The database of the earlier version."""
    sqlite = f"sqlite:///{folder}/rookery.db"
    if request.param == "sqlite":
        yield sqlite
        return
    with running_postgres() as server:
        url = server.replace("NAME", "postgres")
        copy(sqlite, url, (folder / "postgresql.sql").read_text())
        yield url


def copy(source: str, target: str, tables: str) -> None:
    """Every row of ``source`` in ``target``, whose ``tables`` are made."""
    reader = create_engine(source)
    with reader.begin() as old, connected(target) as new:
        new.exec_driver_sql(tables)
        found, made = MetaData(), MetaData()
        found.reflect(old)
        made.reflect(new)
        for table in made.sorted_tables:
            booleans = {column.name for column in table.columns if column.type.python_type is bool}
            rows = [
                {name: bool(value) if name in booleans else value for name, value in row._mapping.items()}
                for row in old.execute(select(found.tables[table.name]))
            ]
            if rows:
                new.execute(insert(table), rows)
        new.execute(text("SELECT setval(pg_get_serial_sequence('events', 'id'), (SELECT max(id) FROM events))"))
    reader.dispose()


@contextmanager
def opened(url: str) -> Iterator[Database]:
    database = Database(url)
    try:
        database.create()
        yield database
    finally:
        database.close()


def differences(connection: Connection) -> list[object]:
    """Between the schema and the models."""
    context = MigrationContext.configure(connection, opts={"compare_type": True})
    return list(compare_metadata(context, Base.metadata))


def test_an_old_database_gets_the_schema_of_the_models(old_url: str) -> None:
    with opened(old_url) as database:
        database.create()
        with database.reading() as connection:
            assert differences(connection) == []
            assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == HEAD
        check_rows(database)
        database.write(tenants.add_event, "alice", None, 0.0, "kind", "text")
        assert database.read(tenants.database_bytes, "alice") > 10_000
    check_counted_bytes(old_url)


def check_rows(database: Database) -> None:
    """Everything that the earlier version stored is there."""
    key = database.read(tenants.valid_key, hash_key("tml-alice"), 9.0)
    assert key is not None and (key.tenant, key.role, key.expires) == ("alice", "tenant", None)
    assert database.read(tenants.valid_key, hash_key("tml-old"), 9.0) is None
    rows = database.read(versions.steps, "alice", FINISHED)
    assert [(row["step"], row["version"], row["reward"]) for row in rows] == [(1, 1, 2.25), (2, 2, 2.25)]
    rows = database.read(versions.steps, "alice", UNFINISHED)
    assert [(row["step"], row["version"], row["reward"]) for row in rows] == [(1, 1, 1.75), (2, 1, 2.75)]
    latest = database.read(versions.latest_steps, "alice", UNFINISHED, Page(10))
    assert [(row.step, row.time) for row in latest] == [(row["step"], row["time"]) for row in reversed(rows)]
    assert rows[0]["time"] > 0
    assert database.read(jobs.get_job, "alice", FINISHED).counters["trajectory_splits"] == 0
    (policy,) = database.read(jobs.policies, "alice", UNFINISHED)
    stored = database.read(versions.versions, "alice", policy.id)
    assert [version.reward for version in stored] == [None, 2.75]
    sizes = [sum(shard.size for shard in version.manifest.shards) for version in stored]
    assert [version.size for version in stored] == sizes and all(sizes)
    assert database.read(runs.rewards_of, [FINISHED, UNFINISHED], 64) == {
        FINISHED: [2.25, 2.25],
        UNFINISHED: [1.75, 2.75],
    }
    assert [row.version for row in database.read(versions.evaluations, "alice", FINISHED)] == [0, 2]
    totals = {tenant: used["reserved"]["decode"] for tenant, used in database.read(tenants.usage_totals).items()}
    assert totals == {
        "alice": {"seconds": 8.0, "cost": 8.0, "tokens": 117},
        "bob": {"seconds": 1.0, "cost": 1.0, "tokens": 7},
    }
    assert database.read(tenants.job_usage, "alice", FINISHED)["reserved"]["decode"]["cost"] == 4.0
    (fleet,) = database.read(tenants.fleet_usage).values()
    assert (fleet["reserved"]["seconds"], fleet["reserved"]["cost"], fleet["reserved"]["idle"]) == (30.0, 30.0, 21.0)
    for _, episode in database.read(jobs.recent_episodes, "alice", FINISHED, 8):
        result, turns = decode_result(episode.trajectories, "main"), decode_turns(episode.turns, "main")
        assert [turn.policy for turn in turns] == result.speakers == ["main"], "their only policy has no name there"
        assert result.of("main") == result and result.of("other") is None
    for row in database.read(sessions.futures_behind, MODEL, -1):
        assert row.outcome is not None and operations.decode_result(row.outcome)
        assert not row.call or operations.decode_operation(row.call)


async def test_jobs_and_clients_of_an_old_folder_continue(folder: Path) -> None:
    service = Service(folder)
    controller = await service.start()
    await join(service)
    await service.host(instance="another").join()
    view = await service.ends(UNFINISHED)
    assert view.step == 6 and view.rewards[:2] == [1.75, 2.75]
    service.check_history(UNFINISHED)
    assert [row["step"] for row in await controller.queries.metrics("alice", UNFINISHED)] == [1, 2, 3, 4, 5, 6]
    assert (await controller.queries.show("alice", FINISHED)).cost.cost == 4.0
    assert controller.context.rooms.usage.tenant_view("bob").cost == 1.0

    client = Client(service, "bob")
    client.session, client.model = SESSION, MODEL
    _, policy = service.database.read(sessions.get_model, "bob", MODEL)
    client._seq = max(future.seq for future in service.database.read(sessions.futures_behind, MODEL, -1))
    assert isinstance(await client.step(), operations.OptimStepResult), "the stored gradient is computed again"
    after = service.database.read(sessions.get_model, "bob", MODEL)[1]
    assert (after.head_version or 0) == (policy.head_version or 0) + 1
    outcome = await client.outcome(await client.sample(SAMPLER, 1))
    assert isinstance(outcome, operations.SampleResult)
    await service.close()
    service.database.close()


def test_later_revisions_change_an_old_database_in_order(folder: Path) -> None:
    def add_column(op: Operations) -> None:
        op.add_column("tenants", Column("color", Text, nullable=False, server_default="red"))

    def fill_column(op: Operations) -> None:
        op.execute("UPDATE tenants SET color = 'blue' WHERE id = 'bob'")

    with connected(f"sqlite:///{folder}/rookery.db") as connection:
        assert migrations.upgrade(connection, {"0001a": add_column, "0001b": fill_column}) == ""
        colors = dict(connection.execute(text("SELECT id, color FROM tenants")).all())
        assert colors == {"alice": "red", "bob": "blue"}
        assert migrations.revision(connection) == "0001b"
        assert "knows revisions up to 0001a" in migrations.upgrade(connection, {"0001a": add_column})


def test_a_new_database_has_the_schema_of_the_models() -> None:
    with opened("sqlite://") as database, database.reading() as connection:
        assert differences(connection) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("DROP TABLE alembic_version", "has no schema revision, this Rookery migrates revision 0001 and later"),
        ("UPDATE alembic_version SET version_num = '0000'", f"has schema revision 0000, .* up to {HEAD}"),
        ("UPDATE alembic_version SET version_num = '9999'", f"has schema revision 9999, .* up to {HEAD}"),
    ],
)
def test_a_database_of_another_version_is_refused_and_not_changed(old_url: str, change: str, message: str) -> None:
    with connected(old_url) as connection:
        connection.execute(text(change))
        tables = inspect(connection).get_table_names()
    with pytest.raises(UserError, match=message) as refused, opened(old_url):
        pass
    assert "\n" not in str(refused.value)
    with connected(old_url) as connection:
        assert inspect(connection).get_table_names() == tables


@pytest.mark.parametrize("made", ["CREATE TABLE jobs (id INT)", "CREATE TABLE meta (version INT)"])
def test_tables_of_another_program_are_named_and_not_changed(tmp_path: Path, made: str) -> None:
    database = Database(f"sqlite:///{tmp_path}/x.db")
    with database.writing() as connection:
        connection.execute(text(made))
    assert database.owner().identity is None
    with pytest.raises(UserError, match=r"tables of another program|no schema revision"):
        database.create()
    with database.reading() as connection:
        assert len(inspect(connection).get_table_names()) == 1
    database.close()
