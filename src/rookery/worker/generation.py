"""Requests that a worker holds, from the ``Generate`` message to the last token that the controller surely has.

Promises:

* Sampled tokens are kept until the controller surely has them: a lost connection loses no token that this process
  sampled. Tokens wait only for the next flush. A message takes the link for a moment only: what is left goes with the
  next one, tokens before prompt log-probabilities. Of ended requests with log-probabilities that were sent, those sent
  first are deleted where they take too much memory; if the controller never got one, it is computed again.
* After a lost connection, nothing is sent for a request until the controller claims it with a ``Generate``. Its stream
  then resumes at ``len(prefix_tokens)``. If ``prefix_tokens`` is not a prefix of the text sampled here (another worker
  continued it), the request starts again from ``prefix_tokens``.
* Requests that no controller claims within the rejoin period are deleted; soon after a reconnection, those that it has
  not claimed are aborted.
* A request waits for its own grammar and adapter only, and, where the adapters in use fill their share of the memory,
  for room: clients first, then in order of arrival. A request that fails (its adapter cannot be pulled, the engine
  refuses it) ends with a reason of one line and affects no other; as an aborted one where another worker may run it.
* A load that meets a busy engine, or a fault of it that may pass, is repeated after growing pauses; then its request is
  aborted, with the reason if it is a fault.
* A request that switches to a newer version runs on until that version is loaded; a failed pull leaves it as it is.
  Every token keeps the version that sampled it, and no chunk has tokens of two.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from rookery import protocol
from rookery.errors import Unavailable, next_state
from rookery.tokenization.grammar import ReplyGrammar
from rookery.worker.compute import Compute
from rookery.worker.core import WorkerCore
from rookery.worker.failures import PassingFault, WorkerBroken, failure_category
from rookery.worker.grammars import Grammars
from rookery.worker.memory import MemoryQueue
from rookery.worker.transfer.client import TransferClient
from rookery.worker.transfer.http import Unreachable, is_plain, one_line

log = logging.getLogger("rookery.worker.generation")

FENCE_SECONDS = 120.0
"""For so long clients' requests go before those that wait for room; then only where rollouts keep their adapter in
memory anyway. Longer than most replies; clients of ever the same adapters leave room to others after it."""

LOADS, FIRST_PAUSE_SECONDS = 5, 0.5
"""Attempts to load an adapter into an engine that is busy or has a fault, and the pause after the first: each later one
is twice as long. After them another worker, or a later attempt here, may run the request."""

FRAME_BYTES = 256 << 10
"""About the size of one message with output or log-probabilities: heartbeats and other tokens wait for it at most."""

NAMES_BYTES, TOKEN_BYTES, LIKELIEST_BYTES = 500, 14, 15
"""Of a chunk without tokens, of one token, and of one of the likeliest tokens in its place, as they are encoded."""

SENT_BYTES = 64 << 20
"""Memory of the log-probabilities in ended requests that were sent; part of a worker's undivided memory."""

PAIR_BYTES = 120
"""Memory of one of the likeliest tokens with its log-probability."""


Stage = Literal["preparing", "running", "ended"]
"""Of a request here: its grammar or adapter is on its way; the engine has it; its text is complete, or it failed."""

Delivery = Literal["claimed", "delivered", "unclaimed"]
"""Of its output: the present connection named the request and is sent what is there; that connection has been sent the
end; no connection has named the request since the last one was lost."""

StageEvent = Literal["submitted", "ended"]
DeliveryEvent = Literal["named", "end sent", "disconnected"]

STAGES: dict[tuple[Stage, StageEvent], Stage] = {
    ("preparing", "submitted"): "running",
    ("preparing", "ended"): "ended",  # it failed; or a short text ended before its submission was confirmed
    ("ended", "submitted"): "ended",
    ("running", "ended"): "ended",
}
DELIVERIES: dict[tuple[Delivery, DeliveryEvent], Delivery] = {
    ("claimed", "named"): "claimed",  # again: it returned from another worker
    ("claimed", "end sent"): "delivered",
    ("claimed", "disconnected"): "unclaimed",
    ("delivered", "named"): "claimed",
    ("delivered", "disconnected"): "unclaimed",
    ("unclaimed", "named"): "claimed",
    ("unclaimed", "disconnected"): "unclaimed",
}
"""The stage, or the delivery, that follows each event. Any other event is a mistake of this process."""


