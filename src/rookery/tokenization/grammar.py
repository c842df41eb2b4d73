"""Grammars of replies: a JSON schema as the set of tokens that may come next, by llguidance.

The door compiles a grammar with bytes as tokens (:func:`check_followed`), the worker with the model's own: whether a
schema is valid and its keywords can be followed depends on the grammar alone. A worker compiles it once
(:class:`Grammar`); each reply begins with a copy of its first state (:class:`ReplyGrammar`).

A grammar that compiles may still take too much work at a later token; that reply then fails, and no other. Where the
library's lexer fails, which all replies of a grammar share, the others are :class:`GrammarLost`: from their tokens so
far they continue under the same grammar, compiled again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from rookery.errors import UserError, short

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

COMPACT: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as ``json.dumps`` writes it: a model that may indent can write white space until it is cut off."""

ANY_OBJECT = json.dumps({"type": "object"})
"""The schema of ``response_format: {"type": "json_object"}``."""


NOT_FOLLOWED = "the schema cannot be followed"
REPLY_FAILED = "the reply cannot follow its schema"
"""How the errors begin that are the schema's fault, also where a worker reports them."""

OBJECT = ord("{")
"""The token of llguidance's byte tokenizer that begins an object."""

LEXER_FAILED = "lexer error"
"""In llguidance's error where the lexer failed. All copies of a matcher share it, and it stays so."""

CONSUMED = 256
"""Tokens that a reply consumes at once: llguidance holds Python's lock meanwhile."""

GRAMMAR_BYTES, BYTES_PER_SECOND = 512 << 10, 128 << 20
"""Memory of a compiled grammar, estimated by its work, since llguidance does not report it: a grammar of 3,500 optional
properties grows by 33 MB in each second of compilation, an automaton of exponential size by 200 MB."""

MASK_SECONDS = 0.25e-3
"""Work of a token whose lexer states exist, which takes no memory."""

LIMITS = LLParserLimits(verbose_errors=False)
"""The library's own limits bound the work and the memory of each token. Its errors leave the parser's state out."""


class GrammarTokenizer:
    """A model's tokens as llguidance reads them. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: Sequence[int]) -> None:
        """``vocabulary``: the number of logits; ``ends``: tokens that may end a complete reply."""
        self._plain = tokenizer
        self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=vocabulary, eos_token=list(ends) or None)

    def matcher(self, schema: str, unless: str = "") -> LLMatcher:
        """The state at the start of a reply to a JSON schema, or one that begins with the text ``unless`` and continues
        as it likes. Raises :class:`UserError` for a schema that is not valid or has a keyword that cannot be
        followed."""
        return _matcher(self._tokenizer, schema, self._mark(unless) if unless else "")

    def _mark(self, text: str) -> str:
        """A text as grammars have it: where it has special tokens, by its tokens."""
        tokens: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        if any(map(self._tokenizer.is_special_token, tokens)):
            return " ".join(f"<[{token}]>" for token in tokens)
        return json.dumps(text, ensure_ascii=False)


def _matcher(tokenizer: LLTokenizer, schema: str, mark: str = "") -> LLMatcher:
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=COMPACT)
    except ValueError as error:
        raise UserError(f"the schema is not a JSON schema: {_line(error)}") from None
    if mark:
        whole = json.loads(grammar)
        either = f"start: @{whole['grammars'][0]['name']} | free\nfree: {mark} <[*]>*\n"
        whole["grammars"].insert(0, {"name": "reply", "lark_grammar": either})
        grammar = json.dumps(whole)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise UserError(f"{NOT_FOLLOWED}: {_line(matcher.get_error())}")
    return matcher


def check_followed(schema: str) -> None:
    """Raises :class:`UserError` for a schema that no reply can follow, or whose reply takes too much work where it
    begins. Run it in a confined process: a few hundred bytes can take minutes and gigabytes."""
    matcher = _matcher(LLTokenizer("byte"), schema)
    matcher.compute_bitmask()
    if not matcher.is_error() and matcher.validate_tokens([OBJECT]):  # where alternatives are usually most
        matcher.consume_token(OBJECT)
        matcher.compute_bitmask()
    if matcher.is_error():
        raise UserError(f"{NOT_FOLLOWED}: {_line(matcher.get_error())}")


def check_schema(schema: str) -> None:
    """Raises :class:`UserError` for a text that is no JSON schema. Keywords that no grammar follows are allowed. Run it
    in a confined process, as :func:`check_followed`."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"lenient": True})
    except ValueError as error:
        raise UserError(f"the schema is not a JSON schema: {_line(error)}") from None
    failed, lines = LLMatcher.validate_grammar_with_warnings(grammar)
    if failed:
        raise UserError(f"the schema is not a JSON schema: {_line(lines[0])}")


