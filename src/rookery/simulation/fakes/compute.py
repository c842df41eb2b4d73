"""The fake compute thread of a worker: an engine and a trainer that share one machine's time.

* It computes one thing at a time: slices of decoding and of training alternate by the time that each has had. One that
  was idle is not compensated.
* Decode steps between which no request comes, ends or has to be flushed cost one event.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rookery import protocol
from rookery.scheduling.queues import TokenCounters
from rookery.simulation.fakes.engine import FakeEngine
from rookery.simulation.fakes.text import Length
from rookery.simulation.fakes.trainer import FakeOperationResult, FakeTrainer, batch_size
from rookery.spec.machine import Machine

TOLERANCE = 1e-6
"""Share of a slice: a wake-up that close to its end does not begin the next one."""


@dataclass(eq=False)
class QueuedOperation:
    op: protocol.TrainingOperation
    run: Callable[[], FakeOperationResult]
    """Applies the operation; called when its time has passed."""
    seconds: float
    """The rest of its computing time."""


class FakeCompute:
    def __init__(
        self,
        machine: Machine,
        length: Length,
        trainer: FakeTrainer,
        *,
        flush: Callable[[], Awaitable[None]],
        answer: Callable[[FakeOperationResult], object],
    ) -> None:
        """``flush`` sends the engine's tokens: it is called at once when a request has ended, else ``flush_seconds``
        after its last call. ``answer`` takes the results of operations."""
        self.engine = FakeEngine(machine, length, machine.rows)
        self.trainer = trainer
        self.decoded, self.trained = 0.0, 0.0
        """Seconds spent on decoding and prefill, and on training."""
        self.by_policy: defaultdict[str, float] = defaultdict(float)
        """Seconds of both per policy; a decoding slice is divided among its requests."""
        self.slices = 0
        """Finished ones."""
        self.flush_seconds = 0.0
        self._machine = machine
        self._flush = flush
        self._answer = answer
        self._flushed = 0.0
        self._loop = asyncio.get_running_loop()
        self._woken: asyncio.Future[None] = self._loop.create_future()
        self._switches: list[protocol.SwitchAdapter] = []
        self._releases: list[protocol.Abort] = []
        self._queues: dict[str, deque[QueuedOperation]] = {}
        """Operations by tenant, whose shares are those of the native trainer, in seconds instead of tokens."""
        self._weights: dict[str, float] = {}
        self._counters = TokenCounters(self._weights)
        self._spent = {"decode": 0.0, "train": 0.0}
        self._was_idle = {"decode": True, "train": True}
        self._stopping = False

    def wake(self) -> None:
        """Look for work again: something was added or removed."""
        if not self._woken.done():
            self._woken.set_result(None)

    def switch(self, message: protocol.SwitchAdapter) -> None:
        """Have the request continue with another adapter, which is here, after the present slice."""
        self._switches.append(message)
        self.wake()

    def release(self, message: protocol.Abort) -> None:
        """Have the request end after the present slice, to continue at another worker."""
        self._releases.append(message)
        self.wake()

    def stop(self) -> None:
        """End after the current slice."""
        self._stopping = True
        self.wake()

    # --- training operations ------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Queued operations."""
        return sum(map(len, self._queues.values()))

    def steps_ahead(self, policy: str) -> int:
        """Queued optimizer steps of a policy."""
        return sum(
            isinstance(queued.op, protocol.OptimStep) and queued.op.adam is not None and queued.op.policy == policy
            for queue in self._queues.values()
            for queued in queue
        )

    def queue(
        self,
        op: protocol.TrainingOperation,
        run: Callable[[], FakeOperationResult],
        batch: protocol.TrainingBatch | None = None,
    ) -> None:
        """Queue an operation whose state is here: ``run`` is called when its time has passed."""
        seconds = self._machine.optimizer if batch is None else self._machine.train_token * batch_size(batch)[0]
        tenant = getattr(op, "tenant", "")
        self._weights[tenant] = getattr(op, "weight", 1.0)
        if tenant not in self._queues:
            self._counters.lift(tenant)
        self._queues.setdefault(tenant, deque()).append(QueuedOperation(op, run, seconds))
        self.wake()

    def cancel(self, op: str) -> bool:
        """Delete an operation, which is not answered. Returns whether it was queued."""
        for tenant, queue in list(self._queues.items()):
            for queued in [queued for queued in queue if queued.op.op == op]:
                self._remove(tenant, queued)
                return True
        return False

    def clear(self) -> None:
        """Delete every queued operation."""
        self._queues.clear()

    def _remove(self, tenant: str, queued: QueuedOperation) -> None:
        self._queues[tenant].remove(queued)
        if not self._queues[tenant]:
            del self._queues[tenant]

    # --- slices -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Compute until stopped."""
        while not self._stopping:
            kind = self._next()
            if kind is not None:
                began = self._loop.time()
                await (self._decode() if kind == "decode" else self._train())
                self._spent[kind] += self._loop.time() - began
                self.slices += 1
            elif not self.engine.finished:  # else a finished request was claimed again: its reply is to be sent
                self._woken = self._loop.create_future()
                await self._woken
                continue
            for switch in self._switches:
                self.engine.switch(switch)
            self._switches.clear()
            for release in self._releases:
                self.engine.release(release)
            self._releases.clear()
            if self.engine.finished or self._loop.time() - self._flushed >= self.flush_seconds:
                self._flushed = self._loop.time()
                await self._flush()
                if kind is None and self.engine.finished:  # no connection: until a request is claimed on the next one
                    self._woken = self._loop.create_future()
                    await self._woken

    def _next(self) -> str | None:
        """The kind of work that is pending and had least time; one that was idle starts level with the other."""
        busy = {"decode": self.engine.busy, "train": self.pending > 0}
        pending = [kind for kind in busy if busy[kind]]
        level = min((self._spent[kind] for kind in pending if not self._was_idle[kind]), default=0.0)
        for kind in busy:
            if busy[kind] and self._was_idle[kind]:
                self._spent[kind] = level
            self._was_idle[kind] = not busy[kind]
        return min(pending, key=lambda kind: self._spent[kind], default=None)

    async def _decode(self) -> None:
        """One slice, or as many like it as follow each other until a wake-up or a flush."""
        seconds, slices = self.engine.begin()
        if slices > 1:
            due = self._flushed + self.flush_seconds - self._loop.time()
            slices = 1 if self.pending or seconds <= 0 else max(1, min(slices, math.ceil(due / seconds)))
        began = self._loop.time()
        try:
            slices = await self._spend(seconds, slices)
        except asyncio.CancelledError:  # killed: the tokens sampled since are lost
            self.engine.end(min(slices, int((self._loop.time() - began) / seconds)) if seconds else 0)
            raise
        self.decoded += slices * seconds
        running = self.engine.policies.total()
        for policy, rows in self.engine.policies.items():
            if rows:
                self.by_policy[policy] += slices * seconds * rows / running
        self.engine.end(slices)

    async def _spend(self, seconds: float, slices: int) -> int:
        """Wait for so many ``slices``, or after a wake-up for those that have begun by then. Returns their number."""
        if slices == 1:
            await asyncio.sleep(seconds)
            return 1
        began, woken = self._loop.time(), self._loop.create_future()
        self._woken = woken
        timer = self._loop.call_later(seconds * slices, self.wake)
        await woken
        timer.cancel()
        spent = self._loop.time() - began
        slices = min(slices, max(1, math.ceil(spent / seconds - TOLERANCE)))
        await asyncio.sleep(max(0.0, slices * seconds - spent))
        return slices

    async def _train(self) -> None:
        """A slice of the next tenant's oldest operation."""
        tenant = self._counters.order(self._queues)[0]
        queue = self._queues[tenant]
        queued = queue[0]
        slice_ = max(self._machine.train_slice * self._machine.train_token, self._machine.optimizer)
        seconds = min(queued.seconds, slice_)
        await asyncio.sleep(seconds)
        self.trained += seconds
        self.by_policy[queued.op.policy] += seconds
        queued.seconds -= seconds
        self._counters.charge(tenant, seconds)
        if tenant in self._queues:
            self._queues[tenant] = self._queues.pop(tenant)  # among equals the one that waited longest is next
            if queued in self._queues[tenant] and queued.seconds <= 1e-12:
                self._remove(tenant, queued)
                self._answer(queued.run())