@dataclass(eq=False)
class HeldRequest:
    """One request. Token numbers count from the first of ``prefix_tokens``; those sampled here begin at ``start``."""

    generate: protocol.Generate
    """The request as given, under the name of its present assignment."""
    key: str
    """Its name in the engine, that of its first assignment: tokens of an aborted one cannot be taken for its own."""
    arrived: float = field(default_factory=time.monotonic)
    stage: Stage = "preparing"
    delivery: Delivery = "claimed"
    idle_since: float = 0.0
    """When ``delivery`` changed last; monotonic time."""
    sent: int = 0
    """Number of the first token that the present connection has not been sent."""
    scores_sent: int = 0
    """Number of the first entry of ``prompt_logprobs`` that the present connection has not been sent."""
    log: protocol.TokenLog = field(default_factory=protocol.TokenLog)
    version: int = 0
    """The version of the last chunk, which may have no token."""
    policy: str = ""
    finish: Literal["", "stop", "length", "abort", "error"] = ""
    """Why it has ended; empty before."""
    error: str = ""
    prompt_logprobs: protocol.PromptLogprobs | None = None
    """They come with the end."""
    top_logprobs: list[protocol.Likeliest] = field(default_factory=list)
    """The likeliest tokens in the place of each token of ``log``, where requested; else empty."""
    submission: asyncio.Task[None] | None = None
    pending_switch: protocol.SwitchAdapter | None = None
    switching: asyncio.Task[None] | None = None
    """Carries out ``pending_switch`` once the engine has the request."""

    @property
    def start(self) -> int:
        return len(self.generate.prefix_tokens)

    @property
    def length(self) -> int:
        return self.start + len(self.log.tokens)

    @property
    def resumable(self) -> bool:
        """Whether a controller may claim it."""
        return self.finish not in ("error", "abort")

    def continues(self, claim: protocol.Generate) -> bool:
        """Whether ``claim`` requests this very text and has a prefix of it from which it can resume. The claim may name
        a newer version if the request allows switches: that was published while the connection was lost."""
        own, prefix = self.generate.prefix_tokens + self.log.tokens, claim.prefix_tokens
        return (
            claim.same_text(self.generate)
            and (_version_of(claim) == _version_of(self.generate) or self._switches_to(claim))
            and self.start <= len(prefix) <= len(own)
            and own[: len(prefix)] == prefix
        )

    def _switches_to(self, claim: protocol.Generate) -> bool:
        """Whether ``claim`` has it continue with a newer version of its policy."""
        return claim.adapter is not None and claim.adapter.replaces(self.generate.adapter, claim.in_flight)

    def advance(self, event: StageEvent) -> None:
        """Raises ``RuntimeError`` for an event that its stage does not have."""
        self.stage = next_state(STAGES, self.stage, event, f"request {self.key}")

    def end(self, finish: Literal["stop", "length", "abort", "error"], error: str) -> None:
        """It has its last token, or will have no more."""
        self.advance("ended")
        self.finish, self.error = finish, error

    def deliver(self, event: DeliveryEvent, now: float) -> None:
        """An ``event`` of its output. Raises ``RuntimeError`` for one that its delivery does not have."""
        following = next_state(DELIVERIES, self.delivery, event, f"request {self.key}")
        if following != self.delivery:
            self.delivery, self.idle_since = following, now

    @property
    def unsent(self) -> bool:
        """Whether the present connection wants something that it has not been sent."""
        return self.delivery == "claimed" and (self.sent < self.length or self.stage == "ended")

    @property
    def unsent_scores(self) -> bool:
        scores = self.prompt_logprobs
        return scores is not None and self.scores_sent < len(scores)

    @property
    def score_bytes(self) -> int:
        """Memory of its log-probabilities besides those of its tokens."""
        scores = self.prompt_logprobs.size if self.prompt_logprobs is not None else 0
        return scores + PAIR_BYTES * sum(map(len, self.top_logprobs))

    def next_chunk(self, room: int, now: float) -> protocol.TokenChunk:
        """The next chunk that the present connection has not been sent, of one version and about ``room`` bytes; it
        counts as sent at ``now``. Scores of the prompt precede the last token: whoever has that has the end."""
        log, begin = self.log, self.sent - self.start
        first, run_end = next(log.runs(begin), (begin, begin))
        logits = self.generate.logits
        token_bytes = TOKEN_BYTES + (LIKELIEST_BYTES * logits.top_logprobs if logits is not None else 0)
        end = first if self.unsent_scores else min(run_end, first + max(1, room // token_bytes))
        chunk = protocol.TokenChunk(
            request=self.generate.request,
            assignment=self.generate.assignment,
            offset=self.sent,
            tokens=log.tokens[first:end],
            logprobs=log.logprobs[first:end],
            version=log.versions[first] if first < end else self.version,
            policy=self.policy,
            top_logprobs=self.top_logprobs[first:end],
        )
        if self.prompt_logprobs is not None and self.unsent_scores:
            rows = max(1, room // (4 + 8 * self.prompt_logprobs.width))
            chunk.prompt_logprobs = self.prompt_logprobs.part(self.scores_sent, self.scores_sent + rows)
            self.scores_sent += len(chunk.prompt_logprobs)
            return chunk
        self.sent = self.start + end
        if self.sent == self.length and self.stage == "ended":
            chunk.finish, chunk.error = self.finish, self.error
            self.deliver("end sent", now)
        return chunk


def _version_of(generate: protocol.Generate) -> tuple[str, int, str] | None:
    ref = generate.adapter
    return None if ref is None else (ref.policy, ref.version, ref.hash)


def _encoded_bytes(chunk: protocol.TokenChunk) -> int:
    """About the size of ``chunk`` in a message."""
    scores = chunk.prompt_logprobs.size if chunk.prompt_logprobs is not None else 0
    likeliest = LIKELIEST_BYTES * sum(map(len, chunk.top_logprobs))
    return NAMES_BYTES + TOKEN_BYTES * len(chunk.tokens) + likeliest + scores + len(chunk.error)


class GenerationManager:
    """Belongs to the I/O thread."""

    def __init__(self, compute: Compute, transfers: TransferClient, on_output: Callable[[bool], None]) -> None:
        """``on_output(urgent)`` is called when there is something to send; urgent if a request has ended."""
        self._compute = compute
        self._transfers = transfers
        self._on_output = on_output
        self.held: dict[str, HeldRequest] = {}
        self._by_key: dict[str, HeldRequest] = {}
        self._output: dict[HeldRequest, None] = {}
        """The requests that may have output to send: a flush looks at no others."""
        self._sent_scores: dict[HeldRequest, int] = {}
        """The memory of the log-probabilities of ended requests that were sent, those sent first in front."""
        self._sent_bytes = 0
        """The memory of all of these."""
        self._adapter_room = MemoryQueue()
        self._grammars: Grammars | None = None
        """The engine's, once a request needed them."""
        self.first_pause, self.fence_seconds = FIRST_PAUSE_SECONDS, FENCE_SECONDS
        self.failed = 0
        """Requests that ended with an error."""
        self.failed_switches = 0
        """Switches whose version could not be pulled or loaded."""

    # --- from the controller ----------------------------------------------------------------------------------------

    def generate(self, generate: protocol.Generate) -> None:
        """Start a request, or resume one that is held."""
        held = self.held.get(generate.request)
        if held is not None:
            if held.resumable and held.continues(generate):
                self._resume(held, generate)
                return
            self._drop(held)
        key = f"{generate.request}/{generate.assignment}"
        held = HeldRequest(generate, key, sent=len(generate.prefix_tokens))
        self.held[generate.request] = self._by_key[key] = held
        held.submission = asyncio.create_task(self._submit(held, msgspec.structs.replace(generate, request=key)))

    def switch(self, switch: protocol.SwitchAdapter) -> None:
        """Continue a request with a newer version as soon as that is loaded; replaces an earlier pending switch. A
        request that has ended, or is unknown, does not change."""
        held = self._find(switch)
        if held is not None and held.stage != "ended":
            self._schedule_switch(held, switch)

    def abort(self, abort: protocol.Abort) -> None:
        """Delete a request and its tokens; one that continues elsewhere ends first: its tokens are sent, and then its
        end, unless it has ended, or the engine does not have it yet."""
        held = self._find(abort)
        if held is not None and not abort.resume:
            self._drop(held)
        elif held is not None and held.stage == "running":
            self._abort(held)

    def _find(self, message: protocol.Abort | protocol.SwitchAdapter) -> HeldRequest | None:
        """The request that the message concerns, if it is held under the same assignment."""
        held = self.held.get(message.request)
        return held if held is not None and held.generate.assignment == message.assignment else None

    def _drop(self, held: HeldRequest) -> None:
        """Delete a request and its tokens."""
        del self.held[held.generate.request], self._by_key[held.key]
        self._output.pop(held, None)
        self._sent_bytes -= self._sent_scores.pop(held, 0)
        for task in (held.submission, held.switching):
            if task is not None:
                task.cancel()
        if held.stage != "ended":
            self._abort(held)

    def _abort(self, held: HeldRequest) -> None:
        """The engine ends the request, if it has it."""
        name, tenant = held.generate.request, held.generate.tenant
        self._compute.post(
            "the abort of a request", lambda core: core.engine.abort(held.key), touches="engine",
            request=name, tenant=tenant,
        )  # fmt: skip

    def _resume(self, held: HeldRequest, claim: protocol.Generate) -> None:
        held.generate = msgspec.structs.replace(held.generate, assignment=claim.assignment)
        held.deliver("named", time.monotonic())
        held.sent, held.scores_sent = len(claim.prefix_tokens), 0
        self._output[held] = None
        self._sent_bytes -= self._sent_scores.pop(held, 0)
        latest = held.generate.adapter if held.pending_switch is None else held.pending_switch.adapter
        ref = claim.adapter
        if ref is not None and ref.replaces(latest, claim.in_flight) and held.stage != "ended":
            recompute = claim.in_flight == "recompute"
            switch = protocol.SwitchAdapter(
                request=claim.request, assignment=claim.assignment, adapter=ref, recompute=recompute
            )
            self._schedule_switch(held, switch)
        log.info("request %s resumes at token %d", held.generate.request, held.sent)
        if held.unsent:
            self._on_output(True)

    async def _submit(self, held: HeldRequest, generate: protocol.Generate) -> None:
        """Prepare the grammar, load the adapter and submit to the engine. If the adapter cannot be pulled and a switch
        is pending, submit with the newer version."""
        arrived = held.arrived
        try:
            grammar = await self._grammar_of(generate)
            await self._with_adapter(
                generate.adapter,
                lambda core, folder: core.submit(generate, folder, arrived, grammar),
                client=generate.client,
            )
        except Exception as error:
            if held.pending_switch is not None:
                ref, held.pending_switch = held.pending_switch.adapter, None
                log.warning("request %s starts with version %d: %s", generate.request, ref.version, one_line(error))
                held.generate = msgspec.structs.replace(held.generate, adapter=ref)
                await self._submit(held, msgspec.structs.replace(generate, adapter=ref))
                return
            # Another worker may run it: it is aborted, with the reason unless a later attempt here may run it, too.
            finish: Literal["error", "abort"] = "error" if failure_category(error) == "failed" else "abort"
            held.end(finish, "" if isinstance(error, Unreachable | Unavailable) else one_line(error))
            self._output[held] = None
            self.failed += 1
            log.warning("request %s failed: %s", held.generate.request, one_line(error), exc_info=not is_plain(error))
            self._on_output(True)
            return
        held.advance("submitted")
        if held.pending_switch is not None:
            self._schedule_switch(held, held.pending_switch)

    async def _grammar_of(self, generate: protocol.Generate) -> ReplyGrammar | None:
        """The state of its reply under its schema, if it has one and the engine follows any."""
        if generate.logits is None or not generate.logits.schema:
            return None
        if self._grammars is None:
            self._grammars = await self._compute.call(lambda core: core.grammars, touches="engine")
        if self._grammars is None:
            return None
        logits = generate.logits
        return await self._grammars.reply(generate.tenant, logits.schema, generate.prefix_tokens, logits.unless)

    def _schedule_switch(self, held: HeldRequest, switch: protocol.SwitchAdapter) -> None:
        held.pending_switch = switch
        if held.switching is not None:
            held.switching.cancel()
        prepared = held.stage != "preparing"
        held.switching = asyncio.create_task(self._switch(held, switch)) if prepared else None

    async def _switch(self, held: HeldRequest, switch: protocol.SwitchAdapter) -> None:
        """Load the newer version while the request runs, then switch."""
        ref, key = switch.adapter, held.key
        try:
            await self._with_adapter(
                ref,
                lambda core, folder: core.switch(key, ref, folder, recompute=switch.recompute),
                client=held.generate.client,
                runs=True,
            )
            held.generate = msgspec.structs.replace(held.generate, adapter=ref)
        except Exception as error:  # the request continues with its present version
            self.failed_switches += 1
            name = held.generate.request
            log.warning("request %s could not switch to version %d: %s", name, ref.version, one_line(error))
        held.pending_switch = None

    async def _with_adapter(
        self,
        ref: protocol.AdapterRef | None,
        function: Callable[[WorkerCore, Path | None], bool],
        *,
        client: bool,
        runs: bool = False,
    ) -> None:
        """Call ``function(core, folder)`` in the compute thread: with None if the adapter is in memory, which it may
        answer with False, else with the adapter's folder once there is room for the adapter. While a request waits for
        room, later rollouts wait behind it, even those whose adapter is in memory: they could keep it there for good.
        ``client``: of a client's request. ``runs``: the request runs already, with another version."""

        async def call(folder: Path | None) -> bool:
            return await self._compute.call(lambda core: function(core, folder), touches="engine")

        if ref is None:
            await call(None)
            return
        resident = ref.hash in self._compute.status.adapters
        if resident and (runs or self._passes(ref, client=client)) and await call(None):
            return
        async with self._transfers.pulled(ref) as folder:
            for attempt in range(LOADS):
                first = client and self._adapter_room.waited < self.fence_seconds
                try:
                    await self._adapter_room.run(lambda: call(folder), first=first)
                    return
                except (Unavailable, PassingFault) as error:
                    if attempt == LOADS - 1 or isinstance(error, WorkerBroken):
                        raise
                    log.info("version %d of %s is loaded again: %s", ref.version, ref.policy, one_line(error))
                await asyncio.sleep(self.first_pause * 2**attempt)

    def _passes(self, ref: protocol.AdapterRef, *, client: bool) -> bool:
        """Whether a request may keep this adapter in memory although others wait for room."""
        if not client:
            return not self._adapter_room.waiting
        if self._adapter_room.waited < self.fence_seconds:
            return True
        users = [held.generate for held in self.held.values() if held.stage == "running"]
        return any(one.adapter is not None and one.adapter.hash == ref.hash and not one.client for one in users)

    # --- from the engine --------------------------------------------------------------------------------------------

    def collect(self, chunks: list[protocol.TokenChunk]) -> None:
        """Keep newly sampled tokens."""
        urgent = False
        for chunk in chunks:
            held = self._by_key.get(chunk.request)
            if held is None:
                continue  # aborted
            urgent |= held.generate.client and not held.log.tokens  # a client waits for its first token
            received = held.log.receive(chunk, held.start)
            held.top_logprobs += chunk.top_logprobs
            assert received == len(chunk.tokens), f"{chunk.request}: the engine sampled token {chunk.offset} twice"
            held.version, held.policy = chunk.version, chunk.policy
            held.prompt_logprobs = chunk.prompt_logprobs
            if chunk.finish:
                held.end(chunk.finish, chunk.error)
            self._output[held] = None
            urgent |= bool(chunk.finish)
        if chunks:
            self._on_output(urgent)
        if any(chunk.finish for chunk in chunks):
            self._adapter_room.notify()

    # --- to the controller ------------------------------------------------------------------------------------------

    def take(self, now: float) -> list[protocol.TokenChunk]:
        """Chunks for one message that the present connection has not been sent, clients' tokens first; they count as
        sent at ``now``. None: it has been sent everything."""
        chunks, room = [], FRAME_BYTES
        unsent = [held for held in self._output if held.unsent]
        for held in sorted(unsent, key=lambda held: (held.unsent_scores, not held.generate.client)):
            while room > 0 and held.unsent:
                chunks.append(chunk := held.next_chunk(room, now))
                room -= _encoded_bytes(chunk)
            if held.delivery == "delivered" and (size := held.score_bytes):
                self._sent_scores[held] = size
                self._sent_bytes += size
        self._output = {held: None for held in unsent if held.unsent}
        self._bound_sent()
        return chunks

    def _bound_sent(self) -> None:
        """Delete ended requests with log-probabilities, those sent first, above :data:`SENT_BYTES`."""
        while self._sent_bytes > SENT_BYTES:
            self._drop(next(iter(self._sent_scores)))

    @property
    def prepared(self) -> int:
        """Grammars of requests that were prepared."""
        return self._grammars.prepared if self._grammars is not None else 0

    def running(self) -> list[str]:
        """Requests that a controller may claim."""
        return [request for request, held in self.held.items() if held.resumable]

    def waiting(self) -> int:
        """Number of requests that wait for their grammar or their adapter."""
        return sum(held.stage == "preparing" for held in self.held.values())

    def on_disconnect(self, now: float) -> None:
        """The connection has ended: no request is claimed."""
        for held in self.held.values():
            held.deliver("disconnected", now)

    def abort_unclaimed(self) -> None:
        """The controller has had time to claim its requests: abort the others. Finished ones cost nothing."""
        for held in list(self.held.values()):
            if held.delivery == "unclaimed" and held.stage != "ended":
                self._drop(held)

    def expire(self, before: float) -> None:
        """Delete requests that have been unclaimed, or sent to their end, since ``before``."""
        for held in list(self.held.values()):
            if held.delivery != "claimed" and held.idle_since < before:
                self._drop(held)
