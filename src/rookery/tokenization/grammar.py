"""Grammars of replies: a JSON schema as the set of tokens that may come next, by llguidance.

The door compiles a grammar with bytes as tokens (:func:`check_followed`), the engine with the model's own: whether a
schema is valid and its keywords can be followed depends on the grammar alone. A grammar that compiles may still take
too much work at a later token; that reply then fails, and no other.
"""

from __future__ import annotations

import json
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

LIMITS = LLParserLimits(verbose_errors=False)
"""The library's own limits bound the work and the memory of each token. Its errors leave the parser's state out."""


class GrammarTokenizer:
    """A model's tokens as llguidance reads them. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: Sequence[int]) -> None:
        """``vocabulary``: the number of logits; ``ends``: tokens that may end a complete reply."""
        self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=vocabulary, eos_token=list(ends) or None)

    def matcher(self, schema: str) -> LLMatcher:
        """The state at the start of a reply to a JSON schema. Raises :class:`UserError` for a schema that is not valid
        or has a keyword that cannot be followed."""
        return _matcher(self._tokenizer, schema)


def _matcher(tokenizer: LLTokenizer, schema: str) -> LLMatcher:
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=COMPACT)
    except ValueError as error:
        raise UserError(f"the schema is not a JSON schema: {_line(error)}") from None
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


class ReplyGrammar:
    """The state of one reply that follows a grammar."""

    def __init__(self, tokenizer: GrammarTokenizer, schema: str) -> None:
        """Raises :class:`UserError` as :meth:`GrammarTokenizer.matcher`."""
        self._matcher = tokenizer.matcher(schema)
        self._consumed = 0

    def allowed(self, tokens: Sequence[int], vocabulary: int) -> np.ndarray:
        """Which tokens [vocabulary] may follow ``tokens``, which only grow between calls. Raises :class:`UserError`
        for tokens that do not follow the grammar, and for one that takes too much work."""
        if self._consumed < len(tokens):
            self._matcher.consume_tokens(list(tokens[self._consumed :]))
            self._consumed = len(tokens)
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise UserError(f"{REPLY_FAILED}: {_line(self._matcher.get_error())}")
        allowed = np.zeros(vocabulary, bool)
        bits = np.unpackbits(mask, bitorder="little")[:vocabulary]
        allowed[: len(bits)] = bits.astype(bool)
        return allowed


def _line(error: object) -> str:
    return short(" ".join(str(error).split()))
