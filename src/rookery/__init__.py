"""Rookery: many LoRA policies learn by reinforcement at once, on one resident base model.

Importing this is cheap: each name is loaded from its room when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rookery.client import Client as Client
    from rookery.client import Job as Job
    from rookery.client import JobTimeout as JobTimeout
    from rookery.client import Record as Record
    from rookery.client import RequestRefused as RequestRefused
    from rookery.environments.agent import LLM as LLM
    from rookery.environments.agent import Agent as Agent
    from rookery.environments.agent import Outcome as Outcome
    from rookery.environments.base import Environment as Environment
    from rookery.environments.base import Reply as Reply
    from rookery.environments.base import Step as Step
    from rookery.errors import RookeryError as RookeryError
    from rookery.protocol import BestConstant as BestConstant
    from rookery.settings import Settings as Settings
    from rookery.spec.job import JobSpec as JobSpec

_NAMES = {
    "client": ("Client", "Job", "JobTimeout", "Record", "RequestRefused"),
    "environments.agent": ("LLM", "Agent", "Outcome"),
    "environments.base": ("Environment", "Reply", "Step"),
    "errors": ("RookeryError",),
    "protocol": ("BestConstant",),
    "settings": ("Settings",),
    "spec.job": ("JobSpec",),
}
_ROOMS = {name: f"rookery.{room}" for room, names in _NAMES.items() for name in names}

__all__ = sorted(_ROOMS)


def __getattr__(name: str) -> Any:
    room = _ROOMS.get(name)
    if room is None:
        raise AttributeError(f"module 'rookery' has no attribute {name!r}")
    return getattr(importlib.import_module(room), name)


def __dir__() -> list[str]:
    return __all__
