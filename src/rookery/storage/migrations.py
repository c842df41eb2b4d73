"""Versions of the database's schema and the way from one to the next.

* A new database gets the tables of :mod:`rookery.storage.models` and is marked with the newest revision. An older one
  is migrated. One of a newer Rookery is left as it is.
* The first revision starts from the schema that was marked ``schema = 3`` in the table ``meta``.
* A change of the models needs one more function in :data:`REVISIONS`, which changes the tables with Alembic's
  operations. A test compares a migrated database with the models.

Alembic is imported only where there is something to migrate.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy import Connection, inspect, select, text

from rookery.storage.columns import add
from rookery.storage.models import Base, Fact

if TYPE_CHECKING:
    from alembic.operations import Operations

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
    new = found is None and "meta" not in inspect(connection).get_table_names()
    if found is None and not new:
        schema = connection.execute(select(Fact.value).filter_by(name="schema")).scalar()
        if schema != BASELINE_SCHEMA:
            return (
                f"has schema {schema}, this Rookery migrates schema {BASELINE_SCHEMA} and later;"
                " use the version that wrote it, or another data folder"
            )
    elif found is not None and found not in REVISIONS:
        return (
            f"has schema revision {found}, this Rookery knows revisions up to {HEAD};"
            " use the version that wrote it, or another data folder"
        )
    if found is None:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
        connection.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": HEAD})
    if new:
        Base.metadata.create_all(connection)
        add(connection, Fact(name="schema", value=SCHEMA))
        return ""

    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext

    operations = Operations(MigrationContext.configure(connection))
    for name, change in REVISIONS.items():
        if found is None or name > found:
            change(operations)
    connection.execute(text("UPDATE alembic_version SET version_num = :head"), {"head": HEAD})
    return ""


# --- the revisions ----------------------------------------------------------------------------------------------------

EARLIER = "earlier_steps"
"""The key under which a version's metrics had the rows of the steps before its last."""

COUNTERS = {
    "groups_no_variance": "zero_variance_groups",
    "groups_no_variance_share": "zero_variance_share",
    "splits": "trajectory_splits",
}


def _steps_and_usage(op: Operations) -> None:
    """Metrics of steps in a separate table; usage in seconds and price units; names of counters.

    * ``steps`` gets the metrics that the versions carried, of the head and its ancestors; a version keeps its best
      reward.
    * ``bills`` becomes ``usage``: nanoseconds and billionths of the price unit become seconds and price units.
    * Counters get their new names.
    """
    op.create_table(
        "steps",
        sa.Column("job", sa.Text, sa.ForeignKey("jobs.id"), primary_key=True),
        sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("reward", sa.Double),
        sa.Column("metrics", sa.Text, nullable=False),
    )
    op.add_column("versions", sa.Column("reward", sa.Double))
    _move_metrics(op.get_bind())
    op.drop_column("versions", "metrics")
    op.rename_table("bills", "usage")
    _convert_usage(op.get_bind())
    _rename_counters(op.get_bind())
    op.execute("UPDATE meta SET value = 'migrations' WHERE name = 'schema'")


