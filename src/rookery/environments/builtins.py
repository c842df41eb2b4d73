"""Built-in environments by their ``id``; hosts offer them as ``builtin:<id>``.

Options are validated before anything is built: each mistake is one line with its path, the given value and what is
allowed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rookery.environments.agent_tasks import AgentTasks, AgentTasksOptions
from rookery.environments.base import Environment, SplitSizes
from rookery.environments.calculator import Calculator, CalculatorOptions
from rookery.environments.checks import EnvironmentChecks
from rookery.environments.demonstrations import (
    Demonstrations,
    DemonstrationsOptions,
    Preferences,
    PreferencesOptions,
)
from rookery.environments.foreign.games import (
    Game,
    GameOptions,
    GymnasiumOptions,
    TextArenaOptions,
    require_games,
)
from rookery.environments.foreign.verifiers import Verifiers, VerifiersOptions, require_verifiers
from rookery.environments.jsonl import Jsonl, JsonlOptions, RowFiles
from rookery.environments.openenv import OpenEnv, OpenEnvOptions
from rookery.environments.reasoning_gym import (
    REPLIES_ARE_CODE,
    ReasoningGym,
    ReasoningGymOptions,
    require_library,
)
from rookery.environments.sandbox.sandbox import find as find_sandbox
from rookery.environments.sandbox.sandbox import isolation
from rookery.environments.tools import TOOLS
from rookery.environments.verifiers.verifiers import VERIFIERS
from rookery.environments.xrouter import XRouter, XRouterOptions
from rookery.errors import UserError, nearest, short
from rookery.spec.parsing import problem_line


@dataclass(frozen=True)
class Builtin:
    """An environment class whose constructor takes its validated options."""

    id: str
    environment: type[Environment]
    options: type[BaseModel]
    require: Callable[[], object] | None = None
    """Set for an environment whose constructor runs another library, which may take minutes and gigabytes: raises
    :class:`UserError` if the library is not installed. Such an environment is built in a host only."""

    def check(self, options: Mapping[str, Any]) -> BaseModel:
        """Validated options with defaults. Raises :class:`UserError` naming every mistake."""
        try:
            return self.options.model_validate(dict(options))
        except ValidationError as error:
            raise UserError("; ".join(_problem(detail, self.options) for detail in error.errors())) from None

    def validate_options(self, options: Mapping[str, Any]) -> SplitSizes | None:
        """Validates the options in the service's process, without building another library's environment: the host
        reports what only building it shows. Returns the sizes of its splits, as far as they are known. Raises
        :class:`UserError`; reads files that options name."""
        if self.require is not None:
            checked = self.check(options)
            self.require()
            if isinstance(checked, VerifiersOptions):
                return None
            if isinstance(checked, GameOptions):
                return checked.sizes()
            assert isinstance(checked, ReasoningGymOptions)
            if checked.task in REPLIES_ARE_CODE:
                find_sandbox(isolation())
            return SplitSizes(checked.size, checked.eval_size, held_out_by="environment.eval_size")
        built = self(options)  # checks rows and runs nothing
        if isinstance(built, RowFiles):
            built.check_answers()
            return built.sizes()
        assert isinstance(built, Calculator | XRouter | OpenEnv)
        return built.sizes()

    def built_in_host(self, options: Mapping[str, Any], checks: EnvironmentChecks) -> Environment:
        """As :meth:`__call__`, but files of rows are read and checked in a confined process. Blocks."""
        if not issubclass(self.environment, RowFiles) or not {"path", "eval_path"} & options.keys():
            return self(options)
        build: Any = self.environment
        return build(self.check(options), checks.index(self.id, options))

    def __call__(self, options: Mapping[str, Any]) -> Environment:
        """The environment that episodes are copied from. Raises :class:`UserError`; reads files that options name."""
        build: Any = self.environment
        return build(self.check(options))


BUILTINS: dict[str, Builtin] = {
    built.id: built
    for built in (
        Builtin("jsonl", Jsonl, JsonlOptions),
        Builtin("agent", AgentTasks, AgentTasksOptions),
        Builtin("calculator", Calculator, CalculatorOptions),
        Builtin("xrouter", XRouter, XRouterOptions),
        Builtin("openenv", OpenEnv, OpenEnvOptions),
        Builtin("verifiers", Verifiers, VerifiersOptions, require_verifiers),
        Builtin("gymnasium", Game, GymnasiumOptions, require_games),
        Builtin("textarena", Game, TextArenaOptions, require_games),
        Builtin("reasoning-gym", ReasoningGym, ReasoningGymOptions, require_library),
        Builtin("demonstrations", Demonstrations, DemonstrationsOptions),
        Builtin("preferences", Preferences, PreferencesOptions),
    )
}


def find(id: str) -> Builtin:
    """The built-in with this id. Raises :class:`UserError` for an unknown id."""
    if id in BUILTINS:
        return BUILTINS[id]
    hint = nearest(id, BUILTINS) or f"allowed: {', '.join(BUILTINS)}"
    raise UserError(f"environment.id: given {short(json.dumps(id))}; {hint}")


def _problem(error: ErrorDetails, model: type[BaseModel]) -> str:
    where = list(error["loc"])
    if where[:1] == ["verifier"] and len(where) > 1:
        model = VERIFIERS[str(where.pop(1))]  # pydantic names the chosen alternative; the job's path does not have it
    if where[:1] == ["tools"] and len(where) > 2:
        where.pop(2)
    path = ".".join(["environment", *map(str, where)])
    if error["type"].startswith("union_tag"):
        field, known = ("tool", TOOLS) if where[:1] == ["tools"] else ("name", VERIFIERS)
        chosen = error["input"].get(field) if isinstance(error["input"], Mapping) else error["input"]
        given = short(json.dumps(chosen, default=str, ensure_ascii=False))
        return f"{path}.{field}: given {given}, allowed: one of {', '.join(known)}"
    fields = list(model.model_fields) if len(where) < 2 or where[0] == "verifier" else []
    return problem_line(error, path, fields)
