"""Unmerged LoRA of many adapters in one batch: the resident adapters, and the products that apply them.

Promises:

* A token gets its own adapter's delta and nothing of another's: a NaN in one adapter stays in its own rows.
* A row's result does not depend, bit for bit on CPU, on the other rows, on the other adapters, or on their ranks (see
  ``batch_invariance``).
* All adapters and their slots stay within ``budget_bytes`` (``adapter_bank``).

Two classes implement ``LoraProduct`` for generation (the trainer has one with gradients): ``BatchLora`` multiplies each
adapter's rows by themselves; ``GroupedLora`` has shapes that do not depend on the batch and never waits for the device,
so that a CUDA graph can hold it. Compiled kernels have their own product.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from rookery.worker.memory import NoRoom, require
from rookery.worker.model.adapter import Adapter
from rookery.worker.model.adapter_bank import AdapterBank
from rookery.worker.model.adapter_slots import AdapterSlots, ResidentAdapter, padded_rank
from rookery.worker.model.batch_invariance import chunked_matmul, contraction_chunks, exact_rows, pad_rows
from rookery.worker.model.config import SITES, DecoderConfig
from rookery.worker.model.decoder import Decoder, output_slices

if TYPE_CHECKING:
    from rookery.worker.engine.native.kernels.lora import KernelAdapter

GroupedMatmul = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [rows, in], w [slots, in, out], ends [slots] int32 → [rows, out]: the rows from ``ends[i - 1]`` to before
``ends[i]`` times ``w[i]``."""

_SLOT_SHARE = 0.35
"""Share of the budget for the slots of one batch's adapters. Half is for the adapters themselves; the rest for the copy
of a tensor of slots while it grows."""

_GROUPED_KERNELS = ((9, 0), (10, 0))
"""CUDA capabilities with a grouped product in PyTorch that reads ``ends`` on the device; on others a loop reads them on
the host."""


class LoraManager(AdapterBank[ResidentAdapter]):
    """The native engine's ``AdapterBank``, and the ``LoraProduct`` of each batch."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        max_rank: int,
        budget_bytes: int = sys.maxsize,
    ) -> None:
        super().__init__(max_rank, budget_bytes)
        self.config = config
        self.dtype = dtype
        self.device = device
        self._slots = AdapterSlots(config, dtype, device, int(_SLOT_SHARE * budget_bytes))

    @property
    def bytes(self) -> int:
        """See ``AdapterBank``."""
        return super().bytes + self._slots.bytes

    def make_room(self, rank: int) -> None:
        """See ``AdapterBank``."""
        used = [resident for resident in self.residents.values() if resident.pins]
        slot_rank = max(padded_rank(rank), *(resident.rank for resident in used), 0)
        size, slots = self._slots.bytes_for(1, padded_rank(rank)), self._slots.bytes_for(len(used) + 2, slot_rank)
        most = self.budget_bytes // 2
        if not used:
            require(f"an adapter of rank {rank}", max(size, int(slots / 2 / _SLOT_SHARE)), most)
        if slots > self._slots.max_bytes or sum(resident.bytes for resident in used) + size > most:
            raise NoRoom
        self.drop_idle(most - size)

    def load(self, adapter: Adapter) -> ResidentAdapter:
        """See ``AdapterBank``."""
        return ResidentAdapter.load(adapter, self.config, self.dtype, self.device)

    def on_dropped(self, key: str) -> None:
        """See ``AdapterBank``."""
        self._slots.remove(key)

    def add_full(self, key: str, size: int, load: Callable[[], Decoder]) -> None:
        """See ``AdapterBank``."""
        if key in self.residents:
            self.residents[key].evict_pending = False
            return
        used = sum(resident.bytes for resident in self.residents.values() if resident.pins)
        require("two full-parameter versions", 2 * size, self.budget_bytes)  # the present one and the next
        if used + size > self.budget_bytes:
            raise NoRoom
        self.drop_idle(self.budget_bytes - size)
        self.residents[key] = ResidentAdapter(0, {}, {}, decoder=load())

    def decoder(self, key: str) -> Decoder | None:
        """See ``AdapterBank``."""
        resident = self.residents.get(key)
        return resident.decoder if resident is not None else None

    def packed(self, key: str, layout: Callable[[ResidentAdapter], KernelAdapter]) -> KernelAdapter:
        """An adapter in the layout of the kernels; made once, it replaces the tensors that the products below read."""
        resident = self.residents[key]
        if resident.packed is None:
            resident.packed = layout(resident)
            resident.a, resident.b = {}, {}
        return resident.packed

    def _wanted(self, keys: Iterable[str]) -> dict[str, ResidentAdapter]:
        wanted = {key: self.residents[key] for key in keys if key}
        for resident in wanted.values():
            if resident.packed is not None:  # a runner with kernels was here before
                (resident.a, resident.b), resident.packed = resident.packed.unpack(), None
        return wanted

    # --- products ---------------------------------------------------------------------------------------------------

    def slot_order(self, key: str) -> int:
        """See ``AdapterBank``: the adapter's slot, the base model last."""
        return self._slots.slot(key)

    def batch_product(self, keys: Sequence[str], counts: Sequence[int]) -> BatchLora | None:
        """The ``LoraProduct`` of a stream whose first ``counts[0]`` tokens belong to ``keys[0]`` and so on; the empty
        key is the base model. None when all tokens belong to the base model."""
        wanted = self._wanted(keys)
        return BatchLora(self.config, [wanted.get(key) for key in keys], counts) if wanted else None

    @property
    def layout_version(self) -> int:
        """Changes whenever the tensors that ``grouped_product`` reads are replaced."""
        return self._slots.layout_version

    def assign_slots(self, keys: Iterable[str]) -> int:
        """Assigns slots to ``keys``, for batches sorted by ``slot_order``; tensors stay where they are if the adapters
        fit in. Returns the number of slots, of which the last one is zero; 0 when all keys are the base model."""
        wanted = self._wanted(keys)
        if not wanted:
            return 0
        self._slots.assign(wanted)
        return self._slots.slots

    def slot_ends(self, keys: Sequence[str], counts: Sequence[int], rows: int) -> list[int]:
        """For each slot, the end of its rows in a stream of ``rows`` rows. The first ``counts[0]`` belong to
        ``keys[0]`` and so on (with slots assigned, in ``slot_order``), the remaining ones to none."""
        held = [0] * self._slots.slots
        for key, count in zip(keys, counts, strict=True):
            held[self.slot_order(key) if key else -1] += count
        held[-1] += rows - sum(counts)
        return list(accumulate(held))

    def grouped_product(self, ends: Tensor, product: GroupedMatmul) -> GroupedLora:
        """The ``LoraProduct`` of batches that ``ends`` [slots] int32 describes, valid until ``layout_version``
        changes."""
        return GroupedLora(self._slots, ends, product)


