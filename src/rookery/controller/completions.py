"""Direct completions of a base model or a policy: chat, the OpenAI API, samples.

* They use the same engines and the same queue as rollouts, and go first: each has objectives by its class and model
  (settings ``ttft_ms``, ``tpot_ms``, ``slo_overrides``), which bound the rollouts that run with it.
* The same seed gives the same completion. A tenant sees base models and its own policies only.
* The retention of a running job keeps the version of a running completion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from typing import Any

import msgspec

from rookery import protocol
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.prompts import (
    CallOptions,
    PreparedPrompt,
    answer_room,
    check_logits,
    prepare_prompt,
    schema_problem,
)
from rookery.controller.quotas import Quotas
from rookery.controller.rollout.elastic import ModelUse
from rookery.controller.rollout.request import GenerationFailed, SamplingRequest, SamplingResult
from rookery.controller.rollout.scheduler import RolloutScheduler
from rookery.controller.services import Services
from rookery.controller.targets import Target, Targets, may_name
from rookery.controller.views import Completion
from rookery.environments.models import ModelQuestion
from rookery.errors import RookeryError, Unavailable, UserError, short
from rookery.scheduling.slo import parse_objectives
from rookery.spec.job import stored_base_model
from rookery.storage.repositories import jobs, sessions, tenants, versions
from rookery.storage.store import every
from rookery.tokenization.chat import NO_VALUES, Chat, Message, read_tokens

SEED_BITS = 48
"""Size of a seed that is drawn here."""


ANSWER_TOKENS = 1024
"""Tokens of a chat's answer where the request sets no limit: a small model may never end by itself."""


QUESTION_SECONDS = 30.0
"""Time in which an episode's question to a model without a worker is tried again: half of the default ``step_timeout``,
within which the owner of the job reads why no answer came."""


