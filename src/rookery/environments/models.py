"""Questions to models while a reply is judged: a base model or policy of the service, or a judge that the administrator
named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rookery.environments.base import Environment


@dataclass(frozen=True)
class ModelQuestion:
    """A conversation that a model continues."""

    model: str
    messages: Sequence[Mapping[str, str]]
    schema: str = ""
    """The JSON schema that the answer follows; empty: any text."""
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class ModelAnswer:
    """The text of an answer, how many tokens were read and written, and why it ended, where that is known."""

    text: str
    prompt_tokens: int = 0
    tokens: int = 0
    finish: str = ""
    """``length`` where the answer was cut."""


Ask = Callable[[ModelQuestion], ModelAnswer]
"""Blocks until the model has answered. Raises :class:`~rookery.errors.UserError` where it does not."""


class AsksModels(Environment):
    """An environment whose rewards may need a model. Its host sets ``ask`` before the episode starts."""

    ask: Ask | None = None
