"""Alembic's entry point: runs migrations on the connection of :func:`rookery.storage.migrations.upgrade`."""

from alembic import context

from rookery.storage.models import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
with context.begin_transaction():
    context.run_migrations()
