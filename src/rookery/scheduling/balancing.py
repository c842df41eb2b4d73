"""Placement: which worker gets the next request, which requests move, which peers serve an adapter. Every function is
pure and deterministic: ties are decided by name.

Requests follow RLBoost's Algorithm 2 (arXiv 2510.19225).

A worker's *pending* requests are those beyond the rows that it decodes, *executing* the rest, *free* the rows that a
new request would get at once. The controller knows how many requests a worker holds, for how many of them tokens have
arrived since the worker got them, and the worker's last heartbeats (:func:`load`).

As published, with three additions:

* An instance without pending requests is a target only with a free row. So every move of a pending request lowers the
  sum of all pending requests by one, every move of executing ones lowers the sum of executing requests beyond B, and
  neither raises the other: without arrivals there are never more moves than these two sums, and none can oscillate.
* Among instances with equally many pending requests, one with a free row is chosen, then one without interactive
  requests (ROSE, arXiv 2605.06534), then the one that holds least, then the first by name: the same state gives the
  same choice.
* Θ = 0 means that nothing is ever pending by choice: a request goes to a free row or waits in the controller.

B, the saturation batch size, is learned from heartbeats (:class:`SaturationEstimator`).

Where these rules move nothing, the rollouts of a worker that trains may *merge* into another worker's batch: beside
training they get half of the time, and take half of training's (:func:`merge`; JigsawRL, arXiv 2604.23838).

Divided rollout (:func:`moves`):

A request is divided into chunks of a fixed number of tokens; at the end of each it may move (Seer, arXiv 2511.14617).
Seer keeps KV caches in a pool that all instances reach. Here a move costs a prefill of prompt and text at its target,
for which the rows there wait too. So a chunk moves only where that is less than the time it saves, in seconds of rows:

    saved = left · (T_s(n) - T_t(m + 1))        the request decodes faster
          + left · T_s(n)                       where requests wait at the source: one decodes in its place; else
          + left · (n - 1) · (T_s(n) - T_s(n - 1))                     the others there decode faster
          - left · m · (T_t(m + 1) - T_t(m))    those at the target decode slower
    cost  = (m + 1) · prefill(prompt + text)

n and m are the rows that source and target decode, T their seconds of a decode step, as they report them. ``left`` is
the number of tokens that the request is expected to have still: at least a chunk.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from sortedcontainers import SortedList

from rookery.scheduling.pipelines import Planner, SubStage, Timeline

if TYPE_CHECKING:
    from rookery.scheduling.slo import CostTable

BEATS = 2
"""Consecutive heartbeats with waiting requests that prove a shortage: a single one may fall between a request's arrival
and its first step."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A worker's figures."""

    name: str
    pending: int
    executing: int
    free: int
    """Requests that it would begin at once."""
    saturated_rows: int | None = None
    """B: the number of rows that gives nearly all of its throughput; None while unknown."""
    serving: bool = False
    """It has interactive requests: rollouts go to others first."""


@dataclass(frozen=True, slots=True)
class Move:
    """``count`` requests of ``source`` resume at ``target``: pending ones, or ``executing`` ones."""

    source: str
    target: str
    count: int
    executing: bool


@dataclass(frozen=True, slots=True)
class Tail:
    """The rollouts that a worker executes."""

    name: str
    site: Site
    steps: int
    """Decode steps until the last of them ends, as far as can be known."""
    tokens: int
    """Of prompts and texts: another worker prefills them."""
    train_seconds: float = 0.0
    """Predicted rest of the worker's training."""


