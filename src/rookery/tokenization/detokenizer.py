"""Detokenization: the bytes of single tokens, and the text of an answer while its tokens arrive.

Promises:

* The joined bytes of an answer's tokens are its text in UTF-8, as the tokenizer decodes it without special tokens.
* Text is released in whole characters, never taken back, and never beyond a stop string.

``tokenizers.decoders.DecodeStream`` gives neither the bytes of a token, which the OpenAI API returns with
log-probabilities, nor the offset of each token, nor the end of a text that stops within a character; the classes here
give all three.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A byte without a token, as tokenizers with byte fallback write it."""

_IDS = range(1 << 32)
"""Valid ids for the library; it raises for other numbers."""

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""A space, as the same tokenizers write it."""


class TokenBytes:
    """The bytes of a tokenizer's tokens, for byte-level tokenizers (GPT-2's alphabet: Llama 3, Qwen, SmolLM) and those
    with ``▁`` for spaces and byte fallback (Mistral)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {token for token, about in tokenizer.get_added_tokens_decoder().items() if about.special}
        decoder = tokenizer.decoder
        kinds = list(_kinds(json.loads(decoder.__getstate__()))) if decoder is not None else []
        self._letters = _alphabet() if any(kind["type"] == "ByteLevel" for kind in kinds) else None
        self.trims = any(
            (kind["type"] == "Strip" and kind["content"] == " " and kind["start"] > 0)
            or (kind["type"] == "Metaspace" and kind["prepend_scheme"] != "never")
            for kind in kinds
        )
        """Whether the decoder drops a text's first space."""

    def known(self, token: int) -> bool:
        return token in _IDS and self._tokenizer.id_to_token(token) is not None

    def of(self, token: int) -> bytes:
        """Bytes that the token adds to a text; none for special tokens."""
        return b"" if token in self._special else self.written(token)

    def written(self, token: int) -> bytes:
        """The same with special tokens as text; empty for an unknown id."""
        text = self._tokenizer.id_to_token(token) or ""
        if token in self._special:
            return text.encode()
        if self._letters is not None:
            try:
                return bytes(self._letters[letter] for letter in text)
            except KeyError:  # an added token, written plainly
                return text.encode()
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE, " ").encode()


class StreamingText:
    """The text of one answer. ``shown`` is the part that can be shown: it ends before any stop string, and before text
    that may become one."""

    def __init__(self, token_bytes: TokenBytes, stops: Sequence[str] = (), *, special: bool = False) -> None:
        """``special``: special tokens are text too."""
        self._bytes = token_bytes.written if special else token_bytes.of
        self._stops = list(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._trim = token_bytes.trims
        self._text = ""
        self._cut = False
        self.shown = ""
        self.starts: list[int] = []
        """Offset of each token's text in characters; a token within a character has the character's offset."""

    def take(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Adds tokens and returns the newly shown text. ``last``: no tokens follow."""
        new: list[str] = []
        for token in tokens:
            self.starts.append(len(self._text) + sum(len(text) for text in new))
            data = self._bytes(token)
            if self._trim and data:
                data, self._trim = data.removeprefix(b" "), False
            new.append(self._decoder.decode(data))
        if last:
            new.append(self._decoder.decode(b"", final=True))
        if self._cut:
            return ""
        searched = max(0, len(self._text) - max(map(len, self._stops), default=1) + 1)
        self._text += "".join(new)
        found = [(at + len(stop), at) for stop in self._stops if (at := self._text.find(stop, searched)) >= 0]
        before = len(self.shown)
        if found:
            self._cut = True
            self.shown = self._text[: min(found)[1]]  # the stop string that is complete first
        else:
            self.shown = self._text[: len(self._text) - (0 if last else self._held())]
        return self.shown[before:]

    @property
    def tokens_shown(self) -> int:
        """Number of tokens whose text starts within the shown text."""
        return sum(start < len(self.shown) for start in self.starts)

    def _held(self) -> int:
        """Length of the text's end that may be the start of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-length:]) for stop in self._stops):
                return length
        return 0


def _kinds(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for inner in decoder["decoders"]:
            yield from _kinds(inner)
    else:
        yield decoder


def _alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable bytes map to themselves, the others to code points from 256 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(others)}
