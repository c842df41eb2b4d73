"""Versions of the database's schema and the way from one to the next.

* A new database gets the tables of :mod:`rookery.storage.models` and is marked with the newest revision. An older one
  is migrated. One of a newer Rookery is left as it is.
* The initial revision is the schema of the data folder that ``tests/storage/test_migrations.py`` opens.
* A change of the models needs one more function in :data:`REVISIONS`, which changes the tables with Alembic's
  operations. A test compares a migrated database with the models.

* The database counts the bytes of each tenant's rows itself, by triggers: no change of a row can pass them by.

Alembic is imported only where there is something to migrate.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Text,
    bindparam,
    column,
    func,
    inspect,
    select,
    table,
    text,
    true,
    update,
)

from rookery.storage.models import Base, MetaRow
from rookery.storage.repositories.tenants import ROW_BYTES

if TYPE_CHECKING:
    from alembic.operations import Operations

INITIAL = "0001"
"""The first revision. A database from before it has no revision, and is refused."""


COUNTED: Mapping[str, tuple[str, ...]] = {
    "episodes": ("turns", "trajectories", "train_logprobs", "metrics", "error"),
    "groups": ("prompt", "reason"),
    "evaluations": ("results",),
    "steps": ("metrics",),
    "events": ("text",),
    "futures": ("call", "outcome"),
}
"""The tables whose rows count in ``tenants.stored``, each as :data:`~rookery.storage.repositories.tenants.ROW_BYTES`
and the lengths of these columns; an episode once it has ended."""

_EVENTS = ("insert", "update", "delete")


def start_counting(connection: Connection) -> None:
    """Count what is stored, and from now on each change."""
    connection.exec_driver_sql("UPDATE tenants SET stored = 0")
    create = _trigger_of_postgresql if connection.dialect.name == "postgresql" else _trigger_of_sqlite
    for name in COUNTED:
        found = connection.exec_driver_sql(f'SELECT tenant, sum({_size(name)}) FROM "{name}" GROUP BY tenant').all()
        for tenant, total in found:
            values = {"total": int(total), "tenant": tenant}
            connection.execute(text("UPDATE tenants SET stored = stored + :total WHERE id = :tenant"), values)
        for event in _EVENTS:
            for statement in create(name, event):
                connection.exec_driver_sql(statement)


def stop_counting(connection: Connection) -> None:
    """No change is counted until :func:`start_counting`."""
    postgresql = connection.dialect.name == "postgresql"
    for name in COUNTED:
        for event in _EVENTS:
            trigger = f"count_{name}_{event}"
            of = f' ON "{name}"' if postgresql else ""
            connection.exec_driver_sql(f"DROP TRIGGER {trigger}{of}")
            if postgresql:
                connection.exec_driver_sql(f"DROP FUNCTION {trigger}()")


def _size(name: str, row: str = "") -> str:
    """The bytes of a row, in SQL. Texts are counted in characters, of which most are of ASCII."""
    size = " + ".join([str(ROW_BYTES), *(f"coalesce(length({row}{part}), 0)" for part in COUNTED[name])])
    return f"CASE WHEN {row}finished IS NULL THEN 0 ELSE {size} END" if name == "episodes" else f"({size})"


def _trigger_of_sqlite(name: str, event: str) -> list[str]:
    new, old = _size(name, "NEW."), _size(name, "OLD.")
    change = {"insert": new, "update": f"{new} - {old}", "delete": f"-{old}"}[event]
    row = "OLD" if event == "delete" else "NEW"
    return [
        f'CREATE TRIGGER count_{name}_{event} AFTER {event} ON "{name}" WHEN {change} <> 0 BEGIN'
        f" UPDATE tenants SET stored = stored + {change} WHERE id = {row}.tenant; END"
    ]


def _trigger_of_postgresql(name: str, event: str) -> list[str]:
    """Changes and deletions of many rows change the tenant's row once for each statement: each change of a row in one
    transaction makes the next one slower."""
    trigger, new = f"count_{name}_{event}", _size(name, "NEW.")
    if event == "insert":
        change = f"UPDATE tenants SET stored = stored + {new} WHERE id = NEW.tenant"
        when = f"FOR EACH ROW WHEN ({new} <> 0)"
    else:
        rows = f"SELECT tenant, -{_size(name)} AS change FROM old_rows"
        when = "REFERENCING OLD TABLE AS old_rows"
        if event == "update":
            rows += f" UNION ALL SELECT tenant, {_size(name)} FROM new_rows"
            when += " NEW TABLE AS new_rows"
        total = f"SELECT tenant, CAST(sum(change) AS bigint) AS total FROM ({rows}) AS changes GROUP BY tenant"
        change = (
            f"UPDATE tenants SET stored = stored + total FROM ({total}) AS found WHERE id = found.tenant AND total <> 0"
        )
        when += " FOR EACH STATEMENT"
    return [
        f"CREATE FUNCTION {trigger}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {change}; RETURN NULL; END $$",
        f'CREATE TRIGGER {trigger} AFTER {event} ON "{name}" {when} EXECUTE FUNCTION {trigger}()',
    ]


def _starts_sizes_and_kept_answers(op: Operations) -> None:
    op.add_column("policies", Column("warm_start", Text))
    op.add_column("versions", Column("size", BigInteger, nullable=False, server_default="0"))
    versions, connection = table("versions", column("hash"), column("manifest"), column("size")), op.get_bind()
    manifests = select(versions.c.hash, func.max(versions.c.manifest)).group_by(versions.c.hash)
    for hash, manifest in connection.execute(manifests).all():
        size = sum(shard["size"] for shard in json.loads(manifest)["shards"])
        connection.execute(update(versions).where(versions.c.hash == hash).values(size=size))
    op.create_index("versions_by_step", "versions", ["policy", "step"])
    op.create_index("versions_kept", "versions", ["tenant", "kept", "policy", "version"])
    op.create_index("steps_by_version", "steps", ["job", "version"])
    op.add_column("evaluations", Column("kept", Boolean, nullable=False, server_default=true()))
    op.create_index("evaluations_by_job", "evaluations", ["job", "policy", "version"])
    op.create_index("evaluations_by_time", "evaluations", ["job", "created"])


def _groups_without_split(op: Operations) -> None:
    """They are all of the training prompts."""
    run = op.get_bind().exec_driver_sql
    if op.get_context().dialect.name == "postgresql":
        run("ALTER TABLE groups DROP COLUMN split")  # and the constraint with it
        run("ALTER TABLE groups ADD UNIQUE (job, ordinal)")
        return
    # SQLite drops no column of a constraint. Rows of the new table end the violations that the old one's drop caused.
    run("PRAGMA defer_foreign_keys=ON")
    found = run("SELECT sql FROM sqlite_master WHERE tbl_name = 'groups' AND sql IS NOT NULL ORDER BY type DESC")
    made, *indexes = found.scalars().all()
    run("CREATE TABLE old_groups AS SELECT * FROM groups")
    run("DROP TABLE groups")
    run(made.replace("split TEXT NOT NULL,", "").replace("UNIQUE (job, split, ordinal)", "UNIQUE (job, ordinal)"))
    columns = ", ".join(run("SELECT name FROM pragma_table_info('groups')").scalars())
    run(f"INSERT INTO groups ({columns}) SELECT {columns} FROM old_groups")
    run("DROP TABLE old_groups")
    for index in indexes:
        run(index)


def _revision_0002(op: Operations) -> None:
    _starts_sizes_and_kept_answers(op)
    _groups_without_split(op)
    op.add_column("tenants", Column("stored", BigInteger, nullable=False, server_default="0"))
    start_counting(op.get_bind())


def _revision_0003(op: Operations) -> None:
    ended = "job IN (SELECT id FROM jobs WHERE finished IS NOT NULL)"
    op.execute(f"UPDATE policies SET warm_start = NULL WHERE head_version IS NOT NULL OR {ended}")
    op.create_index("policies_by_start", "policies", ["warm_start"])
    for name in ("versions", "samplers"):
        op.drop_index(f"{name}_by_hash", name)
        op.create_index(f"{name}_by_hash", name, ["hash", "kept"])


def _revision_0004(op: Operations) -> None:
    op.add_column("jobs", Column("number", BigInteger, nullable=False, server_default="0"))
    jobs, connection = table("jobs", column("id"), column("created"), column("number")), op.get_bind()
    oldest_first = connection.execute(select(jobs.c.id).order_by(jobs.c.created, jobs.c.id)).scalars().all()
    for number, id in enumerate(oldest_first, 1):
        connection.execute(update(jobs).where(jobs.c.id == id).values(number=number))
    op.create_index("jobs_by_number", "jobs", ["number"])
    op.create_index("jobs_of_tenant", "jobs", ["tenant", "number"])
    op.drop_index("evaluations_by_time", "evaluations")


def _revision_0005(op: Operations) -> None:
    op.add_column("steps", Column("time", Double, nullable=False, server_default="0"))
    steps = table("steps", column("job"), column("step"), column("metrics"), column("time"))
    connection, jobs = op.get_bind(), table("jobs", column("id"))
    filled = update(steps).where(steps.c.job == bindparam("of"), steps.c.step == bindparam("at"))
    filled = filled.values(time=bindparam("seconds"))
    for job in connection.execute(select(jobs.c.id)).scalars().all():
        found = connection.execute(select(steps.c.step, steps.c.metrics).where(steps.c.job == job)).all()
        times = ((step, json.loads(metrics).get("time", 0.0)) for step, metrics in found)
        values = [{"of": job, "at": step, "seconds": seconds} for step, seconds in times]
        if values:
            connection.execute(filled, values)
    op.create_index("steps_by_time", "steps", ["job", "time", "step"])


def _revision_0006(op: Operations) -> None:
    op.add_column("jobs", Column("request_hash", Text, nullable=False, server_default=""))


REVISIONS: dict[str, Callable[[Operations], None]] = {
    "0002": _revision_0002,
    "0003": _revision_0003,
    "0004": _revision_0004,
    "0005": _revision_0005,
    "0006": _revision_0006,
}
"""The change that leads to each later revision, in order."""

HEAD = max(REVISIONS, default=INITIAL)
"""The newest revision."""


def revision(connection: Connection) -> str | None:
    """The revision of the database's schema; None for a database without one."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def upgrade(connection: Connection, revisions: Mapping[str, Callable[[Operations], None]] = REVISIONS) -> str:
    """Bring the schema to the newest of ``revisions``, within the caller's transaction. Returns an empty text, or why
    that is not possible; then nothing was changed."""
    head = max(revisions, default=INITIAL)
    found = revision(connection)
    if found == head:
        return ""
    if found is None:
        if inspect(connection).has_table(MetaRow.__tablename__):
            return (
                f"has no schema revision, this Rookery migrates revision {INITIAL} and later; use another data folder"
            )
        if foreign := sorted({*inspect(connection).get_table_names()} & {*Base.metadata.tables}):
            return f"has tables of another program ({', '.join(foreign)}); give Rookery a database of its own"
        Base.metadata.create_all(connection, checkfirst=False)  # none of them is there
        start_counting(connection)
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
        connection.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": head})
        return ""
    if found not in (INITIAL, *revisions):
        return (
            f"has schema revision {found}, this Rookery knows revisions up to {head};"
            " use the version that wrote it, or another data folder"
        )

    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext

    operations = Operations(MigrationContext.configure(connection))
    for name, change in revisions.items():
        if name > found:
            change(operations)
    connection.execute(text("UPDATE alembic_version SET version_num = :head"), {"head": head})
    return ""
