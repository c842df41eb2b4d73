"""Who computes and who waits, and where the caches of those who compute lie.

* First come, first served, up to ``max_rows`` and the cache's budget; beyond, requests wait. When growing texts fill
  the budget, the youngest goes back to the head of the queue.
* Requests marked ``first`` stand before the others in the queue and take their rows, the youngest's first.
* A group's prompt is cached once for all its members, and kept after them while there is room; so is an episode's tail,
  for its next turn.
"""

from __future__ import annotations

from collections import defaultdict, deque

from rookery.worker.engine.cache import KvStore
from rookery.worker.engine.request import Request, Segment
from rookery.worker.model.bank import LoraBank


class Admission:
    """``stats`` counts ``preempted`` and ``reused_tokens``."""

    def __init__(self, store: KvStore, bank: LoraBank, max_rows: int, stats: defaultdict[str, float]) -> None:
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
        if request.order.first:
            self.waiting.insert(self._firsts(), request)
        else:
            self.waiting.append(request)

    def admit(self) -> None:
        """Give rows to those who wait, as far as there are rows and room."""
        while self.waiting:
            request = self.waiting[0]
            if len(self.rows) < self._max_rows and self._seat(request):
                self.rows.append(self.waiting.popleft())
            elif not (request.order.first and any(not row.order.first for row in self.rows)):
                return
            else:
                self._send_back()

    def _send_back(self) -> None:
        """The youngest row goes back to wait, at the head of its kind; one that is ``first`` only if all are."""
        row = next((row for row in reversed(self.rows) if not row.order.first), self.rows[-1])
        self.rows.remove(row)
        self._vacate(row)
        self.waiting.insert(0 if row.order.first else self._firsts(), row)
        self._stats["preempted"] += 1

    def _firsts(self) -> int:
        """How many that are ``first`` wait: they are at the head of the queue."""
        return sum(request.order.first for request in self.waiting)

    def make_room(self) -> None:
        """Grows the rows' places for their next token; what finds no room sends the youngest row back to wait."""
        for row in list(self.rows):
            while row.place is not None and row.tail_length > row.place.capacity:
                moved = self._store.move("tail", row.place, row.tail_length)
                if moved is not None:
                    row.place = moved
                else:
                    self._send_back()

    def leave(self, request: Request) -> None:
        """A request is over."""
        if request in self.rows:
            self.rows.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._vacate(request)

    # --- places -----------------------------------------------------------------------------------------------------

    def _seat(self, request: Request) -> bool:
        """Finds or makes the places of a request's segments; False (and nothing changed) when there is no room now."""
        tail = request.tail
        revived = self._revive(request, tail)
        if not revived:
            request.place, request.filled = self._store.seat("tail", max(len(tail), 1)), 0
        if request.place is None:
            return False
        if request.shared and not self._join_segment(request):
            self._vacate(request)
            return False
        return True

    def _vacate(self, request: Request) -> None:
        """Gives the request's places back; an episode's tail is parked for its next turn."""
        place, request.place = request.place, None
        if place is not None:
            episode = request.order.episode
            if episode and request.filled and (not request.key or request.key in self._bank):
                about = (request.key, self._shared_tokens(request), request.tail[: request.filled])
                self._store.park(place, request.filled, ("episode", episode), about)
            else:
                self._store.leave(place)
        request.filled = 0
        self._release_segment(request)

    def _revive(self, request: Request, tail: list[int]) -> bool:
        """Takes up the episode's cache where it is a beginning of this request's tail."""
        episode = request.order.episode
        kept = self._store.revive("tail", ("episode", episode), len(tail)) if episode and tail else None
        if kept is None:
            return False
        place, (key, shared, tokens) = kept
        if (key, shared) != (request.key, self._shared_tokens(request)) or tail[: len(tokens)] != tokens:
            self._store.leave(place)
            return False
        # Where all of the tail is there, its last token is computed again: its logits were not kept.
        request.place, request.filled = place, min(len(tokens), len(tail) - 1)
        self._stats["reused_tokens"] += request.filled
        return True

    def _shared_tokens(self, request: Request) -> tuple[int, ...]:
        return tuple(request.order.prompt[: request.shared])

    def _join_segment(self, request: Request) -> bool:
        tokens = self._shared_tokens(request)
        key = (request.key, tokens)
        segment = self._segments.get(key)
        if segment is None:
            kept = self._store.revive("shared", key, len(tokens))
            if kept is not None:
                segment = Segment(key, kept[0], filled=len(tokens), logits=kept[1])
                self._stats["reused_tokens"] += len(tokens)
            else:
                place = self._store.seat("shared", len(tokens))
                if place is None:
                    return False
                segment = Segment(key, place)
            self._segments[key] = segment
        segment.users += 1
        request.segment = segment
        return True

    def _release_segment(self, request: Request) -> None:
        segment, request.segment = request.segment, None
        if segment is None:
            return
        segment.users -= 1
        if segment.users == 0:
            del self._segments[segment.key]
            if segment.complete and (not segment.key[0] or segment.key[0] in self._bank):
                self._store.park(segment.place, len(segment.tokens), segment.key, segment.logits)
            else:
                self._store.leave(segment.place)