class BatchLora:
    """``LoraProduct`` of one stream sorted by adapter. It changes ``y`` in place and has no backward pass."""

    def __init__(
        self, config: DecoderConfig, adapters: Sequence[ResidentAdapter | None], counts: Sequence[int]
    ) -> None:
        """``counts`` of consecutive rows for each of ``adapters``; None is the base model."""
        ends = list(accumulate(counts))
        self._outputs = {site: output_slices(config, site) for site in SITES}
        self._groups = [
            (slice(end - count, end), adapter)
            for adapter, count, end in zip(adapters, counts, ends, strict=True)
            if adapter is not None
        ]

    def __call__(self, layer: int, site: str, x: Tensor, y: Tensor) -> Tensor:
        """See ``LoraProduct``."""
        outputs = self._outputs[site]
        narrowest = min(part.stop - part.start for part in outputs.values())
        for rows, adapter in self._groups:
            if site not in adapter.a:
                continue
            rank, a = adapter.rank, adapter.a[site][layer].flatten(0, 1).t()
            pieces = a.split(contraction_chunks(len(a), x.dtype, x.device))
            count = rows.stop - rows.start
            padded = exact_rows(x.dtype, count, (len(pieces[-1]), a.shape[1]), (rank, narrowest))
            inner = chunked_matmul(pad_rows(x[rows], padded), pieces)
            for i, part in enumerate(outputs.values()):
                middle, b = inner[:, i * rank : (i + 1) * rank], adapter.b[site][layer, part]
                y[rows, part] = torch.addmm(pad_rows(y[rows, part], padded), middle, b.t())[:count]
        return y


class GroupedLora:
    """``LoraProduct`` of a stream sorted by slot, as one product per factor. The base model's rows and padding rows
    meet the zero slot. It changes ``y`` in place and has no backward pass."""

    def __init__(self, slots: AdapterSlots, ends: Tensor, product: GroupedMatmul) -> None:
        """``ends`` [slots] int32: see ``LoraManager.slot_ends``."""
        self._a, self._b = dict(slots.a), dict(slots.b)
        self._ends = ends
        self._product = product

    def __call__(self, layer: int, site: str, x: Tensor, y: Tensor) -> Tensor:
        """See ``LoraProduct``."""
        if site not in self._a:
            return y
        inner = self._product(x, self._a[site][layer].transpose(1, 2), self._ends)
        return y.add_(self._product(inner, self._b[site][layer], self._ends))


def grouped_matmul(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """``GroupedMatmul`` by PyTorch's grouped kernel."""
    return F.grouped_mm(x, w, offs=ends)


def batched_matmul(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """``GroupedMatmul`` that multiplies every row by every slot and takes its own: as many times the work as there are
    slots, in a few calls of any device."""
    rows = torch.arange(len(x), device=x.device)
    own = torch.searchsorted(ends, rows.to(ends.dtype), right=True)
    return torch.bmm(x.expand(len(w), *x.shape), w)[own, rows]


def best_grouped_matmul(device: torch.device, dtype: torch.dtype) -> GroupedMatmul:
    """``grouped_matmul`` where it is one kernel, else ``batched_matmul``."""
    if device.type == "cuda" and dtype is torch.bfloat16 and _has_grouped_kernel(device):
        return grouped_matmul
    return batched_matmul


def _has_grouped_kernel(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) in _GROUPED_KERNELS
