"""Unmerged LoRA of many adapters in one batch: the resident adapters, and the products that apply them.

Promises:

* A token gets its own adapter's delta and nothing of another's: a NaN in one adapter stays in its own rows.
* A row's result does not depend, bit for bit on CPU, on the other rows, on the other adapters, or on their ranks (see
  ``batch_invariance``).
* An adapter in use is not dropped under a running request: eviction waits for the last pin.
* All adapters and their slots stay within ``budget_bytes``: the least recently used ones that no request uses are
  dropped, and :meth:`LoraManager.make_room` refuses more than fit.

Two classes implement ``LoraProduct`` for generation (the trainer has one with gradients): ``BatchLora`` plans its
products for the batch at hand; ``GroupedLora`` has shapes that do not depend on the batch and never waits for the
device, so that a CUDA graph can hold it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rookery.errors import UserError
from rookery.worker.memory import NoRoom, require
from rookery.worker.model.adapter import Adapter
from rookery.worker.model.adapter_slots import AdapterSlots, ResidentAdapter, padded_rank
from rookery.worker.model.batch_invariance import chunked_matmul, exact_rows, pad_rows, zero_padding_is_exact
from rookery.worker.model.config import SITES, DecoderConfig
from rookery.worker.model.decoder import Decoder

T = TypeVar("T")

GroupedMatmul = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [rows, in], w [slots, in, out], ends [slots] int32 → [rows, out]: the rows from ``ends[i - 1]`` to before
``ends[i]`` times ``w[i]``."""

_ADAPTER_ROWS, _PRODUCT_ROWS, _GATHER_ROWS = 15, 45, 45
"""Costs of one more adapter in a product, of one more product, and of gathering rows into groups and back, in rows of
work: measured on SmolLM2's shapes; over all layers a row takes 0.08 ms, an adapter 1.2 ms, a product 3 to 4 ms."""

