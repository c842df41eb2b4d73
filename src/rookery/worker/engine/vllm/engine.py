"""vLLM as the engine of a worker, in its children (``in_process``) or as a running server (``attached``).

Beyond what every engine promises (``engine.base``):

* vLLM computes elsewhere: a loop in a separate thread talks to it, and ``step`` waits for its outputs.
* Up to numerics, texts do not depend on being resumed, moved or batched. vLLM's sums depend on the batch, so that now
  and then another token wins: the native engine's promise, bit for bit, does not hold.
* An adapter is loaded under a new name and number, before any request names it, and unloaded when its place is needed
  and no request uses it.
* A request that switches to another version is aborted and submitted again with its tokens, which the newer version
  computes: ``recompute`` or not, no cache outlives its version.
* A version is refused where vLLM's log-probabilities of its canary (``model.canary``) are those of the base model
  although its weights are not, or differ from its trainer's by more than a limit: its job pauses with that reason.
* A request whose adapter vLLM has lost, or that meets a busy or faulty server, continues from its tokens: after the
  adapter is loaded again, or after growing pauses. A server that stays busy counts as ended. A load that meets one
  changes nothing.
* Requests with a ``reserved`` row are scheduled first. There are no objectives of latency.
* Full-parameter versions are refused.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import secrets
import threading
from collections import Counter
from collections.abc import Collection, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from math import isnan
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rookery import protocol
from rookery.errors import Unavailable, UserError, count_of
from rookery.scheduling.worker_time import WorkerTime
from rookery.tokenization.chat import Chat
from rookery.tokenization.grammar import ReplyGrammar
from rookery.worker.engine.request import EngineRequest, validate
from rookery.worker.engine.vllm.backend import (
    AdapterLost,
    Backend,
    LoadedAdapter,
    SampledPart,
    SamplingTask,
    ServerFault,
    TaskFailed,
    VllmBusy,
)
from rookery.worker.memory import MemoryUse, NoRoom, NotOnThisWorker, TooSmall
from rookery.worker.model.adapter import ProjectionShapes, read_adapter
from rookery.worker.model.canary import canary_tokens, mean_difference, read_canary
from rookery.worker.transfer.http import one_line

log = logging.getLogger("rookery.engine")

T = TypeVar("T")

WAIT_SECONDS = 0.02
"""Longest wait of a step: calls from other threads wait behind it, a decode step on a GPU takes about as long."""

FAULTS, REFUSALS = 3, 8
"""Times that a request is repeated after a fault of the server, and while it is busy, in about a minute and a half."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 20.0
"""Seconds before a request is repeated; each pause is twice the one before."""

REPEATED = (AdapterLost, ServerFault, VllmBusy)
"""Problems after which a request is repeated."""

OVERFLOW = "the logits are not numbers: the adapter's weights overflow"

INTERACTIVE, ROLLOUT = 0, 1
"""Priorities in vLLM's scheduler."""


