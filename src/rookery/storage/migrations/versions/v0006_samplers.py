"""Samplers without their number of clones, which nothing read."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.drop_column("samplers", "clones")
