"""The computations of a GPU that differ from a CPU's, by plain products that stand in for its kernels: attention over
sequences and over ranges, LoRA as one product, what a backward pass keeps.

References are float64. float32 results agree within 1e-5 of their largest entry, bfloat16 ones within 2%.
"""

from __future__ import annotations

import random
from inspect import signature

import pytest
import torch
from tests.support.tiny import FAMILIES, small, trained_adapter
from tests.worker.engine.test_exactness import RANKS
from torch import Tensor

from rookery.errors import UserError
from rookery.worker import device
from rookery.worker.model.config import SITES
from rookery.worker.model.lora import GroupedMatmul, LoraManager, batched_matmul, best_grouped_matmul, grouped_matmul
from rookery.worker.model.varlen_attention import (
    KeyRanges,
    SequenceBounds,
    fused_varlen_attention,
    merge_attention,
    range_attention,
    varlen_attention,
)
from rookery.worker.trainer.native.attention import ChunkedAttention, ChunkSizes, VarlenAttention
from rookery.worker.trainer.native.backbone import ForwardPass, layer_numbers, pass_limits
from rookery.worker.trainer.optim import AdapterExport, PolicyState
from rookery.worker.trainer.packed_pass import PackedLora, PolicyRows
from rookery.worker.trainer.packing import LossToken, LossTokens, PackedGroup, pack_groups

HEADS, KV_HEADS, SIZE = 6, 2, 16


