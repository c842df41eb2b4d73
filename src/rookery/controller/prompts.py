"""Prompts of calls to the OpenAI API: tokenized, checked against a model's context and its engines; and what such calls
are sampled from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from rookery import protocol
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.rollout.request import GenerationFailed, SamplingResult
from rookery.controller.targets import Target
from rookery.errors import UserError
from rookery.tokenization.chat import NO_VALUES, Chat, Message, PromptTooLong, check_letters
from rookery.tokenization.detokenizer import StreamingText
from rookery.tokenization.grammar import NOT_FOLLOWED, REPLY_FAILED
from rookery.tokenization.token_ids import shared_ids

UNCHANGED_LOGITS = {"vllm"}
"""Engines that draw from the model's own distribution only."""


def _default(name: str) -> object:
    """The default of a field of :class:`~rookery.protocol.LogitsParams`."""
    return getattr(protocol.LogitsParams(), name)


@dataclass(frozen=True)
class PreparedPrompt:
    """A tokenized prompt that fits its target's context."""

    target: Target
    chat: Chat
    prompt: list[int]

    @cached_property
    def written(self) -> tuple[str, list[int]]:
        """The text, with special tokens written out, and the offset of each token in it. It takes some µs a token, so
        a thread asks first."""
        text = StreamingText(self.chat.token_bytes, special=True)
        text.take(self.prompt, last=True)
        return text.shown, text.starts


@dataclass(frozen=True)
class CallOptions:
    """How a reply is sampled. None leaves a value to what samples it."""

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    """End the reply in addition to the model's own."""
    kind: str = "chat"
    """The class of the request, by which it has objectives."""
    logits: protocol.LogitsParams | None = None
    score_prompt: bool = False
    """Whether the log-probabilities of the prompt are computed too."""


def prepare_prompt(
    target: Target,
    chat: Chat,
    source: Sequence[Message] | str | Sequence[int],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    opening: str = "",
    values: Mapping[str, Any] = NO_VALUES,
) -> PreparedPrompt:
    """``source`` is a conversation (with ``tools``, the ``opening`` of its reply, and further ``values`` of the
    template), a text to complete, or its token ids. Raises :class:`UserError`."""
    check_letters(chat, source, tools)
    if isinstance(source, str):
        prompt = chat.encode(source)
    elif source and isinstance(source[0], int):
        prompt = [token for token in source if isinstance(token, int)]
        unknown = next((token for token in prompt if not chat.token_bytes.known(token)), None)
        if unknown is not None:
            raise UserError(f"the prompt has the token id {unknown}, which {target.model} does not have")
    else:
        messages = [dict(message) for message in source if isinstance(message, Mapping)]
        prompt = chat.conversation(messages, tools, opening=opening, values=values)
    if not prompt:
        raise UserError("the prompt is empty: an answer needs at least one token to follow")
    if len(prompt) >= chat.context:
        raise PromptTooLong.of(chat.context, len(prompt))
    return PreparedPrompt(target, chat, shared_ids(prompt))


def answer_room(fleet: Fleet, model: str, context: int, prompt: int) -> int:
    """Tokens of an answer without a limit to a prompt of so many: as many as follow it in the model's ``context``, or
    in a shorter one where all workers of the model hold less. At least 1; that request is refused by the workers."""
    longest = fleet.longest_text(model) or context
    return max(1, min(context, longest) - prompt)


def check_logits(fleet: Fleet, target: Target, logits: protocol.LogitsParams | None) -> None:
    """Whether an engine of the target's model changes logits as asked; workers whose engine does not pass the request
    on. Raises :class:`UserError`."""
    if logits is None:
        return
    engines = {worker.hello.engine for worker in fleet.all() if worker.has_role("rollout", target.model)}
    if engines and engines <= UNCHANGED_LOGITS:
        asked = ", ".join(name for name in logits.__struct_fields__ if getattr(logits, name) != _default(name))
        raise UserError(
            f"{asked}: the workers of {target.model} run the engine {min(engines)}, which does not support it; leave"
            " it out, or add a worker with the native or transformers engine"
        )


class Sampling(Protocol):
    """The models of the OpenAI API: base models and versions
    (:class:`~rookery.controller.completions.Completions`), or the policies of an agent's episode."""

    async def open(self, tenant: str, target: str) -> tuple[Target, Chat]: ...

    def prepare(
        self,
        target: Target,
        chat: Chat,
        source: Sequence[Message] | str | Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        opening: str = "",
        values: Mapping[str, Any] = NO_VALUES,
    ) -> PreparedPrompt: ...

    def trainable(self, target: Target, temperature: float | None, logits: protocol.LogitsParams | None) -> bool: ...

    def check_logits(self, target: Target, logits: protocol.LogitsParams | None) -> None: ...

    def answer_tokens(self, target: Target, limit: int | None) -> int: ...

    def draw_seed(self) -> int: ...

    def admitted(
        self, tenant: str, prompts: Sequence[PreparedPrompt], options: CallOptions
    ) -> AbstractContextManager[None]: ...

    async def generate(
        self,
        tenant: str,
        prepared: PreparedPrompt,
        options: CallOptions,
        on_tokens: Callable[[SamplingResult], None] | None = None,
    ) -> SamplingResult: ...

    def delivered(self, prepared: PreparedPrompt) -> None: ...

    def settled(self, prepared: PreparedPrompt) -> None: ...


def schema_problem(error: GenerationFailed) -> UserError | None:
    """The client's error where a schema made a generation fail."""
    if any(text in str(error) for text in (NOT_FOLLOWED, REPLY_FAILED)):
        return UserError(f"{error}; make the schema simpler")
    return None
