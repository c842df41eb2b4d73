"""A run: machines, jobs, faults until the preemptions are done, then calm until every job has ended."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Literal

from tests.chaos.events import Events
from tests.chaos.faults import PREEMPTIONS, Kind, Plan, RandomSource
from tests.chaos.history import History, WatchedDatabase
from tests.chaos.invariants import Requests
from tests.chaos.machines import (
    CONTEXT,
    ENVIRONMENT,
    MODEL,
    PARTNER,
    SLOW_SHARE,
    HostPlace,
    SpotMachine,
)
from tests.chaos.network import NetworkConnection, PeerEnd
from tests.chaos.storage import Dead, SlowWriter

from rookery.aio import cancel_all
from rookery.clock import RandomIds
from rookery.controller.controller import Controller
from rookery.controller.fleet.env_hosts import SERVICE
from rookery.controller.fleet.events import WorkerEvent
from rookery.controller.options import ControllerOptions
from rookery.controller.rollout.rules import RolloutRules
from rookery.controller.services import Services
from rookery.errors import Conflict, StorageFull, Unavailable
from rookery.protocol.connection import ConnectionClosed
from rookery.settings import Settings
from rookery.simulation.clock import EPOCH, VirtualClock, VirtualLoop
from rookery.simulation.fakes.service import MEMORY
from rookery.simulation.fakes.text import chat
from rookery.simulation.fakes.worker import FakeWorker
from rookery.storage.artifacts import Artifacts
from rookery.storage.models import FINAL_JOB_STATES
from rookery.storage.repositories import tenants
from rookery.storage.store import Store

RETRIES = 100
"""Of a training step: here a worker lasts about as long as a few operations, so an honest step may need many."""

LOOK_SECONDS = 0.5
"""How often the operator looks at the jobs: resumes those that rest, replaces those that ended."""

GRACE_SECONDS = 20.0
"""A worker that is not back by then is gone: less than in service, so that it happens here."""


@dataclass(frozen=True)
class ChaosResult:
    """The result of a run. ``digest`` is that of its event log."""

    digest: str
    events: int
    preemptions: int
    faults: dict[str, int]
    counts: dict[str, int]
    jobs: int
    versions: int
    tokens: int
    virtual_seconds: float
    real_seconds: float

    def table(self) -> dict[str, Any]:
        return asdict(self)


def run_plan(plan: Plan) -> ChaosResult:
    """Carry the plan out. Raises :class:`~tests.chaos.events.Violation` as soon as something does not
    hold, naming the seed."""
    log, began = logging.getLogger("rookery"), time.monotonic()
    before = log.level
    log.setLevel(logging.CRITICAL + 1)  # thousands of lines about what is done on purpose
    try:
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder, asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(Run(plan, Path(folder), began).main())
    finally:
        log.setLevel(before)


class NumberedTask(asyncio.Task[Any]):
    """Sets of tasks are gone through in the order of their hashes, which for others are addresses: these are numbers,
    so that a seed's runs are alike to the last event."""

    def __init__(self, number: int, *arguments: Any, **named: Any) -> None:
        self._number = number
        super().__init__(*arguments, **named)

    def __hash__(self) -> int:
        return self._number


