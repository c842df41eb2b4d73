"""A service in virtual time: the shipped controller, its database and its artifacts, and peers whose every piece of
work takes a stated time.

* :class:`TimedWorker` computes one thing at a time, as a worker does: decode steps of at most its rows, and slices of
  training that go round the tenants; the two share its time by what each has had.
* :class:`TimedHost` runs environments that answer after a time of their own, side by side.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from peers import ScriptedHost, ScriptedWorker, Service
from rookery import wire
from rookery.controller.links import LinkClosed
from rookery.simulation.clock import InlineLedger, VirtualClock, run
from rookery.simulation.links import MemoryLink

# What a two-core machine takes for the model of 135M parameters, in seconds.
DECODE_STEP, DECODE_ROW = 0.012, 0.0008
"""A decode step, and what each of its rows adds."""
TRAIN_TOKEN, TRAIN_SLICE, OPTIMIZER = 0.001, 0.05, 0.05
"""A token of a training batch; how finely training goes round the tenants (a worker packs several into one slice); an
optimizer step, or the making of an adapter."""

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Nothing here has to outlive a crash: where the system has a folder in memory, no disk is waited for."""


# --- peers ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Work:
    """A training operation on its way: seconds of computing that are left."""

    policy: str
    left: float
    over: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class TimedWorker(ScriptedWorker):
    """Every text has its full length, so that equal requests are equal work."""

    def __init__(self, service: Service, name: str = "worker", *, rows: int = 64) -> None:
        super().__init__(
            service.controller.serve_worker, service.controller.tickets, name, chunk=1, max_rows=rows, shortest=1 << 20
        )
        self.decoded, self.trained = 0.0, 0.0
        """Seconds that went into each."""
        self.computed: Counter[str] = Counter()
        """Seconds of both that went into each policy; a decode step is shared out over its rows."""
        self._queues: OrderedDict[str, deque[_Work]] = OrderedDict()
        self._clocks = {"decode": 0.0, "train": 0.0}
        self._was_idle = {"decode": True, "train": True}
        self._slices = 0

    async def join(self, *arguments: Any, **named: Any) -> TimedWorker:
        await super().join(*arguments, **named)
        self._tasks.append(asyncio.create_task(self._beat()))
        return self

    async def _beat(self) -> None:
        with suppress(LinkClosed):
            while True:
                training = sum(map(len, self._queues.values()))
                await self.say(
                    wire.Beat(
                        epoch=0, progress=self._slices, active=len(self.active), waiting=0, training=training,
                        adapters=0, generated=0, trained=0, decode_seconds=self.decoded, train_seconds=self.trained,
                        memory_bytes=0,
                    )
                )  # fmt: skip
                await asyncio.sleep(1.0)

    async def _train(self, op: Any) -> None:
        work = _Work(op.policy, OPTIMIZER)
        if isinstance(op, wire.ForwardBackward):
            content = self.tickets.offered(op.batch_ticket)
            assert content is not None
            units = wire.decode(wire.batches, content).units
            tokens = sum(len(unit.prompt) + sum(len(member.tokens) for member in unit.members) for unit in units)
            work.left = TRAIN_TOKEN * tokens
        self._queues.setdefault(getattr(op, "tenant", ""), deque()).append(work)
        self._work.set()
        await work.over
        await super()._train(op)

    async def _generate(self) -> None:
        """The compute thread."""
        with suppress(LinkClosed):
            while True:
                await self._work.wait()
                self._work.clear()
                while (turn := self._next()) is not None:
                    began = asyncio.get_running_loop().time()
                    await (self._decode() if turn == "decode" else self._slice())
                    self._clocks[turn] += asyncio.get_running_loop().time() - began
                    self._slices += 1

    def _next(self) -> str | None:
        """What has work and had least time; one that comes back from idleness starts level."""
        busy = {"decode": bool(self.active), "train": bool(self._queues)}
        at_work = [name for name in busy if busy[name]]
        level = min((self._clocks[name] for name in at_work if not self._was_idle[name]), default=0.0)
        for name in busy:
            if busy[name] and self._was_idle[name]:
                self._clocks[name] = level
            self._was_idle[name] = not busy[name]
        return min(at_work, key=lambda name: self._clocks[name], default=None)

    async def _decode(self) -> None:
        rows = list(self.active)[: self.max_rows]
        seconds = DECODE_STEP + DECODE_ROW * len(rows)
        await asyncio.sleep(seconds)
        self.decoded += seconds
        for request in rows:
            adapter = self.active[request][0].adapter if request in self.active else None
            self.computed[adapter.policy if adapter is not None else ""] += seconds / len(rows)
        chunks = [self.next_chunk(request) for request in rows if request in self.active]
        await self.say(wire.Output(epoch=0, chunks=chunks))

    async def _slice(self) -> None:
        """One slice of the next tenant's oldest operation."""
        tenant, queue = self._queues.popitem(last=False)
        seconds = min(queue[0].left, TRAIN_SLICE)
        await asyncio.sleep(seconds)
        self.trained += seconds
        self.computed[queue[0].policy] += seconds
        queue[0].left -= seconds
        if queue[0].left <= 0:
            queue.popleft().over.set_result(None)
        if queue or tenant in self._queues:
            queue.extend(self._queues.pop(tenant, ()))
            self._queues[tenant] = queue


