"""Predicted seconds of a round, in which every job does one optimizer step, on unlike machines with given roles. Pure.

The problem is HetRL's (arXiv 2512.12476): a graph of tasks (generate, train, publish) on a graph of machines. Here a
task runs on one machine at a time or is divided by data alone, so a plan is a role for each machine.

A round takes the longer of

* the pool: the seconds in which all workers with the role ``rollout`` generate the episodes of all jobs, next to the
  training that workers with both roles do, shared so that all end together. Jobs that are on-policy fall into step, for
  they share the workers fairly: they generate together and then train together, and nothing of it overlaps. With
  ``max_staleness`` s, 1 / (s + 1) of what could overlap does not (HetRL's Φ with η = s / (s + 1)), and
* the chain of each job: its own rollouts with their tail, the training that is left after them, the optimizer step,
  and the way of the new version to the workers, divided by ``max_staleness`` + 1 steps that may overlap.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from rookery.errors import count_of
from rookery.scheduling.costs import interpolate
from rookery.spec.fleet import FleetMachine, FleetSpec, JobDemand, Plan, PlannedWorker
from rookery.spec.machine import decode_seconds

Role = Literal["off", "rollout", "train", "both"]

PLAYS: dict[Role, tuple[Literal["rollout", "train"], ...]] = {
    "off": (), "rollout": ("rollout",), "train": ("train",), "both": ("rollout", "train"),
}  # fmt: skip
"""The roles of a worker, by what a plan makes of its machine."""

ROLES = tuple(PLAYS)

SEARCH_STEPS = 20
"""Halvings of the interval in which the end of a round is searched: relative 1e-6 of its upper end."""


def role_of(played: Iterable[str]) -> Role:
    """The role of a machine whose worker has these."""
    return next(role for role, roles in PLAYS.items() if {*played} == {*roles})


@dataclass(frozen=True)
class Device:
    """One machine of a fleet."""

    name: str
    machine: FleetMachine
    may: frozenset[str] = frozenset(PLAYS["both"])
    """Roles that it may have: those with which its worker was started."""

    @property
    def trains(self) -> bool:
        """Whether it may train."""
        return "train" in self.may and not self.machine.preemptible

    def limited(self, role: Role) -> Role:
        """As much of ``role`` as it may have."""
        return role_of(self.may.intersection(PLAYS[role]))


def able(device: Device, demands: Sequence[JobDemand]) -> Device:
    """The device with those of its roles for which it has the context and the memory."""
    machine = device.machine
    reads = machine.context > max(demand.prompt_tokens for demand in demands)
    able_to = {
        "rollout": reads and fitting_rows(machine, demands, 0, trains=False) > 0,
        "train": _trains_in_memory(machine, demands, 1),
    }
    return replace(device, may=frozenset(role for role in device.may if able_to[role]))


def devices_of(fleet: FleetSpec) -> list[Device]:
    """Every machine of the fleet under its name, in the file's order."""
    return [Device(f"{kind.name}-{i}", kind) for kind in fleet.machines for i in range(kind.count)]


@dataclass(frozen=True)
class DeviceUse:
    """One machine of a plan, with its predicted load."""

    role: Role
    rows: int
    """Sequences that decode together at most; 0 without the role ``rollout``."""
    episodes: float
    """Of a round, of all jobs; where several policies reply in one, it counts once for each reply."""
    policies: tuple[str, ...]
    """Policies that it trains, with others where one is divided, by the names of their demands."""
    rollout_seconds: float
    """Seconds of rollouts in a round."""
    train_seconds: float
    """Seconds of training in a round."""


@dataclass(frozen=True)
class Prediction:
    seconds: float
    """Seconds of a round; infinite where the plan cannot be run."""
    uses: tuple[DeviceUse, ...] = ()
    """By the fleet's devices."""
    problem: str = ""
    """Why the plan cannot be run."""

    def busy(self, device: int) -> float:
        """Share of a round in which a machine computes."""
        use = self.uses[device]
        return (use.rollout_seconds + use.train_seconds) / self.seconds


def impossible(problem: str) -> Prediction:
    return Prediction(math.inf, (), problem)


def plan_of(fleet: FleetSpec, devices: Sequence[Device], demands: Sequence[JobDemand], prediction: Prediction) -> Plan:
    """The plan that a file holds: every machine that has a role."""
    workers = [
        PlannedWorker(
            name=device.name,
            machine=device.machine.name,
            roles=list(PLAYS[use.role]),
            max_rows=use.rows or device.machine.rows,
            slice_tokens=device.machine.train_slice,
        )
        for device, use in zip(devices, prediction.uses, strict=True)
        if PLAYS[use.role]
    ]
    return Plan(step_seconds=prediction.seconds, workers=workers, fleet=fleet, jobs=list(demands))


