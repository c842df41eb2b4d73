"""Adapters resident in a worker, unmerged, many of them in one batch.

Promises:

* A token gets its own adapter's delta and nothing of any other's: a NaN in one adapter stays in its own rows.
* A row's result does not depend, bit for bit in bfloat16 on CPU, on the other rows, on the other adapters, or on
  their ranks (``worker/exact.py``).
* An adapter in use is not dropped under a running request: eviction waits for the last pin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from rookery.errors import UserError
from rookery.worker.exact import least_rows
from rookery.worker.model.adapter import Adapter
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import SITES, outputs_of
from rookery.worker.model.grouped import Product, SortedLora

RANK_BUCKET = 16
"""Ranks are padded to 16, 32, 64 …: a narrower product costs as much as one of 16."""

_ADAPTER_ROWS, _PRODUCT_ROWS = 15, 45
"""What one more adapter in a product costs, and one more product, in rows of work: measured on SmolLM2's shapes, over
all layers about 0.08 ms a row, 1.2 ms an adapter, 3 to 4 ms a product."""

_FIRST_PLACES = 4
"""Slots of a new stack, one of them nobody's."""

_IDLE_BATCHES = 16
"""Batches after which an adapter that none of them used gives up its place in the stack: longer than the prefill slices
of others that come between two decode steps."""

_SCATTERED_BATCHES = 4
"""So many batches of adapters that do not stand side by side are put up with before these are seated anew: seating one
costs about as much as this saves in two decode steps."""


def bucket(rank: int) -> int:
    size = RANK_BUCKET
    while size < rank:
        size *= 2
    return size


@dataclass
class _Resident:
    """One adapter, fused and in the base's dtype: ``a[site]`` [layers, parts, rank, in] and ``b[site]``
    [layers, out, rank], every output with its own part's ranks, the scale folded into B."""

    rank: int
    a: dict[str, Tensor]
    b: dict[str, Tensor]
    pins: int = 0
    doomed: bool = False


class LoraBank:
    """Adapters by key (the manifest hash). ``select`` makes the ``Lora`` of one batch."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device | str, max_rank: int) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.max_rank = max_rank
        self._residents: dict[str, _Resident] = {}
        self._stack = _Stack(config, dtype, device)

    def __contains__(self, key: str) -> bool:
        return key in self._residents and not self._residents[key].doomed

    def __len__(self) -> int:
        return len(self._residents)

    def keys(self) -> list[str]:
        """Adapters that new requests may use."""
        return [key for key, resident in self._residents.items() if not resident.doomed]

    def add(self, key: str, adapter: Adapter) -> None:
        """Makes ``adapter`` resident. Raises ``UserError`` when its rank is over ``max_rank``."""
        if adapter.rank > self.max_rank:
            raise UserError(f"rank {adapter.rank} is over this worker's max_rank {self.max_rank}")
        if key in self._residents:
            self._residents[key].doomed = False
            return
        a, b, rank = {}, {}, bucket(adapter.rank)
        for site, parts in SITES.items():
            outputs = outputs_of(self.config, site)
            down = torch.zeros(self.config.layers, len(parts), rank, self.config.site_shape(parts[0])[0])
            up = torch.zeros(self.config.layers, outputs[parts[-1]].stop, rank)
            for (layer, part), (given_a, given_b) in adapter.weights.items():
                if part in parts:
                    down[layer, parts.index(part), : adapter.rank] = given_a
                    up[layer, outputs[part], : adapter.rank] = given_b * adapter.scale
            if any(part in parts for _, part in adapter.weights):
                a[site], b[site] = down.to(self.device, self.dtype), up.to(self.device, self.dtype)
        self._residents[key] = _Resident(rank, a, b)

    def evict(self, key: str) -> None:
        """Drops an adapter, at once or when its last request ends. Unknown keys are fine."""
        resident = self._residents.get(key)
        if resident is not None:
            resident.doomed = True
            self._drop_if_over(key, resident)

    def pin(self, key: str) -> None:
        """A request begins to use ``key``; raises ``KeyError`` when it is not resident."""
        self._residents[key].pins += 1

    def unpin(self, key: str) -> None:
        resident = self._residents[key]
        resident.pins -= 1
        self._drop_if_over(key, resident)

    def order(self, key: str) -> int:
        """Sorting a batch by this spares it a rearrangement: the adapter's place in the stack, the base model last."""
        return self._stack.keys.index(key) if key and key in self._stack.keys else len(self._stack.keys)

    @property
    def state(self) -> int:
        """Changes whenever the stack's tensors are others than before."""
        return self._stack.state

    def seat(self, keys: Iterable[str]) -> int:
        """Gives the adapters ``keys`` their places in the stack, for batches sorted by ``order``, and keeps its tensors
        where they are if it can. The number of places, of which the last one is zero; 0 when all are the base model."""
        wanted = {key: self._residents[key] for key in keys if key}
        if not wanted:
            return 0
        self._stack.seat(wanted, still=True)
        return self._stack.places

    def ends(self, keys: Sequence[str], counts: Sequence[int], rows: int) -> list[int]:
        """Where each place's rows end in a stream of ``rows`` rows. The first ``counts[0]`` belong to ``keys[0]`` and
        so on (seated, in the order of ``order``), the others to nobody."""
        held = [0] * self._stack.places
        for key, count in zip(keys, counts, strict=True):
            held[self.order(key) if key else -1] += count
        held[-1] += rows - sum(counts)
        return list(accumulate(held))

    def sorted_lora(self, ends: Tensor, product: Product) -> SortedLora:
        """The ``Lora`` of batches that ``ends`` [places] int32 describes, good until ``state`` changes."""
        return SortedLora(self._stack.a, self._stack.b, ends, product)

    def _drop_if_over(self, key: str, resident: _Resident) -> None:
        if resident.doomed and resident.pins == 0:
            del self._residents[key]
            self._stack.forget(key)

    def select(self, keys: Sequence[str], counts: Sequence[int]) -> BatchLora | None:
        """The ``Lora`` for a stream whose first ``counts[0]`` tokens belong to ``keys[0]`` and so on; the empty key
        is the base model. Each key appears once. None when every token belongs to the base."""
        if not any(keys):
            return None
        slots = self._stack.seat({key: self._residents[key] for key in keys if key})
        return BatchLora(self._stack, [slots[key] if key else -1 for key in keys], counts)


