"""Splits what a test changes into settings and the tuned values that are no settings, by their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from tests.support.forked import spawn_forked

from rookery.controller.completions import ANSWER_TOKENS
from rookery.controller.job_sinks import SinkRules
from rookery.controller.rollout.rules import RolloutRules
from rookery.controller.sessions.rules import SessionRules
from rookery.environments.checks import EnvironmentChecks
from rookery.environments.rules import EnvironmentRules
from rookery.server.connections import EdgeRules
from rookery.server.launcher import ServiceRules
from rookery.storage.place import StoreRules


class SharedChecks(EnvironmentChecks):
    """The checks of several services, one after another, whose processes stay for the next one."""

    def close(self) -> None:
        """A process without a question ends by itself."""


@cache
def shared_checks(rules: EnvironmentRules) -> SharedChecks:
    """The checks of all services of this program with the same rules."""
    return SharedChecks(rules)


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
        spawn=rest.pop("spawn", spawn_forked),
        checks=shared_checks,
    )
    return rest, rules
