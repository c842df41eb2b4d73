"""Sampled tokens: as chunks of one request on their way to the service, and as the log that the chunks fill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rookery.bounds import ENTRIES, Count, ErrorText, Integer, Name, Token
from rookery.protocol.common import Struct

Likeliest = Annotated[list[tuple[Token, float]], Meta(max_length=1000)]
"""Tokens with their natural log-probabilities, best first."""

TopLogprobs = Annotated[list[Likeliest], Meta(max_length=ENTRIES)]
"""The likeliest tokens in the place of each token."""


class PromptLogprob(Struct, kw_only=True):
    """A prompt token's natural log-probability at temperature 1, and the likeliest tokens in its place with theirs,
    best first."""

    logprob: float
    top: Likeliest = msgspec.field(default_factory=list)


class TokenChunk(Struct, kw_only=True):
    """Newly sampled tokens of one request. ``finish`` is empty until the last chunk.

    ``logprobs`` are natural logs under the distribution sampled from (temperature applied). ``version`` is the adapter
    version that the engine applied to these tokens (0 with ``policy`` empty: the base model)."""

    request: Name
    assignment: Name = ""
    """Of :class:`~rookery.protocol.Generate`: the receiver ignores a chunk of another assignment than the request's
    present one."""
    offset: Count
    tokens: Annotated[list[Integer], Meta(max_length=ENTRIES)]
    """The service checks them, and counts against the request where they cannot be."""
    logprobs: Annotated[list[float], Meta(max_length=ENTRIES)]
    version: Count
    policy: Name = ""
    finish: Literal["", "stop", "length", "abort", "error"] = ""
    error: ErrorText = ""
    """With ``abort``: why this worker can never generate the request; empty where it may later."""
    prompt_logprobs: Annotated[list[PromptLogprob], Meta(max_length=ENTRIES)] = msgspec.field(default_factory=list)
    """With the last chunk: of the prompt's last tokens, as many as were requested."""
    top_logprobs: TopLogprobs = msgspec.field(default_factory=list)
    """One entry for each of ``tokens``, where requested; else empty."""


class TokenLog(msgspec.Struct):
    """Sampled tokens in their order: parallel lists, one entry per token, which only grow together and hold at most
    :data:`~rookery.bounds.ENTRIES` tokens. ``versions`` are those of the adapter that sampled each token."""

    tokens: Annotated[list[int], Meta(max_length=ENTRIES)] = []
    logprobs: Annotated[list[float], Meta(max_length=ENTRIES)] = []
    versions: Annotated[list[int], Meta(max_length=ENTRIES)] = []

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        """Append tokens. Raises ``ValueError`` for lists of different lengths, and for more tokens than a log holds."""
        count = len(tokens)
        if not count == len(logprobs) == len(versions):
            raise ValueError(f"{count} tokens with {len(logprobs)} log-probabilities and {len(versions)} versions")
        if len(self.tokens) + count > ENTRIES:
            raise ValueError(f"a log of {len(self.tokens)} tokens has no room for {count} more: at most {ENTRIES}")
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)

    def append(self, token: int, logprob: float, version: int) -> None:
        """Append one token of a text whose length the caller bounds."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def receive(self, chunk: TokenChunk, start: int = 0) -> int:
        """Append the part of ``chunk`` that extends this log, whose first token has the number ``start``. Returns the
        number of new tokens: none for a chunk that came before. Raises ``ValueError`` for one that leaves a gap."""
        skip = start + len(self.tokens) - chunk.offset
        if skip < 0:
            raise ValueError(f"tokens from number {chunk.offset} do not follow {start + len(self.tokens)} tokens")
        tokens, logprobs = (chunk.tokens[skip:], chunk.logprobs[skip:]) if skip else (chunk.tokens, chunk.logprobs)
        count = len(tokens)
        self.extend(tokens, logprobs, [chunk.version] * count)
        return count

    def runs(self, begin: int, end: int | None = None) -> Iterator[tuple[int, int]]:
        """(first, end) of each run of tokens of one version from token ``begin`` on, in order."""
        for _, run in groupby(self.versions[begin:end]):
            first, begin = begin, begin + sum(1 for _ in run)
            yield first, begin

    def clear(self) -> None:
        """Delete all tokens."""
        for entries in (self.tokens, self.logprobs, self.versions):
            entries.clear()
