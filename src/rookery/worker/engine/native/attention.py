"""Attention of a CPU batch over cached segments: the same arithmetic for prefill and for decoding.

Promise: a token's output is a function of its own request alone, bit for bit on CPU. Its keys are split between the
shared prefix and the private tail and nowhere else. The scores of both parts lie side by side, each part starting at a
multiple of ``LANES``, and go through one softmax; each part's values are summed by one plain product whose padding is
zero (or by several, split as ``contraction_chunks`` says). Chunk sizes, other requests and capacities only change
padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rookery.worker.engine.native.kv_cache import Arena
from rookery.worker.model.batch_invariance import LANES, chunked_matmul, contraction_chunks, exact_rows, pad_rows
from rookery.worker.model.config import DecoderConfig


@dataclass
class SequenceChunk:
    """Consecutive tokens of one sequence. They are written into ``slot`` from ``start`` on and attend to the
    ``prefix_length`` tokens in ``prefix_slot`` and to their own segment up to themselves. ``key`` is their adapter.
    Slots are those of the runner's ``KVStore``."""

    key: str
    tokens: Sequence[int]
    start: int
    slot: Any
    prefix_slot: Any = None
    prefix_length: int = 0


@dataclass
class _TailBlock:
    """The chunks whose tails lie in one arena: those from ``begin`` to before ``end``, in the order of their slots.
    ``slots`` is None when they fill all taken slots, which are then read in place."""

    arena: Arena
    begin: int
    end: int
    slots: Tensor | None

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.end)


@dataclass
class _PrefixBlock:
    """The shared prefixes in one arena. ``grid`` [slots · width] lists the chunks of each prefix, padded with
    arbitrary ones; cell ``cells[j]`` of the grid is chunk ``streams[j]``."""

    arena: Arena
    used: int
    width: int
    grid: Tensor
    cells: Tensor
    streams: Tensor


