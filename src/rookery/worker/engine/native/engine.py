"""The native engine: continuous batching over cached segments, many adapters in one batch.

Promises:

* Same seed, same text: what a request generates does not depend on the other requests, on being resumed from given
  tokens, on its cache being kept, parked or lost, nor on when it was admitted (bit for bit on CPU).
* Full means wait: beyond ``max_rows`` or the cache's budget, requests queue, first come first served. When growing
  texts fill the budget, the youngest goes back to the head of the queue and later goes on where it was.
* Requests marked ``first`` stand before the others in the queue and take their rows, the youngest's first.
* One ``step`` is one bounded slice: at most ``prefill_tokens`` prompt tokens that look at no more than ``prefill_keys``
  (or those of one request), or one token for every running row.
* Trouble in one request (logits that are no numbers) ends that request alone.
* A request that switches to another version of its policy is sampled by it from its next token on. Computed anew, it is
  from there bit for bit the request that begins with the newer version and these tokens given. With its cache kept,
  the tokens before the switch (but for the last, which is computed with the newer version) are attended to as the
  older one computed them, for as long as the cache lives: lost with its worker, or for want of room, it is computed
  anew. Who does not switch is not touched.

Not thread-safe: one thread computes, and whoever calls the other methods does so in that thread.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from math import isfinite, isnan
from pathlib import Path

import torch
from torch import Tensor

from rookery import protocol
from rookery.worker import device
from rookery.worker.engine.base import EngineLimits
from rookery.worker.engine.native.admission import Scheduler
from rookery.worker.engine.native.attention import SequenceChunk
from rookery.worker.engine.native.cuda.graph_runner import CudaGraphRunner
from rookery.worker.engine.native.cuda.sampler import sample_on_device
from rookery.worker.engine.native.request import EngineRequest, SharedPrefix, StopStrings
from rookery.worker.engine.native.runner import DenseRunner, Runner, logits_at
from rookery.worker.engine.native.sampler import SamplingKey, sample
from rookery.worker.model.adapter import read_adapter
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.lora import LoraManager

log = logging.getLogger("rookery.engine")

PREFILL_TOKENS = 512
"""Prompt tokens of one slice, padding included: from about 512 rows on, matrix products reach full speed on CPU, and
the slice takes about as long as a few decode steps."""

GPU_PREFILL_TOKENS = 4096
"""The same on a GPU, where a slice must outlast the launches of its kernels."""

PREFILL_KEYS = 1 << 17
"""Cached tokens that the requests of a slice look at, a shared prompt counted for each: a GPU's prefill copies them,
layer by layer, 512 MB where a token's keys and values take 4 kB. One context of 128 k tokens, or the ends of 32 texts
upon a prompt of 4,000."""

PREFILLS_IN_A_ROW = 4
"""Slices for which running rows may wait: about a second on the 135M model with two cores."""

SCORED_ROWS = 128
"""Prompt tokens scored at once: their logits are 50 MB in float32 at 100,000 words."""


class NativeEngine:
    """See the module. ``decode`` turns token ids into text, for stop strings."""

    def __init__(
        self,
        decoder: Decoder,
        bank: LoraManager,
        decode: Callable[[list[int]], str],
        *,
        max_rows: int,
        kv_budget_bytes: int,
        max_context: int | None = None,
        prefill_tokens: int | None = None,
        prefill_keys: int = PREFILL_KEYS,
        runner: Runner | None = None,
    ) -> None:
        """Without them, ``prefill_tokens`` and ``runner`` are those of the decoder's device."""
        self.decoder = decoder
        self.bank = bank
        self.max_context = min(max_context or decoder.config.context, decoder.config.context)
        self.limits = EngineLimits(max_rows, self.max_context, bank.max_rank)
        self.generated = 0
        """Tokens sampled since the beginning."""
        self.stats: defaultdict[str, float] = defaultdict(float)
        """Monotonic: decode_seconds, prefill_seconds, decode_steps, prefill_slices, prefill_tokens, reused_tokens
        (found in the cache instead of computed), preempted, switched."""
        self._decode = decode
        self._runner = runner or best_runner(decoder, bank, kv_budget_bytes)
        self._store = self._runner.store
        self._scheduler = Scheduler(self._store, bank, max_rows, self.stats)
        default = GPU_PREFILL_TOKENS if device.fuses(decoder.device, decoder.dtype) else PREFILL_TOKENS
        self._prefill_tokens = prefill_tokens or default
        self._prefill_keys = prefill_keys
        self._requests: dict[str, EngineRequest] = {}
        self._undrained: dict[str, EngineRequest] = {}
        """Requests with something to hand out."""
        self._prefilled = 0
        """Slices of prefill since the last decode step."""

    # --- what the worker calls --------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        """Admitted requests."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        return len(self._scheduler.waiting)

    def adapters(self) -> list[str]:
        """See ``Engine``."""
        return self.bank.keys()

    def has_adapter(self, key: str) -> bool:
        """See ``Engine``."""
        return key in self.bank

    def add_adapter(self, key: str, folder: Path) -> None:
        """See ``Engine``."""
        if key not in self.bank:
            self.bank.add(key, read_adapter(folder, self.decoder.config))

    def evict_adapter(self, key: str) -> None:
        """See ``Engine``."""
        self.bank.evict(key)

    def submit(self, order: protocol.Generate) -> None:
        """Queues a request. Raises ``ValueError``, in one line, for one that can never run here."""
        self._check(order)
        key = order.adapter.hash if order.adapter else ""
        stops = StopStrings(order.stop, self._decode)
        request = EngineRequest(order, key, stops, list(order.prefix_tokens), num_drained=len(order.prefix_tokens))
        self._requests[order.request] = request
        if key:
            self.bank.pin(key)
        request.check_finished(self.max_context)
        if request.finish:
            self._finish(request)
        else:
            self._scheduler.enqueue(request)

    def switch_adapter(self, request: str, ref: protocol.AdapterRef, *, recompute: bool) -> bool:
        """From its next token on ``request`` runs with ``ref``, its cache kept or computed anew. False (and nothing
        changed) for a request that is complete or was never here. Raises ``ValueError`` when ``ref`` is not resident or
        not of its policy."""
        held = self._requests.get(request)
        if held is None:
            return False
        before = held.params.adapter
        if before is None or before.policy != ref.policy:
            raise ValueError(f"request {request} does not run on policy {ref.policy}")
        if ref.hash not in self.bank:
            raise ValueError(f"adapter {ref.hash} is not resident")
        self.stats["switched"] += 1
        held.switch_adapter(ref)
        if ref.hash != before.hash:  # else a step that changed nothing: the cache is this version's as well
            self.bank.pin(ref.hash)
            self._scheduler.on_adapter_switched(held, keep=not recompute)
            self.bank.unpin(before.hash)
        return True

    def abort(self, request: str) -> None:
        """Ends a request; its last chunk says so. Unknown requests are fine."""
        held = self._requests.get(request)
        if held is not None:
            held.finish = "abort"
            self._finish(held)

    def drain(self) -> list[protocol.TokenChunk]:
        """What was sampled since the last call, one chunk per request and version."""
        news, self._undrained = self._undrained, {}
        return [chunk for request in news.values() for chunk in request.chunks()]

    def step(self) -> bool:
        """One bounded slice of compute; False when there is nothing to do."""
        with torch.no_grad():
            self._scheduler.admit()
            self._start_from_prefixes()
            if not self._must_decode() and self._timed("prefill_seconds", self._prefill):
                self._prefilled += 1
                return True
            self._prefilled = 0
            return self._timed("decode_seconds", self._decode_step)

    def _check(self, order: protocol.Generate) -> None:
        length = len(order.prompt) + len(order.prefix_tokens)
        longest = min(len(order.prompt) + order.max_tokens, self.max_context)
        vocabulary = self.decoder.config.vocab
        if order.request in self._requests:
            raise ValueError(f"request {order.request} is already running")
        if not order.prompt:
            raise ValueError("the prompt is empty")
        if len(order.prompt) >= self.max_context or length > self.max_context:
            raise ValueError(f"the prompt has {length} tokens; this model's context is {self.max_context}")
        if not 0 <= order.shared_prefix <= len(order.prompt):
            raise ValueError(f"shared_prefix is {order.shared_prefix}, the prompt has {len(order.prompt)} tokens")
        if order.prompt_logprobs and order.shared_prefix:
            raise ValueError("a shared prompt is not scored: give it as the request's own")
        if not all(0 <= token < vocabulary for token in (*order.prompt, *order.prefix_tokens)):
            raise ValueError(f"a token id is outside the vocabulary of {vocabulary}")
        if order.max_tokens < 1:
            raise ValueError(f"max_tokens is {order.max_tokens}; it must be at least 1")
        if not (isfinite(order.temperature) and order.temperature >= 0):
            raise ValueError(f"temperature is {order.temperature}; it must be 0 or more")
        if order.adapter is not None and order.adapter.hash not in self.bank:
            raise ValueError(f"adapter {order.adapter.hash} is not resident")
        if not self._store.fits_alone(order.shared_prefix, max(longest - order.shared_prefix, 1)):
            raise ValueError(
                f"a text of {longest} tokens does not fit this worker's cache ({self._store.budget} bytes)"
            )

    # --- slices -----------------------------------------------------------------------------------------------------

    def _timed(self, what: str, work: Callable[[], bool]) -> bool:
        began = time.perf_counter()
        did = work()
        device.finish(self.decoder.device)
        self.stats[what] += time.perf_counter() - began
        return did

    def _must_decode(self) -> bool:
        """Prefill and decoding take turns, so that neither a stream of long prompts nor running rows starve; a few
        slices follow each other while a decode step would leave most rows out."""
        if not self._prefilled:
            return False
        rows = self._scheduler.running
        decoding = sum(self._decoding(row) for row in rows)
        few = 2 * decoding < len(rows)
        return bool(decoding) and self._prefilled >= (PREFILLS_IN_A_ROW if few else 1)

    def _decoding(self, row: EngineRequest) -> bool:
        """Its next token takes a decode step."""
        return bool(row.tokens) and self._prompt_cached(row)

    def _prompt_cached(self, row: EngineRequest) -> bool:
        """Nothing of it is left to prefill: all but a last token of its own is cached."""
        return row.prefix_cached and row.tail_length - row.filled <= (1 if row.tokens else 0)

    def _start_from_prefixes(self) -> None:
        """Samples the first token of rows whose whole prompt is a complete segment: its logits are there."""
        ready = [row for row in self._scheduler.running if row.tail_length == 0 and row.prefix_cached]
        if ready:
            kept = [row.prefix.logits for row in ready if row.prefix is not None]
            self._sample(ready, torch.stack([logits for logits in kept if logits is not None]))

    def _prefill(self) -> bool:
        """One slice of prompt tokens, segments and tails of several requests together: the oldest, then others of its
        adapter, since every adapter in a slice costs products of its own, then who is left. Then the prompts of those
        who wait: rows become free one by one, and a slice for each one's prompt costs twice as much as its share of
        one slice for several."""
        work: list[tuple[EngineRequest | SharedPrefix, SequenceChunk]] = []
        widest, keys, begun = 0, 0, set()

        def fits(count: int, before: int = 0) -> bool:
            """Whether there is room for so many tokens that look at those and at so many ``before``."""
            padded = max(widest, count) * (len(work) + 1)
            return padded <= self._prefill_tokens and keys + before + count <= self._prefill_keys

        rows = [row for row in self._scheduler.running if not self._prompt_cached(row)]
        for row in sorted(rows, key=lambda row: row.key != rows[0].key):
            target: EngineRequest | SharedPrefix
            tokens: Sequence[int]
            if row.prefix is not None and not row.prefix.complete:
                if id(row.prefix) in begun:
                    continue
                begun.add(id(row.prefix))
                target, tokens, begin, place = row.prefix, row.prefix.tokens, row.prefix.filled, row.prefix.slot
                prefix = None
            else:
                assert row.slot is not None
                target, tokens, begin, place, prefix = row, row.tail, row.filled, row.slot, row.prefix
            count = min(len(tokens) - begin, self._prefill_tokens)
            before = begin + (len(prefix.tokens) if prefix is not None else 0)
            if work and not fits(count, before):
                break
            widest, keys = max(widest, count), keys + before + count
            stream = SequenceChunk(row.key, tokens[begin : begin + count], begin, place)
            if prefix is not None:
                stream.prefix_slot, stream.prefix_length = prefix.slot, len(prefix.tokens)
            work.append((target, stream))
        if not work:
            return False
        for segment in self._scheduler.waiting_prefixes(fits):
            widest, keys = max(widest, len(segment.tokens)), keys + len(segment.tokens)
            work.append((segment, SequenceChunk(segment.key[0], segment.tokens, 0, segment.slot)))
        self._runner.prepare_adapters(stream.key for _, stream in work)
        work.sort(key=lambda item: (self.bank.slot_order(item[1].key), item[1].key))
        hidden, last = self._runner.prefill([stream for _, stream in work])
        self.stats["prefill_slices"] += 1
        done: list[tuple[int, EngineRequest | SharedPrefix]] = []
        for i, (target, stream) in enumerate(work):
            if isinstance(target, EngineRequest) and target.params.prompt_logprobs:
                self._score(target, stream, hidden, int(last[i]) - len(stream.tokens) + 1)
            target.filled += len(stream.tokens)
            self.stats["prefill_tokens"] += len(stream.tokens)
            if target.filled == (len(target.tokens) if isinstance(target, SharedPrefix) else target.tail_length):
                done.append((i, target))
        if done:
            logits = logits_at(self.decoder, hidden, last[torch.tensor([i for i, _ in done], device=hidden.device)])
            first_tokens = []
            for (_, target), line in zip(done, logits, strict=False):
                if isinstance(target, SharedPrefix):
                    target.logits = line.clone()
                    if not target.users:
                        self._scheduler.retain_prefix(target)
                else:
                    first_tokens.append((target, line))
            if first_tokens:
                self._sample([row for row, _ in first_tokens], torch.stack([line for _, line in first_tokens]))
        return True

    def _score(self, request: EngineRequest, stream: SequenceChunk, hidden: Tensor, start: int) -> None:
        """Scores the prompt tokens that ``stream`` predicts; its first row of ``hidden`` is ``start``."""
        wanted = [at for at in request.scored_positions if 0 <= at - 1 - stream.start < len(stream.tokens)]
        for first in range(0, len(wanted), SCORED_ROWS):
            part = wanted[first : first + SCORED_ROWS]
            rows = torch.tensor([start + at - 1 - stream.start for at in part], device=hidden.device)
            logp = logits_at(self.decoder, hidden, rows).float().log_softmax(-1)
            values, tokens = logp.topk(min(request.params.top_logprobs, logp.shape[1]))
            for at, line, likely, ids in zip(part, logp, values.tolist(), tokens.tolist(), strict=False):
                logprob = float(line[request.params.prompt[at]])
                request.scores[at] = protocol.PromptLogprob(logprob=logprob, top=list(zip(ids, likely, strict=True)))

    def _decode_step(self) -> bool:
        """One token for every row whose prompt is cached."""
        self._scheduler.grow_running()
        rows = [row for row in self._scheduler.running if self._decoding(row)]
        if not rows:
            return False
        self._runner.prepare_adapters(row.key for row in rows)
        rows.sort(key=self._adapter_order)
        streams = []
        for row in rows:
            assert row.slot is not None
            stream = SequenceChunk(row.key, row.tokens[-1:], row.filled, row.slot)
            if row.prefix is not None:
                stream.prefix_slot, stream.prefix_length = row.prefix.slot, len(row.prefix.tokens)
            streams.append(stream)
            row.filled += 1
        self.stats["decode_steps"] += 1
        self._sample(rows, self._runner.decode(streams))
        return True

    def _adapter_order(self, row: EngineRequest) -> tuple[int, str]:
        return self.bank.slot_order(row.key), row.key

    def _sample(self, rows: Sequence[EngineRequest], logits: Tensor) -> None:
        """Samples the next token of each row from the first ``len(rows)`` logits."""
        draws = [SamplingKey(row.params.seed, len(row.tokens), row.params.temperature) for row in rows]
        sampled = sample_on_device(logits, draws) if logits.is_cuda else sample(logits, draws)
        for row, token, logprob in zip(rows, sampled.tokens, sampled.logprobs, strict=True):
            if isnan(logprob):
                row.finish, row.error = "error", "the logits are not numbers: the adapter's weights overflow"
                log.warning("logits are not numbers", extra={"request": row.params.request, "adapter": row.key})
            else:
                row.append(token, logprob, self.max_context)
                self.generated += 1
            self._undrained[row.params.request] = row
            if row.finish:
                self._finish(row)

    # --- leaving ----------------------------------------------------------------------------------------------------

    def _finish(self, request: EngineRequest) -> None:
        """Removes a finished request from the batch; ``drain`` returns its last chunk."""
        name = request.params.request
        self._scheduler.remove(request)
        if request.key:
            self.bank.unpin(request.key)
        del self._requests[name]
        self._undrained[name] = request


def best_runner(decoder: Decoder, bank: LoraManager, kv_budget_bytes: int) -> Runner:
    """What computes on the decoder's device: the pooled one wants the fused kernels, or every row's keys are gathered
    at the length of the longest."""
    pools = device.fuses(decoder.device, decoder.dtype)
    made: type[DenseRunner | CudaGraphRunner] = CudaGraphRunner if pools else DenseRunner
    return made(decoder, bank, kv_budget_bytes)
