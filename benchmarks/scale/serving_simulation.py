"""The SLO gate on one worker in virtual time: interactive requests in bursts beside endless rollouts and training.

``python -m benchmarks.scale.serving_simulation``; seconds. The decisions are the shipped ones
(:mod:`rookery.scheduling.slo`); the worker is a loop over slices whose costs were measured on two cores. The oracle has
the true costs, no margin, and knows every arrival before it comes.
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_left
from dataclasses import dataclass, field

from benchmarks.lib.harness import Result, command

from rookery.scheduling import slo
from rookery.scheduling.slo import CostTable, Demand, Kind, deadline

ROWS, PREFILL = 64, 512
DECODE = {1: 0.018, 4: 0.026, 16: 0.052, 64: 0.16}
"""Seconds of a decode step of the 135M model on two cores, by rows …"""
PREFILL_TOKEN = 0.0007
"""… of a prompt token …"""
TRAIN = 0.9
"""… and of a training slice."""
TTFT, TPOT = 2.0, 0.15
"""Objectives in seconds."""
PROMPT, REPLY = (8, 120), (8, 40)
"""Least and mean tokens of an interactive request, which are exponential above the least."""
BURST = 4.0
"""Arrivals of a peak second over the mean; one second in eight is a peak."""
SEEDS = 20
SHAKE = 0.1
"""Standard deviation of a slice's cost, log-normal."""


@dataclass(frozen=True)
class Load:
    """``share`` of the worker's time that its interactive requests would take alone."""

    share: float
    seconds: float = 300.0
    seed: int = 0
    error: float = 1.0
    """The gate's table at the start over the truth."""


@dataclass(frozen=True)
class Arm:
    gate: bool = False
    oracle: bool = False
    split: int = ROWS
    """Rows that rollouts may have beside interactive requests."""
    rollouts: bool = True
    chats: bool = True


