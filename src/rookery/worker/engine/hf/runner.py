"""Runners of the native engine over models of transformers: its queue, caches, sampling and protocol, their arithmetic.

* ``StreamRunner`` computes the tokens of all requests as one stream, with attention over the native engine's cache. It
  serves models of full and sliding attention whose layers have keys and values of one shape.
* ``SequenceRunner`` serves every other model (linear attention, state spaces): each request has a cache of transformers
  and is computed by itself, with its group's prompt copied instead of computed again.

With a seed, a text is the same up to the order of sums: products depend on the batch in their last bits.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from rookery.worker.engine.kv_cache import KVCache, KVSlot, SegmentStore
from rookery.worker.engine.runner import BaseRunner, Runner, adapter_groups
from rookery.worker.engine.sequences import SegmentPlan, SequenceChunk, TokenStream
from rookery.worker.model.lora import LoraManager
from rookery.worker.model.transformers_model import Attend, TransformersModel


class StreamAttention(SegmentPlan):
    """The ``AttentionPlan`` of a stream over cached segments."""

    def __init__(self, cache: KVCache, stream: TokenStream) -> None:
        super().__init__(cache, stream)
        self._masks: dict[int, Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, attend: Attend) -> Tensor:
        read = self.exchange(layer, k[0].transpose(0, 1), v[0].transpose(0, 1))
        keys, values = (x.view(-1, self.count, *x.shape[1:]).transpose(0, 1) for x in read)
        queries = q[0].index_select(1, self.grid).view(q.shape[1], self.count, -1, q.shape[3]).transpose(0, 1)
        if window not in self._masks:
            self._masks[window] = seen(self.gap, window)[:, None]
        return attend(queries, keys, values, self._masks[window]).flatten(0, 1).index_select(0, self.cells)[None]


def seen(gap: Tensor, window: int) -> Tensor:
    """Whether a query sees a key, by their distance and the sliding window (0: none)."""
    return (gap >= 0) & (gap < window) if window else gap >= 0


class StreamRunner(BaseRunner):
    def __init__(self, model: TransformersModel, loras: LoraManager, kv_budget_bytes: int) -> None:
        assert model.cache_shape is not None
        self._cache = KVCache(model.cache_shape, model.dtype, model.device, kv_budget_bytes)
        super().__init__(model, loras, self._cache)

    def prefill(self, streams: Sequence[SequenceChunk]) -> tuple[Tensor, Tensor]:
        attend = StreamAttention(self._cache, TokenStream(streams, double=False))
        lora = self._loras.batch_product(*zip(*adapter_groups(streams), strict=True))
        with self._decoder.adapted(lora, len(attend.tokens), attend):
            hidden = self._decoder.hidden(attend.tokens[None], attend.positions[None])[0]
        return hidden, attend.last


class SequenceStore(SegmentStore):
    """Caches of transformers by slot, within a budget. A token takes what it adds to a cache; each cache also has a
    state of one size, and begins with a copy of the shared prompt before it."""

    rewinds = False
    copies_prefix = True

    def __init__(self, model: TransformersModel, budget_bytes: int) -> None:
        self.caches: WeakKeyDictionary[KVSlot, DynamicCache] = WeakKeyDictionary()
        one, two = (cache_bytes(_probe(model, length)) for length in (1, 2))
        super().__init__(budget_bytes, max(two - one, 1), max(2 * one - two, 0))

    def move(self, old: KVSlot, new: KVSlot) -> None:
        if old in self.caches:
            self.caches[new] = self.caches.pop(old)


def _probe(model: TransformersModel, length: int) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), model.adapted(None, 0, causal_attention):
        model.hidden(torch.zeros(1, length, dtype=torch.int64, device=model.device), cache=cache)
    return cache


def cache_bytes(contents: Any) -> int:
    """The bytes of the tensors in a cache, or in a part of it."""
    if isinstance(contents, DynamicCache):
        return sum(cache_bytes(list(vars(layer).values())) for layer in contents.layers)
    if isinstance(contents, dict | list | tuple):
        return sum(map(cache_bytes, contents.values() if isinstance(contents, dict) else contents))
    return contents.nbytes if isinstance(contents, Tensor) else 0


def causal_attention(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, attend: Attend) -> Tensor:
    """The ``AttentionPlan`` of one sequence, whose cache gives keys and values up to the last query."""
    queries, keys = (torch.arange(x.shape[2], device=x.device) for x in (q, k))
    gap = queries[:, None] + (len(keys) - len(queries)) - keys
    return attend(q, k, v, seen(gap, window)[None, None])


class SequenceRunner(BaseRunner):
    def __init__(self, model: TransformersModel, loras: LoraManager, kv_budget_bytes: int) -> None:
        store = SequenceStore(model, kv_budget_bytes)
        self._caches = store.caches
        super().__init__(model, loras, store)

    def prefill(self, streams: Sequence[SequenceChunk]) -> tuple[Tensor, Tensor]:
        hidden, counts = [], [len(chunk.tokens) for chunk in streams]
        for chunk, count in zip(streams, counts, strict=True):
            first = chunk.prefix_length + chunk.start
            device = self._decoder.device
            tokens = torch.tensor(chunk.tokens, device=device)[None]
            positions = torch.arange(first, first + count, device=device)[None]
            lora = self._loras.batch_product([chunk.key], [count])
            with self._decoder.adapted(lora, count, causal_attention):
                hidden.append(self._decoder.hidden(tokens, positions, cache=self._cache(chunk))[0])
        return torch.cat(hidden), torch.tensor(counts, device=self._decoder.device).cumsum(0) - 1

    def _cache(self, chunk: SequenceChunk) -> DynamicCache:
        """The cache of the tokens before the chunk."""
        if chunk.start == 0:
            shared = chunk.prefix_slot
            self._caches[chunk.slot] = (
                DynamicCache(config=self._decoder.config) if shared is None else copy.deepcopy(self._caches[shared])
            )
        return self._caches[chunk.slot]


def transformers_runner(model: TransformersModel, loras: LoraManager, kv_budget_bytes: int) -> Runner:
    """The faster one of those that can compute ``model``."""
    runner = StreamRunner if model.cache_shape is not None else SequenceRunner
    return runner(model, loras, kv_budget_bytes)
