"""A fake engine: continuous batching as the native engine does it, where a slice takes its stated time and yields the
texts of :mod:`rookery.simulation.fakes.text`.

* At most ``rows`` requests run, and some beyond them of tenants with less than their share; others wait in their
  ``order``, those with a ``reserved`` row first.
* One slice is prompt tokens of new requests (a group's prompt once, an episode's cached turns not again), or one token
  for every running request. The two kinds alternate.
* Consecutive decode steps between which no request begins or ends can be taken together: they cost one event.
* A request whose connection ended is held with its tokens until it is claimed by a ``Generate`` or expires.
* Where the running texts fill the KV cache, the youngest waits: it loses its cache, and computes it again.

Not modelled: a step's time does not grow with the length of the texts, and cached prompts take no memory.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import msgspec

from rookery import protocol
from rookery.errors import next_state
from rookery.scheduling.fair_slices import next_row
from rookery.simulation.fakes.text import Length, logprobs_of, tokens_of
from rookery.spec.machine import Machine

WATERMARK = 100
"""The part of the KV cache, one in so many tokens, that a request which begins leaves free for those that run."""

Finish = Literal["", "stop", "length", "error", "abort"]

Stage = Literal["held", "waiting", "prefilling", "decoding", "ended"]
"""Of a row. held: its connection ended, or it is neither queued nor dropped yet."""

StageEvent = Literal["queue", "prefill", "decode", "preempt", "stop", "finish"]

STAGES: dict[tuple[Stage, StageEvent], Stage] = {
    ("held", "queue"): "waiting",
    ("waiting", "prefill"): "prefilling",
    ("decoding", "prefill"): "prefilling",  # a newer version computes its cache again
    ("waiting", "decode"): "decoding",  # its prompt was cached
    ("prefilling", "decode"): "decoding",
    ("decoding", "preempt"): "waiting",
    **{(stage, "stop"): "held" for stage in ("waiting", "prefilling", "decoding")},
    **{(stage, "finish"): "ended" for stage in ("held", "waiting", "prefilling", "decoding")},
    ("ended", "finish"): "ended",  # with an error, before its last chunk was sent
}
"""The stage that follows each event. Any other event is a mistake of the fake."""

Delivery = Literal["claimed", "delivered", "unclaimed"]
"""The delivery of a row's output, as in :mod:`rookery.worker.generation`."""


@dataclass(eq=False)
class Row:
    """A request that is here, from its submission until its last chunk was sent and nobody claims it again. Tokens are
    numbered from the first of the reply."""

    request: protocol.Generate
    length: int
    """Tokens of the whole reply."""
    start: int
    """The first token that is sampled here."""
    position: int
    """Tokens that the reply had when ``since`` was set last, those of earlier workers included."""
    sent: int
    """The first token that the present connection has not been sent."""
    spans: list[tuple[int, protocol.AdapterRef | None]]
    """(token, adapter that samples from it on), ascending."""
    stage: Stage = "held"
    delivery: Delivery = "claimed"
    prefill: int = 0
    """Prompt tokens still to be computed."""
    cached: bool = False
    """Prompt and text are in the KV cache."""
    since: int = 0
    """Number of the engine's decode step from which on it decodes."""
    finish: Finish = ""
    """Why it has ended; empty before."""
    error: str = ""
    """The engine fails the request with this error after its next token."""
    idle_since: float = 0.0
    """Seconds since which its output is not wanted."""

    @property
    def adapter(self) -> protocol.AdapterRef | None:
        return self.spans[-1][1]

    @property
    def policy(self) -> str:
        return self.adapter.policy if self.adapter is not None else ""

    def advance(self, event: StageEvent) -> None:
        """Raises ``RuntimeError`` for an event that its stage does not have."""
        self.stage = next_state(STAGES, self.stage, event, f"request {self.request.request}")

    def end(self, finish: Finish) -> None:
        """It has its last token, or will have no more."""
        self.advance("finish")
        self.finish = finish


