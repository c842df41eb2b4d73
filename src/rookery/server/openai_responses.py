"""Responses of the OpenAI API: choices as they are sampled, written as chunks of a stream or as one message.

A delta is the part of a choice that was not sent yet; the deltas of a stream, joined, equal the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rookery.controller.rollout.completions import PreparedPrompt
from rookery.controller.rollout.request import SamplingResult
from rookery.server.auth import ServiceContext
from rookery.server.openai_schemas import CompletionOptions
from rookery.tokenization.detokenizer import StreamingText


class Choice:
    """One completion while it is sampled. ``ids_sent`` and ``logprobs_sent`` count the tokens whose ids and whose
    log-probabilities were sent."""

    def __init__(self, index: int, prompt: PreparedPrompt, seed: int, stops: Sequence[str]) -> None:
        self.index = index
        self.prompt = prompt
        self.seed = seed
        self.text = StreamingText(prompt.chat.token_bytes, stops)
        self.reply = SamplingResult()
        self.ids_sent = 0
        self.logprobs_sent = 0

    def next_text(self, *, last: bool) -> str:
        """The further text that can be sent, given the tokens of ``reply``."""
        return self.text.take(self.reply.tokens[len(self.text.starts) :], last=last)


class ResponseFormat:
    """The response format of an endpoint: one completion request, whole or streamed."""

    object_type = ""
    chunk_type = ""
    id_prefix = ""

    def __init__(self, service: ServiceContext, options: CompletionOptions, model: str, *, logprobs: bool) -> None:
        self.options = options
        self.id = service.ids.new(self.id_prefix)
        self._head = {"id": self.id, "created": int(service.clock.time()), "model": model}
        self._logprobs = logprobs

    @property
    def include_usage(self) -> bool:
        """Whether the stream reports token counts."""
        return self.options.stream_options is not None and self.options.stream_options.include_usage

    def body(self, choices: Sequence[Choice], usage: dict[str, int]) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        messages = [self.message(choice) for choice in choices]
        return {**self._head, "object": self.object_type, "choices": messages, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        """One event of a stream."""
        data = {**self._head, "object": self.chunk_type, "choices": choices}
        if self.include_usage:
            data["usage"] = usage
        return b"data: " + msgspec.json.encode(data) + b"\n\n"

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

    @staticmethod
    def _next_logprobs(choice: Choice) -> range:
        """The tokens whose text was reached since the last call."""
        first, choice.logprobs_sent = choice.logprobs_sent, choice.text.tokens_shown
        return range(first, choice.logprobs_sent)


class ChatFormat(ResponseFormat):
    object_type = "chat.completion"
    chunk_type = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def first_chunk(self, choice: Choice) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": choice.index, "delta": delta, "finish_reason": None, **self._prompt(choice)}

    def delta(self, choice: Choice, text: str, finish: str | None) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        chunk = {"index": choice.index, "delta": delta, "logprobs": self._logprobs_of(choice), "finish_reason": finish}
        return {**chunk, **self._tokens(choice)}

    def message(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text.shown, "refusal": None},
            "logprobs": self._logprobs_of(choice),
            "finish_reason": choice.reply.finish,
            **self._prompt(choice),
            **self._tokens(choice),
        }

    def _logprobs_of(self, choice: Choice) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        entries = []
        for number in self._next_logprobs(choice):
            data = choice.prompt.chat.token_bytes.written(choice.reply.tokens[number])
            entries.append({
                "token": _token_text(data), "bytes": list(data), "logprob": choice.reply.logprobs[number],
                "top_logprobs": [],
            })  # fmt: skip
        return {"content": entries, "refusal": None}


class TextFormat(ResponseFormat):
    object_type = chunk_type = "text_completion"
    id_prefix = "cmpl"

    def first_chunk(self, choice: Choice) -> dict[str, Any] | None:
        if not self.options.return_token_ids:
            return None
        return {"index": choice.index, "text": "", "logprobs": None, "finish_reason": None, **self._prompt(choice)}

    def delta(self, choice: Choice, text: str, finish: str | None) -> dict[str, Any]:
        chunk = {"index": choice.index, "text": text, "logprobs": self._logprobs_of(choice), "finish_reason": finish}
        return {**chunk, **self._tokens(choice)}

    def message(self, choice: Choice) -> dict[str, Any]:
        return {**self._prompt(choice), **self.delta(choice, choice.text.shown, choice.reply.finish)}

    def _logprobs_of(self, choice: Choice) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        shown = self._next_logprobs(choice)
        written = [choice.prompt.chat.token_bytes.written(choice.reply.tokens[number]) for number in shown]
        return {
            "tokens": [_token_text(data) for data in written],
            "token_logprobs": [choice.reply.logprobs[number] for number in shown],
            "top_logprobs": None,
            "text_offset": [choice.text.starts[number] for number in shown],
        }


def _token_text(data: bytes) -> str:
    """A token as text, in OpenAI's notation if it is not a sequence of whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
