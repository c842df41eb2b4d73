"""The training half of a modelled worker: states that are histories, batches and uploads over a network that fails.

It dies, where the plan has it, exactly before, within and after the things whose order matters.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from tests.chaos.history import ADAPTER, State, chained, traces

from rookery import protocol
from rookery.errors import RookeryError
from rookery.spec.policy import TARGETS

if TYPE_CHECKING:
    from tests.chaos.workers import Process

CONFIG = "adapter_config.json"
UPLOAD_ATTEMPTS = 3
_PEFT = json.dumps({"r": 16, "lora_alpha": 32.0, "target_modules": [f"{t}_proj" for t in TARGETS]}).encode()


@dataclass
class _Policy:
    """A policy's state in the trainer."""

    lease: int
    parent: str
    """Hash of the parent's artifact."""
    chain: str
    """The parent's chain."""
    steps: list[list[str]] = field(default_factory=list)
    gradient: list[str] = field(default_factory=list)


class Trainer:
    def __init__(self, process: Process) -> None:
        self._process = process
        self._site = process.site
        self._states: dict[str, _Policy] = {}
        self._queue: deque[Any] = deque()
        self._busy = False
        self._round = 0
        """Which connection's operations are at work: those of an earlier one end."""
        self.done = 0

    @property
    def waiting(self) -> int:
        return len(self._queue) + self._busy

    def handle(self, message: Any) -> None:
        match message:
            case protocol.ForwardBackward() | protocol.OptimStep() | protocol.InitAdapter():
                self._queue.append(message)
                self._next()
            case protocol.VersionCommitted():
                self._die("committed")
                chain = self._chain(message.ref.hash)
                if chain is not None:
                    self._states[message.policy] = _Policy(message.lease, message.ref.hash, chain)
            case protocol.CancelOperation():
                self._queue = deque(op for op in self._queue if op.op != message.op)

    def forget(self, policy: str) -> None:
        self._states.pop(policy, None)

    def drop(self) -> None:
        """The connection is over: so is every operation."""
        self._queue.clear()
        self._busy = False
        self._round += 1

    # --- one operation after the other --------------------------------------------------------------------------------

    def _next(self) -> None:
        if self._queue and not self._busy:
            self._busy = True
            self._later(self._begin, self._queue.popleft())

    def _later(self, call: Any, *arguments: Any) -> None:
        seconds = self._site.dice.about(self._site.plan.operation)
        self._process.after(seconds, self._if_still, self._round, call, arguments)

    def _if_still(self, round: int, call: Any, arguments: tuple[Any, ...]) -> None:
        if round != self._round:
            return
        if self._process.frozen:
            self._process.after(1.0, self._if_still, round, call, arguments)
        else:
            call(*arguments)

    def _begin(self, op: Any) -> None:
        if self._die("begun"):
            return
        match op:
            case protocol.InitAdapter():
                chain = f"seed {op.seed} {op.policy}"
                self._upload(op, State(chained(chain, []), chain), {}, UPLOAD_ATTEMPTS)
            case protocol.ForwardBackward():
                self._forward(op)
            case protocol.OptimStep():
                self._step(op)

    def _answer(self, op: Any, **fields: Any) -> None:
        """It is done."""
        if self._die("answering"):
            return
        self._process.say(protocol.OperationDone(epoch=0, op=op.op, **fields))
        self.done += 1
        self._busy = False
        if not self._die("answered"):
            self._next()

    def _die(self, phase: str) -> bool:
        if self._site.calm or not self._site.dice.chance(self._site.plan.phase_deaths):
            return False
        self._site.events.note("dies", self._process.instance, phase)
        self._process.kill(told=self._site.dice.chance(0.5))
        return True

    # --- states -------------------------------------------------------------------------------------------------------

    def _chain(self, digest: str) -> str | None:
        """Of a committed state, fetched; None where it could not be."""
        controller = self._site.controller
        if controller is None:
            return None
        try:
            content = controller.tickets.artifacts.path(digest, ADAPTER).read_bytes()
        except RookeryError:
            return None
        return msgspec.json.decode(content, type=State).chain

    def _hold(self, op: Any) -> _Policy | None:
        state = self._states.get(op.policy)
        if state is not None and (state.lease, state.parent, len(state.steps)) == (op.lease, op.parent.hash, op.steps):
            return state
        what = "stale"
        if not op.steps and not isinstance(op, protocol.OptimStep):
            chain = self._chain(op.parent.hash)
            if chain is not None:
                state = self._states[op.policy] = _Policy(op.lease, op.parent.hash, chain)
                return state
            what = "lost"
        self._answer(op, error=f"{op.policy} is not held", category=what)
        return None

    def _forward(self, op: protocol.ForwardBackward) -> None:
        controller = self._site.controller
        content = controller.tickets.open_batch(op.batch_ticket) if controller is not None else None
        if content is None:
            self._answer(op, error="no such offer", category="lost")
            return
        state = self._hold(op)
        if state is None:
            return
        batch = protocol.decode(protocol.batches, content)
        digest = hashlib.blake2b(content, digest_size=12).hexdigest()
        self._site.history.trained_batches[digest] = traces(batch)
        if op.zero_grad:
            state.gradient.clear()
        state.gradient.append(digest)
        tokens = sum(len(member.tokens) for unit in batch.groups for member in unit.members)
        self._answer(op, metrics={"loss:sum": 1.0, "tokens": float(tokens), "entropy:sum": 1.0})

    def _step(self, op: protocol.OptimStep) -> None:
        state = self._hold(op)
        if state is None:
            return
        if op.adam is not None:
            state.steps = [*state.steps, list(state.gradient)]
            state.gradient.clear()
        metrics = {"grad_norm": 1.0}
        if op.commit:
            made = State(chained(state.chain, state.steps), state.chain, state.steps)
            self._upload(op, made, metrics, UPLOAD_ATTEMPTS)
        else:
            self._answer(op, metrics=metrics)

    # --- uploads ------------------------------------------------------------------------------------------------------

    def _upload(self, op: Any, state: State, metrics: dict[str, float], attempts: int) -> None:
        files = {ADAPTER: msgspec.json.encode(state), CONFIG: _PEFT}
        shards = [protocol.Shard(name=n, size=len(c), sha256=hashlib.sha256(c).hexdigest()) for n, c in files.items()]
        self._put(op, list(files.items()), protocol.manifest_of(shards), metrics, attempts)

    def _put(
        self,
        op: Any,
        files: list[tuple[str, bytes]],
        manifest: protocol.Manifest,
        metrics: dict[str, float],
        attempts: int,
    ) -> None:
        """The next file over HTTP."""
        if self._die("uploading"):
            return
        if not files:
            self._answer(op, metrics=metrics, manifest=manifest)
            return
        (name, content), *rest = files
        dice, plan = self._site.dice, self._site.plan
        sent = content
        if not self._site.calm:
            if attempts > 1 and dice.chance(plan.upload_failures):
                self._later(self._put, op, files, manifest, metrics, attempts - 1)
                return
            if name == ADAPTER and dice.chance(plan.upload_corrupt):
                sent = content.replace(b'"chain":"', b'"chain":"0', 1)
            if dice.chance(plan.upload_twice):
                self._process.after(dice.about(plan.operation), self._write, op.commit, name, sent)
        if not self._write(op.commit, name, sent):
            self._answer(op, error="the upload was refused", category="lost")
            return
        self._later(self._put, op, rest, manifest, metrics, attempts)

    def _write(self, ticket: str, name: str, content: bytes) -> bool:
        """One PUT; whether the service took it."""
        controller = self._site.controller
        staging = controller.tickets.staging(ticket) if controller is not None else None
        if staging is None:
            return False
        try:
            staging.write(name, [content])
        except RookeryError as refused:
            self._site.events.note("refused", type(refused).__name__)
            return False
        return True
