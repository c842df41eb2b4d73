"""The runner of a slice: an engine's batch through a model of this process. Which one is used decides how the slice is
computed; the results are those of :mod:`rookery.worker.model.batch_invariance` where the model has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Protocol

from torch import Tensor

from rookery.worker.engine.kv_cache import SegmentStore
from rookery.worker.engine.sampler import SampledTokens, SamplingKey, sample
from rookery.worker.engine.sequences import SequenceChunk
from rookery.worker.model.adapter import ResidentModel


class Runner(Protocol):
    """``store`` holds the slots that chunks name. After ``prepare_adapters``, chunks are sorted by
    ``LoraManager.slot_order``."""

    @property
    def store(self) -> SegmentStore: ...

    def use(self, decoder: Any) -> None:
        """Compute with other weights of the same base model, of the same class, from the next slice on. Raises
        ``UserError`` where they cannot be replaced."""
        ...

    def prepare_adapters(self, keys: Iterable[str]) -> None:
        """Called before each slice with the adapters that it uses."""
        ...

    def prefill(self, streams: Sequence[SequenceChunk]) -> tuple[Tensor, Tensor]:
        """Hidden states [tokens, hidden] of the chunks one after another, and the index [chunks] of each one's last
        token among them."""
        ...

    def decode(self, streams: Sequence[SequenceChunk]) -> Tensor:
        """Logits [at least len(streams), vocab] after one token of each chunk, valid until the next call."""
        ...

    def sample(self, logits: Tensor, keys: Sequence[SamplingKey]) -> SampledTokens:
        """One token for each key from the first rows of ``logits`` (``sampler``)."""
        ...


class BaseRunner:
    """The base class of all runners but a GPU's: adapters need no preparation, and a decode step is a prefill of one
    token of each sequence."""

    def __init__(self, decoder: Any, loras: Any, store: SegmentStore) -> None:
        self.store = store
        self._decoder = decoder
        self._loras = loras

    def use(self, decoder: Any) -> None:
        self._decoder = decoder

    def prepare_adapters(self, keys: Iterable[str]) -> None:
        """Nothing to do: products take rows in any order."""

    def prefill(self, streams: Sequence[SequenceChunk]) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def decode(self, streams: Sequence[SequenceChunk]) -> Tensor:
        hidden, last = self.prefill(streams)
        return logits_at(self._decoder, hidden, last)

    def sample(self, logits: Tensor, keys: Sequence[SamplingKey]) -> SampledTokens:
        return sample(logits, keys)


def adapter_groups(streams: Sequence[SequenceChunk]) -> list[tuple[str, int]]:
    """Adapters and the numbers of their consecutive tokens."""
    return [(key, sum(len(s.tokens) for s in group)) for key, group in groupby(streams, key=lambda s: s.key)]


def logits_at(decoder: ResidentModel, hidden: Tensor, index: Tensor) -> Tensor:
    """Logits of the indexed positions; a lone one is doubled (``batch_invariance``)."""
    return decoder.compute_logits(hidden.index_select(0, index if len(index) > 1 else index.repeat(2)))
