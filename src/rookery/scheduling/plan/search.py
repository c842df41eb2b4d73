"""Search for the roles that give the shortest round: HetRL's nested successive halving (arXiv 2512.12476). Pure.

The outer arms are the ways in which tasks share machines (:data:`SHARINGS`), the inner arms the number of machines that
train. An arm is pulled by a genetic search over which machines those are; after each round of pulls the worse half of
the arms is dropped and the budget of the others doubles. With the rest of the budget the best plan climbs: the role of
one machine changes at a time, while that helps. Machines of one kind and site are the same to it, so a plan is counted
once however they are numbered.

The result is never worse than the best plan with equal treatment of equal machines, nor than ``start``: both are
evaluated first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from rookery.scheduling.plan.predict import ROLES, Device, Prediction, Role, devices_of, predict
from rookery.spec.fleet import FleetSpec, JobDemand

Sharing = Literal["apart", "shared", "mixed"]

SHARINGS: tuple[Sharing, ...] = ("apart", "shared", "mixed")
"""How tasks share machines: ``apart``: no machine does both; ``shared``: those that train generate too, and nobody else
generates; ``mixed``: those that train generate beside the others."""

POPULATION = 8
"""Plans that an arm keeps: with more, a small budget is spent on its first generation."""

FIRST_PULL = 8
"""Evaluations of an arm's first pull, its population once."""

BUDGET = 1500
"""Evaluations of a search unless the caller gives another number: some seconds for 64 machines."""

ARMS_SHARE = 0.5
"""Of a budget, for the arms. On fleets of several sites with unlike memory the climb after them is worth more than
twice as many pulls; without any, it ends far from the best plan (``benchmarks/scale/planning.py``)."""

WORTH_USING = 0.01
"""A machine that shortens the round by a smaller share than this is left out: it costs its price and may break."""

SIZES_TRIED = 12
"""Numbers of training machines that are arms; of larger fleets they are spread geometrically."""


@dataclass(frozen=True)
class Found:
    """The best plan of a search."""

    roles: tuple[Role, ...]
    prediction: Prediction
    evaluations: int
    """Different plans whose seconds were predicted."""


def search(
    fleet: FleetSpec, devices: Sequence[Device], demands: Sequence[JobDemand], *, budget: int = BUDGET, seed: int = 0,
    start: Sequence[Role] | None = None, halving: bool = True, swaps: bool = True, climb: bool = True,
    balanced: bool = True,
) -> Found:  # fmt: skip
    """The plan with the shortest predicted round within ``budget`` evaluations, among those that give each device roles
    that it may have. ``halving``, ``swaps`` and ``climb`` switch off the halving of arms, the exchange of machines
    between roles and the last climb, to measure what each is worth."""
    evaluate = _Evaluator(fleet, devices, demands, int(budget * ARMS_SHARE) if climb else budget, balanced)
    if start is not None:
        evaluate([device.limited(role) for device, role in zip(devices, start, strict=True)])
    for roles in homogeneous(devices):
        evaluate(roles)
    arms = _arms(devices, Random(seed), swaps)
    if arms and len({_kind(device) for device in devices}) > 1:
        _halve(arms, evaluate) if halving else _take_turns(arms, evaluate)
        if climb:
            evaluate.budget = budget
            _climb(evaluate)
    return _trimmed(evaluate)


def gains(
    fleet: FleetSpec, demands: Sequence[JobDemand], found: Found, *, budget: int = BUDGET, seed: int = 0
) -> dict[str, float]:
    """By kind of machine, the share of the round that one more of it would save. Below 0 by :data:`WORTH_USING` at
    most, where machines are left out that save less."""
    saved = {}
    for kind in fleet.machines:
        more = kind.model_copy(update={"count": kind.count + 1})
        larger = fleet.model_copy(update={"machines": [more if m.name == kind.name else m for m in fleet.machines]})
        devices = devices_of(larger)
        at = next(i for i, device in enumerate(devices) if device.name == f"{kind.name}-{kind.count}")
        start: tuple[Role, ...] = (*found.roles[:at], "off", *found.roles[at:])
        best = search(larger, devices, demands, budget=budget, seed=seed, start=start)
        saved[kind.name] = 1 - best.prediction.seconds / found.prediction.seconds
    return saved


