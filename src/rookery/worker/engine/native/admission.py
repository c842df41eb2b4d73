"""Admission: which requests run and which wait, and where the caches of the running ones are.

* In the requests' ``order``, among equals first come, first served, up to ``max_rows`` and the cache's budget; beyond,
  requests wait. A tenant with less than its share of the rows goes first, and beyond ``max_rows`` while the cache has
  room (:func:`rookery.scheduling.fair_slices.next_row`). Clients never have more than ``max_rows``. When growing texts
  fill the budget, the youngest request of those beyond their tenants' shares is preempted: it returns to the head of
  the queue.
* Requests with a ``reserved`` row wait ahead of the others and preempt them in the same order. While there are any,
  rollouts leave a headroom of the cache; when requests with reserved rows need more, the rollouts' part is halved and
  the youngest beyond it are given back, to run on other workers (:class:`rookery.scheduling.slo.CacheBudget`).
* A group's prompt is cached once for all its members, and retained after them while there is room; so is the tail of an
  episode, for its next turn. A prompt that is computed while its group waits is retained the same way: a waiting
  request owns no memory.
* Retained caches are discarded with the adapter that computed them: nothing could use them before it is loaded again.
* A cache is reused only under the adapter that computed it; under a newer version of its policy only by a request that
  keeps its cache when it switches (``EngineRequest.keeps_cache``), and then with the shared prompt that it follows.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rookery.scheduling.fair_slices import (
    ServedItems,
    fair_amount,
    in_turns,
    most_rows,
    next_row,
    shares,
    short_of_rows,
)
from rookery.scheduling.worker_time import WorkerTime
from rookery.worker.engine.kv_cache import KVSlot, SegmentStore
from rookery.worker.engine.request import EngineRequest, SharedPrefix
from rookery.worker.engine.sequences import SequenceChunk
from rookery.worker.engine.slo_gate import LEAST_PREFILL, SloGate
from rookery.worker.model.lora import LoraManager


@dataclass
class PrefillSlice:
    """The chunks of one prefill slice, and whether more fit."""

    max_tokens: int
    max_keys: int
    work: list[tuple[EngineRequest | SharedPrefix, SequenceChunk]] = field(default_factory=list)
    tenants: Counter[str] = field(default_factory=Counter)
    """Its tokens by tenant."""
    clients: Counter[str] = field(default_factory=Counter)
    """Tokens of clients among them."""
    rollouts: Counter[str] = field(default_factory=Counter)
    """Tokens of rollouts among them, to which clients beyond their share count."""
    shared: Counter[str] = field(default_factory=Counter)
    """Tokens among them whose time the tenants share."""
    _widest: int = 0
    _keys: int = 0

    @property
    def padded(self) -> int:
        """Its tokens, padding included."""
        return self._widest * len(self.work)

    def fits(self, count: int, before: int = 0) -> bool:
        """Whether there is room for ``count`` tokens that attend to each other and to ``before`` cached ones."""
        padded = max(self._widest, count) * (len(self.work) + 1)
        return padded <= self.max_tokens and self._keys + before + count <= self.max_keys

    def add(
        self,
        target: EngineRequest | SharedPrefix,
        chunk: SequenceChunk,
        request: EngineRequest,
        gate: SloGate,
    ) -> None:
        """``target`` is the ``request``, or a shared prompt that it needs."""
        count, tenant = len(chunk.tokens), request.params.tenant
        self.tenants[tenant] += count
        self.clients[tenant] += count if request.params.client else 0
        self.rollouts[tenant] += 0 if gate.is_client(request) else count
        self.shared[tenant] += count if gate.shares_time(request) else 0
        self._widest = max(self._widest, count)
        self._keys += chunk.prefix_length + chunk.start + count
        self.work.append((target, chunk))


def sequence_chunk(
    key: str, tokens: Sequence[int], start: int, slot: KVSlot, prefix: SharedPrefix | None
) -> SequenceChunk:
    """Tokens of the segment in ``slot``, after the prefix if there is one."""
    if prefix is None:
        return SequenceChunk(key, tokens, start, slot)
    return SequenceChunk(key, tokens, start, slot, prefix.slot, len(prefix.tokens))


@dataclass(frozen=True)
class _RetainedTail:
    """Metadata of an episode's retained tail."""

    policy: str
    cached_by: tuple[str, ...]
    """The adapters that computed it."""
    prefix_adapter: str
    """The adapter that computed the shared prompt before it."""
    shared_tokens: tuple[int, ...]
    tokens: list[int]


