"""The requests that wait for a worker, by base model, and the tokens that tenants are charged for theirs.

A request is charged when it is assigned to a worker, by its prompt and the mean length of its tenant's recent results,
and corrected by what it really samples. Requests of a job whose step waits for all of its groups are served in
the order of :mod:`rookery.scheduling.rollout_order`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from rookery.clock import Clock
from rookery.controller.rollout.request import InflightRequest, SamplingRequest
from rookery.scheduling.queues import PROMPT_WEIGHT, FairQueue, PriorityQueues
from rookery.scheduling.rollout_order import Description, RolloutOrder

RECENT = 0.1
"""Weight of the newest length in a mean: it follows a change of a tenant's work within a few groups."""


class RequestQueues:
    def __init__(
        self, clock: Clock, patience: float, tenant_shares: Mapping[str, float], *, context_order: bool = False
    ) -> None:
        """``tenant_shares``: those of tenants that have another one than 1; ``patience``: see :class:`FairQueue`."""
        self._clock = clock
        self._context_order = context_order
        self.orders: dict[str, RolloutOrder[InflightRequest]] = {}
        """By job, of those that have one, until :meth:`close_job`."""
        self.models: defaultdict[str, PriorityQueues[InflightRequest]] = defaultdict(
            lambda: PriorityQueues(tenant_shares, patience=patience, order=self.orders.get)
        )
        """By base model."""
        self._probes = 0
        """The probes of jobs that ended."""
        self._lengths: dict[str, float] = {}
        """Mean length of recent results, by tenant, and of all under the empty name."""

    def __len__(self) -> int:
        return sum(map(len, self.models.values()))

    def _of(self, request: SamplingRequest) -> FairQueue[InflightRequest]:
        queues = self.models[request.model]
        return queues.interactive if request.generate.client else queues.common

    def position(self, tenant: str, job: str) -> int | None:
        """How many rollouts precede the first one of ``job`` that waits for a worker; None when none waits."""
        positions = (queue.common.position(tenant, job) for queue in self.models.values())
        return min((position for position in positions if position is not None), default=None)

    @property
    def probes(self) -> int:
        """Members that began as their group's probe."""
        return self._probes + sum(order.probes for order in self.orders.values())

    def active_orders(self) -> int:
        """Jobs whose lengths decide about their order now."""
        return sum(order.active for order in self.orders.values())

    def close_job(self, job: str) -> None:
        if (order := self.orders.pop(job, None)) is not None:
            self._probes += order.probes

    def put(self, inflight: InflightRequest, *, first: bool) -> None:
        request = inflight.request
        if self._context_order and request.synchronous and request.job not in self.orders:
            self.orders[request.job] = RolloutOrder(_describe)
        known = self._lengths.get(request.tenant, self._lengths.get("", math.inf))
        inflight.expected = min(request.generate.max_tokens, known)
        inflight.line = _line(request)
        self._of(request).put(request.tenant, inflight.line, inflight, first=first, now=self._clock.monotonic())

    def remove(self, inflight: InflightRequest) -> None:
        request = inflight.request
        self._of(request).remove(request.tenant, inflight.line, inflight)

    def remaining(self, inflight: InflightRequest, least: int) -> int:
        """Tokens that the request is expected to have still, at least ``least`` as far as its limit allows: by its
        group's estimate, where that decides about the order, else by its tenant's recent results."""
        request, tokens = inflight.request, len(inflight.result.tokens)
        order = self.orders.get(request.job)
        estimate = order.estimate(inflight) if order is not None and order.active else None
        expected = estimate if estimate is not None else self._lengths.get(request.tenant, 0.0)
        return min(request.generate.max_tokens - tokens, max(least, round(expected) - tokens))

    def on_assigned(self, inflight: InflightRequest) -> None:
        self._charge(inflight, max(inflight.expected, len(inflight.result.tokens)))

    def on_tokens(self, inflight: InflightRequest) -> None:
        self._charge(inflight, len(inflight.result.tokens))

    def on_finished(self, inflight: InflightRequest) -> None:
        """The request, which does not wait any more, has ended in whatever way."""
        if (order := self.orders.get(inflight.request.job)) is not None:
            order.finish(inflight, len(inflight.result.tokens) if inflight.result.finish else None)
        if inflight.charged:
            self._charge(inflight, len(inflight.result.tokens), settle=True)
        if inflight.result.finish:
            tokens = len(inflight.result.tokens)
            for name in (inflight.request.tenant, ""):
                self._lengths[name] = RECENT * tokens + (1 - RECENT) * self._lengths.get(name, tokens)

    def _charge(self, inflight: InflightRequest, tokens: float, *, settle: bool = False) -> None:
        """Charge the tenant for the request with so many tokens in all; less than before only to ``settle``."""
        due = PROMPT_WEIGHT * len(inflight.request.generate.prompt) + tokens
        if settle or due > inflight.charged:
            self._of(inflight.request).counters.charge(inflight.request.tenant, due - inflight.charged)
            inflight.charged = due


def _line(request: SamplingRequest) -> str:
    """Requests of one line are served one after the other: those of a job; and of clients' requests without a job those
    for one version, since a worker that may not take the first of them may take none."""
    if request.job != request.id or not request.generate.client:
        return request.job
    adapter = request.adapter
    return f"{adapter.policy}@{adapter.version}" if adapter is not None else "@"


def _describe(inflight: InflightRequest) -> Description:
    generate = inflight.request.generate
    return Description(generate.group, len(inflight.result.tokens), generate.max_tokens)