ARMS = {
    "serving only": Arm(rollouts=False),
    "rollouts only": Arm(chats=False),
    "no gate": Arm(),
    "fixed split": Arm(split=ROWS // 2),
    "gate": Arm(gate=True),
    "oracle": Arm(gate=True, oracle=True),
}


@dataclass(eq=False)
class Chat:
    arrived: float
    prefill: int
    reply: int
    first: float | None = None
    last: float = 0.0
    tokens: int = 0

    @property
    def due(self) -> float:
        return deadline(TTFT, TPOT, self.arrived, self.first, self.last, self.tokens)


@dataclass
class Run:
    rollout_tokens: int = 0
    train_slices: int = 0
    done: list[Chat] = field(default_factory=list)

    def ttft(self, quantile: float) -> float:
        waits = sorted(chat.first - chat.arrived for chat in self.done if chat.first is not None)
        return waits[int(quantile * (len(waits) - 1))] if waits else 0.0

    @property
    def within(self) -> float:
        """The share of requests within both objectives."""
        good = sum(
            chat.first is not None
            and chat.first - chat.arrived <= TTFT
            and chat.last - chat.first <= TPOT * max(1, chat.tokens - 1)
            for chat in self.done
        )
        return good / len(self.done) if self.done else 1.0


def cost(kind: Kind, size: int) -> float:
    """The true mean."""
    if kind == "train":
        return TRAIN
    if kind == "prefill":
        return 0.01 + PREFILL_TOKEN * size
    rows = sorted(DECODE)
    at = min(max(1, bisect_left(rows, size)), len(rows) - 1)
    low, high = rows[at - 1], rows[at]
    return DECODE[low] + (size - low) / (high - low) * (DECODE[high] - DECODE[low])


def arrivals(load: Load) -> list[Chat]:
    """A Poisson process whose rate is ``BURST`` times the mean in one second of eight."""
    rng = random.Random(load.seed)
    service = 0.01 + PREFILL_TOKEN * PROMPT[1] + REPLY[1] * cost("decode", 8) / 8
    rate = load.share / service
    calm = rate * (8 - BURST) / 7
    chats, now = [], 0.0
    while rate:
        peak = int(now) % 8 == 0
        now += rng.expovariate(rate * BURST if peak else calm)
        if now >= load.seconds:
            break
        size = [least + round(rng.expovariate(1 / (mean - least))) for least, mean in (PROMPT, REPLY)]
        chats.append(Chat(now, *size))
    return chats


def simulate(arm: Arm, load: Load) -> Run:
    """One worker for ``load.seconds``: rollouts always wait, a training slice follows whenever training used less time
    than generation."""
    run, rng, now = Run(), random.Random(load.seed + 1), 0.0
    coming, held = arrivals(load) if arm.chats else [], list[Chat]()
    costs = CostTable()
    for kind, sizes in (("decode", (1, 4, 16, 64)), ("prefill", (16, 128, 512)), ("train", (1,))):
        for size in sizes:
            costs.record(kind, size, load.error * cost(kind, size), first=True)  # type: ignore[arg-type]
    clocks = {"engine": 0.0, "train": 0.0}
    prefilled = False

    def admitted(kind: Kind, own: int, candidates: int) -> int:
        if not arm.gate or not held:
            return candidates
        waiting = [chat for chat in held if chat.prefill]
        decoding = [chat for chat in held if not chat.prefill]
        if arm.oracle:
            waiting += [chat for chat in coming if chat.arrived < now + cost(kind, own + candidates)]
        demand = Demand(
            sum(chat.prefill for chat in waiting),
            len(decoding),
            min((chat.due for chat in waiting), default=math.inf),
            min((chat.due for chat in decoding), default=math.inf),
        )
        return slo.admit(demand, kind, own, candidates, now, costs)

    while now < load.seconds:
        while coming and coming[0].arrived <= now:
            held.append(coming.pop(0))
        waiting = [chat for chat in held if chat.prefill][:ROWS]
        decoding = [chat for chat in held if not chat.prefill][:ROWS]
        train_waits = False
        if arm.rollouts and clocks["train"] < clocks["engine"]:
            train_waits = bool(arm.gate and held and not admitted("train", 0, 1))
            if not train_waits:
                now, took = _spend("train", 1, now, rng, costs, arm)
                clocks["train"] += took
                run.train_slices += 1
                continue
        own = rows = 0
        if waiting and not (prefilled and decoding):
            prefilled = True
            own = left = min(PREFILL, sum(chat.prefill for chat in waiting))
            now, took = _spend("prefill", own, now, rng, costs, arm)
            for chat in waiting:
                part = min(left, chat.prefill)
                chat.prefill, left = chat.prefill - part, left - part
                if not chat.prefill:
                    _token(chat, now, run, held)
        else:
            prefilled, own = False, len(decoding)
            room = min(ROWS - own, arm.split if held else ROWS) if arm.rollouts else 0
            rows = 0 if train_waits else admitted("decode", own, room)
            if not own and not rows:
                now = min(load.seconds, coming[0].arrived) if coming else load.seconds
                continue
            now, took = _spend("decode", own + rows, now, rng, costs, arm)
            for chat in decoding:
                _token(chat, now, run, held)
            run.rollout_tokens += rows
        if train_waits:
            clocks["train"] += took
        else:
            clocks["engine"] += took * rows / (own + rows)
    return run


def _spend(kind: Kind, size: int, now: float, rng: random.Random, costs: CostTable, arm: Arm) -> tuple[float, float]:
    took = cost(kind, size) * rng.lognormvariate(0.0, 0.0 if arm.oracle else SHAKE)
    costs.record(kind, size, took)
    return now + took, took


def _token(chat: Chat, now: float, run: Run, held: list[Chat]) -> None:
    chat.first, chat.last, chat.tokens = now if chat.first is None else chat.first, now, chat.tokens + 1
    if chat.tokens >= chat.reply:
        held.remove(chat)
        run.done.append(chat)


def main() -> None:
    result = Result("serving_simulation", "Rollouts beside serving, simulated", command(), simulated=True)
    for load in (0.0, 0.2, 0.5, 0.8, 1.3, 2.5):
        runs = {name: [simulate(arm, Load(load, seed=seed)) for seed in range(SEEDS)] for name, arm in ARMS.items()}
        for name, arm_runs in runs.items():
            where = f"load {load:.0%}, {name}"
            result.add(f"{where}: rollouts", [run.rollout_tokens / 300 for run in arm_runs], "tokens/s")
            if load and name != "rollouts only":
                result.add(f"{where}: within the objectives", [100 * run.within for run in arm_runs], "%")
                result.add(f"{where}: P99 time to first token", [run.ttft(0.99) for run in arm_runs], "s")
        if 0 < load < 1:
            pairs = zip(runs["gate"], runs["oracle"], strict=True)
            shares = [ours.rollout_tokens / best.rollout_tokens for ours, best in pairs]
            spread = f"median {statistics.median(shares):.0%}, least of {SEEDS} seeds {min(shares):.0%}"
            result.judge(f"load {load:.0%}: at least 80% of the oracle's rollouts", spread, min(shares) >= 0.8)
    result.save()


if __name__ == "__main__":
    main()