class VllmEngine:
    def __init__(
        self,
        backend: Backend,
        vocabulary: int,
        context: int,
        chat: Chat,
        projections: ProjectionShapes | None = None,
        *,
        gap_alarm: float,
        gap_limit: float,
    ) -> None:
        """Starts ``backend``, whose context may be shorter than the model's ``context``. ``chat`` decodes texts for
        stop strings and encodes the canary; adapters are checked against ``projections``, if given. ``gap_alarm`` and
        ``gap_limit``: mean differences from the trainer's canary, in nats per token, that are logged and refused.
        Raises ``UserError``, or ``Unavailable`` for a server that does not answer."""
        self.generated = 0
        self.longest_pause = LONGEST_PAUSE
        self._backend = backend
        self._vocabulary, self._context = vocabulary, context
        self._decode = chat.decode
        self._canary_tokens = canary_tokens(chat.encode)
        self._projections = projections
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True).start()
        self._wait(backend.start())
        self.limits = backend.limits
        self._gap_alarm, self._gap_limit = gap_alarm, gap_limit
        self._gaps: dict[str, float] = {}
        """By adapter, of those with a canary."""
        self._numbers = itertools.count(1)
        try:
            self._base_canary = self._canary(None)
        except ServerFault as error:
            raise Unavailable(f"vLLM failed the base model's canary: {one_line(error)}") from None
        self._requests: dict[str, EngineRequest] = {}
        self._undrained: dict[str, EngineRequest] = {}
        self._tasks: dict[str, tuple[SamplingTask, Future[None]]] = {}
        """A request's present task, and what carries it out."""
        self._parts: queue.SimpleQueue[tuple[str, str, SampledPart | Exception | None]] = queue.SimpleQueue()
        """Request, name of the task, and its next tokens, its error or its end."""
        self._adapters: dict[str, LoadedAdapter] = {}
        """By hash, the least recently used first."""
        self._users: Counter[str] = Counter()
        """Requests by adapter."""
        self._repeats: Counter[str] = Counter()
        """By request, how often it was repeated since its last token."""
        self._process = secrets.token_hex(4)
        """In the names of this process's adapters: a server may have those of others."""
        self._evicting: set[str] = set()
        """Adapters to be unloaded when their last request ends."""

    # --- the engine protocol ----------------------------------------------------------------------------------------

    @property
    def longest_text(self) -> int:
        return self.limits.max_context

    @property
    def active(self) -> int:
        return min(len(self._requests), self.limits.max_rows)

    @property
    def waiting(self) -> int:
        return len(self._requests) - self.active

    def adapters(self) -> list[str]:
        return [key for key in self._adapters if key not in self._evicting]

    def has_adapter(self, key: str) -> bool:
        return key in self._adapters and key not in self._evicting

    def tenants(self) -> dict[str, int]:
        if any(request.params.client for request in self._requests.values()):
            return {}
        return Counter(request.params.tenant for request in self._requests.values())

    def sharing(self) -> Collection[str]:
        return self.tenants().keys()

    def tenant_tokens(self) -> Mapping[str, float]:
        return self.tenants()

    def share_time(self, time: WorkerTime) -> None:
        """vLLM chooses what its steps compute."""

    def describe(self) -> str:
        return f"{count_of(len(self._requests), 'request waits', 'requests wait')} for vLLM's next tokens"

    @property
    def gap(self) -> float:
        """The largest mean difference, of the attached adapters, between this engine's log-probabilities and their
        trainer's on the canary, in nats per token."""
        return max(self._gaps.values(), default=0.0)

    def gauges(self) -> dict[str, float]:
        return {"engine_gap_nats": self.gap}

    def memory(self) -> dict[str, MemoryUse]:
        """vLLM reserves the memory of all adapters when it starts."""
        return {"kv_cache": self._backend.kv_cache()}

    @property
    def free_tokens(self) -> int:
        return self._backend.free_tokens()

    def add_adapter(self, ref: protocol.AdapterRef, folder: Path) -> None:
        """It waits for vLLM, some tens of milliseconds. Raises :data:`REPEATED` where a repetition may succeed."""
        self._evicting.discard(ref.hash)
        if ref.hash in self._adapters:
            return
        if not ref.rank:
            raise NotOnThisWorker(
                f"{ref.policy}: vLLM serves LoRA versions only; a full-parameter job needs a native worker"
            )
        if ref.rank > self.limits.max_rank:
            limit = f"this engine's limit {self.limits.max_rank}"
            raise TooSmall(f"{ref.policy}: rank {ref.rank} is over {limit}; raise ROOKERY_MAX_RANK")
        if len(self._adapters) >= self._backend.max_adapters:
            self._make_room()
        self._adapters[ref.hash] = self._load(ref, folder)

    def evict_adapter(self, key: str) -> None:
        if key in self._adapters:
            self._evicting.add(key)
            self._unload_unused(key)

    def submit(self, generate: protocol.Generate, grammar: ReplyGrammar | None = None) -> None:
        if generate.request in self._requests:
            raise ValueError(f"request {generate.request} is already running")
        validate(generate, self._vocabulary, self.limits.max_context)
        longest = min(len(generate.prompt) + generate.max_tokens, self._context)
        if longest > self.limits.max_context:  # another worker may sample all of it
            held = f"vLLM holds {self.limits.max_context} here"
            raise TooSmall(
                f"a prompt of {len(generate.prompt)} with an answer has up to {count_of(longest, 'token')}; {held}"
            )
        if generate.logits is not None:
            raise NotOnThisWorker("vLLM workers do not change logits: top_p, schemas and the like need another engine")
        if not self._backend.tempered and generate.temperature not in (0.0, 1.0):
            raise NotOnThisWorker(
                f"temperature is {generate.temperature}; this vLLM server reports log-probabilities at 1 only"
            )
        request = EngineRequest.begin(generate, self._decode)
        if request.key and not self.has_adapter(request.key):
            raise ValueError(f"adapter {request.key} is not resident")
        self._requests[generate.request] = request
        self._users[request.key] += 1
        request.check_finished(self.limits.max_context)
        if request.finish:
            self._finish(request)
        else:
            self._start(request)

    def switch_adapter(self, request: str, ref: protocol.AdapterRef, *, recompute: bool) -> bool:
        held = self._requests.get(request)
        if held is None:
            return False
        before = held.check_switch(ref, resident=self.has_adapter(ref.hash))
        self._cancel(request)
        held.switch_adapter(ref)
        self._users[ref.hash] += 1
        self._release(before.hash)
        self._start(held)
        return True

    def abort(self, request: str) -> None:
        held = self._requests.get(request)
        if held is not None:
            held.finish = "abort"
            self._finish(held)

    def step(self) -> bool:
        """Raises ``VllmEnded``, or ``VllmBusy`` from a server that stays so."""
        try:
            self._apply(*self._parts.get(timeout=WAIT_SECONDS))
        except queue.Empty:
            return False
        while not self._parts.empty():
            self._apply(*self._parts.get())
        return True

    def drain(self) -> list[protocol.TokenChunk]:
        requests, self._undrained = self._undrained, {}
        return [chunk for request in requests.values() for chunk in request.chunks()]

    def close(self) -> None:
        self._wait(self._backend.close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    # --- adapters ---------------------------------------------------------------------------------------------------

    def _load(self, ref: protocol.AdapterRef, folder: Path) -> LoadedAdapter:
        """Load an adapter under a new name, and compare its canary. Raises ``UserError``, or :data:`REPEATED`
        where a repetition may succeed; vLLM does not keep it then."""
        weights = read_adapter(folder, self._projections).weights if self._projections is not None else {}
        number = next(self._numbers)
        adapter = LoadedAdapter(f"rookery-{ref.hash[:16]}-{self._process}-{number}", number, folder)
        try:
            self._wait(self._backend.load(adapter))
            self._check(ref, adapter, changes=any(bool(b.any()) for _, b in weights.values()))
        except Exception:
            with suppress(Exception):  # the first one is the one to report
                self._wait(self._backend.unload(adapter))
            raise
        return adapter

    def _load_again(self, request: EngineRequest, lost: LoadedAdapter | None) -> None:
        """Load the adapter of a request whose task did not find it as ``lost``, unless that was done for another one.
        It is not attached after this if its folder has left the disk, nor after a ``UserError``. Raises that, or
        :data:`REPEATED`."""
        key, ref = request.key, request.params.adapter
        if lost is None or ref is None or self._adapters.get(key) is not lost:
            return
        log.warning("vLLM has lost version %s of %s: it is loaded again", ref.version, ref.policy)
        try:
            self._adapters[key] = self._load(ref, lost.folder)
        except UserError:
            del self._adapters[key]
            self._evicting.discard(key)
            self._gaps.pop(key, None)
            if lost.folder.is_dir():
                raise

    def _check(self, ref: protocol.AdapterRef, adapter: LoadedAdapter, *, changes: bool) -> None:
        """Compare the canary. Raises ``UserError``; ``changes``: the version is not the base model."""
        found, expected = self._canary(adapter), read_canary(adapter.folder)
        name = f"{ref.policy} version {ref.version}"
        if changes and found == self._base_canary:
            raise UserError(f"{name}: vLLM did not apply this adapter: the log-probabilities are the base model's")
        if not expected:
            return
        if len(expected) != len(found):
            raise UserError(
                f"{name} has a canary of {count_of(len(expected), 'token')}, not {len(found)}: it is of another base"
                " model"
            )
        gap = mean_difference(found, expected)
        if gap > self._gap_limit:
            reason = f"log-probabilities differ from the trainer's by {gap:.2f} nats per token"
            raise UserError(f"{name}: vLLM's {reason}, more than ROOKERY_ENGINE_GAP_LIMIT allows ({self._gap_limit:g})")
        if gap > self._gap_alarm:
            log.warning("%s: vLLM's log-probabilities differ from the trainer's by %.3f nats per token", name, gap)
        self._gaps[ref.hash] = gap

    def _canary(self, adapter: LoadedAdapter | None) -> list[float]:
        """The canary's log-probabilities in vLLM."""
        tokens = self._canary_tokens
        scored = range(1, len(tokens))
        name = f"canary#{next(self._numbers)}"
        task = SamplingTask(name, adapter, tokens, 0, 0, 0.0, 1, [], INTERACTIVE, scored)
        scores = self._wait(self._scores(task))
        return [scores[at].logprob for at in scored]

    async def _scores(self, task: SamplingTask) -> dict[int, protocol.PromptLogprob]:
        try:
            parts = [part async for part in self._backend.sample(task)]
        except (AdapterLost, ServerFault):
            raise
        except TaskFailed as error:
            raise UserError(f"vLLM cannot score the canary: {error}") from None
        return {at: score for part in parts for at, score in part.scores.items()}

    def _make_room(self) -> None:
        candidates = sorted(self._adapters, key=lambda key: key not in self._evicting)
        unused = [key for key in candidates if not self._users[key]]
        if not unused:
            raise NoRoom(f"vLLM holds {count_of(self._backend.max_adapters, 'adapter')}, all of them in use")
        for key in unused:
            self._evicting.add(key)
            self._unload_unused(key)
            if key not in self._adapters:
                return
        raise ServerFault("vLLM unloads none of the adapters that have no request")

    def _release(self, key: str) -> None:
        self._users[key] -= 1
        self._unload_unused(key)

    def _unload_unused(self, key: str) -> None:
        """Unload an adapter that is to be, and has no request. One that a busy or faulty server keeps is unloaded when
        its place is needed."""
        if key in self._evicting and not self._users[key]:
            try:
                self._wait(self._backend.unload(self._adapters[key]))
            except REPEATED as error:
                log.warning("an adapter is not unloaded: %s", one_line(error), extra={"adapter": key})
                return
            self._evicting.discard(key)
            del self._users[key], self._adapters[key]
            self._gaps.pop(key, None)

    # --- requests ---------------------------------------------------------------------------------------------------

    def _start(self, request: EngineRequest, pause: float = 0.0) -> None:
        """A task for the rest of the text, under the request's present version, after ``pause`` seconds."""
        order = request.params
        if request.key:
            self._adapters[request.key] = self._adapters.pop(request.key)  # the most recently used one
        task = SamplingTask(
            name=f"{order.request}#{next(self._numbers)}",
            adapter=self._adapters.get(request.key),
            tokens=order.prompt + request.tokens,
            seed=order.seed,
            position=len(request.tokens),
            temperature=order.temperature,
            max_tokens=request.remaining(self.limits.max_context),
            stop_tokens=order.stop_tokens,
            priority=INTERACTIVE if order.reserved else ROLLOUT,
            scored=request.scored_positions if request.prompt_logprobs is None else range(0),
            top_logprobs=order.top_logprobs,
        )
        future = asyncio.run_coroutine_threadsafe(self._sample(order.request, task, pause), self._loop)
        self._tasks[order.request] = task, future

    async def _sample(self, request: str, task: SamplingTask, pause: float) -> None:
        """In the loop: forward the task's parts to ``step``."""
        end: Exception | None = None
        try:
            await asyncio.sleep(pause)
            async for part in self._backend.sample(task):
                self._parts.put((request, task.name, part))
        except Exception as error:  # raised by the step that meets it
            end = error
        self._parts.put((request, task.name, end))

    def _cancel(self, request: str) -> None:
        """Abort the request's task in vLLM; parts that it has left are not applied."""
        _, future = self._tasks.pop(request)
        future.cancel()

    def _apply(self, name: str, task: str, part: SampledPart | Exception | None) -> None:
        if name not in self._tasks or self._tasks[name][0].name != task:
            return
        request = self._requests[name]
        if isinstance(part, SampledPart):
            for at, (logprob, top) in part.scores.items():
                tokens, likeliest = np.array(top, float).reshape(-1, 2).T
                request.scores().put(at, np.array([logprob]), tokens[None], likeliest[None])
            for token, logprob in zip(part.tokens, part.logprobs, strict=True):
                if isnan(logprob):
                    request.finish, request.error = "error", OVERFLOW
                else:
                    request.append(token, logprob, self.limits.max_context)
                    self.generated += 1
                    self._repeats.pop(name, None)
                if request.finish:
                    break
            self._undrained[name] = request
        elif isinstance(part, REPEATED) and self._repeats[name] < (
            FAULTS if isinstance(part, ServerFault) else REFUSALS
        ):
            self._repeat(request, part)
        elif isinstance(part, Unavailable):
            raise part
        else:
            request.finish, request.error = "error", one_line(part) if part else "vLLM ended the text early"
            log.warning("request failed: %s", request.error, extra={"request": name, "adapter": request.key})
        if request.finish:
            self._finish(request)

    def _repeat(self, request: EngineRequest, problem: Exception) -> None:
        """Another task for a request whose last one met this problem."""
        name = request.params.request
        task, _ = self._tasks[name]
        self._cancel(name)
        self._repeats[name] += 1
        repeats, loaded = self._repeats[name], isinstance(problem, AdapterLost)
        try:
            if loaded:
                self._load_again(request, task.adapter)
        except REPEATED as error:
            problem, loaded = error, False
        except UserError as error:
            request.finish, request.error = "error", one_line(error)
            return
        if request.key and request.key not in self._adapters:
            log.info("request leaves this worker, which has its adapter no more", extra={"request": name})
            request.finish = "abort"
            return
        pause = 0.0 if loaded and repeats == 1 else min(FIRST_PAUSE * 2 ** (repeats - 1), self.longest_pause)
        log.info("request is repeated in %.1f s: %s", pause, one_line(problem), extra={"request": name})
        self._start(request, pause)

    def _finish(self, request: EngineRequest) -> None:
        """Removes a finished request; ``drain`` returns its last chunk."""
        name = request.params.request
        if name in self._tasks:
            self._cancel(name)
        del self._requests[name]
        self._repeats.pop(name, None)
        self._undrained[name] = request
        self._release(request.key)

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
