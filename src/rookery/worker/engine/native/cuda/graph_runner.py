"""The GPU runner: caches are ranges of one pool; decode steps are captured once per bucket as CUDA graphs and replayed.

Promises:

* A decode step is one copy to the device, one replay and the output projection; the device is asked nothing in between.
* The padding rows of a bucket belong to no request: they write to the pool's scratch token and their results are not
  read.
* Steps are padded to buckets of shapes, so that few graphs serve all of them.
* Captured graphs are dropped when the adapters' tensors move; the pool's never do. At most ``MAX_GRAPHS`` are kept.

On a device without CUDA graphs the same steps run eagerly, which is how they are tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from cachetools import LRUCache
from torch import Tensor

from rookery.worker.engine.kv_cache import SCRATCH, KVCache
from rookery.worker.engine.sampler import SampledTokens, SamplingKey, sample
from rookery.worker.engine.sequences import SequenceChunk
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import Decoder, LoraProduct
from rookery.worker.model.lora import GroupedMatmul, LoraManager, best_grouped_matmul, grouped_matmul
from rookery.worker.model.varlen_attention import (
    KeyRanges,
    SequenceBounds,
    merge_attention,
    range_attention,
    varlen_attention,
)

LEAST_KEYS = 1024
KEYS_STEP = 4
"""Key ranges are bounded by 1,024, 4,096, 16,384 …: the fused kernels read a range's real length, so that a loose bound
costs nothing, while every further bound is another graph."""


@dataclass(frozen=True)
class Bucket:
    """A decode step of ``rows`` rows over tails of at most ``keys`` tokens, shared prompts of at most ``prefix`` (0: no
    row has one), and ``adapters`` adapter slots (0: all rows use the base model)."""

    rows: int
    keys: int
    prefix: int
    adapters: int


def bucket(rows: int, keys: int, prefix: int, adapters: int) -> Bucket:
    """The smallest bucket that holds a step."""
    return Bucket(padded_rows(rows), padded_keys(keys), padded_keys(prefix) if prefix else 0, adapters)


def padded_rows(rows: int) -> int:
    """1, 2, 3, 4, 6, 8, 12, 16, 24 …: at most a third more than asked for."""
    size = 1
    while size < rows:
        if size % 2 == 0 and rows <= size * 3 // 2:
            return size * 3 // 2
        size *= 2
    return size


def padded_keys(keys: int) -> int:
    size = LEAST_KEYS
    while size < keys:
        size *= KEYS_STEP
    return size


MAX_GRAPHS = 64
"""Graphs kept at once. A graph costs some megabytes of launch records and a second to capture; a worker in a steady
state uses about a dozen."""

_WARM_UPS = 2
"""Eager runs before a step is captured: libraries choose their kernels and set up their workspaces in the first."""


class CudaGraphRunner:
    def __init__(
        self,
        decoder: Decoder,
        loras: LoraManager,
        kv_budget_bytes: int,
        product: GroupedMatmul | None = None,
        most_graphs: int = MAX_GRAPHS,
    ) -> None:
        """``product`` defaults to the fastest one of the device (``lora.best_grouped_matmul``)."""
        self.store = KVCache(decoder.config, decoder.dtype, decoder.device, kv_budget_bytes, token_major=True)
        self.graphs: LRUCache[Bucket, DecodeGraph] = LRUCache(most_graphs)
        self._decoder = decoder
        self._loras = loras
        self._product = product or best_grouped_matmul(decoder.device, decoder.dtype)
        self._windows = sorted(set(decoder.config.windows))
        self._slots, self._layout_version = 0, loras.slots.layout_version
        on_gpu = decoder.device.type == "cuda"
        self._memory = torch.cuda.graph_pool_handle() if on_gpu else None
        """Graphs share their working memory: one runs at a time."""
        self._capture_stream = torch.cuda.Stream(decoder.device) if on_gpu else None
        """The stream of all warm-ups: libraries keep a workspace for every stream that they have seen."""

    def use(self, decoder: Decoder) -> None:
        """Captured graphs know the weights' addresses."""
        self._decoder = decoder
        self.graphs.clear()
        if self._memory is not None:
            self._memory = torch.cuda.graph_pool_handle()

    def prepare_adapters(self, keys: Iterable[str]) -> None:
        self._slots = self._loras.assign_slots(dict.fromkeys(keys))
        if self._loras.slots.layout_version != self._layout_version:
            self._layout_version = self._loras.slots.layout_version
            for key in [key for key in self.graphs if key.adapters > 0]:
                del self.graphs[key]
            if self._memory is not None and not self.graphs:  # a pool that no graph uses cannot be captured into again
                self._memory = torch.cuda.graph_pool_handle()

    def prefill(self, streams: Sequence[SequenceChunk]) -> tuple[Tensor, Tensor]:
        attend = PrefillAttention(self._decoder.config, self.store, streams)
        lora: LoraProduct | None = None
        if self._slots:
            groups = {key: sum(len(s.tokens) for s in group) for key, group in groupby(streams, key=lambda s: s.key)}
            keys, counts = list(groups), list(groups.values())
            if self._product is grouped_matmul:
                ends = self._loras.slot_ends(keys, counts, sum(counts))
                on_device = torch.tensor(ends, dtype=torch.int32, device=self._decoder.device)
                lora = self._loras.grouped_product(on_device, grouped_matmul)
            else:  # with so many rows, padding each group is cheaper than multiplying all rows by all slots
                lora = self._loras.batch_product(keys, counts)
        hidden = self._decoder.forward(attend.tokens, attend.positions, attend, lora)
        return hidden, attend.last

    def decode(self, streams: Sequence[SequenceChunk]) -> Tensor:
        shape = bucket(
            len(streams), max(s.start + 1 for s in streams), max(s.prefix_length for s in streams), self._slots
        )
        ends = self._loras.slot_ends([s.key for s in streams], [1] * len(streams), shape.rows) if shape.adapters else []
        inputs = decode_inputs(shape, self._windows, streams, ends)
        graph = self.graphs.get(shape)
        if graph is None:
            graph = self.graphs[shape] = self._new_graph(shape, inputs)
        return self._decoder.compute_logits(graph(inputs))

    def sample(self, logits: Tensor, keys: Sequence[SamplingKey]) -> SampledTokens:
        return sample(logits, keys)

    def _new_graph(self, shape: Bucket, inputs: np.ndarray) -> DecodeGraph:
        graph = DecodeGraph(self._decoder, self._loras, self.store, shape, self._product)
        if self._capture_stream is not None:
            graph.capture(inputs, self._memory, self._capture_stream)
        return graph


