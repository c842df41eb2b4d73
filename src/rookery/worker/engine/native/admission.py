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
from rookery.worker.engine.native.request import Request, Segment
from rookery.worker.model.lora import LoraBank


@dataclass(frozen=True)
class _Parked:
    """What is known of an episode's tail that nobody runs with."""

    policy: str
    made: tuple[str, ...]
    """The adapters that computed it."""
    under: str
    """The adapter that computed the shared prompt before it."""
    shared: tuple[int, ...]
    tokens: list[int]


class Admission:
    """``stats`` counts ``preempted`` and ``reused_tokens``."""

    def __init__(self, store: KVStore, bank: LoraBank, max_rows: int, stats: defaultdict[str, float]) -> None:
        self.rows: list[Request] = []
        """Admitted requests in order of admission."""
        self.waiting: deque[Request] = deque()
        self._store = store
        self._bank = bank
        self._max_rows = max_rows
        self._stats = stats
        self._segments: dict[tuple[str, tuple[int, ...]], Segment] = {}

    # --- the queue --------------------------------------------------------------------------------------------------

    def wait(self, request: Request) -> None:
        """Queue a request."""
        if request.order.interactive:
            self.waiting.insert(self._firsts(), request)
        else:
            self.waiting.append(request)

    def admit(self) -> None:
        """Give rows to those who wait, as far as there are rows and room."""
        while self.waiting:
            request = self.waiting[0]
            if len(self.rows) < self._max_rows and self._seat(request):
                self.rows.append(self.waiting.popleft())
            elif not (request.order.interactive and any(not row.order.interactive for row in self.rows)):
                return
            else:
                self._send_back(self._youngest())

    def _youngest(self) -> Request:
        """The row that gives way; one that is ``first`` only if all are."""
        return next((row for row in reversed(self.rows) if not row.order.interactive), self.rows[-1])

    def _send_back(self, row: Request) -> None:
        """A row goes back to wait, at the head of its kind."""
        self.rows.remove(row)
        self._vacate(row)
        self.waiting.insert(0 if row.order.interactive else self._firsts(), row)
        self._stats["preempted"] += 1

    def _firsts(self) -> int:
        """How many that are ``first`` wait: they are at the head of the queue."""
        return sum(request.order.interactive for request in self.waiting)

    def make_room(self) -> None:
        """Grows the rows' places for their next token; what finds no room sends the youngest row back to wait."""
        for row in list(self.rows):
            while row.place is not None and row.tail_length > row.place.capacity:
                moved = self._store.move("tail", row.place, row.tail_length)
                if moved is not None:
                    row.place = moved
                else:
                    self._send_back(self._youngest())

    def switched(self, request: Request, *, keep: bool) -> None:
        """The request has been given another adapter. With ``keep`` its cache stays as far as it has one that its next
        token can follow; else all of it is computed anew, where the request stands."""
        request.keeps = keep
        if request not in self.rows:
            return
        if keep and request.tail and request.ready:
            request.made = (*request.made, request.key) if request.filled else (request.key,)
            return
        self._vacate(request, park=False)
        if not self._seat(request):
            self._send_back(request)

    def leave(self, request: Request) -> None:
        """A request is over."""
        if request in self.rows:
            self.rows.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._vacate(request)

    def ahead(self, fits: Callable[[int], bool]) -> Iterator[Segment]:
        """The shared prompts that those who wait will want first, each with a place of its own: for who computes one
        whole, to :meth:`keep`. Ends at one whose length does not fit, or for which there is no room."""
        known = set(self._segments)
        for request in self.waiting:
            key = (request.key, self._shared_tokens(request))
            if not request.shared or key in known or self._store.contains(key):
                continue
            place = self._store.allocate("shared", request.shared) if fits(request.shared) else None
            if place is None:
                return
            known.add(key)
            yield Segment(key, place)

    def keep(self, segment: Segment) -> None:
        """One that :meth:`ahead` gave is complete."""
        self._store.retain(segment.place, len(segment.tokens), segment.key, segment.logits)

    # --- places -----------------------------------------------------------------------------------------------------

    def _seat(self, request: Request) -> bool:
        """Finds or makes the places of a request's segments; False (and nothing changed) when there is no room now."""
        tail = request.tail
        if not self._revive(request, tail):
            request.place, request.filled = self._store.allocate("tail", max(len(tail), 1)), 0
            request.made = (request.key,)
        if request.place is None:
            return False
        if request.shared and request.segment is None and not self._join_segment(request, request.key):
            self._vacate(request)
            return False
        return True

    def _vacate(self, request: Request, *, park: bool = True) -> None:
        """Gives the request's places back; an episode's tail is parked for its next turn, if that may use it."""
        place, request.place = request.place, None
        park = park and bool(request.order.episode and request.filled) and self._lives(request.key)
        if place is not None and park:
            adapter, segment = request.order.adapter, request.segment
            about = _Parked(
                policy=adapter.policy if adapter is not None else "",
                made=request.made,
                under=segment.key[0] if segment is not None else request.key,
                shared=self._shared_tokens(request),
                tokens=request.tail[: request.filled],
            )
            self._store.retain(place, request.filled, ("episode", request.order.episode), about)
        elif place is not None:
            self._store.free(place)
        request.filled = 0
        self._release_segment(request, wanted=park)

    def _lives(self, key: str) -> bool:
        """Whether requests may still come for this adapter."""
        return not key or key in self._bank

    def _revive(self, request: Request, tail: list[int]) -> bool:
        """Takes up the episode's cache where it is a beginning of this request's tail."""
        episode = request.order.episode
        kept = self._store.restore("tail", ("episode", episode), len(tail)) if episode and tail else None
        if kept is None:
            return False
        place, about = kept
        if not self._follows(request, tail, about):
            self._store.free(place)
            return False
        # Where all of the tail is there, its last token is computed again: its logits were not kept.
        request.place, request.filled = place, min(len(about.tokens), len(tail) - 1)
        request.made = about.made if about.made[-1] == request.key else (*about.made, request.key)
        self._stats["reused_tokens"] += request.filled
        return True

    def _follows(self, request: Request, tail: list[int], about: _Parked) -> bool:
        """Whether the request may go on from a parked tail. One that stands upon another adapter's shared prompt brings
        that with it."""
        if about.shared != self._shared_tokens(request) or tail[: len(about.tokens)] != about.tokens:
            return False
        own = about.under == request.key
        if own and about.made == (request.key,):
            return True
        adapter = request.order.adapter
        if not request.keeps or adapter is None or about.policy != adapter.policy:
            return False
        return own or not request.shared or self._join_segment(request, about.under)

    def _shared_tokens(self, request: Request) -> tuple[int, ...]:
        return tuple(request.order.prompt[: request.shared])

    def _join_segment(self, request: Request, adapter: str) -> bool:
        """The shared prompt as ``adapter`` computes it. Another's than the request's own is taken complete or not at
        all."""
        tokens = self._shared_tokens(request)
        key = (adapter, tokens)
        segment = self._segments.get(key)
        if segment is None:
            kept = self._store.restore("shared", key, len(tokens))
            if kept is not None:
                segment = Segment(key, kept[0], filled=len(tokens), logits=kept[1])
                self._stats["reused_tokens"] += len(tokens)
            else:
                place = self._store.allocate("shared", len(tokens)) if adapter == request.key else None
                if place is None:
                    return False
                segment = Segment(key, place)
            self._segments[key] = segment
        elif adapter != request.key and not segment.complete:
            return False
        segment.users += 1
        request.segment = segment
        return True

    def _release_segment(self, request: Request, *, wanted: bool) -> None:
        """``wanted``: by a parked tail."""
        segment, request.segment = request.segment, None
        if segment is None:
            return
        segment.users -= 1
        if segment.users == 0:
            del self._segments[segment.key]
            if segment.complete and (wanted or self._lives(segment.key[0])):
                self._store.retain(segment.place, len(segment.tokens), segment.key, segment.logits)
            else:
                self._store.free(segment.place)
