"""A fake trainer: applies training operations to policy states that record their own history.

* Each operation names the state that it runs on: (policy, lease, parent, steps, operations in the gradient). Any other
  state is answered ``stale``.
* An adapter file holds an :class:`AdapterState`: a hash chain over the trajectories in each gradient and over each
  optimizer step. Equal histories, and no others, give equal artifacts; the order of a gradient's trajectories does not
  matter, nor do the workers that computed them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from rookery import protocol
from rookery.spec.policy import TARGETS

ADAPTER = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
GRADIENT = "gradient.safetensors"

Example = protocol.SharedPrefixGroup | protocol.Datum

MINUS_ONE = b"\0\0\x80\xbf"
"""The log-probability of every token in the reply to an operation on data, as a float32."""


class TrainedStep(msgspec.Struct):
    """One optimizer step."""

    examples: list[str]
    """Digests of the trajectories and data in its gradient, sorted."""
    optimizer: str
    """Its scale and learning rate."""


class AdapterState(msgspec.Struct):
    """The content of an adapter file."""

    chain: str
    """Hash over the whole history."""
    parent: str
    """``chain`` of the parent version; of a new adapter, its seed."""
    steps: list[TrainedStep] = []
    """Since the parent."""


@dataclass
class FakeOperationResult:
    """``upload`` holds the files that a commit writes under ``ticket`` before the reply is sent."""

    reply: protocol.OperationDone
    upload: dict[str, bytes] | None = None
    ticket: str = ""


@dataclass
class _PolicyState:
    lease: int
    parent: str
    """Hash of the parent's artifact."""
    parent_chain: str
    config: bytes
    steps: list[TrainedStep] = field(default_factory=list)
    """Since the parent."""
    gradient: list[str] = field(default_factory=list)
    operations: int = 0
    """Operations in the gradient."""
    exported: int = 0
    """Steps in the last commit."""


