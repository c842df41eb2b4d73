"""Attention by kernels agrees with float64, and its bits do not depend on the batch, on slices, or on who computed the
cache; wrong slots raise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.draws import examples
from tests.support.tiny import SIZES, small
from torch import Tensor

from rookery.worker.engine.kv_cache import KVCache, KVSlot
from rookery.worker.engine.native import kernels
from rookery.worker.engine.sequences import SequenceChunk, TokenStream
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.published import fuse

if not kernels.load(None):
    pytest.skip(kernels.runtime.why_unavailable(), allow_module_level=True)

from rookery.worker.engine.native.kernels.attention import KernelAttention

DTYPES = [torch.bfloat16, torch.float32]
HEADS = {"3 of 48": (6, 2, 48), "8 of 16": (8, 1, 16), "1 of 64": (2, 2, 64)}
"""(heads, key heads, head_dim)"""


@cache
def heads_of(shape: str, dtype: torch.dtype) -> Decoder:
    """One layer with these heads, or a family of ``small``."""
    if shape not in HEADS:
        return small(shape, dtype)
    heads, kv_heads, size = HEADS[shape]
    sizes = SIZES | {
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size, "hidden_size": 96,
        "num_hidden_layers": 1,
    }  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    config = DecoderConfig.from_hf(model.config.to_dict())
    return Decoder(config, fuse(config, {name: w.detach().to(dtype) for name, w in model.state_dict().items()}))


@dataclass
class Sequences:
    """Tails that follow one shared prefix (of length 0: none), with their projections, in one cache."""

    decoder: Decoder
    prefix: Tensor
    tails: list[Tensor]

    def __post_init__(self) -> None:
        self.layer = self.decoder.config.layers - 1
        self.cache = KVCache(self.decoder.config, self.decoder.dtype, "cpu", 1 << 22)
        self.shared = self._slot(len(self.prefix)) if len(self.prefix) else None
        self.slots = [self._slot(len(tail)) for tail in self.tails]

    def _slot(self, length: int) -> KVSlot:
        slot = self.cache.allocate(length)
        assert slot is not None
        for x in (self.cache.k, self.cache.v):
            self.cache.segment(x, slot).fill_(torch.nan)  # what others left there
        return slot

    def attend(self, parts: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """Of (tail, begin, end) in one batch; tail -1 is the prefix."""
        chunks, inputs = [], []
        for tail, begin, end in parts:
            shared, slot = (self.shared, self.slots[tail]) if tail >= 0 else (None, self.shared)
            assert slot is not None
            prefix_length = len(self.prefix) if tail >= 0 else 0
            chunks.append(SequenceChunk("", [0] * (end - begin), begin, slot, shared, prefix_length))
            inputs.append((self.tails[tail] if tail >= 0 else self.prefix)[begin:end])
        qkv = torch.cat(inputs)
        attention = KernelAttention(self.decoder, self.cache, TokenStream(chunks))
        out = attention(self.layer, qkv.repeat(2, 1) if len(qkv) == 1 else qkv).clone()
        return list(out[: len(qkv)].split([len(x) for x in inputs]))

    def reference(self, tail: int) -> Tensor:
        """In float64, except that keys and values are rounded as the cache rounds them."""
        config, layer = self.decoder.config, self.decoder.layers[self.layer]
        qkv = torch.cat((self.prefix, self.tails[tail])).double()
        q, k, v = qkv.view(len(qkv), -1, config.head_dim).split((config.heads, config.kv_heads, config.kv_heads), 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = (
                x / (x.square().mean(-1, keepdim=True) + config.eps).sqrt() * norm.double()
                for x, norm in ((q, layer.q_norm), (k, layer.k_norm))
            )
        if config.rope[self.layer]:
            cos, sin = (x.double() for x in self.decoder.rotation(torch.arange(len(qkv))))
            q, k = (x * cos + x.roll(config.head_dim // 2, -1) * sin for x in (q, k))
        k, v = (x.to(self.decoder.dtype).double().repeat_interleave(config.group, 1) for x in (k, v))
        gap = torch.arange(len(qkv))[:, None] - torch.arange(len(qkv))
        hidden = (gap < 0) | (gap >= (config.windows[self.layer] or len(qkv)))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(config.head_dim)
        p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", p, v).flatten(1)[len(self.prefix) :]


def sequences(decoder: Decoder, prefix: int, tails: Sequence[int], seed: int = 0) -> Sequences:
    config, generator = decoder.config, torch.Generator().manual_seed(seed)
    width = (config.heads + 2 * config.kv_heads) * config.head_dim
    return Sequences(
        decoder,
        torch.randn(prefix, width, generator=generator).to(decoder.dtype),
        [torch.randn(tail, width, generator=generator).to(decoder.dtype) for tail in tails],
    )


lengths = st.one_of(st.integers(1, 70), st.sampled_from([15, 16, 17, 31, 32, 33, 48, 130]))


@settings(max_examples=examples(25))
@given(
    shape=st.sampled_from([*HEADS, "llama", "mistral window", "qwen3", "smollm3"]),
    dtype=st.sampled_from(DTYPES),
    prefix=st.one_of(st.just(0), lengths, st.just(300)),
    tails=st.lists(lengths, min_size=1, max_size=9),
    step=st.integers(1, 40),
    seed=st.integers(0, 9),
)
def test_close_to_float64_and_the_same_bits_in_any_batch(
    shape: str, dtype: torch.dtype, prefix: int, tails: list[int], step: int, seed: int
) -> None:
    decoder = heads_of(shape, dtype)
    whole, decoded, alone = (sequences(decoder, prefix, tails, seed) for _ in range(3))
    if prefix:
        whole.attend([(-1, 0, prefix)])
        for of in (decoded, alone):
            for begin in range(0, prefix, step):
                of.attend([(-1, begin, min(begin + step, prefix))])
    results = whole.attend([(tail, 0, length) for tail, length in enumerate(tails)])
    for position in range(max(tails)):
        rows = [tail for tail, length in enumerate(tails) if position < length]
        for tail, out in zip(rows, decoded.attend([(tail, position, position + 1) for tail in rows]), strict=True):
            assert torch.equal(out[0], results[tail][position])
    for tail, length in enumerate(tails):
        parts = [alone.attend([(tail, begin, min(begin + step, length))])[0] for begin in range(0, length, step)]
        assert torch.equal(torch.cat(parts), results[tail])
        error = (results[tail].double() - whole.reference(tail)).abs().max()
        assert error < (0.02 if dtype == torch.bfloat16 else 2e-5)


@settings(max_examples=examples(15))
@given(
    shape=st.sampled_from([*HEADS, "mistral window"]),
    cuts=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    length=st.integers(61, 90),
)
def test_same_bits_wherever_the_prefix_ends(shape: str, cuts: tuple[int, int], length: int) -> None:
    decoder = heads_of(shape, torch.bfloat16)
    whole = sequences(decoder, 0, [length]).tails[0]
    ends = []
    for cut in cuts:
        of = Sequences(decoder, whole[:cut], [whole[cut:]])
        if cut:
            of.attend([(-1, 0, cut)])
        ends.append(of.attend([(0, 0, length - cut)])[0][-(length - 60) :])
    assert torch.equal(*ends)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_numbers_of_one_row_stay_in_it(bad: float) -> None:
    decoder = heads_of("3 of 48", torch.bfloat16)
    clean, dirty = (sequences(decoder, 20, [5, 9, 17, 2]) for _ in range(2))
    dirty.tails[1][3:] = bad
    for of in (clean, dirty):
        of.attend([(-1, 0, 20)])
    parts = [(tail, 0, len(x)) for tail, x in enumerate(clean.tails)]
    for tail, (ours, theirs) in enumerate(zip(clean.attend(parts), dirty.attend(parts), strict=True)):
        if tail == 1:
            assert not theirs[3:].isfinite().any()
            ours, theirs = ours[:3], theirs[:3]
        assert torch.equal(ours, theirs)


def test_a_moved_segment_keeps_its_keys() -> None:
    decoder = heads_of("3 of 48", torch.bfloat16)
    stays, moves = (sequences(decoder, 0, [40]) for _ in range(2))
    for of in (stays, moves):
        of.attend([(0, 0, 30)])
    moved = moves.cache.resize(moves.slots[0], 100)
    assert moved is not None and moved.start != moves.slots[0].start
    moves.slots[0] = moved
    assert torch.equal(stays.attend([(0, 30, 40)])[0], moves.attend([(0, 30, 40)])[0])


@pytest.mark.parametrize(
    ("slot", "prefix", "prefix_length"),
    [
        (KVSlot(1 << 40, 32), None, 0),
        (KVSlot(-32, 32), None, 0),
        (KVSlot(32, 0), None, 0),
        (KVSlot(32, 32), KVSlot(1 << 40, 32), 8),
        (KVSlot(32, 32), KVSlot(64, 32), 33),
    ],
)
def test_wrong_slots_raise(slot: KVSlot, prefix: KVSlot | None, prefix_length: int) -> None:
    decoder = heads_of("3 of 48", torch.bfloat16)
    cache = KVCache(decoder.config, decoder.dtype, "cpu", 1 << 20)
    stream = TokenStream([SequenceChunk("", [1, 2], 0, slot, prefix, prefix_length)])
    with pytest.raises(ValueError, match="does not lie within"):
        KernelAttention(decoder, cache, stream)


def test_wrong_projections_raise() -> None:
    decoder = heads_of("3 of 48", torch.bfloat16)
    of = sequences(decoder, 0, [3])
    attention = KernelAttention(decoder, of.cache, TokenStream([SequenceChunk("", [0] * 3, 0, of.slots[0])]))
    with pytest.raises(ValueError, match="a kernel needs"):
        attention(0, of.tails[0][:2])
