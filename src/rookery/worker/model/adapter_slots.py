"""Resident adapters; on a GPU also tensors of those that recent batches used, stacked so that one product serves all.

Promises:

* Every adapter has a slot; the last slot of the tensors belongs to none and is zero.
* A slot is zeroed before an adapter is written into it.
* The tensors take at most ``max_bytes``, if the adapters of one batch fit in there (:meth:`AdapterSlots.bytes_for`).
* An adapter keeps its slot while batches use it. Slots that no recent batch used are given to other adapters; when most
  slots are idle, all are assigned again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rookery.worker.model.adapter import Adapter, Projections
from rookery.worker.model.config import SITES, DecoderConfig
from rookery.worker.model.decoder import Decoder, output_slices

if TYPE_CHECKING:
    from rookery.worker.engine.native.kernels.lora import KernelAdapter

RANK_BUCKET = 16
"""Ranks are padded to multiples of 16: a narrower product costs as much as one of 16."""

_FIRST_SLOTS = 4
"""Slots of new tensors, the zero slot included."""

_IDLE_BATCHES = 16
"""Batches after which an unused adapter may lose its slot: more than the prefill slices of other adapters that come
between two decode steps."""


def padded_rank(rank: int) -> int:
    """The smallest multiple of ``RANK_BUCKET`` that holds ``rank``."""
    return -(-rank // RANK_BUCKET) * RANK_BUCKET


@dataclass
class ResidentAdapter:
    """One adapter, fused and in the base's dtype: ``a[layer, site]`` [parts · rank, in] and ``b[layer, site]``
    [out, rank], where every output row meets its own part's ranks; B includes the scale."""

    rank: int
    a: dict[tuple[int, str], Tensor]
    b: dict[tuple[int, str], Tensor]
    users: int = 0
    """Requests that use it."""
    evict_pending: bool = False
    packed: KernelAdapter | None = None
    """The weights in the kernels' layout, instead of ``a`` and ``b``."""
    decoder: Decoder | None = None
    """The decoder with all weights of a full-parameter version, which has no LoRA."""

    @cached_property
    def sites(self) -> set[str]:
        """The modules that it has in any layer."""
        return {site for _, site in self.a}

    @property
    def bytes(self) -> int:
        whole = self.decoder.bytes if self.decoder is not None else 0
        packed = self.packed.bytes if self.packed is not None else 0
        return whole + packed + sum(factor.nbytes for factor in (*self.a.values(), *self.b.values()))

    @classmethod
    def load(
        cls, adapter: Adapter, model: Projections, dtype: torch.dtype, device: torch.device | str, rank: int
    ) -> ResidentAdapter:
        """``rank``: at least the adapter's, zeros fill the others."""
        a, b = {}, {}
        site_of = {part: site for site, parts in model.sites.items() for part in parts}
        for layer, site in dict.fromkeys((layer, site_of[part]) for layer, part in adapter.weights):
            outputs = output_slices(model, site, layer)
            first, last = model.sites[site][0], model.sites[site][-1]
            down = torch.zeros(len(outputs), rank, model.shapes[layer, first][0])
            up = torch.zeros(outputs[last].stop, rank)
            for i, (part, rows) in enumerate(outputs.items()):
                if (layer, part) in adapter.weights:
                    adapter_a, adapter_b = adapter.weights[layer, part]
                    down[i, : adapter.rank] = adapter_a
                    up[rows, : adapter.rank] = adapter_b * adapter.scale
            a[layer, site], b[layer, site] = down.flatten(0, 1).to(device, dtype), up.to(device, dtype)
        return cls(rank, a, b)


