"""The training operations of a worker, in the order in which they run, and their results. Each belongs to a policy, and
that to one of the trainers behind the queue: one trains LoRA, one all parameters.

Promises: tenants share the slices by the tokens that were trained for them (:mod:`rookery.scheduling.queues`), within a
tenant the policies take turns, within a policy operations run in order of arrival; whichever trainer computes them. An
operation that fails for want of memory or disk, or on wrong files, gets that result: its policy's state is deleted, and
others compute on. A worker that only generates has no trainer: its queue is empty and takes no time. The controller
sends it no operation, since the worker lacks the role ``train``; one that arrives all the same is refused.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from cachetools import LRUCache

from rookery import protocol
from rookery.errors import UserError
from rookery.scheduling.queues import TokenCounters
from rookery.scheduling.worker_time import WorkerTime
from rookery.worker.failures import SURVIVED, failure_category
from rookery.worker.memory import MemoryUse
from rookery.worker.trainer.microbatch import Queued, QueuedBatch, operation_of
from rookery.worker.transfer.http import one_line

log = logging.getLogger("rookery.worker.trainer")

OPTIMIZER_TOKENS = 64
"""An optimizer step in trained tokens, by its time."""

EXPECTED_SECONDS, EXPECTED_TENANTS = 10.0, 1000
"""A tenant is expected to send an operation like its last one for so long: about the time of a small job's step on a
busy worker. Only the newest ones of so many tenants are known."""

REFUSAL = "this worker only generates; it was started without the role train"


class Export(Protocol):
    """A snapshot of one version, not yet written: training may continue before :meth:`write` is called."""

    def write(self, folder: Path) -> list[str]:
        """Write the version's files into the existing ``folder``; returns their names, sorted. Any thread may call
        it."""
        ...


class TrainerResult(NamedTuple):
    """The answer to one operation, which is sent without a manifest unless there is an ``export``: its files are
    uploaded before."""

    done: protocol.OperationDone
    export: Export | None = None


class QueuedTrainer(Protocol):
    """Computes operations of the queue: the part of :class:`rookery.worker.trainer.base.Trainer` that it uses."""

    queue: OperationQueue[Any]

    def compute(self, batches: list[QueuedBatch]) -> None: ...

    def optimise(self, op: protocol.OptimStep) -> None: ...

    def evict(self, policy: str) -> None: ...

    def gauges(self) -> dict[str, float]: ...

    def memory(self) -> dict[str, MemoryUse]: ...


T = TypeVar("T", bound=QueuedTrainer)


class OperationQueue(Generic[T]):
    """Belongs to the trainers' thread."""

    def __init__(
        self, lora: T | None = None, full: T | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """The trainers of LoRA and of full-parameter policies, which may be one."""
        self.lora, self.full = lora, full
        self.trainers = list({id(one): one for one in (lora, full) if one is not None}.values())
        """Each once."""
        for trainer in self.trainers:
            trainer.queue = self
        self._queues: dict[str, dict[str, deque[Queued]]] = {}
        """Tenant → policy → operations."""
        self.pending = 0
        """The number of operations."""
        self._computing: dict[str, T] = {}
        """The trainer of each policy that has operations."""
        self.weights: dict[str, float] = {}
        """Shares of tenants."""
        self.time = WorkerTime(self.weights)
        """The worker's, among its tenants."""
        self._counters = TokenCounters({})
        self._slice: dict[str, float] = {}
        self._clock = clock
        self._last: LRUCache[str, tuple[int, float]] = LRUCache(EXPECTED_TENANTS)
        """By tenant, the tokens of its last batch, at least those of the step that follows, and when it came (monotonic
        seconds)."""
        self._results: list[TrainerResult] = []

    def trainer_of(self, rank: int) -> T:
        """The trainer of policies of this rank; 0: of full-parameter policies. Raises ``UserError`` if there is
        none."""
        trainer = self.lora if rank else self.full
        if trainer is None:
            raise UserError(REFUSAL)
        return trainer

    def gauges(self) -> dict[str, float]:
        """The gauges of all trainers."""
        figures: dict[str, float] = {}
        for name, value in (item for trainer in self.trainers for item in trainer.gauges().items()):
            figures[name] = figures.get(name, 0.0) + value
        return figures

    def memory(self) -> dict[str, MemoryUse]:
        """The memory of all trainers."""
        parts: dict[str, MemoryUse] = {}
        for part, use in (item for trainer in self.trainers for item in trainer.memory().items()):
            parts[part] = MemoryUse(parts[part].used + use.used if part in parts else use.used, use.budget)
        return parts

    # --- operations ---------------------------------------------------------------------------------------------------

    def put(self, queued: Queued, trainer: T) -> None:
        """Queue an operation that ``trainer`` computes."""
        op = operation_of(queued)
        self.weights[op.tenant] = op.weight
        if op.tenant not in self._queues:
            self._counters.lift(op.tenant)
        self._computing[op.policy] = trainer
        self._queues.setdefault(op.tenant, {}).setdefault(op.policy, deque()).append(queued)
        self.pending += 1
        if isinstance(queued, QueuedBatch):
            tokens = sum(group.tokens for group in queued.groups)
            self._last[op.tenant] = max(tokens, OPTIMIZER_TOKENS), self._clock()

    def remove(self, queued: Queued) -> None:
        op = operation_of(queued)
        policies = self._queues[op.tenant]
        policies[op.policy].remove(queued)
        self.pending -= 1
        if not policies[op.policy]:
            del policies[op.policy], self._computing[op.policy]
        if not policies:
            del self._queues[op.tenant]

    def cancel(self, op: str) -> None:
        """Remove an operation, which gets no result."""
        for queued in list(self.all()):
            if operation_of(queued).op == op:
                self.remove(queued)

    def lose(self, policy: str) -> None:
        """Remove the operations of a policy whose state leaves this worker."""
        for queued in list(self.of(policy)):
            self.remove(queued)
            self.finish(operation_of(queued).op, "the policy was evicted from this worker", "lost")

    def of(self, policy: str) -> deque[Queued]:
        """The operations of a policy, in order."""
        return next((policies[policy] for policies in self._queues.values() if policy in policies), deque())

    def all(self) -> Iterator[Queued]:
        return (queued for policies in self._queues.values() for queue in policies.values() for queued in queue)

    def pending_of(self, trainer: object) -> bool:
        """Whether operations that ``trainer`` computes are queued."""
        return any(one is trainer for one in self._computing.values())

    # --- slices -------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one bounded slice; False if nothing is queued."""
        heads = list(self._heads())
        if not heads:
            return False
        self._slice = {}
        first = operation_of(heads[0])
        policies = self._queues.pop(first.tenant)  # its tenant, and its policy within that, go to the end of the line
        policies[first.policy] = policies.pop(first.policy)
        self._queues[first.tenant] = policies
        trainer = self._computing[first.policy]
        if isinstance(first, protocol.OptimStep):
            self.charge(first.tenant, OPTIMIZER_TOKENS)
            self.remove(first)
            try:
                trainer.optimise(first)
            except SURVIVED as error:
                self.fail(first, trainer, error)
        else:
            batches = [queued for queued in heads if isinstance(queued, QueuedBatch)]
            trainer.compute([batch for batch in batches if self._computing[batch.op.policy] is trainer])
        return True

    def fail(self, op: protocol.StateOperation, trainer: T, error: Exception) -> None:
        """``op``, which has left the queue, ended with ``error``, one of
        :data:`~rookery.worker.failures.SURVIVED`: the state of its policy is unknown."""
        log.warning("the state of policy %s is deleted after an error", op.policy, exc_info=error)
        self.finish(op.op, one_line(error), failure_category(error))
        trainer.evict(op.policy)

    def _heads(self) -> Iterator[Queued]:
        """The first operation of every policy, alternating between tenants, that of the next tenant first."""
        tenants = self._counters.order(self._queues)
        rows = [[queue[0] for queue in self._queues[tenant].values()] for tenant in tenants]
        for column in range(max(map(len, rows), default=0)):
            yield from (row[column] for row in rows if column < len(row))

    def charge(self, tenant: str, tokens: float) -> None:
        """The tenant has these tokens of the present slice."""
        self._counters.charge(tenant, tokens / self.time.weight_within(tenant))
        self._slice[tenant] = self._slice.get(tenant, 0.0) + tokens

    def expected(self) -> dict[str, int]:
        """The tokens that each tenant without an operation here is expected to send soon."""
        since = self._clock() - EXPECTED_SECONDS
        found = {tenant: tokens for tenant, (tokens, came) in self._last.items() if came >= since}
        return {tenant: tokens for tenant, tokens in found.items() if tenant not in self._queues}

    def tenants(self) -> Collection[str]:
        return self._queues.keys()

    def tenant_tokens(self) -> Mapping[str, float]:
        """Tokens of the present slice, or the last one, by tenant."""
        return self._slice

    # --- results ------------------------------------------------------------------------------------------------------

    def add(self, done: protocol.OperationDone, export: Export | None = None) -> None:
        self._results.append(TrainerResult(done, export))

    def finish(self, op: str, error: str, category: protocol.FailureCategory) -> None:
        """The result of an operation that did not succeed."""
        self.add(protocol.OperationDone(op=op, error=error, category=category))

    def drain(self) -> list[TrainerResult]:
        """Results since the last call, in order."""
        results, self._results = self._results, []
        return results
