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
* A request that shall go on with a newer version runs on until that one is here; what cannot be had leaves it where it
  is. Every token keeps the version that sampled it, and no chunk has tokens of two.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from rookery import protocol
from rookery.worker.compute import Compute, WorkerCore
from rookery.worker.transfer.client import TransferClient
from rookery.worker.transfer.http import Unreachable, is_plain, one_line

log = logging.getLogger("rookery.worker.generation")


@dataclass(eq=False)
class HeldRequest:
    """One request. Token numbers count from the first of ``given``; those sampled here begin at ``start``."""

    generate: protocol.Generate
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
    versions: list[int] = field(default_factory=list)
    """Parallel to ``tokens``."""
    version: int = 0
    """Of the last chunk, which may have no token."""
    policy: str = ""
    finish: Literal["", "stop", "length", "abort", "error"] = ""
    error: str = ""
    scores: list[protocol.PromptLogprob] = field(default_factory=list)
    begin: asyncio.Task[None] | None = None
    begun: bool = False
    """Whether the engine has it."""
    next: protocol.SwitchAdapter | None = None
    """The newer version that it waits for, …"""
    turn: asyncio.Task[None] | None = None
    """… and what brings it about, once it has begun."""

    @property
    def start(self) -> int:
        return len(self.generate.prefix_tokens)

    @property
    def length(self) -> int:
        return self.start + len(self.tokens)

    @property
    def good(self) -> bool:
        """Whether going on with it, or handing it out again, is of use."""
        return self.finish not in ("error", "abort")

    def continues(self, claim: protocol.Generate) -> bool:
        """Whether ``claim`` asks for this very text, and has a piece of it that ends where it can be gone on from. One
        that changes its version may be claimed by a newer one: it was published while nobody could say so here."""
        mine, given = self.generate.prefix_tokens + self.tokens, claim.prefix_tokens
        return (
            _essence(claim) == _essence(self.generate)
            and (_same(claim.adapter, self.generate.adapter) or self.precedes(claim))
            and self.start <= len(given) <= len(mine)
            and mine[: len(given)] == given
        )

    def precedes(self, claim: protocol.Generate) -> bool:
        """Whether ``claim`` would have it go on with a newer version than it runs on."""
        ref, mine = claim.adapter, self.generate.adapter
        if ref is None or mine is None or claim.in_flight == "finish":
            return False
        return ref.policy == mine.policy and ref.version > mine.version

    def runs(self) -> list[tuple[int, int, int]]:
        """What the present connection has not been sent, as (first token, behind the last, version)."""
        runs, at = [], self.sent
        for version, group in itertools.groupby(self.versions[self.sent - self.start :]):
            runs.append((at, at := at + len(list(group)), version))
        return runs or [(at, at, self.version)]


def _essence(generate: protocol.Generate) -> protocol.Generate:
    """What decides about the text, besides the adapter."""
    return msgspec.structs.replace(generate, prefix_tokens=[], adapter=None, interactive=False)


def _same(one: protocol.AdapterRef | None, other: protocol.AdapterRef | None) -> bool:
    """Whether two name one version, wherever it may be had."""
    if one is None or other is None:
        return one is other
    return (one.policy, one.version, one.hash) == (other.policy, other.version, other.hash)


