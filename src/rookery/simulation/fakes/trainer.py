"""A fake trainer: applies training operations to policy states that record their own history.

* Each operation names the state that it runs on: (policy, lease, parent, steps). Any other state is answered ``stale``,
  as is a step on a gradient of which a part never arrived.
* An adapter file holds an :class:`AdapterState`: a hash chain over the trajectories in each gradient and over each
  optimizer step. Equal histories, and no others, give equal artifacts; the order of a gradient's trajectories does not
  matter, nor do the workers that computed them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from rookery import protocol
from rookery.errors import RookeryError
from rookery.simulation.fakes.connection import Phase
from rookery.spec.policy import TARGETS

if TYPE_CHECKING:
    from rookery.simulation.fakes.worker import FakeWorker

ADAPTER = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
GRADIENT = "gradient.safetensors"

PolicyOperation = protocol.ForwardBackward | protocol.OptimStep
Operation = PolicyOperation | protocol.InitAdapter
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
    complete: bool = True
    """Whether every part of the gradient arrived."""
    exported: int = 0
    """Steps in the last commit."""


class FakeTrainer:
    def __init__(self, on_example: Callable[[str, Example], None] = lambda digest, example: None) -> None:
        """``on_example`` is called with each trajectory, a group of one, or datum of a batch and its digest."""
        self.trained = 0
        """Tokens trained on, prompts counted once."""
        self._states: dict[str, _PolicyState] = {}
        self._on_example = on_example

    def holds(self, op: PolicyOperation, ahead: int = 0) -> bool:
        """Whether the state that ``op`` names is here, once ``ahead`` queued steps have run."""
        state = self._states.get(op.policy)
        return state is not None and (state.lease, state.parent, len(state.steps) + ahead) == (
            op.lease, op.parent.hash, op.steps,
        )  # fmt: skip

    def may_load(self, op: PolicyOperation) -> bool:
        """Whether ``op`` is the first of its step, so that its parent may be loaded for it."""
        return isinstance(op, protocol.ForwardBackward) and not op.steps and (op.zero_grad or op.forward_only)

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

    def break_gradient(self, policy: str) -> None:
        """A part of the policy's gradient never arrived."""
        if policy in self._states:
            self._states[policy].complete = False

    def init_adapter(self, op: protocol.InitAdapter, source: bytes | None) -> FakeOperationResult:
        """A new adapter from the operation's seed, or with the weights of the ``source`` adapter file."""
        seed = f"seed {op.seed} rank {op.rank}"
        weights = source if source is not None else msgspec.json.encode(AdapterState(seed, seed))
        files = {ADAPTER: weights, CONFIG: peft_config(op.rank, op.alpha, op.targets)}
        reply = protocol.OperationDone(epoch=0, op=op.op, metrics={"grad_norm": 1.0})
        return FakeOperationResult(reply, files, op.commit)

    def apply(
        self, op: PolicyOperation, batch: protocol.TrainingBatch | None = None, gradients: Sequence[bytes] = ()
    ) -> FakeOperationResult:
        """Run ``op`` on the state that it names. ``gradients`` are files of other workers' gradients."""
        state = self._states.get(op.policy)
        if state is None or not self.holds(op):
            return FakeOperationResult(stale(op, f"policy {op.policy} is not held in that state"))
        if isinstance(op, protocol.ForwardBackward):
            assert batch is not None
            reply = self._forward_backward(op, state, batch)
            state.gradient += [digest for content in gradients for digest in msgspec.json.decode(content)]
            if not op.commit:
                return FakeOperationResult(reply)
            self.evict(op.policy)  # it trains on another worker
            return FakeOperationResult(reply, {GRADIENT: msgspec.json.encode(state.gradient)}, op.commit)
        reply = protocol.OperationDone(epoch=0, op=op.op)
        if op.adam is not None:
            if not state.complete:
                return FakeOperationResult(stale(op, "a part of the gradient never arrived"))
            state.steps.append(TrainedStep(sorted(state.gradient), f"{op.scale} {op.adam.lr}"))
            state.gradient = []
            reply.metrics = {"grad_norm": 1.0}
        if not op.commit:
            return FakeOperationResult(reply)
        state.exported = len(state.steps)
        made = AdapterState(chain_of(state.parent_chain, state.steps), state.parent_chain, state.steps)
        return FakeOperationResult(reply, {ADAPTER: msgspec.json.encode(made), CONFIG: state.config}, op.commit)

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
            if op.zero_grad:
                state.gradient, state.complete = [], True
            state.gradient += digests
        rows = sum(len(datum.targets) for datum in batch.data)
        if batch.data:
            metrics = {"loss:sum": float(rows), "tokens": float(rows)}
        else:
            metrics = {"loss:sum": 1.0, "tokens": float(loss_tokens), "entropy:sum": 2.0}
        return protocol.OperationDone(epoch=0, op=op.op, metrics=metrics, logprobs=MINUS_ONE * rows)


