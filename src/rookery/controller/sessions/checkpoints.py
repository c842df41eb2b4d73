"""Checkpoints that clients named: ``tinker://<run>/<kind>/<name>``."""

from __future__ import annotations

from rookery import protocol
from rookery.controller.context import ControllerContext
from rookery.controller.weights.refs import adapter_ref
from rookery.errors import NotFound, UserError
from rookery.storage.rows import CheckpointRow, ModelRow

SCHEME = "tinker://"


def parse(path: str) -> tuple[str, str, str]:
    """The model, the kind and the name in a path. Raises :class:`UserError`."""
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3 or not all(parts):
        raise UserError(f"{path!r} is no checkpoint; one is {SCHEME}<run>/<weights|sampler_weights>/<name>")
    return parts[0], parts[1], parts[2]


async def checkpoint(world: ControllerContext, tenant: str, path: str) -> CheckpointRow:
    """What ``path`` names. Raises :class:`NotFound` for one that has expired, too."""
    row = await world.store.get_checkpoint(tenant, *parse(path))
    if row.expires is not None and row.expires < world.clock.time():
        raise NotFound(f"{path} has expired")
    return row


async def checkpoint_target(
    world: ControllerContext, tenant: str, path: str
) -> tuple[CheckpointRow, ModelRow, protocol.AdapterRef]:
    """The checkpoint, the model it is of, and its weights as workers are told of them."""
    row = await checkpoint(world, tenant, path)
    model, policy = await world.store.get_model(tenant, row.model)
    return row, model, adapter_ref(policy, row)