def predict(
    fleet: FleetSpec,
    devices: Sequence[Device],
    demands: Sequence[JobDemand],
    roles: Sequence[Role],
    *,
    balanced: bool = True,
) -> Prediction:
    """The seconds of a round with these ``roles``, one for each of ``devices``. ``balanced``: each worker takes as many
    episodes as it can do until the others end, as the shipped placement does; else all take equally many."""
    rolling = [i for i, role in enumerate(roles) if "rollout" in PLAYS[role]]
    training = [i for i, role in enumerate(roles) if "train" in PLAYS[role]]
    if not rolling or not training:
        return impossible("no machine generates" if not rolling else "no machine trains")
    if taken := [devices[i].name for i in training if devices[i].machine.preemptible]:
        return impossible(f"{taken[0]} may vanish, so it cannot train")
    if fixed := [device.name for device, role in zip(devices, roles, strict=True) if device.limited(role) != role]:
        return impossible(f"{fixed[0]} was started without a role that it would have")
    trainers = _assign_trainers(devices, demands, training)
    train = _train_seconds(devices, demands, trainers)
    policies = {i: tuple(demands[j].name for j, at in enumerate(trainers) if i in at) for i in training}
    rows = {}
    prompt = max(demand.prompt_tokens for demand in demands)
    for i in rolling:
        if devices[i].machine.context <= prompt:
            context = devices[i].machine.context
            return impossible(f"{devices[i].name} has a context of {count_of(context, 'token')}, a prompt has {prompt}")
        states = len(policies.get(i, ()))
        rows[i] = fitting_rows(devices[i].machine, demands, states, trains=i in training)
        if rows[i] < 1:
            return impossible(f"{devices[i].name} has no memory for one sequence in addition to what it holds")
    for i in training:
        if i not in rows and not _trains_in_memory(devices[i].machine, demands, len(policies[i])):
            return impossible(
                f"{devices[i].name} has no memory for the states of {count_of(len(policies[i]), 'policy')}"
            )
    pool = _pool(devices, demands, rolling, rows, train, balanced)
    generating = _pool(devices, demands, rolling, rows, {}, balanced)
    apart = generating.seconds + max(train.values())
    overlap = max(pool.seconds, max(train.values()))
    total = sum(demand.replies for demand in demands)
    serial = sum(demand.replies / (demand.staleness + 1) for demand in demands) / total  # what does not overlap
    chains = [_chain(fleet, devices, demands, j, rolling, rows, trainers[j], balanced) for j in range(len(demands))]
    seconds = max(overlap + max(0.0, serial * (apart - overlap)), *chains)

    def mean(overlapped: dict[int, float], alone: dict[int, float], i: int) -> float:
        return (1 - serial) * overlapped.get(i, 0.0) + serial * alone.get(i, 0.0)

    uses = [
        DeviceUse(
            role, rows.get(i, 0), mean(pool.episodes, generating.episodes, i), policies.get(i, ()),
            mean(pool.busy, generating.busy, i), train.get(i, 0.0),
        )
        for i, role in enumerate(roles)
    ]  # fmt: skip
    return Prediction(seconds, tuple(uses))


# --- memory -----------------------------------------------------------------------------------------------------------


