"""Splits what a test changes into settings and the tuned values that are no settings, by their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rookery.controller.completions import ANSWER_TOKENS
from rookery.controller.job_sinks import SinkRules
from rookery.controller.rollout.rules import RolloutRules
from rookery.controller.sessions.rules import SessionRules
from rookery.server.connections import EdgeRules
from rookery.server.launcher import ServiceRules
from rookery.storage.place import StoreRules


def split(given: Mapping[str, Any]) -> tuple[dict[str, Any], ServiceRules]:
    """Names of :class:`SessionRules` have the prefix ``session_``, those of :class:`SinkRules` ``sink_``,
    those of :class:`StoreRules` ``store_``."""
    rest = dict(given)

    def taken(kind: type[Any], prefix: str = "") -> Any:
        return kind(**{
            field.name: rest.pop(prefix + field.name) for field in fields(kind) if prefix + field.name in rest
        })  # fmt: skip

    rules = ServiceRules(
        edge=taken(EdgeRules),
        rollouts=taken(RolloutRules),
        sessions=taken(SessionRules, "session_"),
        sinks=taken(SinkRules, "sink_"),
        stores=taken(StoreRules, "store_"),
        answer_tokens=rest.pop("answer_tokens", ANSWER_TOKENS),
    )
    return rest, rules
