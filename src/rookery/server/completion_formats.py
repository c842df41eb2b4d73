"""Responses of the OpenAI API's completions.

A response has choices as they are sampled, written as chunks of a stream or as one message. A delta is the part of a
choice that was not sent yet; the deltas of a stream, joined, equal the message.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from hashlib import sha256
from random import Random
from typing import Any

import msgspec

from rookery import protocol
from rookery.bounds import TOOLS
from rookery.controller.prompts import PreparedPrompt
from rookery.controller.rollout.request import SamplingResult
from rookery.server.auth import ServiceContext
from rookery.server.openai import CompletionOptions, CompletionRequest
from rookery.server.responses import HEARTBEAT, event_data
from rookery.tokenization.call_readers import CallReader
from rookery.tokenization.call_values import ToolCall
from rookery.tokenization.detokenizer import StreamingText, TokenBytes

ENTRY_BYTES = 100
"""Of a token with its log-probability in a response, about."""

ENTRIES_AT_ONCE = 2000
"""Tokens with their log-probabilities that are encoded in one step: no other thread runs meanwhile."""

Scores = tuple[int, float | None, protocol.Likeliest]
"""A token, its log-probability, and the likeliest tokens in its place."""


class Choice:
    """One completion while it is sampled. ``ids_sent`` and ``logprobs_sent`` count the tokens whose ids and whose
    log-probabilities were sent."""

    def __init__(
        self,
        index: int,
        prompt: PreparedPrompt,
        seed: int,
        stops: Sequence[str],
        reader: CallReader | None = None,
        most_calls: int = TOOLS,
    ) -> None:
        """``reader`` finds the calls of tools in the text; the first ``most_calls`` count."""
        self.index = index
        self.prompt = prompt
        self.seed = seed
        self.text = StreamingText(prompt.chat.token_bytes, stops, special=reader is not None)
        self.reply = SamplingResult()
        self.ids_sent = 0
        self.logprobs_sent = 0
        self.calls_sent = 0
        self.texts: dict[int, str] = {}
        """The parts of the text without calls, each by the number of calls that precede it."""
        self.calls: list[tuple[str, ToolCall]] = []
        """With their ids."""
        self._reader = reader
        self._most_calls = most_calls

    @property
    def content(self) -> str:
        """The text without calls."""
        return "".join(self.texts.values())

    @property
    def finish(self) -> str:
        """OpenAI's reason for the end."""
        return "tool_calls" if self.calls and self.reply.finish == "stop" else self.reply.finish

    def next_text(self, *, last: bool) -> str:
        """The further text that can be sent, given the tokens of ``reply``; their calls are added to ``calls``."""
        tokens, chat = self.reply.tokens[len(self.text.starts) :], self.prompt.chat
        if self._reader is None:
            text = self.text.take(tokens, last=last)
            self._add(text)
        else:
            if tokens and tokens[-1] in chat.stop_tokens:  # the last, whether its end was reported or not
                tokens = tokens[:-1]
            text = ""
            for piece in self._reader.feed(self.text.take(tokens, last=last), last=last):
                if isinstance(piece, str):
                    shown = chat.without_special(piece)
                    self._add(shown)
                    text += shown
                elif len(self.calls) < self._most_calls:
                    seed = f"{self.seed}:{self.index}:{self._prompt_hash}:{len(self.calls)}"
                    self.calls.append((f"call_{Random(seed).getrandbits(96):024x}", piece))
        return text

    def _add(self, text: str) -> None:
        if text:
            self.texts[len(self.calls)] = self.texts.get(len(self.calls), "") + text

    @cached_property
    def _prompt_hash(self) -> str:
        """A hash of the prompt: with it the ids of calls differ between the turns of a conversation that all have one
        seed."""
        return sha256(array("q", self.prompt.prompt).tobytes()).hexdigest()

    def scores(self, numbers: range) -> list[Scores]:
        """The scores of sampled tokens, by their numbers."""
        reply = self.reply
        top = reply.top_logprobs or [[]] * len(reply.tokens)
        return [(reply.tokens[number], reply.logprobs[number], top[number]) for number in numbers]

    def next_scores(self) -> list[Scores]:
        """The scores of the tokens whose text was reached since the last call."""
        first, self.logprobs_sent = self.logprobs_sent, self.text.tokens_shown
        return self.scores(range(first, self.logprobs_sent))

    def prompt_scores(self) -> list[Scores]:
        """The scores of the prompt's tokens: nothing precedes the first, which has no log-probability."""
        scored = [(one.logprob, one.top) for one in self.reply.prompt_logprobs]
        first: list[tuple[float | None, protocol.Likeliest]] = [(None, [])]
        return [(token, *score) for token, score in zip(self.prompt.prompt, [*first, *scored], strict=True)]


