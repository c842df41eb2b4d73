"""One mode on one trace: the shipped controller, modelled workers, and what came of it."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec

from rookery.aio import cancel_all
from rookery.controller.jobs.trajectory import decode_result
from rookery.controller.offload.seeding import Seeding
from rookery.controller.options import ControllerOptions
from rookery.controller.rollout.request import Event, InflightRequest
from rookery.controller.rollout.rules import ROLLOUT_RULES, RolloutRules
from rookery.controller.rollout.scheduler import NO_DETAILS, Details, RolloutScheduler
from rookery.errors import UserError
from rookery.folders import temporary_folder
from rookery.scheduling.offload import OffloadPlanner
from rookery.settings import Settings
from rookery.simulation.clock import EPOCH, run
from rookery.simulation.fakes.host import NO_SPEAKERS
from rookery.simulation.fakes.service import MEMORY, MODEL, SimulatedService, modelled_job
from rookery.simulation.fakes.text import LongTailed
from rookery.simulation.fakes.worker import FakeWorker
from rookery.simulation.profiles import Profile
from rookery.simulation.traces import HOUR, SpotInstance, SpotMarket, Trace
from rookery.storage.repositories.jobs import recent_episodes

ENVIRONMENT = "modelled"


@dataclass(frozen=True)
class Scenario:
    """The settings that all modes share."""

    profile: Profile
    trace: Trace
    """Its length is the run's."""
    seed: int = 0
    jobs: int = 1
    """Number of jobs, each of a different tenant."""
    policies: int = 1
    """Of each job; where there are several, each replies once in an episode, and is trained on its replies."""
    steps: int | None = None
    """Optimizer steps of a job; None runs to the trace's end."""
    max_staleness: int = 0
    micro_batch: int = 0
    reserved: int = 1
    """Reserved machines."""
    discount: float = 0.7
    """On the price of a preemptible machine."""
    notice: float = 0.0
    """Seconds between an instance's notice and its end; 0 is no notice."""
    flush: float = Settings().worker.flush_seconds
    """The service's ``flush_seconds``: tokens sampled since the last flush are what a preemption costs."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Other settings of the service that are not the default."""
    rules: RolloutRules = ROLLOUT_RULES


@dataclass(frozen=True)
class ReplayedStep:
    """An optimizer step that was committed."""

    job: str
    time: float
    """Seconds from the start."""
    tokens: int
    """Sampled ones that it was trained on."""
    waiting: float
    """Seconds for which the job waited for its groups."""
    queue: float
    """Mean seconds for which an episode's requests waited for a place in a worker."""
    trainer_wait: float | None
    remote_wait: float | None
    seed: float | None
    """Of the trainer's last cycle, as :mod:`rookery.controller.offload.seeding` measures them; None without cycles."""


WAITS = ("waiting", "queue", "trainer_wait", "remote_wait", "seed")


@dataclass(frozen=True)
class ReplayResult:
    """The result of one mode. Times are in seconds."""

    mode: str
    seconds: float
    steps: list[ReplayedStep]
    instances: list[tuple[float, int, int]]
    """(second, available, rented) at each change."""
    reserved_hours: float
    preemptible_hours: float
    reserved_idle: float
    """Share of the reserved machines' time in which they computed nothing."""
    preemptible_idle: float
    """Of the preemptible ones' from their start to their end, loading included; 0 where there were none."""
    preemptions: int
    requeued: dict[str, int]
    """Requests that continued at another worker, by reason."""
    unsent_tokens: int
    """Tokens that were sampled and never sent: the cost of preemptions."""
    discarded_tokens: int
    """Tokens that were received and sampled again."""
    events: int
    digest: str
    """Of the event log: SHA-256 over every frame, both ways, with its virtual time."""
    trajectories: str
    """SHA-256 over the stored trajectories of all jobs, with their rewards: no scheduling may change it."""
    scenario: Scenario

    @property
    def tokens(self) -> int:
        """Tokens that were trained on."""
        return sum(step.tokens for step in self.steps)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def steps_per_hour(self) -> float:
        return len(self.steps) / self.seconds * HOUR

    @property
    def cost(self) -> float:
        """The cost in units of the prices."""
        return self.cost_at(self.scenario.discount)

    def cost_at(self, discount: float) -> float:
        """The cost at another discount, everything else equal."""
        machines = self.scenario.profile
        spot = machines.spot.price * (1 - discount)
        return self.reserved_hours * machines.reserved.price + self.preemptible_hours * spot

    @property
    def tokens_per_price(self) -> float:
        return self.tokens / self.cost

    def mean(self, name: str) -> float | None:
        """A figure of the steps, averaged over those that have it."""
        known = [value for step in self.steps if (value := getattr(step, name)) is not None]
        return sum(known) / len(known) if known else None

    def break_even(self, alone: ReplayResult) -> float | None:
        """The discount on preemptible machines from which on a token costs no more than in ``alone``, which had
        reserved machines only. Below 0: it pays at a higher price than the reserved one's still. None where nothing was
        rented or trained."""
        if not (self.preemptible_hours and self.tokens and alone.tokens):
            return None
        worth = alone.cost * self.tokens / alone.tokens - self.cost_at(1.0)
        return 1 - worth / (self.preemptible_hours * self.scenario.profile.spot.price)