class FakeEngine:
    def __init__(self, machine: Machine, length: Length, rows: int) -> None:
        self.machine = machine
        self.rows = rows
        self.generated = 0
        """Tokens sampled."""
        self.prefilled = 0
        """Prompt tokens computed."""
        self.preempted = 0
        """Times that a request lost its cache to others."""
        self.policies: Counter[str] = Counter()
        """Running requests per policy."""
        self._tenants: Counter[str] = Counter()
        """Running requests per tenant."""
        self._length = length
        self._requests: dict[str, Row] = {}
        self._waiting: list[Row] = []
        self._prefilling: deque[Row] = deque()
        self._decoding: dict[str, Row] = {}
        self._ends: defaultdict[int, list[Row]] = defaultdict(list)
        """By decode step, the requests that get their last token in it."""
        self._finished: list[Row] = []
        """Not reported yet."""
        self._steps = 0
        self._cached: dict[str, dict[object, int]] = defaultdict(dict)
        """Adapter → cached text (a shared prompt, an episode) → its tokens."""
        self._slice: Literal["", "prefill", "decode"] = ""
        self._prefilled_last = False
        self._batch: list[tuple[Row, int]] = []

    @property
    def active(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def free_tokens(self) -> int:
        """Free tokens of the KV cache."""
        rows = (*self._prefilling, *self._decoding.values())
        return self.machine.cache_tokens - sum(len(row.request.prompt) + self._position(row) for row in rows)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._prefilling or self._decoding)

    @property
    def finished(self) -> bool:
        """Whether a request has ended and its last chunk was not drained."""
        return bool(self._finished)

    def held(self) -> list[Row]:
        """Every request that is here, reported ones included."""
        return list(self._requests.values())

    def submit(self, request: protocol.Generate) -> Row:
        """Queue a request whose adapter is here. One that is held resumes where the claim stands, if it can."""
        row = self._requests.get(request.request)
        if row is not None and _continues(row, request, self._position(row)):
            row.sent, row.delivery = len(request.prefix_tokens), "claimed"
            if row.stage == "ended" and row not in self._finished:
                self._finished.append(row)
            elif row.stage == "held":
                self._queue(row)
            row.request = msgspec.structs.replace(row.request, assignment=request.assignment)
            return row
        if row is not None:
            self._drop(row)
        length = self._length(request.seed, request.max_tokens)
        given = len(request.prefix_tokens)
        row = Row(request, length, given, given, given, [(given, request.adapter)])
        self._requests[request.request] = row
        self._queue(row)
        return row

    def abort(self, abort: protocol.Abort) -> None:
        """Delete the request, if it is held under the same assignment."""
        if (row := self._find(abort)) is not None:
            self._drop(row)

    def _find(self, message: protocol.Abort | protocol.SwitchAdapter) -> Row | None:
        row = self._requests.get(message.request)
        return row if row is not None and row.request.assignment == message.assignment else None

    def _drop(self, row: Row) -> None:
        del self._requests[row.request.request]
        self._stop(row)
        if row in self._finished:
            self._finished.remove(row)

    def release(self, abort: protocol.Abort) -> None:
        """The request ends here: its tokens are sent with ``finish`` ``abort``. One that is not claimed stays held."""
        row = self._find(abort)
        if row is not None and row.delivery != "unclaimed" and row.stage != "ended":
            self._stop(row)
            row.end("abort")
            self._finished.append(row)

    def suspend(self, now: float) -> None:
        """The connection ended: every request stops and is held for a later claim."""
        for row in self._requests.values():
            self._stop(row)
            if row.delivery == "claimed":
                row.idle_since = now
            row.delivery = "unclaimed"
        self._finished.clear()

    def expire(self, before: float) -> None:
        """Delete requests whose output is not wanted since ``before``."""
        for name, row in list(self._requests.items()):
            if row.delivery != "claimed" and row.idle_since < before:
                del self._requests[name]

    def switch(self, switch: protocol.SwitchAdapter) -> None:
        """The request continues with the adapter from its next token."""
        row, ref, recompute = self._find(switch), switch.adapter, switch.recompute
        if row is None or row.stage == "ended" or row.adapter is None or row.adapter.hash == ref.hash:
            return
        running = row.stage in ("prefilling", "decoding")
        self.policies[row.policy] -= running
        position = self._position(row)
        if row.spans[-1][0] == position:
            row.spans.pop()
        row.spans.append((position, ref))
        self.policies[row.policy] += running
        if recompute and row.stage == "decoding":
            self._leave_batch(row)
            self._compute(row, len(row.request.prompt) + row.position)

    def evict(self, digest: str) -> None:
        """Drop the texts that were computed with this adapter."""
        self._cached.pop(digest, None)

    # --- slices -------------------------------------------------------------------------------------------------------

    def begin(self) -> tuple[float, int]:
        """Begin a slice. Returns its seconds, and how many such slices follow each other before a request ends, if no
        other comes or goes. Call :meth:`end` after it."""
        self._admit()
        if self._prefilling and not (self._prefilled_last and self._decoding):
            self._slice, self._prefilled_last = "prefill", True
            self._batch, room = [], self.machine.prefill_slice
            for row in self._prefilling:
                if room <= 0:
                    break
                count = min(row.prefill, room)
                room -= count
                self._batch.append((row, count))
            return self.machine.prefill_token * (self.machine.prefill_slice - room), 1
        self._slice, self._prefilled_last = "decode", False
        while (free := self.free_tokens) < len(self._decoding) > 1:
            self._preempt()
        if not self._decoding:
            return 0.0, 1
        steps = 1 if self._prefilling else min(min(self._ends) - self._steps, max(1, free // len(self._decoding)))
        return self.machine.decode_step(len(self._decoding)), steps

    def end(self, slices: int = 1) -> None:
        """``slices`` slices are over, at most as many as :meth:`begin` returned: their results are there."""
        if self._slice == "prefill" and slices:
            for row, count in self._batch:
                if row.stage != "prefilling":
                    continue  # aborted meanwhile
                row.prefill -= count
                self.prefilled += count
                if row.prefill <= 0:
                    self._prefilling.remove(row)
                    self._decode(row)
        elif self._slice == "decode":
            self._steps += slices
            self.generated += slices * len(self._decoding)
            for row in self._ends.pop(self._steps, ()):
                self._finish(row)
        self._slice = ""

    def _queue(self, row: Row) -> None:
        row.advance("queue")
        insort(self._waiting, row, key=lambda row: (not row.request.reserved, row.request.order))

    def _stop(self, row: Row) -> None:
        """Take the row out of the queue or the batch, if it is there."""
        match row.stage:
            case "held" | "ended":
                return
            case "waiting":
                self._waiting.remove(row)
            case "prefilling":
                self._prefilling.remove(row)
                self._count(row, -1)
            case "decoding":
                self._leave_batch(row)
                self._count(row, -1)
        row.advance("stop")

    def _admit(self) -> None:
        while self._waiting and (at := self._next_row()) is not None:
            size = len(self._waiting[at].request.prompt) + self._waiting[at].position
            if self.active and self.free_tokens < size + max(self.active, self.machine.cache_tokens // WATERMARK):
                return
            row = self._waiting.pop(at)
            self._count(row, 1)
            tokens = 0 if row.cached else self._uncached(row)
            row.cached = True
            if tokens:
                self._compute(row, tokens)
            else:
                self._decode(row)

    def _next_row(self) -> int | None:
        """The position of the waiting request that begins next; None: none does."""
        if self._waiting[0].request.reserved:
            return 0 if self.active < self.rows else None
        rows = (*self._waiting, *self._prefilling, *self._decoding.values())
        weights = {row.request.tenant: row.request.weight for row in rows}
        return next_row([row.request.tenant for row in self._waiting], self._tenants, weights, self.rows)

    def _count(self, row: Row, change: int) -> None:
        """The row runs, or runs no more."""
        self.policies[row.policy] += change
        self._tenants[row.request.tenant] += change

    def _preempt(self) -> None:
        """The youngest that decodes loses its cache and waits."""
        row = next(reversed(self._decoding.values()))
        self._leave_batch(row)
        self._count(row, -1)
        self.preempted += 1
        row.advance("preempt")
        row.cached = False
        self._cached[row.adapter.hash if row.adapter is not None else ""].pop(row.request.episode, None)
        self._waiting.insert(0, row)

    def _uncached(self, row: Row) -> int:
        """Tokens of prompt and text that are not in the cache; they are from now on."""
        request, total = row.request, len(row.request.prompt) + row.position
        cached = self._cached[row.adapter.hash if row.adapter is not None else ""]
        shared = hash(tuple(request.prompt[: request.shared_prefix])) if request.shared_prefix else None
        episode = cached.get(request.episode, 0) if request.episode else 0
        known = max(episode, cached.get(shared, 0) if shared else 0)
        if shared is not None:
            cached[shared] = request.shared_prefix
        if request.episode:
            cached[request.episode] = total
        return max(0, total - min(known, total))

    def _compute(self, row: Row, tokens: int) -> None:
        """So many tokens of its prompt and text are computed before it decodes."""
        row.advance("prefill")
        row.prefill = tokens
        self._prefilling.append(row)

    def _decode(self, row: Row) -> None:
        """The row decodes from the next step on."""
        if row.position >= row.length:  # the prefix was the whole reply
            self._finish(row)
            return
        row.advance("decode")
        row.since = self._steps
        self._decoding[row.request.request] = row
        self._ends[self._steps + row.length - row.position].append(row)

    def _leave_batch(self, row: Row) -> None:
        step = row.since + row.length - row.position
        self._ends[step].remove(row)
        if not self._ends[step]:
            del self._ends[step]
        del self._decoding[row.request.request]
        row.position = self._position(row)

    def _position(self, row: Row) -> int:
        return row.position + self._steps - row.since if row.stage == "decoding" else row.position

    def _finish(self, row: Row) -> None:
        row.end("stop" if row.length < row.request.max_tokens else "length")
        row.position = row.length
        self._decoding.pop(row.request.request, None)
        self._count(row, -1)
        if row.request.episode:
            digest = row.adapter.hash if row.adapter is not None else ""
            self._cached[digest][row.request.episode] = len(row.request.prompt) + row.length
        self._finished.append(row)

    # --- chunks -------------------------------------------------------------------------------------------------------

    def drain(self, now: float = 0.0, resend: Callable[[Row], int] = lambda row: row.sent) -> list[protocol.TokenChunk]:
        """Sampled tokens that were not sent, one chunk per request and adapter. ``resend`` returns the first token of
        a request's chunks: ``sent``, or less to send some again."""
        chunks: list[protocol.TokenChunk] = []
        rows, self._finished = [*self._finished, *self._prefilling, *self._decoding.values()], []
        for row in rows:
            position = self._position(row)
            if row.error and position > row.start:
                self._stop(row)
                row.end("error")
                chunks.append(self.chunk(row, row.sent, row.sent, "error"))
            elif row.finish or position > row.sent:
                chunks += self._chunks(row, resend(row), position)
                row.sent = position
            if row.stage == "ended":
                row.delivery, row.idle_since = "delivered", now
        return chunks

    def _chunks(self, row: Row, begin: int, end: int) -> Iterator[protocol.TokenChunk]:
        edges = sorted({begin, end, *(at for at, _ in row.spans if begin < at < end)})
        if len(edges) == 1:
            edges.append(end)
        for first, last in pairwise(edges):
            yield self.chunk(row, first, last, row.finish if last == end else "")

    def chunk(self, row: Row, first: int, last: int, finish: Finish) -> protocol.TokenChunk:
        """Tokens ``first`` … ``last - 1`` of a request; one adapter must have sampled them."""
        ref = next((ref for at, ref in reversed(row.spans) if at <= first), row.spans[0][1])
        request = row.request
        return protocol.TokenChunk(
            request=request.request, assignment=request.assignment, offset=first,
            logprobs=logprobs_of(request.seed, first, last),
            tokens=tokens_of(request.seed, first, last, row.length, request.max_tokens),
            version=ref.version if ref is not None else 0, policy=ref.policy if ref is not None else "",
            finish=finish, error=row.error if finish == "error" else "",
        )  # fmt: skip


def _continues(row: Row, claim: protocol.Generate, position: int) -> bool:
    """Whether a claim asks for the text that ``row`` holds, from a token that is known here."""
    held, wanted = row.adapter, claim.adapter
    same = (held.hash if held is not None else None) == (wanted.hash if wanted is not None else None)
    return (
        not row.error
        and row.finish != "abort"
        and same
        and row.request.seed == claim.seed
        and (row.start <= len(claim.prefix_tokens) <= position)
    )
