"""The SLO gate on one worker in virtual time: interactive requests in bursts beside a job that samples and trains.

``python -m benchmarks.scale.serving_simulation``; seconds. The decisions are the shipped ones
(:mod:`rookery.scheduling.slo`); the worker is a loop over slices whose costs were measured on two cores.

What counts is the job's useful work: tokens of replies that a committed step has trained on. A job that only samples,
or trains only, does none: replies wait for their step, and the next replies wait where it is too far behind.
:func:`bound` says how much useful work any schedule could do that serves the same requests, without a run.
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_left
from dataclasses import dataclass, field

from benchmarks.lib.harness import Result, command

from rookery.scheduling import slo
from rookery.scheduling.costs import CostTable, Kind
from rookery.scheduling.slo import Demand, deadline

ROWS, PREFILL = 64, 512
DECODE = {1: 0.018, 4: 0.026, 16: 0.052, 64: 0.16}
"""Seconds of a decode step of the 135M model on two cores, by rows."""
PREFILL_TOKEN = 0.0007
"""Seconds of a prompt token."""
TRAIN, TRAIN_TOKENS = 0.9, 512
"""Seconds of a training slice, and its tokens."""
STEP_TOKENS, STALENESS = 1024, 1
"""Tokens of replies that an optimizer step of the job takes, and how many steps sampling may be ahead."""
TTFT, TPOT = 2.0, 0.15
"""Objectives in seconds."""
PROMPT, REPLY = (8, 120), (8, 40)
"""Least and mean tokens of an interactive request, which are exponential above the least."""
BURST = 4.0
"""Arrivals of a peak second over the mean; one second in eight is a peak."""
SEEDS = 20
LEAST = 0.75
"""Of the bound, which knows no objectives."""
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
    forgets: bool = False
    """The gate predicts slices without the candidate: it is late by one step."""


ARMS = {
    "serving only": Arm(rollouts=False),
    "rollouts only": Arm(chats=False),
    "no gate": Arm(),
    "fixed split": Arm(split=ROWS // 2),
    "gate without the candidate": Arm(gate=True, forgets=True),
    "gate": Arm(gate=True),
    "gate that sees one slice ahead": Arm(gate=True, oracle=True),
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
    trained_tokens: int = 0
    done: list[Chat] = field(default_factory=list)

    def ttft(self, quantile: float) -> float:
        waits = sorted(chat.first - chat.arrived for chat in self.done if chat.first is not None)
        return waits[int(quantile * (len(waits) - 1))] if waits else 0.0

    @property
    def committed(self) -> int:
        """Optimizer steps."""
        return self.trained_tokens // STEP_TOKENS

    @property
    def useful(self) -> int:
        """Tokens that a committed step trained on."""
        return self.committed * STEP_TOKENS

    @property
    def can_train(self) -> bool:
        """Whether a step has all of its tokens and is not yet trained on."""
        return self.rollout_tokens >= (self.committed + 1) * STEP_TOKENS

    @property
    def can_sample(self) -> bool:
        """Whether staleness allows more replies."""
        return self.rollout_tokens < (self.committed + 1 + STALENESS) * STEP_TOKENS

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


def bound(load: Load, chats: bool = True) -> float:
    """Useful tokens per second that no schedule exceeds, whatever it knows of the requests that come. Each request that
    has to be complete before the end is prefilled in the largest slices; each of its tokens, and each token of a reply
    that is trained on, is sampled in the step that is cheapest for a row; each of the latter is trained on. Objectives,
    turns, staleness and whole steps are left out: they only take from it."""
    prefill_token = cost("prefill", PREFILL) / PREFILL
    sampled = min(cost("decode", rows) / rows for rows in range(1, ROWS + 1))
    served = sum(
        chat.prefill * prefill_token + (chat.reply - 1) * sampled
        for chat in (arrivals(load) if chats else [])
        if chat.arrived + TTFT + TPOT * chat.reply < load.seconds
    )
    return max(0.0, load.seconds - served) / (sampled + TRAIN / TRAIN_TOKENS) / load.seconds


def arrivals(load: Load) -> list[Chat]:
    """A Poisson process whose rate is ``BURST`` times the mean in one second of eight."""
    service = 0.01 + PREFILL_TOKEN * PROMPT[1] + REPLY[1] * cost("decode", 8) / 8
    return [Chat(*one) for one in bursts(load.share / service, load.seconds, load.seed)]


def bursts(rate: float, seconds: float, seed: int) -> list[tuple[float, int, int]]:
    """(time, prompt tokens, reply tokens) of a Poisson process with ``rate`` requests per second on average."""
    rng, calm = random.Random(seed), rate * (8 - BURST) / 7
    found, now = [], 0.0
    while rate:
        peak = int(now) % 8 == 0
        now += rng.expovariate(rate * BURST if peak else calm)
        if now >= seconds:
            break
        prompt, reply = (least + round(rng.expovariate(1 / (mean - least))) for least, mean in (PROMPT, REPLY))
        found.append((now, prompt, reply))
    return found


def simulate(arm: Arm, load: Load) -> Run:
    """One worker for ``load.seconds``: where the job may sample and a step of it waits for training, each of the two
    takes a turn whenever it used less time than the other."""
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
        if arm.forgets:
            return candidates if slo.slack(demand, kind, own, now, costs) >= 0 else 0
        return slo.admit(demand, kind, own, candidates, now, costs)

    while now < load.seconds:
        while coming and coming[0].arrived <= now:
            held.append(coming.pop(0))
        waiting = [chat for chat in held if chat.prefill][:ROWS]
        decoding = [chat for chat in held if not chat.prefill][:ROWS]
        train_waits = False
        if not run.can_train:
            clocks["train"] = max(clocks.values())
        elif not run.can_sample:
            clocks["engine"] = max(clocks.values())
        if arm.rollouts and run.can_train and (clocks["train"] < clocks["engine"] or not run.can_sample):
            train_waits = bool(arm.gate and held and not admitted("train", 0, 1))
            if not train_waits:
                now, took = _spend("train", 1, now, rng, costs, arm)
                clocks["train"] += took
                run.trained_tokens += TRAIN_TOKENS
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
            room = min(ROWS - own, arm.split if held else ROWS) if arm.rollouts and run.can_sample else 0
            rows = 0 if train_waits else admitted("decode", own, room)
            if not own and not rows:
                now = min(load.seconds, coming[0].arrived) if coming else load.seconds
                continue  # nobody has work: a step that waits for training was refused by a gate with requests
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


# --- memory -----------------------------------------------------------------------------------------------------------

CACHE, HEADROOM, HOLD_SECONDS = 6000, 0.2, 4
"""Tokens; and how long an interactive request holds its own."""
STEP_SECONDS, GROWTH = 30, 400
"""Of a job; and tokens by which rollouts grow in a second."""


@dataclass
class Memory:
    cuts: int = 0
    exhausted: int = 0
    """Seconds in which interactive requests found less than they needed."""
    moved: int = 0
    """Tokens of rollouts that another worker prefills again."""


def cache(mode: str, seed: int, seconds: int = 300) -> Memory:
    """The shipped budget with requests in bursts. ``mode``: ``no cut``, ``no freeze`` (the whole budget comes back as
    soon as the use has fallen), or ``cut and freeze``."""
    run, held, version, now = Memory(), 0, 0, 0

    def clock() -> float:
        return now

    budget = slo.CacheBudget(CACHE, HEADROOM, clock)
    chats = bursts(1.5, seconds, seed)
    for now in range(seconds):
        need = sum(prompt + reply for at, prompt, reply in chats if now - HOLD_SECONDS < at <= now)
        held = min(budget.rollouts, held + GROWTH)
        if mode != "no cut":
            budget.observe(need)
            budget.cut(need, {"job": version})
        if mode == "no freeze" and budget.frozen and need <= HEADROOM * CACHE:
            run.cuts += budget.cuts
            budget = slo.CacheBudget(CACHE, HEADROOM, clock)
        if now % STEP_SECONDS == 0:
            budget.on_version("job", version := version + 1)
        run.moved += max(0, held - budget.rollouts)
        held = min(held, budget.rollouts)
        run.exhausted += need > CACHE - held
    run.cuts += budget.cuts
    return run


def _memory(result: Result) -> None:
    runs = {mode: [cache(mode, s) for s in range(SEEDS)] for mode in ("no cut", "no freeze", "cut and freeze")}
    for mode, made in runs.items():
        result.add(f"cache, {mode}: cuts in 300 s", [one.cuts for one in made], "")
        result.add(f"cache, {mode}: exhausted", [one.exhausted for one in made], "s")
        result.add(f"cache, {mode}: tokens prefilled again", [one.moved for one in made], "tokens")
    lost, swings, ours = ([getattr(one, name) for one in runs[mode]] for mode, name in (
        ("no cut", "exhausted"), ("no freeze", "cuts"), ("cut and freeze", "cuts")
    ))  # fmt: skip
    told = f"{statistics.median(lost)} s without, {max(one.exhausted for one in runs['cut and freeze'])} s with"
    result.judge("without the cut the cache is exhausted", told, min(lost) > 0)
    told = f"{statistics.median(swings)} cuts without, {statistics.median(ours)} with"
    result.judge("a cut without freeze oscillates", told, statistics.median(swings) > 2 * statistics.median(ours))


def main() -> None:
    result = Result("serving_simulation", "Rollouts beside serving, simulated", command(), simulated=True)
    pace: dict[tuple[float, str], list[Run]] = {}
    for load in (0.0, 0.2, 0.5, 0.8, 1.3, 2.5):
        for name, arm in ARMS.items():
            pace[load, name] = [simulate(arm, Load(load, seed=seed)) for seed in range(SEEDS)]
            where, runs = f"load {load:.0%}, {name}", pace[load, name]
            result.add(f"{where}: useful work of the job", [run.useful / 300 for run in runs], "tokens/s")
            if load and name != "rollouts only":
                result.add(f"{where}: within the objectives", [100 * run.within for run in runs], "%")
                result.add(f"{where}: P99 time to first token", [run.ttft(0.99) for run in runs], "s")
    for load in (0.2, 0.5, 0.8):
        most = [bound(Load(load, seed=seed)) for seed in range(SEEDS)]
        shares = {
            name: [run.useful / 300 / limit for run, limit in zip(pace[load, name], most, strict=True)]
            for name in ("gate", "gate that sees one slice ahead", "no gate")
        }
        for name, found in shares.items():
            result.add(f"load {load:.0%}, {name}: of the bound", [100 * share for share in found], "%")
        told = f"{statistics.median(shares['gate']):.0%}; without a gate {statistics.median(shares['no gate']):.0%}"
        kept = statistics.median(run.within for run in pace[load, "gate"])
        held = statistics.median(run.within for run in pace[load, "no gate"])
        result.judge(
            f"load {load:.0%}: useful work >= {LEAST:.0%} of what no schedule exceeds", told,
            statistics.median(shares["gate"]) >= LEAST,
            f"{kept:.1%} of requests within their objectives; without a gate {held:.1%}",
        )  # fmt: skip
    within = statistics.median(run.within for run in pace[0.5, "serving only"])
    missed = [
        statistics.median(1 - run.within for run in pace[0.5, arm]) for arm in ("gate without the candidate", "gate")
    ]
    told = f"{missed[0]:.1%} of requests, the gate {missed[1]:.1%}"
    result.judge(
        "load 50%: a gate without the candidate breaks 5 times as many objectives", told, missed[0] >= 5 * missed[1]
    )
    for error in (0.7, 1.3):
        runs = [simulate(ARMS["gate"], Load(0.5, seed=seed, error=error)) for seed in range(SEEDS)]
        kept = statistics.median(run.within for run in runs)
        tokens = statistics.median(run.useful / 300 for run in runs)
        told = f"{kept:.1%} within (alone {within:.1%}), {tokens:.0f} useful tokens/s"
        result.judge(f"costs {error:g} x the truth at the start: within 2% of alone", told, kept >= within - 0.02)
    full = statistics.median(run.useful for run in pace[2.5, "gate"])
    slower = statistics.median(
        a.ttft(0.5) / b.ttft(0.5) for a, b in zip(pace[2.5, "gate"], pace[2.5, "serving only"], strict=True)
    )
    whole = statistics.median(run.useful for run in pace[0.0, "rollouts only"])
    told = f"{full / whole:.1%} of the job alone, median time to first token {slower:.3f} x"
    result.judge("saturated serving admits < 2% and is slowed by < 2%", told, full < 0.02 * whole and slower < 1.02)
    idle = statistics.median(run.useful for run in pace[0.0, "gate"]) / whole
    result.judge("idle serving costs < 5%", f"{idle:.1%} of the job alone", idle > 0.95)
    _memory(result)
    result.save()


if __name__ == "__main__":
    main()
