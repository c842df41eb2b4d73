"""The checkpoints of clients by their paths, ``tinker://<run>/<kind>/<name>``."""

from __future__ import annotations

from rookery.controller.services import Services
from rookery.errors import NotFound, UserError
from rookery.storage.models import CheckpointRow, ModelRow, PolicyRow
from rookery.storage.repositories import sessions

SCHEME = "tinker://"


async def find_checkpoint(services: Services, tenant: str, path: str) -> tuple[CheckpointRow, ModelRow, PolicyRow]:
    """The checkpoint ``tinker://<run>/<kind>/<name>``, its training run and policy. Raises :class:`NotFound`, also for
    an expired checkpoint."""
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3 or not all(parts):
        raise UserError(f"{path!r} is no checkpoint; one is {SCHEME}<run>/<weights|sampler_weights>/<name>")
    row = await services.store.read(sessions.get_checkpoint, tenant, *parts)
    if row.expires is not None and row.expires < services.clock.time():
        raise NotFound(f"{path} has expired")
    return row, *await services.store.read(sessions.get_model, tenant, row.model)