class PrefillAttention:
    """``AttentionBackend`` of prompt chunks, and the flat ``tokens``, ``positions`` and ``last`` tokens that go with
    it."""

    def __init__(self, config: DecoderConfig, pool: KVCache, streams: Sequence[SequenceChunk]) -> None:
        self._config, self._pool = config, pool
        device = pool.k.device
        counts = [len(s.tokens) for s in streams]
        positions = [np.arange(s.start, s.start + n) + s.prefix_length for s, n in zip(streams, counts, strict=True)]
        write = [np.arange(s.start, s.start + n) + s.slot.start for s, n in zip(streams, counts, strict=True)]
        last = np.cumsum(counts) - 1
        flat = np.concatenate([np.concatenate([np.asarray(s.tokens) for s in streams]), *positions, *write, last])
        sent = torch.as_tensor(flat.astype(np.int64)).to(device)
        total = sum(counts)
        self.tokens, self.positions, self._write, self.last = sent.split([total, total, total, len(streams)])
        seen = [s.prefix_length + s.start + n for s, n in zip(streams, counts, strict=True)]
        self._sequences = SequenceBounds.from_lengths(counts, seen, device)
        self._read: Tensor | None = None
        if seen != counts:  # otherwise the chunks bring all the keys that they attend to
            ranges = [
                np.arange(at, at + n)
                for s, count in zip(streams, counts, strict=True)
                for at, n in (
                    (s.prefix_slot.start if s.prefix_slot is not None else SCRATCH, s.prefix_length),
                    (s.slot.start, s.start + count),
                )
            ]
            self._read = torch.as_tensor(np.concatenate(ranges)).to(device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for cache, new in ((self._pool.k[layer], k), (self._pool.v[layer], v)):
            cache.index_copy_(0, self._write, new)
        if self._read is not None:
            k, v = (cache[layer].index_select(0, self._read) for cache in (self._pool.k, self._pool.v))
        return varlen_attention(q, k, v, self._sequences, self._config.windows[layer])


def decode_inputs(
    shape: Bucket, windows: Sequence[int], streams: Sequence[SequenceChunk], ends: Sequence[int]
) -> np.ndarray:
    """All inputs of one decode step, int64 [size], as ``DecodeGraph`` splits them: tokens, positions and write indices
    [3, rows]; per sliding window the key ranges (starts, lengths) of the tails [windows, 2, rows] and, where a row has
    one, of the shared prompts; ``ends`` of the adapters' rows [adapters]. Padding rows read and write scratch."""
    count = len(streams)
    base = np.zeros((3, shape.rows), dtype=np.int64)
    base[2] = SCRATCH
    at = np.array([s.start for s in streams])
    tail = np.array([s.slot.start for s in streams])
    before = np.array([s.prefix_length for s in streams])
    prefix = np.array([s.prefix_slot.start if s.prefix_slot is not None else SCRATCH for s in streams])
    base[:, :count] = [s.tokens[0] for s in streams], before + at, tail + at
    tails = np.zeros((len(windows), 2, shape.rows), dtype=np.int64)
    tails[:, 0], tails[:, 1] = SCRATCH, 1
    prefixes = np.zeros_like(tails)
    for i, window in enumerate(windows):
        most = window or int(before.max() + at.max()) + 1
        seen = np.minimum(at + 1, most)
        tails[i, :, :count] = tail + at + 1 - seen, seen
        seen = np.clip(most - (at + 1), 0, before)
        prefixes[i, :, :count] = prefix + before - seen, seen
    parts = [base, tails, prefixes] if shape.prefix else [base, tails]
    return np.concatenate([*(part.reshape(-1) for part in parts), np.asarray(ends, dtype=np.int64)])


class DecodeGraph:
    """The decode step of one bucket, on its own input buffers."""

    def __init__(
        self, decoder: Decoder, loras: LoraManager, pool: KVCache, shape: Bucket, product: GroupedMatmul
    ) -> None:
        device, config = decoder.device, decoder.config
        windows = sorted(set(config.windows))
        bounds = [shape.keys, shape.prefix] if shape.prefix else [shape.keys]
        sizes = [3 * shape.rows, *[len(windows) * 2 * shape.rows] * len(bounds), shape.adapters]
        self._host = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._inputs = torch.empty(sum(sizes), dtype=torch.int64, device=device)
        base, *ranges, ends = self._inputs.split(sizes)
        tokens, positions, write = base.view(3, shape.rows)
        seen = {
            window: [
                KeyRanges(starts=at[i, 0], lengths=at[i, 1], max_length=bound)
                for part, bound in zip(ranges, bounds, strict=True)
                for at in (part.view(len(windows), 2, shape.rows),)
            ]
            for i, window in enumerate(windows)
        }
        attend = DecodeAttention(config, pool, write, seen)

        def compute() -> Tensor:
            lora = loras.grouped_product(ends.int(), product) if shape.adapters else None
            return decoder.forward(tokens, positions, attend, lora)

        self._run: Callable[[], Tensor] = compute

    def capture(self, inputs: np.ndarray, memory: Any, stream: torch.cuda.Stream) -> None:
        """Captures the step as a CUDA graph. The warm-ups on ``stream`` compute ``inputs``; ``memory`` is the graph's
        memory pool."""
        self._load(inputs)
        self._run = captured(self._run, memory, stream)

    def __call__(self, inputs: np.ndarray) -> Tensor:
        """Hidden states [rows, hidden], valid until the next call."""
        self._load(inputs)
        return self._run()

    def _load(self, inputs: np.ndarray) -> None:
        self._host.copy_(torch.from_numpy(inputs))
        self._inputs.copy_(self._host, non_blocking=True)  # the previous step is over: its tokens have been read


class DecodeAttention:
    """``AttentionBackend`` of one token per row over ranges of the pool; ``seen[window]`` are the tails and, where rows
    have one, the shared prompts."""

    def __init__(self, config: DecoderConfig, pool: KVCache, write: Tensor, seen: dict[int, list[KeyRanges]]) -> None:
        self._config, self._pool, self._write, self._seen = config, pool, write, seen

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._pool.k[layer], self._pool.v[layer]
        keys.index_copy_(0, self._write, k)
        values.index_copy_(0, self._write, v)
        tail, *prefix = (range_attention(q, keys, values, part) for part in self._seen[self._config.windows[layer]])
        return merge_attention(tail, prefix[0]) if prefix else tail[0]


def captured(compute: Callable[[], Tensor], memory: Any, stream: torch.cuda.Stream) -> Callable[[], Tensor]:
    """``compute`` as a CUDA graph that returns the same tensor each time; ``stream`` runs the warm-ups."""
    device = stream.device
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            compute()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):  # other threads stay unrestricted
        result = compute()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay
