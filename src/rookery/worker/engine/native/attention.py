"""Attention of a CPU batch over cached segments: the same arithmetic for prefill and for decoding.

Promise: a token's output is a function of its own request alone, bit for bit on CPU. Its keys lie in one row: those of
the shared prefix, zeros up to a multiple of ``LANES``, then those of the private tail, then zeros. All scores go
through one softmax, and all values are summed by one product (or by several, split as ``contraction_chunks`` says).
Chunk sizes, other requests and capacities only change how many zeros follow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rookery.worker.engine.native.kv_cache import KVCache, KVSlot
from rookery.worker.model.batch_invariance import (
    LANES,
    chunked_matmul,
    contraction_chunks,
    exact_key_capacity,
    exact_rows,
    pad_rows,
)
from rookery.worker.model.config import DecoderConfig


@dataclass
class SequenceChunk:
    """Consecutive tokens of one sequence. They are written into ``slot`` from ``start`` on and attend to the
    ``prefix_length`` tokens in ``prefix_slot`` and to their own segment up to themselves. ``key`` is their adapter."""

    key: str
    tokens: Sequence[int]
    start: int
    slot: KVSlot
    prefix_slot: KVSlot | None = None
    prefix_length: int = 0


class TokenStream:
    """The tokens of some chunks, one after another; with ``double``, a lone token is doubled (``batch_invariance``).

    Arrays of int64: ``tokens``, ``positions`` in their sequences, ``owner`` (the chunk) and ``index`` in its tail
    [tokens]; ``last`` [chunks], where each chunk's last token is."""

    def __init__(self, chunks: Sequence[SequenceChunk], *, double: bool = True) -> None:
        self.chunks = chunks
        counts = np.array([len(chunk.tokens) for chunk in chunks])
        self.last = np.cumsum(counts) - 1
        owner = np.repeat(np.arange(len(chunks)), counts)
        index = np.arange(len(owner)) + np.array([chunk.start for chunk in chunks])[owner]
        index -= (self.last + 1 - counts)[owner]
        tokens = np.concatenate([np.asarray(chunk.tokens, dtype=np.int64) for chunk in chunks])
        if double and len(tokens) == 1:
            owner, index, tokens = owner.repeat(2), index.repeat(2), tokens.repeat(2)
        self.tokens, self.owner, self.index = tokens, owner, index
        self.positions = index + np.array([chunk.prefix_length for chunk in chunks])[owner]