class FakeTrainer:
    def __init__(self, on_example: Callable[[str, Example], None] = lambda digest, example: None) -> None:
        """``on_example`` is called with each trajectory, a group of one, or datum of a batch and its digest."""
        self.trained = 0
        """Tokens trained on, prompts counted once."""
        self._states: dict[str, _PolicyState] = {}
        self._on_example = on_example

    def holds(self, op: protocol.StateOperation, ahead: int = 0) -> bool:
        """Whether the state that ``op`` names is here, once ``ahead`` queued steps have run."""
        state = self._states.get(op.policy)
        return state is not None and (state.lease, state.parent, len(state.steps) + ahead) == (
            op.lease, op.parent.hash, op.steps,
        )  # fmt: skip

    def may_load(self, op: protocol.StateOperation) -> bool:
        """Whether ``op`` is the first one on its parent, which may be loaded for it."""
        return not op.steps and not op.operations

    def load(self, policy: str, lease: int, parent: str, files: dict[str, bytes]) -> None:
        """Load ``policy`` from the files of version ``parent``, without a gradient."""
        try:
            chain = msgspec.json.decode(files[ADAPTER], type=AdapterState).chain
        except msgspec.MsgspecError:  # an adapter that a user uploaded
            chain = hashlib.blake2b(files[ADAPTER], digest_size=16).hexdigest()
        self._states[policy] = _PolicyState(lease, parent, chain, files[CONFIG])

    def committed(self, message: protocol.VersionCommitted) -> None:
        """The last export is a version now: the next operations name it as their parent."""
        state = self._states.get(message.policy)
        if state is not None and state.lease == message.lease and state.parent != message.ref.hash:
            taken, state.steps = state.steps[: state.exported], state.steps[state.exported :]
            state.parent, state.parent_chain = message.ref.hash, chain_of(state.parent_chain, taken)

    def evict(self, policy: str) -> None:
        self._states.pop(policy, None)

    def init_adapter(self, op: protocol.InitAdapter, source: bytes | None) -> FakeOperationResult:
        """A new adapter from the operation's seed, or with the weights of the ``source`` adapter file."""
        seed = f"seed {op.seed} rank {op.rank}"
        weights = source if source is not None else msgspec.json.encode(AdapterState(seed, seed))
        files = {ADAPTER: weights, CONFIG: peft_config(op.rank, op.alpha, op.targets)}
        reply = protocol.OperationDone(op=op.op, metrics={"grad_norm": 1.0})
        return FakeOperationResult(reply, files, op.upload)

    def apply(
        self, op: protocol.StateOperation, batch: protocol.TrainingBatch | None = None, gradients: Sequence[bytes] = ()
    ) -> FakeOperationResult:
        """Run ``op`` on the state that it names. ``gradients`` are files of other workers' gradients."""
        state = self._states.get(op.policy)
        if state is None or not self.holds(op):
            return FakeOperationResult(stale(op, f"policy {op.policy} is not held in that state"))
        changes = op.adam is not None if isinstance(op, protocol.OptimStep) else not op.forward_only
        if changes and op.operations != state.operations:
            return FakeOperationResult(stale(op, "the gradient does not contain exactly the operations of the step"))
        if isinstance(op, protocol.ForwardBackward):
            assert batch is not None
            reply = self._forward_backward(op, state, batch)
            state.gradient += [digest for content in gradients for digest in msgspec.json.decode(content)]
            if not op.upload:
                return FakeOperationResult(reply)
            self.evict(op.policy)  # it trains on another worker
            return FakeOperationResult(reply, {GRADIENT: msgspec.json.encode(state.gradient)}, op.upload)
        reply = protocol.OperationDone(op=op.op)
        if op.adam is not None:
            state.steps.append(TrainedStep(sorted(state.gradient), f"{op.scale} {op.adam.lr}"))
            state.gradient, state.operations = [], 0
            reply.metrics = {"grad_norm": 1.0}
        if not op.upload:
            return FakeOperationResult(reply)
        state.exported = len(state.steps)
        made = AdapterState(chain_of(state.parent_chain, state.steps), state.parent_chain, state.steps)
        return FakeOperationResult(reply, {ADAPTER: msgspec.json.encode(made), CONFIG: state.config}, op.upload)

    def _forward_backward(
        self, op: protocol.ForwardBackward, state: _PolicyState, batch: protocol.TrainingBatch
    ) -> protocol.OperationDone:
        total, loss_tokens = batch_size(batch)
        self.trained += total
        examples: list[Example] = [
            protocol.SharedPrefixGroup(prompt=group.prompt, members=[member])
            for group in batch.groups
            for member in group.members
        ]
        examples += batch.data
        digests = [hashlib.blake2b(msgspec.msgpack.encode(example), digest_size=12).hexdigest() for example in examples]
        for digest, example in zip(digests, examples, strict=True):
            self._on_example(digest, example)
        if not op.forward_only:
            state.gradient += digests
            state.operations += 1
        rows = sum(len(protocol.integers(datum.targets)) for datum in batch.data)
        if batch.data:
            metrics = {"loss:sum": float(rows), "tokens": float(rows)}
        else:
            metrics = {"loss:sum": 1.0, "tokens": float(loss_tokens), "entropy:sum": 2.0}
        return protocol.OperationDone(op=op.op, metrics=metrics, logprobs=MINUS_ONE * rows)


def chain_of(parent: str, steps: Sequence[TrainedStep]) -> str:
    """The chain of a state that took ``steps`` from one whose chain is ``parent``."""
    for step in steps:
        parent = hashlib.blake2b(f"{parent} {step.examples} {step.optimizer}".encode(), digest_size=16).hexdigest()
    return parent


def peft_config(rank: int = 16, alpha: float = 32.0, targets: Sequence[str] = TARGETS) -> bytes:
    """An adapter's configuration file."""
    modules = [f"{target}_proj" for target in targets]
    return json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": modules}).encode()


def stale(op: protocol.StateOperation, reason: str) -> protocol.OperationDone:
    """The reply to an operation whose state is not here."""
    return protocol.OperationDone(op=op.op, error=reason, category="stale")


def batch_size(batch: protocol.TrainingBatch) -> tuple[int, int]:
    """Tokens of a batch, prompts counted once, and those of them that carry a loss."""
    tokens = sum(len(group.prompt) + sum(len(member.tokens) for member in group.members) for group in batch.groups)
    tokens += sum(len(protocol.integers(datum.tokens)) for datum in batch.data)
    loss = sum(sum(map(bool, member.weights)) for group in batch.groups for member in group.members)
    return tokens, loss + sum(len(protocol.integers(datum.targets)) for datum in batch.data)
