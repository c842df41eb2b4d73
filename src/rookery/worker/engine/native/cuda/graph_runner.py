"""A GPU's runner: caches are ranges of one pool, decode steps are recorded once per bucket and replayed.

Promises:

* A decode step is one copy to the device, one replay and the output projection: nothing between is asked of the device.
* A bucket's padding rows are nobody's: they write to the pool's scratch and no one reads what they compute.
* Recorded steps are dropped when the adapters' tensors move; the pool's never do. At most ``MOST_GRAPHS`` are kept.

On a device without graphs the same steps run as they are, which is how they are tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rookery.worker.engine.native.attention import SequenceChunk
from rookery.worker.engine.native.cuda.buckets import Bucket, Kept, bucket
from rookery.worker.engine.native.cuda.kv_pool import SCRATCH, KVPool
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

_WARM_UPS = 2
"""Runs before a step is recorded: libraries choose their kernels and set up their workspaces in the first."""


class CudaGraphRunner:
    """See ``runner.Runner``."""

    def __init__(
        self, decoder: Decoder, bank: LoraManager, kv_budget_bytes: int, product: GroupedMatmul | None = None
    ) -> None:
        """Without it, ``product`` is the device's (``grouped.product_for``)."""
        self.store = KVPool(decoder.config, decoder.dtype, decoder.device, kv_budget_bytes)
        self._decoder = decoder
        self._bank = bank
        self._product = product or best_grouped_matmul(decoder.device, decoder.dtype)
        self._windows = sorted(set(decoder.config.windows))
        self._places, self._state = 0, bank.layout_version
        self._steps: Kept[DecodeGraph] = Kept()
        self._memory = torch.cuda.graph_pool_handle() if decoder.device.type == "cuda" else None
        """Recorded steps share what they compute in: one runs at a time."""
        self._aside = torch.cuda.Stream(decoder.device) if decoder.device.type == "cuda" else None
        """Where steps run before they are recorded: libraries keep a workspace for every stream that they met."""

    def prepare_adapters(self, keys: Iterable[str]) -> None:
        self._places = self._bank.assign_slots(dict.fromkeys(keys))
        if self._bank.layout_version != self._state:
            self._state = self._bank.layout_version
            self._steps.drop(lambda of: of.adapters > 0)
            if self._memory is not None and not len(self._steps):  # what nothing recorded uses is not taken up again
                self._memory = torch.cuda.graph_pool_handle()

    def prefill(self, streams: Sequence[SequenceChunk]) -> tuple[Tensor, Tensor]:
        device = self._decoder.device
        attend = PrefillAttention(self._decoder.config, self.store, streams)
        lora: LoraProduct | None = None
        if self._places:
            groups = {key: sum(len(s.tokens) for s in group) for key, group in groupby(streams, key=lambda s: s.key)}
            keys, counts = list(groups), list(groups.values())
            if self._product is grouped_matmul:
                ends = torch.tensor(self._bank.slot_ends(keys, counts, sum(counts)), dtype=torch.int32, device=device)
                lora = self._bank.grouped_product(ends, grouped_matmul)
            else:  # so many rows want groups padded to the largest, not all rows by all places
                lora = self._bank.batch_product(keys, counts, pinned=True)  # recorded steps know where adapters are
        hidden = self._decoder.forward(attend.tokens, attend.positions, attend, lora)
        return hidden, attend.last

    def decode(self, streams: Sequence[SequenceChunk]) -> Tensor:
        of = bucket(
            len(streams),
            max(s.start + 1 for s in streams),
            max(s.prefix_length for s in streams),
            self._places,
        )
        ends = self._bank.slot_ends([s.key for s in streams], [1] * len(streams), of.rows) if of.adapters else []
        filled = decode_inputs(of, self._windows, streams, ends)
        step = self._steps.get(of, lambda: self._step(of, filled))
        return self._decoder.compute_logits(step(filled))

    def _step(self, of: Bucket, first: np.ndarray) -> DecodeGraph:
        step = DecodeGraph(self._decoder, self._bank, self.store, of, self._product)
        if self._aside is not None:
            step.capture(first, self._memory, self._aside)
        return step


class PrefillAttention:
    """``Attend`` for streams of tokens, and the flat ``tokens``, ``positions`` and ``last`` tokens that go with it."""

    def __init__(self, config: DecoderConfig, pool: KVPool, streams: Sequence[SequenceChunk]) -> None:
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
        if seen != counts:  # else all that is attended to is what the stream brings
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
        """See ``decoder.Attend``."""
        for cache, new in ((self._pool.k[layer], k), (self._pool.v[layer], v)):
            cache.index_copy_(0, self._write, new)
        if self._read is not None:
            k, v = (cache[layer].index_select(0, self._read) for cache in (self._pool.k, self._pool.v))
        return varlen_attention(q, k, v, self._sequences, self._config.windows[layer])