class SegmentPlan:
    """Where the keys and values of a stream are written and read. Its ``tokens``, ``positions`` and ``last`` are on the
    cache's device.

    Queries are padded to a grid [chunks, width] of tokens, which reads token 0 where a chunk has fewer. ``gap``
    [chunks, width, keys] is the distance from a query back to a key; below 0 it does not see the key. ``grid``
    [chunks · width] are tokens of the stream, ``cells`` [tokens] find each token in the grid."""

    def __init__(self, cache: KVCache, stream: TokenStream) -> None:
        chunks, self._cache = stream.chunks, cache
        self.tokens, self.positions, self.last = map(self._tensor, (stream.tokens, stream.positions, stream.last))
        begin, prefix = np.array([c.start for c in chunks]), np.array([c.prefix_length for c in chunks])
        within = stream.index - begin[stream.owner]
        self.count, self._width = len(chunks), int(within.max()) + 1
        cells = stream.owner * self._width + within
        grid = np.zeros(self.count * self._width, dtype=np.int64)
        grid[cells] = np.arange(len(cells))
        self.grid, self.cells = self._tensor(grid), self._tensor(cells)
        slots = _Rows(cache, [c.slot for c in chunks])
        self._write, self._write_step = map(self._tensor, slots.at(stream.owner, stream.index))
        ends = begin + np.array([len(c.tokens) for c in chunks])
        self.gap = self._plan_reads(chunks, slots, ends, prefix + begin)

    def _tensor(self, x: np.ndarray) -> Tensor:
        return torch.as_tensor(x, device=self._cache.k.device)

    def _plan_reads(
        self, chunks: Sequence[SequenceChunk], slots: _Rows, ends: np.ndarray, position: np.ndarray
    ) -> Tensor:
        """The rows [kv_heads · chunks · keys] that the chunks read in the first layer, and the distance to the next
        layer's; returns ``gap``. ``ends`` of the tails, ``position`` of the first queries [chunks]."""
        dtype = self._cache.k.dtype
        prefix = np.array([c.prefix_length for c in chunks])
        padded = -(-prefix // LANES) * LANES
        self._keys = exact_key_capacity(dtype, int((padded + ends).max()))
        shape = (self._cache.kv_heads, self.count, self._keys)
        rows, steps = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)  # zeros are read from scratch
        hidden = np.iinfo(np.int64).max // 2
        key = np.full(shape[1:], hidden)
        shared = _Rows(self._cache, [c.prefix_slot or c.slot for c in chunks])
        for i in range(self.count):
            for source, at, length, first in (
                (shared, 0, prefix[i], 0), (slots, padded[i], ends[i], prefix[i]),
            ):  # fmt: skip
                inside = np.arange(length)
                rows[:, i, at : at + length], steps[:, i, at : at + length] = source.at(np.full(length, i), inside)
                key[i, at : at + length] = first + inside
        self._read, self._read_step = self._tensor(rows.reshape(-1)), self._tensor(steps.reshape(-1))
        query = self._tensor(position)[:, None] + torch.arange(self._width, device=self._cache.k.device)
        return query[:, :, None] - self._tensor(key)[:, None, :]

    def exchange(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes k and v [tokens, kv_heads, head_dim]; the keys and values that the chunks read, [kv_heads · chunks,
        keys, head_dim] each."""
        size = k.shape[-1]
        write = (self._write + layer * self._write_step).reshape(-1)
        for cached, new in ((self._cache.k, k), (self._cache.v, v)):
            cached.index_copy_(0, write, new.transpose(0, 1).reshape(-1, size))
        read = self._read + layer * self._read_step
        keys, values = (x.index_select(0, read).view(-1, self._keys, size) for x in (self._cache.k, self._cache.v))
        return keys, values


class SegmentAttention(SegmentPlan):
    """``AttentionBackend`` of a stream."""

    def __init__(self, config: DecoderConfig, cache: KVCache, stream: TokenStream) -> None:
        super().__init__(cache, stream)
        self._config, dtype = config, cache.k.dtype
        self._rows = exact_rows(dtype, self._width * config.group, (config.head_dim, LANES), (LANES, config.head_dim))
        self._masks = {}
        for window in set(config.windows):
            outside = (self.gap < 0) | (self.gap >= window) if window else self.gap < 0
            mask = torch.zeros(outside.shape, dtype=dtype, device=outside.device).masked_fill_(outside, -torch.inf)
            mask = pad_rows(mask.repeat_interleave(config.group, 1), self._rows)
            self._masks[window] = mask.repeat(config.kv_heads, 1, 1)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        config, count, width, size = self._config, self.count, self._width, self._config.head_dim
        keys, values = self.exchange(layer, k, v)
        q = (q * (1.0 / math.sqrt(size))).index_select(0, self.grid)
        q = q.view(count, width, config.kv_heads, config.group, size).permute(2, 0, 1, 3, 4)
        q = pad_rows(q.reshape(config.kv_heads * count, width * config.group, size), self._rows).contiguous()
        p = torch.softmax(torch.baddbmm(self._masks[config.windows[layer]], q, keys.transpose(1, 2)), -1)
        out = weighted_sum(p, values, torch.empty_like(q))[:, : width * config.group]
        out = out.reshape(config.kv_heads, count, width, config.group, size).permute(1, 2, 0, 3, 4)
        return out.reshape(count * width, config.heads, size).index_select(0, self.cells)


class _Rows:
    """The rows of a cache's tensors in which the tokens of some slots are."""

    def __init__(self, cache: KVCache, slots: Sequence[KVSlot]) -> None:
        self._heads = np.arange(cache.kv_heads)[:, None]
        self._first = np.array([slot.start for slot in slots]) * cache.layers * cache.kv_heads
        self._capacity = np.array([slot.capacity for slot in slots])

    def at(self, slot: np.ndarray, token: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of tokens [n] in slots [n]: their rows in the first layer, and the distance to the next layer's, both
        [kv_heads, n]."""
        capacity = self._capacity[slot]
        rows = self._first[slot] + self._heads * capacity + token
        return rows, np.tile(capacity * len(self._heads), (len(self._heads), 1))


def weighted_sum(weights: Tensor, values: Tensor, out: Tensor) -> Tensor:
    """``out`` = weights [batch, rows, keys] · values [batch, keys, head_dim]; chunks of the keys add up in float32."""
    chunks = contraction_chunks(values.shape[1], values.dtype, values.device)
    if len(chunks) == 1:
        return torch.bmm(weights, values, out=out)
    return out.copy_(chunked_matmul(weights, values.split(chunks, 1)))
