"""Machines whose worker processes are preempted, and environment hosts that come and go.

Processes are :class:`~rookery.simulation.fakes.worker.FakeWorker` and
:class:`~rookery.simulation.fakes.host.FakeHost`; :class:`PlannedFaults` makes them fail as often as the plan says.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Literal, Protocol

from tests.chaos.events import Events
from tests.chaos.faults import LENGTH, Plan, RandomSource
from tests.chaos.history import History
from tests.chaos.network import PeerEnd

from rookery import protocol
from rookery.aio import cancel_all
from rookery.controller.controller import Controller
from rookery.controller.fleet.env_hosts import BUILTIN
from rookery.controller.jobs.trajectory import derive_seed
from rookery.protocol.connection import RegistrationRefused
from rookery.simulation.fakes.engine import Row
from rookery.simulation.fakes.faults import Faults, Phase
from rookery.simulation.fakes.host import EpisodeCall, FakeHost, user_message
from rookery.simulation.fakes.trainer import ADAPTER, FakeTrainer
from rookery.simulation.fakes.worker import FakeWorker, worker_hello
from rookery.spec.machine import Machine
from rookery.storage.artifacts import Artifacts, Staging

MODEL = "smollm2-135m-instruct"
"""The base model of every worker: any name of the catalogue."""
ENVIRONMENT = "chaos"
PARTNER = "partner"
"""The second policy of a job that has two."""
CONTEXT = 2048

SLOW_SHARE = 0.1
"""Of connections and machines: ten times as slow as the others, or worse."""
LOADING_SHARE = 0.3
"""Of new processes, those that dial in before their base model is loaded."""
REWARDS = 3
"""Different rewards: few, so that some groups have no variance."""


class SimulatedFleet(Protocol):
    """The run, as machines and hosts use it."""

    plan: Plan
    random: RandomSource
    events: Events
    history: History
    artifacts: Artifacts
    calm: bool
    """Faults have stopped."""

    @property
    def controller(self) -> Controller | None:
        """The live one; None while it is down."""
        ...

    def peer(self, address: str) -> FakeWorker | None:
        """The live worker that answers at an address."""
        ...

    def policies(self, job: str) -> list[str]:
        """The names of a job's policies."""
        ...

    def dial(self, kind: Literal["worker", "host"]) -> PeerEnd:
        """A new connection to the live controller. Raises ``ConnectionClosed`` when there is none."""
        ...


class LiveTickets:
    """The HTTP routes of the live controller: they open nothing while it is down."""

    def __init__(self, simulated: SimulatedFleet) -> None:
        self._simulated = simulated
        self.artifacts = simulated.artifacts

    def open_batch(self, ticket: str) -> bytes | None:
        controller = self._simulated.controller
        return controller.tickets.open_batch(ticket) if controller is not None else None

    def staging(self, ticket: str) -> Staging | None:
        controller = self._simulated.controller
        return controller.tickets.staging(ticket) if controller is not None else None


class PlannedFaults(Faults):
    """The faults of one machine's processes, drawn as often as the plan says."""

    def __init__(self, simulated: SimulatedFleet, machine: SpotMachine) -> None:
        self._simulated, self._machine = simulated, machine
        self._random, self._plan = simulated.random, simulated.plan

    def _chance(self, share: float) -> bool:
        return not self._simulated.calm and self._random.chance(share)

    def delay(self, kind: Literal["pull", "batch", "upload", "redial"], seconds: float) -> float:
        pull = self._plan.pull * (10 if self._machine.slow else 1)
        means = {"pull": pull, "batch": self._plan.operation, "upload": self._plan.operation, "redial": 1.0}
        return self._random.around(means[kind])

    def peer(self, address: str) -> FakeWorker | None:
        return self._simulated.peer(address)

    def evicts(self) -> bool:
        return self._chance(self._plan.evictions)

    def pull_fails(self) -> bool:
        return self._chance(self._plan.pull_failures)

    def request_error(self) -> str:
        return "the engine broke" if self._chance(self._plan.engine_errors) else ""

    def resend_from(self, row: Row) -> int:
        if row.sent > row.start and self._chance(self._plan.duplicates):
            return self._random.random.randint(row.start, row.sent)
        return row.sent

    def repeats_flush(self) -> bool:
        return self._chance(self._plan.duplicates)

    def upload_fails(self) -> bool:
        return self._chance(self._plan.upload_failures)

    def corrupt(self, name: str, content: bytes) -> bytes:
        if name == ADAPTER and self._chance(self._plan.upload_corrupt):
            return content.replace(b'"chain":"', b'"chain":"0', 1)
        return content

    def repeats_upload(self) -> float | None:
        return self._random.around(self._plan.operation) if self._chance(self._plan.upload_twice) else None

    def dies(self, worker: FakeWorker, phase: Phase) -> bool:
        if self._machine.process is not worker or not self._chance(self._plan.phase_deaths):
            return False
        self._simulated.events.note("dies", worker.hello.instance, phase)
        self._machine.kill(reported=self._random.chance(0.5))
        return True

    async def joined(self, worker: FakeWorker, previous_epoch: int) -> None:
        """Frames that were meant for the connection before this one arrive on it."""
        if previous_epoch < 0 or not self._random.chance(self._plan.stale_frames):
            return
        assert worker.connection is not None
        rows = [row for row in worker.engine.held() if not row.error]
        chunks = [worker.engine.chunk(row, row.start, row.position, row.finish) for row in rows]
        frames: list[Any] = [protocol.Output(epoch=previous_epoch, chunks=chunks)] if chunks else []
        for frame in [*frames, protocol.Draining(epoch=previous_epoch)]:
            await worker.connection.send(protocol.encode(frame))


