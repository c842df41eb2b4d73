"""Starts of a job and whether it resumes by itself; the limit of a tenant's running jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("starts", sa.Integer, nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("resumes", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("tenants", sa.Column("jobs_limit", sa.BigInteger))
