"""The faults of a run, their number and their times: one plan, drawn from one seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from tests.support.replies import UniformLength

LENGTH = UniformLength(1, 1.25)
"""Of replies: one in five is cut at its limit."""

Kind = Literal[
    "kill", "power", "drain", "break", "half-open", "freeze", "close", "garbage", "host", "host-kill",
]  # fmt: skip
"""kill: the process ends and its system says so · power: it is gone and nobody says so · drain: SIGTERM · break: the
connection breaks, the process lives · half-open: so, and the controller does not hear of it · freeze: the process stops
for a while, its connection open · close: the stream ends cleanly in the middle · garbage: a frame that is none · host:
an environment host's connection breaks · host-kill: so, and another process takes its place."""

PREEMPTIONS: frozenset[Kind] = frozenset({"kill", "power", "drain"})
"""The faults that end a worker's process."""


@dataclass(frozen=True)
class Plan:
    """One run. Rates are per worker and second of virtual time, shares are probabilities each time."""

    seed: int
    workers: int = 40
    """Machines; those with a training role come first."""
    jobs: int = 8
    """Jobs at any time; one that ends is replaced until the preemptions are done."""
    preemptions: int = 1000
    tenants: int = 5
    hosts: int = 3
    trainers: float = 0.1
    """Share of the workers that train; they are reserved, and preempted a third as often."""
    sites: int = 3
    hosted: int = 3
    """Workers of one host, which share a cache of artifacts; hosts are at the sites in turn."""
    partners: float = 0.4
    """Share of the jobs that have two policies, which reply in turn."""
    seeding: bool = False
    """Whether they generate too: then the controller decides for how long, and uses no more of the other workers than
    pay off; else it uses all."""

    # --- how long things take, seconds
    lifetime: float = 20.0
    """Mean time between a worker's preemptions: about as long as a request takes, so most meet one."""
    rebirth: float = 4.0
    """Mean time until a machine is there again."""
    flush: float = 0.5
    latency: float = 0.01
    slow_latency: float = 1.5
    """Of one connection in ten: its last frames come when the process has another one already."""
    pull: float = 0.5
    """Mean time of an adapter's pull; one worker in ten takes ten times as long."""
    operation: float = 0.6
    """Mean time of a training operation, and of each file of an upload."""
    answer: float = 0.2
    """Mean time of an environment's answer."""
    database: float = 0.001
    restart_every: float = 60.0
    """Mean time between deaths of the controller."""
    down: float = 4.0
    """Mean time until it is back."""

    # --- how often
    breaks: float = 0.02
    half_opens: float = 0.004
    freezes: float = 0.004
    closes: float = 0.004
    garbage: float = 0.002
    host_breaks: float = 0.02
    """Per host and second."""
    host_kills: float = 0.005
    phase_deaths: float = 0.02
    """Of a trainer, at each phase of an operation: before it, after it, between the files of an upload, before and
    after its answer, when it hears that it was committed."""
    commit_deaths: float = 0.002
    """Of the controller, just before and just after a commit is carried out; half of them have the commit land late."""
    database_failures: float = 0.0005
    upload_failures: float = 0.05
    upload_twice: float = 0.1
    upload_corrupt: float = 0.01
    pull_failures: float = 0.01
    evictions: float = 0.1
    """After a pull, that an adapter leaves the worker's disk to make room."""
    disk_losses: float = 0.2
    """Of new processes, those that find none of the adapters that the one before had pulled."""
    engine_errors: float = 0.0005
    """Of requests."""
    duplicates: float = 0.02
    """Of flushes that are said twice, or from an earlier token on."""
    stale_frames: float = 0.3
    """Of new connections on which the process first says something under its old epoch."""

    patience: float = 900.0
    """Seconds after the last fault within which every job must have ended."""

    def rates(self) -> dict[Kind, float]:
        """Faults per second among all machines."""
        kills = self.workers / self.lifetime
        return {
            "kill": 0.7 * kills,
            "power": 0.15 * kills,
            "drain": 0.15 * kills,
            "break": self.workers * self.breaks,
            "half-open": self.workers * self.half_opens,
            "freeze": self.workers * self.freezes,
            "close": self.workers * self.closes,
            "garbage": self.workers * self.garbage,
            "host": self.hosts * self.host_breaks,
            "host-kill": self.hosts * self.host_kills,
        }


class RandomSource:
    """Everything random in a run, from its seed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def around(self, mean: float) -> float:
        """A time around ``mean``: most are near it, a few several times as long."""
        return self.random.gammavariate(2.0, mean / 2.0)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def next_fault(self, rates: dict[Kind, float]) -> tuple[float, Kind]:
        """In how many seconds the next fault comes, and which."""
        kinds = list(rates)
        total = sum(rates.values())
        return self.random.expovariate(total), self.random.choices(kinds, list(rates.values()))[0]