def _job_starts(op: Operations) -> None:
    """Starts of a job and whether it resumes by itself; the limit of a tenant's running jobs."""
    op.add_column("jobs", sa.Column("starts", sa.Integer, nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("resumes", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("tenants", sa.Column("jobs_limit", sa.BigInteger))


def _tenant_limits(op: Operations) -> None:
    """All limits of a tenant in one column."""
    op.add_column("tenants", sa.Column("limits", sa.Text, nullable=False, server_default="{}"))
    connection = op.get_bind()
    limited = text("SELECT id, jobs_limit FROM tenants WHERE jobs_limit IS NOT NULL")
    for tenant, jobs in connection.execute(limited).all():
        change = text("UPDATE tenants SET limits = :limits WHERE id = :tenant")
        connection.execute(change, {"limits": json.dumps({"jobs": jobs}), "tenant": tenant})
    op.drop_column("tenants", "jobs_limit")


def _key_roles(op: Operations) -> None:
    """The role of an API key, and when it expires."""
    op.add_column("keys", sa.Column("role", sa.Text, nullable=False, server_default="tenant"))
    op.add_column("keys", sa.Column("expires", sa.Double))
    op.execute("UPDATE keys SET role = 'admin' WHERE tenant IN (SELECT id FROM tenants WHERE admin)")


def _samplers_without_clones(op: Operations) -> None:
    """Samplers without their number of clones, which nothing read."""
    op.drop_column("samplers", "clones")


def _deleted_tenants(op: Operations) -> None:
    """When a tenant was deleted."""
    op.add_column("tenants", sa.Column("deleted", sa.Double))


def _job_crashes(op: Operations) -> None:
    """Crashes that a job caused in place of its starts before any crash."""
    op.execute("ALTER TABLE jobs RENAME COLUMN starts TO crashes")
    op.execute("UPDATE jobs SET crashes = 0")


def _trainer_logprobs(op: Operations) -> None:
    """The trainer's log-probabilities of an episode's tokens."""
    empty = "''::bytea" if op.get_bind().dialect.name == "postgresql" else "x''"
    column = sa.Column("train_logprobs", sa.LargeBinary, nullable=False, server_default=sa.text(empty))
    op.add_column("episodes", column)


def _several_policies(op: Operations) -> None:
    """Uses of a group by policy, versions of an episode by policy, the policy of a step."""
    op.add_column("groups", sa.Column("uses", sa.Text, nullable=False, server_default="{}"))
    op.add_column("episodes", sa.Column("versions", sa.Text, nullable=False, server_default="{}"))
    op.add_column("steps", sa.Column("policy", sa.Text, nullable=False, server_default=""))


def _lists_by_time(op: Operations) -> None:
    """Indexes in the order of the lists that are read by the page."""
    for name, columns in LISTS.items():
        op.create_index(f"{name}_by_time", name, ["tenant", "created", *columns])


LISTS = {
    "jobs": ["id"],
    "uploads": ["hash", "kind"],
    "sessions": ["id"],
    "models": ["id"],
    "checkpoints": ["model", "kind", "name"],
}


REVISIONS = {
    "0002": _steps_and_usage,
    "0003": _job_starts,
    "0004": _tenant_limits,
    "0005": _key_roles,
    "0006": _samplers_without_clones,
    "0007": _deleted_tenants,
    "0008": _job_crashes,
    "0009": _trainer_logprobs,
    "0010": _several_policies,
    "0011": _lists_by_time,
}
"""The change that leads to each revision, in order."""

HEAD = max(REVISIONS)
"""The newest revision."""

# --- the data of revision 0002 ----------------------------------------------------------------------------------------

_INSERT_STEP = (
    "INSERT INTO steps (job, step, tenant, version, reward, metrics)"
    " VALUES (:job, :step, :tenant, :version, :reward, :metrics)"
)


def _move_metrics(connection: Connection) -> None:
    policies = "SELECT id, tenant, job, head_version FROM policies WHERE job IS NOT NULL ORDER BY name"
    for policy, tenant, job, head in connection.execute(text(policies)).all():
        query = text("SELECT version, parent, metrics FROM versions WHERE policy = :policy")
        parents, steps = {}, {}
        for version, parent, content in connection.execute(query, {"policy": policy}).all():
            metrics = _renamed(json.loads(content))
            parents[version] = parent
            steps[version] = [*map(_renamed, metrics.pop(EARLIER, [])), metrics] if metrics else []
            rewards = [row["reward"] for row in steps[version] if "reward" in row]
            change = text("UPDATE versions SET reward = :reward WHERE policy = :policy AND version = :version")
            connection.execute(change, {"reward": max(rewards, default=None), "policy": policy, "version": version})
        while head is not None:
            for row in steps[head]:
                values = {"job": job, "step": row["step"], "tenant": tenant, "version": head}
                values |= {"reward": row.get("reward"), "metrics": json.dumps(row)}
                connection.execute(text(_INSERT_STEP), values)
            head = parents[head]


def _convert_usage(connection: Connection) -> None:
    for tenant, job, used in connection.execute(text('SELECT tenant, job, used FROM "usage"')).all():
        new = {kind: _record(record) for kind, record in json.loads(used).items()}
        change = text('UPDATE "usage" SET used = :used WHERE tenant = :tenant AND job = :job')
        connection.execute(change, {"used": json.dumps(new), "tenant": tenant, "job": job})
    found = connection.execute(text("SELECT value FROM meta WHERE name = 'fleet'")).scalar()
    if found is not None:
        fleet = {
            model: {kind: _scaled(paid) | {"used": _record(paid.get("used", {}))} for kind, paid in kinds.items()}
            for model, kinds in json.loads(found).items()
        }
        connection.execute(text("UPDATE meta SET value = :fleet WHERE name = 'fleet'"), {"fleet": json.dumps(fleet)})


def _record(old: dict[str, Any]) -> dict[str, Any]:
    return {sort: _scaled(work) | {"tokens": work.get("tokens", 0)} for sort, work in old.items()}


def _scaled(old: dict[str, int]) -> dict[str, float]:
    names = {"time": "seconds", "money": "cost", "idle": "idle"}
    return {names[name]: value / 1e9 for name, value in old.items() if name in names}


def _rename_counters(connection: Connection) -> None:
    for id, counters in connection.execute(text("SELECT id, counters FROM jobs")).all():
        change = text("UPDATE jobs SET counters = :counters WHERE id = :id")
        connection.execute(change, {"counters": json.dumps(_renamed(json.loads(counters))), "id": id})


def _renamed(counters: dict[str, Any]) -> dict[str, Any]:
    return {COUNTERS.get(name, name): value for name, value in counters.items()}
