"""Alembic's entry point: runs the migrations on the connection that :func:`rookery.storage.migrations.upgrade` gives."""

from alembic import context

from rookery.storage.models import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
with context.begin_transaction():
    context.run_migrations()