def replay(scenario: Scenario, mode: Mode) -> ReplayResult:
    """Run ``mode`` to the trace's end, or until every job has ended."""
    with temporary_folder(at=MEMORY) as folder:
        return run(_play(scenario, mode, Path(folder)))


async def _play(scenario: Scenario, mode: Mode, folder: Path) -> ReplayResult:
    profile, load = scenario.profile, scenario.profile.workload
    site = _service(scenario, mode, folder)
    controller = site.controller
    await controller.start()
    name = f"builtin:{ENVIRONMENT}"
    speakers = {name: policy_names(scenario.policies)} if scenario.policies > 1 else NO_SPEAKERS
    host = site.host({name: load.environment}, prompt_tokens=load.prompt_tokens, speakers=speakers)
    await host.join()
    reserved = [
        site.worker(f"reserved-{number}", profile.reserved, roles=mode.reserved, price=profile.reserved.price)
        for number in range(scenario.reserved)
    ]
    for worker in reserved:
        worker.start()

    spot_price = profile.spot.price * (1 - scenario.discount)

    def make(name: str) -> FakeWorker:
        return site.worker(name, profile.spot, roles=("rollout",), kind="preemptible", price=spot_price)

    most = mode.most(profile, load.episodes * scenario.jobs, scenario.reserved)

    def worth() -> int | None:
        return most if most is not None else controller.context.rooms.seeding.worthwhile(MODEL)

    market = SpotMarket(scenario.trace, make, Random(f"market {scenario.seed}"), notice=scenario.notice, worth=worth)
    renting = asyncio.create_task(market.run())
    jobs = {}
    for number, tenant in enumerate(_tenants(scenario)):
        view, _ = await controller.submit(tenant, _job(scenario, number))
        jobs[view.id] = tenant
    await _until_over(site, jobs, renting)
    seconds = asyncio.get_running_loop().time()
    steps = await _steps(site, mode, jobs)
    await cancel_all(renting)
    digest, events = site.log.digest(), site.log.frames
    rollouts = controller.context.rooms.rollouts
    outcome = ReplayResult(
        mode=mode.name,
        seconds=seconds,
        steps=steps,
        instances=market.history,
        reserved_hours=scenario.reserved * seconds / HOUR,
        preemptible_hours=sum(instance.seconds(seconds) for instance in market.instances) / HOUR,
        reserved_idle=_idle([(worker, seconds) for worker in reserved]),
        preemptible_idle=_idle([(instance.worker, instance.seconds(seconds)) for instance in market.instances]),
        preemptions=market.preemptions,
        requeued=dict(sorted(rollouts.requeues.items())),
        unsent_tokens=sum(_unsent(instance) for instance in market.instances if instance.state == "preempted"),
        discarded_tokens=rollouts.discarded_tokens if isinstance(rollouts, RestartingScheduler) else 0,
        events=events,
        digest=digest,
        trajectories=_trajectories(site, jobs),
        scenario=scenario,
    )
    await market.close()
    for worker in reserved:
        await worker.kill()
    await host.leave()
    await site.close()
    return outcome


def _tenants(scenario: Scenario) -> list[str]:
    """One for each job."""
    return [f"tenant-{number}" for number in range(scenario.jobs)]


def _service(scenario: Scenario, mode: Mode, folder: Path) -> SimulatedService:
    """The shipped controller in virtual time, as the mode runs it."""
    profile, load = scenario.profile, scenario.profile.workload
    return SimulatedService(
        folder,
        LongTailed(load.median_tokens, load.sigma),
        context=profile.reserved.context,
        seed=scenario.seed,
        tenants=_tenants(scenario),
        settings={
            "flush_seconds": scenario.flush,
            "worker_wait_seconds": scenario.trace.seconds,  # a trace without instances pauses no job
            **scenario.settings,
        },
        options=ControllerOptions(scheduler=mode.scheduler, seeding=mode.seeding, rollout_rules=scenario.rules),
    )


async def _steps(site: SimulatedService, mode: Mode, jobs: dict[str, str]) -> list[ReplayedStep]:
    """The committed steps of all jobs, in the order of their times. Raises ``RuntimeError`` for a job that failed."""
    steps: list[ReplayedStep] = []
    for job, tenant in jobs.items():
        view = await site.controller.queries.show(tenant, job)
        if view.state in ("failed", "paused"):
            raise RuntimeError(f"mode {mode.name}: job {view.name} is {view.state}: {view.reason}")
        for row in await site.controller.queries.metrics(tenant, job):
            waits: dict[str, Any] = {name: row.get(f"seconds/{name}") for name in WAITS}
            steps.append(ReplayedStep(job, row["time"] - EPOCH, int(row["tokens"]), **waits))
    return sorted(steps, key=lambda step: (step.time, step.job))


