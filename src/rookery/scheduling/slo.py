"""The SLO gate: how much of a worker's next slice may be rollouts or training while clients wait for tokens.

The functions are pure. An interactive request has a deadline for its next token (:func:`deadline`). Its *slack* is the
time left when the next slice has ended, the candidate work included, and then the work that the request still needs:

    S = deadline - now - T(slice with the candidate) - T(rest of the request's own work)

Rollouts get the largest candidate that leaves every slack at 0 or more (:func:`admit`); where even none does, they get
nothing. T is a :class:`~rookery.scheduling.costs.CostTable`: measured at the start, corrected by every slice, with a
margin for its own error. After ROSE (arXiv 2605.06534), which states the two slacks; that T includes the candidate, the
least slack over all requests and the margin are additions.

:class:`CacheBudget` is the same for memory: one cut when interactive requests cross a headroom, then no growth until
the next step of a job, or for half a minute.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from rookery.errors import UserError
from rookery.scheduling.costs import CostTable, Kind

AIM = 0.75
"""Share of each objective that rollouts may use up: the rest is for requests that come while they run. In simulation,
three quarters keep nearly as many requests within their objectives as serving alone does, at 97% of the rollouts."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The work that interactive requests need for their next tokens. Times are seconds on one clock."""

    prefill: int = 0
    """Prompt tokens to be computed."""
    decoding: int = 0
    """Requests whose next token is one decode step away."""
    prefill_due: float = math.inf
    """The earliest deadline of a request that needs prompt tokens."""
    decode_due: float = math.inf
    """The earliest deadline of a request that decodes."""


def deadline(ttft: float, tpot: float, arrived: float, first: float | None, last: float, tokens: int) -> float:
    """When the next token of a request is due that has had ``tokens``, the first at ``first``, the last at ``last``.
    ``ttft`` and ``tpot`` are its objectives in seconds, of which :data:`AIM` counts; 0 is none.

    The mean time per token counts, as clients measure it: token k is due ``k * tpot`` after the first, so time that a
    request gained may be spent on others. No pause is planned longer than ``ttft``."""
    ttft, tpot = AIM * ttft, AIM * tpot
    if first is None:
        return arrived + ttft if ttft else math.inf
    due = first + tokens * tpot if tpot else math.inf
    return min(due, last + ttft) if ttft else due


def parse_objectives(text: str) -> dict[str, tuple[float, float]]:
    """``NAME=TTFT/TPOT,…`` as (TTFT, TPOT) by name. Raises :class:`UserError`."""
    found: dict[str, tuple[float, float]] = {}
    for part in filter(None, text.split(",")):
        matched = re.fullmatch(r"\s*([^=]+)=(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)\s*", part)
        if matched is None:
            raise UserError(f"slo_overrides: {part!r} is not NAME=TTFT/TPOT in milliseconds, as in chat=1000/150")
        found[matched[1]] = float(matched[2]), float(matched[3])
    return found


def slack(demand: Demand, kind: Kind, size: int, now: float, costs: CostTable) -> float:
    """The least slack in seconds if the next slice is of this kind, with ``size`` tokens in all, those of the
    interactive requests first; infinite without interactive requests."""
    rest = demand.prefill - min(demand.prefill, size) if kind == "prefill" else demand.prefill
    prefill = demand.prefill_due - costs.seconds("prefill", rest)
    decode = demand.decode_due - (0.0 if kind == "decode" else costs.seconds("decode", demand.decoding))
    return min(prefill, decode) - now - costs.seconds(kind, size)


def admit(demand: Demand, kind: Kind, own: int, candidates: int, now: float, costs: CostTable) -> int:
    """The most of ``candidates`` tokens of rollouts that may join the ``own`` tokens of interactive requests in the
    next slice."""
    low, high = 0, candidates + 1
    if slack(demand, kind, own + candidates, now, costs) >= 0:
        return candidates
    while high - low > 1:
        middle = (low + high) // 2
        if slack(demand, kind, own + middle, now, costs) >= 0:
            low = middle
        else:
            high = middle
    return low


HALF_LIFE_SECONDS = 5.0
"""Of used time: longer than a burst of chats, and short for a job that waits."""


