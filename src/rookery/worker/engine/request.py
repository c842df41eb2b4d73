"""The state of one generation in the engine, the changes of its logits, and when its text is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isfinite, nan
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from rookery import protocol
from rookery.errors import count_of
from rookery.tokenization.detokenizer import StopSearch
from rookery.tokenization.grammar import ReplyGrammar
from rookery.worker.memory import TooSmall

Finish = Literal["", "stop", "length", "abort", "error"]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""The text that a tokenizer decodes the first bytes of a character to while the others are missing."""

_LONGEST_CHARACTER = 4
"""Tokens (bytes, at worst) after which an incomplete character is invalid UTF-8."""


def validate(generate: protocol.Generate, vocabulary: int, context: int) -> None:
    """Raises ``ValueError`` with a one-line reason for a request that no engine of this vocabulary runs, and
    :class:`~rookery.worker.memory.TooSmall` for one that is longer than this ``context``."""
    length = len(generate.prompt) + len(generate.prefix_tokens)
    if not generate.prompt:
        raise ValueError("the prompt is empty")
    if len(generate.prompt) >= context or length > context:
        raise TooSmall(f"the prompt has {count_of(length, 'token')}; the context is {context} here")
    if not 0 <= generate.shared_prefix <= len(generate.prompt):
        raise ValueError(
            f"shared_prefix is {generate.shared_prefix}, the prompt has {count_of(len(generate.prompt), 'token')}"
        )
    if generate.prompt_logprobs and generate.shared_prefix:
        raise ValueError("prompt_logprobs need a prompt without a shared_prefix")
    if not all(0 <= token < vocabulary for token in (*generate.prompt, *generate.prefix_tokens)):
        raise ValueError(f"a token id is outside the vocabulary of {vocabulary}")
    if generate.logits is not None and not all(0 <= token < vocabulary for token, _ in generate.logits.logit_bias):
        raise ValueError(f"logit_bias names a token id outside the vocabulary of {vocabulary}")
    if generate.max_tokens < 1:
        raise ValueError(f"max_tokens is {generate.max_tokens}; it must be at least 1")
    if not (isfinite(generate.temperature) and generate.temperature >= 0):
        raise ValueError(f"temperature is {generate.temperature}; it must be 0 or more")


