"""Attention of one batch over cached segments: the same arithmetic for prefill and for decoding.

Promise: a token's output is a function of its own request alone, bit for bit on CPU. Its keys are split
where the request says (the shared prefix, then the private tail) and nowhere else; scores of both parts lie side by
side, each part beginning at a multiple of ``LANES``, go through one softmax, and each part's values are summed by one
plain product whose padding is zero (or by several, cut where ``exact.depths`` says). Chunk sizes, neighbours and
capacities only change padding.
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
    """Consecutive tokens of one sequence: ``tokens`` are written into ``place`` from ``start`` on and attend to the
    ``prefix_length`` tokens in ``prefix`` and to their own segment up to themselves. Places are the store's (``Place``
    for ``Batch``)."""

    key: str
    tokens: Sequence[int]
    start: int
    slot: Any
    prefix_slot: Any = None
    prefix_length: int = 0


@dataclass
class _TailBlock:
    """The streams whose own segments lie in one arena: those from ``begin`` to ``end``, in the order of their slots.
    ``slots`` is None when they are all of its taken slots."""

    arena: Arena
    begin: int
    end: int
    slots: Tensor | None

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.end)


@dataclass
class _PrefixBlock:
    """The prefixes in one arena. ``grid`` [slots · width] lists each prefix's streams, padded with any; cell
    ``cells[j]`` of the grid is ``streams[j]``."""

    arena: Arena
    used: int
    width: int
    grid: Tensor
    cells: Tensor
    streams: Tensor


class SegmentAttention:
    """``Attend`` for a list of streams, and the flat ``tokens`` and ``positions`` that go with it.

    ``last[i]`` is the flat index of stream i's last token. A batch of one token is doubled (``worker/exact.py``).
    Inside, streams stand in the order in which their own segments lie in memory: cell ``cells[j]`` of the grid
    [streams · width] is token j, and cell i of it reads token ``grid[i]`` (padding any)."""

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
        standing = np.empty_like(order)
        standing[order] = np.arange(self.count)
        grid = np.zeros((self.count, self.width), dtype=np.int64)
        grid[standing[owner], within] = np.arange(len(owner))
        cells = standing[owner] * self.width + within
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
        self._plan_own(arenas, arena_of[order], slot_of[order])
        self._plan_writes(arenas, arena_of[owner], slot_of[owner], start[owner] + within)
        self._plan_prefixes([streams[i] for i in order])
        self._plan_masks(prefix[order], start[order])

    def _tensor(self, x: np.ndarray | list[int]) -> Tensor:
        return torch.as_tensor(np.asarray(x, dtype=np.int64), device=self.device)

    def _plan_own(self, arenas: Sequence[Arena], arena_of: np.ndarray, slot_of: np.ndarray) -> None:
        self.own: list[_TailBlock] = []
        for i, arena in enumerate(arenas):
            begin, end = (int(x) for x in np.searchsorted(arena_of, (i, i + 1)))
            whole = end - begin == len(arena.taken)  # then they are read in place
            self.own.append(_TailBlock(arena, begin, end, None if whole else self._tensor(slot_of[begin:end])))

    def _plan_writes(self, arenas: Sequence[Arena], arena_of: np.ndarray, slot_of: np.ndarray, at: np.ndarray) -> None:
        """All are by token."""
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
        """Additive masks, one per sliding window in use: [streams · kv_heads, rows, keys] where one product answers all
        scores, else [streams, 1, rows, keys] and the score buffer."""
        self.before = max((p.arena.capacity for p in self.prefixes), default=0)
        after = max(o.arena.capacity for o in self.own)
        self.alone = len(self.own) == 1 and not self.prefixes
        # query and key positions, counted from the sequence's first token
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
            if self.alone:
                self.masks[window] = mask.repeat_interleave(self.config.kv_heads, 0)
            else:
                self.masks[window] = mask.unsqueeze(1)
        if not self.alone:
            # Gaps between a segment's capacity and the widest are never written: zero, so that no NaN meets the mask.
            shape = (self.count, self.config.kv_heads, self.rows, self.before + after)
            self.scores = torch.zeros(shape, dtype=self.dtype, device=self.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``decoder.Attend``."""
        cfg = self.config
        self._write(layer, k, v)
        q = q * (1.0 / math.sqrt(cfg.head_dim))
        real, rows, size = self.width * cfg.group, self.rows, cfg.head_dim
        if not self.in_order:
            q = q.index_select(0, self.grid)
        if not self.dense:
            q = q.view(self.count, self.width, cfg.kv_heads, cfg.group, size).transpose(1, 2)
        q = pad_rows(q.reshape(self.count, cfg.kv_heads, real, size), rows).contiguous()
        p = torch.softmax(self._scored(layer, q), -1)
        out = q.new_empty(q.shape)
        for own in self.own:
            part = p[own.rows, ..., self.before : self.before + own.arena.capacity]
            values = _read(own, own.arena.v[layer]).flatten(0, 1)
            _weigh(part.reshape(len(values), rows, -1), values, out[own.rows].view(len(values), rows, size))
        for prefix in self.prefixes:
            values = prefix.arena.v[layer, : prefix.used].flatten(0, 1)
            weights = self._gather(prefix, p[..., : prefix.arena.capacity])
            summed = _weigh(weights, values, out.new_empty(*weights.shape[:2], size))
            out.index_add_(0, prefix.streams, self._scatter(prefix, summed))
        out = out[:, :, :real]
        if not self.dense:
            out = out.view(self.count, cfg.kv_heads, self.width, cfg.group, size).transpose(1, 2)
        out = out.reshape(self.count * self.width, cfg.heads, size)
        return out if self.in_order else out.index_select(0, self.cells)

    def _scored(self, layer: int, q: Tensor) -> Tensor:
        """Scores of q [streams, kv_heads, rows, head_dim] with what is hidden at -inf: [streams, kv_heads, rows,
        keys]."""
        rows, size = q.shape[2:]
        mask = self.masks[self.config.windows[layer]]
        for own in self.own:
            keys = _read(own, own.arena.k[layer]).flatten(0, 1).transpose(1, 2)
            mine = q[own.rows].view(len(keys), rows, size)
            if self.alone:
                return torch.baddbmm(mask, mine, keys).view(*q.shape[:3], -1)
            scores = torch.bmm(mine, keys).view(own.end - own.begin, -1, rows, own.arena.capacity)
            self.scores[own.rows, ..., self.before : self.before + own.arena.capacity] = scores
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
        """x [streams, kv_heads, rows, n] → [prefixes · kv_heads, width · rows, n], each prefix's streams in a row."""
        heads, rows, n = x.shape[1:]
        picked = x.index_select(0, prefix.grid).view(prefix.used, prefix.width, heads, rows, n)
        return picked.transpose(1, 2).contiguous().view(prefix.used * heads, prefix.width * rows, n)

    def _scatter(self, prefix: _PrefixBlock, x: Tensor) -> Tensor:
        """The way back, one entry per ``prefix.streams``: → [len(streams), kv_heads, rows, n]."""
        heads, n = self.config.kv_heads, x.shape[-1]
        x = x.view(prefix.used, heads, prefix.width, -1, n).transpose(1, 2)
        return x.reshape(prefix.used * prefix.width, heads, -1, n).index_select(0, prefix.cells)


def _weigh(weights: Tensor, values: Tensor, out: Tensor) -> Tensor:
    """``out`` = weights [batch, rows, keys] · values [batch, keys, head_dim]; several pieces of the keys add up in
    float32."""
    pieces = contraction_chunks(values.shape[1], values.dtype, values.device)
    if len(pieces) == 1:
        return torch.bmm(weights, values, out=out)
    return out.copy_(chunked_matmul(weights, values.split(pieces, 1)))


def _read(own: _TailBlock, cache: Tensor) -> Tensor:
    """[streams, kv_heads, capacity, head_dim] of the streams from ``own.begin`` on."""
    return cache[: own.end - own.begin] if own.slots is None else cache.index_select(0, own.slots)
