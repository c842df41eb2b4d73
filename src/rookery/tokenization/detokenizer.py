"""The bytes of single tokens, and the text of an answer while its tokens come.

Promises:

* Joined, the bytes of an answer's tokens are its text in UTF-8, as the tokenizer decodes it without special tokens.
* Text is shown in whole characters, never taken back, and never beyond a stop string.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How tokenizers with byte fallback write a byte that belongs to no token."""

_IDS = range(1 << 32)
"""What can be a token's id: the library cannot even be asked about other numbers."""

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""How the same tokenizers write a space."""


class TokenBytes:
    """The bytes of a tokenizer's tokens. Two ways of writing tokens are known: byte-level (GPT-2's alphabet: Llama 3,
    Qwen, SmolLM) and spaces as ``▁`` with byte fallback (Mistral)."""

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
        """Whether a text's first space is left out."""

    def known(self, token: int) -> bool:
        return token in _IDS and self._tokenizer.id_to_token(token) is not None

    def of(self, token: int) -> bytes:
        """What the token adds to a text; nothing for special tokens."""
        return b"" if token in self._special else self.written(token)

    def written(self, token: int) -> bytes:
        """The same, special tokens as they are written; empty for an id that is no token."""
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
    """The text of one answer. ``shown`` is what can be shown now: it ends before any stop string, and before what may
    yet become one."""

    def __init__(self, pieces: TokenBytes, stops: Sequence[str] = ()) -> None:
        self._pieces = pieces
        self._stops = list(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._trim = pieces.trims
        self._text = ""
        self._cut = False
        self.shown = ""
        self.starts: list[int] = []
        """For each token where its text begins, in characters; a token in the middle of a character begins where the
        character does."""

    def take(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """The further tokens of the answer; answers what can be shown beyond what was. ``last``: nothing follows."""
        fresh: list[str] = []
        for token in tokens:
            self.starts.append(len(self._text) + sum(len(text) for text in fresh))
            data = self._pieces.of(token)
            if self._trim and data:
                data, self._trim = data.removeprefix(b" "), False
            fresh.append(self._decoder.decode(data))
        if last:
            fresh.append(self._decoder.decode(b"", final=True))
        if self._cut:
            return ""
        searched = max(0, len(self._text) - max(map(len, self._stops), default=1) + 1)
        self._text += "".join(fresh)
        found = [(at + len(stop), at) for stop in self._stops if (at := self._text.find(stop, searched)) >= 0]
        before = len(self.shown)
        if found:
            self._cut = True
            self.shown = self._text[: min(found)[1]]  # the one that is complete first, however the tokens came
        else:
            self.shown = self._text[: len(self._text) - (0 if last else self._held())]
        return self.shown[before:]

    @property
    def tokens_shown(self) -> int:
        """How many tokens, from the first on, have their beginning in what is shown."""
        return sum(start < len(self.shown) for start in self.starts)

    def _held(self) -> int:
        """Characters at the end that a stop string may begin with."""
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
    """GPT-2's letters for bytes: printable ones stand for themselves, the others follow from code point 256 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(others)}
