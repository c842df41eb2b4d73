"""A stored version as workers are told of it."""

from __future__ import annotations

from rookery import protocol
from rookery.storage.models import CheckpointRow, PolicyRow, VersionRow


def adapter_ref(policy: PolicyRow, row: VersionRow | CheckpointRow) -> protocol.AdapterRef:
    """``row`` is of ``policy``, whose rank and alpha all of its versions share."""
    return protocol.AdapterRef(
        policy=policy.id, version=row.version, hash=row.hash, rank=policy.rank, alpha=policy.alpha
    )
