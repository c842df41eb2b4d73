"""A fleet file: the machines that there are, how fast each is, and the links between their sites.

``rookery profile`` writes a machine's entry; ``rookery plan`` reads the file. Every figure is measured or stated: an
unknown one is refused, never guessed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from rookery.bounds import Name
from rookery.errors import UserError
from rookery.spec.files import read_mapping
from rookery.spec.machine import FrozenModel, Machine, Positive

MAX_MACHINES = 64
"""Machines of one plan: the search is meant for what one team runs."""


class FleetMachine(Machine):
    """A number of equal machines at one site."""

    name: Name
    """Of the kind; the machines are called NAME-0, NAME-1, …"""
    count: int = Field(1, ge=1, le=MAX_MACHINES)
    site: Name = ""
    """Where they are; machines of one site share a network."""
    preemptible: bool = False
    """They may vanish: such a machine generates and never trains."""


class Link(FrozenModel):
    """The network between two sites, in both directions."""

    between: tuple[Name, Name]
    bandwidth: Positive
    """Bytes per second."""
    latency: float = Field(ge=0)
    """Seconds."""


class Fleet(FrozenModel):
    machines: Annotated[list[FleetMachine], Field(min_length=1, max_length=MAX_MACHINES)]
    links: Annotated[list[Link], Field(max_length=MAX_MACHINES**2)] = Field(default_factory=list)
    service: Name = ""
    """The site of the service, which stores every version."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [machine.name for machine in self.machines]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"machines: the name {min(twice)} is there twice; give each kind its own name")
        if (count := sum(machine.count for machine in self.machines)) > MAX_MACHINES:
            raise ValueError(f"machines: {count} machines, at most {MAX_MACHINES}; plan a part of the fleet")
        sites = {self.service, *(machine.site for machine in self.machines)}
        for link in self.links:
            if unknown := set(link.between) - sites:
                known = ", ".join(sorted(sites))
                raise ValueError(f"links: no machine is at the site {min(unknown)!r}; sites: {known}")
        pairs = [frozenset(link.between) for link in self.links]
        if len(set(pairs)) < len(pairs):
            raise ValueError("links: two links between the same sites; give one, it is for both directions")
        return self

    def link(self, one: str, other: str) -> Link | None:
        """The link between two sites; None within one site, or where the file names none."""
        found = (link for link in self.links if set(link.between) == {one, other})
        return next(found, None) if one != other else None


def read_fleet(path: Path) -> Fleet:
    """The fleet in a YAML or JSON file. Raises :class:`UserError` of one line."""
    return _parsed(Fleet, path, read_mapping(path, "fleet", "machines"))


class PlannedWorker(FrozenModel):
    """One worker of a plan."""

    name: Name
    machine: Name
    """The kind in the fleet file."""
    roles: Annotated[list[Literal["rollout", "train"]], Field(min_length=1, max_length=2)]
    max_rows: int = Field(ge=1)
    """Sequences that decode together."""
    slice_tokens: int = Field(ge=1)
    """Tokens of a training slice."""


class Plan(FrozenModel):
    """A plan file: the workers with their roles, as ``rookery plan --out`` writes it."""

    step_seconds: Positive
    """Predicted seconds of a round, in which every job does one optimizer step."""
    workers: Annotated[list[PlannedWorker], Field(min_length=1, max_length=MAX_MACHINES)]


def read_plan(path: Path) -> Plan:
    """The plan in a YAML or JSON file. Raises :class:`UserError` of one line."""
    return _parsed(Plan, path, read_mapping(path, "plan", "step_seconds and workers"))


Parsed = TypeVar("Parsed", bound=FrozenModel)


def _parsed(model: type[Parsed], path: Path, data: dict[str, Any]) -> Parsed:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{path}: {where}: {message}" if where else f"{path}: {message}") from None
