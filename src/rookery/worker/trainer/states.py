"""Training states in memory, within a budget: held ones by policy, offloaded ones by version, and copies that are
written to files now.

* A policy that returns to training restores its offloaded state: a copy instead of a transfer. A restored state equals,
  bit for bit, the one loaded from the version's files.
* When the budget is full, offloaded states are evicted first, then held ones that nothing has used for a while, the
  least recently used first. Nothing durable is lost: a version is pulled again, and the operations since are repeated.
* A copy of the largest held state always fits: a commit waits for other commits at most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet

from rookery import protocol
from rookery.worker.memory import MemoryUse, NoRoom, require
from rookery.worker.trainer.microbatch import QueuedBatch
from rookery.worker.trainer.optim import AdapterExport, GradientExport, PolicyState

log = logging.getLogger("rookery.worker.trainer")

E = TypeVar("E", AdapterExport, GradientExport)

OTHER_STATE = "this worker holds another state of the policy"

EXPECTED_SECONDS = 60.0
"""A state is kept this long for an operation that is on its way: its batch is fetched, or its commit waits for room."""

IDLE_SECONDS = 1.0
"""A state without an operation for this long may be evicted."""

IDLE_GRADIENT_SECONDS = 5.0
"""A state with a gradient and without an operation for this long may be evicted: the gradient is then computed
again."""

IDLE_STATES = 128
"""States that nothing uses are evicted above this number even where there is room, and so are offloaded ones: nothing
tells a worker that a job has ended, so each job would leave its policy's tensors until the budget is full. More
policies than this rarely train in turn on one worker, and an evicted state is loaded again from its version."""

EXPORT_BYTES = 12
"""Bytes of a copy per weight: weight and moments in float32."""


Metrics = dict[str, float]


class StaleOperation(Exception):
    """The operation does not continue the state that is held here."""


class TrainingState(Protocol):
    """Weights, gradient and moments of a policy, wherever they are."""

    def adamw(self, adam: protocol.Adam, scale: float) -> Metrics:
        """One step on ``scale`` times the accumulated gradient, which is then cleared."""
        ...


S = TypeVar("S", bound=TrainingState)


@dataclass(eq=False)
class HeldPolicy(Generic[S]):
    """A policy in memory."""

    lease: int
    state: S
    versions: dict[str, int]
    """By the hash of each version that this state descends from, the number of steps taken when it was that version."""
    clock: Callable[[], float]
    optimizer: bool = True
    """It has the optimizer's state. One without only computes gradients for other workers."""
    steps: int = 0
    """All steps since the load."""
    exported_steps: int | None = None
    """Steps before the last export; None without one."""
    operations: int = 0
    """Operations in the gradient."""
    partial: bool = False
    """The gradient also contains a part of an operation, from its first slice to its last: no step may use it, and no
    other operation adds to it."""
    used: float = field(init=False)
    """When an operation last used it."""
    expected: bool = True
    """An operation is on its way to it."""
    reference: tuple[str, PolicyState | None] | None = None
    """The version with which KL penalties compare the policy, by its hash, and its weights if they are here."""

    def __post_init__(self) -> None:
        self.use()

    def use(self) -> None:
        """An operation uses it, or names it."""
        self.used = self.clock()

    @property
    def idle(self) -> bool:
        """Whether nothing has used it for a while."""
        patience = IDLE_GRADIENT_SECONDS if self.has_gradient else IDLE_SECONDS
        return self.clock() - self.used > (EXPECTED_SECONDS if self.expected else patience)

    @property
    def has_gradient(self) -> bool:
        """Whether it has a gradient that a step may use."""
        return self.operations > 0 and not self.partial

    def _contains(self, operations: int) -> bool:
        """Whether the gradient consists of exactly so many operations."""
        return self.operations == operations and not self.partial

    def matches(self, lease: int, parent_hash: str, steps: int) -> bool:
        """Whether this is the state ``steps`` optimizer steps after the version ``parent_hash``, under ``lease``."""
        base = self.versions.get(parent_hash)
        return self.lease == lease and base is not None and base + steps == self.steps

    def serves(self, op: protocol.StateOperation) -> bool:
        """Whether it has the parts that ``op`` needs."""
        return self.optimizer or op.is_share

    @property
    def version(self) -> str | None:
        """The version that this state equals, if it is one."""
        if not self.optimizer:
            return None
        return next((hash for hash, steps in self.versions.items() if steps == self.steps), None)

    def has_reference(self, hash: str) -> bool:
        return self.reference is not None and self.reference[0] == hash

    @property
    def reference_bytes(self) -> int:
        weights = self.reference[1] if self.reference is not None else None
        return weights.bytes if weights is not None else 0

    def begin(self, batch: QueuedBatch) -> bool:
        """Whether the next slice of ``batch`` can run on this state."""
        op = batch.op
        if not self.matches(op.lease, op.parent.hash, op.steps) or not self.serves(op):
            return False
        if op.reference is not None and not self.has_reference(op.reference.hash):
            return False
        if batch.state is None and (op.forward_only or self._contains(op.operations)):
            batch.state = self
            if not op.forward_only:
                self.partial = True
        self.use()
        return batch.state is self

    def complete(self, op: protocol.ForwardBackward) -> None:
        """All slices of ``op`` have run."""
        if not op.forward_only:
            self.operations, self.partial = op.operations + 1, False

    def optim_step(self, op: protocol.OptimStep) -> Metrics:
        """The metrics of the operation's step, if it has one. Raises :class:`StaleOperation`."""
        if not self.matches(op.lease, op.parent.hash, op.steps) or not self.serves(op):
            raise StaleOperation(OTHER_STATE)
        self.use()
        if op.adam is None:
            return {}
        if not self._contains(op.operations):
            raise StaleOperation("this worker's gradient does not contain exactly the operations of the step")
        metrics = self.state.adamw(op.adam, op.scale)
        self.operations = 0
        if metrics["skipped"]:
            log.warning("step skipped: its loss, gradient or result is not finite", extra={"tenant": op.tenant})
        else:
            self.steps += 1
        return metrics


class PolicyStates:
    """Belongs to the trainer's thread."""

    def __init__(
        self, budget_bytes: int, in_use: Callable[[str], bool], reserved: Callable[[], int], most_idle: int
    ) -> None:
        """``in_use(policy)``: whether operations of the policy are queued. ``reserved()``: bytes of copies that queued
        operations will make. At most ``most_idle`` states stay that nothing uses."""
        self.held: dict[str, HeldPolicy[PolicyState]] = {}
        self.offloaded: dict[str, AdapterExport] = {}
        """By version, the least recently used first."""
        self._budget = budget_bytes
        self._in_use = in_use
        self._reserved = reserved
        self._most_idle = most_idle
        self._exports: WeakSet[AdapterExport | GradientExport] = WeakSet()
        """Copies on their way to files."""
        self._claimed = 0
        """Bytes of the budget that another trainer takes."""

    def memory(self) -> dict[str, MemoryUse]:
        """Bytes of held states and of all others, which share one budget."""
        others = sum(export.bytes for export in (*self.offloaded.values(), *self._exports))
        states = sum(held.state.bytes + held.reference_bytes for held in self.held.values())
        return {"training_states": MemoryUse(states + others, self._budget)}

    def hold(self, policy: str, size: int, numbers: int, rank: int) -> None:
        """Make room for a state of ``size`` bytes and ``numbers`` weights; the policy's earlier state is deleted.
        Raises :class:`NoRoom`, or ``UserError`` if it can never fit."""
        self.held.pop(policy, None)
        require(f"training states of rank {rank}", size + EXPORT_BYTES * numbers, self._budget)
        self.make_room(size, copied=numbers)
        self._drop_unused()

    def _drop_unused(self) -> None:
        """Evict the least recently used states, of those that may be evicted, above their greatest number."""
        idle = sorted(
            (held.used, policy)
            for policy, held in self.held.items()
            if held.idle and not held.has_gradient and not self._in_use(policy)
        )
        for _, policy in idle[: max(0, len(idle) - self._most_idle)]:
            del self.held[policy]
        while len(self.offloaded) > self._most_idle:
            del self.offloaded[next(iter(self.offloaded))]

    def make_room(self, needed: int, keep: str = "", *, copied: int | None = None) -> None:
        """Evict until ``needed`` bytes fit; not the policy ``keep``. With ``copied``, a copy of a state of so many
        weights, and of the largest that stays held, fits too. Raises :class:`NoRoom` (and nothing changes) while what
        is in use leaves no room, ``UserError`` if ``keep`` alone never leaves it."""
        sizes = {policy: held.state.bytes + held.reference_bytes for policy, held in self.held.items()}
        copies = {policy: EXPORT_BYTES * held.state.masters.numel() for policy, held in self.held.items()}
        others = self._claimed + self._reserved() + sum(export.bytes for export in self._exports)

        def excess(*gone: str, offloaded: int) -> int:
            left = [policy for policy in sizes if policy not in gone]
            reserve = 0 if copied is None else max([EXPORT_BYTES * copied, *(copies[policy] for policy in left)])
            return sum(sizes[policy] for policy in left) + others + offloaded + needed + reserve - self._budget

        def offloaded() -> int:
            return sum(export.bytes for export in self.offloaded.values())

        require("training states", sizes.get(keep, 0) + needed + EXPORT_BYTES * (copied or 0), self._budget)
        if excess(offloaded=offloaded()) <= 0:
            return
        idle = [
            policy
            for policy, held in sorted(self.held.items(), key=lambda item: (item[1].used, item[0]))
            if held.idle and policy != keep and not self._in_use(policy)
        ]
        if excess(*idle, offloaded=0) > 0:
            raise NoRoom
        while self.offloaded and excess(offloaded=offloaded()) > 0:
            del self.offloaded[next(iter(self.offloaded))]
        for count, policy in enumerate(idle):
            if excess(*idle[:count], offloaded=offloaded()) > 0:
                del self.held[policy]

    def claim(self, size: int) -> None:
        """Another trainer takes ``size`` bytes of the budget, instead of those that it took before. Raises as
        :meth:`make_room`; then it takes none."""
        self._claimed = 0
        self.make_room(size, copied=0)
        self._claimed = size

    def track(self, export: E) -> E:
        """Count ``export`` as long as it exists."""
        self._exports.add(export)
        return export
