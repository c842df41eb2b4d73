"""The SLO gate of an engine: applies :mod:`rookery.scheduling.slo` to its requests, and counts the result.

* A client's request with an objective (``ttft_ms``, ``tpot_ms``) is tracked from its arrival to its end. While there is
  none, every method returns at once and everything runs.
* The gate holds back rollouts and training for clients' requests, and never one of those. Some of these have no
  ``reserved`` row: the service sends them to run in rows of rollouts, in their order.
* It holds nothing back for a request that only other rows' ends can help: no rows for one that waits when rows have
  been given, no training for one that waits behind rollouts.
* It holds nothing back for the requests of tenants whose clients used more than their share of the worker, while others
  have work there (:class:`rookery.scheduling.slo.ClientTime`): they take turns with them, as rollouts do.
* The gate decides which rows a slice computes, never their tokens.
* It belongs to the thread of the engine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rookery.errors import count_of
from rookery.scheduling.costs import CostTable, Kind
from rookery.scheduling.slo import CacheBudget, ClientTime, Demand, admit, deadline, slack
from rookery.worker import device
from rookery.worker.engine.request import EngineRequest
from rookery.worker.engine.runner import Runner
from rookery.worker.engine.sequences import SequenceChunk

KV_HEADROOM = 0.2
"""Share of the KV cache that rollouts leave while interactive requests are there. When those need more, the cache of
rollouts is halved, once in half a minute or until a job's next step, and the rollouts beyond it move to other
workers (:class:`rookery.scheduling.slo.CacheBudget`)."""

LEAST_PREFILL = 16
"""Prompt tokens for which a slice of rollouts is worth its fixed cost."""

SLACK_SECONDS = 1.0
"""Time over which the least slack is reported: about a heartbeat."""

EXPECT_SECONDS = 5.0
"""After a client's request has ended, the next one is expected for so long, about the pause between turns of a chat: a
slice of rollouts beside training takes up to twice as long as in turns, and the next request waits for its end."""

LONGEST_SECONDS = 4.0
"""The start measures no slice that is expected to take longer: a worker must not be minutes late with a large model on
few cores."""

WARM_SECONDS = 0.5
"""A slice that took so long is not repeated: the first one of its size takes some milliseconds longer."""

TRAIN_PASSES = 3
"""Forward passes that a training slice costs until one was measured: a backward pass costs two."""


@dataclass
class TrackedRequest:
    """A client's request with objectives; monotonic times in seconds."""

    request: EngineRequest
    arrived: float
    first: float | None = None
    """When its first token was sampled."""
    last: float = 0.0
    tokens: int = 0
    """Tokens sampled here."""

    @property
    def due(self) -> float:
        params = self.request.params
        ttft, tpot = params.ttft_ms / 1000, params.tpot_ms / 1000
        return deadline(ttft, tpot, self.arrived, self.first, self.last, self.tokens)

    @property
    def tenant(self) -> str:
        return self.request.params.tenant

    @property
    def runs(self) -> bool:
        """Whether it has a row: it computes when others do not. One that waits after the rows are given gets a row when
        another one ends, and no sooner."""
        return self.request.slot is not None

    @property
    def helped(self) -> bool:
        """Whether it gets its token sooner without training: it runs, or waits ahead of rollouts."""
        return self.request.params.reserved or self.runs

    @property
    def prefill(self) -> int:
        """Tokens to be computed before a decode step, 0 if the next step decodes it."""
        left = uncomputed(self.request)
        return 0 if left <= bool(self.request.tokens) else left

    def within(self) -> bool:
        """Whether it has met its objectives so far."""
        params = self.request.params
        if self.first is None:
            return False
        late = params.ttft_ms and self.first - self.arrived > params.ttft_ms / 1000
        slow = params.tpot_ms and self.last - self.first > (self.tokens - 1) * params.tpot_ms / 1000
        return not (late or slow)