def homogeneous(devices: Sequence[Device]) -> Iterable[tuple[Role, ...]]:
    """Plans that treat machines alike but for the number that train: those that train fastest do."""
    order = _by_training(devices)
    for sharing in SHARINGS:
        for size in range(1, len(order) + 1):
            yield _roles(devices, order[:size], sharing)


class _Evaluator:
    """Predicts each different plan once, up to a number of them, and keeps the best."""

    def __init__(
        self, fleet: FleetSpec, devices: Sequence[Device], demands: Sequence[JobDemand], budget: int, balanced: bool
    ) -> None:
        self.devices = devices
        self._kinds = [_kind(device) for device in devices]
        self.budget = budget
        nothing: Role = "off"
        self.best: tuple[float, int, tuple[Role, ...]] = (math.inf, 0, (nothing,) * len(devices))
        self.known: dict[tuple[tuple[str, Role, int], ...], Prediction] = {}
        self.predict = lambda roles: predict(fleet, devices, demands, roles, balanced=balanced)

    @property
    def spent(self) -> bool:
        return len(self.known) >= self.budget

    def key(self, roles: Sequence[Role]) -> tuple[tuple[str, Role, int], ...]:
        counts: dict[tuple[str, Role], int] = {}
        for kind, role in zip(self._kinds, roles, strict=True):
            counts[kind, role] = counts.get((kind, role), 0) + 1
        return tuple(sorted((kind, role, count) for (kind, role), count in counts.items()))

    def __call__(self, roles: Sequence[Role]) -> float:
        """The seconds of a plan; infinite once the budget is spent, for a plan that was not predicted before."""
        key = self.key(roles)
        found = self.known.get(key)
        if found is None:
            if self.spent:
                return math.inf
            found = self.known[key] = self.predict(roles)
            used = sum(role != "off" for role in roles)
            self.best = min(self.best, (found.seconds, used, tuple(roles)))
        return found.seconds


class _Arm:
    """A number of machines that train and a way to share, with a population of choices of those machines."""

    def __init__(self, devices: Sequence[Device], size: int, sharing: Sharing, random: Random, swaps: bool) -> None:
        self._devices = devices
        self._size = size
        self.sharing = sharing
        self._random = random
        self._swaps = swaps
        self._population: list[tuple[float, tuple[int, ...], frozenset[int]]] = []
        """(seconds, machines that train, machines that are not used)."""

    @property
    def seconds(self) -> float:
        return self._population[0][0] if self._population else math.inf

    def pull(self, evaluate: _Evaluator, rounds: int) -> None:
        """``rounds`` more children, whose worst are evicted."""
        for _ in range(rounds):
            if evaluate.spent:
                return
            chosen, unused = self._child()
            roles = _roles(self._devices, chosen, self.sharing, unused)
            self._population.append((evaluate(roles), chosen, unused))
            self._population.sort(key=lambda one: one[0])
            del self._population[POPULATION:]

    def _child(self) -> tuple[tuple[int, ...], frozenset[int]]:
        able = [i for i, device in enumerate(self._devices) if device.trains]
        if len(self._population) < POPULATION // 2 or not self._swaps:
            return tuple(self._random.sample(able, self._size)), frozenset()
        _, chosen, unused = self._random.choice(self._population)
        inside, outside = list(chosen), [i for i in able if i not in chosen]
        change = self._random.random()
        if outside and change < 0.7:  # exchange a machine between the groups
            inside[self._random.randrange(len(inside))] = self._random.choice(outside)
            unused = unused - set(inside)
        elif change < 0.9:  # take a machine out
            others = [i for i in range(len(self._devices)) if i not in inside and i not in unused]
            unused = unused | {self._random.choice(others)} if others else unused
        elif unused:  # take one back
            unused = unused - {self._random.choice(sorted(unused))}
        return tuple(sorted(inside)), unused