class GrammarLost(Exception):
    """Another reply made the lexer of this one's grammar fail."""


class Grammar:
    """A compiled grammar, the same for all replies that follow it. Safe to use from several threads."""

    def __init__(self, tokenizer: GrammarTokenizer, schema: str, unless: str = "") -> None:
        """As :meth:`GrammarTokenizer.matcher`. Raises :class:`UserError` as that, and for one that no reply can
        begin."""
        began = time.thread_time()
        self._first = tokenizer.matcher(schema, unless)
        self._first.compute_bitmask()  # the copies have it
        if self._first.is_error():
            raise UserError(f"{REPLY_FAILED}: {_line(self._first.get_error())}")
        self.seconds = time.thread_time() - began
        """Spent on it, also by its replies where they extend the lexer."""
        self._slow_masks: set[int] = set()
        """Hashes of the masks whose time is counted."""
        self.failed_by: ReplyGrammar | None = None
        """The reply that made the lexer fail: no other can begin any more."""

    @property
    def bytes(self) -> int:
        return GRAMMAR_BYTES + int(self.seconds * BYTES_PER_SECOND)

    def count(self, seconds: float, mask: int) -> None:
        """A reply took so long beyond the usual for a mask with this hash, which extends nothing where it comes again:
        its states exist."""
        if mask not in self._slow_masks:
            self._slow_masks.add(mask)
            self.seconds += seconds

    def first(self) -> LLMatcher:
        """The state of a reply without tokens."""
        return self._first.deep_copy()  # llguidance's copy shares the grammar and the lexer


class ReplyGrammar:
    """The state of one reply that follows a grammar."""

    def __init__(self, grammar: Grammar, tokens: Sequence[int] = ()) -> None:
        """After ``tokens``, the beginning of the reply."""
        self.grammar = grammar
        self._matcher = grammar.first()
        self._consumed = 0
        self._mask: bytes | None = None
        """Of the tokens that may follow those consumed."""
        self.prepared = 0.0
        """When that was computed, by the clock of :func:`time.perf_counter`."""
        self.prepare(tokens)

    def ready(self, tokens: Sequence[int]) -> bool:
        """Whether :meth:`allowed` has no work left."""
        return self._mask is not None and self._consumed == len(tokens)

    def prepare(self, tokens: Sequence[int]) -> None:
        """Do the work of :meth:`allowed`."""
        if self.ready(tokens):
            return
        began, usual = time.thread_time(), (1 + len(tokens) - self._consumed) * MASK_SECONDS
        while self._consumed < len(tokens):
            self._matcher.consume_tokens(list(tokens[self._consumed : self._consumed + CONSUMED]))
            self._consumed = min(self._consumed + CONSUMED, len(tokens))
        self._mask = self._matcher.compute_bitmask()
        self.prepared = time.perf_counter()
        if (excess := time.thread_time() - began - usual) > 0:
            self.grammar.count(excess, hash(self._mask))
        if self._lexer_failed() and self.grammar.failed_by is None:
            self.grammar.failed_by = self

    def allowed(self, tokens: Sequence[int], vocabulary: int) -> np.ndarray:
        """Which tokens [vocabulary] may follow ``tokens``, which only grow between calls. Raises :class:`UserError`
        for tokens that do not follow the grammar, and for one that takes too much work; :class:`GrammarLost` where
        another reply did."""
        self.prepare(tokens)
        if self._lexer_failed() and self.grammar.failed_by is not self:
            raise GrammarLost
        if self._matcher.is_error():
            raise UserError(f"{REPLY_FAILED}: {_line(self._matcher.get_error())}")
        allowed = np.zeros(vocabulary, bool)
        bits = np.unpackbits(np.frombuffer(self._mask or b"", np.uint8), bitorder="little")[:vocabulary]
        allowed[: len(bits)] = bits.astype(bool)
        return allowed

    def _lexer_failed(self) -> bool:
        return LEXER_FAILED in self._matcher.get_error()


STUCK = "NoExtensionBias"
"""The library's error for a grammar in which no token may come next."""


def _line(error: object) -> str:
    text = str(error).replace("<non-verbose/>", "")
    if text.startswith(STUCK):
        return "no reply can begin; a $ref may lead to itself alone"
    return short(" ".join(text.split()))