_FOREIGN_ROW = 0.4
"""Cost of a row times an adapter that is not its own, in rows of work: one large product is faster than many small
ones."""

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
    """Resident adapters by key (the manifest hash), and the ``LoraProduct`` of each batch."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        max_rank: int,
        budget_bytes: int = sys.maxsize,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.max_rank = max_rank
        self.budget_bytes = budget_bytes
        self.dropped: list[str] = []
        """Adapters that left memory; the engine drops their caches and clears the list."""
        self._residents: dict[str, ResidentAdapter] = {}
        """The least recently used first."""
        self._slots = AdapterSlots(config, dtype, device, int(_SLOT_SHARE * budget_bytes))

    def __contains__(self, key: str) -> bool:
        return key in self._residents and not self._residents[key].evict_pending

    def __len__(self) -> int:
        return len(self._residents)

    @property
    def bytes(self) -> int:
        """Of the adapters and their slots."""
        return sum(resident.bytes for resident in self._residents.values()) + self._slots.bytes

    def keys(self) -> list[str]:
        """Adapters that new requests may use."""
        return [key for key, resident in self._residents.items() if not resident.evict_pending]

    def make_room(self, rank: int) -> None:
        """Drops unused adapters until another one of ``rank`` fits. Raises :class:`~rookery.worker.memory.NoRoom` while
        those in use leave no room, ``UserError`` if there can never be room for one of this rank."""
        used = [resident for resident in self._residents.values() if resident.pins]
        slot_rank = max(padded_rank(rank), *(resident.rank for resident in used), 0)
        size, slots = self._slots.bytes_for(1, padded_rank(rank)), self._slots.bytes_for(len(used) + 2, slot_rank)
        most = self.budget_bytes // 2
        if not used:
            require(f"an adapter of rank {rank}", max(size, int(slots / 2 / _SLOT_SHARE)), most)
        if slots > self._slots.max_bytes or sum(resident.bytes for resident in used) + size > most:
            raise NoRoom
        self._drop_idle(most - size)

    def add(self, key: str, adapter: Adapter) -> None:
        """Makes ``adapter`` resident. Raises ``UserError`` when its rank is above ``max_rank``, and as
        :meth:`make_room`."""
        if adapter.rank > self.max_rank:
            raise UserError(f"rank {adapter.rank} is over this worker's max_rank {self.max_rank}")
        if key in self._residents:
            self._residents[key].evict_pending = False
        else:
            self.make_room(adapter.rank)
            self._residents[key] = ResidentAdapter.load(adapter, self.config, self.dtype, self.device)

    def add_full(self, key: str, size: int, load: Callable[[], Decoder]) -> None:
        """Makes a full-parameter version of ``size`` bytes resident; ``load`` is called once there is room. Raises as
        :meth:`make_room`."""
        if key in self._residents:
            self._residents[key].evict_pending = False
            return
        used = sum(resident.bytes for resident in self._residents.values() if resident.pins)
        require("two full-parameter versions", 2 * size, self.budget_bytes)  # the present one and the next
        if used + size > self.budget_bytes:
            raise NoRoom
        self._drop_idle(self.budget_bytes - size)
        self._residents[key] = ResidentAdapter(0, {}, {}, finite=True, decoder=load())

    def lora_key(self, key: str) -> str:
        """The key under which products know an adapter: a full-parameter version has no LoRA."""
        return "" if self.decoder(key) is not None else key

    def decoder(self, key: str) -> Decoder | None:
        """That of a full-parameter version; None for a LoRA and for the base model."""
        resident = self._residents.get(key)
        return resident.decoder if resident is not None else None

    def evict(self, key: str) -> None:
        """Drops an adapter, at once or when its last request ends. Unknown keys are ignored."""
        resident = self._residents.get(key)
        if resident is not None:
            resident.evict_pending = True
            self._drop_if_unused(key, resident)

    def pin(self, key: str) -> None:
        """A request starts to use ``key``; raises ``KeyError`` when it is not resident."""
        resident = self._residents[key] = self._residents.pop(key)
        resident.pins += 1

    def unpin(self, key: str) -> None:
        resident = self._residents[key]
        resident.pins -= 1
        self._drop_if_unused(key, resident)

    def _drop_idle(self, most_bytes: int) -> None:
        """Drops unused adapters, the least recently used first, above ``most_bytes`` in all or ``_IDLE_ADAPTERS``."""
        idle = [(key, resident) for key, resident in self._residents.items() if not resident.pins]
        total = sum(resident.bytes for resident in self._residents.values())
        while idle and (total > most_bytes or len(idle) >= _IDLE_ADAPTERS):
            key, resident = idle.pop(0)
            total -= resident.bytes
            self._drop(key)

    def _drop_if_unused(self, key: str, resident: ResidentAdapter) -> None:
        if resident.evict_pending and resident.pins == 0:
            self._drop(key)

    def _drop(self, key: str) -> None:
        del self._residents[key]
        self._slots.remove(key)
        self.dropped.append(key)

    def packed(self, key: str, layout: Callable[[ResidentAdapter], T]) -> T:
        """An adapter in the layout of other products than those below; made once, it replaces the tensors that these
        read."""
        resident = self._residents[key]
        if resident.packed is None:
            resident.packed = layout(resident)
            resident.a, resident.b = {}, {}
        packed: T = resident.packed
        return packed

    def _wanted(self, keys: Iterable[str]) -> dict[str, ResidentAdapter]:
        return {key: self._residents[key] for key in keys if key}

    # --- products ---------------------------------------------------------------------------------------------------

    def slot_order(self, key: str) -> int:
        """Sort key of a batch's rows: the adapter's slot, the base model last. Sorted rows need no rearrangement."""
        return self._slots.slot(key)

    def batch_product(self, keys: Sequence[str], counts: Sequence[int], *, pinned: bool = False) -> BatchLora | None:
        """The ``LoraProduct`` of a stream whose first ``counts[0]`` tokens belong to ``keys[0]`` and so on; the empty
        key is the base model, each key appears once. None when all tokens belong to the base model. With ``pinned``,
        adapters that have slots keep them."""
        if not any(keys):
            return None
        slots = self._slots.assign(self._wanted(keys), pinned=pinned)
        return BatchLora(self._slots, [slots[key] if key else -1 for key in keys], counts)

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
        self._slots.assign(wanted, pinned=True)
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
    """``LoraProduct`` of one stream sorted by adapter. It changes ``y`` in place and has no backward pass.

    It takes the cheapest of three ways, which give the same bits. *Shared*: groups of about equal size share one
    batched product over the slots from their first to their last one, padded to the largest group. *Alone*: a group far
    larger than the others has a separate product. *Wide*: every row is multiplied by all of these slots, and the
    columns of other adapters are zeroed between the two factors; only where all adapters are finite (zero times
    infinity is NaN) and the number of zeros around a row's numbers cannot change their sum."""

    def __init__(self, slots: AdapterSlots, slot_of_group: Sequence[int], counts: Sequence[int]) -> None:
        """``slot_of_group`` and ``counts`` of the groups in the order of the stream; slot -1 is the base model."""
        starts = list(accumulate(counts, initial=0))[:-1]
        groups = sorted(
            (
                (count, slot, start)
                for slot, count, start in zip(slot_of_group, counts, starts, strict=True)
                if slot >= 0
            ),
            reverse=True,
        )
        first = min(slot for _, slot, _ in groups)
        self._width = width = max(slot for _, slot, _ in groups) + 1 - first
        total, rank = sum(counts), slots.rank
        self._views = slots.views(first, first + width)
        # oneDNN's threshold depends on the site; the narrowest decides
        thinnest = min(chunk.shape[-2] for layers in self._views.values() for chunk in layers[0].a)

        def exact(rows: int) -> int:
            return exact_rows(slots.dtype, rows, (thinnest, rank), (rank, slots.config.hidden))

        self.foreign: dict[int, Tensor] = {}
        """Of the wide product, by its number of columns: the columns that are not the row's own [rows, columns]."""
        costs = [_cost(groups, alone, width, total) for alone in range(len(groups) + 1)]
        deepest = width * rank * max(len(SITES[site]) for site in slots.sites)
        can_mix = all(slots.finite[first : first + width]) and zero_padding_is_exact(slots.dtype, deepest)
        if can_mix and _PRODUCT_ROWS + total + _FOREIGN_ROW * total * width < min(costs):
            self._rows = exact(total)
            own = torch.tensor(slot_of_group).sub(first).repeat_interleave(torch.tensor(counts))
            for ranks in {len(SITES[site]) * rank for site in slots.sites}:
                owner = torch.arange(width).repeat_interleave(ranks)
                self.foreign[width * ranks] = (owner != own[:, None]).to(slots.device)
            return
        alone = costs.index(min(costs))
        self._alone = [(slot - first, start, start + count, exact(count)) for count, slot, start in groups[:alone]]
        shared = [(count, slot - first, start) for count, slot, start in groups[alone:]]
        self._rows = exact(max(count for count, _, _ in shared)) if shared else 0
        self._even = _even(shared, width, self._rows, total)
        if shared and not self._even:
            take = torch.zeros(width, self._rows, dtype=torch.int64)
            source: list[int] = []
            target: list[int] = []
            for count, slot, start in shared:
                take[slot, :count] = torch.arange(start, start + count)
                target.extend(range(start, start + count))
                source.extend(range(slot * self._rows, slot * self._rows + count))
            self._take = take.view(-1).to(slots.device)
            self._source, self._target = (torch.tensor(x, device=slots.device) for x in (source, target))
            self._covers_all = target == list(range(total))

    def __call__(self, layer: int, site: str, x: Tensor, y: Tensor) -> Tensor:
        """See ``LoraProduct``."""
        if site not in self._views:
            return y
        views = self._views[site][layer]
        if self.foreign:
            inner = chunked_matmul(pad_rows(x, self._rows), views.wide_a)
            inner[: len(x)].masked_fill_(self.foreign[inner.shape[1]], 0.0)
            return _add_product(y, inner, views.wide_b)
        if self._rows:
            shape = (self._width, self._rows, -1)
            if self._even:
                y.view(shape).baddbmm_(chunked_matmul(x.view(shape), views.a), views.b)
                return y
            inner = chunked_matmul(x.index_select(0, self._take).view(shape), views.a)
            sums = torch.baddbmm(y.index_select(0, self._take).view(shape), inner, views.b).flatten(0, 1)
            picked = sums.index_select(0, self._source)
            if self._covers_all:
                return picked
            y.index_copy_(0, self._target, picked)
        for slot, start, end, rows in self._alone:
            inner = chunked_matmul(pad_rows(x[start:end], rows), [chunk[slot] for chunk in views.a])
            _add_product(y[start:end], inner, views.b[slot])
        return y


