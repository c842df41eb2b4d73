"""Environments that come with the service, by the ``id`` that a job gives; hosts offer them as ``builtin:<id>``.

Options are checked before anything is built: every mistake is named by its path, with what was given and what is
allowed.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rookery.environments.base import Environment
from rookery.environments.calculator import Calculator, CalculatorOptions
from rookery.environments.jsonl import Jsonl, JsonlOptions
from rookery.environments.reasoning_gym import ReasoningGym, ReasoningGymOptions, require_library
from rookery.environments.verifiers.verifiers import VERIFIERS
from rookery.errors import UserError, short
from rookery.spec.parsing import problem_line


@dataclass(frozen=True)
class Builtin:
    """An environment class whose constructor takes its validated options."""

    environment: type[Environment]
    options: type[BaseModel]
    require: Callable[[], None] | None = None
    """For one whose constructor runs another library, which may take minutes and gigabytes: raises :class:`UserError`
    where that is not installed. Such an environment is made in a host alone."""

    def check(self, options: Mapping[str, Any]) -> BaseModel:
        """The options, validated and with defaults. Raises :class:`UserError` naming every mistake."""
        try:
            return self.options.model_validate(dict(options))
        except ValidationError as error:
            raise UserError("; ".join(_problem(detail, self.options) for detail in error.errors())) from None

    def vet(self, options: Mapping[str, Any]) -> None:
        """All that can be said of the options in the service's own process, where no library's environment is made:
        what only making one would tell, the host tells. Raises :class:`UserError`; reads files that options name."""
        if self.require is None:
            self(options)  # checks rows, and runs nothing
        else:
            self.check(options)
            self.require()

    def __call__(self, options: Mapping[str, Any]) -> Environment:
        """The environment from which episodes are made. Raises :class:`UserError`; reads files that options name."""
        build: Any = self.environment
        return build(self.check(options))


BUILTINS: dict[str, Builtin] = {
    "jsonl": Builtin(Jsonl, JsonlOptions),
    "calculator": Builtin(Calculator, CalculatorOptions),
    "reasoning-gym": Builtin(ReasoningGym, ReasoningGymOptions, require_library),
}


def find(id: str) -> Builtin:
    """Raises :class:`UserError` for an id that there is not."""
    if id in BUILTINS:
        return BUILTINS[id]
    near = difflib.get_close_matches(id, BUILTINS, 1)
    hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(BUILTINS)}"
    raise UserError(f"environment.id: given {json.dumps(id)}; {hint}")


def _problem(error: ErrorDetails, model: type[BaseModel]) -> str:
    where = list(error["loc"])
    if where[:1] == ["verifier"] and len(where) > 1:
        model = VERIFIERS[str(where.pop(1))]  # pydantic names the chosen alternative; the job's path does not have it
    path = ".".join(["environment", *map(str, where)])
    if error["type"].startswith("union_tag"):
        given = short(json.dumps(error["input"].get("name"), default=str, ensure_ascii=False))
        return f"{path}.name: given {given}, allowed: one of {', '.join(VERIFIERS)}"
    known = list(model.model_fields) if len(where) < 2 or where[0] == "verifier" else []
    return problem_line(error, path, known)
