"""The calls of an agent in an episode: each is sampled as a reply of the job, and recorded.

* A call is sampled from the version that the job prescribes, in the job's queue, with the episode's randomness. Only
  what is sampled as the trainer computes it, at the job's temperature from all tokens, is trained on; other calls are
  recorded, and are read as the environment's text.
* The tokens of a reply are never encoded again: a conversation that repeats one gets the tokens that were sampled.
* A reply is durable before it is sent. A call that is repeated because its response was lost gets the same reply; a
  call that its client gave up before the reply was complete leaves nothing.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from rookery import protocol
from rookery.aio import unless
from rookery.bounds import metrics_problem
from rookery.controller.fleet.agents import OVER, AgentOutcome, AgentSession
from rookery.controller.jobs.agent_turns import NONE, AgentTurn, TurnTree, assemble
from rookery.controller.jobs.job_context import JobContext, JobPolicy
from rookery.controller.jobs.trajectory import AssistantTurn, EpisodeResult, TurnRecord, derive_seed
from rookery.controller.prompts import CallOptions, PreparedPrompt, check_logits, prepare_prompt, schema_problem
from rookery.controller.rollout.request import GenerationFailed, SamplingResult
from rookery.controller.targets import Target
from rookery.environments.messages import readable
from rookery.errors import NotFound, UserError, count_of, short
from rookery.tokenization.chat import NO_VALUES, Chat, Message, PromptTooLong, check_letters
from rookery.tokenization.tool_calls import called, message_key

DIGEST_BYTES = 16
"""Of a digest of a call, or of a conversation: no two of an episode are equal by chance."""

STORED_CONTEXTS = 32
"""Tokens of one episode, in contexts of its model, after which it gets no further reply: all are stored again with each
reply. Prompts count by what they add to the reply that they follow."""

SHOWN_ROLES = 64
"""Characters of a role that are stored."""


class CallLimit(UserError):
    """The episode has had as many replies as it may have."""


class SampleReply(Protocol):
    """:meth:`rookery.controller.jobs.episode.Episode.sample`."""

    async def __call__(
        self,
        policy: JobPolicy,
        generate: protocol.Generate,
        *,
        continues: bool,
        on_tokens: Callable[[SamplingResult], None] | None = None,
    ) -> tuple[AssistantTurn, SamplingResult]: ...


@dataclass(frozen=True)
class PreparedCall(PreparedPrompt):
    """A call, tokenized."""

    messages: list[protocol.ChatMessage]
    """The messages in addition to the reply that it follows."""
    history: bytes
    """The digest of its conversation; empty for token ids."""
    tools: Sequence[Mapping[str, Any]] = ()
    indexes: list[int] = field(default_factory=list)
    """The indexes of its replies."""


class AgentCalls:
    """Samples for one attempt at an episode, as :class:`~rookery.controller.completions.Completions` does elsewhere."""

    session: AgentSession
    """Set by the episode."""

    def __init__(
        self,
        job: JobContext,
        episode: str,
        seed: int,
        turns: Sequence[AgentTurn],
        sample: SampleReply,
        store: Callable[[], Awaitable[None]],
    ) -> None:
        """``turns``: the replies of the attempt so far; ``store`` makes all of ``tree`` durable."""
        self.tree = TurnTree(list(turns))
        self._job = job
        self._episode = episode
        self._seed = seed
        self._sample = sample
        self._store = store
        self._histories = {turn.history: index for index, turn in enumerate(self.tree.turns) if turn.history}
        self._numbers: set[int] = {turn.call for turn in self.tree.turns}
        self._pending: dict[int, int] = {}
        """By the numbers of the calls in flight, the most tokens that each adds."""
        self._repeated: set[int] = set()
        """Places of undelivered replies that a repeated call is about to get."""
        self._over = False

    # --- as Completions -----------------------------------------------------------------------------------------------

    async def open(self, tenant: str, target: str) -> tuple[Target, Chat]:
        """The policy that a call names, by default the first one of the job. Raises :class:`NotFound`."""
        del tenant
        policy = self._job.policies.get(target or self._job.first.name)
        if policy is None:
            self.session.calls_refused[f"model {short(target)}"] += 1
            raise NotFound(
                f"no model {short(repr(target))} in an agent's episode: it samples from the job's policies alone; give"
                f" {' or '.join(self._job.policies)}"
            )
        return Target(policy.name, policy.model, None), policy.chat

    def answer_tokens(self, target: Target, limit: int | None) -> int:
        """The most tokens of a reply to a call with that limit; None for none."""
        most = self._job.policies[target.name].spec.sampling.max_tokens
        return most if limit is None else min(limit, most)

    def draw_seed(self) -> int:
        """The seed of the names of a reply's calls of tools; its sampling depends on the call's number alone."""
        return derive_seed(self._seed, "call", len(self.tree.turns), len(self._numbers))

    def admitted(
        self, tenant: str, prompts: Sequence[PreparedPrompt], options: CallOptions
    ) -> AbstractContextManager[None]:
        """An episode has no limit but those of :meth:`generate`: its job's other requests wait for it."""
        del tenant, prompts, options
        return nullcontext()

    def check_logits(self, target: Target, logits: protocol.LogitsParams | None) -> None:
        """As :func:`~rookery.controller.prompts.check_logits`."""
        check_logits(self._job.controller.rooms.fleet, target, logits)

    def trainable(self, target: Target, temperature: float | None, logits: protocol.LogitsParams | None) -> bool:
        """Whether a call is sampled as the trainer computes it."""
        sampling = self._job.policies[target.name].spec.sampling
        plain = logits is None or msgspec.structs.replace(logits, top_logprobs=0) == protocol.LogitsParams()
        return plain and temperature in (None, sampling.temperature)

    def prepare(
        self,
        target: Target,
        chat: Chat,
        source: Sequence[Message] | str | Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        opening: str = "",
        values: Mapping[str, Any] = NO_VALUES,
    ) -> PreparedCall:
        """As :func:`~rookery.controller.prompts.prepare_prompt`, with the sampled tokens of the replies that the
        conversation repeats."""
        if isinstance(source, str) or (source and isinstance(source[0], int)):
            plain = prepare_prompt(target, chat, source, tools, opening=opening)
            shown = [protocol.ChatMessage(role="prompt", content=chat.decode(plain.prompt))]
            return PreparedCall(target, chat, plain.prompt, shown, b"")
        check_letters(chat, source, tools)
        messages = [dict(message) for message in source if isinstance(message, Mapping)]
        digests = _digests(target.model, messages, [*tools, values] if values else tools)
        known = next((n for n in range(len(messages), 0, -1) if digests[n] in self._histories), 0)
        prompt = None
        if known:
            index = self._histories[digests[known]]
            tokens, reply = self.tree.sequence(index), self.tree.turns[index]
            if known < len(messages):
                prompt = chat.continuation(tokens, reply.tokens, messages, known - 1, tools, values)
            elif reply.finish == "length":  # the client asks for the rest of the reply
                prompt = tokens
        if prompt is None:
            known = 0
            prompt = prepare_prompt(target, chat, messages, tools, opening=opening, values=values).prompt
        elif opening:
            prompt = [*prompt, *chat.encode(opening)]
        if len(prompt) >= chat.context:
            raise PromptTooLong.of(chat.context, len(prompt))
        return PreparedCall(target, chat, prompt, [_shown(one) for one in messages[known:]], digests[-1], tools)

    async def generate(
        self,
        tenant: str,
        prepared: PreparedPrompt,
        options: CallOptions,
        on_tokens: Callable[[SamplingResult], None] | None = None,
    ) -> SamplingResult:
        """One reply, recorded. Raises :class:`CallLimit`, :class:`~rookery.controller.fleet.agents.EpisodeEnded`, and
        :class:`~rookery.errors.Unavailable` while the job does not run."""
        del tenant
        assert isinstance(prepared, PreparedCall)
        policy, session = self._job.policies[prepared.target.name], self.session
        given = (
            policy.name, options.max_tokens, options.temperature, options.seed, [*options.stop],
            [*options.stop_tokens], options.logits,
        )  # fmt: skip
        digest = _digest(array("q", prepared.prompt).tobytes(), msgspec.msgpack.encode(given))
        with session.calling():
            if (index := self._undelivered(digest)) is not None:
                self._repeated.add(index)
                prepared.indexes.append(index)
                reply = self.tree.turns[index]
                return SamplingResult(reply.tokens, reply.logprobs, reply.versions, finish=reply.finish)
            models = self._models(policy)
            parent, length = self.tree.parent_of(prepared.prompt, models)
            number = self._take_number(prepared, options, length)
            try:
                made = await unless(
                    session.reaches(*OVER),
                    self._reply(policy, prepared, models, parent, number, digest, options, on_tokens),
                )
            except GenerationFailed as error:
                raise schema_problem(error) or error from None
            finally:
                self._pending.pop(number, None)
                if not any(turn.call == number for turn in self.tree.turns):
                    self._numbers.discard(number)  # a repetition of this call resumes its text
                if self._over or session.result is not None:
                    self.forget()
            if made is None:
                raise session.refusal()
            return made

    def delivered(self, prepared: PreparedPrompt) -> None:
        """The response to a call was sent."""
        assert isinstance(prepared, PreparedCall)
        for index in prepared.indexes:
            self.tree.turns[index].delivered = True

    def settled(self, prepared: PreparedPrompt) -> None:
        """The response to a call has ended: where it was lost, a repetition of the call gets its replies."""
        assert isinstance(prepared, PreparedCall)
        self._repeated.difference_update(prepared.indexes)

    def forget(self) -> None:
        """The agent makes no more calls: drop what was sampled for those that it gave up."""
        self._over = True
        self._job.controller.rooms.rollouts.close_episode(self._job.row.id, self._episode)

    # --- sampling -----------------------------------------------------------------------------------------------------

    def _undelivered(self, digest: bytes) -> int | None:
        """The index of a reply to the same call whose response was lost."""
        for index, turn in enumerate(self.tree.turns):
            if turn.options == digest and not turn.delivered and index not in self._repeated:
                return index
        return None

    def _take_number(self, prepared: PreparedCall, options: CallOptions, stored_length: int) -> int:
        """The least number that no call has. The first ``stored_length`` tokens of the prompt are stored already.
        Raises :class:`CallLimit`."""
        most = self._job.spec.environment.max_turns
        if len(self._numbers) >= most:
            self.session.calls_refused["max_turns"] += 1
            raise CallLimit(
                f"the episode has had its {count_of(most, 'reply')} (environment.max_turns): end it with the"
                " reward it has"
            )
        stored = sum(len(turn.added) + len(turn.tokens) for turn in self.tree.turns)
        if stored + sum(self._pending.values()) >= STORED_CONTEXTS * prepared.chat.context:
            self.session.calls_refused["tokens"] += 1
            raise CallLimit(
                f"the episode has {STORED_CONTEXTS} times the model's context of tokens, the most that is stored,"
                " calls in flight included: end it with the reward it has"
            )
        number = next(number for number in range(len(self._numbers) + 1) if number not in self._numbers)
        self._numbers.add(number)
        self._pending[number] = len(prepared.prompt) - stored_length + self._most_tokens(prepared, options)
        return number

    def _models(self, policy: JobPolicy) -> list[bool]:
        """Whether the policy's model gave each reply."""
        return [self._job.policies[turn.policy].model == policy.model for turn in self.tree.turns]

    def _most_tokens(self, prepared: PreparedCall, options: CallOptions) -> int:
        """The most tokens of the reply to a call."""
        room = prepared.chat.context - len(prepared.prompt)
        return min(self.answer_tokens(prepared.target, options.max_tokens), room)

    async def _reply(
        self,
        policy: JobPolicy,
        prepared: PreparedCall,
        models: list[bool],
        parent: int,
        number: int,
        digest: bytes,
        options: CallOptions,
        on_tokens: Callable[[SamplingResult], None] | None,
    ) -> SamplingResult:
        chat, sampling, tree, prompt = prepared.chat, policy.spec.sampling, self.tree, prepared.prompt
        root = tree.turns[tree.path(parent)[0]].added if parent != NONE else prompt
        seed = options.seed
        line = tree.line_of(parent, number)
        if policy is not self._job.first:
            line += f".{policy.name}"
        stops = [*sampling.stop, *(text for text in options.stop if text not in sampling.stop)]
        generate = protocol.Generate(
            request=f"{self._episode}.{number}",
            adapter=None,
            prompt=prompt,
            shared_prefix=len(root),
            max_tokens=self._most_tokens(prepared, options),
            temperature=sampling.temperature if options.temperature is None else options.temperature,
            seed=derive_seed(self._seed, number) if seed is None else derive_seed(self._seed, "given", seed),
            stop_tokens=chat.ends(stops, [*chat.stop_tokens, *options.stop_tokens]),
            stop=stops,
            logits=options.logits,
            episode=f"{self._episode}{line}",
        )
        continues = parent != NONE or bool(tree.turns)
        reply, result = await self._sample(policy, generate, continues=continues, on_tokens=on_tokens)
        history = b""
        if prepared.history:
            shown = chat.read_reply(reply.tokens, options.stop, prepared.tools)
            history = _digest(prepared.history, b"assistant", message_key(*shown).encode())
        # others may have ended meanwhile, and this call may extend them now
        parent, length = tree.parent_of(prompt, [*models, *(True for _ in tree.turns[len(models) :])])
        turn = AgentTurn(
            reply.tokens, reply.logprobs, reply.versions, finish=reply.finish, text=reply.text, workers=reply.workers,
            queue_seconds=reply.queue_seconds, generation_seconds=reply.generation_seconds, policy=reply.policy,
            call=number, parent=parent, added=prompt[length:], messages=prepared.messages, history=history,
            options=digest, trained=self.trainable(prepared.target, options.temperature, options.logits),
        )  # fmt: skip
        index = tree.add(turn)
        prepared.indexes.append(index)
        self._repeated.add(index)  # its own response is on its way
        if history:
            self._histories[history] = index
        self._job.progress.add_sampled(len(turn.tokens))
        await self._store()
        return result

    # --- the end ------------------------------------------------------------------------------------------------------

    def result(self, outcome: AgentOutcome, seconds: Mapping[str, float]) -> EpisodeResult:
        """The finished episode. Raises ``ValueError`` with the line why it cannot count."""
        turns = self.tree.turns
        if not turns:
            refused = self.session.calls_refused
            tried = (
                f": {count_of(refused.total(), 'call was', 'calls were')} refused ({refused.most_common(1)[0][0]})"
                if refused
                else ""
            )
            raise ValueError(f"its agent ended without a reply of a policy{tried}")
        if self.session.split == "train" and not any(turn.trained for turn in turns):
            raise ValueError(
                f"none of its agent's {count_of(len(turns), 'call')} can be trained on: they change how tokens are"
                " sampled; leave out temperature, top_p, penalties and response_format in some"
            )
        if problem := metrics_problem(outcome.metrics):
            raise ValueError(f"its agent {problem}")
        spoke = [turn.policy for turn in turns]
        for name in outcome.rewards:
            if name not in spoke:
                raise ValueError(
                    f"its agent rewards the policy {short(repr(name))}, which has no reply in the episode; reward"
                    f" those that replied: {', '.join(dict.fromkeys(spoke))}"
                )
        made = assemble(self.tree)
        conversation: list[protocol.ChatMessage] = []
        steps: list[TurnRecord] = []
        order = {index: number for number, index in enumerate(made.order)} | {NONE: -1}
        for number, index in enumerate(made.order):
            turn, parent = turns[index], order[turns[index].parent]
            conversation += turn.messages
            conversation.append(protocol.ChatMessage(role="assistant", content=turn.text))
            steps.append(
                TurnRecord(
                    0.0, {}, turn.finish, len(turn.tokens), turn.queue_seconds, turn.generation_seconds, 0.0,
                    turn.workers, turn.policy, trained=turn.trained, message=len(conversation) - 1,
                    follows=None if parent == number - 1 else parent,
                )
            )  # fmt: skip
        last = steps[-1]
        last.reward, last.metrics, last.rewards = outcome.reward, dict(outcome.metrics), dict(outcome.rewards)
        return EpisodeResult(
            made.trajectories, conversation, [turns[index].text for index in made.order], outcome.reward,
            dict(outcome.metrics), "done", dict(seconds), steps, dict(outcome.rewards),
            [spoke[index] for index in made.order],
        )  # fmt: skip


def _digest(*parts: bytes) -> bytes:
    found = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


def _digests(model: str, messages: Sequence[Message], around: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """The digests of a conversation's beginnings, from the empty one to the whole; ``around`` are the tools and the
    values of its template."""
    found = [_digest(model.encode(), json.dumps(list(around), sort_keys=True, default=str).encode())]
    for message in messages:
        calls = [called(call) for call in message.get("tool_calls") or ()]
        content = message.get("content") or ""
        text = message_key(content, calls) if message["role"] == "assistant" else content
        parts = [message["role"], text]
        if message["role"] != "tool" and message.get("name"):
            parts.append(message["name"])
        found.append(_digest(found[-1], *(part.encode(errors="surrogatepass") for part in parts)))
    return found


def _shown(message: Message) -> protocol.ChatMessage:
    """A message for readers."""
    return protocol.ChatMessage(role=message["role"][:SHOWN_ROLES], content=readable(message)["content"])
