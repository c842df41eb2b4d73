"""The preemptible instances of a run: rented while a trace has them and they are worth it, taken back without a word,
or after a notice.

* An instance that the trace has no more is taken at once: killed, or told to drain and killed when its notice is over.
* Which one is taken is drawn from the run's seed.
* An instance costs from its start to its end, whatever it does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from rookery.simulation.availability import Trace
from rookery.simulation.workers import ModelledWorker

LOOK_SECONDS = 30.0
"""How often it is looked at how many instances are worth renting."""


@dataclass(eq=False)
class Instance:
    worker: ModelledWorker
    began: float
    leaving: bool = False
    ended: float | None = None
    preempted: bool = False

    def seconds(self, now: float) -> float:
        """Of renting, until ``now`` at most."""
        return (now if self.ended is None else self.ended) - self.began


class Market:
    def __init__(
        self,
        trace: Trace,
        make: Callable[[str], ModelledWorker],
        random: Random,
        *,
        notice: float = 0.0,
        worth: Callable[[], int | None] = lambda: None,
    ) -> None:
        """``make`` makes the worker of a new instance from its name. ``notice`` is how many seconds before its end an
        instance hears of it; 0 is not at all. ``worth`` tells how many are worth renting now; None is all."""
        self.instances: list[Instance] = []
        """All that there ever were, in the order in which they began."""
        self.history: list[tuple[float, int, int]] = []
        """(second, available, rented) at each change."""
        self._trace = trace
        self._make = make
        self._random = random
        self._notice = notice
        self._worth = worth
        self._endings: dict[asyncio.Task[None], None] = {}

    @property
    def rented(self) -> list[Instance]:
        """Those that are not told to leave."""
        return [instance for instance in self.instances if not instance.leaving]

    @property
    def preemptions(self) -> int:
        return sum(instance.preempted for instance in self.instances)

    async def run(self) -> None:
        """Follow the trace to its end."""
        now = asyncio.get_running_loop().time
        changes = [*self._trace.changes, (self._trace.seconds, 0)]
        for (since, available), (until, _) in pairwise(changes):
            await asyncio.sleep(max(0.0, since - now()))
            while True:
                self._follow(available)
                if now() >= until:
                    break
                await asyncio.sleep(min(LOOK_SECONDS, until - now()))

    def _follow(self, available: int) -> None:
        rented = self.rented
        for _ in range(len(rented) - available):
            taken = rented.pop(self._random.randrange(len(rented)))
            taken.preempted = True
            self._end(taken, drain=self._notice > 0)
        worth = self._worth()
        wanted = available if worth is None else min(available, worth)
        for _ in range(len(rented) - wanted):
            self._end(rented.pop(), drain=True)
        for _ in range(wanted - len(rented)):
            instance = Instance(self._make(f"spot-{len(self.instances)}"), asyncio.get_running_loop().time())
            self.instances.append(instance)
            instance.worker.start()
        entry = (asyncio.get_running_loop().time(), available, wanted)
        if not self.history or self.history[-1][1:] != entry[1:]:
            self.history.append(entry)

    def _end(self, instance: Instance, *, drain: bool) -> None:
        instance.leaving = True
        task = asyncio.create_task(self._leave(instance, drain))
        self._endings[task] = None
        task.add_done_callback(lambda done: self._endings.pop(done, None))

    async def _leave(self, instance: Instance, drain: bool) -> None:
        if drain:
            leaving = asyncio.create_task(instance.worker.drain())
            await asyncio.wait({leaving}, timeout=self._notice or None)
        await instance.worker.kill()
        instance.ended = asyncio.get_running_loop().time()

    async def close(self) -> None:
        """Every instance ends. Raises what went wrong in one."""
        for instance in self.rented:
            self._end(instance, drain=False)
        await asyncio.gather(*self._endings)