class Admission:
    """The queue and the running requests. It counts ``preempted`` and ``reused_tokens`` in ``stats``."""

    def __init__(
        self,
        store: SegmentStore,
        loras: LoraManager,
        max_rows: int,
        stats: defaultdict[str, float],
        gate: SloGate,
        serves: Callable[[str], bool],
    ) -> None:
        """``gate``: it has the budget of the rollouts' cache, and knows the requests of clients; ``serves(key)``:
        whether the weights in use are those of an adapter."""
        self.running: list[EngineRequest] = []
        """The running requests, in order of admission."""
        self.waiting: deque[EngineRequest] = deque()
        self._store = store
        self._loras = loras
        self._max_rows = max_rows
        self._blocked = False
        """Whether at the last admission the next request had a row, and no memory: all others wait behind it."""
        self._gate = gate
        self._serves = serves
        self._budget = gate.cache_budget(store.tokens)
        self._stats = stats
        self._prefixes: dict[tuple[str, tuple[int, ...]], SharedPrefix] = {}
        self._prefilled = ServedItems()
        """Prompt tokens of rollouts."""

    @property
    def served(self) -> list[EngineRequest]:
        """Running requests that the weights in use serve, in order of admission."""
        return [row for row in self.running if self._serves(row.key)]

    # --- the queue --------------------------------------------------------------------------------------------------

    def enqueue(self, request: EngineRequest) -> None:
        self._on_version(request)
        reserved = self._num_reserved()
        first, index = (0, reserved) if request.params.reserved else (reserved, len(self.waiting))
        while index > first and self.waiting[index - 1].params.order > request.params.order:
            index -= 1
        self.waiting.insert(index, request)

    def admit(self) -> list[EngineRequest]:
        """Admits waiting requests as far as there are rows and memory. Returns rollouts that leave this worker, for
        the caller to end."""
        leaving: list[EngineRequest] = []
        self._blocked = False
        rows = max(self._max_rows, len(self.running))  # a request with a reserved row takes one rollout's
        if self._budget is not None:
            self._budget.observe(self._held(reserved=True))
        while self.waiting:
            request = self.waiting[0]
            if request.params.reserved:
                free = len(self.running) < rows and not self._clients_full()
            elif free := (at := self._next_rollout()) is not None:
                request = self.waiting[at]
            if free and self._within_budget(request, leaving) and self._allocate(request):
                self.running.append(request)
                self.waiting.remove(request)
            elif request.params.reserved and (yielding := self._yielding()) is not None:
                self._preempt(yielding)
            elif not self.running and self._store.retained:
                self._store.discard(lambda key, metadata: True)  # they divide the free memory into too small ranges
            else:
                self._blocked = free
                break
        return leaving

    def entitled(self) -> list[EngineRequest]:
        """The waiting requests of tenants that get a row at the next admission."""
        if not self.waiting or self._blocked or len(self.running) >= most_rows(self._max_rows):
            return []
        held = Counter(row.params.tenant for row in self.running)
        tenants = {row.params.tenant for row in self.waiting}
        if len(self.running) >= self._max_rows:
            tenants &= short_of_rows(tenants, held, self._weights(), self._max_rows)
        return [row for row in self.waiting if row.params.tenant in tenants]

    def _next_rollout(self) -> int | None:
        """The position of the waiting request that gets the next row, where none has a reserved one; None: there is no
        row for any."""
        held, full = Counter(row.params.tenant for row in self.running), self._clients_full()
        able = [at for at, row in enumerate(self.waiting) if not (full and row.params.client)]
        tenants = [self.waiting[at].params.tenant for at in able]
        found = next_row(tenants, held, self._weights(), self._max_rows)
        return None if found is None else able[found]

    def _clients_full(self) -> bool:
        """Whether clients have as many rows as a decode step computes."""
        return sum(row.params.client or row.params.reserved for row in self.running) >= self._max_rows

    def _yielding(self) -> EngineRequest | None:
        """The request that one with a reserved row preempts: the youngest client's where only that makes room."""
        rows = [row for row in self.running if not row.params.reserved]
        if self._clients_full():
            return next((row for row in reversed(rows) if row.params.client), None)
        return self._youngest() if rows else None

    def _weights(self) -> dict[str, float]:
        return {row.params.tenant: row.params.weight for row in (*self.running, *self.waiting)}

    def _within_budget(self, request: EngineRequest, leaving: list[EngineRequest]) -> bool:
        """Whether a rollout fits the budget of rollouts; the first one always does. A request with a reserved row does,
        and may cut that budget: the youngest rollouts beyond it are freed and added to ``leaving``."""
        budget = self._budget
        if budget is None:
            return True
        need = request.tail_length + request.params.shared_prefix
        if not request.params.reserved:
            applies = budget.frozen or any(row.params.reserved for row in self.running)
            held = self._held(reserved=False) if applies else 0
            return not held or held + need <= budget.rollouts
        rollouts = [row for row in self.running if not row.params.reserved]
        refs = [row.params.adapter for row in rollouts if row.params.adapter is not None]
        versions = {ref.policy: ref.version for ref in sorted(refs, key=lambda ref: ref.version)}
        if budget.cut(self._held(reserved=True) + need, versions):
            while rollouts and self._held(reserved=False) > budget.rollouts:
                row = rollouts.pop()
                self.running.remove(row)
                self._free(row)
                leaving.append(row)
        return True

    def _held(self, *, reserved: bool) -> int:
        """Tokens of the cache that running requests of a kind hold; a shared prompt counts once."""
        rows = [row for row in self.running if row.params.reserved == reserved and row.slot is not None]
        prefixes = {id(row.prefix): row.prefix for row in rows if row.prefix is not None}
        slots = [row.slot for row in rows] + [prefix.slot for prefix in prefixes.values()]
        return sum(slot.capacity + slot.copied for slot in slots)

    def _on_version(self, request: EngineRequest) -> None:
        adapter = request.params.adapter
        if self._budget is not None and adapter is not None and not request.params.reserved:
            self._budget.on_version(adapter.policy, adapter.version)

    def _youngest(self) -> EngineRequest:
        """The request to preempt: one with a reserved row only if all have one, and a rollout of a tenant that has no
        more than its share of the rows only if no tenant has more."""
        rollouts = [row for row in self.running if not row.params.reserved]
        held = Counter(row.params.tenant for row in rollouts)
        share = shares(held, self._weights(), self._max_rows)
        beyond = [row for row in rollouts if held[row.params.tenant] > share[row.params.tenant]]
        return (beyond or rollouts or self.running)[-1]

    def _preempt(self, request: EngineRequest) -> None:
        """Moves a running request to the head of the queue of its kind."""
        self.running.remove(request)
        self._free(request)
        self.waiting.insert(0 if request.params.reserved else self._num_reserved(), request)
        self._stats["preempted"] += 1

    def reset(self) -> None:
        """Returns all running requests to the queue, in their order, and frees every cache."""
        for row in reversed(list(self.running)):
            self._preempt(row)
        self._store.discard(lambda key, metadata: True)

    def _num_reserved(self) -> int:
        """Waiting requests with a reserved row; they are at the head of the queue."""
        return sum(request.params.reserved for request in self.waiting)

    def grow_running(self) -> None:
        """Makes room for the next token of every running request; preempts the youngest while there is none."""
        for row in list(self.running):
            while row.slot is not None and row.tail_length > row.slot.capacity:
                slot = self._store.resize(row.slot, row.tail_length)
                if slot is not None:
                    row.slot = slot
                else:
                    self._preempt(self._youngest())

    def room_after(self, request: EngineRequest, count: int) -> int:
        """The tokens, at most ``count``, for which there is room after the next one of a running request, without
        another being preempted or a retained segment evicted."""
        slot = self._store.resize(request.slot, request.tail_length + count, evict=False)
        request.slot = slot or request.slot
        return min(count, request.slot.capacity - request.tail_length)

    def on_adapter_switched(self, request: EngineRequest, *, keep: bool) -> None:
        """Call after the request has another adapter. With ``keep`` it keeps the cache that its next token can follow;
        otherwise the cache is computed again, without the request leaving its row."""
        request.keeps_cache = keep
        self._on_version(request)
        if request not in self.running:
            return
        if keep and request.tail and request.prefix_cached:
            request.cached_by = (*request.cached_by, request.key) if request.filled else (request.key,)
            return
        self._free(request, retain=False)
        if not self._allocate(request):
            self._preempt(request)

    def remove(self, request: EngineRequest) -> None:
        """Removes a finished request."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._free(request)

    def waiting_prefixes(self, fits: Callable[[int], bool]) -> Iterator[tuple[SharedPrefix, EngineRequest]]:
        """Shared prompts that waiting requests need first, each with a slot and its request: for a caller that computes
        each one whole and passes it to :meth:`retain_prefix`. Those of adapters with other weights are left out.
        Ends at the first that does not fit, or for which there is no room."""
        known = set(self._prefixes)
        for request in self.waiting:
            key, length = (request.key, request.shared_tokens), request.params.shared_prefix
            if not length or key in known or self._store.contains(key) or not self._serves(request.key):
                continue
            slot = self._store.allocate(length) if fits(length) else None
            if slot is None:
                return
            known.add(key)
            yield SharedPrefix(key, slot), request

    def plan_prefill(self, max_tokens: int, max_keys: int, time: WorkerTime) -> PrefillSlice:
        """Requests of clients, then the oldest, then others of its adapter, since every adapter in a slice costs
        separate products, then the remaining ones. Then the prefixes of waiting requests: rows become free one by one,
        and a slice for each one's prompt costs twice as much as its share of one slice for several. With ``max_tokens``
        it is empty only if no served row needs a prefill. Rollouts of several tenants take turns: next to clients those
        that fit; else in as many tokens as leave each its fair share of ``time``, and since chunks are padded to the
        widest, each has an equal part of them."""
        lora, is_client = self._loras.lora_key, self._gate.is_client
        rows = [row for row in self.served if not row.prefilled]
        rows.sort(key=lambda row: not is_client(row))
        first: dict[int, EngineRequest] = {}
        for row in sorted(rows, key=lambda row: (not is_client(row), row.key != rows[0].key)):
            first.setdefault(id(row.prefill_target), row)
        clients = [row for row in first.values() if is_client(row)]
        rollouts = [row for row in first.values() if not is_client(row)]
        missing = Counter[str]()
        for row in rollouts:
            missing[row.params.tenant] += row.prefill_target.missing
        weights, widest = time.weights_within(missing), max_tokens
        if max_tokens and rollouts and not clients:
            cost = partial(self._gate.costs.predict, "prefill")
            max_tokens = min(max_tokens, max(LEAST_PREFILL, fair_amount(missing, weights, cost, max_tokens)))
            widest = max(1, max_tokens // len(missing))
        order = in_turns([row.params.tenant for row in rollouts], weights, self._prefilled.begin(missing))
        rows = [*clients, *(rollouts[at] for at in order)]
        plan = PrefillSlice(max_tokens, max_keys)
        for row in rows if max_tokens else ():
            target = row.prefill_target
            tokens, prefix = (row.tail, row.prefix) if isinstance(target, EngineRequest) else (target.tokens, None)
            start, count = target.filled, min(target.missing, widest)
            before = start + (len(prefix.tokens) if prefix is not None else 0)
            if plan.work and not plan.fits(count, before):
                if clients and not is_client(row):
                    continue
                break
            chunk = sequence_chunk(lora(row.key), tokens[start : start + count], start, target.slot, prefix)
            plan.add(target, chunk, row, self._gate)
            missing[row.params.tenant] -= 0 if is_client(row) else count
        self._prefilled.end(plan.rollouts, (tenant for tenant, left in missing.items() if left > 0), weights)
        if plan.work:
            for prefix, request in self.waiting_prefixes(plan.fits):
                chunk = sequence_chunk(lora(prefix.key[0]), prefix.tokens, 0, prefix.slot, None)
                plan.add(prefix, chunk, request, self._gate)
        return plan

    def retain_prefix(self, prefix: SharedPrefix) -> None:
        """Retains a complete prefix that no running request uses."""
        self._store.retain(prefix.slot, prefix.key, prefix.hidden, self._gate.clock())

    def discard_adapters(self, keys: Collection[str]) -> None:
        """Discards the retained caches of adapters that left memory."""

        def computed_by(key: Hashable, metadata: Any) -> bool:
            tail = isinstance(metadata, _RetainedTail)
            return (metadata.cached_by[-1] if tail else key[0]) in keys  # type: ignore[index]

        if keys:
            self._store.discard(computed_by)

    # --- memory -----------------------------------------------------------------------------------------------------

    def _allocate(self, request: EngineRequest) -> bool:
        """Finds or allocates the slots of a request; False (and nothing changes) when there is no room."""
        tail = request.tail
        if not self._restore_tail(request, tail):
            request.slot, request.filled = self._store.allocate(max(len(tail), 1), len(request.shared_tokens)), 0
            request.cached_by = (request.key,)
        if request.slot is None:
            return False
        if request.params.shared_prefix and request.prefix is None and not self._join_prefix(request, request.key):
            self._free(request)
            return False
        return True

    def _free(self, request: EngineRequest, *, retain: bool = True) -> None:
        """Frees the slots of a request; with ``retain``, the tail of an episode is retained for its next turn if the
        adapter is still attached."""
        slot, request.slot = request.slot, None
        retain = retain and bool(request.params.episode and request.filled) and self._attached(request.key)
        if slot is not None and retain:
            adapter, prefix = request.params.adapter, request.prefix
            metadata = _RetainedTail(
                policy=adapter.policy if adapter is not None else "",
                cached_by=request.cached_by,
                prefix_adapter=prefix.key[0] if prefix is not None else request.key,
                shared_tokens=request.shared_tokens,
                tokens=request.tail[: request.filled],
            )
            self._store.retain(slot, ("episode", request.params.episode), metadata, self._gate.clock())
        elif slot is not None:
            self._store.free(slot)
        request.filled = 0
        self._leave_prefix(request, retained_tail=retain)

    def _attached(self, key: str) -> bool:
        """Whether new requests may use this adapter."""
        return not key or key in self._loras

    def _restore_tail(self, request: EngineRequest, tail: list[int]) -> bool:
        """Restores the episode's cache if the request's tail extends it."""
        episode = request.params.episode
        kept = self._store.restore(("episode", episode), len(tail)) if episode and tail else None
        if kept is None:
            return False
        slot, metadata = kept
        if not self._can_extend(request, tail, metadata):
            self._store.free(slot)
            return False
        # If the whole tail is cached, its last token is computed again: its logits are not retained.
        request.slot, request.filled = slot, min(len(metadata.tokens), len(tail) - 1)
        made = metadata.cached_by
        request.cached_by = made if made[-1] == request.key else (*made, request.key)
        self._stats["reused_tokens"] += request.filled
        return True

    def _can_extend(self, request: EngineRequest, tail: list[int], kept: _RetainedTail) -> bool:
        """Whether the request may continue from a retained tail. If the tail follows another adapter's shared prompt,
        the request joins that."""
        if kept.shared_tokens != request.shared_tokens or tail[: len(kept.tokens)] != kept.tokens:
            return False
        if not self._store.rewinds and len(tail) == len(kept.tokens):
            return False
        same_prefix = kept.prefix_adapter == request.key
        if same_prefix and kept.cached_by == (request.key,):
            return True
        adapter = request.params.adapter
        if not request.keeps_cache or adapter is None or kept.policy != adapter.policy:
            return False
        return same_prefix or not kept.shared_tokens or self._join_prefix(request, kept.prefix_adapter)

    def _join_prefix(self, request: EngineRequest, adapter: str) -> bool:
        """Joins the shared prompt as ``adapter`` computes it. One of another adapter than the request's is joined
        complete or not at all."""
        tokens = request.shared_tokens
        key = (adapter, tokens)
        prefix = self._prefixes.get(key)
        if prefix is None:
            kept = self._store.restore(key, len(tokens))
            if kept is not None:
                prefix = SharedPrefix(key, kept[0], filled=len(tokens), hidden=kept[1])
                self._stats["reused_tokens"] += len(tokens)
            else:
                slot = self._store.allocate(len(tokens)) if adapter == request.key else None
                if slot is None:
                    return False
                prefix = SharedPrefix(key, slot)
            self._prefixes[key] = prefix
        elif adapter != request.key and not prefix.complete:
            return False
        prefix.users += 1
        request.prefix = prefix
        return True

    def _leave_prefix(self, request: EngineRequest, *, retained_tail: bool) -> None:
        """The last user's prefix is retained if requests may still need it: for its adapter or a retained tail."""
        prefix, request.prefix = request.prefix, None
        if prefix is None:
            return
        prefix.users -= 1
        if prefix.users == 0:
            del self._prefixes[prefix.key]
            if prefix.complete and (retained_tail or self._attached(prefix.key[0])):
                self.retain_prefix(prefix)
            else:
                self._store.free(prefix.slot)
