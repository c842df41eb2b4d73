"""All limits of a tenant in one column."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("tenants", sa.Column("limits", sa.Text, nullable=False, server_default="{}"))
    connection = op.get_bind()
    limited = sa.text("SELECT id, jobs_limit FROM tenants WHERE jobs_limit IS NOT NULL")
    for tenant, jobs in connection.execute(limited).all():
        change = sa.text("UPDATE tenants SET limits = :limits WHERE id = :tenant")
        connection.execute(change, {"limits": json.dumps({"jobs": jobs}), "tenant": tenant})
    op.drop_column("tenants", "jobs_limit")
