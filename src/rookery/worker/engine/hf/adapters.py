"""LoRA of several adapters in one batch over a model of transformers, whose linear modules are sites of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from rookery.worker.memory import NoRoom, require
from rookery.worker.model.adapter import PARTS, Adapter, adapter_numbers
from rookery.worker.model.adapter_bank import AdapterBank
from rookery.worker.model.transformers_model import TransformersModel


@dataclass
class ResidentLora:
    """``weights[layer, part]`` = (A [rank, in], B [out, rank]) in the base's dtype; B includes the scale."""

    weights: dict[tuple[int, str], tuple[Tensor, Tensor]]
    pins: int = 0
    evict_pending: bool = False

    @property
    def bytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b in self.weights.values())


class TransformersAdapters(AdapterBank[ResidentLora]):
    """See ``AdapterBank``."""

    def __init__(self, model: TransformersModel, max_rank: int, budget_bytes: int) -> None:
        super().__init__(max_rank, budget_bytes)
        self._model = model

    def make_room(self, rank: int) -> None:
        """See ``AdapterBank``."""
        size = adapter_numbers(self._model.projections, rank, PARTS) * self._model.dtype.itemsize
        used = sum(resident.bytes for resident in self.residents.values() if resident.pins)
        require(f"an adapter of rank {rank}", size, self.budget_bytes)
        if used + size > self.budget_bytes:
            raise NoRoom
        self.drop_idle(self.budget_bytes - size)

    def load(self, adapter: Adapter) -> ResidentLora:
        """See ``AdapterBank``."""
        dtype, device = self._model.dtype, self._model.device
        weights = {
            key: (a.to(device, dtype), (b * adapter.scale).to(device, dtype)) for key, (a, b) in adapter.weights.items()
        }
        return ResidentLora(weights)

    def product(self, keys: Sequence[str], counts: Sequence[int]) -> SegmentLora | None:
        """The ``Lora`` of a stream whose first ``counts[0]`` tokens belong to ``keys[0]`` and so on; the empty key is
        the base model. None when all tokens belong to the base model."""
        ends = accumulate(counts)
        spans = [
            (slice(end - count, end), self.residents[key])
            for key, count, end in zip(keys, counts, ends, strict=True)
            if key
        ]
        return SegmentLora(spans) if spans else None


class SegmentLora:
    """A product per adapter and projection, over that adapter's rows. It changes ``y`` in place and has no backward
    pass."""

    def __init__(self, spans: Sequence[tuple[slice, ResidentLora]]) -> None:
        self._spans = spans

    def __call__(self, layer: int, site: str, x: Tensor, y: Tensor) -> Tensor:
        """See ``transformers_model.Lora``."""
        for rows, adapter in self._spans:
            pair = adapter.weights.get((layer, site))
            if pair is not None:
                y[rows].addmm_(x[rows] @ pair[0].t(), pair[1].t())
        return y
