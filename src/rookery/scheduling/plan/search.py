"""Search for the roles that give the shortest round: HetRL's nested successive halving (arXiv 2512.12476). Pure.

The outer arms are the ways in which tasks share machines (:data:`SHARINGS`), the inner arms the number of machines that
train. An arm begins with the plan in which the machines that train fastest do. It is pulled by a genetic search over
which machines those are: a pull is one more plan, a change of one that the arm has. The arms are pulled in turns, and
after each round the worse half of them is dropped; there are as many rounds, and at the beginning as many arms, as the
budget has pulls for. With the rest of the budget the plan that each of the best arms has found climbs: the role of one
machine changes at a time, or that of all of a site, while that helps. Machines of one kind and site are the same to it,
so a plan is counted once however they are numbered.

The result is never worse than the best plan with equal treatment of equal machines, nor than ``start``: both are
evaluated first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from rookery.scheduling.plan.predict import ROLES, Device, Prediction, Role, able, devices_of, predict
from rookery.spec.fleet import FleetSpec, JobDemand

Sharing = Literal["apart", "shared", "mixed"]

SHARINGS: tuple[Sharing, ...] = ("apart", "shared", "mixed")
"""How tasks share machines: ``apart``: no machine does both; ``shared``: those that train generate too, and nobody else
generates; ``mixed``: those that train generate, and others too."""

POPULATION = 8
"""Plans that an arm keeps: with more, a small budget is spent on its first generation."""

LEAST_PULLS = 4
"""Of an arm in a round. Of more arms than the budget has so many pulls for, the worse are dropped at the beginning, by
their first plan."""

TRIES = 8
"""Children of an arm that are all known: it has no others, or few."""

BUDGET = 1500
"""Evaluations of a search unless the caller gives another number: some seconds for 64 machines."""

ARMS_SHARE = 0.5
"""Of the budget that the first plans leave, for the arms. On fleets of several sites with unlike memory the climb after
them is worth more than twice as many pulls; without any, it ends far from the best plan
(``benchmarks/scale/planning.py``)."""

WORTH_USING = 0.01
"""A machine that shortens the round by a smaller share than this is left out: it costs its price and may break."""

CLIMBING = 3
"""Arms whose best plans climb, after the best of all plans has."""

GENERATES: tuple[Role, ...] = ("off", "rollout")
"""Roles of a machine that does not train."""

SIZES_TRIED = 12
"""Numbers of training machines that are arms; of larger fleets they are spread geometrically."""


@dataclass(frozen=True)
class Found:
    """The best plan of a search."""

    roles: tuple[Role, ...]
    prediction: Prediction
    evaluations: int
    """Different plans whose seconds were predicted."""


@dataclass(frozen=True, kw_only=True)
class SearchParts:
    """The parts of the search. Each can be left out, to measure what it is worth."""

    halving: bool = True
    """Arms are halved; else all are pulled in turns."""
    swaps: bool = True
    """Machines exchange their roles."""
    climb: bool = True
    """The best plans are improved at the end."""


ALL_PARTS = SearchParts()


def search(
    fleet: FleetSpec, devices: Sequence[Device], demands: Sequence[JobDemand], *, budget: int = BUDGET, seed: int = 0,
    start: Sequence[Role] | None = None, parts: SearchParts = ALL_PARTS,
) -> Found:  # fmt: skip
    """The plan with the shortest predicted round within ``budget`` evaluations, among those that give each device roles
    that it may have."""
    given, devices = devices, [able(device, demands) for device in devices]
    evaluate = _Evaluator(fleet, devices, demands, budget)
    if start is not None:
        evaluate([device.limited(role) for device, role in zip(devices, start, strict=True)])
    for roles in homogeneous(devices):
        evaluate(roles)
    arms = _arms(devices, Random(seed), parts.swaps, evaluate)
    if arms and len({_kind(device) for device in devices}) > 1:
        pulls = int(evaluate.left * ARMS_SHARE) if parts.climb else evaluate.left
        _halve(arms, evaluate, pulls) if parts.halving else _pull_in_turns(arms, evaluate, pulls)
        if parts.climb:
            _climb(evaluate, evaluate.best[2])
            for arm in sorted(arms, key=lambda arm: arm.seconds)[:CLIMBING]:
                _climb(evaluate, arm.best)
    if math.isinf(evaluate.best[0]):  # with all roles, the prediction names what is missing
        reserved = any(device.trains for device in given)
        most = [device.limited("rollout" if device.machine.preemptible and reserved else "both") for device in given]
        return Found(evaluate.best[2], predict(fleet, given, demands, most), len(evaluate.known))
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

    def __init__(self, fleet: FleetSpec, devices: Sequence[Device], demands: Sequence[JobDemand], budget: int) -> None:
        self.devices = devices
        self._kinds = [_kind(device) for device in devices]
        self.budget = budget
        nothing: Role = "off"
        self.best: tuple[float, int, tuple[Role, ...]] = (math.inf, 0, (nothing,) * len(devices))
        self.known: dict[tuple[tuple[str, Role, int], ...], Prediction] = {}
        self.predict = lambda roles: predict(fleet, devices, demands, roles)

    @property
    def left(self) -> int:
        """Evaluations of the budget."""
        return max(0, self.budget - len(self.known))

    def knows(self, roles: Sequence[Role]) -> bool:
        return self.key(roles) in self.known

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
            if not self.left:
                return math.inf
            found = self.known[key] = self.predict(roles)
            used = sum(role != "off" for role in roles)
            self.best = min(self.best, (found.seconds, used, tuple(roles)))
        return found.seconds


class _Arm:
    """A number of machines that train and a way to share, with a population of choices of those machines."""

    def __init__(
        self, devices: Sequence[Device], size: int, sharing: Sharing, random: Random, swaps: bool, evaluate: _Evaluator
    ) -> None:
        self._devices = devices
        self._able = [i for i, device in enumerate(devices) if device.trains]
        self._sites = list(dict.fromkeys(device.machine.site for device in devices))
        self._size = size
        self.sharing = sharing
        self._random = random
        self._swaps = swaps
        self._evaluate = evaluate
        first, nothing = tuple(sorted(_by_training(devices)[:size])), frozenset[int]()
        self._population = [(evaluate(self._roles(first, nothing)), first, nothing)]
        """(seconds, machines that train, machines that are not used), the best first."""

    def _roles(self, chosen: Iterable[int], unused: frozenset[int]) -> tuple[Role, ...]:
        return _roles(self._devices, chosen, self.sharing, unused)

    @property
    def seconds(self) -> float:
        return self._population[0][0]

    @property
    def best(self) -> tuple[Role, ...]:
        _, chosen, unused = self._population[0]
        return self._roles(chosen, unused)

    def pull(self) -> bool:
        """One more child, whose worst sibling is evicted. False where :data:`TRIES` children are known."""
        for _ in range(TRIES):
            chosen, unused = self._child()
            roles = self._roles(chosen, unused)
            if not self._evaluate.knows(roles):
                self._population.append((self._evaluate(roles), chosen, unused))
                self._population.sort(key=lambda one: one[0])
                del self._population[POPULATION:]
                return True
        return False

    def _child(self) -> tuple[tuple[int, ...], frozenset[int]]:
        if not self._swaps:
            return tuple(sorted(self._random.sample(self._able, self._size))), frozenset()
        _, chosen, unused = min(self._random.choice(self._population) for _ in range(2))
        inside, outside = list(chosen), [i for i in self._able if i not in chosen]
        others = [i for i in range(len(self._devices)) if i not in inside and i not in unused]
        change = self._random.random()
        if outside and change < 0.6:  # exchange a machine between the groups
            inside[self._random.randrange(len(inside))] = self._random.choice(outside)
            unused = unused - set(inside)
        elif others and change < 0.8:  # take a machine out, or all of a site
            site = self._random.choice(self._sites)
            there = [i for i in others if self._devices[i].machine.site == site]
            unused = unused.union(there if change < 0.7 else [self._random.choice(others)])
        elif unused:  # take one back
            unused = unused - {self._random.choice(sorted(unused))}
        return tuple(sorted(inside)), unused


def _arms(devices: Sequence[Device], random: Random, swaps: bool, evaluate: _Evaluator) -> list[_Arm]:
    able = sum(device.trains for device in devices)
    sizes = sorted({max(1, round(able ** (i / (SIZES_TRIED - 1)))) for i in range(SIZES_TRIED)} if able > SIZES_TRIED
                   else set(range(1, able + 1)))  # fmt: skip
    return [_Arm(devices, size, sharing, random, swaps, evaluate) for sharing in SHARINGS for size in sizes]


def _halve(arms: list[_Arm], evaluate: _Evaluator, pulls: int) -> None:
    """Halving of the sizes within each way of sharing, then of the ways of sharing. Each round has an equal part of the
    ``pulls``; arms for which that part has less than :data:`LEAST_PULLS` are dropped before the first."""
    last = len(evaluate.known) + pulls
    while len(arms) > 1 and len(arms) * _halvings(arms) * LEAST_PULLS > pulls:
        arms = _better_half(arms)
    for left in range(_halvings(arms), 0, -1):
        _pull_in_turns(arms, evaluate, (last - len(evaluate.known)) // left)
        arms = _better_half(arms)


def _halvings(arms: Sequence[_Arm]) -> int:
    """Rounds until one arm is left; 1 for one arm."""
    return max(1, (len(arms) - 1).bit_length())


def _better_half(arms: Sequence[_Arm]) -> list[_Arm]:
    """The better half of the sizes of each way of sharing; of ways with one size each, the better half of the ways."""
    ranked = sorted(arms, key=lambda arm: arm.seconds)
    inner = [[arm for arm in ranked if arm.sharing == sharing] for sharing in SHARINGS]
    if max(map(len, inner)) == 1:
        return ranked[: math.ceil(len(ranked) / 2)]
    return [arm for of in inner for arm in of[: math.ceil(len(of) / 2)]]


def _pull_in_turns(arms: Sequence[_Arm], evaluate: _Evaluator, pulls: int) -> None:
    """``pulls`` new plans, one of each arm after the other."""
    last = min(evaluate.budget, len(evaluate.known) + pulls)
    while arms and len(evaluate.known) < last:
        arms = [arm for arm in arms if len(evaluate.known) >= last or arm.pull()]


def _climb(evaluate: _Evaluator, roles: tuple[Role, ...]) -> None:
    """A plan with another role for one machine, or for all of a site that only generate or are not used, while that is
    better."""
    devices, before, now = evaluate.devices, math.inf, evaluate(roles)
    sites = {device.machine.site for device in devices}
    exchanged: dict[Role, Role] = {"rollout": "off", "off": "rollout"}
    while now < before and evaluate.left:
        before = now
        for site in sorted(sites) if len(sites) > 1 else ():
            for old, new in exchanged.items():
                at = [role == old and device.machine.site == site for device, role in zip(devices, roles, strict=True)]
                tried = tuple(devices[i].limited(new) if at[i] else role for i, role in enumerate(roles))
                if (seconds := evaluate(tried)) < now:
                    now, roles = seconds, tried
        for i in range(len(devices)):
            for role in dict.fromkeys(map(devices[i].limited, ROLES if devices[i].trains else GENERATES)):
                tried = (*roles[:i], role, *roles[i + 1 :])
                if (seconds := evaluate(tried)) < now:
                    now, roles = seconds, tried


def _trimmed(evaluate: _Evaluator) -> Found:
    """The best plan without roles that nobody plays and machines that it does not need, the slowest first, until there
    are none: without one, another may be needless. A few predictions for each machine, which no budget counts."""
    best, _, roles = evaluate.best
    seconds, before = best, roles[:0]
    while roles != before:
        before = roles
        for i in sorted(range(len(roles)), key=lambda i: -evaluate.devices[i].machine.train_token):
            for less in _LESSER[roles[i]]:
                tried = (*roles[:i], less, *roles[i + 1 :])
                found = evaluate.predict(tried).seconds
                if found <= (best * (1 + WORTH_USING) if less == "off" else seconds):
                    roles, seconds = tried, max(seconds, found)
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
