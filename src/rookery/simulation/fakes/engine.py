"""A modelled engine: continuous batching as :mod:`rookery.worker.engine` does it, where a slice takes its stated time
and yields the texts of :mod:`rookery.simulation.fakes.text`.

* At most ``rows`` requests run; others wait, first come first served, ``first`` ones before them.
* One slice is prompt tokens of new requests (a group's prompt once, what was kept of an episode not again), or one
  token for every running request. The two take turns.
* Decode steps between which no request begins or ends can be taken together: they cost one event, however many.

What it leaves out: memory for attention caches is never short, and a step's time does not grow with the texts' lengths.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rookery import protocol
from rookery.simulation.fakes.text import Length, logprobs_of, tokens_of
from rookery.simulation.profiles import Machine


@dataclass(eq=False)
class Row:
    """One request."""

    order: protocol.Generate
    adapter: protocol.AdapterRef | None
    length: int
    """Of its whole reply."""
    said: int
    """Tokens of the reply that are there, those of earlier workers included, when ``since`` was …"""
    sent: int
    prefill: int = 0
    """Prompt tokens still to be computed."""
    since: int | None = None
    """… this number of the engine's decode steps; None while it does not decode."""
    finish: Literal["", "stop", "length"] = ""

    @property
    def policy(self) -> str:
        return self.adapter.policy if self.adapter is not None else ""


