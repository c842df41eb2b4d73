"""Attention over sequences of unlike length by PyTorch's own fused kernels, and the same by plain products.

Promises:

* Sequences do not meet: what is wrong in one (a NaN) reaches no other, nor does what lies between their keys.
* The fused and the plain way compute the same function; the fused one runs where its kernels exist
  (``device.fuses``), the plain one everywhere else, which is where it is tested.
* ``spans`` has shapes that depend on its arguments' shapes and on ``most`` alone and never asks the device anything, so
  that a CUDA graph can hold it.

Fused: FlashAttention-2 (arXiv:2307.08691) behind ``torch.nn.attention.varlen``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rookery.worker import device


@dataclass(frozen=True)
class SequenceBounds:
    """Sequences in the stream of queries and in that of keys: the numbers of ``queries`` and of ``keys`` of each, and
    where each begins, and the last one ends: ``of_queries`` and ``of_keys`` [sequences + 1] int32 on the device."""

    of_queries: Tensor
    of_keys: Tensor
    queries: list[int]
    keys: list[int]

    @classmethod
    def from_lengths(cls, queries: list[int], keys: list[int], device: torch.device | str) -> SequenceBounds:
        """The bounds from the numbers of queries and of keys of each sequence."""
        starts = [list(accumulate(counts, initial=0)) for counts in (queries, keys)]
        both = torch.tensor(starts, dtype=torch.int32, device=device)
        return cls(both[0], both[1], queries, keys)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, sequences: SequenceBounds, window: int) -> Tensor:
    """Causal attention of each sequence's queries over its keys, the last query at the last key. A query sees
    ``window`` keys up to its own (0: all). q [queries, heads, head_dim], k and v [keys, kv_heads, head_dim] → like q.
    Differentiable."""
    if has_fused_kernels(q):
        fused: Tensor = fused_varlen_attention()(
            q,
            k,
            v,
            sequences.of_queries,
            sequences.of_keys,
            max(sequences.queries, default=0),
            max(sequences.keys, default=0),
            window_size=(window - 1 if window else -1, 0),
        )
        return fused
    outs = []
    for one, *both in zip(q.split(sequences.queries), *(x.split(sequences.keys) for x in (k, v)), strict=True):
        rows, seen = len(one), len(both[0])
        queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (one, *both))
        ahead = torch.arange(seen, device=q.device) - torch.arange(seen - rows, seen, device=q.device)[:, None]
        mask = (ahead <= 0) & (ahead > -window) if window else ahead <= 0
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


@dataclass(frozen=True)
class KeyRanges:
    """One range of keys per row: ``lengths`` [rows] from ``starts`` [rows] on, int64. None is longer than ``most``; one
    of length 0 is empty."""

    starts: Tensor
    lengths: Tensor
    max_length: int


def range_attention(q: Tensor, k: Tensor, v: Tensor, seen: KeyRanges) -> tuple[Tensor, Tensor]:
    """Attention of one query per row over that row's own range of keys. q [rows, heads, head_dim], k and v [tokens,
    kv_heads, head_dim] → (like q, the logarithms of the sums of exponentials [rows, heads] float32). Of an empty range
    these are 0 and −inf. Not differentiable."""
    rows, heads, size = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    if has_fused_kernels(q):
        # The query heads of one key/value head go as that many queries: each key is read once for all of them.
        grouped = q.view(rows, kv_heads, group, size).transpose(1, 2).reshape(rows * group, kv_heads, size)
        begins = torch.arange(0, rows * group + 1, group, dtype=torch.int32, device=q.device)
        found = torch.ops.aten._flash_attention_forward(
            grouped,
            k,
            v,
            begins,
            F.pad(seen.starts, (0, 1)).int(),  # where ranges begin, in any order; ``seqused_k`` tells how long they are
            group,
            seen.max_length,
            0.0,
            False,
            False,
            seqused_k=seen.lengths.int(),
        )
        assert found[1].shape == (kv_heads, rows * group), f"log-sums come as {tuple(found[1].shape)}"
        out = found[0].view(rows, group, kv_heads, size).transpose(1, 2)
        lse = found[1].view(kv_heads, rows, group).transpose(0, 1)
    else:
        inside = torch.arange(seen.max_length, device=q.device)
        last = (seen.lengths - 1).clamp(min=0)[:, None]
        at = seen.starts[:, None] + torch.minimum(inside, last)  # padding repeats the range's own last key
        keys, values = k[at].transpose(1, 2), v[at].transpose(1, 2)
        scores = (q.view(rows, kv_heads, group, size) @ keys.transpose(2, 3)).float() * size**-0.5
        scores = scores.masked_fill((inside >= seen.lengths[:, None])[:, None, None], -torch.inf)
        lse = scores.logsumexp(-1)
        out = scores.softmax(-1).to(q.dtype) @ values
    empty = (seen.lengths == 0)[:, None, None]
    lse = lse.masked_fill(empty, -torch.inf).reshape(rows, heads)
    return out.masked_fill(empty[..., None], 0.0).reshape(rows, heads, size), lse


def merge_attention(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """Attention over two sets of keys from the attention over each (``spans``): [rows, heads, head_dim]. At least one
    of them is not empty."""
    both = torch.logaddexp(first[1], second[1])
    shares = [(lse - both).exp().unsqueeze(-1) for _, lse in (first, second)]
    return (first[0] * shares[0] + second[0] * shares[1]).to(first[0].dtype)


@cache
def fused_varlen_attention() -> Callable[..., Any]:
    """PyTorch's own attention over sequences of unlike length. Imported by who runs it: it brings the compiler along,
    which is a third of a worker's start. Fewer key/value heads than query heads: later releases need it stated,
    earlier ones take it."""
    from torch.nn.attention.varlen import varlen_attn

    return partial(varlen_attn, enable_gqa=True) if "enable_gqa" in signature(varlen_attn).parameters else varlen_attn


def has_fused_kernels(q: Tensor) -> bool:
    """Whether the fused kernels take it."""
    return device.fuses(q.device, q.dtype)
