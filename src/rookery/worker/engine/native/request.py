"""One generation while the engine holds it, and when its text is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from torch import Tensor

from rookery import protocol

Finish = Literal["", "stop", "length", "abort", "error"]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes the first bytes of a character to while the others are missing."""

_LONGEST_CHARACTER = 4
"""Tokens (bytes, at worst) after which an incomplete character is no character but invalid UTF-8."""


@dataclass
class SharedPrefix:
    """The shared prompt of a group under one adapter. ``filled`` tokens of it are cached; ``logits`` [vocab], those
    after its last token, let every member start without computing anything."""

    key: tuple[str, tuple[int, ...]]
    slot: Any
    filled: int = 0
    logits: Tensor | None = None
    users: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.key[1]

    @property
    def complete(self) -> bool:
        return self.filled == len(self.tokens)


@dataclass(eq=False)
class EngineRequest:
    """``tokens`` are the answer so far, given ones included; ``logprobs`` those of the sampled ones. The cache holds
    ``filled`` tokens of the private tail, which is ``prompt[shared:] + tokens``."""

    params: protocol.Generate
    """As it was asked for, but for the adapter: that of the next token."""
    key: str
    """The adapter of the next token."""
    stops: StopStrings
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    finish: Finish = ""
    error: str = ""
    num_drained: int = 0
    """Answer tokens handed out by ``drain``, given ones included."""
    prefix: SharedPrefix | None = None
    slot: Any = None
    filled: int = 0
    cached_by: tuple[str, ...] = ()
    """The adapters that computed what is cached of the tail, oldest first."""
    keeps_cache: bool = field(init=False)
    """Whether it may go on from a cache that an older version of its policy computed."""
    versions: list[tuple[int, protocol.AdapterRef | None]] = field(init=False)
    """What sampled: (number of the first answer token, version), oldest first."""
    scores: dict[int, protocol.PromptLogprob] = field(default_factory=dict)
    """Of prompt tokens, by position."""

    def __post_init__(self) -> None:
        self.keeps_cache = self.params.in_flight == "switch"
        self.versions = [(len(self.tokens), self.params.adapter)]

    @property
    def scored_positions(self) -> range:
        """Positions in the prompt whose tokens are to be scored."""
        length = len(self.params.prompt)
        return range(max(1, length - self.params.prompt_logprobs), length)

    @property
    def shared(self) -> int:
        return self.params.shared_prefix

    @property
    def prefix_cached(self) -> bool:
        """Whether its shared prompt, where it has one, is cached."""
        return self.prefix is None or self.prefix.complete

    @property
    def tail(self) -> list[int]:
        return self.params.prompt[self.params.shared_prefix :] + self.tokens

    @property
    def tail_length(self) -> int:
        return len(self.params.prompt) - self.params.shared_prefix + len(self.tokens)

    def switch_adapter(self, ref: protocol.AdapterRef) -> None:
        """What is sampled from now on is of this version."""
        self.params = msgspec.structs.replace(self.params, adapter=ref)
        self.key = ref.hash
        self.versions.append((len(self.tokens), ref))

    def append(self, token: int, logprob: float, context: int) -> None:
        """Takes a sampled token and decides whether it ends the text. ``context`` is the longest sequence."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.check_finished(context)

    def check_finished(self, context: int) -> None:
        """Sets ``finish`` when the tokens so far end the text."""
        if self.tokens and (self.tokens[-1] in self.params.stop_tokens or self.stops.found(self.tokens)):
            self.finish = "stop"
        elif len(self.tokens) >= self.params.max_tokens or len(self.params.prompt) + len(self.tokens) >= context:
            self.finish = "length"

    def chunks(self) -> list[protocol.TokenChunk]:
        """What has not been handed out yet, in one chunk per version that sampled it; the last one tells the end."""
        begins = [
            self.num_drained,
            *(begin for begin, _ in self.versions if self.num_drained < begin < len(self.tokens)),
        ]
        self.num_drained = len(self.tokens)
        chunks = [self._chunk(*part) for part in zip(begins, [*begins[1:], self.num_drained], strict=True)]
        last = chunks[-1]
        last.finish, last.error = self.finish, self.error
        if self.finish:
            last.prompt_logprobs = [self.scores[at] for at in self.scored_positions if at in self.scores]
        return chunks

    def _chunk(self, begin: int, end: int) -> protocol.TokenChunk:
        """Answer tokens of one version."""
        given = len(self.tokens) - len(self.logprobs)
        ref = next(ref for since, ref in reversed(self.versions) if since <= begin)
        return protocol.TokenChunk(
            request=self.params.request,
            offset=begin,
            tokens=self.tokens[begin:end],
            logprobs=self.logprobs[begin - given : end - given],
            version=ref.version if ref else 0,
            policy=ref.policy if ref else "",
        )


class StopStrings:
    """Finds stop strings in the text of a growing list of tokens, decoding each token a bounded number of times.

    A text is decoded in pieces: a piece grows until its text ends on a whole character and the next begins with the
    piece's last tokens as context, since a token's text may depend on the one before it (leading spaces)."""

    def __init__(self, stops: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self.stops = [stop for stop in stops if stop]
        self.decode = decode
        self.text = ""
        self._begin = 0
        """First token of the context."""
        self._end = 0
        """Tokens whose text is in ``text``."""

    def found(self, tokens: list[int]) -> bool:
        """Whether a stop string is complete; ``tokens`` only ever grows between calls."""
        if not self.stops:
            return False
        while self._end < len(tokens):
            before = self.decode(tokens[self._begin : self._end])
            for end in range(self._end + 1, len(tokens) + 1):
                text = self.decode(tokens[self._begin : end])
                if not text.endswith(_UNFINISHED) or end - self._end >= _LONGEST_CHARACTER:
                    break
            else:
                return False
            seen = len(self.text)
            self.text += text[len(before) :]
            self._begin, self._end = self._end, end
            for stop in self.stops:
                if stop in self.text[max(0, seen - len(stop) + 1) :]:
                    return True
        return False
