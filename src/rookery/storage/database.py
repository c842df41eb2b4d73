"""The database: everything that must survive, behind one class.

* Methods that answer a tenant's question take ``tenant`` first and see only that tenant's rows: what belongs to
  another answers :class:`~rookery.errors.NotFound`, or an empty list, as if it were not there.
* Methods without it are the controller's own work on ids that it got from such a question or from
  :meth:`all_unfinished_jobs`; rows they make inherit the owner of what they belong to.
* Each method is one transaction. All block, none keeps state between calls, and any thread may call them.
"""

from __future__ import annotations

from rookery.storage.bills import Bills
from rookery.storage.futures import Futures
from rookery.storage.groups import Groups
from rookery.storage.jobs import Jobs
from rookery.storage.sessions import Sessions
from rookery.storage.tenants import Tenants
from rookery.storage.versions import Versions


class Database(Tenants, Jobs, Groups, Versions, Sessions, Futures, Bills):
    """SQLite or PostgreSQL, by URL. Call :meth:`create` before anything else and :meth:`close` at the end."""
