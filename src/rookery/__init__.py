"""Rookery: many LoRA policies learn by reinforcement at once, on one resident base model.

Importing this is cheap: each name is loaded from its room when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rookery.client import Client, Job, JobTimeout, Record, RequestRefused
    from rookery.environments.base import Environment, Reply, Step
    from rookery.errors import RookeryError
    from rookery.settings import Settings
    from rookery.spec.job import JobSpec

_ROOMS = {
    "Client": "rookery.client",
    "Environment": "rookery.environments.base",
    "Job": "rookery.client",
    "JobSpec": "rookery.spec.job",
    "Record": "rookery.client",
    "RequestRefused": "rookery.client",
    "Reply": "rookery.environments.base",
    "RookeryError": "rookery.errors",
    "Settings": "rookery.settings",
    "Step": "rookery.environments.base",
    "JobTimeout": "rookery.client",
}

__all__ = [
    "Client",
    "Environment",
    "Job",
    "JobSpec",
    "JobTimeout",
    "Record",
    "Reply",
    "RequestRefused",
    "RookeryError",
    "Settings",
    "Step",
]


def __getattr__(name: str) -> Any:
    room = _ROOMS.get(name)
    if room is None:
        raise AttributeError(f"module 'rookery' has no attribute {name!r}")
    return getattr(importlib.import_module(room), name)


def __dir__() -> list[str]:
    return sorted(__all__)
