"""Versions of the database's schema and the way from one to the next.

* A new database gets the tables of :mod:`rookery.storage.models` and is marked with the newest revision. An older one
  is migrated. One of a newer Rookery is left as it is.
* The initial revision is the schema of the data folder that ``tests/storage/test_migrations.py`` opens.
* A change of the models needs one more function in :data:`REVISIONS`, which changes the tables with Alembic's
  operations. A test compares a migrated database with the models.

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
    Text,
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

if TYPE_CHECKING:
    from alembic.operations import Operations

INITIAL = "0001"
"""The first revision. A database from before it has no revision, and is refused."""


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
    op.create_index("evaluations_by_job", "evaluations", ["job", "created"])


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


REVISIONS: dict[str, Callable[[Operations], None]] = {
    "0002": _revision_0002,
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
        Base.metadata.create_all(connection)
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
