"""Unmerged LoRA of many adapters in one batch: the resident adapters, and the products that apply them.

Promises:

* A token gets its own adapter's delta and nothing of another's: a NaN in one adapter stays in its own rows.
* A row's result does not depend, bit for bit on CPU, on the other rows, on the other adapters, or on their ranks (see
  ``batch_invariance``).
* An adapter in use is not dropped under a running request: eviction waits for its last request.
* All adapters and their slots stay within ``budget_bytes``: the least recently used ones that no request uses are
  dropped, and ``make_room`` refuses more than fit.

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

from rookery.worker.memory import NoRoom, NotOnThisWorker, TooSmall, require
from rookery.worker.model.adapter import PARTS, Adapter, Projections, adapter_numbers
from rookery.worker.model.adapter_slots import AdapterSlots, ResidentAdapter, padded_rank
from rookery.worker.model.batch_invariance import chunked_matmul, contraction_chunks, exact_rows, pad_rows
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import Decoder, output_slices

if TYPE_CHECKING:
    from rookery.worker.engine.native.kernels.lora import KernelAdapter

GroupedMatmul = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [rows, in], w [slots, in, out], ends [slots] int32 → [rows, out]: the rows from ``ends[i - 1]`` to before
``ends[i]`` times ``w[i]``."""

_SLOT_SHARE = 0.35
"""Share of the budget for the slots of one batch's adapters. Half is for the adapters themselves; the rest for the copy
of a tensor of slots while it grows."""

_IDLE_ADAPTERS = 64
"""Adapters that no request uses are dropped above this number even where there is room: with each one go the caches of
its prompts, which only a request for it could use."""

_GROUPED_KERNELS = ((9, 0), (10, 0))
"""CUDA capabilities with a grouped product in PyTorch that reads ``ends`` on the device; on others a loop reads them on
the host."""


