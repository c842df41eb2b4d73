"""A fleet file: the machines that there are, how fast each is, and the links between their sites.

``rookery profile`` writes a machine's entry; ``rookery plan`` reads the file. Every figure is measured or stated: an
unknown one is refused, never guessed.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from rookery.bounds import GIVEN_NAME, INTEGER, ONE_LINE, Line, Name, SiteName
from rookery.errors import UserError, count_of
from rookery.spec.files import read_mapping
from rookery.spec.machine import Count, FrozenModel, Machine, Positive, Time, Workload
from rookery.spec.parsing import known_fields, problem_line

QUANTILES = 64
"""Reply lengths that stand for all replies of a job: a length is then known to about 2% of the distribution."""

MAX_MACHINES = 64
"""Machines of one plan: the search is meant for what one team runs."""


MAX_JOBS = 256
"""Jobs of one plan."""


class FleetMachine(Machine):
    """A number of equal machines at one site."""

    name: str = Field(pattern=GIVEN_NAME, max_length=100)
    """Of the kind; the machines are called NAME-0, NAME-1, …"""
    model: Annotated[Line, ONE_LINE] = ""
    """The base model with which it was measured; empty where the file does not say it."""
    count: int = Field(1, ge=1, le=MAX_MACHINES)
    site: SiteName = ""
    """Where they are; machines of one site share a network."""
    preemptible: bool = False
    """They may vanish: such a machine generates and never trains."""


class Link(FrozenModel):
    """The network between two sites, in both directions."""

    between: tuple[SiteName, SiteName]
    bandwidth: Positive
    """Bytes per second."""
    latency: Time
    """Seconds."""


class FleetSpec(FrozenModel):
    machines: Annotated[list[FleetMachine], Field(min_length=1, max_length=MAX_MACHINES)]
    links: Annotated[list[Link], Field(max_length=MAX_MACHINES**2)] = Field(default_factory=list)
    service: SiteName = ""
    """The site of the service, which stores every version."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [machine.name for machine in self.machines]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"machines: the name {min(twice)} is there twice; give each kind its own name")
        if (count := sum(machine.count for machine in self.machines)) > MAX_MACHINES:
            raise ValueError(
                f"machines: {count_of(count, 'machine')}, at most {MAX_MACHINES}; plan a part of the fleet"
            )
        sites = {self.service, *(machine.site for machine in self.machines)}
        for link in self.links:
            if unknown := set(link.between) - sites:
                known = ", ".join(map(repr, sorted(sites)))
                raise ValueError(f"links: no machine is at the site {min(unknown)!r}; sites: {known}")
            if link.between[0] == link.between[1]:
                raise ValueError(f"links: between {link.between[0]!r} and itself; leave it out, a site has no link")
        pairs = [frozenset(link.between) for link in self.links]
        if len(set(pairs)) < len(pairs):
            raise ValueError("links: two links between the same sites; give one, it is for both directions")
        return self

    def link(self, one: str, other: str) -> Link | None:
        """The link between two sites; None within one site, or where the file names none."""
        found = (link for link in self.links if set(link.between) == {one, other})
        return next(found, None) if one != other else None

    def over_link(self, machine: FleetMachine, site: str, bandwidth: float) -> tuple[float, float]:
        """The latency in seconds and the bytes per second of a transfer between a machine, which alone has this
        ``bandwidth``, and a site."""
        link = self.link(machine.site, site)
        if link is None:
            return machine.latency, bandwidth
        return machine.latency + link.latency, min(bandwidth, link.bandwidth)


def read_fleet(path: Path) -> FleetSpec:
    """The fleet in a YAML or JSON file. Raises :class:`UserError` of one line."""
    return parsed(FleetSpec, path, read_mapping(path, "fleet", "machines"))


PROFILED_RANK = 16
"""Rank of the adapter whose bytes a machine's entry has."""


class JobDemand(Workload):
    """The work of one policy's optimizer step, and how its job does it."""

    name: Annotated[Name, ONE_LINE]
    """Of the job; of a job that trains several policies, JOB/POLICY."""
    turns: int = Field(1, ge=1, le=1000)
    """Policies that reply in an episode, each once; all replies are as long as those of this policy."""
    policies: int = Field(1, ge=1, le=1000)
    """How many of them train. Each generates its share of the replies, and trains on whole episodes."""
    environment: Time = 0.0
    staleness: int = Field(0, ge=0, le=64)
    micro_batch: int = Field(0, ge=0, le=INTEGER)
    """Episodes with which training begins; 0: with all of the step's."""
    trainers: int = Field(1, ge=1, le=64)
    """Most workers that compute one gradient together."""
    rank: int = Field(PROFILED_RANK, ge=1, le=1 << 16)
    """Of its adapter."""

    @model_validator(mode="after")
    def _policies_reply(self) -> Self:
        if self.policies > self.turns:
            raise ValueError(f"policies: {self.policies} train, and {self.turns} reply; give at most that many")
        if self.micro_batch > self.episodes:
            raise ValueError(f"micro_batch: given {self.micro_batch}, allowed: at most the episodes of a step,"
                             f" {self.episodes}")  # fmt: skip
        return self

    @property
    def scale(self) -> float:
        """Its bytes over those of a machine's entry, which are of :data:`PROFILED_RANK`."""
        return self.rank / PROFILED_RANK

    def lengths(self) -> tuple[float, ...]:
        """:data:`QUANTILES` reply lengths in tokens, ascending, each as likely as the others."""
        return _lengths(self.median_tokens, self.sigma, self.max_tokens)

    @property
    def mean_tokens(self) -> float:
        """The mean tokens of a reply."""
        return sum(self.lengths()) / QUANTILES

    @property
    def replies(self) -> float:
        """The replies of a step: those of the policy, and its share of those of policies that do not train."""
        return self.episodes * self.turns / self.policies

    @property
    def episode_prefill(self) -> float:
        """Tokens of an episode that are not sampled: its share of the group's prompt, and the message to each further
        policy."""
        return self.prompt_tokens * (1 / self.group_size + self.turns - 1)

    @property
    def train_tokens(self) -> float:
        """The tokens of a step: all replies of its episodes, the messages between them, and each group's prompt
        once."""
        return self.episodes * (self.turns * self.mean_tokens + self.episode_prefill)

    @property
    def longest(self) -> int:
        """Tokens of the longest episode."""
        return self.turns * (self.prompt_tokens + self.max_tokens)