def _arms(devices: Sequence[Device], random: Random, swaps: bool) -> list[_Arm]:
    able = sum(device.trains for device in devices)
    sizes = sorted({max(1, round(able ** (i / (SIZES_TRIED - 1)))) for i in range(SIZES_TRIED)} if able > SIZES_TRIED
                   else set(range(1, able + 1)))  # fmt: skip
    return [_Arm(devices, size, sharing, random, swaps) for sharing in SHARINGS for size in sizes]


def _halve(arms: list[_Arm], evaluate: _Evaluator) -> None:
    """Halving of the sizes within each way of sharing, then of the ways of sharing; the last arm takes the rest."""
    rounds, by_sharing = FIRST_PULL, {sharing: [a for a in arms if a.sharing == sharing] for sharing in SHARINGS}
    while not evaluate.spent:
        for sharing, inner in by_sharing.items():
            for arm in inner:
                arm.pull(evaluate, rounds)
            inner.sort(key=lambda arm: arm.seconds)
            by_sharing[sharing] = inner[: max(1, math.ceil(len(inner) / 2))]
        ranked = sorted(by_sharing.items(), key=lambda item: item[1][0].seconds)
        by_sharing = dict(ranked[: max(1, math.ceil(len(ranked) / 2))]) if rounds > FIRST_PULL else dict(ranked)
        if rounds > 2 * evaluate.budget:  # everything that the last arms can reach is known
            return
        rounds *= 2


def _take_turns(arms: list[_Arm], evaluate: _Evaluator) -> None:
    """Equal budgets for all arms."""
    share = max(1, evaluate.budget // len(arms))
    for arm in arms:
        arm.pull(evaluate, share)


def _climb(evaluate: _Evaluator) -> None:
    """The best plan with another role for one machine, while that is better."""
    before = math.inf
    while evaluate.best[0] < before and not evaluate.spent:
        before = evaluate.best[0]
        for i in range(len(evaluate.devices)):
            for role in dict.fromkeys(map(evaluate.devices[i].limited, ROLES)):
                roles = evaluate.best[2]
                evaluate((*roles[:i], role, *roles[i + 1 :]))


def _trimmed(evaluate: _Evaluator) -> Found:
    """The best plan without roles that nobody plays and machines that it does not need, the slowest first. A few
    predictions for each machine, which no budget counts."""
    best, _, roles = evaluate.best
    if math.isinf(best):
        reserved = any(device.trains for device in evaluate.devices)
        most = [
            device.limited("rollout" if device.machine.preemptible and reserved else "both")
            for device in evaluate.devices
        ]
        return Found(roles, evaluate.predict(most), len(evaluate.known))
    for i in sorted(range(len(roles)), key=lambda i: -evaluate.devices[i].machine.train_token):
        for less in _LESSER[roles[i]]:
            tried = (*roles[:i], less, *roles[i + 1 :])
            if evaluate.predict(tried).seconds <= best * (1 + (WORTH_USING if less == "off" else 0)):
                roles = tried
                break
    return Found(roles, evaluate.predict(roles), len(evaluate.known))


_LESSER: dict[Role, tuple[Role, ...]] = {
    "both": ("off", "rollout", "train"), "rollout": ("off",), "train": ("off",), "off": (),
}  # fmt: skip
"""Roles that ask less of a machine, the least first."""


def _roles(
    devices: Sequence[Device], training: Iterable[int], sharing: Sharing, unused: frozenset[int] = frozenset()
) -> tuple[Role, ...]:
    chosen = set(training)
    trains: Role = "train" if sharing == "apart" else "both"
    others: Role = "off" if sharing == "shared" else "rollout"
    roles = ("off" if i in unused else trains if i in chosen else others for i in range(len(devices)))
    return tuple(device.limited(role) for device, role in zip(devices, roles, strict=True))


def _by_training(devices: Sequence[Device]) -> list[int]:
    """Machines that may train, the fastest first."""
    able = [i for i, device in enumerate(devices) if device.trains]
    return sorted(able, key=lambda i: (devices[i].machine.train_token, i))


def _kind(device: Device) -> str:
    """Devices of one kind are the same to a plan."""
    return f"{device.machine.name}, {'+'.join(sorted(device.may))}"