class SloGate:
    """``costs`` is corrected by every slice."""

    def __init__(
        self, *, enabled: bool = True, headroom: float = KV_HEADROOM, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``headroom``: the share of the KV cache that rollouts leave to interactive requests."""
        self.costs = CostTable()
        """The costs of slices in turns, with the cores that they had."""
        self.beside = False
        """Whether the engine computes beside training."""
        self.last: tuple[Kind, int, float] = "decode", 0, 0.0
        """Kind, tokens and seconds of the engine's last slice."""
        self.tracked: dict[str, TrackedRequest] = {}
        """By the request's name."""
        self._left_at = -math.inf
        """When the last tracked request ended."""
        self.met = self.ended = 0
        """Requests that ended within their objectives, and all that ended."""
        self.training_waits = False
        """A training slice waits for slack: rollouts add nothing to decode steps, so that it is there soon."""
        self.rollout_share = 1.0
        """Share of the tokens of the last slice whose time the tenants share."""
        self.beyond: frozenset[str] = frozenset()
        """Tenants whose clients used more than their share."""
        self.trained: Collection[str] = ()
        """Tenants whose policies are in training."""
        self._used = ClientTime()
        self.open = False
        """Every row may compute: the engine sets it for a slice that would be empty otherwise."""
        self._enabled = enabled
        self._headroom = headroom
        self.budget: CacheBudget | None = None
        """The budget of the rollouts' part of the KV cache."""
        self.clock = clock
        self._slacks: list[tuple[float, float]] = []

    def cache_budget(self, tokens: int) -> CacheBudget | None:
        """The rollouts' budget in a KV cache of so many tokens; None if the gate is off."""
        self.budget = CacheBudget(tokens, self._headroom, self.clock) if self._enabled else None
        return self.budget

    @property
    def cache_cuts(self) -> int:
        return self.budget.cuts if self.budget is not None else 0

    def gauges(self) -> dict[str, float]:
        """Figures for the operator, as an engine's."""
        return {"slo_requests": self.ended, "slo_requests_within": self.met, "slo_cache_cuts": self.cache_cuts}

    def record(self, kind: Kind, size: int, seconds: float, clients: Mapping[str, float]) -> None:
        """A slice of the engine took so long; ``clients``: the parts of its tokens that were of tenants' clients."""
        self.last = kind, size, seconds
        self._used.add(clients, seconds, self.clock())
        if not self.beside:
            self.costs.record(kind, size, seconds)

    # --- requests -----------------------------------------------------------------------------------------------------

    def track(self, request: EngineRequest) -> None:
        """The engine has the request now."""
        params = request.params
        if self._enabled and params.client and (params.ttft_ms or params.tpot_ms):
            self.tracked[params.request] = TrackedRequest(request, self.clock())

    def set_arrival(self, name: str, arrived: float) -> None:
        """The request came to the worker before the engine had it, at this monotonic time."""
        if (held := self.tracked.get(name)) is not None:
            held.arrived = arrived

    def on_token(self, request: EngineRequest) -> None:
        if (held := self.tracked.get(request.params.request)) is not None:
            held.last = self.clock()
            held.first = held.last if held.first is None else held.first
            held.tokens += 1

    def end(self, request: EngineRequest) -> None:
        held = self.tracked.pop(request.params.request, None)
        if held is None:
            return
        self._left_at = self.clock()
        if request.finish in ("stop", "length"):
            self.ended += 1
            self.met += held.within()

    @property
    def expects_clients(self) -> bool:
        """Whether a request is tracked, or was :data:`EXPECT_SECONDS` ago."""
        return bool(self.tracked) or self.clock() - self._left_at < EXPECT_SECONDS

    # --- decisions ----------------------------------------------------------------------------------------------------

    def review(self, requests: Iterable[EngineRequest], weights: Mapping[str, float]) -> None:
        """Before a slice: which tenants' clients, of all ``requests`` in the engine, used more than their share."""
        self.beyond = frozenset()
        if self.tracked:
            working = {request.params.tenant for request in requests}.union(self.trained)
            self.beyond = self._used.beyond(working, weights, self.clock())

    def is_client(self, row: EngineRequest) -> bool:
        """Whether it is a client's request that the gate never holds back."""
        return row.params.client and row.params.tenant not in self.beyond

    def shares_time(self, row: EngineRequest) -> bool:
        """Whether the tenants share the time of its tokens. While a request has objectives, that of clients counts
        for nobody."""
        return not (self.tracked and self.is_client(row))

    def decode_rows(self, rows: list[EngineRequest]) -> list[EngineRequest]:
        """The rows among ``rows`` that the next decode step computes: clients' and the first ones of the others."""
        if not self.tracked or self.open:
            return rows
        own = [row for row in rows if self.is_client(row)]
        others = [row for row in rows if not self.is_client(row)]
        served = any(held.runs and held.tenant not in self.beyond for held in self.tracked.values())
        count = 0 if self.training_waits and served else self._admit("decode", len(own), len(others))
        return own + others[:count]

    def prefill_tokens(self, rows: Sequence[EngineRequest], limit: int) -> int:
        """The tokens of the next prefill slice, padding included: what the clients' among ``rows`` need, at most
        ``limit``, and as much more as rollouts may have."""
        if not self.tracked or self.open:
            return limit
        clients = [row.prefill_target for row in rows if self.is_client(row) and not row.prefilled]
        missing = {id(target): target.missing for target in clients}  # a shared prompt counts once
        own = min(limit, max(missing.values(), default=0) * len(missing))
        others = self._admit("prefill", own, limit - own)
        return own + others if own or others >= min(LEAST_PREFILL, limit) else 0

    def allows_training(self, spent: float = 0.0) -> bool:
        """Whether a training slice may run now, or the rest of one that has taken ``spent`` seconds."""
        left = max(0.0, self.costs.seconds("train", 1) - spent)
        demand = self.demand(held for held in self.tracked.values() if held.helped)
        allowed = (
            all(held.tenant in self.beyond for held in self.tracked.values())
            or slack(demand, "train", 0, self.clock(), self.costs) >= left
        )
        self.training_waits = not allowed
        return allowed

    def demand(self, tracked: Iterable[TrackedRequest]) -> Demand:
        """The demand of these requests, but for those of tenants beyond their share."""
        counted = [held for held in tracked if held.tenant not in self.beyond]
        waiting = [held for held in counted if held.prefill]
        decoding = [held for held in counted if not held.prefill]
        return Demand(
            _prompt_tokens(waiting),
            len(decoding),
            min((held.due for held in waiting), default=math.inf),
            min((held.due for held in decoding), default=math.inf),
        )

    def _admit(self, kind: Kind, own: int, candidates: int) -> int:
        demand, now = self.demand(held for held in self.tracked.values() if held.runs), self.clock()
        count = admit(demand, kind, own, candidates, now, self.costs)
        self._slacks = [(at, left) for at, left in self._slacks if at > now - SLACK_SECONDS]
        self._slacks.append((now, slack(demand, kind, own + count, now, self.costs)))
        return count

    def describe(self) -> str:
        """For the log: its requests and their next deadlines."""
        demand, now = self.demand(self.tracked.values()), self.clock()
        dues = {"first": demand.prefill_due, "next": demand.decode_due}
        tokens = [f"a {kind} token is due in {due - now:.1f} s" for kind, due in dues.items() if math.isfinite(due)]
        waits = ["training waits for slack"] if self.training_waits else []
        waits += [f"clients of {tenant} are beyond their share" for tenant in sorted(self.beyond)]
        return ", ".join([f"the gate tracks {count_of(len(self.tracked), 'request')}", *tokens, *waits])

    def least_slack(self) -> float:
        """The least slack of the last second, in seconds; 0 if there was no decision."""
        since = self.clock() - SLACK_SECONDS
        return min((left for at, left in self._slacks if at > since and math.isfinite(left)), default=0.0)


def uncomputed(request: EngineRequest) -> int:
    """Tokens of prompt and answer that are not cached."""
    cached = request.filled + (request.prefix.filled if request.prefix is not None else 0)
    return len(request.params.prompt) + len(request.tokens) - cached


def _prompt_tokens(waiting: Sequence[TrackedRequest]) -> int:
    """Tokens to be computed for all of them; a shared prompt counts once."""
    shared: dict[tuple[str, int], int] = {}
    tokens = 0
    for held in waiting:
        row, needed = held.request, held.prefill
        prompt = row.params.shared_prefix - (row.prefix.filled if row.prefix is not None else 0)
        key = (row.key, row.shared_hash)
        tokens += needed - (prompt if key in shared else 0)
        shared[key] = prompt
    return tokens


def measure_costs(
    costs: CostTable,
    runner: Runner,
    where: torch.device,
    max_rows: int,
    prefill_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Fill the table before the first request: slices of several sizes on an empty cache, each the second of two where
    they are short. Beyond the last one that is measured, costs grow in proportion. The cost of a training slice is
    guessed from them."""
    shapes: list[tuple[Kind, int, int]] = [("decode", rows, 1) for rows in (1, 4, 16, max_rows)]
    shapes += [("prefill", 1, tokens) for tokens in (16, 128, prefill_tokens)]
    for kind, rows, tokens in shapes:
        if costs.predict(kind, rows * tokens) > LONGEST_SECONDS:
            continue
        slots = [slot for _ in range(rows) if (slot := runner.store.allocate(tokens)) is not None]
        if len(slots) == rows <= max_rows:
            chunks = [SequenceChunk("", [0] * tokens, 0, slot) for slot in slots]
            runner.prepare_adapters([""])
            with torch.no_grad():
                for _ in range(2):
                    began = clock()
                    (runner.decode if kind == "decode" else runner.prefill)(chunks)
                    device.finish(where)
                    seconds = clock() - began
                    if seconds > WARM_SECONDS:
                        break
            costs.record(kind, rows * tokens, seconds, first=True)
        for slot in slots:
            runner.store.free(slot)
    if (passed := costs.predict("prefill", prefill_tokens)) > 0:
        costs.record("train", 1, TRAIN_PASSES * passed, first=True)
