"""What modelled workers sample: every token is a function of (seed, position), so what a resumed text must be is known
without keeping it."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rookery.tokenization.chat import Chat

LETTERS = 26
FIRST = 3
"""The first letter's token: the special ones come before."""
STOP = 2
"""The token that ends a reply."""

_CONTEXT = 2048
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MASK = (1 << 64) - 1
_ODD, _MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
"""Multipliers of a splitmix64 step: any that spread the bits would do."""


def chat() -> Chat:
    """The template and tokenizer of a model whose tokens are single bytes; the letters come first."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    letters = [chr(ord("a") + i) for i in range(LETTERS)]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = [*special, *letters, *sorted(set(alphabet) - set(letters))]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return Chat(tokenizer, _TEMPLATE, special={"eos_token": "<|im_end|>"}, ends=[STOP], context=_CONTEXT)


def _mix(seed: int, position: int) -> int:
    mixed = ((seed ^ (position * _ODD)) * _MIX) & _MASK
    return mixed >> 33


@lru_cache(maxsize=1 << 14)
def text(seed: int, max_tokens: int) -> tuple[list[int], list[float], str]:
    """``(tokens, log-probabilities, finish)`` of the whole reply that this seed gives."""
    wanted = 1 + _mix(seed, -1) % (max_tokens + max_tokens // 4)
    length = min(wanted, max_tokens)
    tokens = [FIRST + _mix(seed, i) % LETTERS for i in range(length)]
    if wanted < max_tokens:
        tokens[-1] = STOP
    logprobs = [-((tokens[i] * 31 + i) % 997) / 250 for i in range(length)]
    return tokens, logprobs, "stop" if wanted < max_tokens else "length"
