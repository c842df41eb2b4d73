"""The administrator's rules for environments: one object for every process that makes or checks them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

from rookery.environments.foreign.games import set_games
from rookery.environments.foreign.verifiers import set_verifiers
from rookery.environments.judges import set_judges
from rookery.environments.outbound import set_reachable_hosts
from rookery.environments.sandbox.sandbox import Isolation, set_isolation
from rookery.settings import ServerSettings


@dataclass(frozen=True)
class EnvironmentRules:
    """The settings of the same names."""

    sandbox: Isolation = "bubblewrap"
    reachable_hosts: str = ""
    judges: str = ""
    verifiers: str = ""
    games: str = ""

    @classmethod
    def of(cls, settings: ServerSettings) -> Self:
        """The rules of the service's settings."""
        return cls(settings.sandbox, settings.reachable_hosts, settings.judges, settings.verifiers, settings.games)

    @classmethod
    def from_argument(cls, text: str) -> Self:
        """The rules that :meth:`argument` wrote."""
        return cls(**json.loads(text))

    def argument(self) -> str:
        """The rules as an argument of a process."""
        return json.dumps(asdict(self))

    def apply(self) -> None:
        """Make them those of this process. Called once when it starts."""
        set_isolation(self.sandbox)
        set_reachable_hosts(self.reachable_hosts)
        set_judges(self.judges)
        set_verifiers(self.verifiers)
        set_games(self.games)


NOTHING_NAMED = EnvironmentRules()
"""Where the administrator sets nothing."""
