"""What was used and what it cost, as :mod:`rookery.controller.usage` counts it.

A tenant has a bill of its own (``job`` empty), which holds everything it used, and one for each of its jobs. What is
nobody's (the fleet's idle time) is one fact of the whole database, beside the schema's version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import delete, insert, select

from rookery.storage import models
from rookery.storage.db import Store

_FLEET = "fleet"
"""Its name among the database's own facts."""

TENANT_TOTAL = ""
"""The job of a tenant's whole bill."""


class Bills(Store):
    def save_bills(self, bills: Mapping[tuple[str, str], Any], fleet: Any) -> None:
        """Each (tenant, job)'s bill is this now, and the fleet's."""
        table, meta = models.bills, models.meta
        with self._writing() as connection:
            for (tenant, job), used in bills.items():
                connection.execute(delete(table).filter_by(tenant=tenant, job=job))
                connection.execute(insert(table).values(tenant=tenant, job=job, used=used))
            connection.execute(delete(meta).where(meta.c.name == _FLEET))
            connection.execute(insert(meta).values(name=_FLEET, value=json.dumps(fleet)))

    def bills(self, tenant: str) -> dict[str, Any]:
        """A tenant's, by job."""
        with self._reading() as connection:
            rows = connection.execute(select(models.bills).filter_by(tenant=tenant)).all()
        return {row.job: row.used for row in rows}

    def bill(self, tenant: str, job: str) -> Any:
        """Empty where nothing was counted yet."""
        with self._reading() as connection:
            used = connection.execute(select(models.bills.c.used).filter_by(tenant=tenant, job=job)).scalar()
        return {} if used is None else used

    def all_whole_bills(self) -> dict[str, Any]:
        """Every tenant's whole bill."""
        with self._reading() as connection:
            rows = connection.execute(select(models.bills).filter_by(job=TENANT_TOTAL)).all()
        return {row.tenant: row.used for row in rows}

    def fleet_bill(self) -> Any:
        """Empty where nothing was counted yet."""
        with self._reading() as connection:
            value = connection.execute(select(models.meta.c.value).where(models.meta.c.name == _FLEET)).scalar()
        return {} if value is None else json.loads(value)