class SpotMachine:
    """A machine that runs one worker process after the other."""

    def __init__(self, simulated: SimulatedFleet, number: int, *, trains: bool) -> None:
        self.name = f"w{number}"
        self.address = f"http://{self.name}:1"
        """The address of every process of the machine."""
        self._host, self._site = place(number, simulated.plan)
        self.trains = trains
        self.process: FakeWorker | None = None
        self._simulated = simulated
        self._loop = asyncio.get_running_loop()
        self._births = 0
        random, plan = simulated.random, simulated.plan
        self.slow = random.chance(SLOW_SHARE)
        speed = 1 if self.slow else random.random.randint(2, 8)
        step = plan.flush / speed
        self._machine = Machine(
            rows=random.random.choice((4, 8, 16)), context=CONTEXT, decode=[(1, step), (16, 2 * step)],
            prefill_token=1e-6, prefill_slice=512, train_token=0.0, train_slice=512, optimizer=0.05, adapter_bytes=0,
            state_bytes=0, download=1e9, upload=1e9, load=random.around(1.0), latency=0.0,
        )  # fmt: skip
        self._disk: list[str] = []
        """Adapters that the last process had."""
        self._closed = False

    def start(self) -> None:
        """Start a new process."""
        simulated, trains = self._simulated, self.trains
        if self._closed:
            return
        self._births += 1
        hello = worker_hello(
            self._machine, self.name, MODEL, instance=f"{self.name}-{self._births}",
            roles=["rollout"] * (simulated.plan.seeding or not trains) + ["train"] * trains,
            kind="reserved" if trains else "preemptible", address=self.address, host=self._host,
            cache=self._host, site=self._site,
            adapters=[] if simulated.random.chance(simulated.plan.disk_losses) else list(self._disk),
            loading=simulated.random.chance(LOADING_SHARE),
        )  # fmt: skip
        worker = self.process = FakeWorker(
            lambda: simulated.dial("worker"),
            LiveTickets(simulated), hello, self._machine, LENGTH, trainer=FakeTrainer(simulated.history.add_example),
            faults=PlannedFaults(simulated, self),
        )  # fmt: skip
        worker.start()
        assert worker.life is not None
        worker.life.add_done_callback(lambda life: self._ended(worker, life))

    def kill(self, *, reported: bool) -> None:
        """The process dies; ``reported``: whether its system closes the connection."""
        worker, self.process = self.process, None
        if worker is not None:
            if isinstance(worker.connection, PeerEnd):
                worker.connection.cut(reported=reported)
            worker.crash()

    def close(self) -> None:
        """End for good."""
        self._closed = True
        self.kill(reported=True)

    def _ended(self, worker: FakeWorker, life: asyncio.Task[None]) -> None:
        events = self._simulated.events
        if not life.cancelled() and (error := life.exception()) is not None:
            invariant = "jobs" if isinstance(error, RegistrationRefused) else "raises"
            events.fail(invariant, f"{self.name} ended with {error!r}", self.name)
        if self.process is worker:
            self.process = None
        self._disk = worker.cached_adapters
        events.note("gone", worker.hello.instance)
        if not self._closed:
            self._loop.call_later(self._simulated.random.around(self._simulated.plan.rebirth), self.start)


def place(number: int, plan: Plan) -> tuple[str, str]:
    """Host and site of a machine. Trainers come first, so they are on different hosts."""
    hosts = max(1, plan.workers // plan.hosted)
    return f"h{number % hosts}", f"s{number % hosts % plan.sites}"


class HostPlace:
    """Environment hosts of one place; the next process takes over when one ends."""

    def __init__(self, simulated: SimulatedFleet, number: int) -> None:
        self._simulated = simulated
        self._name = f"host{number}"
        self._births = 0
        random = simulated.random
        self._host = FakeHost(
            lambda: simulated.dial("host"),
            environments={BUILTIN + ENVIRONMENT: True}, observe=partial(observe, simulated), instance=f"{self._name}-0",
            seconds=lambda environment: random.around(simulated.plan.answer), keeps_episodes=False,
        )  # fmt: skip
        self._running = asyncio.ensure_future(self._host.run(lambda: random.around(1.0)))

    def disconnect(self, *, kill: bool) -> None:
        """The connection breaks; ``kill``: the process dies with it, and another takes its place."""
        if kill:
            self._births += 1
            self._host.instance = f"{self._name}-{self._births}"
            self._host.episodes.clear()
        if self._host.connection is not None:
            self._host.connection.cut()

    async def close(self) -> None:
        await cancel_all(self._running)
        await self._host.leave()


def observe(simulated: SimulatedFleet, call: EpisodeCall) -> dict[str, Any]:
    """The reply is a function of the episode alone, so that any host can step it. In a job of two policies the second
    one replies to the first, which may reply again."""
    if isinstance(call, protocol.Reset):
        return {"messages": [user_message(f"{call.prompt.decode()} of {call.job}")]}
    names = simulated.policies("-".join(call.episode.split("-")[:2]))
    last = derive_seed(call.episode) % 2 + len(names) - 1
    done = call.turn >= last
    reward = float(derive_seed(call.text) % REWARDS)
    answer: dict[str, Any] = {
        "messages": [] if done else [user_message("continue")],
        "reward": reward,
        "done": done,
        "metrics": {"turns": call.turn + 1.0},
    }
    if len(names) > 1 and not done:
        answer["policy"] = names[(call.turn + 1) % len(names)]
    elif len(names) > 1:
        answer["rewards"] = {names[0]: float(derive_seed(f"{call.text} again") % REWARDS)}
    return answer
