"""One generation: what is asked for, what came of it, and where it stands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from rookery import protocol
from rookery.controller.fleet.worker import Worker
from rookery.errors import RookeryError


class GenerationFailed(RookeryError):
    """The engine could not generate this request; another attempt would end the same."""


@dataclass(frozen=True)
class SamplingRequest:
    """One generation. ``id`` is the same after any restart, ``seed`` and position fix the noise."""

    id: str
    tenant: str
    job: str
    model: str
    adapter: protocol.AdapterRef | None
    prompt: list[int]
    shared_prefix: int
    max_tokens: int
    temperature: float
    seed: int
    stop_tokens: list[int]
    stop: list[str]
    episode: str = ""
    interactive: bool = False
    """Somebody waits for it."""
    continues: bool = False
    """A later turn: it goes before its job's others, so that episodes which have begun end, and groups with them."""
    prompt_logprobs: int = 0
    """How many of the prompt's last tokens are scored too …"""
    top_logprobs: int = 0
    """… each with this many of the likeliest tokens in its place."""
    in_flight: Literal["finish", "switch", "recompute"] = "finish"
    """What it does when a newer version of its policy is published. Where that is not ``finish`` its tokens may be of
    any version up to its adapter's: also of those that ran before a restart of the service."""


@dataclass
class SamplingResult:
    """What was sampled: parallel lists, one entry per token."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str = ""
    queued: float = 0.0
    """Seconds for which it waited for a place in a worker."""
    prompt_logprobs: list[protocol.PromptLogprob] = field(default_factory=list)
    """Of the prompt's last tokens, where asked for."""


@dataclass(eq=False)
class InflightRequest:
    """A request under way."""

    request: SamplingRequest
    reply: SamplingResult
    done: asyncio.Future[SamplingResult]
    new_tokens: Callable[[SamplingResult], None] | None = None
    worker: Worker | None = None
    name: str = ""
    """What its worker calls it: its id, or another name where chunks of that may still be on their way."""
    requeue_reason: set[int] = field(default_factory=set)
    """Epochs of the workers from which it was taken: what they had sent before they heard of it comes late."""
    returns: int = 0
    """How often it was given to one of them again."""
    ahead: bool = False
    """Its worker was given it beyond the common room."""
    decoding: bool = False
    """Tokens of it have come since its worker was given it."""
    previous_workers: set[int] = field(default_factory=set)
    """Versions that its worker was given for it."""
    claimed: bool = False
    """Its worker had it before this service did."""
    since: float = 0.0
    """From when on it counts how long no worker came for it."""
    queued: float = 0.0
    """When it came to wait for a place in a worker."""
    last_token_at: float = 0.0
    """When its worker was given it, or last sent a token of it."""

    @property
    def applied(self) -> tuple[str, int]:
        """Policy and version that sample it; ``("", 0)`` for the base model."""
        adapter = self.request.adapter
        return (adapter.policy, adapter.version) if adapter is not None else ("", 0)

    def may(self, policy: str, version: int) -> bool:
        """Whether tokens sampled by this version can be its own: one that its worker was given for it; or an older one
        that it had before this service did, if it is one that changes its version."""
        wanted, newest = self.applied
        before = self.claimed and self.request.in_flight != "finish" and version < newest
        return policy == wanted and (version in self.previous_workers or before)


def newer(ref: protocol.AdapterRef | None, request: SamplingRequest) -> bool:
    """Whether ``ref`` is a version that the request is to change to."""
    old = request.adapter
    if ref is None or old is None or request.in_flight == "finish":
        return False
    return ref.policy == old.policy and ref.version > old.version


def same_text(before: SamplingRequest, now: SamplingRequest) -> bool:
    """Whether what was sampled for ``before`` is the beginning of what ``now`` asks for: everything that decides about
    the text is the same, but for the version where that may change under way. Workers judge claims alike
    (:meth:`rookery.worker.generation.Held.continues`)."""
    if _essence(before) != _essence(now):
        return False
    old, new = before.adapter, now.adapter
    if old is None or new is None:
        return old is new
    return old.policy == new.policy and (old.version == new.version or now.in_flight != "finish")


def _essence(request: SamplingRequest) -> SamplingRequest:
    """All but the version and its place among those that wait."""
    return replace(request, adapter=None, interactive=False, continues=False)