class ClientTime:
    """The time that each tenant's clients use, of which the gate holds back other tenants' rollouts and training for no
    more than the tenant's share of the worker. Beyond it they are served as rollouts are, in turns of the tenants."""

    def __init__(self) -> None:
        self._used: defaultdict[str, float] = defaultdict(float)
        self._at = 0.0
        """When ``_used`` was decayed last."""

    def add(self, shares: Mapping[str, float], seconds: float, now: float) -> None:
        """A slice that took so long computed tokens of clients; ``shares`` are their tenants' parts of its tokens."""
        if not shares and not self._used:  # as in most slices
            return
        self._decay(now)
        for tenant, share in shares.items():
            self._used[tenant] += share * seconds

    def beyond(self, working: Collection[str], weights: Mapping[str, float], now: float) -> frozenset[str]:
        """The tenants whose clients used more than their share of the last seconds; ``working`` are the tenants that
        have work at the worker, clients' included. None for a tenant alone."""
        self._decay(now)
        window = HALF_LIFE_SECONDS / math.log(2)
        weight = {tenant: weights.get(tenant, 1.0) for tenant in working}
        shares = {tenant: own / sum(weight.values()) for tenant, own in weight.items()}
        return frozenset(tenant for tenant, share in shares.items() if self._used.get(tenant, 0.0) > share * window)

    def _decay(self, now: float) -> None:
        kept = 0.5 ** ((now - self._at) / HALF_LIFE_SECONDS)
        self._used = defaultdict(float, {name: kept * used for name, used in self._used.items() if kept * used > 1e-3})
        self._at = now


PERIOD_SECONDS = 30.0
"""A budget is cut at most once in this time, and follows the clients' use after it: longer than a burst of chats and
the pauses between them, short for a job that waits."""


class CacheBudget:
    """The tokens of the KV cache that rollouts may hold while interactive requests are there. Less than the cache by a
    headroom; halved once when interactive requests need more than the rest, further only to what they need, and then
    frozen until a job's next step, or for :data:`PERIOD_SECONDS`: rollouts may have no steps, and clients may leave."""

    def __init__(self, tokens: int, headroom: float, clock: Callable[[], float]) -> None:
        """``headroom``: the share of ``tokens`` that rollouts leave."""
        self._tokens, self._headroom = tokens, int(headroom * tokens)
        self._clock = clock
        self.rollouts = tokens - self._headroom
        self._frozen_at: dict[str, int] | None = None
        """The newest version of each policy that rollouts ran on at the cut, or that came first after it."""
        self._peak = 0
        """The most that interactive requests needed since ``_since``."""
        self._since = clock()
        self.cuts = 0

    @property
    def frozen(self) -> bool:
        return self._frozen_at is not None

    def observe(self, interactive: int) -> None:
        """Interactive requests hold so many tokens now."""
        self._peak = max(self._peak, interactive)
        if self._clock() - self._since >= PERIOD_SECONDS:
            self._renew()

    def cut(self, interactive: int, versions: Mapping[str, int]) -> bool:
        """Interactive requests need so many tokens: whether the budget was lowered. ``versions``: the newest version of
        each policy that rollouts run on."""
        self._peak = max(self._peak, interactive)
        if not self.rollouts or interactive <= self._tokens - self.rollouts:
            return False
        self.rollouts = min(max(0, self._tokens - interactive), self.rollouts // (1 if self.frozen else 2))
        if self._frozen_at is None:
            self._frozen_at, self._since = dict(versions), self._clock()
            self.cuts += 1
        return True

    def on_version(self, policy: str, version: int) -> None:
        """A rollout runs on this version. A newer one than at the cut is the next step of its job."""
        if self._frozen_at is not None and version > self._frozen_at.setdefault(policy, version):
            self._renew()

    def _renew(self) -> None:
        """Follow the use since the last time; use within the headroom needs nothing more."""
        used = self._peak if self._peak > self._headroom else 0
        self.rollouts = max(0, self._tokens - self._headroom - used)
        self._frozen_at, self._peak, self._since = None, 0, self._clock()
