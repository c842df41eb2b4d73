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
from bisect import bisect_left
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
        """Bytes of the token as it is written, of special ones too; empty for an unknown id."""
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
    that may become one. Each token takes a time that does not depend on the text before it."""

    def __init__(self, token_bytes: TokenBytes, stops: Sequence[str] = (), *, special: bool = False) -> None:
        """``special``: special tokens are text too."""
        self._bytes = token_bytes.written if special else token_bytes.of
        self._searches = [StopSearch(stop) for stop in stops if stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._trim = token_bytes.trims
        self._length = 0
        self._cut = False
        self._shown: list[str] = []
        self._shown_length = 0
        self._held = ""
        self.starts: list[int] = []
        """Offset of each token's text in characters, rising; a token within a character has the character's offset."""

    def take(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Adds tokens and returns the newly shown text. ``last``: no tokens follow."""
        begin, new = self._length, []
        for token in tokens:
            self.starts.append(self._length)
            data = self._bytes(token)
            if self._trim and data:
                data, self._trim = data.removeprefix(b" "), False
            new.append(self._decoder.decode(data))
            self._length += len(new[-1])
        if last:
            new.append(self._decoder.decode(b"", final=True))
            self._length += len(new[-1])
        if self._cut:
            return ""
        text = "".join(new)
        ends = [(begin + end, -len(search.stop)) for search in self._searches if (end := search.feed(text)) is not None]
        if ends:
            self._cut = True
            end, length = min(ends)  # the stop string that is complete first, the longest of several
            known = end + length
        else:
            known = self._length - (0 if last else max((search.matched for search in self._searches), default=0))
        text, count = self._held + text, known - self._shown_length
        shown, self._held = text[:count], text[count:]
        self._shown.append(shown)
        self._shown_length = known
        return shown

    @property
    def shown(self) -> str:
        self._shown = ["".join(self._shown)]
        return self._shown[0]

    @property
    def tokens_shown(self) -> int:
        """Number of tokens whose text starts within the shown text."""
        return bisect_left(self.starts, self._shown_length)


class StopSearch:
    """The search for a stop string in a growing text, by the algorithm of Knuth, Morris and Pratt: its time grows with
    the text alone. The borders of the stop string are computed as far as the text has it."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        """Length of the text's longest end that is a beginning of the stop string."""
        self._borders = [0]
        """For each beginning of the stop string, its longest proper beginning that is also its end."""

    def feed(self, text: str) -> int | None:
        """Adds text. Returns the end in it of the first stop string; None where none is complete."""
        stop, borders, matched, at = self.stop, self._borders, self.matched, 0
        while at < len(text):
            if not matched:
                at = text.find(stop[0], at)
                if at < 0:
                    break
            elif text[at] != stop[matched]:
                matched = borders[matched - 1]
                continue
            matched, at = matched + 1, at + 1
            if matched == len(stop):
                return at
            if matched > len(borders):
                borders.append(self._border(matched))
        self.matched = matched
        return None

    def _border(self, length: int) -> int:
        """The border of the beginning that is one longer than those with a border."""
        stop, border, letter = self.stop, self._borders[-1], self.stop[length - 1]
        while border and stop[border] != letter:
            border = self._borders[border - 1]
        return border + (stop[border] == letter)


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