def chain_of(parent: str, steps: Sequence[TrainedStep]) -> str:
    """The chain of a state that took ``steps`` from one whose chain is ``parent``."""
    for step in steps:
        parent = hashlib.blake2b(f"{parent} {step.examples} {step.optimizer}".encode(), digest_size=16).hexdigest()
    return parent


def peft_config(rank: int = 16, alpha: float = 32.0, targets: Sequence[str] = TARGETS) -> bytes:
    """An adapter's configuration file."""
    modules = [f"{target}_proj" for target in targets]
    return json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": modules}).encode()


def stale(op: PolicyOperation, reason: str) -> protocol.OperationDone:
    """The reply to an operation whose state is not here."""
    return protocol.OperationDone(epoch=0, op=op.op, error=reason, category="stale")


def batch_size(batch: protocol.TrainingBatch) -> tuple[int, int]:
    """Tokens of a batch, prompts counted once, and those of them that carry a loss."""
    tokens = sum(len(group.prompt) + sum(len(member.tokens) for member in group.members) for group in batch.groups)
    tokens += sum(len(datum.tokens) for datum in batch.data)
    parts = [member for group in batch.groups for member in group.members] + batch.data
    return tokens, sum(sum(map(bool, part.weights)) for part in parts)


UPLOAD_ATTEMPTS = 3


