"""The rooms of the controller and its services, for the jobs and sessions that stand above them. Fields only."""

from __future__ import annotations

from dataclasses import dataclass

from rookery.controller.fleet.env_hosts import EnvironmentHosts
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.offload.seeding import Seeding
from rookery.controller.outages import Outages
from rookery.controller.quotas import Quotas
from rookery.controller.rollout.elastic import ModelUse
from rookery.controller.rollout.scheduler import RolloutScheduler
from rookery.controller.services import Records, Services
from rookery.controller.training.dispatcher import TrainingDispatcher
from rookery.controller.usage import UsageMeter
from rookery.controller.weights.gc import ArtifactCollector
from rookery.controller.weights.store import WeightStore


@dataclass(frozen=True, kw_only=True)
class Rooms:
    """The rooms below jobs and sessions. A room itself gets the two or three others that it uses."""

    fleet: Fleet
    weights: WeightStore
    rollouts: RolloutScheduler
    training: TrainingDispatcher
    seeding: Seeding
    hosts: EnvironmentHosts
    usage: UsageMeter
    models: ModelUse
    quotas: Quotas
    collector: ArtifactCollector


@dataclass(frozen=True, kw_only=True)
class ControllerContext(Services):
    """The services, the records and the rooms: for jobs, sessions and queries, which use nearly all of them. A room
    below gets those that it uses, one by one."""

    records: Records
    rooms: Rooms
    outages: Outages