def load(rows: int, held: int, decoding: int, beats: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    """``(pending, executing, free)`` of a worker with ``rows`` rows that holds ``held`` requests; tokens have arrived
    for ``decoding`` of them. ``beats`` are the (active, waiting) requests of its last :data:`BEATS` heartbeats.

    The worker decodes all requests that it holds, up to its rows. Where all those heartbeats report waiting requests
    (no memory for more, or their adapter is on its way), it decodes up to the number that was active, or ``decoding``
    if that is more: received tokens prove more than a heartbeat."""
    stuck = len(beats) == BEATS and all(waiting for _, waiting in beats)
    room = min(rows, max(decoding, *(active for active, _ in beats))) if stuck else rows
    executing = min(held, room)
    return held - executing, executing, room - executing


def order(instance: Instance) -> tuple[int, bool, bool, int, str]:
    """Sort key: the least gets the next request. Ends with the name."""
    held = instance.pending + instance.executing
    return instance.pending, not instance.free, instance.serving, held, instance.name


def select(instances: Iterable[Instance], theta: int) -> str | None:
    """Delayed join-shortest-pending: the instance with the fewest pending requests, if fewer than ``theta``; None to
    hold the request until another one completes."""
    able = [instance for instance in instances if instance.free or instance.pending < theta]
    return min(able, key=order).name if able else None


def balance(instances: Iterable[Instance], takers: Iterable[Instance]) -> Move | None:
    """Continuous load balancing: the next move, None when there is nothing to gain. ``takers`` are the instances that
    accept the requests to be moved.

    If some instance has nothing pending while another has, one request of the most-pending moves there; else if some
    instance executes nothing, max(executing − B, 0) requests of the most-executing one move, as many as find a row."""
    target = min((taker for taker in takers if taker.free and not taker.pending), key=order, default=None)
    if target is None:
        return None
    known = list(instances)
    crowded = min(known, key=_by_pending)
    if crowded.pending:
        return Move(crowded.name, target.name, 1, executing=False)
    busiest = min(known, key=_by_executing)
    if target.executing or busiest.saturated_rows is None:
        return None
    count = min(max(busiest.executing - busiest.saturated_rows, 0), target.free)
    return Move(busiest.name, target.name, count, executing=True) if count else None


def _by_pending(instance: Instance) -> tuple[int, str]:
    """Sort key: the most pending first."""
    return -instance.pending, instance.name


def _by_executing(instance: Instance) -> tuple[int, str]:
    """Sort key: the most executing first."""
    return -instance.executing, instance.name


def merge(tail: Tail, taker: Tail, costs: CostTable, planner: Planner) -> Move | None:
    """The rollouts of ``tail``, whose worker trains, resume in the batch of ``taker``, whose worker does not: if that
    lowers the predicted finish of all, prefilling included, by the planner's hysteresis. ``costs`` are the taker's."""
    rows, others = tail.site.executing, taker.site.executing
    here, both = costs.predict("decode", rows), costs.predict("decode", rows + others)
    prefill = costs.predict("prefill", tail.tokens)
    memory = tail.tokens + rows * tail.steps
    if not (rows and here and prefill) or tail.site.pending or taker.site.pending:
        return None
    if taker.site.free < rows or taker.site.free_tokens < memory:
        return None
    stages = [
        SubStage("tail", "decode tail", tail.steps * here, worker=0, move_seconds=prefill),
        SubStage("training", "train", tail.train_seconds, worker=0),
    ]
    slow = {}
    if others:
        alone = costs.predict("decode", others)
        slow["decode batch", "decode tail"] = both / alone, both / here
        stages.append(SubStage("batch", "decode batch", taker.steps * alone, worker=1))
    left = {number: stage.seconds for number, stage in enumerate(stages)}
    action = planner.choose(Timeline(stages, 2, slow, left=left, at=dict(zip(left, (0, 0, 1), strict=False))))
    return Move(tail.name, taker.name, rows, executing=True) if action == (0, 1, True) else None


class WorkerIndex:
    """The instances of one base model, sorted for :func:`select` and :func:`balance`: both decide on the instances that
    :meth:`first` and :meth:`fullest` return as they would on all of them. A change of one instance costs the logarithm
    of their number, a change that keeps its rank costs nothing.

    An instance has *tags*: a request asks for the first instance of each tag that suits it. An instance without tags
    gets no requests; requests may still be moved away from it."""

    def __init__(self) -> None:
        self._instances: dict[str, Instance] = {}
        self._tags_of: dict[str, frozenset[str]] = {}
        self._by_tag: dict[str, Any] = {}
        """By tag, the sorted keys (:func:`order`) of its instances."""
        self._pending: Any = SortedList()
        self._executing: Any = SortedList()

    def put(self, instance: Instance, tags: frozenset[str]) -> None:
        """Add the instance, or replace the one of its name."""
        name, key = instance.name, order(instance)
        old, old_tags = self._instances.get(name), self._tags_of.get(name, frozenset())
        old_key = order(old) if old is not None else None
        if old is None or key != old_key or tags != old_tags:
            self._untag(old_key, old_tags)
            for tag in tags:
                self._by_tag.setdefault(tag, SortedList()).add(key)
        for ranking, rank in ((self._pending, _by_pending), (self._executing, _by_executing)):
            if old is None or rank(old) != rank(instance):
                if old is not None:
                    ranking.remove(rank(old))
                ranking.add(rank(instance))
        self._instances[name], self._tags_of[name] = instance, tags

    def remove(self, name: str) -> None:
        """Raises KeyError for an unknown name."""
        instance = self._instances.pop(name)
        self._untag(order(instance), self._tags_of.pop(name))
        self._pending.remove(_by_pending(instance))
        self._executing.remove(_by_executing(instance))

    def _untag(self, key: tuple[int, bool, bool, int, str] | None, tags: Iterable[str]) -> None:
        for tag in tags:
            self._by_tag[tag].remove(key)
            if not self._by_tag[tag]:
                del self._by_tag[tag]

    def first(self, tags: Iterable[str]) -> list[Instance]:
        """Of each of these tags the instance that gets the next request."""
        return [self._instances[self._by_tag[tag][0][-1]] for tag in tags if tag in self._by_tag]

    def fullest(self) -> list[Instance]:
        """The most-pending and the most-executing instance; empty without instances."""
        return [self._instances[ranking[0][-1]] for ranking in (self._pending, self._executing) if ranking]


# --- saturation ------------------------------------------------------------------------------------------------------


FLAT = 0.9
"""The share of the best throughput that counts as all of it: the rest is within a machine's noise."""

STEADY = 0.25
"""Rows at the two heartbeats differ by at most this share: else the sample belongs to no batch size."""

LEAST_SECONDS = 0.2
"""Least decoding time of a sample: about ten steps."""

ENOUGH = 5
"""Samples of a half-octave before its median counts."""

KEPT = 25
"""Samples kept of each half-octave: under a minute of heartbeats."""


class SaturationEstimator:
    """The saturation of one class of workers (equal model, device and kind), learned from heartbeats.

    Two heartbeats between which about equally many rows decoded give a sample (rows, tokens per second of decoding).
    Samples are kept by half-octaves of rows, the newest of each. The medians of the half-octaves that have enough
    samples are points b₁ < b₂ < … < bₙ with rates; r₁ ≤ r₂ ≤ … ≤ rₙ is the growing curve nearest to the rates in
    squares. Then

        B = min { bᵢ : rᵢ ≥ FLAT · rₙ },  known once bₙ ≥ 2 · B

    Until twice as many rows have been seen to give hardly more, throughput may still be growing, and B is None. Medians
    remove single outliers (a prompt among the decoding rows, another load of the machine), the growing curve removes
    single outlying points. Old samples are dropped, so a class of workers that changes is learned again.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[float, float]]] = {}
        self._curve: dict[int, tuple[float, float]] = {}
        self._saturated_rows: int | None = None

    @property
    def saturated_rows(self) -> int | None:
        """B in rows, None while unknown."""
        return self._saturated_rows

    def add(self, before: int, after: int, tokens: int, seconds: float) -> None:
        """Add a sample: between two heartbeats of one worker, with ``before`` and ``after`` active rows, ``tokens``
        were sampled in ``seconds`` of decoding."""
        rows = (before + after) / 2
        if min(before, after) < 1 or abs(before - after) > STEADY * rows or seconds < LEAST_SECONDS or tokens < 1:
            return
        octave = math.floor(2 * math.log2(rows))
        samples = self._samples.setdefault(octave, deque(maxlen=KEPT))
        samples.append((rows, tokens / seconds))
        if len(samples) >= ENOUGH:
            self._curve[octave] = median(rows for rows, _ in samples), median(rate for _, rate in samples)
            self._saturated_rows = self._measure()

    def _measure(self) -> int | None:
        points = [point for _, point in sorted(self._curve.items())]
        rates = isotonic([rate for _, rate in points])
        flat = next(rows for (rows, _), rate in zip(points, rates, strict=True) if rate >= FLAT * rates[-1])
        return max(1, round(flat)) if points[-1][0] >= 2 * flat else None


def isotonic(values: list[float]) -> list[float]:
    """The sequence that never falls and is nearest to ``values`` in squares: neighbours that fall are replaced by their
    mean (pool adjacent violators; Ayer and others, 1955)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


# --- peers ------------------------------------------------------------------------------------------------------------


class PeerCandidate(NamedTuple):
    """A worker that has the adapter."""

    name: str
    near: bool
    """On the receiver's machine."""
    last_served: float
    """When it was last chosen to serve any artifact, in seconds."""


def select_peers(candidates: Iterable[PeerCandidate], limit: int) -> list[str]:
    """At most ``limit`` of them, in the order in which to ask: workers on the same machine first, then those chosen
    longest ago."""
    ranked = sorted(candidates, key=lambda peer: (not peer.near, peer.last_served, peer.name))
    return [peer.name for peer in ranked[:limit]]


# --- divided rollout -------------------------------------------------------------------------------------------------


LEAST_SAVING = 1.5
"""Saved time over cost from which a chunk moves: lengths are estimates, and costs moving averages."""


@dataclass(frozen=True, slots=True)
class Site:
    """A worker that may sample the chunk."""

    costs: CostTable
    executing: int
    pending: int = 0
    """Requests that wait there for a row or for memory."""
    free: int = 0
    """Rows that a new request would get at once."""
    free_tokens: int = 0
    """Of its KV cache."""


def moves(source: Site, target: Site, tokens: int, left: int) -> bool:
    """Whether a request of ``tokens`` tokens, its prompt included, should leave the source: the target has a row and
    memory for it, both report their costs, and the time saved is worth its prefill."""
    if not target.free or target.pending or target.free_tokens < tokens + left or left < 1:
        return False
    prefill = target.costs.predict("prefill", tokens)
    saved = left * saved_per_token(source, target)
    return prefill > 0 and saved > LEAST_SAVING * (target.executing + 1) * prefill


def saved_per_token(source: Site, target: Site) -> float:
    """Seconds of rows that the move saves for each token that is left; 0 where a worker does not report its costs."""
    n, m = max(1, source.executing), target.executing
    here, there = source.costs.predict("decode", n), target.costs.predict("decode", m + 1)
    if not (here and there):
        return 0.0
    relief = here if source.pending else (n - 1) * (here - source.costs.predict("decode", n - 1)) if n > 1 else 0.0
    return here - there + relief - m * (there - target.costs.predict("decode", m))