class AdapterSlots:
    """Per site A [layers, slots, parts · rank, in] and B [layers, slots, parts · rank, out]. All slots have the highest
    rank and all sites of the adapters in them."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        max_bytes: int = sys.maxsize,
    ) -> None:
        self.config = config
        self.max_bytes = max_bytes
        self.dtype = dtype
        self.device = device
        self.rank = 0
        self.sites: set[str] = set()
        self.a: dict[str, Tensor] = {}
        self.b: dict[str, Tensor] = {}
        self.slots = 0
        """Slots of the tensors, the zero slot included."""
        self.layout_version = 0
        """Changes whenever the tensors are replaced."""
        self._last_used: list[int] = []
        """The last batch of each slot that was ever used."""
        self._slot_of: dict[str, int] = {}
        self._batch = 0

    @property
    def bytes(self) -> int:
        return self.bytes_for(self.slots, self.rank, self.sites)

    def bytes_for(self, slots: int, rank: int, sites: Iterable[str] = SITES) -> int:
        """Bytes of ``slots`` slots for adapters of ``sites`` up to ``rank``, a rank bucket."""
        numbers = 0
        for site in sites:
            parts, outputs = SITES[site], output_slices(self.config, site)
            numbers += len(parts) * rank * (self.config.site_shape(parts[0])[0] + outputs[parts[-1]].stop)
        return slots * self.config.layers * numbers * self.dtype.itemsize

    def slot(self, key: str) -> int:
        """An adapter's slot; the number of slots in use for one that has none."""
        return self._slot_of.get(key, len(self._last_used))

    def remove(self, key: str) -> None:
        """Frees an adapter's slot, if it has one."""
        slot = self._slot_of.pop(key, None)
        if slot is not None:
            self._last_used[slot] = -_IDLE_BATCHES

    def assign(self, wanted: dict[str, ResidentAdapter]) -> None:
        """Gives the adapters of one batch slots. Tensors and slots stay where they are if the adapters fit in."""
        self._batch += 1
        fits = all(adapter.rank <= self.rank and adapter.sites <= self.sites for adapter in wanted.values())
        wanted_slots = {self._slot_of[key] for key in wanted if key in self._slot_of}
        idle = [slot for slot, used in enumerate(self._last_used) if self._batch - used > _IDLE_BATCHES]
        free, used = [slot for slot in idle if slot not in wanted_slots], len(self._last_used)
        added = len(wanted) - len(wanted_slots) - len(free)
        full = added > 0 and self.bytes_for(used + added + 1, self.rank, self.sites) > self.max_bytes
        if not fits or full or 2 * len(free) > used:
            self._reset(wanted)
            free = []
        for key, adapter in wanted.items():
            if key not in self._slot_of:
                self._load(free.pop(0) if free else len(self._last_used), key, adapter)
            self._last_used[self._slot_of[key]] = self._batch

    def _reset(self, wanted: dict[str, ResidentAdapter]) -> None:
        """Frees all slots; the tensors stay if they are large enough, unless they are too large for the budget."""
        rank = max(adapter.rank for adapter in wanted.values())
        sites = set().union(*(adapter.sites for adapter in wanted.values()))
        larger = max(rank, self.rank), sites | self.sites
        if self.bytes_for(len(wanted) + 1, *larger) <= self.max_bytes:
            rank, sites = larger
        self._slot_of, self._last_used = {}, []
        if (rank, sites) != (self.rank, self.sites):
            self.rank, self.sites, self.a, self.b, self.slots = rank, sites, {}, {}, 0

    def _load(self, slot: int, key: str, adapter: ResidentAdapter) -> None:
        layers = self.config.layers
        if slot + 1 >= self.slots:
            self._grow()
        for site in self.sites:
            parts, outputs = SITES[site], output_slices(self.config, site)
            a, b = (x[site][:, slot].view(layers, len(parts), self.rank, -1) for x in (self.a, self.b))
            a.zero_()
            b.zero_()
            for layer in [layer for layer, found in adapter.a if found == site]:
                a[layer, :, : adapter.rank] = adapter.a[layer, site].view(len(parts), adapter.rank, -1)
                for i, rows in enumerate(outputs.values()):
                    b[layer, i, : adapter.rank, rows] = adapter.b[layer, site][rows].t()
        if slot == len(self._last_used):
            self._last_used.append(self._batch)
        else:
            self._slot_of = {other: taken for other, taken in self._slot_of.items() if taken != slot}
        self._slot_of[key] = slot

    def _grow(self) -> None:
        """Adds a quarter of the slots in use: an idle slot costs more memory than an adapter."""
        used = len(self._last_used)
        most = self.max_bytes // self.bytes_for(1, self.rank, self.sites)
        self.slots = max(min(max(_FIRST_SLOTS, used + used // 4 + 2), most), used + 2)
        self.layout_version += 1
        for site in self.sites:
            parts, outputs = SITES[site], output_slices(self.config, site)
            for x, size in ((self.a, self.config.site_shape(parts[0])[0]), (self.b, outputs[parts[-1]].stop)):
                x[site] = self._grown(len(parts) * self.rank, size, used, x.get(site))

    def _grown(self, ranks: int, size: int, used: int, old: Tensor | None) -> Tensor:
        """[layers, slots, ranks, size] of zeros with the first ``used`` slots of ``old``."""
        new = torch.zeros(self.config.layers, self.slots, ranks, size, dtype=self.dtype, device=self.device)
        if old is not None:
            new[:, :used] = old[:, :used]
        return new
