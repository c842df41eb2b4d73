"""Metrics of steps in a separate table; usage in seconds and price units; names of counters.

* ``steps`` gets the metrics that the versions carried, of the head and its ancestors; a version keeps its best reward.
* ``bills`` becomes ``usage``: nanoseconds and billionths of the price unit become seconds and price units.
* Counters get their new names.
"""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = None

EARLIER = "earlier_steps"
"""The key under which a version's metrics had the rows of the steps before its last."""

COUNTERS = {
    "groups_no_variance": "zero_variance_groups",
    "groups_no_variance_share": "zero_variance_share",
    "splits": "trajectory_splits",
}


def upgrade() -> None:
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


_INSERT_STEP = (
    "INSERT INTO steps (job, step, tenant, version, reward, metrics)"
    " VALUES (:job, :step, :tenant, :version, :reward, :metrics)"
)


def _move_metrics(connection: sa.Connection) -> None:
    policies = "SELECT id, tenant, job, head_version FROM policies WHERE job IS NOT NULL ORDER BY name"
    for policy, tenant, job, head in connection.execute(sa.text(policies)).all():
        query = sa.text("SELECT version, parent, metrics FROM versions WHERE policy = :policy")
        parents, steps = {}, {}
        for version, parent, content in connection.execute(query, {"policy": policy}).all():
            metrics = _renamed(json.loads(content))
            parents[version] = parent
            steps[version] = [*map(_renamed, metrics.pop(EARLIER, [])), metrics] if metrics else []
            rewards = [row["reward"] for row in steps[version] if "reward" in row]
            change = sa.text("UPDATE versions SET reward = :reward WHERE policy = :policy AND version = :version")
            connection.execute(change, {"reward": max(rewards, default=None), "policy": policy, "version": version})
        while head is not None:
            for row in steps[head]:
                values = {"job": job, "step": row["step"], "tenant": tenant, "version": head}
                values |= {"reward": row.get("reward"), "metrics": json.dumps(row)}
                connection.execute(sa.text(_INSERT_STEP), values)
            head = parents[head]


def _convert_usage(connection: sa.Connection) -> None:
    for tenant, job, used in connection.execute(sa.text('SELECT tenant, job, used FROM "usage"')).all():
        new = {kind: _record(record) for kind, record in json.loads(used).items()}
        change = sa.text('UPDATE "usage" SET used = :used WHERE tenant = :tenant AND job = :job')
        connection.execute(change, {"used": json.dumps(new), "tenant": tenant, "job": job})
    found = connection.execute(sa.text("SELECT value FROM meta WHERE name = 'fleet'")).scalar()
    if found is not None:
        fleet = {
            model: {kind: _scaled(paid) | {"used": _record(paid.get("used", {}))} for kind, paid in kinds.items()}
            for model, kinds in json.loads(found).items()
        }
        connection.execute(sa.text("UPDATE meta SET value = :fleet WHERE name = 'fleet'"), {"fleet": json.dumps(fleet)})


def _record(old: dict[str, Any]) -> dict[str, Any]:
    return {sort: _scaled(work) | {"tokens": work.get("tokens", 0)} for sort, work in old.items()}


def _scaled(old: dict[str, int]) -> dict[str, float]:
    names = {"time": "seconds", "money": "cost", "idle": "idle"}
    return {names[name]: value / 1e9 for name, value in old.items() if name in names}


def _rename_counters(connection: sa.Connection) -> None:
    for id, counters in connection.execute(sa.text("SELECT id, counters FROM jobs")).all():
        change = sa.text("UPDATE jobs SET counters = :counters WHERE id = :id")
        connection.execute(change, {"counters": json.dumps(_renamed(json.loads(counters))), "id": id})


def _renamed(counters: dict[str, Any]) -> dict[str, Any]:
    return {COUNTERS.get(name, name): value for name, value in counters.items()}
