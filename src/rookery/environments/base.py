"""The base class of environments: a task is a class with ``prompts``, ``reset`` and ``step``.

Promises to such a class:

* One object serves one episode: the host makes it with :meth:`Environment.for_episode`, sets ``prompt`` and ``seed``,
  calls ``reset`` once, then ``step`` once per reply until a step is done, then ``close``. Calls never overlap.
* ``reset`` and ``step`` may be plain or ``async``. Plain ones run in a separate thread, so they may block.
* It runs in an environment host, never in the service. An exception ends that episode and nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rookery.protocol import BestConstant

Message = dict[str, str]
"""A chat message: ``{"role": "user", "content": "…"}``."""

Split = Literal["train", "eval"]


class MadePrompts(Sequence[Any]):
    """The prompts of a split that are read or drawn one by one, whenever they are asked for: none stays in memory.
    Their number is known, and entry i is the same at every call. They are shuffled as those of a list are."""

    @property
    def nbytes(self) -> int:
        """Memory that they take, of the places of their entries, for example."""
        return 0


@dataclass(frozen=True)
class Reply:
    """One reply of the policy."""

    text: str
    """Without special tokens."""
    tokens: list[int]
    """Token ids as sampled, including the one that ended the reply."""
    messages: list[Message]
    """The whole conversation so far, this reply last."""
    turn: int
    """0 for the first reply of the episode."""
    raw: str = ""
    """The text with its special tokens, but the one that ended the reply, after the mark, such as ``<think>``, with
    which the prompt opens a thought; empty where ``special`` is."""
    special: Sequence[str] = ()
    """The different special tokens in ``raw``, such as ``</think>`` where the tokenizer declares it special; also the
    mark of a thought that the prompt opens."""
    logprobs: Sequence[float] = ()
    """The tokens' log-probabilities, where the policy continued ``Step.tokens``."""
    finish: str = ""
    """Why the reply ended: ``stop`` or ``length``. Of a reply without tokens, of an environment that
    ``scores_when_cut``, why there is none: ``max_turns`` or ``context``."""


@dataclass
class Step:
    """The environment's answer to a reply."""

    messages: Sequence[Message] = ()
    """Messages that the policy reads next; ignored when ``done``."""
    reward: float = 0.0
    """Added to the episode's reward, which is the sum over its steps: a finite number of any type (also of numpy).
    Every policy that replied in the episode gets it."""
    done: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers to average over the episodes that have them, and to show; the last step wins where names repeat. NaN and
    infinities count as absent."""
    policy: str = ""
    """In a job with several policies, the name of the one that replies next; without it, the first of the job."""
    rewards: dict[str, float] = field(default_factory=dict)
    """By policy, numbers that are added to ``reward`` for that policy alone. Each must have a reply in the episode."""
    tokens: Sequence[int] = ()
    """Instead of ``messages``, of an environment that renders conversations itself: the whole token sequence that the
    policy continues. Where an earlier sequence of the episode is its beginning, it is the same trajectory."""


@dataclass(frozen=True)
class SplitSizes:
    """How many prompts the splits of a built-in environment have, as far as its options show it."""

    train: int
    held_out: int
    repeated: int = 0
    """Held-out prompts that are training prompts too."""
    held_out_by: str = ""
    """The options that hold prompts out, with which there would be some."""
    asked: bool = False
    """The options hold prompts out explicitly."""
    forms: list[tuple[list[str], str]] = field(default_factory=list)
    """The different forms of the prompts' messages (:func:`~rookery.environments.messages.form_of`), each with the
    place of its first prompt."""


class Environment:
    """Base class of tasks. Subclasses define ``prompts``, ``reset`` and ``step``."""

    deterministic: bool = False
    """True promises that the same prompt, seed and replies always give the same messages and rewards. Episodes whose
    host was lost are then replayed in another host; otherwise they fail and are replaced."""

    scores_when_cut: bool = False
    """True asks for one more ``step`` where an episode ends before a step is done, because it has had its replies or
    the context has no room for another one. Its reply has no tokens; the reward and the metrics of its ``Step``
    count."""

    prompt: Any = None
    """This episode's prompt, as JSON gives it back (a tuple has become a list)."""
    seed: int = 0
    """This episode's seed."""

    def prompts(self, split: Split) -> Iterable[Any]:
        """The prompts of ``train`` or ``eval``: anything JSON, finite or endless, in the same order at every call."""
        raise NotImplementedError(f"{type(self).__name__} does not define prompts(split)")

    def reset(self, prompt: Any, seed: int) -> Sequence[Message] | Step | Awaitable[Sequence[Message] | Step]:
        """Starts the episode and returns its first messages, or a ``Step`` with them that names the ``policy`` which
        replies first; a reward, metrics or an end are refused there. May be ``async``."""
        raise NotImplementedError(f"{type(self).__name__} does not define reset(prompt, seed)")

    def step(self, reply: Reply) -> Step | Awaitable[Step]:
        """Answers a reply. May be ``async``."""
        raise NotImplementedError(f"{type(self).__name__} does not define step(reply)")

    def best_constant(self, prompts: Sequence[Any]) -> BestConstant | Mapping[str, BestConstant] | None:
        """The fixed reply that earns most on these prompts, None where the environment does not know one. In a job with
        several policies, those of each by its name; one alone is that of the job's first policy."""
        return None

    def close(self) -> Awaitable[None] | None:
        """Called once when an episode that started is over. May be ``async``."""

    def for_episode(self) -> Environment:
        """A new object for one episode: a deep copy, so that episodes share nothing by accident. Override it where the
        object holds something that cannot or need not be copied."""
        try:
            return copy.deepcopy(self)
        except (TypeError, copy.Error) as error:
            raise TypeError(f"{type(self).__name__} cannot be copied ({error}); define for_episode(self)") from None