class RequestLogits:
    """Changes of a request's logits before its next token is drawn: a grammar, biases, penalties, truncation.

    * Requests without such parameters have none: their logits are not read here.
    * The reported log-probability is that of the distribution after all changes. Tokens that it excludes have none.
    * The state follows from the tokens of the request alone: a text that moves to another worker continues as it began.
    """

    def __init__(self, params: protocol.LogitsParams, prompt: list[int], grammar: ReplyGrammar | None = None) -> None:
        """``grammar``: that of the schema. Raises ``ValueError`` for a schema without one."""
        self.params = params
        self._prompt = torch.tensor(sorted(set(prompt)))
        total: dict[int, float] = {}
        for token, bias in params.logit_bias:
            total[token] = total.get(token, 0.0) + bias
        self._biased = torch.tensor(list(total), dtype=torch.int64)
        self._biases = torch.tensor(list(total.values()), dtype=torch.float32)
        if params.schema and grammar is None:
            raise ValueError("this engine has no grammar to follow a schema with")
        self.grammar = grammar

    def apply(self, logits: Tensor, tokens: list[int], temperature: float) -> Tensor:
        """The logits [vocab] float32 from which the token after ``tokens``, the answer so far, is drawn. Raises
        as :meth:`ReplyGrammar.allowed`."""
        line = logits.float().clone()
        if len(self._biased):
            self._biased, self._biases = self._biased.to(line.device), self._biases.to(line.device)  # the first time
            line[self._biased] += self._biases
        self._penalize(line, tokens)
        if self.grammar is not None:
            allowed = torch.from_numpy(self.grammar.allowed(tokens, len(line))).to(line.device)
            line.masked_fill_(~allowed, -torch.inf)
        if temperature > 0:
            self._truncate(line, temperature)
        return line

    def likeliest(self, line: Tensor, temperature: float) -> list[tuple[int, float]]:
        """The likeliest tokens of changed logits with their log-probabilities, best first."""
        count = min(self.params.top_logprobs, len(line))
        if not count:
            return []
        values, tokens = (line / (temperature or 1.0)).log_softmax(-1).topk(count)
        pairs = zip(tokens.tolist(), values.tolist(), strict=True)
        return [(token, value) for token, value in pairs if value > -torch.inf]

    def _penalize(self, line: Tensor, tokens: list[int]) -> None:
        """Repetition divides or multiplies the logits of all tokens of prompt and answer (Keskar et al.,
        arXiv:1909.05858); frequency and presence subtract for those of the answer, as OpenAI defines them."""
        params = self.params
        if params.repetition_penalty == 1.0 and not (params.frequency_penalty or params.presence_penalty):
            return
        written, counts = torch.tensor(tokens, dtype=torch.int64, device=line.device).unique(return_counts=True)
        if params.repetition_penalty != 1.0:
            seen = torch.cat((self._prompt.to(line.device), written)).unique()
            values = line[seen]
            line[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        if params.frequency_penalty or params.presence_penalty:
            line[written] -= params.frequency_penalty * counts.float() + params.presence_penalty

    def _truncate(self, line: Tensor, temperature: float) -> None:
        """``min_p`` first, then ``top_k``, then ``top_p`` of what is left. The likeliest token always stays, and so do
        tokens as likely as the last that stays by ``top_k``."""
        params = self.params
        if params.min_p > 0:
            p = (line / temperature).softmax(-1)
            line.masked_fill_(p < params.min_p * p.max(), -torch.inf)
        if 0 < params.top_k < len(line):
            line.masked_fill_(line < line.topk(params.top_k).values[-1], -torch.inf)
        if params.top_p < 1:
            p, order = (line / temperature).softmax(-1).sort(descending=True, stable=True)
            outside = p.cumsum(-1) - p >= params.top_p  # the tokens before it have that much already
            outside[0] = False
            line[order[outside]] = -torch.inf


@dataclass
class SharedPrefix:
    """The shared prompt of a group under one adapter. ``filled`` of its tokens are cached; ``hidden`` [hidden] is the
    state after its last token, and ``logits`` [vocab] follow from it: with them every member of the group starts. They
    are kept as long as the prompt has users; a retained one keeps its state, which takes a hundredth of the memory."""

    key: tuple[str, tuple[int, ...]]
    """(adapter, tokens)"""
    slot: Any
    filled: int = 0
    hidden: Tensor | None = None
    logits: Tensor | None = None
    users: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.key[1]

    @property
    def complete(self) -> bool:
        return self.filled == len(self.tokens)

    @property
    def missing(self) -> int:
        """Tokens that are not cached."""
        return len(self.tokens) - self.filled


class PromptScores:
    """The log-probabilities of a prompt's tokens at ``positions`` as they become known, each with those of the
    ``width`` likeliest tokens in its place: float32 and int32, a tenth of the memory that Python objects take."""

    def __init__(self, positions: range, width: int) -> None:
        self._first = positions.start
        self._logprobs = np.full(len(positions), nan, "<f4")
        self._top_tokens = np.full((len(positions), width), protocol.NO_TOKEN, "<i4")
        self._top_logprobs = np.full((len(positions), width), -inf, "<f4")

    def put(self, position: int, logprobs: np.ndarray, tokens: np.ndarray, likeliest: np.ndarray) -> None:
        """Set the scores [tokens], and the tokens and log-probabilities [tokens, at most ``width``], from a position
        on."""
        rows = slice(position - self._first, position - self._first + len(logprobs))
        self._logprobs[rows] = logprobs
        self._top_tokens[rows, : tokens.shape[1]] = tokens
        self._top_logprobs[rows, : tokens.shape[1]] = likeliest

    def message(self) -> protocol.PromptLogprobs:
        return protocol.PromptLogprobs(
            logprobs=self._logprobs.tobytes(),
            top_tokens=self._top_tokens.tobytes(),
            top_logprobs=self._top_logprobs.tobytes(),
        )


@dataclass(eq=False)
class EngineRequest:
    """``log`` is the answer so far with ``prefix_tokens``, whose log-probabilities and versions are not known here.
    The cache holds ``filled`` tokens of the private tail, which is ``prompt[shared_prefix:] + tokens``."""

    params: protocol.Generate
    """The request as submitted, except for the adapter, which is that of the next token."""
    key: str
    """Hash of the adapter of the next token; empty for the base model."""
    stops: StopStrings
    log: protocol.TokenLog
    finish: Finish = ""
    error: str = ""
    sampled_at: int = 0
    """The engine's decode step that sampled its last token."""
    num_drained: int = 0
    """Answer tokens that ``chunks`` has returned, ``prefix_tokens`` included."""
    prefix: SharedPrefix | None = None
    slot: Any = None
    """The KV slot of the tail, while the request runs."""
    filled: int = 0
    cached_by: tuple[str, ...] = ()
    """The adapters that computed the cached tail, oldest first."""
    keeps_cache: bool = field(init=False)
    """Whether it may continue from a cache that an older version of its policy computed."""
    prompt_logprobs: PromptScores | None = None
    """None before the first is known."""
    logits: RequestLogits | None = None
    """How its logits are changed; None: not at all."""
    top_logprobs: list[protocol.Likeliest] = field(default_factory=list)
    """Of each token of the answer, where requested; empty for those of ``prefix_tokens``."""

    def __post_init__(self) -> None:
        self.keeps_cache = self.params.in_flight == "switch"

    @classmethod
    def begin(
        cls,
        generate: protocol.Generate,
        decode: Callable[[list[int]], str],
        grammar: ReplyGrammar | None = None,
    ) -> EngineRequest:
        """A submitted request. ``decode`` turns token ids into text, for stop strings; ``grammar`` is that of its
        schema. Raises ``ValueError`` for a schema without one."""
        given, logits = len(generate.prefix_tokens), generate.logits
        return cls(
            params=generate,
            key=generate.adapter.hash if generate.adapter is not None else "",
            stops=StopStrings(generate.stop, decode),
            log=protocol.TokenLog(list(generate.prefix_tokens), [nan] * given, [-1] * given),
            num_drained=given,
            logits=RequestLogits(logits, generate.prompt, grammar) if logits is not None else None,
            top_logprobs=[[] for _ in range(given)],
        )

    @property
    def tokens(self) -> list[int]:
        """The answer so far."""
        return self.log.tokens

    @property
    def version(self) -> int:
        """The version that samples the next token; 0 for the base model."""
        return self.params.adapter.version if self.params.adapter is not None else 0

    @property
    def returns_likeliest(self) -> bool:
        """Whether the likeliest tokens are returned with each token of the answer."""
        return self.params.logits is not None and self.params.logits.top_logprobs > 0

    @property
    def scored_positions(self) -> range:
        """Positions in the prompt whose log-probabilities are requested."""
        length = len(self.params.prompt)
        return range(max(1, length - self.params.prompt_logprobs), length)

    def scores(self) -> PromptScores:
        """Where its prompt's log-probabilities go."""
        if self.prompt_logprobs is None:
            self.prompt_logprobs = PromptScores(self.scored_positions, self.params.top_logprobs)
        return self.prompt_logprobs

    @property
    def prefix_cached(self) -> bool:
        """Whether its shared prompt, if it has one, is cached."""
        return self.prefix is None or self.prefix.complete

    @property
    def prefill_target(self) -> EngineRequest | SharedPrefix:
        """The segment that its next prefill slice computes: its shared prompt until that is complete, then its tail."""
        return self if self.prefix is None or self.prefix.complete else self.prefix

    @property
    def missing(self) -> int:
        """Tokens of its tail that are not cached."""
        return self.tail_length - self.filled

    @property
    def prefilled(self) -> bool:
        """Whether its whole sequence is cached, except for the last token of its answer."""
        return self.prefix_cached and self.missing <= (1 if self.tokens else 0)

    @property
    def decodes(self) -> bool:
        """Whether a decode step computes its next token."""
        return bool(self.tokens) and self.prefilled

    @cached_property
    def shared_tokens(self) -> tuple[int, ...]:
        return tuple(self.params.prompt[: self.params.shared_prefix])

    @cached_property
    def shared_hash(self) -> int:
        """The hash of :attr:`shared_tokens`, which are long."""
        return hash(self.shared_tokens)

    @property
    def tail(self) -> list[int]:
        return self.params.prompt[self.params.shared_prefix :] + self.tokens

    @property
    def tail_length(self) -> int:
        return len(self.params.prompt) - self.params.shared_prefix + len(self.tokens)

    def check_switch(self, ref: protocol.AdapterRef, *, resident: bool) -> protocol.AdapterRef:
        """The present adapter. Raises ``ValueError`` if ``ref`` is of another policy or not ``resident``."""
        before = self.params.adapter
        if before is None or before.policy != ref.policy:
            raise ValueError(f"request {self.params.request} does not run on policy {ref.policy}")
        if not resident:
            raise ValueError(f"adapter {ref.hash} is not resident")
        return before

    def switch_adapter(self, ref: protocol.AdapterRef) -> None:
        """Samples with ``ref`` from the next token on."""
        self.params = msgspec.structs.replace(self.params, adapter=ref)
        self.key = ref.hash

    def append(self, token: int, logprob: float, max_context: int) -> None:
        """Appends a sampled token and sets ``finish`` if it ends the text."""
        self.log.append(token, logprob, self.version)
        self.check_finished(max_context)

    def check_finished(self, max_context: int) -> None:
        """Sets ``finish`` when the tokens so far end the text."""
        params = self.params
        if self.tokens and (self.tokens[-1] in params.stop_tokens or self.stops.found(self.tokens)):
            self.finish = "stop"
        elif self.remaining(max_context) <= 0:
            self.finish = "length"

    def remaining(self, max_context: int) -> int:
        """Tokens after which the text is as long as it may be."""
        return min(self.params.max_tokens, max_context - len(self.params.prompt)) - len(self.tokens)

    def chunks(self) -> list[protocol.TokenChunk]:
        """Tokens since the last call, one chunk per version that sampled them; the last chunk has ``finish``."""
        log, sent = self.log, self.num_drained
        self.num_drained = end = len(log.tokens)
        chunks = [self._chunk(*run, log.versions[run[0]]) for run in log.runs(sent)]
        if not chunks:
            chunks = [self._chunk(end, end, self.version)]
        last = chunks[-1]
        last.finish, last.error = self.finish, self.error
        if self.finish in ("stop", "length") and self.prompt_logprobs is not None:
            last.prompt_logprobs = self.prompt_logprobs.message()
        return chunks

    def _chunk(self, begin: int, end: int, version: int) -> protocol.TokenChunk:
        """Answer tokens of one version."""
        adapter = self.params.adapter
        return protocol.TokenChunk(
            request=self.params.request,
            offset=begin,
            tokens=self.log.tokens[begin:end],
            logprobs=self.log.logprobs[begin:end],
            version=version,
            policy=adapter.policy if adapter is not None else "",
            top_logprobs=self.top_logprobs[begin:end] if self.returns_likeliest else [],
        )


class StopStrings:
    """Finds stop strings in the text of a growing list of tokens; decodes each token a bounded number of times.

    The text is decoded in pieces. A piece grows until its text ends on a whole character; the next piece is decoded
    with the previous one's last tokens as context, since the text of a token may depend on the one before it (leading
    spaces)."""

    def __init__(self, stops: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self._searches = [StopSearch(stop) for stop in stops if stop]
        self.decode = decode
        self._begin = 0
        """First token of the context."""
        self._end = 0
        """Tokens whose text was searched."""

    def found(self, tokens: list[int]) -> bool:
        """Whether a stop string is complete; ``tokens`` only grows between calls."""
        if not self._searches:
            return False
        while self._end < len(tokens):
            before = self.decode(tokens[self._begin : self._end])
            for end in range(self._end + 1, len(tokens) + 1):
                text = self.decode(tokens[self._begin : end])
                if not text.endswith(_UNFINISHED) or end - self._end >= _LONGEST_CHARACTER:
                    break
            else:
                return False
            self._begin, self._end = self._end, end
            if any(search.feed(text[len(before) :]) is not None for search in self._searches):
                return True
        return False