class ResponseFormat:
    """The response format of an endpoint: one completion request, whole or streamed."""

    object_type = ""
    chunk_type = ""
    id_prefix = ""

    def __init__(
        self,
        service: ServiceContext,
        options: CompletionOptions,
        model: str,
        *,
        logprobs: bool,
        trainable: bool,
    ) -> None:
        """``trainable``: whether its tokens can be trained on."""
        self.options = options
        self.id = service.context.ids.new(self.id_prefix)
        self._head: dict[str, Any] = {
            "id": self.id, "created": int(service.context.clock.time()), "model": model,
        }  # fmt: skip
        if not trainable:
            self._head["trainable"] = False
        self._logprobs = logprobs

    @property
    def include_usage(self) -> bool:
        """Whether the stream reports token counts."""
        return self.options.stream_options is not None and bool(self.options.stream_options.include_usage)

    def size(self, choices: Sequence[Choice]) -> int:
        """About how many bytes :meth:`body` has, or more."""
        return sum(reply_bytes(choice, self.options.likeliest, prompt=self._has_prompt) for choice in choices)

    @property
    def _has_prompt(self) -> bool:
        return bool(self.options.return_token_ids)

    def body(self, choices: Sequence[Choice], usage: dict[str, int]) -> dict[str, Any]:
        """The body of a response that is not streamed; its choices are encoded."""
        return {**self._head, "object": self.object_type, "choices": self._messages(choices), "usage": usage}

    def _messages(self, choices: Sequence[Choice]) -> list[msgspec.Raw]:
        """The messages of the choices, each encoded before the next one is made: they may be large."""
        return [msgspec.Raw(msgspec.json.encode(self.message(choice))) for choice in choices]

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        """One event of a stream."""
        data = {**self._head, "object": self.chunk_type, "choices": choices}
        if self.include_usage:
            data["usage"] = usage
        return event_data(msgspec.json.encode(data))

    def heartbeat(self) -> bytes:
        """The event of a stream while nothing else is sent: a comment, or a chunk without choices."""
        return HEARTBEAT if self.options.reads_comments else self.chunk([])

    def first_chunk(self, choice: Choice) -> dict[str, Any] | None:
        """The first chunk of a choice, before any token was sampled; None where the format has none."""
        raise NotImplementedError

    def delta(self, choice: Choice, text: str, finish: str | None) -> dict[str, Any]:
        raise NotImplementedError

    def message(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _tokens(self, choice: Choice) -> dict[str, Any]:
        """The extension fields for the tokens that were not sent yet."""
        if not self.options.return_token_ids:
            return {}
        reply, first = choice.reply, choice.ids_sent
        choice.ids_sent = len(reply.tokens)
        return {
            "token_ids": reply.tokens[first:],
            "token_logprobs": reply.logprobs[first:],
            "token_versions": reply.versions[first:],
        }

    def _prompt(self, choice: Choice) -> dict[str, Any]:
        return {"prompt_token_ids": choice.prompt.prompt} if self.options.return_token_ids else {}


class ChatFormat(ResponseFormat):
    object_type = "chat.completion"
    chunk_type = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def first_chunk(self, choice: Choice) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant", "content": ""}
        return {"index": choice.index, "delta": delta, "finish_reason": None, **self._prompt(choice)}

    def delta(self, choice: Choice, text: str, finish: str | None) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": text} if text else {}
        first = choice.calls_sent
        if first < len(choice.calls) and not text:
            choice.calls_sent = len(choice.calls)
            delta["tool_calls"] = [
                {"index": first + number, **call} for number, call in enumerate(_tool_calls(choice)[first:])
            ]
        chunk = {"index": choice.index, "delta": delta, "logprobs": self._logprobs_of(choice), "finish_reason": finish}
        return {**chunk, **self._tokens(choice)}

    def message(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.calls:
            message |= {"content": choice.content or None, "tool_calls": _tool_calls(choice)}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs_of(choice),
            "finish_reason": choice.finish,
            **self._prompt(choice),
            **self._tokens(choice),
        }

    def _logprobs_of(self, choice: Choice) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return {"content": token_entries(choice, choice.next_scores()), "refusal": None}


class TextFormat(ResponseFormat):
    object_type = chunk_type = "text_completion"
    id_prefix = "cmpl"

    options: CompletionRequest

    def first_chunk(self, choice: Choice) -> dict[str, Any] | None:
        if not self.options.return_token_ids:
            return None
        return {"index": choice.index, "text": "", "logprobs": None, "finish_reason": None, **self._prompt(choice)}

    def delta(self, choice: Choice, text: str, finish: str | None) -> dict[str, Any]:
        logprobs = self._logprobs_of(choice, choice.next_scores(), choice.text.starts)
        chunk = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return {**chunk, **self._tokens(choice)}

    @property
    def _has_prompt(self) -> bool:
        return bool(self.options.return_token_ids or self.options.echo)

    def message(self, choice: Choice) -> dict[str, Any]:
        if self.options.echo:
            return {**self._prompt(choice), **self._echo(choice)}
        return {**self._prompt(choice), **self.delta(choice, choice.text.shown, choice.reply.finish)}

    def _echo(self, choice: Choice) -> dict[str, Any]:
        """The prompt, with special tokens as text, and the answer, of which every sampled token is listed."""
        text, starts = choice.prompt.written
        logprobs = None
        if self._logprobs:
            starts = [*starts, *(len(text) + start for start in choice.text.starts)]
            sampled = choice.scores(range(len(choice.reply.tokens)))
            logprobs = self._logprobs_of(choice, [*choice.prompt_scores(), *sampled], starts)
        answer = {"index": choice.index, "text": text + choice.text.shown, "logprobs": logprobs}
        return {**answer, "finish_reason": choice.reply.finish, **self._tokens(choice)}

    def _logprobs_of(self, choice: Choice, scores: list[Scores], starts: list[int]) -> dict[str, Any] | None:
        """``starts``: the offsets of a text whose part up to the last scored token they cover."""
        if not self._logprobs:
            return None
        of, end = choice.prompt.chat.token_bytes, choice.logprobs_sent
        first = 0 if self.options.echo else end - len(scores)
        return {
            "tokens": [_token_text(of.written(token)) for token, _, _ in scores],
            "token_logprobs": [logprob for _, logprob, _ in scores],
            "top_logprobs": encoded(scores, partial(self._likeliest, of)) if self.options.likeliest else None,
            "text_offset": starts[first : first + len(scores)],
        }

    @staticmethod
    def _likeliest(of: TokenBytes, scores: Scores) -> dict[str, float] | None:
        """As OpenAI returns them: by the token's text, with the token itself, which may not be among the likeliest."""
        token, logprob, top = scores
        if logprob is None:
            return None
        line: dict[str, float] = {}
        for one, value in [*top, (token, logprob)]:
            line.setdefault(_token_text(of.written(one)), value)
        return line


def _tool_calls(choice: Choice) -> list[dict[str, Any]]:
    return [
        {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for name, call in choice.calls
    ]


def reply_bytes(choice: Choice, likeliest: int, *, prompt: bool) -> int:
    """About how many bytes a choice has in a response with log-probabilities, or more; with those of its prompt where
    ``prompt`` is true."""
    tokens = len(choice.reply.tokens) + (len(choice.prompt.prompt) if prompt else 0)
    return (1 + tokens * (1 + likeliest)) * ENTRY_BYTES


def token_entries(choice: Choice, scores: list[Scores]) -> msgspec.Raw:
    """Tokens with their log-probabilities and those of the likeliest, as chats and responses have them."""
    written = choice.prompt.chat.token_bytes.written

    def entry(scored: Scores) -> dict[str, Any]:
        token, logprob, top = scored
        return {**_entry(written(token), logprob), "top_logprobs": [_entry(written(one), value) for one, value in top]}

    return encoded(scores, entry)


def encoded(scores: list[Scores], entry: Callable[[Scores], Any]) -> msgspec.Raw:
    """The JSON list of the ``entry`` of each, encoded in portions of :data:`ENTRIES_AT_ONCE`."""
    at_once = max(1, ENTRIES_AT_ONCE // (1 + max((len(top) for _, _, top in scores), default=0)))
    pieces = [
        msgspec.json.encode([entry(one) for one in scores[at : at + at_once]])[1:-1]
        for at in range(0, len(scores), at_once)
    ]
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")


def _entry(data: bytes, logprob: float | None) -> dict[str, Any]:
    """A token with its log-probability in a chat's response."""
    return {"token": _token_text(data), "bytes": list(data), "logprob": logprob}


def _token_text(data: bytes) -> str:
    """A token as text, in OpenAI's notation if it is not a sequence of whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
