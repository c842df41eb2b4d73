"""Messages between the controller and environment hosts.

A host introduces itself with :class:`HostHello`; :class:`HostWelcome` gives the connection its epoch. The controller
asks for prompts and drives episodes with calls; a host answers each call once and repeats the stored answer when the
same call is sent again.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from rookery.bounds import ENTRIES, MAX_FRAME, MESSAGES, METRICS, Count, ErrorText, Integer, Line, Name, Text, Token
from rookery.protocol.common import EpochMessage, HelloRejected, Message, Struct

MOST_ENVIRONMENTS, ROLE, MOST_POLICIES = 1000, 64, 16
"""Environments of one host; characters of a message's role; policies of a job."""


class HostedEnvironment(Struct, kw_only=True):
    """``name`` is the value of a job's ``environment.hosted``; built-ins are named ``builtin:<id>``."""

    name: Name
    deterministic: bool = False
    agent: bool = False
    """Its episodes are run whole, by an agent that calls its model: :attr:`Reset.agent_key`."""


MOST_EPISODES = 16_384
"""Episodes that a host brings back, each of which the service looks up at once: their names have about 60 bytes, and a
hello a megabyte."""


class HostHello(Message, kw_only=True):
    """First frame of a host. ``instance`` is drawn once per process."""

    protocol: Integer
    instance: Name
    environments: Annotated[list[HostedEnvironment], msgspec.Meta(max_length=MOST_ENVIRONMENTS)]
    episodes: Annotated[list[Name], msgspec.Meta(max_length=MOST_EPISODES)] = msgspec.field(default_factory=list)
    """Episodes still alive in this process from an earlier connection."""


class HostWelcome(Message, kw_only=True):
    """``epoch`` is valid for this connection alone. A larger message than ``max_bytes`` ends it; 0 is the protocol's
    limit."""

    epoch: int
    heartbeat_seconds: float
    max_bytes: int = 0


class HostHeartbeat(EpochMessage, kw_only=True):
    """``active`` counts the episodes in the process."""

    active: Count


class ChatMessage(Struct, kw_only=True):
    """A chat message."""

    role: Annotated[str, msgspec.Meta(max_length=ROLE)]
    content: Text


class EnvironmentCall(Message, kw_only=True):
    """Base class of the calls that build an environment: from ``environment`` and ``options``."""

    call: str
    job: str
    environment: str
    options: dict
    seed: int
    tenant: str = ""
    """The job's, between whom a host shares the processes of environments."""


class GetPrompts(EnvironmentCall, kw_only=True):
    """Asks for the prompts ``start`` … ``start + count - 1`` of a split, in the job's order: finite splits are shuffled
    again for each pass over the data from ``seed`` when ``shuffle``, and start over at their end."""

    split: Literal["train", "eval"]
    start: int
    count: int
    shuffle: bool
    constant: bool = False
    """The answer has, in the place of the prompts, the fixed replies that earn most on them."""


class BestConstant(Struct, kw_only=True):
    """The fixed reply that earns most on some prompts, as far as the environment knows one."""

    reply: Line
    """Shortened."""
    reward: float
    """Its mean reward."""
    prompts: Count
    """The number of prompts."""


class Prompts(EpochMessage, kw_only=True):
    """Answer to :class:`GetPrompts`. ``size`` is the split's length where it is finite, else -1. Fewer prompts than
    asked: only on error or in eval."""

    call: Name
    prompts: Annotated[list[Annotated[bytes, msgspec.Meta(max_length=MAX_FRAME)]], msgspec.Meta(max_length=ENTRIES)] = (
        msgspec.field(default_factory=list)
    )
    """Each the JSON of one prompt."""
    size: Integer = -1
    constants: Annotated[dict[Name, BestConstant], msgspec.Meta(max_length=MOST_POLICIES)] = msgspec.field(
        default_factory=dict
    )
    """By policy, empty for the job's first one, as far as the environment knows them."""
    error: ErrorText = ""
    note: ErrorText = ""
    """A notice about the split for the job's owner, in one line; sent with its first prompts."""