class FakeTrainingOps:
    """The training operations of a fake worker: fetch the batch and state, queue, upload the artifact, reply.

    * A policy's operations keep their order; policies do not wait for each other.
    * After a part of a step was lost, the rest of the step is answered ``stale``.
    """

    def __init__(self, worker: FakeWorker) -> None:
        self.trainer = worker.trainer
        self._worker = worker
        self._compute = worker.compute
        self._machine = worker.machine
        self._tickets = worker.tickets
        self._faults = worker.faults
        self._policies: dict[str, tuple[asyncio.Queue[Any], asyncio.Task[None]]] = {}
        """Each policy's operations in order, and the task that prepares them."""
        self._cancelled: set[str] = set()
        self._broken: set[str] = set()
        """Policies of which a part of the present step was lost."""

    def handle(self, message: Any) -> None:
        """Act on a message about training."""
        match message:
            case protocol.ForwardBackward() | protocol.OptimStep() | protocol.VersionCommitted():
                self._enqueue(message)
            case protocol.InitAdapter():
                self._worker.spawn(self._init_adapter(message))
            case protocol.CancelOperation():
                if not self._compute.cancel(message.op):
                    self._cancelled.add(message.op)

    def disconnected(self) -> None:
        """Drop every operation: the connection that asked for them ended."""
        for policy, (_, runner) in self._policies.items():
            runner.cancel()
            self._broken.add(policy)
        self._policies.clear()
        self._compute.clear()

    def evict(self, policy: str) -> None:
        self.trainer.evict(policy)
        self._broken.discard(policy)
        if (operations := self._policies.pop(policy, None)) is not None:
            operations[1].cancel()

    def _enqueue(self, message: PolicyOperation | protocol.VersionCommitted) -> None:
        """A policy's operations keep their order; policies do not wait for each other."""
        if message.policy not in self._policies:
            queue: asyncio.Queue[Any] = asyncio.Queue()
            self._policies[message.policy] = queue, self._worker.spawn(self._prepare_all(queue))
        self._policies[message.policy][0].put_nowait(message)

    async def _prepare_all(self, queue: asyncio.Queue[Any]) -> None:
        while True:
            message = await queue.get()
            if isinstance(message, protocol.VersionCommitted):
                await self._die_in("committed")
                self.trainer.committed(message)
            else:
                await self._prepare(message)

    async def _prepare(self, op: PolicyOperation) -> None:
        """Fetch the operation's batch and state, and queue it."""
        await self._die_in("begin")
        batch: protocol.TrainingBatch | None = None
        gradients: list[bytes] = []
        if isinstance(op, protocol.ForwardBackward):
            if op.zero_grad:
                self._broken.discard(op.policy)
            content = self._tickets.open_batch(op.batch_ticket)
            seconds = self._machine.latency + len(content or b"") / self._machine.download
            await asyncio.sleep(self._faults.delay("batch", seconds))
            if content is None:
                await self._reject(op, "the batch is not available", "lost")
                return
            batch = protocol.decode(protocol.batches, content)
            for ref in op.gradients:
                await asyncio.sleep(self._faults.delay("pull", self._machine.pull()))
                try:
                    gradients.append(self._read(ref.hash, GRADIENT))
                except RookeryError as error:
                    await self._reject(op, str(error), "lost")
                    return
        if op.op in self._cancelled:
            self._cancelled.remove(op.op)
            self._broken.add(op.policy)
        elif op.policy in self._broken:
            await self._reject(op, "a part of this step did not arrive")
        elif self.trainer.holds(op, self._compute.steps_ahead(op.policy)) or (
            self.trainer.may_load(op) and await self._load_parent(op)
        ):
            self._compute.queue(op, lambda: self.trainer.apply(op, batch, gradients), batch)
        else:
            await self._reject(op, f"policy {op.policy} is not held in that state")

    async def _reject(self, op: PolicyOperation, reason: str, category: Literal["stale", "lost"] = "stale") -> None:
        self._broken.add(op.policy)
        await self.answer(FakeOperationResult(msgspec.structs.replace(stale(op, reason), category=category)))

    async def _load_parent(self, op: PolicyOperation) -> bool:
        await self._worker.wait_readable(op.parent)
        await asyncio.sleep(self._faults.delay("pull", self._machine.pull(state=True)))
        self._worker.pulled_bytes += self._machine.adapter_bytes + self._machine.state_bytes
        try:
            files = {name: self._read(op.parent.hash, name) for name in (ADAPTER, CONFIG)}
        except RookeryError:
            return False
        self.trainer.load(op.policy, op.lease, op.parent.hash, files)
        return True

    def _read(self, digest: str, name: str) -> bytes:
        return self._tickets.artifacts.path(digest, name).read_bytes()

    async def _init_adapter(self, op: protocol.InitAdapter) -> None:
        await self._die_in("begin")
        source = None
        if op.source is not None:
            await self._worker.wait_readable(op.source)
            source = self._read(op.source.hash, ADAPTER)
        self._compute.queue(op, lambda: self.trainer.init_adapter(op, source))

    async def answer(self, result: FakeOperationResult) -> None:
        """Upload what the operation made, and reply."""
        reply = result.reply
        if result.upload is not None:
            share = self._machine.push() / len(result.upload)
            written = [await self._upload(result.ticket, name, file, share) for name, file in result.upload.items()]
            shards = [shard for shard in written if shard is not None]
            if len(shards) < len(written):
                reply = protocol.OperationDone(epoch=0, op=reply.op, error="the upload was rejected", category="lost")
            else:
                reply = msgspec.structs.replace(reply, manifest=protocol.manifest_of(shards))
        await self._die_in("reply")
        await self._worker.send(reply)
        await self._die_in("replied")

    async def _upload(self, ticket: str, name: str, content: bytes, seconds: float) -> protocol.Shard | None:
        """The file's shard, or None where the service rejected it."""
        for attempt in range(UPLOAD_ATTEMPTS):
            await self._die_in("upload")
            await asyncio.sleep(self._faults.delay("upload", seconds))
            if attempt + 1 == UPLOAD_ATTEMPTS or not self._faults.upload_fails():
                break
        arrives = self._faults.corrupt(name, content)
        if (later := self._faults.repeats_upload()) is not None:
            asyncio.get_running_loop().call_later(later, self._write, ticket, name, arrives)
        if self._write(ticket, name, arrives) is None:
            return None
        return protocol.Shard(name=name, size=len(content), sha256=hashlib.sha256(content).hexdigest())

    def _write(self, ticket: str, name: str, content: bytes) -> protocol.Shard | None:
        try:
            staging = self._tickets.staging(ticket)
            return staging.write(name, [content]) if staging is not None else None
        except RookeryError:
            return None

    async def _die_in(self, phase: Phase) -> None:
        if self._faults.dies(self._worker, phase):
            await asyncio.Event().wait()  # cancelled with the process
