"""The native engine: continuous batching over cached segments, many adapters in one batch.

Beyond what every engine promises (``engine.base``):

* Same seed, same text: the tokens of a request do not depend on the other requests, on being resumed from
  ``prefix_tokens``, on its cache being kept, retained or lost, nor on when it was admitted (bit for bit on CPU).
* Beyond ``max_rows`` or the cache's budget, requests queue, first come first served, but those of a tenant with less
  than its share of the rows. When growing texts fill the budget, the youngest beyond its tenant's share is preempted:
  it returns to the head of the queue and resumes later.
* Requests with a ``reserved`` row wait ahead of the others and preempt them in the same order.
* One ``step`` computes at most ``prefill_tokens`` prompt tokens that attend to at most ``prefill_keys`` keys (or those
  of one request), or one token of every running request, with drafts some more. Rows whose grammars take longer than
  ``mask_seconds`` together take turns.
* Where rollouts of several tenants run, a step takes as many of them, in turns, as leave each tenant its fair share
  of its speed alone (:mod:`rookery.scheduling.fair_slices`); where requests of clients leave less room, the first of
  these. A row that was left out for :data:`PATIENCE` steps goes first within its tenant, and takes a client's place.
  The tenant with the least time of the worker decides between prompts and decoding, for as many slices on end.
* Logits that are not finite numbers end their own request only.
* With a ``Speculator``, a decode step on a CPU also computes draft tokens after a row's last one. Each is kept if it is
  the token that is sampled in its place, so that texts and log-probabilities are the same bits as without drafts. A GPU
  verifies none: its kernels for one token and for several differ in the last bits.
* A request that switches to another version of its policy is sampled by it from its next token on. With ``recompute``,
  it is from there bit for bit the request that starts under the newer version with these ``prefix_tokens``. With its
  cache kept, the tokens before the switch (except the last, which the newer version computes) are attended to as the
  older version computed them, as long as that cache lives. Requests that do not switch are not affected.
* Full-parameter versions have separate weights; rows of different weights take turns (``runner.WeightSets``).
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from math import isnan, nan
from pathlib import Path

import torch
from torch import Tensor

from rookery import protocol
from rookery.errors import UserError, count_of
from rookery.scheduling.costs import Kind
from rookery.scheduling.fair_slices import ServedItems, fair_items
from rookery.scheduling.worker_time import WorkerTime
from rookery.tokenization.grammar import GrammarLost, ReplyGrammar
from rookery.worker import device
from rookery.worker.engine.base import EngineLimits
from rookery.worker.engine.native.admission import Admission, sequence_chunk
from rookery.worker.engine.native.drafts import Speculator, accepted_tokens
from rookery.worker.engine.native.runner import WeightSets
from rookery.worker.engine.request import EngineRequest, SharedPrefix, validate
from rookery.worker.engine.runner import logits_at
from rookery.worker.engine.sampler import SampledTokens, SamplingKey
from rookery.worker.engine.sequences import SequenceChunk
from rookery.worker.engine.slo_gate import SloGate
from rookery.worker.memory import MemoryUse, TooSmall
from rookery.worker.running_time import running_time

log = logging.getLogger("rookery.engine")

PREFILL_TOKENS = 512
"""Prompt tokens of one slice, padding included: from about 512 rows on, matrix products reach full speed on CPU, and
the slice takes about as long as a few decode steps."""

GPU_PREFILL_TOKENS = 4096
"""Prompt tokens of one slice on a GPU, where it must outlast the launches of its kernels."""

PREFILL_KEYS = 1 << 17
"""Cached tokens that the requests of a slice attend to, a shared prompt counted for each: a GPU's prefill copies them,
layer by layer, 512 MB where a token's keys and values take 4 kB, for the tails of 32 texts after 4,000 tokens."""

CONSECUTIVE_PREFILLS = 4
"""Slices for which running requests may wait: about a second on the 135M model with two cores."""

