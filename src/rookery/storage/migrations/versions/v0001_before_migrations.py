"""The schema of databases that were written before there were migrations (``schema = 3`` in the table ``meta``).

It is only ever stamped: a new database gets the tables of the models.
"""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """There is nothing before it."""