async def _until_over(site: SimulatedService, jobs: dict[str, str], renting: asyncio.Task[None]) -> None:
    """Return when the trace is over, or every job has ended."""
    jobs_ended = asyncio.gather(*(site.controller.queries.wait(tenant, job) for job, tenant in jobs.items()))
    either: list[asyncio.Future[Any]] = [renting, jobs_ended]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    await cancel_all(jobs_ended)
    if renting.done():
        renting.result()


def _trajectories(site: SimulatedService, jobs: dict[str, str]) -> str:
    """The digest of all stored trajectories. Ids differ from run to run: episodes are ordered by group and member."""
    found = hashlib.sha256()
    for job, tenant in jobs.items():
        stored = site.database.read(recent_episodes, tenant, job, site.settings.server.trajectory_keep)
        for group, episode in sorted(stored, key=lambda pair: (pair[0].ordinal, pair[1].member)):
            result = decode_result(episode.trajectories, "")
            found.update(msgspec.msgpack.encode((group.ordinal, episode.member, result.reward, result.trajectories)))
    return found.hexdigest()


def _job(scenario: Scenario, number: int) -> dict[str, Any]:
    stop = {"steps": scenario.steps} if scenario.steps is not None else {"wall_time": 2 * scenario.trace.seconds}
    load, staleness = scenario.profile.workload, scenario.max_staleness
    job = modelled_job(ENVIRONMENT, load, number, scenario.seed, staleness, scenario.micro_batch, stop)
    policies: dict[str, Any] = {name: {} for name in policy_names(scenario.policies)}
    return job | ({"policies": policies} if scenario.policies > 1 else {})


def policy_names(count: int) -> list[str]:
    return [f"policy-{number + 1}" for number in range(count)]


def _idle(workers: list[tuple[FakeWorker, float]]) -> float:
    there = sum(seconds for _, seconds in workers)
    worked = sum(worker.compute.decoded + worker.compute.trained for worker, _ in workers)
    return max(0.0, 1 - worked / there) if there else 0.0


def _unsent(instance: SpotInstance) -> int:
    return max(0, instance.worker.engine.generated - instance.worker.sent)


Role = Literal["rollout", "train"]


class RestartingScheduler(RolloutScheduler):
    """A rollout whose worker was lost or left begins again from its first token."""

    discarded_tokens = 0
    """Tokens that were received, and are generated again."""

    def apply(self, inflight: InflightRequest, event: Event, details: Details = NO_DETAILS) -> None:
        """As the shipped one; a worker's loss takes the tokens."""
        if event == "lost" or (event == "return" and inflight.state != "returning"):
            self.discarded_tokens += len(inflight.result.tokens)
            inflight.result.clear()
        super().apply(inflight, event, details)


class _NoSeeding(OffloadPlanner):
    """T_seed is 0. The number of instances that pay off is learned all the same."""

    def begin(self, instances: int) -> None:
        self.seconds = 0.0


class _NoMemory(OffloadPlanner):
    """T_seed is the one after the cycle before, however many instances there are now."""

    def begin(self, instances: int) -> None:
        self.memory.clear()


class NeverSeeding(Seeding):
    """Training workers generate only while nobody else can."""

    planner = _NoSeeding


class SeedingWithoutMemory(Seeding):
    """T_seed is learned again whenever the number of instances changes."""

    planner = _NoMemory


@dataclass(frozen=True)
class Mode:
    name: str
    about: str
    reserved: tuple[Role, ...] = ("rollout", "train")
    """Roles of reserved workers."""
    most: Callable[[Profile, int, int], int | None] = lambda profile, episodes, reserved: None
    """(profile, a step's episodes, reserved workers) → the most preemptible instances that it rents; None is as many as
    the controller finds worth it."""
    scheduler: type[RolloutScheduler] = RolloutScheduler
    seeding: type[Seeding] = Seeding


def balanced(profile: Profile, episodes: int, reserved: int) -> int:
    """How many instances generate as many tokens per second, all their rows taken, as the reserved ones train."""
    rows = min(profile.spot.rows, episodes)
    generated = rows / profile.spot.decode_step(rows)
    trained = reserved / profile.reserved.train_token
    return max(1, math.ceil(trained / generated))


MODES = {
    mode.name: mode
    for mode in (
        Mode("co-located", "reserved machines alone generate and train by turns", most=lambda *_: 0),
        Mode(
            "disaggregated",
            "reserved machines only train; as many preemptible ones as keep up with them generate",
            reserved=("train",),
            most=balanced,
        ),
        Mode("rookery", "the shipped scheduling, whole"),
        Mode("no-seeding", "reserved machines generate only without remote ones", seeding=NeverSeeding),
        Mode("no-migration", "a rollout whose instance left starts over", scheduler=RestartingScheduler),
        Mode("no-memory", "T_seed is learned again at each change", seeding=SeedingWithoutMemory),
    )
}
"""By name, in the order in which they are shown; the first is what the others are compared with."""


def parse_modes(names: str) -> list[Mode]:
    """The modes in a comma-separated list, in its order; ``all`` is all. Raises :class:`UserError`."""
    if names == "all":
        return list(MODES.values())
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in MODES:
            raise UserError(f"modes: given {name!r}, allowed: all, or some of {', '.join(MODES)}")
    return [MODES[name] for name in dict.fromkeys(wanted)]