class GenerationManager:
    """Belongs to the I/O thread."""

    def __init__(self, compute: Compute, transfers: TransferClient, output: Callable[[bool], None]) -> None:
        """``output(urgent)`` is called when there is something to send; urgent when a request has ended."""
        self._compute = compute
        self._transfers = transfers
        self._output = output
        self._held: dict[str, HeldRequest] = {}
        self._keys: dict[str, HeldRequest] = {}
        self._attempts = itertools.count()
        self.failed = 0
        """Requests that ended with an error."""
        self.unswitched = 0
        """Times that a newer version could not be had."""

    # --- from the controller ----------------------------------------------------------------------------------------

    def generate(self, generate: protocol.Generate) -> None:
        """Begin a request, or take up one that is held already."""
        ref = generate.adapter
        if ref is not None:
            self._transfers.set_ticket(ref.hash, ref.ticket, ref.peers)
        held = self._held.get(generate.request)
        if held is not None:
            if held.good and held.continues(generate):
                self._resume(held, generate)
                return
            self.abort(generate.request)
        key = f"{generate.request}/{next(self._attempts)}"
        held = HeldRequest(generate, key, 0.0, sent=len(generate.prefix_tokens))
        self._held[generate.request] = self._keys[key] = held
        held.begin = asyncio.create_task(self._begin(held, msgspec.structs.replace(generate, request=key)))

    def switch(self, switch: protocol.SwitchAdapter) -> None:
        """A request goes on with a newer version as soon as that is here; what it waited for before is given up for it.
        One that is over, or unknown, is left as it is."""
        self._transfers.set_ticket(switch.adapter.hash, switch.adapter.ticket, switch.adapter.peers)
        held = self._held.get(switch.request)
        if held is not None and not held.finish:
            self._turn(held, switch)

    def abort(self, request: str) -> None:
        """Forget a request; its tokens are of no use to anybody."""
        held = self._held.pop(request, None)
        if held is None:
            return
        del self._keys[held.key]
        for task in (held.begin, held.turn):
            if task is not None:
                task.cancel()
        if not held.finish:
            self._compute.call(lambda core: core.engine.abort(held.key))

    def _resume(self, held: HeldRequest, claim: protocol.Generate) -> None:
        at = len(claim.prefix_tokens)
        held.claimed, held.told, held.sent = True, False, at
        ref, known = claim.adapter, held.generate.adapter if held.next is None else held.next.adapter
        if ref is not None and known is not None and ref.version > known.version and not held.finish:
            recompute = claim.in_flight == "recompute"
            self._turn(held, protocol.SwitchAdapter(request=claim.request, adapter=ref, recompute=recompute))
        log.info("request %s goes on from token %d", held.generate.request, at)
        if at < held.length or held.finish:
            self._output(True)

    async def _begin(self, held: HeldRequest, generate: protocol.Generate) -> None:
        """Have the adapter pulled, then hand over to the engine. Where it cannot be had and a newer one is to follow,
        that one is begun with."""
        try:
            await self._with_adapter(generate.adapter, lambda core, folder: core.submit(generate, folder))
        except Exception as error:  # whatever it is, it is this request's alone
            if held.next is not None:
                ref, held.next = held.next.adapter, None
                log.warning("request %s begins with version %d: %s", generate.request, ref.version, one_line(error))
                held.generate = msgspec.structs.replace(held.generate, adapter=ref)
                await self._begin(held, msgspec.structs.replace(generate, adapter=ref))
                return
            # What another worker, or another moment, may do better is given back instead of failed.
            held.finish = "abort" if isinstance(error, Unreachable) else "error"
            held.error = one_line(error)
            self.failed += 1
            log.warning("request %s failed: %s", held.generate.request, held.error, exc_info=not is_plain(error))
            self._output(True)
            return
        held.begun = True
        if held.next is not None:
            self._turn(held, held.next)

    def _turn(self, held: HeldRequest, switch: protocol.SwitchAdapter) -> None:
        """Have a request wait for a newer version, and for no other any more."""
        held.next = switch
        if held.turn is not None:
            held.turn.cancel()
        held.turn = asyncio.create_task(self._follow(held, switch)) if held.begun else None

    async def _follow(self, held: HeldRequest, switch: protocol.SwitchAdapter) -> None:
        """Have the newer version pulled, while the request runs on, then let it switch."""
        ref, key = switch.adapter, held.key
        try:
            await self._with_adapter(
                ref, lambda core, folder: core.switch(key, ref, folder, recompute=switch.recompute)
            )
            held.generate = msgspec.structs.replace(held.generate, adapter=ref)
        except Exception as error:  # the version that it has goes on
            self.unswitched += 1
            log.warning(
                "request %s does not go on with version %d: %s", held.generate.request, ref.version, one_line(error)
            )
        held.next = None

    async def _with_adapter(
        self, ref: protocol.AdapterRef | None, act: Callable[[WorkerCore, Path | None], bool]
    ) -> None:
        """Run ``act`` in the compute thread with the adapter in memory, or else in the folder that it is given."""
        if ref is None or ref.hash in self._compute.status.adapters:
            done = await asyncio.wrap_future(self._compute.call(lambda core: act(core, None)))
            if done or ref is None:
                return
        async with self._transfers.pulled(ref) as folder:
            await asyncio.wrap_future(self._compute.call(lambda core: act(core, folder)))

    # --- from the engine --------------------------------------------------------------------------------------------

    def collect(self, chunks: list[protocol.TokenChunk]) -> None:
        """Keep freshly sampled tokens."""
        urgent = False
        for chunk in chunks:
            held = self._keys.get(chunk.request)
            if held is None:
                continue  # aborted meanwhile
            assert chunk.offset == held.length, f"{chunk.request}: token {chunk.offset} follows {held.length - 1}"
            held.tokens += chunk.tokens
            held.logprobs += chunk.logprobs
            held.versions += [chunk.version] * len(chunk.tokens)
            held.version, held.policy = chunk.version, chunk.policy
            held.finish, held.error, held.scores = chunk.finish, chunk.error, chunk.prompt_logprobs
            urgent |= bool(chunk.finish)
        if chunks:
            self._output(urgent)

    # --- to the controller ------------------------------------------------------------------------------------------

    def take(self, now: float) -> list[protocol.TokenChunk]:
        """What the present connection has not been sent yet, as of now."""
        chunks = []
        for request, held in self._held.items():
            if not held.claimed or held.told or (held.sent == held.length and not held.finish):
                continue
            for begin, end, version in held.runs():
                chunks.append(
                    protocol.TokenChunk(
                        request=request,
                        offset=begin,
                        tokens=held.tokens[begin - held.start : end - held.start],
                        logprobs=held.logprobs[begin - held.start : end - held.start],
                        version=version,
                        policy=held.policy,
                    )
                )
            chunks[-1].finish, chunks[-1].error, chunks[-1].prompt_logprobs = held.finish, held.error, held.scores
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
