"""The output of a modelled engine: tokens, log-probabilities and lengths that are functions of (seed, position) only,
so a text that continues elsewhere is known to be the same, at the price of a slice of a list."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from statistics import NormalDist
from typing import TypeVar

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rookery.tokenization.chat import Chat

T = TypeVar("T")

STOP = 2
"""The token that ends a reply."""
LETTERS = 3
"""The first of the 256 tokens that are single bytes."""

_PERIOD = 1 << 12
_SOURCE = Random(0)
_TOKENS = [LETTERS + _SOURCE.randrange(26) + ord("A") - ord("!") for _ in range(_PERIOD)]
_LOGPROBS = [-_SOURCE.expovariate(1.0) for _ in range(_PERIOD)]

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Length = Callable[[int, int], int]
"""(seed, max_tokens) → how many tokens the reply has, from 1 to max_tokens; fewer end with :data:`STOP`."""


def draw(*parts: object) -> int:
    """A number in [0, 2**64) that depends on ``parts`` and on nothing else."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def tokens_of(seed: int, start: int, end: int, length: int, max_tokens: int) -> list[int]:
    """Tokens number ``start`` … ``end - 1`` of the reply that has ``length`` tokens in all."""
    tokens = _piece(_TOKENS, seed, start, end)
    if end == length < max_tokens and tokens:
        tokens[-1] = STOP
    return tokens


def logprobs_of(seed: int, start: int, end: int) -> list[float]:
    """Their natural log-probabilities, with mean -1."""
    return _piece(_LOGPROBS, seed, start, end)


def _piece(source: list[T], seed: int, start: int, end: int) -> list[T]:
    piece: list[T] = []
    at = (seed + start) % _PERIOD
    left = end - start
    while left > 0:
        part = source[at : at + left]
        piece += part
        left -= len(part)
        at = 0
    return piece


@dataclass(frozen=True)
class LongTailed:
    """Reply lengths are log-normal, as those of reasoning models are: most are short, a few are many times as long."""

    median: float
    sigma: float
    """Of the logarithm: at 0.8 one reply in twenty is nearly four times the median."""

    def __call__(self, seed: int, max_tokens: int) -> int:
        uniform = (draw("length", seed) + 0.5) / 2**64
        wanted = self.median * math.exp(self.sigma * NormalDist().inv_cdf(uniform))
        return min(max(1, round(wanted)), max_tokens)


@lru_cache(maxsize=1)
def byte_tokenizer() -> Tokenizer:
    """A tokenizer of single bytes and the three special tokens of ChatML."""
    vocabulary = {token: id for id, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@lru_cache(maxsize=4)
def chat(context: int) -> Chat:
    """:func:`byte_tokenizer` with a ChatML template, for a model that has neither."""
    return Chat(byte_tokenizer(), TEMPLATE, special={"eos_token": SPECIAL[STOP]}, ends=[STOP], context=context)