MASK_SECONDS = 0.05
"""Time for the masks of grammars in a decode step, less the last one: most take 0.05 ms, one of 500 optional properties
5 ms, the largest that llguidance allows 25 ms."""

PATIENCE = 16
"""Decode steps after which a row that they left out goes first, and after which prompts are computed whichever tenant
has the least time; and prefill slices after which running requests decode."""

SCORED_ROWS = 128
"""Prompt tokens scored at once: their logits are 50 MB in float32 at 100,000 words."""


@dataclass(frozen=True, kw_only=True)
class SliceLimits:
    """The most work of one ``step``."""

    prefill_tokens: int | None = None
    """Prompt tokens; None: those of the decoder's device."""
    prefill_keys: int = PREFILL_KEYS
    mask_seconds: float = MASK_SECONDS


DEFAULT_SLICES = SliceLimits()


class NativeEngine:
    def __init__(
        self,
        weights: WeightSets,
        decode: Callable[[list[int]], str],
        *,
        max_rows: int,
        max_context: int | None = None,
        slices: SliceLimits = DEFAULT_SLICES,
        speculator: Speculator | None = None,
        gate: SloGate | None = None,
    ) -> None:
        """``weights``: the model, its adapters, and the runner that computes with them. ``decode`` turns token ids into
        text, for stop strings. Without a ``speculator`` there are no drafts, without a ``gate`` no objectives."""
        self.weights, self.decoder, self.loras, self.runner = weights, weights.base, weights.loras, weights.runner
        decoder, loras, context = weights.base, weights.loras, weights.base.context
        self.limits = EngineLimits(max_rows, min(max_context or context, context), loras.max_rank)
        self.generated = 0
        self.stats: defaultdict[str, float] = defaultdict(float)
        """Counters: decode_seconds, prefill_seconds, decode_steps, prefill_slices, prefill_tokens, reused_tokens (found
        in the cache instead of computed), draft_tokens (verified), accepted_tokens (of them), preempted, switched,
        forced_slices (that nothing had been chosen for)."""
        self.store = self.runner.store
        self.gate = gate or SloGate(enabled=False)
        self.admission = Admission(self.store, loras, max_rows, self.stats, self.gate, self.weights.serves)
        self._speculator = speculator if decoder.device.type == "cpu" else None
        self._decode, self._prefill_keys, self._mask_seconds = decode, slices.prefill_keys, slices.mask_seconds
        default = GPU_PREFILL_TOKENS if device.fuses(decoder.device, decoder.dtype) else PREFILL_TOKENS
        self._prefill_tokens = slices.prefill_tokens or default
        self._requests: dict[str, EngineRequest] = {}
        self._undrained: dict[str, EngineRequest] = {}
        """Requests with tokens, or an end, that ``drain`` has not returned."""
        self._prefills = 0
        """Prefill slices since the last decode step."""
        self._decodes = 0
        """Decode steps since the last prefill slice."""
        self._time = WorkerTime({})
        self._computed: Counter[str] = Counter()
        """By tenant, the tokens of the last slice; those of clients among them, and those whose time is shared."""
        self._of_clients: Counter[str] = Counter()
        self._sharing: Counter[str] = Counter()
        self._decoded = ServedItems()
        """Tokens of rollouts in decode steps."""

    # --- the engine protocol ----------------------------------------------------------------------------------------

    @property
    def longest_text(self) -> int:
        return min(self.limits.max_context, self.store.longest)

    @property
    def active(self) -> int:
        return len(self.admission.running)

    @property
    def waiting(self) -> int:
        return len(self.admission.waiting)

    def gauges(self) -> dict[str, float]:
        return {
            "draft_tokens": self.stats["draft_tokens"],
            "draft_tokens_accepted": self.stats["accepted_tokens"],
            "forced_slices": self.stats["forced_slices"],
        }

    def tenants(self) -> dict[str, int]:
        if any(map(self.gate.is_client, self._requests.values())):
            return {}
        rows = dict.fromkeys((request.params.tenant for request in self._requests.values()), 0)
        for row in self.admission.running:
            rows[row.params.tenant] += 1
        return rows

    def sharing(self) -> Collection[str]:
        rows = (*self.admission.running, *self.admission.entitled())
        return {row.params.tenant for row in rows if self.gate.shares_time(row)}

    def tenant_tokens(self) -> Mapping[str, float]:
        return self._sharing

    def share_time(self, time: WorkerTime) -> None:
        self._time = time

    def adapters(self) -> list[str]:
        return self.loras.keys()

    def has_adapter(self, key: str) -> bool:
        return key in self.loras

    def memory(self) -> dict[str, MemoryUse]:
        kv_cache = MemoryUse(self.store.bytes, self.store.budget)
        return {"kv_cache": kv_cache, "adapters": MemoryUse(self.loras.bytes, self.loras.budget_bytes)}

    def add_adapter(self, ref: protocol.AdapterRef, folder: Path) -> None:
        self.weights.add(ref, folder)

    @property
    def free_tokens(self) -> int:
        return self.store.tokens - self.store.used_tokens

    def evict_adapter(self, key: str) -> None:
        self.loras.evict(key)

    def submit(self, generate: protocol.Generate, grammar: ReplyGrammar | None = None) -> None:
        self._validate(generate)
        request = EngineRequest.begin(generate, self._decode, grammar)
        self._requests[generate.request] = request
        if request.key:
            self.loras.acquire(request.key)
        self.gate.track(request)
        request.check_finished(self.limits.max_context)
        if request.finish:
            self._finish(request)
        else:
            self.admission.enqueue(request)
            if self._speculator is not None:
                self._speculator.begin(request)

    def switch_adapter(self, request: str, ref: protocol.AdapterRef, *, recompute: bool) -> bool:
        held = self._requests.get(request)
        if held is None:
            return False
        before = held.check_switch(ref, resident=ref.hash in self.loras)
        self.stats["switched"] += 1
        held.switch_adapter(ref)
        if ref.hash != before.hash:  # otherwise both versions have the same weights, and the cache is valid for both
            self.loras.acquire(ref.hash)
            self.admission.on_adapter_switched(held, keep=not recompute)
            self.loras.release(before.hash)
        return True

    def abort(self, request: str) -> None:
        held = self._requests.get(request)
        if held is not None:
            held.finish = "abort"
            self._finish(held)

    def close(self) -> None:
        """There is no thread and no process to end."""

    def drain(self) -> list[protocol.TokenChunk]:
        requests, self._undrained = self._undrained, {}
        self.admission.discard_adapters(self.loras.dropped)
        self.weights.clear_dropped()
        return [chunk for request in requests.values() for chunk in request.chunks()]

    def step(self) -> bool:
        """While there are requests, every step computes: the rows that were chosen, else rows of other
        weights, else, and this is counted as a forced slice, all rows, whatever the gate says."""
        self.gate.review(self._requests.values(), self._time.weights)
        with torch.no_grad():
            return self._slice() or self._other_slice()

    def _slice(self, *, turn: bool = False) -> bool:
        """Whether tokens were computed, with the weights in use or, if it is their ``turn``, the following ones."""
        for request in self.admission.admit():  # the controller moves them
            self.abort(request.params.request)
        self.weights.choose((row.key for row in self.admission.running), turn=turn)
        started = self._start_from_prefixes()
        if not self._must_decode() and self._timed("prefill", self._prefill):
            self._prefills, self._decodes = self._prefills + 1, 0
            return True
        self._prefills, self._decodes = 0, self._decodes + 1
        # where the gate leaves no rows to decode, clients' requests need their prompts
        return self._timed("decode", self._decode_step) or self._timed("prefill", self._prefill) or started > 0

    def _other_slice(self) -> bool:
        """Nothing was chosen; False only without requests."""
        if not self._requests:
            return False
        if self._any_slice():
            return True
        self.stats["forced_slices"] += 1
        self.gate.open = True
        try:
            if self._any_slice():
                return True
            log.warning("no request could compute with its cache, all are computed again: %s", self.describe())
            self.admission.reset()
            return self._any_slice()
        finally:
            self.gate.open = False

    def _any_slice(self) -> bool:
        """Whether rows of some weights computed tokens. A decode step that found no room has changed who runs."""
        sets = {self.weights.of(row.key) for row in self.admission.running}
        return any(self._slice(turn=True) for _ in range(len(sets) + 1))

    def describe(self) -> str:
        running, waiting, gate = self.admission.running, self.admission.waiting, self.gate
        decoding, prompts = sum(row.decodes for row in running), sum(not row.prefilled for row in running)
        parts = [
            f"{count_of(len(running), 'request runs', 'requests run')} ({decoding} decode, {prompts} need their"
            f" prompt), {len(waiting)} wait",
            f"{self.free_tokens} of {count_of(self.store.tokens, 'token')} of the cache are free",
            gate.describe(),
        ]
        for row in (*running[:1], *list(waiting)[:1]):
            needs = "a row or memory" if row.slot is None else "a decode step" if row.decodes else "its prompt"
            held = "" if self.weights.serves(row.key) else ", other weights are in use"
            name, params = row.params.request, row.params
            kind = "in a reserved row" if params.reserved else "a client's" if params.client else "a rollout"
            parts.append(
                f"{name} ({kind}, {len(row.tokens)} of {count_of(params.max_tokens, 'token')}) needs {needs}{held}"
            )
        return "; ".join(parts)

    def _validate(self, generate: protocol.Generate) -> None:
        context = self.limits.max_context
        longest = min(len(generate.prompt) + generate.max_tokens, context)
        if generate.request in self._requests:
            raise ValueError(f"request {generate.request} is already running")
        validate(generate, self.decoder.vocab, context)
        if generate.adapter is not None and generate.adapter.hash not in self.loras:
            raise ValueError(f"adapter {generate.adapter.hash} is not resident")
        if not self.store.fits_alone(generate.shared_prefix, max(longest - generate.shared_prefix, 1)):
            size = f"({self.store.budget} bytes)"
            raise TooSmall(f"a text of {count_of(longest, 'token')} does not fit this worker's cache {size}")

    # --- scheduling of slices ---------------------------------------------------------------------------------------

    def _timed(self, kind: Kind, work: Callable[[], int]) -> bool:
        """Whether ``work`` computed any tokens."""
        start = running_time()
        size = work()
        device.finish(self.decoder.device)
        seconds = running_time() - start
        self.stats[f"{kind}_seconds"] += seconds
        if size:
            tokens = max(1, self._computed.total())
            self.gate.rollout_share = self._sharing.total() / tokens
            self.gate.record(kind, size, seconds, {name: n / tokens for name, n in self._of_clients.items()})
        return size > 0

    def _must_decode(self) -> bool:
        """Prefill and decoding alternate, so that neither a stream of long prompts nor running requests starve. Several
        prefill slices follow each other while a decode step would leave most rows out."""
        rows = self.admission.served
        needs = self._tenants_by_need(rows)
        if (least := self._time.part_of_least(needs)) is not None:
            return self._decodes < PATIENCE if least == 0 else self._prefills >= PATIENCE
        if not self._prefills:
            return False
        decoding = sum(row.decodes for row in rows)
        few = 2 * decoding < len(rows)
        return bool(decoding) and self._prefills >= (CONSECUTIVE_PREFILLS if few else 1)

    def _tenants_by_need(self, rows: Sequence[EngineRequest]) -> list[set[str]]:
        """The tenants with rollouts among ``rows`` that decode, and those with ones that need their prompt. Empty for
        one tenant, and while requests of clients are there: those go first."""
        if len(self.tenants()) < 2:
            return []
        decoding = {row.params.tenant for row in rows if row.decodes}
        return [decoding, {row.params.tenant for row in rows if not row.prefilled}]

    def _decode_rows(self) -> list[EngineRequest]:
        """The rows of the next decode step: those of clients; then, as far as the gate admits them, as many rollouts,
        in turns of their tenants, as leave each tenant its fair share of its speed."""
        rows = sorted((row for row in self.admission.served if row.decodes), key=self._late, reverse=True)
        clients = list(filter(self.gate.is_client, rows))
        rollouts = [row for row in rows if not self.gate.is_client(row)]
        tenants = [row.params.tenant for row in rollouts]
        weights = self._time.weights_within(set(tenants))

        def cost(count: int) -> float:
            return self.gate.costs.predict("decode", len(clients) + count)

        fair = [rollouts[at] for at in fair_items(tenants, weights, cost, self._decoded.begin(tenants))]
        order = self._decoded.order([row.params.tenant for row in fair], weights)
        most = self.limits.max_rows
        room = min(most, max(most - len(clients), sum(self._late(row) > 0 for row in fair)))
        rows = self.gate.decode_rows([*clients, *(fair[at] for at in order[:room])])
        others = [row for row in rows if not self.gate.is_client(row)][:most]
        chosen = self._masked([*clients[: most - len(others)], *others])
        computed = Counter(row.params.tenant for row in chosen if not self.gate.is_client(row))
        self._decoded.end(computed, Counter(tenants) - computed, weights)
        return chosen

    def _late(self, row: EngineRequest) -> int:
        """The decode steps by which the row was left out for longer than rows may be."""
        return max(0, int(self.stats["decode_steps"]) - PATIENCE - row.sampled_at)

    # --- prefill ----------------------------------------------------------------------------------------------------

    def _start_from_prefixes(self) -> int:
        """Samples the first token of requests whose whole prompt is a complete prefix, from its logits. Returns their
        number."""
        ready = [row for row in self.admission.served if row.tail_length == 0 and row.prefix_cached]
        if ready:
            prefixes = [row.prefix for row in ready if row.prefix is not None]
            restored = list({id(prefix): prefix for prefix in prefixes if prefix.logits is None}.values())
            if restored:
                hidden = torch.stack([prefix.hidden for prefix in restored if prefix.hidden is not None])
                logits = logits_at(self.weights.decoder, hidden, torch.arange(len(restored), device=hidden.device))
                for prefix, line in zip(restored, logits, strict=False):
                    prefix.logits = line.clone()
            self._sample(ready, torch.stack([prefix.logits for prefix in prefixes if prefix.logits is not None]))
        return len(ready)

    def _prefill(self) -> int:
        """One slice of prompt tokens, prefixes and tails of several requests together. Returns its padded tokens."""
        limit = self.gate.prefill_tokens(self.admission.served, self._prefill_tokens)
        plan = self.admission.plan_prefill(limit, self._prefill_keys, self._time)
        work = plan.work
        if not work:
            return 0
        self._computed, self._of_clients, self._sharing = plan.tenants, plan.clients, plan.shared
        self.runner.prepare_adapters(chunk.key for _, chunk in work)
        work.sort(key=lambda item: (self.loras.slot_order(item[1].key), item[1].key))
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
            ends = torch.tensor([i for i, _ in done], device=hidden.device)
            logits = logits_at(self.weights.decoder, hidden, last[ends])
            first_tokens = []
            for (i, target), line in zip(done, logits, strict=False):
                if isinstance(target, EngineRequest):
                    first_tokens.append((target, line))
                else:
                    target.hidden, target.logits = hidden[last[i]].clone(), line.clone()
                    if not target.users:
                        self.admission.retain_prefix(target)
            if first_tokens:
                self._sample([row for row, _ in first_tokens], torch.stack([line for _, line in first_tokens]))
        return plan.padded

    def _score_prompt(self, request: EngineRequest, chunk: SequenceChunk, hidden: Tensor, start: int) -> None:
        """Scores the prompt tokens that ``chunk`` predicts; its first row of ``hidden`` is ``start``."""
        wanted = [at for at in request.scored_positions if 0 <= at - 1 - chunk.start < len(chunk.tokens)]
        for first in range(0, len(wanted), SCORED_ROWS):
            part = wanted[first : first + SCORED_ROWS]
            rows = torch.tensor([start + at - 1 - chunk.start for at in part], device=hidden.device)
            logp = logits_at(self.weights.decoder, hidden, rows).float().log_softmax(-1)
            values, tokens = logp.topk(min(request.params.top_logprobs, logp.shape[1]))
            scored = torch.tensor([[request.params.prompt[at]] for at in part], device=hidden.device)
            logprobs = logp[: len(part)].gather(1, scored)[:, 0]
            found = (x[: len(part)].cpu().numpy() for x in (logprobs, tokens, values))
            request.scores().put(part[0], *found)

    # --- decoding ---------------------------------------------------------------------------------------------------

    def _decode_step(self) -> int:
        """One token of every request that the gate admits, and those of its draft that are right. Returns positions."""
        self.admission.grow_running()
        rows = self._decode_rows()
        if not rows:
            return 0
        self._computed = Counter(row.params.tenant for row in rows)
        self._of_clients = Counter(row.params.tenant for row in rows if row.params.client)
        self._sharing = Counter(row.params.tenant for row in rows if self.gate.shares_time(row))
        self.runner.prepare_adapters(self.loras.lora_key(row.key) for row in rows)
        rows.sort(key=lambda row: (self.loras.slot_order(row.key), row.key))
        others = len(self._requests) > len(rows)
        drafts = self._drafts(rows, others=others)
        began = time.perf_counter()
        chunks = [
            sequence_chunk(self.loras.lora_key(row.key), [row.tokens[-1], *draft], row.filled, row.slot, row.prefix)
            for row, draft in zip(rows, drafts, strict=True)
        ]
        if any(drafts):
            logits = self.weights.decoder.compute_logits(self.runner.prefill(chunks)[0])
        else:
            logits = self.runner.decode(chunks)
        for row in rows:
            row.filled += 1
        self.stats["decode_steps"] += 1
        before = self.generated
        self._sample(rows, logits, drafts)
        positions = sum(len(chunk.tokens) for chunk in chunks)
        if self._speculator is not None:
            seconds, tokens = time.perf_counter() - began, self.generated - before
            beside = self.gate.beside
            self._speculator.observe(len(rows), positions, tokens, seconds, others=others, beside=beside)
        return positions

    def _masked(self, rows: list[EngineRequest]) -> list[EngineRequest]:
        """The ``rows`` without a grammar, and those for whose masks of tokens that may follow there is time in this
        step. The masks that were computed longest ago come first."""
        grammars = {
            row: row.logits.grammar for row in rows if row.logits is not None and row.logits.grammar is not None
        }
        late = [row for row, grammar in grammars.items() if not grammar.ready(row.tokens)]
        late.sort(key=lambda row: grammars[row].prepared)
        began = time.perf_counter()
        for count, row in enumerate(late):
            if count and time.perf_counter() - began >= self._mask_seconds:
                left = set(late[count:])
                return [row for row in rows if row not in left]
            grammars[row].prepare(row.tokens)
        return rows

    def _drafts(self, rows: Sequence[EngineRequest], *, others: bool) -> list[list[int]]:
        """The drafts of each row, with room for their keys and values in its slot; none while the gate counts rows.
        ``others``: further requests are here."""
        if self._speculator is None or self.gate.tracked:
            return [[] for _ in rows]
        context = self.limits.max_context
        limits = [row.remaining(context) - 1 if row.logits is None else 0 for row in rows]
        drafts = self._speculator.propose(rows, limits, others=others, beside=self.gate.beside)
        drafts = [draft[: self.admission.room_after(row, len(draft))] for row, draft in zip(rows, drafts, strict=True)]
        self.stats["draft_tokens"] += sum(map(len, drafts))
        return drafts

    def _sample(
        self, rows: Sequence[EngineRequest], logits: Tensor, drafts: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Samples the next token of each row from the first logits: those after its last token, then after each token
        of its draft. The first token that is not the draft's is the last that counts."""
        drafts = drafts or [()] * len(rows)
        keys = [
            SamplingKey(row.params.seed, len(row.tokens) + i, row.params.temperature)
            for row, draft in zip(rows, drafts, strict=True)
            for i in range(1 + len(draft))
        ]
        sampled = self._draw(rows, logits, keys, [1 + len(draft) for draft in drafts])
        pairs = zip(sampled.tokens, sampled.logprobs, strict=True)
        for row, draft in zip(rows, drafts, strict=True):
            verified = list(islice(pairs, 1 + len(draft)))
            accepted = accepted_tokens(draft, [token for token, _ in verified])
            for i, (token, logprob) in enumerate(verified[: 1 + accepted]):
                if row.finish:
                    break
                if isnan(logprob):
                    row.finish = "error"
                    row.error = row.error or "the logits are not numbers: the adapter's weights overflow"
                    log.warning("%s", row.error, extra={"request": row.params.request, "adapter": row.key})
                else:
                    row.append(token, logprob, self.limits.max_context)
                    self.generated += 1
                    self.gate.on_token(row)
                    row.filled += i > 0
                    self.stats["accepted_tokens"] += i > 0
                if row.finish:
                    break
            row.sampled_at = int(self.stats["decode_steps"])
            self._undrained[row.params.request] = row
            if row.finish:
                self._finish(row)

    def _draw(
        self, rows: Sequence[EngineRequest], logits: Tensor, keys: Sequence[SamplingKey], counts: Sequence[int]
    ) -> SampledTokens:
        """One token for each key; each row has ``counts`` keys. Rows whose logits are changed are drawn separately, so
        that the others are computed as without them."""
        starts = (end - count for end, count in zip(accumulate(counts), counts, strict=True))
        changed = {at: (row, row.logits) for at, row in zip(starts, rows, strict=True) if row.logits is not None}
        if not changed:
            return self.runner.sample(logits, keys)
        drawn: dict[int, tuple[int, float]] = {}
        plain = [at for at in range(len(keys)) if at not in changed]
        if plain:
            index = torch.tensor(plain if len(plain) > 1 else plain * 2, device=logits.device)  # ``batch_invariance``
            drawn |= zip(plain, self._sampled(logits.index_select(0, index), keys, plain), strict=True)
        lines: dict[int, Tensor] = {}
        for at, (row, changes) in changed.items():
            try:
                lines[at] = changes.apply(logits[at], row.tokens, row.params.temperature)
            except UserError as error:
                row.error = str(error)
            except GrammarLost:
                row.finish = "abort"  # the controller submits it again
        if lines:
            stacked = torch.stack(list(lines.values()) * (2 if len(lines) == 1 else 1))
            drawn |= zip(lines, self._sampled(stacked, keys, list(lines)), strict=True)
        answers = [drawn.get(at, (0, nan)) for at in range(len(keys))]
        for at, line in lines.items():
            row, changes = changed[at]
            if row.returns_likeliest and not isnan(answers[at][1]):
                row.top_logprobs.append(changes.likeliest(line, keys[at].temperature))
        return SampledTokens([token for token, _ in answers], [logprob for _, logprob in answers])

    def _sampled(self, logits: Tensor, keys: Sequence[SamplingKey], rows: Sequence[int]) -> Iterator[tuple[int, float]]:
        sampled = self.runner.sample(logits, [keys[at] for at in rows])
        return zip(sampled.tokens, sampled.logprobs, strict=True)

    def _finish(self, request: EngineRequest) -> None:
        """Removes a finished request; ``drain`` returns its last chunk."""
        self.admission.remove(request)
        self.gate.end(request)
        if self._speculator is not None:
            self._speculator.end(request)
        if request.key:
            self.loras.release(request.key)
        del self._requests[request.params.request]
        self._undrained[request.params.request] = request