class Reset(EnvironmentCall, kw_only=True):
    """Begins an episode; answers :class:`Observation` of turn 0. An agent's episode runs to its end: the observation is
    ``done`` and has the whole reward."""

    episode: str
    prompt: bytes
    agent_key: str = ""
    """The key with which an agent calls; a repeated call may bring another one, while the first stays valid."""
    policies: list[str] = msgspec.field(default_factory=list)
    """The models that an agent may name, the default one first."""


class StepEpisode(Message, kw_only=True):
    """The policy's reply to turn ``turn``; ``messages`` is the whole conversation so far, the reply last."""

    call: str
    episode: str
    turn: int
    text: str
    tokens: list[int]
    messages: list[ChatMessage]
    raw: str = ""
    """The reply's text with special tokens, without the one that ended it, after the ``<think>`` with which the prompt
    opens a thought; empty where there is none."""
    special: list[str] = msgspec.field(default_factory=list)
    """The different special tokens in ``raw``, and the prompt's ``<think>``."""
    logprobs: list[float] = msgspec.field(default_factory=list)
    """Of the tokens, where the reply continues :attr:`Observation.tokens`."""
    finish: str = ""
    """Why the reply ended; without tokens, why there is none."""


class Observation(EpochMessage, kw_only=True):
    """Result of ``reset`` or ``step``. A raised exception arrives as ``error`` (one line, with its type)."""

    call: Name
    episode: Name
    messages: Annotated[list[ChatMessage], msgspec.Meta(max_length=MESSAGES)] = msgspec.field(default_factory=list)
    reward: float = 0.0
    rewards: Annotated[dict[Name, float], msgspec.Meta(max_length=MOST_POLICIES)] = msgspec.field(default_factory=dict)
    """By policy, in addition to ``reward``, which every policy of the episode gets."""
    policy: Name = ""
    """The policy that replies next; empty: the job's first one."""
    tokens: Annotated[list[Token], msgspec.Meta(max_length=ENTRIES)] = msgspec.field(default_factory=list)
    """Instead of ``messages``: the whole sequence that the policy continues."""
    done: bool = False
    scores_when_cut: bool = False
    """An episode that ends before it is ``done`` takes one more step, without a reply, whose rewards count."""
    metrics: Annotated[dict[Name, float], msgspec.Meta(max_length=METRICS)] = msgspec.field(default_factory=dict)
    error: ErrorText = ""


class AgentStarted(EpochMessage, kw_only=True):
    """The agent of an episode runs: plain ones wait for a thread before. Sent again when a reset is."""

    episode: Name


class CallQueued(EpochMessage, kw_only=True):
    """The method of a call waits for a thread; or, no longer ``queued``, it begins, and its time counts from now. Sent
    again when a call is that waits."""

    call: Name
    queued: bool


class AskModel(EpochMessage, kw_only=True):
    """A question of the service's host, for an episode of ``job``, to a model of its tenant; :class:`ModelReply`
    answers it. A question that is sent again may be answered again."""

    call: Name
    job: Name
    model: Line
    messages: Annotated[list[ChatMessage], msgspec.Meta(max_length=MESSAGES)]
    schema: Text = ""
    """The JSON schema that the answer follows; empty: any text."""
    max_tokens: Count = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: Integer = 0


class ModelReply(Message, kw_only=True):
    """Answer to :class:`AskModel`; ``error``, in one line, where the model does not answer."""

    call: str
    text: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    error: str = ""


class CloseEpisode(Message, kw_only=True):
    """The episode is over; the host deletes its environment."""

    episode: str


FromHost = HostHello | HostHeartbeat | Prompts | Observation | AgentStarted | CallQueued | AskModel
ToHost = HostWelcome | HelloRejected | GetPrompts | Reset | StepEpisode | CloseEpisode | ModelReply
