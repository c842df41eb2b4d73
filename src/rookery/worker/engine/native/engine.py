"""The native engine: continuous batching over cached segments, many adapters in one batch.

Beyond what every engine promises (``engine.base``):

* Same seed, same text: the tokens of a request do not depend on the other requests, on being resumed from
  ``prefix_tokens``, on its cache being kept, retained or lost, nor on when it was admitted (bit for bit on CPU).
* Beyond ``max_rows`` or the cache's budget, requests queue, first come first served. When growing texts fill the
  budget, the youngest is preempted: it returns to the head of the queue and resumes later.
* ``interactive`` requests wait ahead of the others and preempt them, the youngest first.
* One ``step`` computes at most ``prefill_tokens`` prompt tokens that attend to at most ``prefill_keys`` keys (or those
  of one request), or one token of every running request.
* Logits that are not finite numbers end their own request only.
* A request that switches to another version of its policy is sampled by it from its next token on. With ``recompute``,
  it is from there bit for bit the request that starts under the newer version with these ``prefix_tokens``. With its
  cache kept, the tokens before the switch (except the last, which the newer version computes) are attended to as the
  older version computed them, as long as that cache lives. Requests that do not switch are not affected.
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
from rookery.worker.engine.native.admission import Admission, PrefillSlice
from rookery.worker.engine.native.attention import SequenceChunk
from rookery.worker.engine.native.kv_cache import KVSlot
from rookery.worker.engine.native.request import EngineRequest, SharedPrefix, StopStrings
from rookery.worker.engine.native.runner import Runner, best_runner, logits_at
from rookery.worker.engine.native.sampler import SamplingKey
from rookery.worker.memory import MemoryUse
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
"""Cached tokens that the requests of a slice attend to, a shared prompt counted for each: a GPU's prefill copies them,
layer by layer, 512 MB where a token's keys and values take 4 kB. One context of 128 k tokens, or the tails of 32 texts
after a prompt of 4,000."""

CONSECUTIVE_PREFILLS = 4
"""Slices for which running requests may wait: about a second on the 135M model with two cores."""

SCORED_ROWS = 128
"""Prompt tokens scored at once: their logits are 50 MB in float32 at 100,000 words."""


class NativeEngine:
    """See the module and ``Engine``."""

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
        """``decode`` turns token ids into text, for stop strings. ``prefill_tokens`` and ``runner`` default to those of
        the decoder's device."""
        self.decoder = decoder
        self.bank = bank
        self.limits = EngineLimits(
            max_rows, min(max_context or decoder.config.context, decoder.config.context), bank.max_rank
        )
        self.generated = 0
        """Tokens sampled since the start."""
        self.stats: defaultdict[str, float] = defaultdict(float)
        """Counters: decode_seconds, prefill_seconds, decode_steps, prefill_slices, prefill_tokens, reused_tokens (found
        in the cache instead of computed), preempted, switched."""
        self.runner = runner or best_runner(decoder, bank, kv_budget_bytes)
        self.store = self.runner.store
        self.admission = Admission(self.store, bank, max_rows, self.stats)
        self._decode = decode
        default = GPU_PREFILL_TOKENS if device.fuses(decoder.device, decoder.dtype) else PREFILL_TOKENS
        self._prefill_tokens = prefill_tokens or default
        self._prefill_keys = prefill_keys
        self._requests: dict[str, EngineRequest] = {}
        self._undrained: dict[str, EngineRequest] = {}
        """Requests with tokens, or an end, that ``drain`` has not returned."""
        self._prefills = 0
        """Prefill slices since the last decode step."""

    # --- the engine protocol ----------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        """See ``Engine``."""
        return len(self.admission.running)

    @property
    def waiting(self) -> int:
        """See ``Engine``."""
        return len(self.admission.waiting)

    def adapters(self) -> list[str]:
        """See ``Engine``."""
        return self.bank.keys()

    def has_adapter(self, key: str) -> bool:
        """See ``Engine``."""
        return key in self.bank

    def memory(self) -> dict[str, MemoryUse]:
        """See ``Engine``."""
        return {
            "kv_cache": MemoryUse(self.store.bytes, self.store.budget),
            "adapters": MemoryUse(self.bank.bytes, self.bank.budget_bytes),
        }

    def add_adapter(self, ref: protocol.AdapterRef, folder: Path) -> None:
        """See ``Engine``."""
        if ref.hash not in self.bank:
            self.bank.make_room(ref.rank)  # before reading: a caller without room tries again
            self.bank.add(ref.hash, read_adapter(folder, self.decoder.config))

    def evict_adapter(self, key: str) -> None:
        """See ``Engine``."""
        self.bank.evict(key)

    def submit(self, order: protocol.Generate) -> None:
        """See ``Engine``."""
        self._validate(order)
        request = EngineRequest(
            params=order,
            key=order.adapter.hash if order.adapter else "",
            stops=StopStrings(order.stop, self._decode),
            tokens=list(order.prefix_tokens),
            num_drained=len(order.prefix_tokens),
        )
        self._requests[order.request] = request
        if request.key:
            self.bank.pin(request.key)
        request.check_finished(self.limits.max_context)
        if request.finish:
            self._finish(request)
        else:
            self.admission.enqueue(request)

    def switch_adapter(self, request: str, ref: protocol.AdapterRef, *, recompute: bool) -> bool:
        """See ``Engine``."""
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
        if ref.hash != before.hash:  # otherwise both versions have the same weights, and the cache is valid for both
            self.bank.pin(ref.hash)
            self.admission.on_adapter_switched(held, keep=not recompute)
            self.bank.unpin(before.hash)
        return True

    def abort(self, request: str) -> None:
        """See ``Engine``."""
        held = self._requests.get(request)
        if held is not None:
            held.finish = "abort"
            self._finish(held)

    def drain(self) -> list[protocol.TokenChunk]:
        """See ``Engine``."""
        requests, self._undrained = self._undrained, {}
        self.admission.discard_adapters(self.bank.dropped)
        self.bank.dropped.clear()
        return [chunk for request in requests.values() for chunk in request.chunks()]

    def step(self) -> bool:
        """See ``Engine``."""
        with torch.no_grad():
            self.admission.admit()
            self._start_from_prefixes()
            if not self._must_decode() and self._timed("prefill_seconds", self._prefill):
                self._prefills += 1
                return True
            self._prefills = 0
            return self._timed("decode_seconds", self._decode_step)

    def _validate(self, order: protocol.Generate) -> None:
        length, context = len(order.prompt) + len(order.prefix_tokens), self.limits.max_context
        longest = min(len(order.prompt) + order.max_tokens, context)
        vocabulary = self.decoder.config.vocab
        if order.request in self._requests:
            raise ValueError(f"request {order.request} is already running")
        if not order.prompt:
            raise ValueError("the prompt is empty")
        if len(order.prompt) >= context or length > context:
            raise ValueError(f"the prompt has {length} tokens; this model's context is {context}")
        if not 0 <= order.shared_prefix <= len(order.prompt):
            raise ValueError(f"shared_prefix is {order.shared_prefix}, the prompt has {len(order.prompt)} tokens")
        if order.prompt_logprobs and order.shared_prefix:
            raise ValueError("prompt_logprobs need a prompt without a shared_prefix")
        if not all(0 <= token < vocabulary for token in (*order.prompt, *order.prefix_tokens)):
            raise ValueError(f"a token id is outside the vocabulary of {vocabulary}")
        if order.max_tokens < 1:
            raise ValueError(f"max_tokens is {order.max_tokens}; it must be at least 1")
        if not (isfinite(order.temperature) and order.temperature >= 0):
            raise ValueError(f"temperature is {order.temperature}; it must be 0 or more")
        if order.adapter is not None and order.adapter.hash not in self.bank:
            raise ValueError(f"adapter {order.adapter.hash} is not resident")
        if not self.store.fits_alone(order.shared_prefix, max(longest - order.shared_prefix, 1)):
            raise ValueError(f"a text of {longest} tokens does not fit this worker's cache ({self.store.budget} bytes)")

    # --- scheduling of slices ---------------------------------------------------------------------------------------

    def _timed(self, counter: str, work: Callable[[], bool]) -> bool:
        start = time.perf_counter()
        worked = work()
        device.finish(self.decoder.device)
        self.stats[counter] += time.perf_counter() - start
        return worked

    def _must_decode(self) -> bool:
        """Prefill and decoding alternate, so that neither a stream of long prompts nor running requests starve. Several
        prefill slices follow each other while a decode step would leave most rows out."""
        if not self._prefills:
            return False
        rows = self.admission.running
        decoding = sum(self._decodes(row) for row in rows)
        few = 2 * decoding < len(rows)
        return bool(decoding) and self._prefills >= (CONSECUTIVE_PREFILLS if few else 1)

    def _decodes(self, row: EngineRequest) -> bool:
        """Whether a decode step computes its next token."""
        return bool(row.tokens) and self._prefilled(row)

    def _prefilled(self, row: EngineRequest) -> bool:
        """Whether its whole sequence is cached, except for the last token of its answer."""
        return row.prefix_cached and row.tail_length - row.filled <= (1 if row.tokens else 0)

    # --- prefill ----------------------------------------------------------------------------------------------------

    def _start_from_prefixes(self) -> None:
        """Samples the first token of requests whose whole prompt is a complete prefix, from its logits."""
        ready = [row for row in self.admission.running if row.tail_length == 0 and row.prefix_cached]
        if ready:
            logits = [row.prefix.logits for row in ready if row.prefix is not None]
            self._sample(ready, torch.stack([line for line in logits if line is not None]))

    def _prefill(self) -> bool:
        """One slice of prompt tokens, prefixes and tails of several requests together."""
        work = self._plan_prefill().work
        if not work:
            return False
        self.runner.prepare_adapters(chunk.key for _, chunk in work)
        work.sort(key=lambda item: (self.bank.slot_order(item[1].key), item[1].key))
        hidden, last = self.runner.prefill([chunk for _, chunk in work])
        self.stats["prefill_slices"] += 1
        done: list[tuple[int, EngineRequest | SharedPrefix]] = []
        for i, (target, chunk) in enumerate(work):
            if isinstance(target, EngineRequest) and target.params.prompt_logprobs:
                self._score_prompt(target, chunk, hidden, int(last[i]) - len(chunk.tokens) + 1)
            target.filled += len(chunk.tokens)
            self.stats["prefill_tokens"] += len(chunk.tokens)
            if target.filled == (len(target.tokens) if isinstance(target, SharedPrefix) else target.tail_length):
                done.append((i, target))
        if done:
            logits = logits_at(self.decoder, hidden, last[torch.tensor([i for i, _ in done], device=hidden.device)])
            first_tokens = []
            for (_, target), line in zip(done, logits, strict=False):
                if isinstance(target, EngineRequest):
                    first_tokens.append((target, line))
                else:
                    target.logits = line.clone()
                    if not target.users:
                        self.admission.retain_prefix(target)
            if first_tokens:
                self._sample([row for row, _ in first_tokens], torch.stack([line for _, line in first_tokens]))
        return True

    def _plan_prefill(self) -> PrefillSlice:
        """The oldest request, then others of its adapter, since every adapter in a slice costs separate products,
        then the remaining ones. Then the prefixes of waiting requests: rows become free one by one, and a slice for
        each one's prompt costs twice as much as its share of one slice for several."""
        plan = PrefillSlice(self._prefill_tokens, self._prefill_keys)
        started = set()
        rows = [row for row in self.admission.running if not self._prefilled(row)]
        for row in sorted(rows, key=lambda row: row.key != rows[0].key):
            target: EngineRequest | SharedPrefix = row
            tokens: Sequence[int] = row.tail
            prefix = row.prefix
            if prefix is not None and not prefix.complete:
                if id(prefix) in started:
                    continue
                started.add(id(prefix))
                target, tokens, prefix = prefix, prefix.tokens, None
            start = target.filled
            count = min(len(tokens) - start, self._prefill_tokens)
            if plan.work and not plan.fits(count, start + (len(prefix.tokens) if prefix is not None else 0)):
                break
            plan.add(target, _chunk(row.key, tokens[start : start + count], start, target.slot, prefix))
        if plan.work:
            for prefix in self.admission.waiting_prefixes(plan.fits):
                plan.add(prefix, _chunk(prefix.key[0], prefix.tokens, 0, prefix.slot, None))
        return plan

    def _score_prompt(self, request: EngineRequest, chunk: SequenceChunk, hidden: Tensor, start: int) -> None:
        """Scores the prompt tokens that ``chunk`` predicts; its first row of ``hidden`` is ``start``."""
        wanted = [at for at in request.scored_positions if 0 <= at - 1 - chunk.start < len(chunk.tokens)]
        for first in range(0, len(wanted), SCORED_ROWS):
            part = wanted[first : first + SCORED_ROWS]
            rows = torch.tensor([start + at - 1 - chunk.start for at in part], device=hidden.device)
            logp = logits_at(self.decoder, hidden, rows).float().log_softmax(-1)
            values, tokens = logp.topk(min(request.params.top_logprobs, logp.shape[1]))
            for at, line, likely, ids in zip(part, logp, values.tolist(), tokens.tolist(), strict=False):
                logprob = float(line[request.params.prompt[at]])
                top = list(zip(ids, likely, strict=True))
                request.prompt_logprobs[at] = protocol.PromptLogprob(logprob=logprob, top=top)

    # --- decoding ---------------------------------------------------------------------------------------------------

    def _decode_step(self) -> bool:
        """One token for every request whose prompt is cached."""
        self.admission.grow_running()
        rows = [row for row in self.admission.running if self._decodes(row)]
        if not rows:
            return False
        self.runner.prepare_adapters(row.key for row in rows)
        rows.sort(key=lambda row: (self.bank.slot_order(row.key), row.key))
        chunks = [_chunk(row.key, row.tokens[-1:], row.filled, row.slot, row.prefix) for row in rows]
        for row in rows:
            row.filled += 1
        self.stats["decode_steps"] += 1
        self._sample(rows, self.runner.decode(chunks))
        return True

    def _sample(self, rows: Sequence[EngineRequest], logits: Tensor) -> None:
        """Samples the next token of each row from the first ``len(rows)`` logits."""
        keys = [SamplingKey(row.params.seed, len(row.tokens), row.params.temperature) for row in rows]
        sampled = self.runner.sample(logits, keys)
        for row, token, logprob in zip(rows, sampled.tokens, sampled.logprobs, strict=True):
            if isnan(logprob):
                row.finish, row.error = "error", "the logits are not numbers: the adapter's weights overflow"
                log.warning("logits are not numbers", extra={"request": row.params.request, "adapter": row.key})
            else:
                row.append(token, logprob, self.limits.max_context)
                self.generated += 1
            self._undrained[row.params.request] = row
            if row.finish:
                self._finish(row)

    def _finish(self, request: EngineRequest) -> None:
        """Removes a finished request; ``drain`` returns its last chunk."""
        self.admission.remove(request)
        if request.key:
            self.bank.unpin(request.key)
        del self._requests[request.params.request]
        self._undrained[request.params.request] = request


def _chunk(key: str, tokens: Sequence[int], start: int, slot: KVSlot, prefix: SharedPrefix | None) -> SequenceChunk:
    if prefix is None:
        return SequenceChunk(key, tokens, start, slot)
    return SequenceChunk(key, tokens, start, slot, prefix.slot, len(prefix.tokens))