class LoraManager:
    """Resident adapters by key, the manifest hash, and the ``LoraProduct`` of each batch."""

    def __init__(
        self,
        model: Projections,
        dtype: torch.dtype,
        device: torch.device | str,
        max_rank: int,
        budget_bytes: int = sys.maxsize,
    ) -> None:
        """``model``: the native decoder's configuration, for whose adapters slots have room within the budget; or the
        projections of another model, of which only ``batch_product`` is used."""
        self.max_rank = max_rank
        self.budget_bytes = budget_bytes
        self.dropped: list[str] = []
        """Adapters that left memory; the engine drops their caches and clears the list."""
        self.residents: dict[str, ResidentAdapter] = {}
        """The least recently used first."""
        self._model, self._dtype, self._device = model, dtype, device
        self._slots: AdapterSlots | None = None
        if isinstance(model, DecoderConfig):
            self._slots = AdapterSlots(model, dtype, device, int(_SLOT_SHARE * budget_bytes))

    # --- residents --------------------------------------------------------------------------------------------------

    def __contains__(self, key: str) -> bool:
        return key in self.residents and not self.residents[key].evict_pending

    def __len__(self) -> int:
        return len(self.residents)

    @property
    def bytes(self) -> int:
        slots = self._slots.bytes if self._slots is not None else 0
        return slots + sum(resident.bytes for resident in self.residents.values())

    def keys(self) -> list[str]:
        """Adapters that new requests may use."""
        return [key for key, resident in self.residents.items() if not resident.evict_pending]

    def keep(self, key: str) -> bool:
        """Whether an adapter is in memory. An eviction that waits for its last request is withdrawn."""
        resident = self.residents.get(key)
        if resident is not None:
            resident.evict_pending = False
        return resident is not None

    def make_room(self, rank: int) -> None:
        """Drops unused adapters until another one of ``rank`` fits. Raises :class:`~rookery.worker.memory.NoRoom` while
        those in use leave no room, ``TooSmall`` if there can never be room for one of this rank."""
        used = [resident for resident in self.residents.values() if resident.users]
        size, most = adapter_numbers(self._model, rank, PARTS) * self._dtype.itemsize, self.budget_bytes
        least, crowded = size, False
        if self._slots is not None:
            slot_rank, most = max(padded_rank(rank), *(resident.rank for resident in used), 0), most // 2
            size, slots = self._slots.bytes_for(1, padded_rank(rank)), self._slots.bytes_for(len(used) + 2, slot_rank)
            least, crowded = max(size, int(slots / 2 / _SLOT_SHARE)), slots > self._slots.max_bytes
        if not used:
            require(f"an adapter of rank {rank}", least, most)
        if crowded or sum(resident.bytes for resident in used) + size > most:
            raise NoRoom
        self._drop_idle(most - size)

    def add(self, key: str, adapter: Adapter) -> None:
        """Makes ``adapter`` resident. Raises ``TooSmall`` when its rank is above ``max_rank``, and as
        :meth:`make_room`."""
        if adapter.rank > self.max_rank:
            raise TooSmall(f"rank {adapter.rank} is over this worker's max_rank {self.max_rank}")
        if self.keep(key):
            return
        self.make_room(adapter.rank)
        rank = padded_rank(adapter.rank) if self._slots is not None else adapter.rank
        self.residents[key] = ResidentAdapter.load(adapter, self._model, self._dtype, self._device, rank)

    def add_full(self, key: str, size: int, load: Callable[[], Decoder]) -> None:
        """Makes a full-parameter version of ``size`` bytes resident; ``load`` is called once there is room. Raises as
        :meth:`make_room`, and ``NotOnThisWorker`` where there are LoRA only."""
        if self._slots is None:
            raise NotOnThisWorker(
                "this engine serves LoRA only; full-parameter versions need a family of the native engine"
            )
        if self.keep(key):
            return
        used = sum(resident.bytes for resident in self.residents.values() if resident.users)
        require("two full-parameter versions", 2 * size, self.budget_bytes)  # the present one and the next
        if used + size > self.budget_bytes:
            raise NoRoom
        self._drop_idle(self.budget_bytes - size)
        self.residents[key] = ResidentAdapter(0, {}, {}, decoder=load())

    def decoder(self, key: str) -> Decoder | None:
        """The decoder of a full-parameter version; None for a LoRA and for the base model."""
        resident = self.residents.get(key)
        return resident.decoder if resident is not None else None

    def lora_key(self, key: str) -> str:
        """The key under which products know an adapter: a full-parameter version has no LoRA."""
        return "" if self.decoder(key) is not None else key

    def evict(self, key: str) -> None:
        """Drops an adapter, at once or when its last request ends. Unknown keys are ignored."""
        resident = self.residents.get(key)
        if resident is not None:
            resident.evict_pending = True
            self._drop_if_unused(key, resident)

    def acquire(self, key: str) -> None:
        """A request starts to use ``key``; raises ``KeyError`` when it is not resident."""
        resident = self.residents[key] = self.residents.pop(key)
        resident.users += 1

    def release(self, key: str) -> None:
        """A request of :meth:`acquire` uses it no more."""
        resident = self.residents[key]
        resident.users -= 1
        self._drop_if_unused(key, resident)

    def _drop_idle(self, most_bytes: int) -> None:
        """Drops unused adapters, the least recently used first, above ``most_bytes`` in all or ``_IDLE_ADAPTERS``."""
        idle = [(key, resident) for key, resident in self.residents.items() if not resident.users]
        total = sum(resident.bytes for resident in self.residents.values())
        while idle and (total > most_bytes or len(idle) >= _IDLE_ADAPTERS):
            key, resident = idle.pop(0)
            total -= resident.bytes
            self._drop(key)

    def _drop_if_unused(self, key: str, resident: ResidentAdapter) -> None:
        if resident.evict_pending and resident.users == 0:
            self._drop(key)

    def _drop(self, key: str) -> None:
        del self.residents[key]
        if self._slots is not None:
            self._slots.remove(key)
        self.dropped.append(key)

    # --- products ---------------------------------------------------------------------------------------------------

    def packed(self, key: str, layout: Callable[..., KernelAdapter]) -> KernelAdapter:
        """An adapter in the layout of the kernels; made once, it replaces the tensors that the products below read."""
        resident = self.residents[key]
        if resident.packed is None:
            resident.packed = layout(resident.rank, resident.a, resident.b)
            resident.a, resident.b = {}, {}
        return resident.packed

    def batch_product(self, keys: Sequence[str], counts: Sequence[int]) -> BatchLora | None:
        """The ``LoraProduct`` of a stream whose first ``counts[0]`` tokens belong to ``keys[0]`` and so on; the empty
        key is the base model. None when all tokens belong to the base model."""
        return (
            BatchLora(self._model, [self.residents[key] if key else None for key in keys], counts)
            if any(keys)
            else None
        )

    @property
    def slots(self) -> AdapterSlots:
        """The inputs of ``grouped_product``."""
        assert self._slots is not None
        return self._slots

    def slot_order(self, key: str) -> int:
        """Sort key of a batch's rows: the adapter's slot, the base model last."""
        return self._slots.slot(key) if self._slots is not None else 0

    def assign_slots(self, keys: Iterable[str]) -> int:
        """Assigns slots to ``keys``, for batches sorted by ``slot_order``; tensors stay where they are if the adapters
        fit in. Returns the number of slots, of which the last one is zero; 0 when all keys are the base model."""
        wanted = {key: self.residents[key] for key in keys if key}
        if not wanted:
            return 0
        self.slots.assign(wanted)
        return self.slots.slots

    def slot_ends(self, keys: Sequence[str], counts: Sequence[int], rows: int) -> list[int]:
        """For each slot, the end of its rows in a stream of ``rows`` rows. The first ``counts[0]`` belong to
        ``keys[0]`` and so on (with slots assigned, in ``slot_order``), the remaining ones to none."""
        held = [0] * self.slots.slots
        for key, count in zip(keys, counts, strict=True):
            held[self.slot_order(key) if key else -1] += count
        held[-1] += rows - sum(counts)
        return list(accumulate(held))

    def grouped_product(self, ends: Tensor, product: GroupedMatmul) -> GroupedLora:
        """The ``LoraProduct`` of batches that ``ends`` [slots] int32 describes, valid until the slots'
        ``layout_version`` changes."""
        return GroupedLora(self.slots, ends, product)