class Run:
    """The :class:`~tests.chaos.machines.SimulatedFleet` of one run."""

    def __init__(self, plan: Plan, folder: Path, began: float) -> None:
        self.plan = plan
        self.random = RandomSource(plan.seed)
        self.calm = False
        self.preemptions = 0
        self._began = began
        self._folder = folder
        self._settings = Settings(
            data=folder, cache=folder / "cache", flush_seconds=plan.flush, retry_limit=RETRIES,
            rejoin_seconds=GRACE_SECONDS, worker_wait_seconds=plan.patience,
            start_crashes=10**6, tenant_jobs=10**6,
        )  # fmt: skip
        self._controller: Controller | None = None
        self._connections: dict[NetworkConnection, asyncio.Task[None]] = {}
        """Connections, with who speaks for the controller on each."""
        self._jobs: dict[str, str] = {}
        """Tenant by job."""
        self._ended: set[str] = set()
        self._unanswered: dict[str, None] = {}
        """Jobs that the operator has told to go on, without having heard that they do."""
        self._falling: asyncio.Task[None] | None = None
        self._lives = self._tokens = 0
        self._task_numbers = count()

    async def main(self) -> ChaosResult:
        await self.open()
        operating = asyncio.create_task(self._operate())
        try:
            await asyncio.wait({operating, self.events.broken}, return_when=asyncio.FIRST_COMPLETED)
            self._check()
            operating.result()
            self.history.check_all(self._database, self._jobs)
            self._check_leftovers()
            self._check()
            return self._outcome()
        finally:
            operating.cancel()
            await self.close()

    async def open(self) -> None:
        """Have the controller and its peers begin."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_task_factory(self.make_task)
        self.events = Events(self.plan.seed)
        self._loop.set_exception_handler(self._raised)
        self.artifacts = Artifacts(self._folder / "artifacts")
        self.history = History(self.events, self.artifacts)
        self.history.lasting.first_epoch = int(EPOCH * 1000)
        self._chat = chat(CONTEXT)
        self._database = WatchedDatabase(f"sqlite:///{self._folder}/chaos.db")
        self._database.history = self.history
        self._database.create()
        for number in range(self.plan.tenants):
            self._database.write(tenants.create_tenant, f"t{number}", f"Tenant {number}", 1.0)
        await self._start()
        trainers = max(2, round(self.plan.workers * self.plan.trainers))
        self.machines = [SpotMachine(self, n, trains=n < trainers) for n in range(self.plan.workers)]
        self.hosts = [HostPlace(self, number) for number in range(self.plan.hosts)]
        for machine in self.machines:
            machine.start()

    def make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> asyncio.Task[Any]:
        """A numbered task of the loop."""
        return NumberedTask(next(self._task_numbers), work, loop=loop, **more)

    async def close(self) -> None:
        for machine in self.machines:
            machine.close()
        for host in self.hosts:
            await host.close()
        await self._fall(late=None)
        self._database.close()

    def _check(self) -> None:
        if self.events.broken.done():
            self.events.broken.result()

    # --- the site -----------------------------------------------------------------------------------------------------

    @property
    def controller(self) -> Controller | None:
        return self._controller

    def peer(self, address: str) -> FakeWorker | None:
        return next((one.process for one in self.machines if one.address == address), None)

    def dial(self, kind: Literal["worker", "host"]) -> PeerEnd:
        controller = self._controller
        if controller is None:
            raise ConnectionClosed("the controller is down")
        latency = self.plan.slow_latency if self.random.chance(SLOW_SHARE) else self.plan.latency
        connection = NetworkConnection(self.requests, self.random.random, latency)
        serve = controller.serve_worker if kind == "worker" else partial(controller.serve_host, owner=SERVICE)
        task = self._loop.create_task(serve(connection))
        self._connections[connection] = task
        task.add_done_callback(lambda done: self._hung_up(connection, done))
        return connection.peer

    def _hung_up(self, link: NetworkConnection, task: asyncio.Task[None]) -> None:
        self._connections.pop(link, None)
        if not task.cancelled() and (error := task.exception()) is not None and self._controller is not None:
            self.events.fail("raises", f"the controller's end of a connection raised {error!r}")

    def _raised(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "exception" in context and not isinstance(context["exception"], Dead):
            task = context.get("future")
            what = task.get_coro() if isinstance(task, asyncio.Task) else context.get("handle")
            self.events.fail("raises", f"{context.get('message')}: {context['exception']!r} in {what}")

    # --- the controller's lives ---------------------------------------------------------------------------------------

    async def _start(self) -> None:
        """A new process on the same data."""
        self._lives += 1
        self.history.check_heads()
        self._writer = SlowWriter(self.random.random, self.events, self.plan.database, self.plan.database_failures)

        async def chat_of(model: str) -> Any:
            return self._chat

        class WatchedController(Controller):
            def on_event(self, event: WorkerEvent) -> None:
                requests.on_event(event)
                super().on_event(event)

        controller = WatchedController(
            Services(
                settings=self._settings, clock=VirtualClock(), ids=RandomIds(Random(f"{self.plan.seed} {self._lives}")),
                store=Store(self._database, self._writer), artifacts=self.artifacts, chat=chat_of,
            ),
            check_environment=lambda id, options: None, jobs_folder=self._folder / "jobs",
            options=ControllerOptions(rollout_rules=RolloutRules(rollout_chunk_tokens=2), orphan_keep_seconds=0),
        )  # fmt: skip
        self.requests = requests = Requests(controller, self.events, self.history.lasting)
        self.events.note("controller", "starts")
        await controller.start()
        self._writer.on_commit = self._commit_death
        self._writer.troubled = not self.calm
        self._controller = controller

    def _commit_death(self, after: bool) -> bool:
        """Whether the controller dies just before or just after a commit is carried out."""
        if self.calm or not self.random.chance(self.plan.commit_deaths / 2):
            return False
        self.events.note("controller", "dies after a commit" if after else "dies before a commit")
        late = self.random.around(self.plan.down) if self.random.chance(0.5) else None
        self._writer.die(late=late)
        self._crash()
        return True

    def _crash(self) -> None:
        """``kill -9`` of the controller; it is back in a while."""
        if self._falling is None or self._falling.done():
            self._falling = self._loop.create_task(self._fall_and_rise())

    async def _fall_and_rise(self) -> None:
        if self._controller is None:
            return
        late = self.random.around(self.plan.down) if self.random.chance(0.5) else None
        await self._fall(late)
        await asyncio.sleep(self.random.around(self.plan.down))
        await self._start()

    async def _fall(self, late: float | None) -> None:
        controller, self._controller = self._controller, None
        if controller is None:
            return
        self.events.note("controller", "is dead")
        self._tokens += controller.context.rooms.rollouts.sampled_tokens
        if not self._writer.dead:
            self._writer.die(late=late)
        self.requests.end()
        for link in list(self._connections):
            link.cut()
        await controller.stop()
        serving = list(self._connections.values())
        await cancel_all(*serving)

    # --- faults -------------------------------------------------------------------------------------------------------

    async def _disturb(self) -> None:
        """Faults, one after the other, until there were enough preemptions."""
        rates = self.plan.rates()
        crash_at = self._loop.time() + self.random.around(self.plan.restart_every)
        while self.preemptions < self.plan.preemptions:
            pause, kind = self.random.next_fault(rates)
            await asyncio.sleep(pause)
            if self._loop.time() > crash_at:
                crash_at = self._loop.time() + self.random.around(self.plan.restart_every)
                self._crash()
            if kind in ("host", "host-kill"):
                self.events.note(f"fault {kind}")
                self.random.random.choice(self.hosts).disconnect(kill=kind == "host-kill")
            else:
                self._fault(kind, self.random.random.choice(self.machines))

    def _fault(self, kind: Kind, machine: SpotMachine) -> None:
        process = machine.process
        if process is None or (machine.trains and kind in PREEMPTIONS and self.random.chance(2 / 3)):
            return
        self.events.note(f"fault {kind}", process.hello.instance)
        if kind in PREEMPTIONS:
            self.preemptions += 1
        connection = process.connection
        match kind:
            case "kill" | "power":
                machine.kill(reported=kind == "kill")
            case "drain":
                process.begin_drain()
            case "freeze":
                process.freeze(self.random.around(self._settings.worker.suspect_seconds))
            case _ if not isinstance(connection, PeerEnd):
                return
            case "break" | "half-open":
                connection.cut(reported=kind == "break")
            case "close":
                connection.finish()
            case "garbage":
                connection.transmit(self.random.random.randbytes(self.random.random.randint(0, 40)))

    # --- jobs ---------------------------------------------------------------------------------------------------------

    async def _operate(self) -> None:
        """Keep as many jobs as planned until the faults are over, then until all have ended."""
        disturbing = asyncio.create_task(self._disturb())
        try:
            while not disturbing.done():
                await self._look(replace=True)
                await asyncio.sleep(LOOK_SECONDS)
            disturbing.result()
        finally:
            disturbing.cancel()
        self.calm, self._writer.troubled = True, False
        self.events.note("calm")
        deadline = self._loop.time() + self.plan.patience
        while set(self._jobs) - self._ended:
            await self._look(replace=False)
            await asyncio.sleep(LOOK_SECONDS)
            if self._loop.time() > deadline:
                await self._stuck()
                return

    async def _stuck(self) -> None:
        left = sorted(set(self._jobs) - self._ended)
        waits = []
        if self._controller is not None:
            for job in left:
                view = await self._controller.queries.show(self._jobs[job], job)
                waits.append(f"{job} is {view.state} at step {view.step}, waits for {view.waits_for} {view.reason}")
        self.events.fail("jobs", f"{len(left)} jobs have not ended: {'; '.join(waits)}", *left[:1])

    async def _look(self, *, replace: bool) -> None:
        for job, state in self.history.states.items():
            if state in FINAL_JOB_STATES:
                self._ended.add(job)
        controller = self._controller
        if controller is None:
            return
        try:
            paused = [job for job, state in self.history.states.items() if state == "paused"]
            for job in dict.fromkeys([*self._unanswered, *paused]):
                self.events.note("resume", job)
                self._unanswered[job] = None
                await controller.resume(self._jobs[job], job)
                del self._unanswered[job]
            while replace and len(self._jobs) - len(self._ended) < self.plan.jobs and self._controller is controller:
                await self._submit(controller)
        except (Unavailable, StorageFull, Conflict, Dead) as trouble:
            self.events.note("operator", type(trouble).__name__)

    async def _submit(self, controller: Controller) -> None:
        number = len(self._jobs)
        tenant = f"t{number % self.plan.tenants}"
        view, _ = await controller.submit(tenant, self._job(number), key=f"job {number}")
        self._jobs[view.id] = tenant

    def _job(self, number: int) -> dict[str, Any]:
        """A small job; its settings depend on its number, so that all meet."""
        draw = Random(f"{self.plan.seed} job {number}")
        staleness = draw.randint(0, 2)
        groups = draw.randint(1, 3)
        return {
            "name": f"job{number}",
            "base_model": MODEL,
            "environment": {"id": ENVIRONMENT, "max_turns": 3},
            "algorithm": {
                "name": draw.choice(["grpo", "dr_grpo", "rloo", "mean"]),
                "group_size": draw.randint(2, 4),
                "groups_per_step": groups,
                "max_staleness": staleness,
                "in_flight": draw.choice(["finish", "finish", "switch", "recompute"]),
                "micro_batch": draw.choice([0, 0, 2]),
                "kl_weight": draw.choice([0.0, 0.0, 0.1]),
            },
            "sampling": {"max_tokens": draw.randint(16, 64)},
            "evaluation": {"prompts": draw.choice([0, 2]), "every": draw.randint(0, 2)},
            "checkpoints": {"commit_every": draw.randint(1, staleness + 1), "keep_last": draw.randint(1, 3)},
            "stop": {"steps": draw.randint(3, 12)},
            "policies": {"main": {"trainers": draw.choice([1, 1, 3])}} | self._partner(draw),
            "seed": number,
        }

    def _partner(self, draw: Random) -> dict[str, Any]:
        """A second policy, or none: one that trains, or that plays an earlier version of the first one."""
        if draw.random() >= self.plan.partners:
            return {}
        trains = {"rank": 8, "trainers": draw.choice([1, 1, 2])}
        plays = {"train": False, "follows": {"policy": "main", "every": draw.randint(1, 3)}}
        return {PARTNER: draw.choice([trains, trains, plays])}

    def policies(self, job: str) -> list[str]:
        return list(self.history.specs[job].policies)

    # --- at the end ---------------------------------------------------------------------------------------------------

    def _check_leftovers(self) -> None:
        """Nothing is left of jobs that have ended."""
        controller = self._controller
        if controller is None:
            return
        context = controller.context
        left = self.requests.left()
        holding = [
            worker.name for worker in context.rooms.fleet.all() if context.rooms.rollouts.pool.outstanding(worker)
        ]
        if left or holding or context.rooms.rollouts.waiting():
            self.events.fail("once", f"requests {left} are left, workers {holding} hold some", *left[:1])
        if context.rooms.collector.references:
            self.events.fail("durable", f"artifacts {dict(context.rooms.collector.references)} were never named")

    def _outcome(self) -> ChaosResult:
        counts, live = dict(sorted(self.events.counts.items())), self._controller
        faults = {kind: count for kind, count in counts.items() if kind.startswith("fault") or kind == "dies"}
        tokens = self._tokens + (live.context.rooms.rollouts.sampled_tokens if live is not None else 0)
        return ChaosResult(
            digest=self.events.digest(),
            events=self.events.total,
            preemptions=self.preemptions,
            faults=faults,
            counts=counts,
            jobs=len(self._jobs),
            versions=self.history.versions,
            tokens=tokens,
            virtual_seconds=round(self._loop.time(), 3),
            real_seconds=round(time.monotonic() - self._began, 1),
        )
