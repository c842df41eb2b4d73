"""The tokens of a batch: chunks of sequences, one after another as a stream, and where the keys and values of a stream
are in the cache (:class:`rookery.worker.engine.kv_cache.KVCache`). The runners of a process's own models use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rookery.worker.engine.kv_cache import KVCache, KVSlot
from rookery.worker.model.batch_invariance import LANES, exact_key_capacity


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


class _Rows:
    """The rows of a cache's tensors in which the tokens of some slots are."""

    def __init__(self, cache: KVCache, slots: Sequence[KVSlot]) -> None:
        self._heads = np.arange(cache.kv_heads)[:, None]
        self._first = np.array([slot.start for slot in slots]) * cache.layers * cache.kv_heads
        self._capacity = np.array([slot.capacity for slot in slots])

    def at(self, slot: np.ndarray, token: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows of tokens [n] in slots [n] in the first layer, and the distance to the next layer's, both [kv_heads,
        n]."""
        capacity = self._capacity[slot]
        rows = self._first[slot] + self._heads * capacity + token
        return rows, np.tile(capacity * len(self._heads), (len(self._heads), 1))
