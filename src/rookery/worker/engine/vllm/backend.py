"""The protocol between :class:`~rookery.worker.engine.vllm.engine.VllmEngine` and vLLM, wherever that runs.

A backend's coroutines run in the engine's event loop, never in the compute thread. It loads adapters, streams tokens of
requests, and reports the use of the cache; it keeps no state of a request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rookery import protocol
from rookery.errors import Unavailable
from rookery.worker.engine.base import EngineLimits
from rookery.worker.failures import PassingFault, WorkerBroken
from rookery.worker.memory import MemoryUse

SEED, POSITION, TEMPERATURE = "rookery_seed", "rookery_position", "rookery_temperature"
"""Names of a sampling key's parts in a request's extra arguments."""

NOT_A_NUMBER = 1.0
"""Reported as the log-probability where the logits are no distribution: a log-probability is never above 0, and NaN
would not survive the choice of the largest logit."""


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter as vLLM knows it. ``number`` is new for each load: vLLM serves the old weights of a known one."""

    name: str
    number: int
    folder: Path


@dataclass(frozen=True)
class SamplingTask:
    """One request to vLLM: the rest of a text from ``tokens`` on, under one version."""

    name: str
    adapter: LoadedAdapter | None
    tokens: list[int]
    """The prompt and the answer so far."""
    seed: int
    position: int
    """Number of the first token to sample, counted from the answer's first."""
    temperature: float
    max_tokens: int
    stop_tokens: list[int]
    priority: int = 0
    """The least is scheduled first."""
    scored: range = range(0)
    """Positions in ``tokens`` whose log-probabilities are requested."""
    top_logprobs: int = 0
    """So many of the likeliest tokens are requested at each of these positions."""

    @property
    def salt(self) -> str:
        """Keys cached prefixes: they are shared within a version only."""
        return self.adapter.name if self.adapter is not None else "rookery-base"


@dataclass(frozen=True)
class SampledPart:
    """The next tokens of a task, with their log-probabilities, and scores by position."""

    tokens: list[int]
    logprobs: list[float]
    scores: dict[int, protocol.PromptLogprob] = field(default_factory=dict)


class TaskFailed(Exception):
    """vLLM refused or failed one request, for a reason of one line."""


class AdapterLost(TaskFailed, PassingFault):
    """vLLM does not have the adapter of a task: it was restarted, or has unloaded it."""


class ServerFault(TaskFailed, PassingFault):
    """vLLM failed one request, or the load of an adapter, by a fault that need not be the request's."""


class VllmBusy(Unavailable):
    """vLLM, or a proxy before it, takes no requests at present."""


class VllmEnded(Unavailable, WorkerBroken):
    """vLLM itself has ended, or its server does not answer: the worker starts again, and waits for it."""


class Backend(Protocol):
    tempered: bool
    """Whether log-probabilities are those at the request's temperature, not at 1."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def max_adapters(self) -> int:
        """Adapters that may be loaded at once."""
        ...

    async def start(self) -> None:
        """Reach vLLM; the limits are known from then on. Raises ``UserError`` or ``Unavailable``."""
        ...

    async def load(self, adapter: LoadedAdapter) -> None:
        """Load an adapter before any task names it. Raises ``UserError`` if vLLM refuses it,
        :class:`ServerFault`, :class:`VllmBusy` and :class:`VllmEnded`."""
        ...

    async def unload(self, adapter: LoadedAdapter) -> None: ...

    def sample(self, task: SamplingTask) -> AsyncIterator[SampledPart]:
        """The task's tokens as they are sampled; cancelled, vLLM aborts it. Raises :class:`TaskFailed` or one of its
        kinds, :class:`VllmBusy` and :class:`VllmEnded`."""
        ...

    def kv_cache(self) -> MemoryUse:
        """Bytes of the cache in use, as last reported."""
        ...

    def free_tokens(self) -> int:
        """Tokens of the cache that nothing occupies; 0 where they are not known."""
        ...

    async def close(self) -> None: ...


def scores_of(
    positions: range, tokens: list[int], given: list[dict[int, tuple[float, int]] | None], top: int
) -> dict[int, protocol.PromptLogprob]:
    """Scores from vLLM's report of a prompt: per position, (log-probability, rank from 1) by token id."""
    scores = {}
    for at in positions:
        line = given[at] or {}
        best = sorted((rank, token, logprob) for token, (logprob, rank) in line.items() if rank <= top)
        ranked = [(token, logprob) for _, token, logprob in best[:top]]
        scores[at] = protocol.PromptLogprob(logprob=line[tokens[at]][0], top=ranked)
    return scores
