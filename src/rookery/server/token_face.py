"""Requests of vLLM's token face: token ids in, token ids out, with the log-probability of each.

It is what the ``renderers`` client of verifiers calls for training: the caller renders and parses, so no tool and no
template is of the server's concern. Arguments are accepted and refused as in ``/v1/completions``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from rookery.bounds import ENTRIES, INTEGER, Line, Token
from rookery.server.completion_formats import Choice, ResponseFormat
from rookery.server.openai import CompletionOptions, OpenAIModel

STOP_TOKENS = 256
"""Token ids that end an answer: they travel with the request."""


class TokenSampling(CompletionOptions):
    """``sampling_params``: the options of a completion, and these."""

    model: Line = Field("", description="No effect here; the request's own model counts")
    stop_token_ids: list[Token] | None = Field(
        None, max_length=STOP_TOKENS, description="End the answer, in addition to the model's own"
    )
    logprobs: Literal[0, 1] | None = Field(None, description="The sampled tokens' log-probabilities, which always come")
    skip_special_tokens: bool | None = Field(None, description="No effect: the answer is token ids")
    detokenize: bool | None = Field(None, description="No effect: the answer is token ids")
    stream: Literal[False] | None = None

    @property
    def stop_tokens(self) -> list[int]:
        return self.stop_token_ids or []


class TokenRequest(OpenAIModel):
    """One prompt as token ids."""

    model: Line = Field(min_length=1, description="A base model, or JOB, JOB:latest, JOB@VERSION with an id or name")
    token_ids: list[Token] = Field(min_length=1, max_length=ENTRIES, fail_fast=True)
    sampling_params: TokenSampling = Field(default_factory=TokenSampling)
    cache_salt: Line | None = Field(None, description="No effect: no cache is shared between requests")
    stream: Literal[False] | None = None
    priority: int | None = Field(None, ge=-INTEGER, le=INTEGER, description="No effect: tenants take turns")
    return_token_ids: bool | None = Field(None, description="The prompt's token ids in the response")


class TokenFormat(ResponseFormat):
    """The response of the token face."""

    id_prefix = "generate"

    def body(self, choices: Sequence[Choice], usage: dict[str, int]) -> dict[str, Any]:
        head = {"request_id": self.id, **{name: value for name, value in self._head.items() if name != "id"}}
        prompt = {"prompt_token_ids": choices[0].prompt.prompt} if self.options.return_token_ids else {}
        return {**head, **prompt, "choices": self._messages(choices), "usage": usage}

    def message(self, choice: Choice) -> dict[str, Any]:
        reply = choice.reply
        scored = zip(reply.tokens, reply.logprobs, strict=True)
        content = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in scored]
        return {
            "index": choice.index,
            "token_ids": reply.tokens,
            "logprobs": {"content": content},
            "finish_reason": reply.finish,
            "token_versions": reply.versions,
        }
