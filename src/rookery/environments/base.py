"""What a user writes to say a task: a class with ``prompts``, ``reset`` and ``step``.

Promises to such a class:

* One object serves one episode: the host makes it with :meth:`Environment.for_episode`, sets ``prompt`` and ``seed``,
  calls ``reset`` once, then ``step`` once per reply until a step is done, then ``close``. Calls never overlap.
* ``reset`` and ``step`` may be plain or ``async``. Plain ones run in a thread of their own, so they may block.
* It runs in an environment host, never in the service. What it raises ends that episode and nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, str]
"""A chat message: ``{"role": "user", "content": "…"}``."""

Split = Literal["train", "eval"]


@dataclass(frozen=True)
class Reply:
    """What the policy said in one turn."""

    text: str
    """Without special tokens."""
    tokens: list[int]
    """As sampled, the token that ended the reply included."""
    messages: list[Message]
    """The whole conversation so far, this reply last."""
    turn: int
    """0 for the first reply of the episode."""


@dataclass
class Step:
    """What follows from a reply."""

    messages: Sequence[Message] = ()
    """What the policy reads next; ignored when ``done``."""
    reward: float = 0.0
    """Added to the episode's reward, which is the sum over its steps."""
    done: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    """Figures to average over episodes and show; the last step's win where names repeat."""


class Environment:
    """Base class of tasks. Subclasses define ``prompts``, ``reset`` and ``step``."""

    deterministic: bool = False
    """True promises that the same prompt, seed and replies always give the same messages and rewards. Episodes whose
    host was lost are then replayed in another; otherwise they fail and are replaced."""

    prompt: Any = None
    """This episode's prompt, as JSON gives it back (a tuple has become a list)."""
    seed: int = 0
    """This episode's seed."""

    def prompts(self, split: Split) -> Iterable[Any]:
        """The prompts of ``train`` or ``eval``: anything JSON, finite or endless, in the same order at every call."""
        raise NotImplementedError(f"{type(self).__name__} does not define prompts(split)")

    def reset(self, prompt: Any, seed: int) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Begins the episode: the first messages. May be ``async``."""
        raise NotImplementedError(f"{type(self).__name__} does not define reset(prompt, seed)")

    def step(self, reply: Reply) -> Step | Awaitable[Step]:
        """Answers a reply. May be ``async``."""
        raise NotImplementedError(f"{type(self).__name__} does not define step(reply)")

    def close(self) -> Awaitable[None] | None:
        """Called once when the episode is over, however it ended, if it began. May be ``async``."""

    def for_episode(self) -> Environment:
        """A fresh object for one episode, called on the object that was handed over. A deep copy, so that episodes
        share nothing by accident; override it where the object holds what cannot or need not be copied."""
        try:
            return copy.deepcopy(self)
        except (TypeError, copy.Error) as error:
            raise TypeError(f"{type(self).__name__} cannot be copied ({error}); define for_episode(self)") from None
