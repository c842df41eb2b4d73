"""Answers to whoever asks a base model or a policy directly: chat, the OpenAI API, samples.

* They come from the engines that the rollouts use, through the same queue; where the setting says so they go first.
* The same seed gives the same answer. Who asks sees only base models and policies of their own.
* A running job's retention leaves the version alone that an answer comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from rookery import protocol
from rookery.controller.context import ControllerContext
from rookery.controller.rollout.scheduler import SamplingRequest, SamplingResult
from rookery.controller.validation import JobValidator, Target
from rookery.errors import UserError
from rookery.tokenization.chat import Chat

Message = Mapping[str, str]

SEED_BITS = 48
"""Of a seed that is drawn here."""


class PromptTooLong(UserError):
    """There is no room for an answer behind the prompt."""


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt that fits its model, and who is asked."""

    target: Target
    chat: Chat
    prompt: list[int]


class Completions:
    def __init__(
        self,
        world: ControllerContext,
        intake: JobValidator,
        pinned: Callable[[protocol.AdapterRef | None], AbstractContextManager[object]],
    ) -> None:
        """Within ``pinned(ref)`` the version is not retired."""
        self._world = world
        self._intake = intake
        self._pinned = pinned

    async def open(self, tenant: str, target: str) -> tuple[Target, Chat]:
        """Who is asked, and how it reads and writes. Raises :class:`UserError`, :class:`NotFound`, or
        :class:`Unavailable` for a base model that no worker has."""
        found = await self.find(tenant, target)
        return found, await self._world.chat(found.model)

    async def find(self, tenant: str, target: str) -> Target:
        """What a name means to this tenant. Raises as :meth:`open`."""
        return await self._intake.target(tenant, target)

    @staticmethod
    def prepare(target: Target, chat: Chat, asked: Sequence[Message] | str | Sequence[int]) -> PreparedPrompt:
        """``asked`` is a conversation, a text to go on with, or its token ids. Raises :class:`UserError`."""
        if isinstance(asked, str):
            prompt = chat.encode(asked)
        elif asked and isinstance(asked[0], int):
            prompt = [token for token in asked if isinstance(token, int)]
            unknown = next((token for token in prompt if not chat.token_bytes.known(token)), None)
            if unknown is not None:
                raise UserError(f"the prompt has the token id {unknown}, which {target.model} does not have")
        else:
            prompt = chat.prompt([dict(message) for message in asked if isinstance(message, Mapping)])
        if not prompt:
            raise UserError("the prompt is empty: an answer needs at least one token to follow")
        if len(prompt) >= chat.context:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens, the model's context is {chat.context}: shorten it"
            )
        return PreparedPrompt(target, chat, prompt)

    async def generate(
        self,
        tenant: str,
        question: PreparedPrompt,
        *,
        max_tokens: int | None,
        temperature: float,
        seed: int | None,
        stop: Sequence[str],
        on_tokens: Callable[[SamplingResult], None] | None = None,
    ) -> SamplingResult:
        """One completion; ``on_tokens`` is called with it each time that tokens have arrived. A cancellation ends its
        generation."""
        world, target, chat = self._world, question.target, question.chat
        name = world.ids.new("sample")
        most = world.settings.server.answer_tokens if max_tokens is None else max_tokens
        generate = protocol.Generate(
            request=name,
            adapter=target.adapter,
            prompt=question.prompt,
            shared_prefix=len(question.prompt),
            max_tokens=min(most, chat.context - len(question.prompt)),
            temperature=temperature,
            seed=seed if seed is not None else self.draw_seed(),
            stop_tokens=chat.stop_tokens,
            stop=list(stop),
            interactive=world.settings.engine.interactive_priority,
        )
        async with world.collector.reading(target.adapter):
            with self._pinned(target.adapter):
                return await world.rollouts.sample(SamplingRequest(tenant, name, target.model, generate), on_tokens)

    def draw_seed(self) -> int:
        """A seed for who gave none."""
        return int(self._world.ids.new("seed")[-SEED_BITS // 4 :], 16)

    async def targets(self, tenant: str) -> list[dict[str, Any]]:
        """What can be asked now: base models with a worker, then the newest and every kept version of the tenant's
        jobs, the newest job first, then the checkpoints of its clients. Each with its ``name``, when it was made and by
        whom."""
        world = self._world
        loaded = {worker.hello.model for worker in world.fleet.all() if worker.has_role("rollout", worker.hello.model)}
        owner = await world.store.get_tenant(tenant)
        rows: list[dict[str, Any]] = [{"name": name, "created": 0.0, "owner": "rookery"} for name in sorted(loaded)]
        for job in await world.store.list_jobs(tenant):
            for policy in await world.store.policies(tenant, job.id):
                kept = [v for v in await world.store.versions(tenant, policy.id) if v.kept]
                if kept:
                    rows.append({"name": f"{job.id}:latest", "created": kept[-1].created, "owner": owner.name})
                rows += [
                    {"name": f"{job.id}@{v.version}", "created": v.created, "owner": owner.name} for v in reversed(kept)
                ]
        now = world.clock.time()
        rows += [
            {"name": saved.path, "created": saved.created, "owner": owner.name}
            for saved in await world.store.list_checkpoints(tenant, None)
            if saved.expires is None or saved.expires > now
        ]
        return rows
