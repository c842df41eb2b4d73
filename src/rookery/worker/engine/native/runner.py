"""One slice of an engine's batch through the decoder: how depends on the device, what comes out does not.

``DenseRunner`` is the CPU's: caches in arenas, products in the shapes that make a token's result exact
(``worker/exact.py``). ``pooled.PooledRunner`` is a GPU's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Protocol

from torch import Tensor

from rookery.worker.engine.native.attention import SegmentAttention, SequenceChunk
from rookery.worker.engine.native.kv_cache import KVCache, KVStore
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.lora import LoraManager


class Runner(Protocol):
    """``store`` holds what streams name as their places. Streams are sorted by ``LoraBank.order`` after ``arrange``."""

    @property
    def store(self) -> KVStore: ...

    def prepare_adapters(self, keys: Iterable[str]) -> None:
        """These adapters are about to run."""
        ...

    def prefill(self, streams: Sequence[SequenceChunk]) -> tuple[Tensor, Tensor]:
        """Hidden states [tokens, hidden] of the streams one after another, and [streams] where each one's last token
        is in them."""
        ...

    def decode(self, streams: Sequence[SequenceChunk]) -> Tensor:
        """Logits [at least len(streams), vocab] after one token of each stream; good until the next call."""
        ...


class DenseRunner:
    """See the module."""

    def __init__(self, decoder: Decoder, bank: LoraManager, kv_budget_bytes: int) -> None:
        self.store = KVCache(decoder.config, decoder.dtype, decoder.device, kv_budget_bytes)
        self._decoder = decoder
        self._bank = bank

    def prepare_adapters(self, keys: Iterable[str]) -> None:
        """A batch's LoRA takes rows in any order."""

    def prefill(self, streams: Sequence[SequenceChunk]) -> tuple[Tensor, Tensor]:
        batch = SegmentAttention(self._decoder.config, streams, self._decoder.dtype, self._decoder.device)
        groups = [(key, sum(len(s.tokens) for s in group)) for key, group in groupby(streams, key=lambda s: s.key)]
        if len(batch.tokens) > sum(count for _, count in groups):
            groups = [(key, 2 * count) for key, count in groups]  # one token, doubled
        lora = self._bank.batch_product([key for key, _ in groups], [count for _, count in groups])
        return self._decoder.forward(batch.tokens, batch.positions, batch, lora), batch.last

    def decode(self, streams: Sequence[SequenceChunk]) -> Tensor:
        hidden, last = self.prefill(streams)
        return logits_at(self._decoder, hidden, last)


def logits_at(decoder: Decoder, hidden: Tensor, index: Tensor) -> Tensor:
    """Logits of the indexed positions; a lone one comes twice (``worker/exact.py``)."""
    return decoder.compute_logits(hidden.index_select(0, index if len(index) > 1 else index.repeat(2)))