def attention(q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
    """One sequence in float64, the last query at the last key."""
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    gap = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = (gap < 0) | ((gap >= window) if window else False)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def heads(count: int, kinds: int = KV_HEADS, seed: int = 0) -> Tensor:
    return torch.randn(count, kinds, SIZE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("window", [0, 1, 5, 1000])
def test_sequences_of_unlike_length(window: int) -> None:
    queries, keys = [3, 1, 7, 12], [3, 9, 7, 40]
    q, k, v = heads(sum(queries), HEADS), heads(sum(keys), seed=1), heads(sum(keys), seed=2)
    out = varlen_attention(q, k, v, SequenceBounds.from_lengths(queries, keys, "cpu"), window)
    at_q = at_k = 0
    for count, seen in zip(queries, keys, strict=True):
        part = slice(at_k, at_k + seen)
        expected = attention(q[at_q : at_q + count], k[part], v[part], window)
        torch.testing.assert_close(out[at_q : at_q + count].double(), expected, atol=1e-5, rtol=0)
        at_q, at_k = at_q + count, at_k + seen


def test_the_fused_product_accepts_all_its_inputs() -> None:
    """It cannot run here; that it is there, and what it calls its arguments, can be told."""
    q = k = v = heads(3)
    several = SequenceBounds.from_lengths([3], [3], "cpu")
    given = (
        signature(fused_varlen_attention())
        .bind(q, k, v, several.of_queries, several.of_keys, 3, 3, window_size=(-1, 0))
        .arguments
    )
    assert {"query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "window_size"} <= set(given)
    assert given["cu_seq_q"] is several.of_queries and given["max_k"] == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_ranges_of_keys_are_one_sequence(dtype: torch.dtype) -> None:
    pool_k, pool_v = heads(100, seed=1).to(dtype), heads(100, seed=2).to(dtype)
    pool_k[:8], pool_v[:8] = torch.nan, torch.nan  # nobody's: never read
    q = heads(4, HEADS, seed=3).to(dtype)
    first = KeyRanges(torch.tensor([0, 10, 60, 10]), torch.tensor([0, 20, 7, 20]), max_length=32)
    second = KeyRanges(torch.tensor([40, 50, 8, 30]), torch.tensor([1, 9, 2, 32]), max_length=64)
    out = merge_attention(range_attention(q, pool_k, pool_v, first), range_attention(q, pool_k, pool_v, second))
    assert out.dtype == dtype
    for row in range(4):
        at = torch.cat([torch.arange(s.starts[row], s.starts[row] + s.lengths[row]) for s in (first, second)])
        expected = attention(q[row : row + 1], pool_k[at], pool_v[at])
        close = 1e-5 if dtype == torch.float32 else 0.02 * expected.abs().max()
        torch.testing.assert_close(out[row : row + 1].double(), expected, atol=float(close), rtol=0)
    nothing, lse = range_attention(q, pool_k, pool_v, first)
    assert not nothing[0].any() and lse[0].isneginf().all() and lse[1:].isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_streams_attend_as_on_the_cpu(family: str) -> None:
    """Forward and backward, a shared prompt's summed gradients included."""
    base, rng = small(family, torch.float32), random.Random(1)
    streams = pack_groups([_unit(rng, *shape) for shape in ((7, [5, 9, 1, 3]), (1, [12]), (11, [70, 20]))])
    cfg, gradients = base.config, []
    for attend in (VarlenAttention(base, streams), ChunkedAttention(base, streams, ChunkSizes())):
        made = []
        for layer in range(cfg.layers):
            count, g = len(streams.tokens), torch.Generator().manual_seed(layer)
            q, k, v = (
                torch.randn(count, n, cfg.head_dim, generator=g, requires_grad=True)
                for n in (cfg.heads, cfg.kv_heads, cfg.kv_heads)
            )
            out = attend(layer, q, k, v)
            made += [out, *torch.autograd.grad(out, (q, k, v), torch.randn(out.shape, generator=g))]
        gradients.append(made)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.detach().abs().max()), rtol=0)


def test_nan_in_one_sequence_stays_there() -> None:
    base, rng = small("llama", torch.float32), random.Random(1)
    stream = pack_groups([_unit(rng, 7, [5, 9]), _unit(rng, 3, [4, 4])])
    q, k, v = (heads(len(stream.tokens), n, seed=n) for n in (base.config.heads, 2, 2))
    ill = slice(*stream.row_ranges[0])
    k[ill], v[ill] = torch.nan, torch.nan
    out = VarlenAttention(base, stream)(0, q, k, v)
    assert out[ill].isnan().all() and out[slice(*stream.row_ranges[1])].isfinite().all()


def _unit(rng: random.Random, prompt: int, tails: list[int]) -> PackedGroup:
    total = prompt + sum(tails)
    return PackedGroup(
        prompt=[rng.randrange(200) for _ in range(prompt)],
        tails=[[rng.randrange(200) for _ in range(n)] for n in tails],
        loss=LossTokens.of([LossToken(total - 1, 1, 0.0, 1.0, 1.0)]),
    )


@pytest.mark.parametrize("product", [grouped_matmul, batched_matmul])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_as_one_product(product: GroupedMatmul, dtype: torch.dtype) -> None:
    """Each row against its own adapter in float64, and base rows untouched."""
    decoder = small("llama", dtype)
    loras = LoraManager(decoder.config, dtype, "cpu", 64)
    adapters = {key: trained_adapter(decoder, rank, seed) for seed, (key, rank) in enumerate(RANKS.items())}
    for key, one in adapters.items():
        loras.add(key, one)
    assert loras.assign_slots([""]) == 0
    keys = ["c", "a", "", "b", "d"]
    places = loras.assign_slots(keys)
    keys.sort(key=lambda key: (loras.slot_order(key), key))
    counts = [3, 1, 5, 2, 4]
    rows = sum(counts) + 2  # two that are nobody's
    ends = loras.slot_ends(keys, counts, rows)
    assert len(ends) == places and ends[-1] == rows and keys[-1] == ""
    lora = loras.grouped_product(torch.tensor(ends, dtype=torch.int32), product)
    owners = [key for key, count in zip(keys, counts, strict=True) for _ in range(count)] + ["", ""]
    generator = torch.Generator().manual_seed(0)
    for site, parts in SITES.items():
        shapes = [decoder.config.site_shape(part) for part in parts]
        x = torch.randn(rows, shapes[0][0], generator=generator).to(dtype)
        y = torch.randn(rows, sum(out for _, out in shapes), generator=generator).to(dtype)
        expected, at = y.double(), 0
        for part, (_, outputs) in zip(parts, shapes, strict=True):
            for row, key in enumerate(owners):
                if key and (1, part) in adapters[key].weights:
                    a, b = (w.double() for w in adapters[key].weights[1, part])
                    expected[row, at : at + outputs] += adapters[key].scale * (b @ (a @ x[row].double()))
            at += outputs
        out = lora(1, site, x, y.clone())
        close = (1e-5 if dtype == torch.float32 else 0.02) * float(expected.abs().max())
        torch.testing.assert_close(out.double(), expected, atol=close, rtol=0)
        base = [row for row, key in enumerate(owners) if not key]
        assert torch.equal(out[base], y[base])


def test_the_product_is_chosen_by_device_and_type() -> None:
    assert best_grouped_matmul(torch.device("cpu"), torch.bfloat16) is batched_matmul


@pytest.mark.parametrize("family", ["llama", "qwen3", "llama biased"])
def test_memory_of_a_backward_pass_is_close_to_its_estimate(family: str) -> None:
    base, rng = small(family, torch.float32), random.Random(0)
    stream = pack_groups([_unit(rng, 300, [20, 40])])
    kept: dict[int, int] = {}
    weights = {w.untyped_storage().data_ptr() for w in _weights(base)}

    def pack_hook(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights and x.ndim > 1:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    state = PolicyState(AdapterExport(trained_adapter(base, 4, 1)), base.config, torch.float32, torch.device("cpu"))
    lora = PackedLora([PolicyRows(0, len(stream.tokens), state)])
    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda x: x):
        # keeps what the fused kernels keep: queries, keys and values; their stand-in on a CPU keeps scores as well
        ForwardPass(base, stream, ChunkedAttention(base, stream, ChunkSizes()), lora, recompute=False)
    per_token = sum(kept.values()) / 4 / len(stream.tokens)
    assert 0.8 * per_token < base.config.layers * layer_numbers(base.config) < 1.25 * per_token, per_token


def test_oversized_passes_are_recomputed_and_then_split() -> None:
    config = small("llama").config
    few, many = pass_limits(config, 2, 1e6), pass_limits(config, 2, 1e8)
    assert 0 < few.resident_tokens < few.max_tokens and many.resident_tokens == pytest.approx(
        100 * few.resident_tokens, rel=0.05
    )
    assert pass_limits(config, 4, 1e8).resident_tokens == pytest.approx(many.resident_tokens / 2, abs=1)


def test_copies_of_shared_prompts_count_as_memory() -> None:
    base, rng = small("llama", torch.float32), random.Random(0)
    units = [_unit(rng, 300, [20, 40, 1]), _unit(rng, 50, [7])]
    stream = pack_groups(units)
    keys = VarlenAttention(base, stream)._keys
    assert keys is not None
    assert sum(unit.memory(1.0) for unit in units) == len(keys) == len(stream.tokens) + 3 * 300
    copied = pass_limits(base.config, 2, 1e6).copied_key_share
    assert copied * layer_numbers(base.config) == pytest.approx(2 * base.config.kv_heads * base.config.head_dim)


def _weights(base: object) -> list[Tensor]:
    layers = base.layers  # type: ignore[attr-defined]
    return [site.weight for layer in layers for site in (layer.qkv, layer.o, layer.gate_up, layer.down)]


def test_the_device_is_chosen_by_name() -> None:
    assert device.choose("cpu") == torch.device("cpu")
    if not torch.cuda.is_available():
        assert device.choose("auto") == torch.device("cpu")
        with pytest.raises(UserError, match="no CUDA device"):
            device.choose("cuda")
