"""The base class of agents: a task is a class with ``prompts`` and ``run``, which drives its episode itself.

``run`` gets a model behind an OpenAI address, with a key for this episode alone. Whatever calls it, any framework,
several calls at once, sub-agents, is sampled from the job's policy and recorded. Promises to such a class:

* One object serves one episode: the host makes it with :meth:`Agent.for_episode` and calls ``run`` once, then
  ``close``.
* ``run`` may be ``async`` or plain. A plain one runs in a thread.
* It runs in an environment host, never in the service. An exception ends that episode and nothing else.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

from rookery.environments.base import Environment, Message, Reply, Step
from rookery.errors import UserError, installs
from rookery.network import client_tls

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

RETRIES = 30
"""Times that a client repeats a call that found no service, or a job that does not run: with pauses of up to 8 seconds,
more than two minutes, in which a service restarts and an outage passes."""


@dataclass
class Outcome:
    """The reward and metrics of an agent's run."""

    reward: float = 0.0
    """The reward of the episode: a finite number of any type. Every policy that replied gets it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers to average over the episodes that have them, and to show."""
    rewards: dict[str, float] = field(default_factory=dict)
    """By policy, numbers that are added to ``reward`` for that policy alone."""


@dataclass
class LLM:
    """The model of one episode, for any client of OpenAI's API."""

    base_url: str
    """The address of the episode's ``/v1``: chat completions, responses, models."""
    api_key: str
    """Valid until the episode ends, and for this address alone."""
    models: list[str]
    """The policies of the job: names for ``model``, the first one for a job with one policy."""
    ca_file: str = ""
    """The certificates with which the service is checked; empty: the system's."""

    @property
    def model(self) -> str:
        """The name of the job's first policy."""
        return self.models[0]

    @cached_property
    def client(self) -> AsyncOpenAI:
        """``openai.AsyncOpenAI`` for this episode. Raises :class:`UserError` without the package."""
        return _openai().AsyncOpenAI(
            base_url=self.base_url, api_key=self.api_key, max_retries=RETRIES,
            http_client=_openai().DefaultAsyncHttpxClient(verify=_context(self.base_url, self.ca_file)),
        )  # fmt: skip

    @cached_property
    def sync_client(self) -> OpenAI:
        """``openai.OpenAI`` for this episode, for a plain ``run``."""
        return _openai().OpenAI(
            base_url=self.base_url, api_key=self.api_key, max_retries=RETRIES,
            http_client=_openai().DefaultHttpxClient(verify=_context(self.base_url, self.ca_file)),
        )  # fmt: skip

    async def aclose(self) -> None:
        """Close the clients that were made."""
        if "client" in self.__dict__:
            await self.client.close()
        if "sync_client" in self.__dict__:
            self.sync_client.close()


class Agent(Environment):
    """Base class of agents. Subclasses define ``prompts`` and ``run``."""

    deterministic = False
    """True promises that ``run`` makes the same calls and gives the same outcome, where it gets the same replies. An
    episode whose host was lost is then run again in another host, with the replies that it had; otherwise it fails and
    is replaced, unless it had none."""

    def run(self, task: Any, llm: LLM) -> Outcome | Awaitable[Outcome]:
        """Solves ``task``, one of ``prompts``, by calls of ``llm``. May be ``async``."""
        raise NotImplementedError(f"{type(self).__name__} does not define run(task, llm)")

    def reset(self, prompt: Any, seed: int) -> list[Message]:
        """An agent has no steps."""
        raise NotImplementedError(f"{type(self).__name__} is an Agent: it runs whole")

    def step(self, reply: Reply) -> Step:
        """An agent has no steps."""
        raise NotImplementedError(f"{type(self).__name__} is an Agent: it runs whole")


def _openai() -> Any:
    try:
        import openai
    except ImportError:
        raise UserError(f"llm.client needs the openai package: {installs('agents')}") from None
    return openai


_CONTEXTS: dict[tuple[str, str], ssl.SSLContext] = {}


def _context(url: str, ca_file: str) -> ssl.SSLContext:
    """One context for all episodes: reading the certificates takes longer than a call."""
    key = ("{0.scheme}://{0.netloc}".format(urlsplit(url)), ca_file)
    if key not in _CONTEXTS:
        _CONTEXTS[key] = client_tls(url, ca_file) or httpx.create_ssl_context()
    return _CONTEXTS[key]