class FakeEngine:
    def __init__(self, machine: Machine, length: Length, rows: int) -> None:
        self.machine = machine
        self.rows = rows
        self.generated = 0
        """Tokens sampled."""
        self.prefilled = 0
        """Prompt tokens computed."""
        self._length = length
        self._requests: dict[str, Row] = {}
        self._waiting: deque[Row] = deque()
        self._prefilling: deque[Row] = deque()
        self._decoding: dict[str, Row] = {}
        self._ends: defaultdict[int, list[Row]] = defaultdict(list)
        """By decode step, the requests whose last token it yields."""
        self._steps = 0
        self._cached: dict[str, dict[object, int]] = defaultdict(dict)
        """Adapter → what is kept → its tokens: shared prompts, episodes so far."""
        self._slice: Literal["", "prefill", "decode"] = ""
        self._prefilled_last = False
        self._batch: list[tuple[Row, int]] = []
        self._over: list[protocol.TokenChunk] = []
        """Last tokens of what ended, or went on with another adapter; not handed out yet."""
        self.policies: Counter[str] = Counter()
        """Running requests per policy."""

    @property
    def active(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._prefilling or self._decoding)

    def running(self) -> list[str]:
        return list(self._requests)

    def submit(self, order: protocol.Generate) -> None:
        """Queue a request, its adapter being there. One that is here already begins anew from what is given."""
        self.abort(order.request)
        length = self._length(order.seed, order.max_tokens)
        given = len(order.prefix_tokens)
        row = Row(order, order.adapter, length, given, given)
        self._requests[order.request] = row
        (self._waiting.appendleft if order.interactive else self._waiting.append)(row)

    def abort(self, request: str) -> None:
        row = self._requests.pop(request, None)
        if row is None:
            return
        if row in self._waiting:
            self._waiting.remove(row)
            return
        self.policies[row.policy] -= 1
        if row in self._prefilling:
            self._prefilling.remove(row)
        elif row.since is not None:
            del self._decoding[request]
            self._leave_ends(row)

    def switch(self, request: str, ref: protocol.AdapterRef, *, recompute: bool) -> None:
        """The request goes on with ``ref`` from its next token."""
        row = self._requests.get(request)
        if row is None or row.adapter is None or row.adapter.hash == ref.hash:
            return
        if (chunk := self._chunk(row)) is not None:
            self._over.append(chunk)
        row.adapter = ref
        if recompute and row.since is not None:
            self._leave_ends(row)
            del self._decoding[request]
            row.said = self._said(row)
            row.since, row.prefill = None, len(row.order.prompt) + row.said
            self._prefilling.append(row)

    def forget(self, digest: str) -> None:
        """What was computed with this adapter is of no more use."""
        self._cached.pop(digest, None)

    # --- slices -------------------------------------------------------------------------------------------------------

    def begin(self) -> tuple[float, int]:
        """Begin a slice; the seconds that it takes, and how many such slices follow each other before a request ends,
        if none comes or goes. Call :meth:`end` then."""
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
        if not self._decoding:
            return 0.0, 1
        steps = 1 if self._prefilling else min(self._ends) - self._steps
        return self.machine.decode_step(len(self._decoding)), steps

    def end(self, slices: int = 1) -> None:
        """So many slices are over, no more than :meth:`begin` said: what they computed is there."""
        if self._slice == "prefill" and slices:
            for row, count in self._batch:
                if self._requests.get(row.order.request) is not row or row.since is not None:
                    continue  # aborted meanwhile
                row.prefill -= count
                self.prefilled += count
                if row.prefill <= 0:
                    self._prefilling.remove(row)
                    self._enter(row)
        elif self._slice == "decode":
            self._steps += slices
            self.generated += slices * len(self._decoding)
            for row in self._ends.pop(self._steps, ()):
                self._finish(row)
        self._slice = ""

    def _admit(self) -> None:
        while self._waiting and self.active < self.rows:
            row = self._waiting.popleft()
            self.policies[row.policy] += 1
            row.prefill = self._uncached(row)
            if row.prefill:
                self._prefilling.append(row)
            else:
                self._enter(row)

    def _uncached(self, row: Row) -> int:
        """Tokens of prompt and given text that are to be computed; what the row brings is kept from now on."""
        order, total = row.order, len(row.order.prompt) + row.said
        kept = self._cached[row.adapter.hash if row.adapter is not None else ""]
        shared = hash(tuple(order.prompt[: order.shared_prefix])) if order.shared_prefix else None
        known = max(kept.get(order.episode, 0) if order.episode else 0, kept.get(shared, 0) if shared else 0)
        if shared is not None:
            kept[shared] = order.shared_prefix
        if order.episode:
            kept[order.episode] = total
        return max(0, total - min(known, total))

    def _enter(self, row: Row) -> None:
        """It decodes from the next step on."""
        if row.said >= row.length:  # everything was given
            self._finish(row)
            return
        row.since = self._steps
        self._decoding[row.order.request] = row
        self._ends[self._end_of(row)].append(row)

    def _end_of(self, row: Row) -> int:
        assert row.since is not None
        return row.since + row.length - row.said

    def _leave_ends(self, row: Row) -> None:
        step = self._end_of(row)
        self._ends[step].remove(row)
        if not self._ends[step]:
            del self._ends[step]

    def _said(self, row: Row) -> int:
        return row.said if row.since is None else row.said + self._steps - row.since

    def _finish(self, row: Row) -> None:
        row.said, row.since = row.length, None
        row.finish = "stop" if row.length < row.order.max_tokens else "length"
        name = row.order.request
        self._decoding.pop(name, None)
        del self._requests[name]
        self.policies[row.policy] -= 1
        if row.order.episode:
            digest = row.adapter.hash if row.adapter is not None else ""
            self._cached[digest][row.order.episode] = len(row.order.prompt) + row.length
        chunk = self._chunk(row)
        assert chunk is not None
        self._over.append(chunk)

    # --- what it said -------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether something has ended that was not handed out."""
        return any(chunk.finish for chunk in self._over)

    def drain(self) -> list[protocol.TokenChunk]:
        """What was sampled and not handed out, one chunk per request (two where it went on with another adapter)."""
        chunks, self._over = self._over, []
        chunks += self._running_chunks()
        return chunks

    def _running_chunks(self) -> Iterator[protocol.TokenChunk]:
        for row in self._decoding.values():
            if (chunk := self._chunk(row)) is not None:
                yield chunk

    def _chunk(self, row: Row) -> protocol.TokenChunk | None:
        said, order = self._said(row), row.order
        if said == row.sent and not row.finish:
            return None
        start, row.sent = row.sent, said
        return protocol.TokenChunk(
            request=order.request,
            offset=start,
            tokens=tokens_of(order.seed, start, said, row.length, order.max_tokens),
            logprobs=logprobs_of(order.seed, start, said),
            version=row.adapter.version if row.adapter is not None else 0,
            policy=row.policy,
            finish=row.finish,
        )
