"""Who computes and who waits, and where the caches of those who compute lie.

* First come, first served, up to ``max_rows`` and the cache's budget; beyond, requests wait. When growing texts fill
  the budget, the youngest goes back to the head of the queue.
* Requests marked ``first`` stand before the others in the queue and take their rows, the youngest's first.
* A group's prompt is cached once for all its members, and kept after them while there is room; so is an episode's tail,
  for its next turn. A prompt that is computed while its group waits is kept the same way: who waits holds nothing.
* A cache is taken up by the adapter that computed it alone; by a newer version of its policy only for a request that
  keeps its cache when it changes over (``Request.keeps``), and then with the shared prompt that it was computed upon.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rookery.worker.engine.native.kv_cache import KVStore
from rookery.worker.engine.native.request import EngineRequest, SharedPrefix
from rookery.worker.model.lora import LoraManager


@dataclass(frozen=True)
class _RetainedTail:
    """What is known of an episode's tail that nobody runs with."""

    policy: str
    made: tuple[str, ...]
    """The adapters that computed it."""
    under: str
    """The adapter that computed the shared prompt before it."""
    shared: tuple[int, ...]
    tokens: list[int]


class Scheduler:
    """``stats`` counts ``preempted`` and ``reused_tokens``."""

    def __init__(self, store: KVStore, bank: LoraManager, max_rows: int, stats: defaultdict[str, float]) -> None:
        self.running: list[EngineRequest] = []
        """Admitted requests in order of admission."""
        self.waiting: deque[EngineRequest] = deque()
        self._store = store
        self._bank = bank
        self._max_rows = max_rows
        self._stats = stats
        self._prefixes: dict[tuple[str, tuple[int, ...]], SharedPrefix] = {}

    # --- the queue --------------------------------------------------------------------------------------------------

    def enqueue(self, request: EngineRequest) -> None:
        """Queue a request."""
        if request.params.interactive:
            self.waiting.insert(self._num_interactive_waiting(), request)
        else:
            self.waiting.append(request)

    def admit(self) -> None:
        """Give rows to those who wait, as far as there are rows and room."""
        while self.waiting:
            request = self.waiting[0]
            if len(self.running) < self._max_rows and self._allocate(request):
                self.running.append(self.waiting.popleft())
            elif not (request.params.interactive and any(not row.params.interactive for row in self.running)):
                return
            else:
                self._preempt(self._preemption_victim())

    def _preemption_victim(self) -> EngineRequest:
        """The row that gives way; one that is ``first`` only if all are."""
        return next((row for row in reversed(self.running) if not row.params.interactive), self.running[-1])

    def _preempt(self, row: EngineRequest) -> None:
        """A row goes back to wait, at the head of its kind."""
        self.running.remove(row)
        self._free(row)
        self.waiting.insert(0 if row.params.interactive else self._num_interactive_waiting(), row)
        self._stats["preempted"] += 1

    def _num_interactive_waiting(self) -> int:
        """How many that are ``first`` wait: they are at the head of the queue."""
        return sum(request.params.interactive for request in self.waiting)

    def grow_running(self) -> None:
        """Grows the rows' places for their next token; what finds no room sends the youngest row back to wait."""
        for row in list(self.running):
            while row.slot is not None and row.tail_length > row.slot.capacity:
                moved = self._store.resize("tail", row.slot, row.tail_length)
                if moved is not None:
                    row.slot = moved
                else:
                    self._preempt(self._preemption_victim())

    def on_adapter_switched(self, request: EngineRequest, *, keep: bool) -> None:
        """The request has been given another adapter. With ``keep`` its cache stays as far as it has one that its next
        token can follow; else all of it is computed anew, where the request stands."""
        request.keeps_cache = keep
        if request not in self.running:
            return
        if keep and request.tail and request.prefix_cached:
            request.cached_by = (*request.cached_by, request.key) if request.filled else (request.key,)
            return
        self._free(request, park=False)
        if not self._allocate(request):
            self._preempt(request)

    def remove(self, request: EngineRequest) -> None:
        """A request is over."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._free(request)

    def waiting_prefixes(self, fits: Callable[[int], bool]) -> Iterator[SharedPrefix]:
        """The shared prompts that those who wait will want first, each with a place of its own: for who computes one
        whole, to :meth:`keep`. Ends at one whose length does not fit, or for which there is no room."""
        known = set(self._prefixes)
        for request in self.waiting:
            key = (request.key, self._shared_tokens(request))
            if not request.shared or key in known or self._store.contains(key):
                continue
            place = self._store.allocate("shared", request.shared) if fits(request.shared) else None
            if place is None:
                return
            known.add(key)
            yield SharedPrefix(key, place)

    def retain_prefix(self, segment: SharedPrefix) -> None:
        """One that :meth:`ahead` gave is complete."""
        self._store.retain(segment.slot, len(segment.tokens), segment.key, segment.logits)

    # --- places -----------------------------------------------------------------------------------------------------

    def _allocate(self, request: EngineRequest) -> bool:
        """Finds or makes the places of a request's segments; False (and nothing changed) when there is no room now."""
        tail = request.tail
        if not self._restore_tail(request, tail):
            request.slot, request.filled = self._store.allocate("tail", max(len(tail), 1)), 0
            request.cached_by = (request.key,)
        if request.slot is None:
            return False
        if request.shared and request.prefix is None and not self._join_prefix(request, request.key):
            self._free(request)
            return False
        return True

    def _free(self, request: EngineRequest, *, park: bool = True) -> None:
        """Gives the request's places back; an episode's tail is parked for its next turn, if that may use it."""
        place, request.slot = request.slot, None
        park = park and bool(request.params.episode and request.filled) and self._adapter_attached(request.key)
        if place is not None and park:
            adapter, segment = request.params.adapter, request.prefix
            about = _RetainedTail(
                policy=adapter.policy if adapter is not None else "",
                made=request.cached_by,
                under=segment.key[0] if segment is not None else request.key,
                shared=self._shared_tokens(request),
                tokens=request.tail[: request.filled],
            )
            self._store.retain(place, request.filled, ("episode", request.params.episode), about)
        elif place is not None:
            self._store.free(place)
        request.filled = 0
        self._release_prefix(request, wanted=park)

    def _adapter_attached(self, key: str) -> bool:
        """Whether requests may still come for this adapter."""
        return not key or key in self._bank

    def _restore_tail(self, request: EngineRequest, tail: list[int]) -> bool:
        """Takes up the episode's cache where it is a beginning of this request's tail."""
        episode = request.params.episode
        kept = self._store.restore("tail", ("episode", episode), len(tail)) if episode and tail else None
        if kept is None:
            return False
        place, about = kept
        if not self._can_extend(request, tail, about):
            self._store.free(place)
            return False
        # Where all of the tail is there, its last token is computed again: its logits were not kept.
        request.slot, request.filled = place, min(len(about.tokens), len(tail) - 1)
        request.cached_by = about.made if about.made[-1] == request.key else (*about.made, request.key)
        self._stats["reused_tokens"] += request.filled
        return True

    def _can_extend(self, request: EngineRequest, tail: list[int], about: _RetainedTail) -> bool:
        """Whether the request may go on from a parked tail. One that stands upon another adapter's shared prompt brings
        that with it."""
        if about.shared != self._shared_tokens(request) or tail[: len(about.tokens)] != about.tokens:
            return False
        own = about.under == request.key
        if own and about.made == (request.key,):
            return True
        adapter = request.params.adapter
        if not request.keeps_cache or adapter is None or about.policy != adapter.policy:
            return False
        return own or not request.shared or self._join_prefix(request, about.under)

    def _shared_tokens(self, request: EngineRequest) -> tuple[int, ...]:
        return tuple(request.params.prompt[: request.shared])

    def _join_prefix(self, request: EngineRequest, adapter: str) -> bool:
        """The shared prompt as ``adapter`` computes it. Another's than the request's own is taken complete or not at
        all."""
        tokens = self._shared_tokens(request)
        key = (adapter, tokens)
        segment = self._prefixes.get(key)
        if segment is None:
            kept = self._store.restore("shared", key, len(tokens))
            if kept is not None:
                segment = SharedPrefix(key, kept[0], filled=len(tokens), logits=kept[1])
                self._stats["reused_tokens"] += len(tokens)
            else:
                place = self._store.allocate("shared", len(tokens)) if adapter == request.key else None
                if place is None:
                    return False
                segment = SharedPrefix(key, place)
            self._prefixes[key] = segment
        elif adapter != request.key and not segment.complete:
            return False
        segment.users += 1
        request.prefix = segment
        return True

    def _release_prefix(self, request: EngineRequest, *, wanted: bool) -> None:
        """``wanted``: by a parked tail."""
        segment, request.prefix = request.prefix, None
        if segment is None:
            return
        segment.users -= 1
        if segment.users == 0:
            del self._prefixes[segment.key]
            if segment.complete and (wanted or self._adapter_attached(segment.key[0])):
                self._store.retain(segment.slot, len(segment.tokens), segment.key, segment.logits)
            else:
                self._store.free(segment.slot)
