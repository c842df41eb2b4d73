"""Adapters resident in a worker, unmerged, many of them in one batch.

Promises:

* A token gets its own adapter's delta and nothing of any other's: a NaN in one adapter stays in its own rows.
* A row's result does not depend, bit for bit on CPU, on the other rows, on the other adapters, or on their ranks
  (``worker/exact.py``).
* An adapter in use is not dropped under a running request: eviction waits for the last pin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from rookery.errors import UserError
from rookery.worker.model.adapter import Adapter
from rookery.worker.model.batch_invariance import alone_in, chunked_matmul, contraction_chunks, exact_rows, pad_rows
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import SITES, outputs_of
from rookery.worker.model.grouped_lora import Product, SortedLora

RANK_BUCKET = 16
"""Ranks are padded to 16, 32, 64 …: a narrower product costs as much as one of 16."""

_ADAPTER_ROWS, _PRODUCT_ROWS, _GATHER_ROWS = 15, 45, 45
"""What one more adapter in a product costs, one more product, and bringing rows into groups and back, in rows of work:
measured on SmolLM2's shapes, over all layers about 0.08 ms a row, 1.2 ms an adapter, 3 to 4 ms a product."""

_FOREIGN_ROW = 0.4
"""What a row costs with an adapter that is not its own, where all rows are multiplied by all adapters, in rows of
work: one large product is quicker than many small ones."""

_VIEWS_KEPT = 64
"""Ranges of slots whose views are kept: some hundred small objects each."""

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
    finite: bool
    """Whether nothing comes of it where it is multiplied by zero."""
    pinned: int = 0
    evict_pending: bool = False