class BatchLora:
    """``LoraProduct`` of one stream sorted by adapter. It changes ``y`` in place and has no backward pass."""

    def __init__(self, model: Projections, adapters: Sequence[ResidentAdapter | None], counts: Sequence[int]) -> None:
        """``counts`` of consecutive rows for each of ``adapters``; None is the base model."""
        ends = list(accumulate(counts))
        self._model = model
        self._groups = [
            (slice(end - count, end), adapter)
            for adapter, count, end in zip(adapters, counts, ends, strict=True)
            if adapter is not None
        ]

    def __call__(self, layer: int, site: str, x: Tensor, y: Tensor) -> Tensor:
        outputs = output_slices(self._model, site, layer).values()
        narrowest = min(part.stop - part.start for part in outputs)
        for rows, adapter in self._groups:
            if (layer, site) not in adapter.a:
                continue
            rank, a, count = adapter.rank, adapter.a[layer, site].t(), rows.stop - rows.start
            pieces = a.split(contraction_chunks(len(a), x.dtype, x.device))
            padded = count
            if not x.is_cuda:
                padded = exact_rows(x.dtype, count, (len(pieces[-1]), a.shape[1]), (rank, narrowest))
            inner = chunked_matmul(pad_rows(x[rows], padded), pieces)
            for i, part in enumerate(outputs):
                middle, b, out = inner[:, i * rank : (i + 1) * rank], adapter.b[layer, site][part].t(), y[rows, part]
                if x.is_cuda:
                    out.addmm_(middle, b)
                else:
                    out.copy_(torch.addmm(pad_rows(out, padded), middle, b)[:count])
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
    grouped = device.type == "cuda" and torch.cuda.get_device_capability(device) in _GROUPED_KERNELS
    return grouped_matmul if grouped and dtype is torch.bfloat16 else batched_matmul
