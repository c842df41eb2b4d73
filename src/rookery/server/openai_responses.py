"""How the OpenAI face writes answers: choices while they grow, as pieces of a stream or as a whole.

A *piece* is what of a choice was not sent yet; the pieces of a stream, joined, are what the whole answer says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rookery.controller.rollout.completions import PreparedPrompt
from rookery.controller.rollout.scheduler import SamplingResult
from rookery.server.auth import ServiceContext
from rookery.server.openai_schemas import CompletionOptions
from rookery.tokenization.detokenizer import StreamingText


class Choice:
    """One answer while it grows. ``told`` and ``logged`` are how many of its tokens were sent, as ids and with their
    text."""

    def __init__(self, index: int, question: PreparedPrompt, seed: int, stops: Sequence[str]) -> None:
        self.index = index
        self.question = question
        self.seed = seed
        self.text = StreamingText(question.chat.pieces, stops)
        self.reply = SamplingResult()
        self.told = 0
        self.logged = 0

    def take(self, *, last: bool) -> str:
        """Takes in what came; the text that can be shown further."""
        return self.text.take(self.reply.tokens[len(self.text.starts) :], last=last)


class ResponseFormat:
    """How an endpoint writes its answers."""

    kind = ""
    stream_kind = ""
    prefix = ""

    def __init__(self, service: ServiceContext, asked: CompletionOptions, model: str, *, logprobs: bool) -> None:
        self.asked = asked
        self.id = service.ids.new(self.prefix)
        self._head = {"id": self.id, "created": int(service.clock.time()), "model": model}
        self._logprobs = logprobs

    def body(self, choices: Sequence[Choice], usage: dict[str, int]) -> dict[str, Any]:
        """The whole answer."""
        written = [self.message(choice) for choice in choices]
        return {**self._head, "object": self.kind, "choices": written, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        """One event of a stream."""
        data = {**self._head, "object": self.stream_kind, "choices": choices}
        options = self.asked.stream_options
        if options is not None and options.include_usage:
            data["usage"] = usage
        return b"data: " + msgspec.json.encode(data) + b"\n\n"

    def first_chunk(self, choice: Choice) -> dict[str, Any] | None:
        """The first piece of a choice, before anything was sampled."""
        raise NotImplementedError

    def delta(self, choice: Choice, text: str, finish: str | None) -> dict[str, Any]:
        raise NotImplementedError

    def message(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _tokens(self, choice: Choice) -> dict[str, Any]:
        """The extension's fields for the tokens that were not told yet."""
        if not self.asked.return_token_ids:
            return {}
        reply, first = choice.reply, choice.told
        choice.told = len(reply.tokens)
        return {
            "token_ids": reply.tokens[first:],
            "token_logprobs": reply.logprobs[first:],
            "token_versions": reply.versions[first:],
        }

    def _prompt(self, choice: Choice) -> dict[str, Any]:
        return {"prompt_token_ids": choice.question.prompt} if self.asked.return_token_ids else {}

    @staticmethod
    def _shown(choice: Choice) -> range:
        """The tokens whose text began to show since the last call."""
        first, choice.logged = choice.logged, choice.text.tokens_shown
        return range(first, choice.logged)


class ChatFormat(ResponseFormat):
    kind = "chat.completion"
    stream_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def first_chunk(self, choice: Choice) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": choice.index, "delta": delta, "finish_reason": None, **self._prompt(choice)}

    def delta(self, choice: Choice, text: str, finish: str | None) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        found = {"index": choice.index, "delta": delta, "logprobs": self._log(choice), "finish_reason": finish}
        return {**found, **self._tokens(choice)}

    def message(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text.shown, "refusal": None},
            "logprobs": self._log(choice),
            "finish_reason": choice.reply.finish,
            **self._prompt(choice),
            **self._tokens(choice),
        }

    def _log(self, choice: Choice) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        entries = []
        for number in self._shown(choice):
            data = choice.question.chat.pieces.written(choice.reply.tokens[number])
            entries.append({
                "token": _token_text(data), "bytes": list(data), "logprob": choice.reply.logprobs[number],
                "top_logprobs": [],
            })  # fmt: skip
        return {"content": entries, "refusal": None}


class TextFormat(ResponseFormat):
    kind = stream_kind = "text_completion"
    prefix = "cmpl"

    def first_chunk(self, choice: Choice) -> dict[str, Any] | None:
        if not self.asked.return_token_ids:
            return None
        return {"index": choice.index, "text": "", "logprobs": None, "finish_reason": None, **self._prompt(choice)}

    def delta(self, choice: Choice, text: str, finish: str | None) -> dict[str, Any]:
        found = {"index": choice.index, "text": text, "logprobs": self._log(choice), "finish_reason": finish}
        return {**found, **self._tokens(choice)}

    def message(self, choice: Choice) -> dict[str, Any]:
        return {**self._prompt(choice), **self.delta(choice, choice.text.shown, choice.reply.finish)}

    def _log(self, choice: Choice) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        shown = self._shown(choice)
        written = [choice.question.chat.pieces.written(choice.reply.tokens[number]) for number in shown]
        return {
            "tokens": [_token_text(data) for data in written],
            "token_logprobs": [choice.reply.logprobs[number] for number in shown],
            "top_logprobs": None,
            "text_offset": [choice.text.starts[number] for number in shown],
        }


def _token_text(data: bytes) -> str:
    """A token as text; OpenAI's way of writing one that is no whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
