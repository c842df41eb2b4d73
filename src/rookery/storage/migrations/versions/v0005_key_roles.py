"""The role of an API key, and when it expires."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("keys", sa.Column("role", sa.Text, nullable=False, server_default="tenant"))
    op.add_column("keys", sa.Column("expires", sa.Double))
    op.execute("UPDATE keys SET role = 'admin' WHERE tenant IN (SELECT id FROM tenants WHERE admin)")
