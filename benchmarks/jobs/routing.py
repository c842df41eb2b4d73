"""Ablations of the routing task, with a table in the place of a language model: which part of the reward teaches what.

The policy is a softmax over the models and a guess, one row per difficulty. Episodes, rewards and advantages are those
of the shipped code: the environment ``xrouter`` and ``algorithms/advantages.py``. Compared are the reward without its
gate (a wrong answer pays for its calls), and groups that are left out when all their answers are right, or all wrong,
instead of when all their rewards are equal. Seeds are paired: each arm sees the same questions and responses.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from benchmarks.lib.harness import Result

from rookery.algorithms.advantages import advantages, has_variance
from rookery.environments.base import Reply
from rookery.environments.xrouter import DIFFICULTIES, Difficulty, XRouter, XRouterOptions, optimum

STEPS, GROUP, GROUPS = 120, 8, 6
RATE = 0.12
"""Learning rate of the table: slow enough that the arms differ before all have converged."""
START = 2.0
"""Score of the dearest model at the start: a router that seeks accuracy alone, and calls it for 7 of 10 questions."""
SEEDS = 20
GUESS = "guess"
"""The action of an answer without a call, which is wrong and free."""
WINDOW = 10
"""Steps of a mean at the end of a curve."""


@dataclass(frozen=True)
class Arm:
    """The compared arms."""

    name: str
    weight: float
    gate: bool = True
    filter_by: str = "reward"
    """``reward`` leaves out groups of equal rewards, ``right`` groups whose answers are all right or all wrong."""


@dataclass
class Curve:
    """Means over the episodes of each step."""

    expected: list[float] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)
    guessed: list[float] = field(default_factory=list)


ARMS = [
    Arm("λ 2", 2.0),
    Arm("λ 2, groups kept by right answers", 2.0, filter_by="right"),
    Arm("λ 10", 10.0),
    Arm("λ 10, no gate", 10.0, gate=False),
    Arm("λ 0", 0.0),
]


def probabilities(scores: dict[str, float]) -> dict[str, float]:
    most = max(scores.values())
    raised = {name: math.exp(score - most) for name, score in scores.items()}
    total = sum(raised.values())
    return {name: value / total for name, value in raised.items()}


def train(arm: Arm, seed: int, steps: int = STEPS, **options: Any) -> Curve:
    """One run of a table."""
    chosen = XRouterOptions(answer="last", turns=1, cost_weight=arm.weight, gate=arm.gate, **options)
    environment = XRouter(chosen)
    prompts = list(environment.prompts("train"))
    draw = Random(seed)
    dearest = max(chosen.models, key=lambda name: chosen.models[name].price)
    table = {
        difficulty: {name: START * (name == dearest) for name in (*chosen.models, GUESS)} for difficulty in DIFFICULTIES
    }
    curve = Curve()
    for step in range(steps):
        played = []
        moved: dict[Difficulty, dict[str, float]] = {
            difficulty: dict.fromkeys(table[difficulty], 0.0) for difficulty in table
        }
        for number in range(GROUPS):
            prompt = prompts[(step * GROUPS + number) % len(prompts)]
            shares = probabilities(table[prompt["difficulty"]])
            actions = draw.choices(list(shares), list(shares.values()), k=GROUP)
            ends = [play(environment, prompt, seed * 1_000_003 + step * GROUPS + number, action) for action in actions]
            rewards = [reward for reward, _ in ends]
            kept = has_variance([metrics["right"] for _, metrics in ends]) if arm.filter_by == "right" else True
            for action, advantage in zip(actions, advantages("grpo", rewards), strict=True):
                for name, share in shares.items():
                    gradient = (float(name == action) - share) * advantage
                    moved[prompt["difficulty"]][name] += kept * gradient / (GROUP * GROUPS)
            played += [(action, metrics) for action, (_, metrics) in zip(actions, ends, strict=True)]
        for difficulty, gradients in moved.items():
            for name, gradient in gradients.items():
                table[difficulty][name] += RATE * GROUP * gradient
        curve.expected.append(statistics.fmean(gated(chosen, metrics) for _, metrics in played))
        curve.cost.append(statistics.fmean(metrics["cost"] for _, metrics in played))
        curve.right.append(statistics.fmean(metrics["right"] for _, metrics in played))
        curve.guessed.append(statistics.fmean(float(action == GUESS) for action, _ in played))
    return curve


def play(environment: XRouter, prompt: Any, seed: int, action: str) -> tuple[float, dict[str, float]]:
    episode: Any = environment.for_episode()
    episode.prompt, episode.seed = prompt, seed
    episode.reset(prompt, seed)
    text = "0" if action == GUESS else f"call_{action}()"
    step = episode.step(Reply(text, [], [], 0))
    return step.reward, step.metrics


def gated(options: XRouterOptions, metrics: dict[str, float]) -> float:
    """The reward with the gate, by which all arms are compared."""
    return options.model_copy(update={"gate": True}).reward(metrics["right"], metrics["cost"])


def last(values: Iterable[float]) -> float:
    return statistics.fmean([*values][-WINDOW:])


def half_way(cost: list[float], goal: float) -> int:
    """The first step at which the mean cost has come half of the way from the start to ``goal``."""
    start = statistics.fmean(cost[:3])
    smooth = [statistics.fmean(cost[max(0, step - 4) : step + 1]) for step in range(len(cost))]
    return next((step for step, value in enumerate(smooth) if value <= (start + goal) / 2), len(cost))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    given = parser.parse_args()
    result = Result(
        "routing", "Ablations of the routing task, a table as the policy", "python -m benchmarks.jobs.routing",
        simulated=True,
    )  # fmt: skip
    curves = {arm.name: [train(arm, seed) for seed in range(given.seeds)] for arm in ARMS}
    for arm in ARMS:
        runs = curves[arm.name]
        note = f"guesses {statistics.fmean(last(run.guessed) for run in runs):.0%}"
        result.add(f"{arm.name}: right answers", [last(run.right) for run in runs], "of all", note)
        result.add(f"{arm.name}: cost per question", [last(run.cost) for run in runs], "")
        result.add(f"{arm.name}: reward with the gate", [last(run.expected) for run in runs], "")
    judge(result, curves)
    result.data = {
        name: {
            key: [round(statistics.fmean(step), 4) for step in zip(*(getattr(run, key) for run in runs), strict=True)]
            for key in ("expected", "cost", "right", "guessed")
        }
        for name, runs in curves.items()
    }
    result.save()


def judge(result: Result, curves: dict[str, list[Curve]]) -> None:
    options = XRouterOptions(answer="last", cost_weight=2.0)
    best = optimum(options, list(XRouter(options).prompts("train")))
    whole = [last(run.expected) for run in curves["λ 2"]]
    reached = statistics.fmean(whole) / best
    result.judge("a table reaches 0.9 of the optimum at λ 2", f"{reached:.0%}", reached >= 0.9)
    raw = curves["λ 2, groups kept by right answers"]
    pairs = list(zip(curves["λ 2"], raw, strict=True))
    goal = statistics.fmean(last(run.cost) for run in curves["λ 2"])
    early = statistics.fmean(half_way(run.cost, goal) for run in curves["λ 2"])
    late = statistics.fmean(half_way(run.cost, goal) for run in raw)
    more = statistics.fmean(last(b.cost) - last(a.cost) for a, b in pairs)
    result.judge(
        "groups kept by right answers: the cost falls later and less",
        f"half of the way after {late:.0f} steps instead of {early:.0f}; cost {more:+.4f} at the end",
        late > early and more > 0,
    )
    name, word = "λ 10", "λ 10, no gate"
    with_gate, without = (statistics.fmean(last(run.right) for run in curves[arm]) for arm in (name, word))
    cost = statistics.fmean(last(run.cost) for run in curves[word])
    result.judge(
        f"{word}: hard questions collapse to the cheapest model or to guesses",
        f"right {without:.0%} instead of {with_gate:.0%}, cost {cost:.4f}",
        without < with_gate - 0.1,
    )


if __name__ == "__main__":
    main()
