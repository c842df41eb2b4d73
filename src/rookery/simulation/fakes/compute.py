"""A modelled compute thread: an engine and a trainer that share one machine's time, which passes virtually.

* It computes one thing at a time: slices of decoding and of training take turns by what each has had; one that was idle
  is owed nothing for it.
* Decode steps between which nothing comes, ends or is to be sent cost one event, however many.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable

from rookery import protocol
from rookery.simulation.fakes.engine import FakeEngine
from rookery.simulation.fakes.text import Length
from rookery.simulation.fakes.trainer import Answer, FakeTrainer
from rookery.simulation.profiles import Machine

SAME = 1e-6
"""Parts of a slice: news at the very end of one are no news within the next."""


class FakeCompute:
    def __init__(
        self,
        machine: Machine,
        length: Length,
        *,
        flush: Callable[[], Awaitable[None]],
        answer: Callable[[Answer], object],
    ) -> None:
        """``flush`` sends what the engine has said: it is called at once when a request has ended, else when
        ``flush_seconds`` have passed since it last was. ``answer`` takes what the trainer has done."""
        self.engine = FakeEngine(machine, length, machine.rows)
        self.trainer = FakeTrainer(machine)
        self.decoded, self.trained = 0.0, 0.0
        """Seconds that went into decoding and prefill, and into training."""
        self.by_policy: defaultdict[str, float] = defaultdict(float)
        """Seconds of both that went into each policy; a slice of decoding is shared out over its requests."""
        self.slices = 0
        """Finished ones."""
        self.flush_seconds = 0.0
        self._flush = flush
        self._answer = answer
        self._flushed = 0.0
        self._loop = asyncio.get_running_loop()
        self._poked: asyncio.Future[None] = self._loop.create_future()
        self._switches: list[protocol.SwitchAdapter] = []
        self._turns = {"decode": 0.0, "train": 0.0}
        self._was_idle = {"decode": True, "train": True}
        self._stopping = False

    def poke(self) -> None:
        """There is news: something came, or is not wanted any more."""
        if not self._poked.done():
            self._poked.set_result(None)

    def switch(self, message: protocol.SwitchAdapter) -> None:
        """Between two slices a request goes on with another adapter, which is here."""
        self._switches.append(message)
        self.poke()

    def stop(self) -> None:
        """End after the slice at work."""
        self._stopping = True
        self.poke()

    async def run(self) -> None:
        """Until it is stopped."""
        while not self._stopping:
            turn = self._next()
            if turn is None:
                self._poked = self._loop.create_future()
                await self._poked
                continue
            began = self._loop.time()
            await (self._decode() if turn == "decode" else self._train())
            self._turns[turn] += self._loop.time() - began
            self.slices += 1
            for switch in self._switches:
                self.engine.switch(switch.request, switch.adapter, recompute=switch.recompute)
            self._switches.clear()
            if self.engine.ended or self._loop.time() - self._flushed >= self.flush_seconds:
                self._flushed = self._loop.time()
                await self._flush()

    def _next(self) -> str | None:
        """What has work and had least time; one that comes back from idleness starts level."""
        busy = {"decode": self.engine.busy, "train": self.trainer.pending > 0}
        at_work = [name for name in busy if busy[name]]
        level = min((self._turns[name] for name in at_work if not self._was_idle[name]), default=0.0)
        for name in busy:
            if busy[name] and self._was_idle[name]:
                self._turns[name] = level
            self._was_idle[name] = not busy[name]
        return min(at_work, key=lambda name: self._turns[name], default=None)

    async def _decode(self) -> None:
        """One slice, or as many like it as follow each other until there is news, or tokens to send."""
        seconds, slices = self.engine.begin()
        if slices > 1:
            due = self._flushed + self.flush_seconds - self._loop.time()
            slices = 1 if self.trainer.pending or seconds <= 0 else max(1, min(slices, math.ceil(due / seconds)))
        began = self._loop.time()
        try:
            slices = await self._spend(seconds, slices)
        except asyncio.CancelledError:  # killed: what was sampled since is lost
            self.engine.end(min(slices, int((self._loop.time() - began) / seconds)) if seconds else 0)
            raise
        self.decoded += slices * seconds
        running = self.engine.policies.total()
        for policy, rows in self.engine.policies.items():
            if rows:
                self.by_policy[policy] += slices * seconds * rows / running
        self.engine.end(slices)

    async def _spend(self, seconds: float, slices: int) -> int:
        """Let the time of so many slices pass, or of those begun when there is news; their number."""
        if slices == 1:
            await asyncio.sleep(seconds)
            return 1
        began, poked = self._loop.time(), self._loop.create_future()
        self._poked = poked
        timer = self._loop.call_later(seconds * slices, self.poke)
        await poked
        timer.cancel()
        spent = self._loop.time() - began
        slices = min(slices, max(1, math.ceil(spent / seconds - SAME)))
        await asyncio.sleep(max(0.0, slices * seconds - spent))
        return slices

    async def _train(self) -> None:
        work, seconds = self.trainer.begin()
        await asyncio.sleep(seconds)
        self.trained += seconds
        self.by_policy[work.policy] += seconds
        answer = self.trainer.end(work, seconds)
        if answer is not None:
            self._answer(answer)
