"""Sampled tokens: as chunks of one request on their way to the service, and as the log that the chunks fill."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import inf, nan
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from rookery.bounds import ENTRIES, MAX_FRAME, Count, ErrorText, Integer, Name, Token
from rookery.errors import count_of
from rookery.protocol.common import Struct, floats, integers

Likeliest = Annotated[list[tuple[Token, float]], Meta(max_length=1000)]
"""Tokens with their natural log-probabilities, best first."""

TopLogprobs = Annotated[list[Likeliest], Meta(max_length=ENTRIES)]
"""The likeliest tokens in the place of each token."""


NO_TOKEN = -1
"""In a row of likeliest tokens, where there are fewer."""

Numbers = Annotated[bytes, Meta(max_length=MAX_FRAME)]
"""Little-endian int32 or float32."""


class PromptLogprob(NamedTuple):
    """A prompt token's natural log-probability at temperature 1, and the likeliest tokens in its place with theirs,
    best first."""

    logprob: float
    top: Likeliest


class PromptLogprobs(Struct, kw_only=True):
    """The :class:`PromptLogprob` of consecutive prompt tokens as arrays: as Python objects they take fifteen times the
    memory. ``logprobs`` (float32) has one number for each token; ``top_tokens`` (int32) and ``top_logprobs`` (float32)
    have equally many for each token, all tokens after one another."""

    first: Count = 0
    """The number of the first token among those that are scored."""
    logprobs: Numbers = b""
    top_tokens: Numbers = b""
    top_logprobs: Numbers = b""

    def __len__(self) -> int:
        return len(self.logprobs) // 4

    def __iter__(self) -> Iterator[PromptLogprob]:
        width, tokens, logprobs = self.width, integers(self.top_tokens), floats(self.top_logprobs)
        for at, logprob in enumerate(floats(self.logprobs)):
            row = slice(at * width, (at + 1) * width)
            likeliest = zip(tokens[row], logprobs[row], strict=True)
            yield PromptLogprob(logprob, [(token, value) for token, value in likeliest if token != NO_TOKEN])

    @property
    def width(self) -> int:
        """Likeliest tokens of each token."""
        return len(self.top_tokens) // max(1, len(self.logprobs))

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return len(self.logprobs) + len(self.top_tokens) + len(self.top_logprobs)

    def fits(self, width: int, known: int, wanted: int) -> bool:
        """Whether these are scores of ``width`` likeliest tokens that follow the first ``known`` of ``wanted``."""
        whole = len(self.logprobs) % 4 == 0 and len(self.top_tokens) == len(self.top_logprobs)
        whole = whole and len(self.top_tokens) == width * len(self.logprobs)
        return whole and self.first <= known and self.first + len(self) <= wanted

    def part(self, begin: int, end: int) -> PromptLogprobs:
        """The scores from number ``begin`` of this list up to ``end``."""
        row, top = slice(4 * begin, 4 * end), slice(4 * begin * self.width, 4 * end * self.width)
        return PromptLogprobs(
            first=self.first + begin,
            logprobs=self.logprobs[row],
            top_tokens=self.top_tokens[top],
            top_logprobs=self.top_logprobs[top],
        )

    def after(self, unscored: int, width: int) -> PromptLogprobs:
        """These scores after ``unscored`` tokens without any: NaN, and ``width`` times no token."""
        return PromptLogprobs(
            logprobs=(array("f", [nan]) * unscored).tobytes() + self.logprobs,
            top_tokens=(array("i", [NO_TOKEN]) * (unscored * width)).tobytes() + self.top_tokens,
            top_logprobs=(array("f", [-inf]) * (unscored * width)).tobytes() + self.top_logprobs,
        )

    def receive(self, part: PromptLogprobs) -> None:
        """Append the scores of ``part`` that follow these, which begin at number 0. Raises ``ValueError`` for a gap."""
        known = len(self) - part.first
        if known < 0:
            raise ValueError(f"scores from number {part.first} do not follow {count_of(len(self), 'score')}")
        new = part.part(known, len(part)) if known else part
        self.logprobs += new.logprobs
        self.top_tokens += new.top_tokens
        self.top_logprobs += new.top_logprobs


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
    prompt_logprobs: PromptLogprobs | None = None
    """Of the prompt's last tokens, as many as were requested. All have arrived with the last chunk; chunks without
    tokens may bring parts before it."""
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
            raise ValueError(
                f"{count_of(count, 'token')} with {len(logprobs)} log-probabilities and"
                f" {count_of(len(versions), 'version')}"
            )
        if len(self.tokens) + count > ENTRIES:
            raise ValueError(
                f"a log of {count_of(len(self.tokens), 'token')} has no room for {count} more: at most {ENTRIES}"
            )
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
            raise ValueError(
                f"tokens from number {chunk.offset} do not follow {count_of(start + len(self.tokens), 'token')}"
            )
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