class _Stack:
    """The adapters of recent batches side by side: per site A [layers, slots, parts·rank, in] and B
    [layers, slots, out, parts·rank], so that one batched product serves all. A newcomer takes a slot that no batch used
    lately, or a new one. Idle slots are computed with, so when they are most of the stack it starts over. The last slot
    of the tensors is nobody's and zero."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.rank = 0
        self.keys: list[str] = []
        self.used: list[int] = []
        self.tick = 0
        self.a: dict[str, Tensor] = {}
        self.b: dict[str, Tensor] = {}
        self.sites: set[str] = set()
        self.places = 0
        """Slots of the tensors."""
        self.state = 0
        self._scattered = 0
        """Batches in a row whose adapters did not stand side by side."""
        self._views: dict[tuple[int, int], dict[str, list[tuple[Tensor, Tensor]]]] = {}

    def views(self, first: int, end: int) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """By site and layer, (A [slots, in, parts·rank], B [slots, parts·rank, out]) of the slots from ``first`` to
        before ``end``: made once, since making a view costs a good part of a small product."""
        found = self._views.get((first, end))
        if found is None:
            found = self._views[first, end] = {
                site: [
                    (a.transpose(1, 2), b.transpose(1, 2))
                    for a, b in zip(self.a[site][:, first:end], self.b[site][:, first:end], strict=True)
                ]
                for site in self.sites
            }
        return found

    def forget(self, key: str) -> None:
        if key in self.keys:
            slot = self.keys.index(key)
            self.keys[slot], self.used[slot] = "", -_IDLE_BATCHES

    def seat(self, wanted: dict[str, _Resident], *, still: bool = False) -> dict[str, int]:
        """Slots of the wanted adapters. With ``still``, starting over does not narrow the stack."""
        self.tick += 1
        fits = all(resident.rank <= self.rank and resident.a.keys() <= self.sites for resident in wanted.values())
        stale = [slot for slot, used in enumerate(self.used) if self.tick - used > _IDLE_BATCHES]
        scattered = self._scattered >= _SCATTERED_BATCHES and len(wanted) > 1 and not still
        if not fits or scattered or 2 * len(stale) > len(self.keys):
            self._start(wanted, still)
            stale = []
        free = [slot for slot in stale if self.keys[slot] not in wanted]
        for key, resident in wanted.items():
            if key not in self.keys:
                self._put(free.pop(0) if free else len(self.keys), key, resident)
        slots = {key: slot for slot, key in enumerate(self.keys) if key in wanted}
        beside = max(slots.values()) - min(slots.values()) < len(slots)
        self._scattered = 0 if beside else self._scattered + 1
        for slot in slots.values():
            self.used[slot] = self.tick
        return slots

    def _start(self, wanted: dict[str, _Resident], still: bool) -> None:
        """Over again, with the same tensors where they are of the shape that is wanted."""
        rank = max(resident.rank for resident in wanted.values())
        sites = set().union(*(resident.a for resident in wanted.values()))
        if still:
            rank, sites = max(rank, self.rank), sites | self.sites
        self.keys, self.used = [], []
        if (rank, sites) != (self.rank, self.sites):
            self.rank, self.sites, self.a, self.b, self.places = rank, sites, {}, {}, 0
            self._views.clear()

    def _put(self, slot: int, key: str, resident: _Resident) -> None:
        layers = self.config.layers
        if slot + 1 >= self.places:
            self._widen()
        for site in self.sites:
            parts = SITES[site]
            inputs = self.config.site_shape(parts[0])[0]
            outputs = sum(self.config.site_shape(part)[1] for part in parts)
            a = self.a[site][:, slot].view(layers, len(parts), self.rank, inputs)
            b = self.b[site][:, slot].view(layers, outputs, len(parts), self.rank)
            a.zero_()
            b.zero_()
            if site in resident.a:
                a[:, :, : resident.rank] = resident.a[site]
                for place, rows in enumerate(outputs_of(self.config, site).values()):
                    b[:, rows, place, : resident.rank] = resident.b[site][:, rows]
        if slot == len(self.keys):
            self.keys.append(key)
            self.used.append(self.tick)
        else:
            self.keys[slot] = key

    def _widen(self) -> None:
        """Room for a quarter as many again: a slot costs more memory than an adapter."""
        old = len(self.keys)
        self.places = max(_FIRST_PLACES, old + old // 4 + 2)
        self.state += 1
        self._views.clear()
        for site in self.sites:
            parts = SITES[site]
            ranks = len(parts) * self.rank
            outputs = sum(self.config.site_shape(part)[1] for part in parts)
            for kept, shape in (
                (self.a, (ranks, self.config.site_shape(parts[0])[0])),
                (self.b, (outputs, ranks)),
            ):
                wide = torch.zeros(self.config.layers, self.places, *shape, dtype=self.dtype, device=self.device)
                if site in kept:
                    wide[:, :old] = kept[site][:, :old]
                kept[site] = wide


class BatchLora:
    """``Lora`` for one stream sorted by adapter. It works in place on ``y`` and is not differentiable.

    Groups of about equal size share one batched product over the slots from the first to the last of theirs, padded to
    the largest; a group far larger than the rest is multiplied alone. Both give the same bits."""

    def __init__(self, stack: _Stack, slots: Sequence[int], counts: Sequence[int]) -> None:
        self.stack = stack
        starts = [sum(counts[:i]) for i in range(len(counts))]
        groups = sorted(
            ((count, slot, start) for slot, count, start in zip(slots, counts, starts, strict=True) if slot >= 0),
            reverse=True,
        )
        seated = [slot for _, slot, _ in groups]
        first = min(seated)
        width = max(seated) + 1 - first
        alone = min(range(len(groups) + 1), key=lambda k: _cost(groups, k, width))
        self.alone = [(slot - first, start, start + count) for count, slot, start in groups[:alone]]
        shared = [(count, slot - first, start) for count, slot, start in groups[alone:]]
        self.width = width
        self.views = stack.views(first, first + width)
        # oneDNN's threshold depends on the site; the worst is the narrowest
        cfg, rank = stack.config, stack.rank
        self.least = least_rows((min(cfg.hidden, cfg.heads * cfg.head_dim), rank), (rank, cfg.hidden))
        self.rows = max([self.least, *(count for count, _, _ in shared)]) if shared else 0
        total = sum(counts)
        in_order = sorted(shared, key=lambda group: group[1])
        self.even = (
            len(shared) == width
            and all(count == self.rows for count, _, _ in shared)
            and [start for _, _, start in in_order] == [i * self.rows for i in range(width)]
            and total == width * self.rows
        )
        if shared and not self.even:
            take = torch.zeros(width, self.rows, dtype=torch.int64)
            source: list[int] = []
            target: list[int] = []
            for count, slot, start in shared:
                take[slot, :count] = torch.arange(start, start + count)
                target.extend(range(start, start + count))
                source.extend(range(slot * self.rows, slot * self.rows + count))
            self.take = take.view(-1).to(stack.device)
            self.source, self.target = (torch.tensor(x, device=stack.device) for x in (source, target))
            self.whole = target == list(range(total))

    def __call__(self, layer: int, site: str, x: Tensor, y: Tensor) -> Tensor:
        if site not in self.views:
            return y
        wide_a, wide_b = self.views[site][layer]
        out = y
        if self.rows:
            if self.even:
                shape = (self.width, self.rows, -1)
                out.view(shape).baddbmm_(torch.bmm(x.view(shape), wide_a), wide_b)
                return out
            shape = (self.width, self.rows, -1)
            inner = torch.bmm(x.index_select(0, self.take).view(shape), wide_a)
            sums = torch.baddbmm(y.index_select(0, self.take).view(shape), inner, wide_b).flatten(0, 1)
            picked = sums.index_select(0, self.source)
            if self.whole:
                return picked
            out.index_copy_(0, self.target, picked)
        for slot, start, end in self.alone:
            rows, sums = x[start:end], out[start:end]
            short = self.least - len(rows)
            if short > 0:
                rows = torch.cat((rows, rows.new_zeros(short, rows.shape[1])))
                wide = torch.cat((sums, sums.new_zeros(short, sums.shape[1])))
                sums.copy_(torch.addmm(wide, rows @ wide_a[slot], wide_b[slot])[: len(sums)])
            else:
                sums.addmm_(rows @ wide_a[slot], wide_b[slot])
        return out


def _cost(groups: list[tuple[int, int, int]], alone: int, width: int) -> int:
    """Rows of work when the ``alone`` largest groups are multiplied by themselves, the rest together."""
    solo = sum(count + _ADAPTER_ROWS + _PRODUCT_ROWS for count, _, _ in groups[:alone])
    rest = groups[alone:]
    return solo + (_PRODUCT_ROWS + width * (rest[0][0] + _ADAPTER_ROWS) if rest else 0)