class TimedHost(ScriptedHost):
    """Offers an environment for each name in ``seconds``, which says how long its ``reset`` and ``step`` take. The last
    step's reward is the episode's number in its group: no group is without variance, so all batches are equal work."""

    def __init__(self, service: Service, seconds: Mapping[str, float], **script: Any) -> None:
        offers = {f"builtin:{name}": True for name in seconds}
        super().__init__(service.controller.serve_host, key="service-key", environments=offers, **script)
        self.seconds = dict(seconds)
        self._names: dict[str, str] = {}

    async def _read(self, link: MemoryLink) -> None:
        self._tasks.append(asyncio.create_task(self._beat(link)))
        with suppress(LinkClosed):
            while True:
                message = wire.decode(wire.to_host, await link.receive())
                if isinstance(message, wire.CloseEpisode):
                    self.episodes.pop(message.episode, None)
                elif isinstance(message, wire.GetPrompts):
                    await link.send(wire.encode(self.prompts(message)))
                elif isinstance(message, wire.Reset | wire.StepEpisode):
                    self._tasks.append(asyncio.create_task(self._answer(link, message)))

    def usual(self, message: wire.Reset | wire.StepEpisode) -> dict[str, Any]:
        answer = super().usual(message)
        if answer.get("done"):
            answer["reward"] = float(message.episode.rpartition("-")[2])
        return answer

    async def _answer(self, link: MemoryLink, message: wire.Reset | wire.StepEpisode) -> None:
        if isinstance(message, wire.Reset):
            self._names[message.episode] = message.environment.removeprefix("builtin:")
        await asyncio.sleep(self.seconds[self._names[message.episode]])
        answer = self.observe(message)
        assert answer is not None
        with suppress(LinkClosed):
            await link.send(wire.encode(msgspec.structs.replace(answer, epoch=self.epoch, call=message.call)))

    async def _beat(self, link: MemoryLink) -> None:
        with suppress(LinkClosed):
            while True:
                await link.send(wire.encode(wire.HostBeat(epoch=self.epoch, active=len(self.episodes))))
                await asyncio.sleep(1.0)


# --- a run ------------------------------------------------------------------------------------------------------------


@dataclass
class Played:
    """What happened, by job name."""

    commits: dict[str, list[float]]
    """Seconds at which its steps were committed."""
    computed: dict[str, float]
    """Seconds of the worker's time that went into it."""
    episodes: dict[str, list[list[Any]]]
    """What its episodes sampled, newest first: (reward, tokens)."""
    metrics: dict[str, list[dict[str, Any]]]
    """Its rows."""

    def step_seconds(self, job: str, since: float = 0.0) -> float:
        """Mean time between commits later than ``since``."""
        times = [time for time in self.commits[job] if time >= since]
        return (times[-1] - times[0]) / (len(times) - 1)

    def widest_gap(self, since: float = 0.0) -> int:
        """The most steps by which one job was ahead of another at any moment, counted from ``since`` on."""
        counts, widest = dict.fromkeys(self.commits, 0), 0
        for _, job in sorted((time, job) for job, times in self.commits.items() for time in times if time >= since):
            counts[job] += 1
            widest = max(widest, max(counts.values()) - min(counts.values()))
        return widest


def play(
    jobs: list[tuple[str, dict[str, Any]]], *, seconds: float, environments: Mapping[str, float], rows: int = 64,
    turns: int = 1,
) -> Played:  # fmt: skip
    """``jobs`` (tenant, job) run side by side on one worker for so many virtual seconds."""

    async def main(folder: str) -> Played:
        service = Service(Path(folder), VirtualClock(), InlineLedger)
        for tenant in sorted({tenant for tenant, _ in jobs} - {"alice", "bob"}):
            service.database.create_tenant(tenant, tenant, 1.0)
        await service.start()
        worker = await TimedWorker(service, rows=rows).join()
        host = await TimedHost(service, environments, turns=turns).join()
        service.peers += [worker, host]
        views = [(tenant, (await service.controller.submit(tenant, job))[0]) for tenant, job in jobs]
        began = service.clock.time()
        await asyncio.sleep(seconds)
        commits, computed, episodes, metrics = {}, {}, {}, {}
        for tenant, view in views:
            metrics[view.name] = steps = list(await service.controller.metrics(tenant, view.id))
            commits[view.name] = [row["time"] - began for row in steps]
            now = await service.controller.show(tenant, view.id)
            assert now.state == "running", (view.name, now.state, now.reason)
            computed[view.name] = worker.computed[now.policies[0].id]
            ended = await service.controller.trajectories(tenant, view.id, 1000)
            episodes[view.name] = [[row["reward"], row["trajectories"]] for row in ended if row["state"] == "done"]
        await service.close()
        service.database.close()
        return Played(commits, computed, episodes, metrics)

    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        return run(main(folder))