class LoraBank:
    """Adapters by key (the manifest hash). ``select`` makes the ``Lora`` of one batch."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device | str, max_rank: int) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.max_rank = max_rank
        self._residents: dict[str, _Resident] = {}
        self._stack = AdapterSlots(config, dtype, device)

    def __contains__(self, key: str) -> bool:
        return key in self._residents and not self._residents[key].evict_pending

    def __len__(self) -> int:
        return len(self._residents)

    def keys(self) -> list[str]:
        """Adapters that new requests may use."""
        return [key for key, resident in self._residents.items() if not resident.evict_pending]

    def add(self, key: str, adapter: Adapter) -> None:
        """Makes ``adapter`` resident. Raises ``UserError`` when its rank is over ``max_rank``."""
        if adapter.rank > self.max_rank:
            raise UserError(f"rank {adapter.rank} is over this worker's max_rank {self.max_rank}")
        if key in self._residents:
            self._residents[key].evict_pending = False
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
        finite = all(bool(factor.isfinite().all()) for factor in (*a.values(), *b.values()))
        self._residents[key] = _Resident(rank, a, b, finite)

    def evict(self, key: str) -> None:
        """Drops an adapter, at once or when its last request ends. Unknown keys are fine."""
        resident = self._residents.get(key)
        if resident is not None:
            resident.evict_pending = True
            self._drop_if_over(key, resident)

    def pin(self, key: str) -> None:
        """A request begins to use ``key``; raises ``KeyError`` when it is not resident."""
        self._residents[key].pinned += 1

    def unpin(self, key: str) -> None:
        resident = self._residents[key]
        resident.pinned -= 1
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
        whole = {site: a for site, (a,) in self._stack.a.items()}  # a GPU knows no pieces
        return SortedLora(whole, self._stack.b, ends, product)

    def _drop_if_over(self, key: str, resident: _Resident) -> None:
        if resident.evict_pending and resident.pinned == 0:
            del self._residents[key]
            self._stack.forget(key)

    def select(self, keys: Sequence[str], counts: Sequence[int], *, still: bool = False) -> BatchLora | None:
        """The ``Lora`` for a stream whose first ``counts[0]`` tokens belong to ``keys[0]`` and so on; the empty key
        is the base model. Each key appears once. None when every token belongs to the base. With ``still``, what
        ``seat`` has put somewhere stays there."""
        if not any(keys):
            return None
        slots = self._stack.seat({key: self._residents[key] for key in keys if key}, still=still)
        return BatchLora(self._stack, [slots[key] if key else -1 for key in keys], counts)


class AdapterSlots:
    """The adapters of recent batches side by side: per site A [layers, slots, parts·rank, in], in pieces of ``in``
    (``exact.depths``), and B [layers, slots, parts·rank, out], so that one product serves all. A newcomer takes a slot
    that no batch used lately, or a new one. Idle slots are computed with, so when they are most of the stack it starts
    over. The last slot of the tensors is nobody's and zero."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.rank = 0
        self.keys: list[str] = []
        self.used: list[int] = []
        self.finite: list[bool] = []
        self.tick = 0
        self.a: dict[str, list[Tensor]] = {}
        self.b: dict[str, Tensor] = {}
        self.sites: set[str] = set()
        self.places = 0
        """Slots of the tensors."""
        self.state = 0
        self._scattered = 0
        """Batches in a row whose adapters did not stand side by side."""
        self._views: dict[tuple[int, int], dict[str, list[_Views]]] = {}

    def views(self, first: int, end: int) -> dict[str, list[_Views]]:
        """By site and layer, of the slots from ``first`` to before ``end``: made once, since making a view costs a
        good part of a small product."""
        found = self._views.get((first, end))
        if found is None:
            if len(self._views) == _VIEWS_KEPT:
                self._views.clear()
            found = self._views[first, end] = {
                site: [
                    _views(a, b)
                    for *a, b in zip(*(x[:, first:end] for x in (*self.a[site], self.b[site])), strict=True)
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
        self.keys, self.used, self.finite = [], [], []
        if (rank, sites) != (self.rank, self.sites):
            self.rank, self.sites, self.a, self.b, self.places = rank, sites, {}, {}, 0
            self._views.clear()

    def _put(self, slot: int, key: str, resident: _Resident) -> None:
        layers = self.config.layers
        if slot + 1 >= self.places:
            self._widen()
        for site in self.sites:
            parts = SITES[site]
            outputs = sum(self.config.site_shape(part)[1] for part in parts)
            a = [piece[:, slot].view(layers, len(parts), self.rank, -1) for piece in self.a[site]]
            b = self.b[site][:, slot].view(layers, len(parts), self.rank, outputs)
            for zeroed in (*a, b):
                zeroed.zero_()
            if site in resident.a:
                sizes = [piece.shape[-1] for piece in a]
                for piece, given in zip(a, resident.a[site].split(sizes, -1), strict=True):
                    piece[:, :, : resident.rank] = given
                for place, rows in enumerate(outputs_of(self.config, site).values()):
                    b[:, place, : resident.rank, rows] = resident.b[site][:, rows].transpose(1, 2)
        if slot == len(self.keys):
            self.keys.append(key)
            self.used.append(self.tick)
            self.finite.append(resident.finite)
        else:
            self.keys[slot], self.finite[slot] = key, resident.finite

    def _widen(self) -> None:
        """Room for a quarter as many again: a slot costs more memory than an adapter."""
        old = len(self.keys)
        self.places = max(_FIRST_PLACES, old + old // 4 + 2)
        self.state += 1
        self._views.clear()
        for site in self.sites:
            parts = SITES[site]
            outputs = sum(self.config.site_shape(part)[1] for part in parts)
            pieces = contraction_chunks(self.config.site_shape(parts[0])[0], self.dtype, self.device)
            before = [*self.a[site], self.b[site]] if site in self.b else [None] * (len(pieces) + 1)
            *self.a[site], self.b[site] = (
                self._wider(len(parts) * self.rank, size, old, kept)
                for size, kept in zip((*pieces, outputs), before, strict=True)
            )

    def _wider(self, ranks: int, size: int, old: int, kept: Tensor | None) -> Tensor:
        """[layers, places, ranks, size] of zeros, the first ``old`` places of ``kept``."""
        wide = torch.zeros(self.config.layers, self.places, ranks, size, dtype=self.dtype, device=self.device)
        if kept is not None:
            wide[:, :old] = kept[:, :old]
        return wide


@dataclass(frozen=True)
class _Views:
    """Of a range of slots, in one layer and site: each slot's matrices, and all of them as one."""

    a: Sequence[Tensor]
    """[slots, in, parts·rank], in pieces of ``in``"""
    b: Tensor
    """[slots, parts·rank, out]"""
    whole_a: Sequence[Tensor]
    """[in, slots·parts·rank], in pieces of ``in``"""
    whole_b: Tensor
    """[slots·parts·rank, out]"""


def _views(a: Sequence[Tensor], b: Tensor) -> _Views:
    """a [slots, parts·rank, in] in pieces of ``in``, b [slots, parts·rank, out]"""
    return _Views([x.transpose(1, 2) for x in a], b, [x.flatten(0, 1).t() for x in a], b.flatten(0, 1))


class BatchLora:
    """``Lora`` for one stream sorted by adapter. It works in place on ``y`` and is not differentiable.

    Three ways, by what they cost, all with the same bits. Groups of about equal size share one batched product over the
    slots from the first to the last of theirs, padded to the largest. A group far larger than the rest is multiplied
    alone. Or every row is multiplied by all of these slots, and what is not its own adapter's is zeroed between the two
    factors: not where an adapter is not finite, since zero times that is not zero, nor where it could show among how
    many zeros a row's own numbers stand."""

    def __init__(self, stack: AdapterSlots, slots: Sequence[int], counts: Sequence[int]) -> None:
        self.stack = stack
        starts = [sum(counts[:i]) for i in range(len(counts))]
        groups = sorted(
            ((count, slot, start) for slot, count, start in zip(slots, counts, starts, strict=True) if slot >= 0),
            reverse=True,
        )
        seated = [slot for _, slot, _ in groups]
        first = min(seated)
        width = max(seated) + 1 - first
        total = sum(counts)
        self.width = width
        self.views = stack.views(first, first + width)
        # oneDNN's threshold depends on the site; the worst is the narrowest
        rank = stack.rank
        thinnest = min(piece.shape[-2] for layers in self.views.values() for piece in layers[0].a)
        narrow = (thinnest, rank), (rank, stack.config.hidden)

        def exact(rows: int) -> int:
            return exact_rows(stack.dtype, rows, *narrow)

        self.foreign: dict[int, Tensor] = {}
        """By columns of the wide product's middle: which of them are not the row's own [rows, columns]."""
        costs = [_cost(groups, alone, width, total) for alone in range(len(groups) + 1)]
        deepest = width * rank * max(len(SITES[site]) for site in stack.sites)
        mixes = all(stack.finite[first : first + width]) and alone_in(stack.dtype, deepest)
        if mixes and _wide_cost(total, width) < min(costs):
            self.rows = exact(total)
            own = torch.tensor(slots).sub(first).repeat_interleave(torch.tensor(counts))
            for ranks in {len(SITES[site]) * rank for site in stack.sites}:
                of = torch.arange(width).repeat_interleave(ranks)
                self.foreign[width * ranks] = (of != own[:, None]).to(stack.device)
            return
        alone = costs.index(min(costs))
        self.alone = [(slot - first, start, start + count, exact(count)) for count, slot, start in groups[:alone]]
        shared = [(count, slot - first, start) for count, slot, start in groups[alone:]]
        self.rows = exact(max(count for count, _, _ in shared)) if shared else 0
        self.even = _even(shared, width, self.rows, total)
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
        of = self.views[site][layer]
        out = y
        if self.foreign:
            inner = chunked_matmul(pad_rows(x, self.rows), of.whole_a)
            inner[: len(x)].masked_fill_(self.foreign[inner.shape[1]], 0.0)
            return _add_product(out, inner, of.whole_b)
        if self.rows:
            shape = (self.width, self.rows, -1)
            if self.even:
                out.view(shape).baddbmm_(chunked_matmul(x.view(shape), of.a), of.b)
                return out
            inner = chunked_matmul(x.index_select(0, self.take).view(shape), of.a)
            sums = torch.baddbmm(y.index_select(0, self.take).view(shape), inner, of.b).flatten(0, 1)
            picked = sums.index_select(0, self.source)
            if self.whole:
                return picked
            out.index_copy_(0, self.target, picked)
        for slot, start, end, rows in self.alone:
            inner = chunked_matmul(pad_rows(x[start:end], rows), [piece[slot] for piece in of.a])
            _add_product(out[start:end], inner, of.b[slot])
        return out


def _add_product(sums: Tensor, inner: Tensor, b: Tensor) -> Tensor:
    """``sums`` [n, out] with the first n rows of ``inner`` [at least n, rank] · b added to it, in place."""
    if len(inner) == len(sums):
        return sums.addmm_(inner, b)
    return sums.copy_(torch.addmm(pad_rows(sums, len(inner)), inner, b)[: len(sums)])


def _even(groups: Sequence[tuple[int, int, int]], width: int, rows: int, total: int) -> bool:
    """Whether the stream is these groups one after another in the order of their slots, each of so many ``rows``."""
    in_order = sorted(groups, key=lambda group: group[1])
    return (
        len(groups) == width
        and all(count == rows for count, _, _ in groups)
        and [start for _, _, start in in_order] == [i * rows for i in range(width)]
        and total == width * rows
    )


def _cost(groups: list[tuple[int, int, int]], alone: int, width: int, total: int) -> float:
    """Rows of work when the ``alone`` largest groups are multiplied by themselves, the rest together."""
    solo = sum(count + _ADAPTER_ROWS + _PRODUCT_ROWS for count, _, _ in groups[:alone])
    rest = groups[alone:]
    if not rest:
        return solo
    gather = 0 if _even(rest, width, rest[0][0], total) else _GATHER_ROWS
    return solo + _PRODUCT_ROWS + gather + width * (rest[0][0] + _ADAPTER_ROWS)


def _wide_cost(total: int, width: int) -> float:
    """Rows of work when all rows are multiplied by all slots."""
    return _PRODUCT_ROWS + total + _FOREIGN_ROW * total * width
