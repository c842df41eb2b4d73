"""Requests that a worker holds: from the frame that names one to the last token that the controller is sure to have.

Promises:

* What was sampled is kept until the controller has surely seen it: a link that breaks loses nothing that this process
  sampled. Tokens wait only for the next flush.
* After a link broke, nothing is sent for a request until the controller claims it with a ``Generate``: then its stream
  goes on at ``len(given)``. If what the controller holds is not a piece of what was sampled here (it went on
  elsewhere), the request is begun anew from ``given``.
* What no controller claims within the grace period is forgotten; soon after a link is back, what it has not claimed is
  computed no further.
* A request waits for its own adapter only; one that fails (its adapter cannot be had, the engine refuses it) ends with
  one line of reason and touches no other.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from rookery import wire
from rookery.worker.compute import Compute
from rookery.worker.transfer import Transfers, Unreachable, is_plain, one_line

log = logging.getLogger("rookery.worker.requests")


@dataclass(eq=False)
class Held:
    """One request. Token numbers count from the first of ``given``; those sampled here begin at ``start``."""

    generate: wire.Generate
    key: str
    """Names this attempt to the engine: what is left of an aborted one cannot be taken for it."""
    since: float
    """When the present connection was told the end, or an earlier connection broke; loop time."""
    claimed: bool = True
    """Whether the present connection named it."""
    sent: int = 0
    """Number of the first token that the present connection has not been sent."""
    told: bool = False
    """Whether the present connection has been sent the end."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version: int = 0
    policy: str = ""
    finish: Literal["", "stop", "length", "abort", "error"] = ""
    error: str = ""
    scores: list[wire.Score] = field(default_factory=list)
    begin: asyncio.Task[None] | None = None

    @property
    def start(self) -> int:
        return len(self.generate.given)

    @property
    def length(self) -> int:
        return self.start + len(self.tokens)

    @property
    def good(self) -> bool:
        """Whether going on with it, or handing it out again, is of use."""
        return self.finish not in ("error", "abort")

    def continues(self, claim: wire.Generate) -> bool:
        """Whether ``claim`` asks for this very text, and has a piece of it that ends where it can be gone on from."""
        mine, given = self.generate.given + self.tokens, claim.given
        return (
            _essence(claim) == _essence(self.generate)
            and self.start <= len(given) <= len(mine)
            and mine[: len(given)] == given
        )


def _essence(generate: wire.Generate) -> wire.Generate:
    """What decides about the text."""
    ref = generate.adapter and msgspec.structs.replace(generate.adapter, ticket="")
    return msgspec.structs.replace(generate, given=[], adapter=ref, first=False)


class Requests:
    """Belongs to the I/O thread."""

    def __init__(self, compute: Compute, transfers: Transfers, output: Callable[[bool], None]) -> None:
        """``output(urgent)`` is called when there is something to send; urgent when a request has ended."""
        self._compute = compute
        self._transfers = transfers
        self._output = output
        self._held: dict[str, Held] = {}
        self._keys: dict[str, Held] = {}
        self._attempts = itertools.count()
        self.failed = 0
        """Requests that ended with an error."""

    # --- from the controller ----------------------------------------------------------------------------------------

    def generate(self, generate: wire.Generate) -> None:
        """Begin a request, or take up one that is held already."""
        ref = generate.adapter
        if ref is not None and ref.ticket:
            self._transfers.granted(ref.hash, ref.ticket)
        held = self._held.get(generate.request)
        if held is not None:
            if held.good and held.continues(generate):
                self._resume(held, len(generate.given))
                return
            self.abort(generate.request)
        key = f"{generate.request}/{next(self._attempts)}"
        held = Held(generate, key, 0.0, sent=len(generate.given))
        self._held[generate.request] = self._keys[key] = held
        held.begin = asyncio.create_task(self._begin(held, msgspec.structs.replace(generate, request=key)))

    def abort(self, request: str) -> None:
        """Forget a request; its tokens are of no use to anybody."""
        held = self._held.pop(request, None)
        if held is None:
            return
        del self._keys[held.key]
        if held.begin is not None:
            held.begin.cancel()
        if not held.finish:
            self._compute.call(lambda core: core.engine.abort(held.key))

    def _resume(self, held: Held, at: int) -> None:
        held.claimed, held.told, held.sent = True, False, at
        log.info("request %s goes on from token %d", held.generate.request, at)
        if at < held.length or held.finish:
            self._output(True)

    async def _begin(self, held: Held, generate: wire.Generate) -> None:
        """Have the adapter pulled, then hand over to the engine."""
        ref = generate.adapter
        try:
            if ref is None or ref.hash in self._compute.status.adapters:
                begun = await asyncio.wrap_future(self._compute.call(lambda core: core.submit(generate, None)))
                if begun or ref is None:
                    return
            async with self._transfers.pulled(ref) as folder:
                await asyncio.wrap_future(self._compute.call(lambda core: core.submit(generate, folder)))
        except Exception as error:  # whatever it is, it is this request's alone
            # What another worker, or another moment, may do better is given back instead of failed.
            held.finish = "abort" if isinstance(error, Unreachable) else "error"
            held.error = one_line(error)
            self.failed += 1
            log.warning("request %s failed: %s", held.generate.request, held.error, exc_info=not is_plain(error))
            self._output(True)

    # --- from the engine --------------------------------------------------------------------------------------------

    def collect(self, chunks: list[wire.Chunk]) -> None:
        """Keep freshly sampled tokens."""
        urgent = False
        for chunk in chunks:
            held = self._keys.get(chunk.request)
            if held is None:
                continue  # aborted meanwhile
            assert chunk.offset == held.length, f"{chunk.request}: token {chunk.offset} follows {held.length - 1}"
            held.tokens += chunk.tokens
            held.logprobs += chunk.logprobs
            held.version, held.policy = chunk.version, chunk.policy
            held.finish, held.error, held.scores = chunk.finish, chunk.error, chunk.scores
            urgent |= bool(chunk.finish)
        if chunks:
            self._output(urgent)

    # --- to the controller ------------------------------------------------------------------------------------------

    def take(self, now: float) -> list[wire.Chunk]:
        """What the present connection has not been sent yet, as of now."""
        chunks = []
        for request, held in self._held.items():
            if not held.claimed or held.told or (held.sent == held.length and not held.finish):
                continue
            first = held.sent - held.start
            chunks.append(
                wire.Chunk(
                    request=request,
                    offset=held.sent,
                    tokens=held.tokens[first:],
                    logprobs=held.logprobs[first:],
                    version=held.version,
                    policy=held.policy,
                    finish=held.finish,
                    error=held.error,
                    scores=held.scores,
                )
            )
            held.sent = held.length
            held.told = bool(held.finish)
            held.since = now
        return chunks

    def running(self) -> list[str]:
        """Requests that a controller may claim."""
        return [request for request, held in self._held.items() if held.good]

    def waiting(self) -> int:
        """Requests that wait for their adapter."""
        return sum(held.begin is not None and not held.begin.done() for held in self._held.values())

    def unclaim(self, now: float) -> None:
        """The connection is over."""
        for held in self._held.values():
            if held.claimed:
                held.claimed, held.since = False, now

    def release(self) -> None:
        """Whoever wanted to claim a request has done so: stop computing for nobody. Complete ones cost nothing."""
        for request, held in list(self._held.items()):
            if not held.claimed and not held.finish:
                self.abort(request)

    def expire(self, before: float) -> None:
        """Forget what nobody has claimed, and what was told to its end, since ``before``."""
        for request, held in list(self._held.items()):
            if (not held.claimed or held.told) and held.since < before:
                self.abort(request)