def decode_inputs(
    of: Bucket, windows: Sequence[int], streams: Sequence[SequenceChunk], ends: Sequence[int]
) -> np.ndarray:
    """All numbers of one decode step, int64 [size], as ``Step`` cuts them: tokens, positions and where keys go
    [3, rows]; per sliding window the ranges (starts, lengths) of the tails [windows, 2, rows] and, where a row has one,
    of the shared prompts; ``ends`` of the adapters' rows [adapters]. Padding rows read and write scratch."""
    count = len(streams)
    base = np.zeros((3, of.rows), dtype=np.int64)
    base[2] = SCRATCH
    at = np.array([s.start for s in streams])
    own = np.array([s.slot.start for s in streams])
    before = np.array([s.prefix_length for s in streams])
    first = np.array([s.prefix_slot.start if s.prefix_slot is not None else SCRATCH for s in streams])
    base[:, :count] = [s.tokens[0] for s in streams], before + at, own + at
    tails = np.zeros((len(windows), 2, of.rows), dtype=np.int64)
    tails[:, 0], tails[:, 1] = SCRATCH, 1
    prefixes = np.zeros_like(tails)
    for i, window in enumerate(windows):
        most = window or int(before.max() + at.max()) + 1
        seen = np.minimum(at + 1, most)
        tails[i, :, :count] = own + at + 1 - seen, seen
        seen = np.clip(most - (at + 1), 0, before)
        prefixes[i, :, :count] = first + before - seen, seen
    parts = [base, tails, prefixes] if of.prefix else [base, tails]
    return np.concatenate([*(part.reshape(-1) for part in parts), np.asarray(ends, dtype=np.int64)])


class DecodeGraph:
    """A decode step of one bucket on buffers of its own."""

    def __init__(self, decoder: Decoder, bank: LoraManager, pool: KVPool, of: Bucket, product: GroupedMatmul) -> None:
        self._device, config = decoder.device, decoder.config
        windows = sorted(set(config.windows))
        kinds = [of.keys, of.prefix] if of.prefix else [of.keys]
        sizes = [3 * of.rows, *[len(windows) * 2 * of.rows] * len(kinds), of.adapters]
        self._host = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=self._device.type == "cuda")
        self._sent = torch.empty(sum(sizes), dtype=torch.int64, device=self._device)
        base, *ranges, ends = self._sent.split(sizes)
        tokens, positions, write = base.view(3, of.rows)
        seen = {
            window: [
                KeyRanges(starts=at[i, 0], lengths=at[i, 1], max_length=most)
                for part, most in zip(ranges, kinds, strict=True)
                for at in (part.view(len(windows), 2, of.rows),)
            ]
            for i, window in enumerate(windows)
        }
        attend = DecodeAttention(config, pool, write, seen)

        def compute() -> Tensor:
            lora = bank.grouped_product(ends.int(), product) if of.adapters else None
            return decoder.forward(tokens, positions, attend, lora)

        self._run: Callable[[], Tensor] = compute

    def capture(self, first: np.ndarray, memory: Any, aside: torch.cuda.Stream) -> None:
        """As a CUDA graph. ``first`` is a plan that may be computed meanwhile, ``memory`` where the graph may compute,
        ``aside`` what it is warmed up on."""
        self._load(first)
        self._run = captured(self._run, memory, aside)

    def __call__(self, filled: np.ndarray) -> Tensor:
        """Hidden states [rows, hidden], good until the next call."""
        self._load(filled)
        return self._run()

    def _load(self, filled: np.ndarray) -> None:
        self._host.copy_(torch.from_numpy(filled))
        self._sent.copy_(self._host, non_blocking=True)  # the step before is over: its tokens have been read


class DecodeAttention:
    """``Attend`` for one token per row over ranges of the pool; ``seen[window]`` are the tails' and, maybe, the shared
    prompts'."""

    def __init__(self, config: DecoderConfig, pool: KVPool, write: Tensor, seen: dict[int, list[KeyRanges]]) -> None:
        self._config, self._pool, self._write, self._seen = config, pool, write, seen

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``decoder.Attend``."""
        keys, values = self._pool.k[layer], self._pool.v[layer]
        keys.index_copy_(0, self._write, k)
        values.index_copy_(0, self._write, v)
        tail, *prefix = (range_attention(q, keys, values, part) for part in self._seen[self._config.windows[layer]])
        return merge_attention(tail, prefix[0]) if prefix else tail[0]


def captured(compute: Callable[[], Tensor], memory: Any, aside: torch.cuda.Stream) -> Callable[[], Tensor]:
    """``compute`` as a CUDA graph that gives the same tensor each time."""
    device = aside.device
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        for _ in range(_WARM_UPS):
            compute()
    torch.cuda.current_stream(device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):  # other threads do as they like
        result = compute()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay
