"""A modelled trainer: the operations of :mod:`rookery.worker.training_ops`, each taking its stated time.

* A policy's operations run in order, each only on the state that it names: (policy, lease, parent, steps); anything
  else is answered ``stale``, as is a step on a gradient of which a part never arrived.
* A state is a chain of hashes over what was differentiated and applied, so equal histories, and no others, give equal
  artifacts.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from rookery import protocol
from rookery.simulation.profiles import Machine
from rookery.storage.artifacts import Staging

ADAPTER = "adapter_model.safetensors"
CONFIG = "adapter_config.json"

Operation = protocol.ForwardBackward | protocol.OptimStep | protocol.InitAdapter


@dataclass(eq=False)
class Work:
    """An operation in the trainer's queue."""

    op: Operation
    batch: bytes = b""
    left: float = 0.0
    """Seconds of computing."""
    tokens: int = 0
    """Of the batch, prompts once."""
    loss_tokens: int = 0

    @property
    def policy(self) -> str:
        return self.op.policy


@dataclass
class Answer:
    """``upload`` is what a commit writes under its ``ticket``; it is answered when that is at the service."""

    done: protocol.OperationDone
    upload: dict[str, bytes] | None = None
    ticket: str = ""


@dataclass
class _State:
    lease: int
    parent: str
    steps: int
    content: str
    """Names the weights and the optimizer's state."""
    config: bytes
    """The adapter's configuration, as its folder has it."""
    gradient: list[str] = field(default_factory=list)
    whole: bool = True
    exported: tuple[int, str] | None = None
    """Steps and content of the last commit."""


class FakeTrainer:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._states: dict[str, _State] = {}
        self._queues: OrderedDict[str, deque[Work]] = OrderedDict()
        self.trained = 0
        """Tokens trained on, prompts counted once."""

    @property
    def pending(self) -> int:
        return sum(map(len, self._queues.values()))

    def holds(self, op: protocol.ForwardBackward | protocol.OptimStep) -> bool:
        """Whether ``op`` can be queued now; steps that are queued count as taken."""
        state = self._states.get(op.policy)
        ahead = sum(
            isinstance(work.op, protocol.OptimStep) and work.op.adam is not None and work.policy == op.policy
            for queue in self._queues.values()
            for work in queue
        )
        return state is not None and (state.lease, state.parent, state.steps + ahead) == (
            op.lease, op.parent.hash, op.steps,
        )  # fmt: skip

    def load(self, policy: str, lease: int, parent: protocol.AdapterRef, files: dict[str, bytes]) -> None:
        """Take up ``policy`` from a version's files, without gradient."""
        self._states[policy] = _State(lease, parent.hash, 0, files[ADAPTER].decode(), files[CONFIG])

    def committed(self, message: protocol.VersionCommitted) -> None:
        """The last export is a version now, and what the next operations name."""
        state = self._states.get(message.policy)
        if state is not None and state.lease == message.lease and state.exported is not None:
            state.steps -= state.exported[0]
            state.parent = message.ref.hash

    def forget(self, policy: str) -> None:
        self._states.pop(policy, None)

    def break_gradient(self, policy: str) -> None:
        """A part of it never arrived."""
        if policy in self._states:
            self._states[policy].whole = False

    def submit(self, op: Operation, batch: bytes = b"") -> Work:
        """Queue an operation whose state is here. ``batch`` is what a :class:`wire.ForwardBackward` names."""
        work = Work(op, batch, self._machine.optimizer)
        if isinstance(op, protocol.ForwardBackward):
            work.tokens, work.loss_tokens = _size(batch)
            work.left = self._machine.train_token * work.tokens
        self._queues.setdefault(getattr(op, "tenant", ""), deque()).append(work)
        return work

    def cancel(self, op: str) -> bool:
        """Forget an operation, which is not answered; whether it was queued."""
        for tenant, queue in list(self._queues.items()):
            for work in [work for work in queue if work.op.op == op]:
                queue.remove(work)
                self.break_gradient(work.policy)
                if not queue:
                    del self._queues[tenant]
                return True
        return False

    def clear(self) -> None:
        """Forget all that is queued."""
        for queue in self._queues.values():
            for work in queue:
                self.break_gradient(work.policy)
        self._queues.clear()

    # --- slices -------------------------------------------------------------------------------------------------------

    def begin(self) -> tuple[Work, float]:
        """The next tenant's oldest operation, and the seconds of it that are computed now; call :meth:`end` then."""
        queue = next(iter(self._queues.values()))
        work = queue[0]
        return work, min(work.left, max(self._machine.train_slice * self._machine.train_token, self._machine.optimizer))

    def end(self, work: Work, seconds: float) -> Answer | None:
        """So much of it is computed; its answer where that was the last of it."""
        work.left -= seconds
        tenant = getattr(work.op, "tenant", "")
        queue = self._queues.get(tenant)
        if queue is not None:
            self._queues.move_to_end(tenant)
        if queue is None or work not in queue or work.left > 1e-12:
            return None
        queue.remove(work)
        if not queue:
            del self._queues[tenant]
        return self._carry_out(work)

    def _carry_out(self, work: Work) -> Answer:
        op = work.op
        done = protocol.OperationDone(epoch=0, op=op.op)
        if isinstance(op, protocol.InitAdapter):
            begin = op.source.hash if op.source is not None else f"seed {op.seed} rank {op.rank}"
            modules = [f"{target}_proj" for target in op.targets]
            config = {"r": op.rank, "lora_alpha": op.alpha, "target_modules": modules}
            return Answer(done, {ADAPTER: begin.encode(), CONFIG: json.dumps(config).encode()}, op.commit)
        state = self._states.get(op.policy)
        if state is None or (state.lease, state.parent, state.steps) != (op.lease, op.parent.hash, op.steps):
            return Answer(stale(op, f"policy {op.policy} is not held here at that state"))
        if isinstance(op, protocol.ForwardBackward):
            self.trained += work.tokens
            if not op.forward_only:
                if op.zero_grad:
                    state.gradient, state.whole = [], True
                state.gradient.append(hashlib.sha256(work.batch).hexdigest())
            own = float(work.loss_tokens)
            done.metrics = {"loss:sum": 0.0, "tokens": own, "entropy:sum": own, "kl:sum": 0.0}
            return Answer(done)
        if op.adam is not None:
            if not state.whole:
                return Answer(stale(op, "a part of the gradient never arrived"))
            seen = f"{state.content} {' '.join(state.gradient)} {op.scale} {op.adam.lr}"
            state.content = hashlib.sha256(seen.encode()).hexdigest()
            state.gradient, state.steps = [], state.steps + 1
            done.metrics = {"grad_norm": 1.0}
        if not op.commit:
            return Answer(done)
        state.exported = (state.steps, state.content)
        return Answer(done, {ADAPTER: state.content.encode(), CONFIG: state.config}, op.commit)


def stale(op: protocol.ForwardBackward | protocol.OptimStep, why: str) -> protocol.OperationDone:
    """The answer to an operation whose state is not here."""
    return protocol.OperationDone(epoch=0, op=op.op, error=why, category="stale")


def write(staging: Staging, files: dict[str, bytes]) -> protocol.Manifest:
    """Put a commit's files where its ticket says."""
    return protocol.manifest_of([staging.write(name, [content]) for name, content in files.items()])


def _size(batch: bytes) -> tuple[int, int]:
    """Tokens of an encoded :class:`wire.Batch`, prompts counted once, and those of them that carry a loss."""
    decoded = protocol.decode(protocol.batches, batch)
    tokens = sum(len(unit.prompt) + sum(len(member.tokens) for member in unit.members) for unit in decoded.groups)
    tokens += sum(len(datum.tokens) for datum in decoded.data)
    parts = [member for unit in decoded.groups for member in unit.members] + decoded.data
    return tokens, sum(sum(map(bool, part.weights)) for part in parts)
