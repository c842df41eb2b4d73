"""Versions of the database's schema and the way from one to the next, with Alembic.

* A new database gets the tables of :mod:`rookery.storage.models` and is marked with the newest revision. An older one
  is migrated. One of a newer Rookery is left as it is.
* The first revision starts from the schema that was marked ``schema = 3`` in the table ``meta``.
* A change of the models needs a revision in ``versions/`` and a new :data:`HEAD`. A test compares a migrated database
  with the models.

Alembic is imported only where there is something to migrate.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, select, text

from rookery.storage.columns import add
from rookery.storage.models import Base, Fact

HEAD = "0006"
"""The newest revision."""

BASELINE_SCHEMA = "3"
"""The fact ``schema`` in a database that has no revision yet."""

SCHEMA = "migrations"
"""The fact ``schema`` of later ones: versions of Rookery that do not know revisions refuse it."""


def revision(connection: Connection) -> str | None:
    """The revision of the database's schema; None before the first one."""
    if "alembic_version" not in inspect(connection).get_table_names():
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def upgrade(connection: Connection) -> str:
    """Bring the schema to :data:`HEAD`, within the caller's transaction. Returns an empty text, or why that is not
    possible; then nothing was changed."""
    found = revision(connection)
    if found == HEAD:
        return ""
    if found is None and "meta" in inspect(connection).get_table_names():
        schema = connection.execute(select(Fact.value).filter_by(name="schema")).scalar()
        if schema != BASELINE_SCHEMA:
            return (
                f"has schema {schema}, this Rookery migrates schema {BASELINE_SCHEMA} and later;"
                " use the version that wrote it, or another data folder"
            )
    elif found is None:
        Base.metadata.create_all(connection)
        add(connection, Fact(name="schema", value=SCHEMA))
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
        connection.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": HEAD})
        return ""

    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found is not None and found not in known:
        return (
            f"has schema revision {found}, this Rookery knows revisions up to {HEAD};"
            " use the version that wrote it, or another data folder"
        )
    command.upgrade(config, HEAD)
    return ""
