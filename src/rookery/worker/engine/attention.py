"""Attention of one batch over cached segments: the same arithmetic for prefill and for decoding.

Promise: a token's output is a function of its own request alone, bit for bit in bfloat16 on CPU. Its keys are split
where the request says (the shared prefix, then the private tail) and nowhere else; scores of both parts lie side by
side, each part beginning at a multiple of ``LANES``, go through one softmax, and each part's values are summed by one
plain product whose padding is zero. Chunk sizes, neighbours and capacities only change padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rookery.worker.engine.cache import Arena
from rookery.worker.exact import LANES, least_rows
from rookery.worker.model.config import DecoderConfig


@dataclass
class Stream:
    """Consecutive tokens of one sequence: ``tokens`` are written into ``place`` from ``start`` on and attend to the
    ``prefix_length`` tokens in ``prefix`` and to their own segment up to themselves. Places are the store's (``Place``
    for ``Batch``)."""

    key: str
    tokens: Sequence[int]
    start: int
    place: Any
    prefix: Any = None
    prefix_length: int = 0


@dataclass
class _Own:
    """The streams whose own segments lie in one arena: ``streams[j]`` reads ``slots[j]``; both None when stream j is
    slot j for all of them."""

    arena: Arena
    count: int
    streams: Tensor | None
    slots: Tensor | None


@dataclass
class _Prefix:
    """The prefixes in one arena. ``grid`` [slots · width] lists each prefix's streams, padded with any; cell
    ``cells[j]`` of the grid is ``streams[j]``."""

    arena: Arena
    used: int
    width: int
    grid: Tensor
    cells: Tensor
    streams: Tensor


class Batch:
    """``Attend`` for a list of streams, and the flat ``tokens`` and ``positions`` that go with it.

    ``last[i]`` is the flat index of stream i's last token. A batch of one token is doubled (``worker/exact.py``)."""

    def __init__(
        self, config: DecoderConfig, streams: Sequence[Stream], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.count = len(streams)
        counts = np.array([len(s.tokens) for s in streams])
        starts = np.concatenate(([0], counts.cumsum()[:-1]))
        owner = np.repeat(np.arange(self.count), counts)
        within = np.arange(counts.sum()) - starts[owner]
        least = least_rows((config.head_dim, LANES), (LANES, config.head_dim))
        self.width = max(int(counts.max()), -(-least // config.group))
        grid = np.zeros((self.count, self.width), dtype=np.int64)
        grid[owner, within] = np.arange(len(owner))
        cells = owner * self.width + within
        tokens = np.concatenate([np.asarray(s.tokens, dtype=np.int64) for s in streams])
        start = np.array([s.start for s in streams])
        prefix = np.array([s.prefix_length for s in streams])
        position = prefix[owner] + start[owner] + within
        if len(tokens) == 1:
            owner, within, cells, tokens, position = (x.repeat(2) for x in (owner, within, cells, tokens, position))
        self.dense = self.width == 1 and len(tokens) == self.count
        self.tokens, self.positions = self._tensor(tokens), self._tensor(position)
        self.grid, self.cells = self._tensor(grid.reshape(-1)), self._tensor(cells)
        self.last = self._tensor(starts + counts - 1)
        self._plan_own(streams, owner, start[owner] + within)
        self._plan_prefixes(streams)
        self._plan_masks(prefix, start)

    def _tensor(self, x: np.ndarray | list[int]) -> Tensor:
        return torch.as_tensor(np.asarray(x, dtype=np.int64), device=self.device)

    def _plan_own(self, streams: Sequence[Stream], owner: np.ndarray, at: np.ndarray) -> None:
        self.own: list[_Own] = []
        self.writes: list[tuple[Arena, Tensor | None, Tensor]] = []
        arenas = list({id(s.place.arena): s.place.arena for s in streams}.values())
        slot_of = np.array([s.place.slot for s in streams])
        for arena in arenas:
            mine = np.array([i for i, s in enumerate(streams) if s.place.arena is arena])
            slots = slot_of[mine]
            if len(mine) == len(arena.places):  # every taken slot: read in place, in the arena's order
                mine = mine[np.argsort(slots)]
                plain = len(arenas) == 1 and bool((mine == np.arange(self.count)).all())
                self.own.append(_Own(arena, len(mine), None if plain else self._tensor(mine), None))
            else:
                self.own.append(_Own(arena, len(mine), self._tensor(mine), self._tensor(slots)))
            flat = np.nonzero(np.isin(owner, mine))[0]
            heads = np.arange(self.config.kv_heads)
            row = (slot_of[owner[flat]][:, None] * self.config.kv_heads + heads) * arena.capacity + at[flat][:, None]
            everything = len(flat) == len(owner)
            self.writes.append((arena, None if everything else self._tensor(flat), self._tensor(row.reshape(-1))))

    def _plan_prefixes(self, streams: Sequence[Stream]) -> None:
        self.prefixes: list[_Prefix] = []
        users: dict[int, tuple[Arena, dict[int, list[int]]]] = {}
        for i, s in enumerate(streams):
            if s.prefix is not None:
                arena = s.prefix.arena
                users.setdefault(id(arena), (arena, {}))[1].setdefault(s.prefix.slot, []).append(i)
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
                _Prefix(arena, used, width, self._tensor(grid.reshape(-1)), self._tensor(cells), self._tensor(members))
            )

    def _plan_masks(self, prefix: np.ndarray, start: np.ndarray) -> None:
        """Additive masks [streams, 1, width · group, keys], one per sliding window in use, and the score buffer."""
        self.before = max((p.arena.capacity for p in self.prefixes), default=0)
        after = max(o.arena.capacity for o in self.own)
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
            self.masks[window] = mask.unsqueeze(1)
        # Gaps between a segment's capacity and the widest are never written: zero here, so that no NaN meets the mask.
        self.scores = torch.zeros(
            self.count,
            self.config.kv_heads,
            self.width * self.config.group,
            self.before + after,
            dtype=self.dtype,
            device=self.device,
        )

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``decoder.Attend``."""
        cfg = self.config
        self._write(layer, k, v)
        q = q * (1.0 / math.sqrt(cfg.head_dim))
        rows, size = self.width * cfg.group, cfg.head_dim
        if self.dense:
            q = q.reshape(self.count, cfg.kv_heads, rows, size)
        else:
            q = q.index_select(0, self.grid).view(self.count, self.width, cfg.kv_heads, cfg.group, size)
            q = q.transpose(1, 2).contiguous().view(self.count, cfg.kv_heads, rows, size)
        for own in self.own:
            mine = q if own.streams is None else q.index_select(0, own.streams)
            keys = _read(own, own.arena.k[layer])
            scores = torch.bmm(mine.view(-1, rows, size), keys.flatten(0, 1).transpose(1, 2))
            scores = scores.view(own.count, cfg.kv_heads, rows, -1)
            region = self.scores[..., self.before : self.before + own.arena.capacity]
            if own.streams is None:
                region.copy_(scores)
            else:
                region.index_copy_(0, own.streams, scores)
        for prefix in self.prefixes:
            keys = prefix.arena.k[layer, : prefix.used].flatten(0, 1)
            scores = torch.bmm(self._gather(prefix, q), keys.transpose(1, 2))
            region = self.scores[..., : prefix.arena.capacity]
            region.index_copy_(0, prefix.streams, self._scatter(prefix, scores))
        p = torch.softmax(self.scores + self.masks[cfg.windows[layer]], -1)
        out: Tensor | None = None
        for own in self.own:
            part = p[..., self.before : self.before + own.arena.capacity]
            mine = part if own.streams is None else part.index_select(0, own.streams)
            values = _read(own, own.arena.v[layer])
            summed = torch.bmm(mine.contiguous().view(-1, rows, own.arena.capacity), values.flatten(0, 1))
            summed = summed.view(own.count, cfg.kv_heads, rows, size)
            if own.streams is None:
                out = summed
            else:
                out = torch.empty_like(q) if out is None else out
                out.index_copy_(0, own.streams, summed)
        assert out is not None
        for prefix in self.prefixes:
            values = prefix.arena.v[layer, : prefix.used].flatten(0, 1)
            summed = torch.bmm(self._gather(prefix, p[..., : prefix.arena.capacity]), values)
            out.index_add_(0, prefix.streams, self._scatter(prefix, summed))
        if self.dense:
            return out.view(self.count, cfg.heads, size)
        out = out.view(self.count, cfg.kv_heads, self.width, cfg.group, size).transpose(1, 2)
        return out.reshape(self.count * self.width, cfg.heads, size).index_select(0, self.cells)

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        size = self.config.head_dim
        for arena, flat, rows in self.writes:
            for cache, new in ((arena.k, k), (arena.v, v)):
                chosen = new if flat is None else new.index_select(0, flat)
                cache[layer].view(-1, size).index_copy_(0, rows, chosen.reshape(-1, size))

    def _gather(self, prefix: _Prefix, x: Tensor) -> Tensor:
        """x [streams, kv_heads, rows, n] → [prefixes · kv_heads, width · rows, n], each prefix's streams in a row."""
        heads, rows, n = x.shape[1:]
        picked = x.index_select(0, prefix.grid).view(prefix.used, prefix.width, heads, rows, n)
        return picked.transpose(1, 2).contiguous().view(prefix.used * heads, prefix.width * rows, n)

    def _scatter(self, prefix: _Prefix, x: Tensor) -> Tensor:
        """The way back, one entry per ``prefix.streams``: → [len(streams), kv_heads, rows, n]."""
        heads, n = self.config.kv_heads, x.shape[-1]
        x = x.view(prefix.used, heads, prefix.width, -1, n).transpose(1, 2)
        return x.reshape(prefix.used * prefix.width, heads, -1, n).index_select(0, prefix.cells)


def _read(own: _Own, cache: Tensor) -> Tensor:
    """[streams, kv_heads, capacity, head_dim] in the order of ``own.streams``."""
    return cache[: own.count] if own.slots is None else cache.index_select(0, own.slots)