def _add_product(y: Tensor, inner: Tensor, b: Tensor) -> Tensor:
    """Adds the first n rows of ``inner`` [at least n, rank] · b to ``y`` [n, out], in place."""
    if len(inner) == len(y):
        return y.addmm_(inner, b)
    return y.copy_(torch.addmm(pad_rows(y, len(inner)), inner, b)[: len(y)])


def _even(groups: Sequence[tuple[int, int, int]], width: int, rows: int, total: int) -> bool:
    """Whether the stream consists of these groups, one after another in the order of their slots, of ``rows`` each."""
    in_order = sorted(groups, key=lambda group: group[1])
    return (
        len(groups) == width
        and total == width * rows
        and [(count, start) for count, _, start in in_order] == [(rows, i * rows) for i in range(width)]
    )


def _cost(groups: list[tuple[int, int, int]], alone: int, width: int, total: int) -> float:
    """Rows of work when the ``alone`` largest groups have products of their own and the others share one."""
    solo = sum(count + _ADAPTER_ROWS + _PRODUCT_ROWS for count, _, _ in groups[:alone])
    rest = groups[alone:]
    if not rest:
        return solo
    gather = 0 if _even(rest, width, rest[0][0], total) else _GATHER_ROWS
    return solo + _PRODUCT_ROWS + gather + width * (rest[0][0] + _ADAPTER_ROWS)


class GroupedLora:
    """``LoraProduct`` of a stream sorted by slot, as one product per factor. The base model's rows and padding rows
    meet the zero slot. It changes ``y`` in place and has no backward pass."""

    def __init__(self, slots: AdapterSlots, ends: Tensor, product: GroupedMatmul) -> None:
        """``ends`` [slots] int32: see ``LoraManager.slot_ends``."""
        self._a = {site: a for site, (a,) in slots.a.items()}  # a GPU's contractions have one chunk
        self._b = dict(slots.b)
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
