"""The ways of using the same machines that a simulation compares. Each is the shipped controller; what a mode leaves
out, it leaves out by giving the controller another part."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rookery.controller.offload.seeding import Seeding
from rookery.controller.parts import SHIPPED, Overrides
from rookery.controller.rollout.request import InflightRequest
from rookery.controller.rollout.scheduler import RolloutScheduler
from rookery.errors import UserError
from rookery.scheduling.offload import Seeding as Algorithm
from rookery.simulation.profile import Profile

Role = Literal["rollout", "train"]


class StartingOver(RolloutScheduler):
    """A rollout whose worker was lost or left begins again from its first token."""

    thrown_away = 0
    """Tokens that were received, and are generated again."""

    def _requeue(self, live: InflightRequest, reason: str) -> None:
        if reason in ("lost", "rejected") and not live.done.done():
            reply = live.reply
            self.thrown_away += len(reply.tokens)
            for received in (reply.tokens, reply.logprobs, reply.versions):
                received.clear()
        super()._requeue(live, reason)


class _NeverSeeds(Algorithm):
    """T_seed is 0. The number of instances that pay off is learned all the same."""

    def begin(self, instances: int) -> None:
        self.seconds = 0.0


class _Forgets(Algorithm):
    """T_seed is what the cycle before made of it, however many instances there are now."""

    def begin(self, instances: int) -> None:
        self.memory.clear()


class NeverSeeding(Seeding):
    """Training workers generate only while nobody else can."""

    algorithm = _NeverSeeds


class Forgetful(Seeding):
    """T_seed is learned anew whenever the number of instances changes."""

    algorithm = _Forgets


@dataclass(frozen=True)
class Mode:
    name: str
    about: str
    reserved: tuple[Role, ...] = ("rollout", "train")
    """What reserved workers do."""
    most: Callable[[Profile, int, int], int | None] = lambda profile, episodes, reserved: None
    """(profile, a step's episodes, reserved workers) → the most preemptible instances that it rents; None is as many as
    the controller finds worth it."""
    parts: Overrides = SHIPPED


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
        Mode(
            "no-seeding",
            "reserved machines generate only while there is nobody else",
            parts=Overrides(seeding=NeverSeeding),
        ),
        Mode("no-migration", "a rollout whose instance left starts over", parts=Overrides(rollouts=StartingOver)),
        Mode("no-memory", "the time of seeding is learned anew at each change", parts=Overrides(seeding=Forgetful)),
    )
}
"""By name, in the order in which they are shown; the first is what the others are compared with."""


def chosen(names: str) -> list[Mode]:
    """The modes in a comma-separated list, in its order; ``all`` is all. Raises :class:`UserError`."""
    if names == "all":
        return list(MODES.values())
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in MODES:
            raise UserError(f"modes: given {name!r}, allowed: all, or some of {', '.join(MODES)}")
    return [MODES[name] for name in dict.fromkeys(wanted)]