@lru_cache(maxsize=256)
def _lengths(median: float, sigma: float, most: int) -> tuple[float, ...]:
    normal = NormalDist()
    drawn = (median * math.exp(sigma * normal.inv_cdf((i + 0.5) / QUANTILES)) for i in range(QUANTILES))
    return tuple(min(max(1.0, length), float(most)) for length in drawn)


class PlannedWorker(FrozenModel):
    """One worker of a plan."""

    name: Name
    machine: Name
    """The kind in the fleet file."""
    roles: Annotated[list[Literal["rollout", "train"]], Field(min_length=1, max_length=2)]
    max_rows: Count
    """Sequences that decode together."""
    slice_tokens: Count
    """Tokens of a training slice: those with which the machine was measured."""


class Plan(FrozenModel):
    """A plan file: the workers with their roles, as ``rookery plan --out`` writes it."""

    step_seconds: Positive
    """Predicted seconds of a round, in which every job does one optimizer step."""
    workers: Annotated[list[PlannedWorker], Field(min_length=1, max_length=MAX_MACHINES)]
    fleet: FleetSpec
    """The machines that were planned for, to plan again when some join or leave."""
    jobs: Annotated[list[JobDemand], Field(min_length=1, max_length=MAX_JOBS)]
    model: Annotated[Line, ONE_LINE] = ""
    """The base model of the jobs; empty: that of each worker."""

    @model_validator(mode="after")
    def _machines_there(self) -> Self:
        there = {f"{kind.name}-{i}": kind for kind in self.fleet.machines for i in range(kind.count)}
        names = [worker.name for worker in self.workers]
        if unknown := set(names) - there.keys():
            raise ValueError(f"workers: {min(unknown)} is no machine of the plan's fleet")
        if len(set(names)) < len(names):
            raise ValueError("workers: a name is there twice; give each machine one entry")
        for worker in self.workers:
            kind = there[worker.name]
            if worker.machine != kind.name:
                raise ValueError(f"workers: {worker.name} is of the kind {kind.name}, given {worker.machine!r}")
            if len(set(worker.roles)) < len(worker.roles):
                raise ValueError(f"workers: {worker.name} has the role {worker.roles[0]} twice; give each role once")
            if "train" in worker.roles and kind.preemptible:
                raise ValueError(f"workers: {worker.name} may vanish, so it cannot train; give it the role rollout")
            if worker.max_rows > kind.rows:
                raise ValueError(f"workers: max_rows of {worker.name}: given {worker.max_rows}, allowed: at most rows"
                                 f" of {kind.name}, {kind.rows}")  # fmt: skip
            if worker.slice_tokens != kind.train_slice:
                raise ValueError(f"workers: slice_tokens of {worker.name}: given {worker.slice_tokens}, allowed:"
                                 f" train_slice of {kind.name}, {kind.train_slice}")  # fmt: skip
        for role in ("rollout", "train"):
            if not any(role in worker.roles for worker in self.workers):
                raise ValueError(f"workers: none has the role {role}, so no job could run; plan again")
        return self


def read_plan(path: Path) -> Plan:
    """The plan in a YAML or JSON file. Raises :class:`UserError` of one line."""
    return parsed(Plan, path, read_mapping(path, "plan", "step_seconds and workers"))


Parsed = TypeVar("Parsed", bound=FrozenModel)

UNITS = "; without a unit: times are in seconds, sizes in bytes, rates in bytes per second"
"""The rest of the line about a text in the place of a number, such as ``24GB``."""


def parsed(model: type[Parsed], path: Path, data: dict[str, Any]) -> Parsed:
    """``data`` as a part of the file ``path``. Raises :class:`UserError` of one line."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        line = problem_line(first, where, known_fields(model, first["loc"]))
        units = UNITS if first["type"] == "text_for_number" and not first["ctx"]["meant"] else ""
        raise UserError(f"{path}: {line}{units}") from None
