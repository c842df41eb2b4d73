"""Attention of a CPU batch over cached segments: the same arithmetic for prefill and for decoding.

Promise: a token's output is a function of its own request alone, bit for bit on CPU. Its keys lie in one row: those of
the shared prefix, zeros up to a multiple of ``LANES``, then those of the private tail, then zeros. All scores go
through one softmax, and all values are summed by one product (or by several, split as ``contraction_chunks`` says).
Chunk sizes, other requests and capacities only change how many zeros follow.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rookery.worker.engine.kv_cache import KVCache
from rookery.worker.engine.sequences import SegmentPlan, TokenStream
from rookery.worker.model.batch_invariance import (
    LANES,
    chunked_matmul,
    contraction_chunks,
    exact_rows,
    pad_rows,
)
from rookery.worker.model.config import DecoderConfig


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


def weighted_sum(weights: Tensor, values: Tensor, out: Tensor) -> Tensor:
    """``out`` = weights [batch, rows, keys] · values [batch, keys, head_dim]; chunks of the keys add up in float32."""
    chunks = contraction_chunks(values.shape[1], values.dtype, values.device)
    if len(chunks) == 1:
        return torch.bmm(weights, values, out=out)
    return out.copy_(chunked_matmul(weights, values.split(chunks, 1)))