def fitting_rows(machine: FleetMachine, demands: Sequence[JobDemand], states: int, *, trains: bool) -> int:
    """Sequences of the longest kind that decode together within the machine's memory, ``states`` training states and
    the activations of a training slice excluded; 0 where none fits."""
    longest = max(demand.longest for demand in demands)
    tokens = machine.cache_tokens
    if (memory := machine.memory) is not None:
        free = _free_bytes(machine, demands, states)
        free -= memory.train_token * machine.train_slice * trains
        tokens = min(tokens, int(free // memory.cache_token) if memory.cache_token else tokens) if free > 0 else 0
    if longest > machine.context:
        longest = machine.context
    return max(0, min(machine.rows, tokens // longest))


def _trains_in_memory(machine: FleetMachine, demands: Sequence[JobDemand], states: int) -> bool:
    if machine.memory is None:
        return True
    return _free_bytes(machine, demands, states) >= machine.memory.train_token * machine.train_slice


def _free_bytes(machine: FleetMachine, demands: Sequence[JobDemand], states: int) -> float:
    """The bytes of a described memory that the base model and so many training states leave free. Each state counts as
    the largest: which policies train where may change. Below 0 where the states do not fit."""
    memory, scale = machine.memory, max(demand.scale for demand in demands)
    if memory is None:
        return math.inf
    held = states * (machine.state_bytes if memory.state is None else memory.state) * scale
    copied = (machine.adapter_bytes + machine.state_bytes) * scale  # of one version, on its way to files
    if states and memory.states is not None and held + copied > memory.states:
        return -math.inf
    return memory.total - memory.base - held


# --- training ---------------------------------------------------------------------------------------------------------


def _assign_trainers(
    devices: Sequence[Device], demands: Sequence[JobDemand], training: Sequence[int]
) -> list[tuple[int, ...]]:
    """The machines that train each job, the one that holds the policy first: the largest job first, each where it ends
    earliest; helpers are those that end earliest then. The shipped dispatcher goes by load, which is the same order on
    equal machines."""
    ends = dict.fromkeys(training, 0.0)
    found: list[tuple[int, ...]] = [()] * len(demands)
    for j in sorted(range(len(demands)), key=lambda j: -demands[j].train_tokens):
        demand = demands[j]

        def end(i: int, tokens: float = demand.train_tokens) -> float:
            machine = devices[i].machine
            return ends[i] + tokens * machine.train_token + machine.optimizer

        best = sorted(training, key=lambda i: (end(i), i))
        chosen = best[:1]
        for helper in best[1 : demand.trainers]:  # a helper must shorten the step: shares are equal
            share = demand.train_tokens / (len(chosen) + 1)
            longest = max(end(i, share) for i in [*chosen, helper])
            if longest < max(end(i, demand.train_tokens / len(chosen)) for i in chosen):
                chosen.append(helper)
        found[j] = tuple(chosen)
        for i in chosen:
            ends[i] = end(i, demand.train_tokens / len(chosen))
    return found


def _train_seconds(
    devices: Sequence[Device], demands: Sequence[JobDemand], trainers: Sequence[tuple[int, ...]]
) -> dict[int, float]:
    """Seconds of training of each machine in a round."""
    found: dict[int, float] = {}
    for demand, at in zip(demands, trainers, strict=True):
        for i in at:
            machine = devices[i].machine
            own = demand.train_tokens / len(at) * machine.train_token
            found[i] = found.get(i, 0.0) + own + (machine.optimizer if i == at[0] else 0.0)
    return found


def _transfer(fleet: FleetSpec, one: Device, other_site: str, size: float, bandwidth: float) -> float:
    """Seconds of ``size`` bytes between a machine and a site."""
    latency, rate = fleet.over_link(one.machine, other_site, bandwidth)
    return latency + size / rate


# --- rollouts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pool:
    seconds: float
    episodes: dict[int, float]
    busy: dict[int, float]


def _pool(
    devices: Sequence[Device],
    demands: Sequence[JobDemand],
    rolling: Sequence[int],
    rows: dict[int, int],
    train: dict[int, float],
    balanced: bool,
) -> _Pool:
    """All jobs' rollouts in a round at full batches: jobs fill each other's tails."""
    total = sum(demand.replies for demand in demands)
    mean = sum(demand.replies * demand.mean_tokens for demand in demands) / total
    prefill = sum(demand.replies * demand.episode_prefill / demand.turns for demand in demands) / total
    replying = round(sum(demand.episodes / demand.policies for demand in demands))  # one reply of an episode at a time
    together = max(1, replying)
    per_episode = {}
    for i in rolling:
        machine = devices[i].machine
        batch = min(rows[i], together)
        per_episode[i] = mean * machine.decode_step(batch) / batch + prefill * machine.prefill_token
    if balanced:  # all that take any end at the same time: (total + Σ train_i / per_i) / Σ 1 / per_i
        taking = list(rolling)
        while True:
            rate = sum(1 / per_episode[i] for i in taking)
            seconds = (total + sum(train.get(i, 0.0) / per_episode[i] for i in taking)) / rate
            late = [i for i in taking if train.get(i, 0.0) >= seconds]
            if not late or len(late) == len(taking):
                break
            taking = [i for i in taking if i not in late]
        share = {i: max(0.0, seconds - train.get(i, 0.0)) / per_episode[i] for i in taking}
    else:
        share = {i: total / len(rolling) for i in rolling}
    busy = {i: share.get(i, 0.0) * per_episode[i] for i in rolling}
    return _Pool(max(busy[i] + train.get(i, 0.0) for i in rolling), share, busy)


def _chain(
    fleet: FleetSpec,
    devices: Sequence[Device],
    demands: Sequence[JobDemand],
    j: int,
    rolling: Sequence[int],
    rows: dict[int, int],
    trainers: tuple[int, ...],
    balanced: bool,
) -> float:
    """Seconds of one job's step by itself, divided by the steps that may overlap."""
    demand = demands[j]
    holder = devices[trainers[0]]
    machine = holder.machine
    alone = max(demand.train_tokens / len(trainers) * devices[i].machine.train_token for i in trainers)
    early = 0.0
    if 0 < demand.micro_batch < demand.episodes:  # the rest is trained on while episodes still run
        early = alone * (1 - demand.micro_batch / demand.episodes)
    offsets = {i: early for i in trainers if i in rolling}
    ends = [_Finish(devices[i].machine, rows[i], demand, offsets.get(i, 0.0)) for i in rolling]
    rollout = _finish_together(ends, demand.episodes) if balanced else max(
        end.seconds(demand.episodes / len(ends)) for end in ends
    )  # fmt: skip
    pulls = [(devices[i], devices[i].machine.adapter_bytes * demand.scale) for i in rolling]
    pull = max(_transfer(fleet, device, fleet.service, size, device.machine.download) for device, size in pulls)
    written = (machine.adapter_bytes + machine.state_bytes) * demand.scale
    publish = _transfer(fleet, holder, fleet.service, written, machine.upload) + pull
    gradient = 0.0
    for i in trainers[1:]:  # each helper sends its share's gradient, in float32 as the state's masters
        helper = devices[i]
        share = machine.state_bytes * demand.scale / 3
        sent = _transfer(fleet, helper, fleet.service, share, helper.machine.upload)
        gradient = max(gradient, sent)
    trained = max(rollout, early) + alone - early
    environment = demand.environment * demand.turns
    return (environment + trained + gradient + machine.optimizer + publish) / (demand.staleness + 1)


class _Finish:
    """When a machine ends some episodes of one job; their replies follow each other."""

    def __init__(self, machine: FleetMachine, rows: int, demand: JobDemand, offset: float) -> None:
        self._offset = offset
        self._prefill = demand.episode_prefill * machine.prefill_token
        lengths = tuple(demand.turns * length for length in demand.lengths())
        self._counts, self._seconds = _curve(
            tuple(machine.decode), min(rows, demand.episodes), lengths, demand.episodes
        )

    def seconds(self, episodes: float) -> float:
        """The time until so many episodes have ended."""
        if episodes <= 0:
            return self._offset
        return self._offset + episodes * self._prefill + interpolate(self._counts, self._seconds, episodes)

    def episodes(self, seconds: float) -> float:
        """How many episodes have ended after so many ``seconds``."""
        low, high = 0.0, float(self._counts[-1])
        if self.seconds(high) <= seconds:
            return high
        if self.seconds(1.0) > seconds:
            return 0.0
        for _ in range(SEARCH_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.seconds(middle) <= seconds else (low, middle)
        return low


def _finish_together(ends: Sequence[_Finish], episodes: int) -> float:
    """The seconds after which all machines together have ended ``episodes``."""
    low, high = 0.0, max(end.seconds(episodes) for end in ends)
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        if sum(end.episodes(middle) for end in ends) >= episodes:
            high = middle
        else:
            low = middle
    return high


@lru_cache(maxsize=4096)
def _curve(
    decode: tuple[tuple[int, float], ...], rows: int, lengths: tuple[float, ...], most: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(episodes, seconds until the last of them ends), for powers of two up to ``most`` and ``most``."""
    counts = sorted({min(2**power, most) for power in range(most.bit_length() + 1)})
    return tuple(map(float, counts)), tuple(_decode_seconds(decode, rows, lengths, count) for count in counts)


def _decode_seconds(decode: tuple[tuple[int, float], ...], rows: int, lengths: tuple[float, ...], count: int) -> float:
    """Seconds until ``count`` replies have ended that decode at most ``rows`` at a time, each next one when a row is
    free. The lengths are spread over the distribution, the longest ones first, as the shipped order tries to."""
    step = [decode_seconds(decode, active) for active in range(min(rows, count) + 1)]
    drawn = [lengths[int((i + 0.5) * len(lengths) / count)] for i in range(count)][::-1]
    ends: list[float] = []
    position = seconds = 0.0
    for length in drawn:
        if len(ends) == rows:
            end = heapq.heappop(ends)
            seconds += (end - position) * step[rows]
            position = end
        heapq.heappush(ends, position + length)
    while ends:
        active = len(ends)
        end = heapq.heappop(ends)
        seconds += (end - position) * step[active]
        position = end
    return seconds