class Completions:
    def __init__(
        self,
        services: Services,
        fleet: Fleet,
        rollouts: RolloutScheduler,
        models: ModelUse,
        quotas: Quotas,
        targets: Targets,
        keeping: Callable[[protocol.AdapterRef | None], AbstractAsyncContextManager[object]],
        answer_tokens: int = ANSWER_TOKENS,
    ) -> None:
        """Within ``keeping(ref)`` the version and its artifact are kept."""
        self._services = services
        self._fleet = fleet
        self._rollouts = rollouts
        self._models = models
        self._quotas = quotas
        self._targets = targets
        self._keeping = keeping
        self._answer_tokens = answer_tokens
        self._overrides = parse_objectives(services.settings.engine.slo_overrides)

    async def open(self, tenant: str, target: str) -> tuple[Target, Chat]:
        """The target of that name and its chat template. Raises :class:`UserError`, :class:`NotFound`, or
        :class:`Unavailable` for a base model that no worker has."""
        found = await self.find(tenant, target)
        return found, await self._services.chat(found.model)

    async def find(self, tenant: str, target: str) -> Target:
        """The target of that name. Raises as :meth:`open` does."""
        return await self._targets.find(tenant, target)

    def prepare(
        self,
        target: Target,
        chat: Chat,
        source: Sequence[Message] | str | Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        opening: str = "",
        values: Mapping[str, Any] = NO_VALUES,
    ) -> PreparedPrompt:
        """:func:`prepare_prompt`."""
        return prepare_prompt(target, chat, source, tools, opening=opening, values=values)

    def trainable(self, target: Target, temperature: float | None, logits: protocol.LogitsParams | None) -> bool:
        """Whether tokens that are sampled so could be trained on."""
        return logits is None

    def answer_tokens(self, target: Target, limit: int | None) -> int:
        """The most tokens of an answer to a request with that limit; None for none."""
        return self._answer_tokens if limit is None else limit

    def delivered(self, prepared: PreparedPrompt) -> None:
        """The response to a prompt was sent."""

    def settled(self, prepared: PreparedPrompt) -> None:
        """The response to a prompt has ended, whether it was sent or lost."""

    def check_logits(self, target: Target, logits: protocol.LogitsParams | None) -> None:
        """:func:`check_logits`."""
        check_logits(self._fleet, target, logits)

    def _most_tokens(self, prepared: PreparedPrompt, options: CallOptions) -> int:
        """The most tokens of the answer to a prompt."""
        room, length = prepared.chat.context, len(prepared.prompt)
        most = self.answer_tokens(prepared.target, options.max_tokens)
        if options.max_tokens is None:
            return min(most, answer_room(self._fleet, prepared.target.model, room, length))
        return min(most, room - length)

    @contextmanager
    def admitted(
        self, tenant: str, prompts: Sequence[PreparedPrompt], options: CallOptions, *, job: str = ""
    ) -> Iterator[None]:
        """The generations of one request, a prompt for each, wait or run within. Raises :class:`TooManyRequests` where
        they exceed a limit together, unless a ``job`` asks."""
        quotas, model = self._quotas, prompts[0].target.model
        tokens = sum(len(prepared.prompt) + self._most_tokens(prepared, options) for prepared in prompts)
        generating = quotas.generating_beyond_limits if job else quotas.generating
        with generating(tenant, model, tokens, len(prompts)):
            yield

    async def generate(
        self,
        tenant: str,
        prepared: PreparedPrompt,
        options: CallOptions,
        on_tokens: Callable[[SamplingResult], None] | None = None,
        *,
        job: str = "",
    ) -> SamplingResult:
        """One completion, within :meth:`admitted`; ``on_tokens`` is called with it each time that tokens have arrived.
        A ``job`` that asks waits in its own queue, behind clients, within its own limits. A cancellation ends its
        generation. Raises :class:`UserError` too where the schema of the options' logits takes too much work at some
        token."""
        target, chat = prepared.target, prepared.chat
        name = self._services.ids.new("sample")
        ttft, tpot = self._objectives(options.kind, target.model)
        logits, score_prompt = options.logits, options.score_prompt
        generate = protocol.Generate(
            request=name,
            adapter=target.adapter,
            prompt=prepared.prompt,
            shared_prefix=0 if score_prompt else len(prepared.prompt),
            max_tokens=self._most_tokens(prepared, options),
            temperature=1.0 if options.temperature is None else options.temperature,
            seed=options.seed if options.seed is not None else self.draw_seed(),
            stop_tokens=chat.ends(options.stop, [*chat.stop_tokens, *options.stop_tokens]),
            stop=list(options.stop),
            prompt_logprobs=len(prepared.prompt) if score_prompt else 0,
            top_logprobs=logits.top_logprobs if score_prompt and logits is not None else 0,
            logits=logits,
            client=not job,
            ttft_ms=0.0 if job else ttft,
            tpot_ms=0.0 if job else tpot,
        )
        self._models.provide(target.model)
        async with self._keeping(target.adapter):
            try:
                return await self._rollouts.sample(
                    SamplingRequest(tenant, job or name, target.model, generate, bool(job)), on_tokens
                )
            except GenerationFailed as error:
                raise schema_problem(error) or error from None

    async def sample(
        self, tenant: str, target: str, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, Any]
    ) -> Completion:
        """One completion of a base model, of ``JOB`` (its newest version) or of ``JOB@VERSION``."""
        found, chat = await self.open(tenant, target)
        prepared = await self._services.threads(self.prepare, found, chat, messages)
        options = CallOptions(
            sampling["max_tokens"], sampling["temperature"], sampling.get("seed"), sampling["stop"], kind="sample"
        )
        with self.admitted(tenant, [prepared], options):
            result = await self.generate(tenant, prepared, options)
        return await self._completion(found, chat, prepared, result)

    async def _completion(
        self, found: Target, chat: Chat, prepared: PreparedPrompt, result: SamplingResult
    ) -> Completion:
        ref = found.adapter
        return Completion(
            text=await read_tokens(self._services.threads, chat.decode, result.tokens),
            tokens=result.tokens,
            logprobs=result.logprobs,
            finish=result.finish,
            version=ref.version if ref is not None else 0,
            policy=ref.policy if ref is not None else "",
            prompt_tokens=len(prepared.prompt),
        )

    async def answer_host(self, asked: protocol.AskModel) -> protocol.ModelReply:
        """The answer of a model to an episode of a job, as the job's tenant may ask it. Waits for a worker of the
        model."""
        clock, reply = self._services.clock, protocol.ModelReply(call=asked.call)
        until = clock.monotonic() + QUESTION_SECONDS
        while True:
            try:
                answer = await self._answer(asked)
            except RookeryError as error:
                if isinstance(error, Unavailable) and clock.monotonic() < until:
                    await clock.sleep(error.retry_after)
                    continue
                reply.error = short(f"{asked.model}: {error}")
            else:
                reply.text, reply.prompt_tokens, reply.tokens = answer.text, answer.prompt_tokens, len(answer.tokens)
            return reply

    async def _answer(self, asked: protocol.AskModel) -> Completion:
        tenant = await self._services.store.read(jobs.tenant_of, asked.job)
        question = ModelQuestion(
            asked.model, [msgspec.structs.asdict(message) for message in asked.messages], asked.schema,
            asked.max_tokens, asked.temperature, asked.top_p, asked.seed,
        )  # fmt: skip
        return await self.judge(tenant, question, asked.job)

    async def judge(self, tenant: str, question: ModelQuestion, job: str = "") -> Completion:
        """A model's answer to a question about a reply; it follows the question's schema where the model's engine can.
        Raises as :meth:`open` and :meth:`generate` do."""
        found, chat = await self.open(tenant, question.model)
        prepared = await self._services.threads(self.prepare, found, chat, chat.without_marks(question.messages))
        logits: protocol.LogitsParams | None = protocol.LogitsParams(schema=question.schema, top_p=question.top_p)
        try:
            self.check_logits(found, logits)
        except UserError:
            logits = None
        options = CallOptions(question.max_tokens, question.temperature, question.seed, kind="judge", logits=logits)
        with self.admitted(tenant, [prepared], options, job=job):
            result = await self.generate(tenant, prepared, options, job=job)
        return await self._completion(found, chat, prepared, result)

    def _objectives(self, kind: str, model: str) -> tuple[float, float]:
        """(ttft_ms, tpot_ms) of a request; zeros without the gate."""
        engine = self._services.settings.engine
        if not engine.slo_gate:
            return 0.0, 0.0
        return self._overrides.get(kind) or self._overrides.get(model) or (engine.ttft_ms, engine.tpot_ms)

    def draw_seed(self) -> int:
        """A seed for a request without one."""
        return int(self._services.ids.new("seed")[-SEED_BITS // 4 :], 16)

    async def targets(self, tenant: str) -> list[dict[str, Any]]:
        """All present targets: base models with a worker that the tenant may name, then the newest and every kept
        version of the tenant's jobs, the newest job first, then the checkpoints of its clients. Each with ``name``,
        ``created`` (Unix seconds, 0 for base models), ``owner``, and ``context``, the most tokens of a prompt with its
        answer, of a base model and of the policies on it; 0 elsewhere."""
        services = self._services
        loaded = {worker.hello.model for worker in self._fleet.all() if worker.has_role("rollout", worker.hello.model)}
        owner = await services.store.read(tenants.get_tenant, tenant)
        sizes = {name: (await services.chat(name)).context for name in sorted(loaded)}
        rows: list[dict[str, Any]] = [
            {"name": name, "created": 0.0, "owner": "rookery", "context": size}
            for name, size in sizes.items()
            if may_name(services.settings, name, owner.admin)
        ]
        last = ""
        specs = await services.store.read(jobs.base_models, tenant)
        for job, policy, policies, version, created in await services.store.read(versions.kept_versions, tenant):
            name = job if policies == 1 else f"{job}/{policy}"
            model = stored_base_model(specs[job], policy) if job in specs else ""
            shown = {"created": created, "owner": owner.name, "context": sizes.get(model, 0)}
            if name != last:
                rows.append({"name": f"{name}:latest", **shown})
                last = name
            rows.append({"name": f"{name}@{version}", **shown})
        saved_now = partial(services.store.read, sessions.list_checkpoints, tenant, None, at=services.clock.time())
        rows += [
            {"name": saved.path, "created": saved.created, "owner": owner.name}
            async for saved in every(saved_now, sessions.checkpoint_cursor)
        ]
        return rows
