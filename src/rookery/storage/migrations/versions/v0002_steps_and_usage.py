"""Metrics of steps in a table of their own; usage in seconds and price units.

* ``steps`` gets the metrics that the versions carried, of the head and its ancestors; a version keeps its best reward.
* ``bills`` becomes ``usage``: nanoseconds and billionths of the price unit become seconds and price units.
"""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

EARLIER = "earlier_steps"
"""The key under which a version's metrics had the rows of the steps before its last."""


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
    op.execute("UPDATE meta SET value = 'migrations' WHERE name = 'schema'")


def _move_metrics(connection: sa.Connection) -> None:
    policies = "SELECT id, tenant, job, head_version FROM policies WHERE job IS NOT NULL ORDER BY name"
    for policy, tenant, job, head in connection.execute(sa.text(policies)).all():
        found = sa.text("SELECT version, parent, metrics FROM versions WHERE policy = :policy")
        versions = {version: (parent, json.loads(metrics)) for version, parent, metrics in connection.execute(found, {"policy": policy})}
        steps = {version: [*metrics.pop(EARLIER, []), metrics] for version, (_, metrics) in versions.items() if metrics}
        for version, rows in steps.items():
            best = max((row["reward"] for row in rows if "reward" in row), default=None)
            change = sa.text("UPDATE versions SET reward = :best WHERE policy = :policy AND version = :version")
            connection.execute(change, {"best": best, "policy": policy, "version": version})
        while head is not None:
            for row in steps.get(head, []):
                values = {"job": job, "step": row["step"], "tenant": tenant, "version": head, "reward": row.get("reward"), "metrics": json.dumps(row)}
                connection.execute(
                    sa.text(
                        "INSERT INTO steps (job, step, tenant, version, reward, metrics)"
                        " VALUES (:job, :step, :tenant, :version, :reward, :metrics)"
                    ),
                    values,
                )
            head = versions[head][0]


def _convert_usage(connection: sa.Connection) -> None:
    for tenant, job, used in connection.execute(sa.text('SELECT tenant, job, used FROM "usage"')).all():
        new = {kind: _record(record) for kind, record in json.loads(used).items()}
        change = sa.text('UPDATE "usage" SET used = :used WHERE tenant = :tenant AND job = :job')
        connection.execute(change, {"used": json.dumps(new), "tenant": tenant, "job": job})
    fleet = connection.execute(sa.text("SELECT value FROM meta WHERE name = 'fleet'")).scalar()
    if fleet is not None:
        new = {
            model: {
                kind: {
                    "seconds": paid.get("time", 0) / 1e9,
                    "cost": paid.get("money", 0) / 1e9,
                    "idle": paid.get("idle", 0) / 1e9,
                    "used": _record(paid.get("used", {})),
                }
                for kind, paid in kinds.items()
            }
            for model, kinds in json.loads(fleet).items()
        }
        connection.execute(sa.text("UPDATE meta SET value = :fleet WHERE name = 'fleet'"), {"fleet": json.dumps(new)})


def _record(old: dict[str, Any]) -> dict[str, Any]:
    return {
        sort: {"seconds": work.get("time", 0) / 1e9, "cost": work.get("money", 0) / 1e9, "tokens": work.get("tokens", 0)}
        for sort, work in old.items()
    }