class SegmentAttention:
    """``AttentionBackend`` of a list of chunks, and the flat ``tokens`` and ``positions`` that go with it.

    ``last[i]`` is the flat index of chunk i's last token. A lone token is doubled (``batch_invariance``). Internally,
    chunks are in the order in which their tails lie in memory: cell ``cells[j]`` of the grid [chunks · width] is token
    j, and cell i of it reads token ``grid[i]`` (padding reads an arbitrary one)."""

    def __init__(
        self, config: DecoderConfig, streams: Sequence[SequenceChunk], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.count = len(streams)
        counts = np.array([len(s.tokens) for s in streams])
        starts = np.concatenate(([0], counts.cumsum()[:-1]))
        owner = np.repeat(np.arange(self.count), counts)
        within = np.arange(counts.sum()) - starts[owner]
        self.width = int(counts.max())
        self.rows = exact_rows(dtype, self.width * config.group, (config.head_dim, LANES), (LANES, config.head_dim))
        arenas = list({id(s.slot.arena): s.slot.arena for s in streams}.values())
        number = {id(arena): i for i, arena in enumerate(arenas)}
        arena_of = np.array([number[id(s.slot.arena)] for s in streams])
        slot_of = np.array([s.slot.index for s in streams])
        order = np.lexsort((slot_of, arena_of))
        place = np.empty_like(order)
        place[order] = np.arange(self.count)
        grid = np.zeros((self.count, self.width), dtype=np.int64)
        grid[place[owner], within] = np.arange(len(owner))
        cells = place[owner] * self.width + within
        tokens = np.concatenate([np.asarray(s.tokens, dtype=np.int64) for s in streams])
        start = np.array([s.start for s in streams])
        prefix = np.array([s.prefix_length for s in streams])
        position = prefix[owner] + start[owner] + within
        if len(tokens) == 1:
            owner, within, cells, tokens, position = (x.repeat(2) for x in (owner, within, cells, tokens, position))
        self.dense = self.width == 1 and len(tokens) == self.count
        self.in_order = self.dense and bool((order == np.arange(self.count)).all())
        self.tokens, self.positions = self._tensor(tokens), self._tensor(position)
        self.grid, self.cells = self._tensor(grid.reshape(-1)), self._tensor(cells)
        self.last = self._tensor(starts + counts - 1)
        self._plan_tails(arenas, arena_of[order], slot_of[order])
        self._plan_writes(arenas, arena_of[owner], slot_of[owner], start[owner] + within)
        self._plan_prefixes([streams[i] for i in order])
        self._plan_masks(prefix[order], start[order])

    def _tensor(self, x: np.ndarray | list[int]) -> Tensor:
        return torch.as_tensor(np.asarray(x, dtype=np.int64), device=self.device)

    def _plan_tails(self, arenas: Sequence[Arena], arena_of: np.ndarray, slot_of: np.ndarray) -> None:
        self.tails: list[_TailBlock] = []
        for i, arena in enumerate(arenas):
            begin, end = (int(x) for x in np.searchsorted(arena_of, (i, i + 1)))
            whole = end - begin == len(arena.taken)  # then they are read in place
            self.tails.append(_TailBlock(arena, begin, end, None if whole else self._tensor(slot_of[begin:end])))

    def _plan_writes(self, arenas: Sequence[Arena], arena_of: np.ndarray, slot_of: np.ndarray, at: np.ndarray) -> None:
        """Arguments are per token."""
        self.writes: list[tuple[Arena, Tensor | None, Tensor]] = []
        heads = np.arange(self.config.kv_heads)
        for i, arena in enumerate(arenas):
            flat = np.nonzero(arena_of == i)[0]
            row = (slot_of[flat][:, None] * self.config.kv_heads + heads) * arena.capacity + at[flat][:, None]
            chosen = None if len(arenas) == 1 else self._tensor(flat)
            self.writes.append((arena, chosen, self._tensor(row.reshape(-1))))

    def _plan_prefixes(self, streams: Sequence[SequenceChunk]) -> None:
        self.prefixes: list[_PrefixBlock] = []
        users: dict[int, tuple[Arena, dict[int, list[int]]]] = {}
        for i, s in enumerate(streams):
            if s.prefix_slot is not None:
                arena = s.prefix_slot.arena
                users.setdefault(id(arena), (arena, {}))[1].setdefault(s.prefix_slot.index, []).append(i)
        for arena, by_slot in users.values():
            used, width = max(by_slot) + 1, max(map(len, by_slot.values()))
            grid = np.zeros((used, width), dtype=np.int64)
            cells: list[int] = []
            members: list[int] = []
            for slot, mine in by_slot.items():
                grid[slot, : len(mine)] = mine
                cells.extend(range(slot * width, slot * width + len(mine)))
                members.extend(mine)
            self.prefixes.append(
                _PrefixBlock(
                    arena, used, width, self._tensor(grid.reshape(-1)), self._tensor(cells), self._tensor(members)
                )
            )

    def _plan_masks(self, prefix: np.ndarray, start: np.ndarray) -> None:
        """Additive masks, one per sliding window in use: [chunks · kv_heads, rows, keys] where one product computes all
        scores, else [chunks, 1, rows, keys] and the score buffer."""
        self.before = max((p.arena.capacity for p in self.prefixes), default=0)
        after = max(o.arena.capacity for o in self.tails)
        self.one_product = len(self.tails) == 1 and not self.prefixes
        # positions of queries and keys, counted from the sequence's first token
        query = self._tensor(prefix + start)[:, None] + torch.arange(self.width, device=self.device)
        key = torch.arange(after, device=self.device) + self._tensor(prefix)[:, None]
        if self.before:
            front = torch.arange(self.before, device=self.device).expand(self.count, -1)
            ends = self._tensor(prefix)[:, None]
            key = torch.cat((front.masked_fill(front >= ends, torch.iinfo(torch.int64).max // 2), key), 1)
        gap = query[:, :, None] - key[:, None, :]
        self.masks = {}
        for window in set(self.config.windows):
            hidden = (gap < 0) | (gap >= window) if window else gap < 0
            mask = torch.zeros(gap.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -torch.inf)
            if self.config.group > 1:
                mask = mask.repeat_interleave(self.config.group, 1)
            mask = pad_rows(mask, self.rows)
            if self.one_product:
                self.masks[window] = mask.repeat_interleave(self.config.kv_heads, 0)
            else:
                self.masks[window] = mask.unsqueeze(1)
        if not self.one_product:
            # Gaps between a segment's capacity and the widest one are never written: they are zero, so that the mask
            # never meets a NaN.
            shape = (self.count, self.config.kv_heads, self.rows, self.before + after)
            self.scores = torch.zeros(shape, dtype=self.dtype, device=self.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``AttentionBackend``."""
        cfg = self.config
        self._write(layer, k, v)
        q = q * (1.0 / math.sqrt(cfg.head_dim))
        real, rows, size = self.width * cfg.group, self.rows, cfg.head_dim
        if not self.in_order:
            q = q.index_select(0, self.grid)
        if not self.dense:
            q = q.view(self.count, self.width, cfg.kv_heads, cfg.group, size).transpose(1, 2)
        q = pad_rows(q.reshape(self.count, cfg.kv_heads, real, size), rows).contiguous()
        p = torch.softmax(self._scores(layer, q), -1)
        out = q.new_empty(q.shape)
        for block in self.tails:
            part = p[block.rows, ..., self.before : self.before + block.arena.capacity]
            values = _read(block, block.arena.v[layer]).flatten(0, 1)
            weighted_sum(part.reshape(len(values), rows, -1), values, out[block.rows].view(len(values), rows, size))
        for prefix in self.prefixes:
            values = prefix.arena.v[layer, : prefix.used].flatten(0, 1)
            weights = self._gather(prefix, p[..., : prefix.arena.capacity])
            summed = weighted_sum(weights, values, out.new_empty(*weights.shape[:2], size))
            out.index_add_(0, prefix.streams, self._scatter(prefix, summed))
        out = out[:, :, :real]
        if not self.dense:
            out = out.view(self.count, cfg.kv_heads, self.width, cfg.group, size).transpose(1, 2)
        out = out.reshape(self.count * self.width, cfg.heads, size)
        return out if self.in_order else out.index_select(0, self.cells)

    def _scores(self, layer: int, q: Tensor) -> Tensor:
        """Masked scores of q [chunks, kv_heads, rows, head_dim]: [chunks, kv_heads, rows, keys]."""
        rows, size = q.shape[2:]
        mask = self.masks[self.config.windows[layer]]
        for block in self.tails:
            keys = _read(block, block.arena.k[layer]).flatten(0, 1).transpose(1, 2)
            mine = q[block.rows].view(len(keys), rows, size)
            if self.one_product:
                return torch.baddbmm(mask, mine, keys).view(*q.shape[:3], -1)
            scores = torch.bmm(mine, keys).view(block.end - block.begin, -1, rows, block.arena.capacity)
            self.scores[block.rows, ..., self.before : self.before + block.arena.capacity] = scores
        for prefix in self.prefixes:
            keys = prefix.arena.k[layer, : prefix.used].flatten(0, 1).transpose(1, 2)
            scores = torch.bmm(self._gather(prefix, q), keys)
            self.scores[..., : prefix.arena.capacity].index_copy_(0, prefix.streams, self._scatter(prefix, scores))
        return self.scores + mask

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        size = self.config.head_dim
        for arena, flat, rows in self.writes:
            for cache, new in ((arena.k, k), (arena.v, v)):
                chosen = new if flat is None else new.index_select(0, flat)
                cache[layer].view(-1, size).index_copy_(0, rows, chosen.reshape(-1, size))

    def _gather(self, prefix: _PrefixBlock, x: Tensor) -> Tensor:
        """x [chunks, kv_heads, rows, n] → [prefixes · kv_heads, width · rows, n], by prefix."""
        heads, rows, n = x.shape[1:]
        picked = x.index_select(0, prefix.grid).view(prefix.used, prefix.width, heads, rows, n)
        return picked.transpose(1, 2).contiguous().view(prefix.used * heads, prefix.width * rows, n)

    def _scatter(self, prefix: _PrefixBlock, x: Tensor) -> Tensor:
        """The inverse of ``_gather``: → [len(prefix.streams), kv_heads, rows, n]."""
        heads, n = self.config.kv_heads, x.shape[-1]
        x = x.view(prefix.used, heads, prefix.width, -1, n).transpose(1, 2)
        return x.reshape(prefix.used * prefix.width, heads, -1, n).index_select(0, prefix.cells)


def weighted_sum(weights: Tensor, values: Tensor, out: Tensor) -> Tensor:
    """``out`` = weights [batch, rows, keys] · values [batch, keys, head_dim]; chunks of the keys add up in float32."""
    chunks = contraction_chunks(values.shape[1], values.dtype, values.device)
    if len(chunks) == 1:
        return torch.bmm(weights, values, out=out)
    return out.copy_(chunked_matmul(weights, values.split(chunks, 1)))


def _read(block: _TailBlock, cache: Tensor) -> Tensor:
    """[chunks, kv_heads, capacity, head_dim] of the block's chunks."""
    return cache[: block.end - block.begin] if block.slots is None else cache.index_select(0, block.slots)
