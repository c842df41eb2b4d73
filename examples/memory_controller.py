"""Choose the parameters of a DRAM controller: four policies in one job, each for one group of parameters.

The task is that of arXiv 2211.16385: agents share a reward that a simulator computes from the whole design. The
simulator here is a small analytical model, so the best design of every workload is known by exhaustive search. Random
search and hill climbing with the same number of simulator calls stand next to the trained policies.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import rookery
from rookery.examples import learning
from rookery.examples.learning import Learned
from rookery.examples.words import assistant, system, user

Design = tuple[str, ...]
"""A choice of each group, in the order of ``GROUPS``."""

GROUPS: dict[str, tuple[str, ...]] = {
    "page": ("open", "closed", "timed", "smart"),
    "scheduler": ("order", "rows", "batch", "reads"),
    "queue": ("two", "eight", "twenty", "sixty"),
    "refresh": ("normal", "early", "late", "bank"),
}
"""The parameter groups and their choices: each has a policy of its name."""

NUMBERS = ("1", "2", "3", "4")
"""Replies are the numbers of choices: from the start each has about the same chance, which words have not."""

LEVELS = ("low", "medium", "high")
GOALS = ("latency", "power", "both")
ROW_HITS = {"low": 0.15, "medium": 0.5, "high": 0.85}
"""Share of requests that find their row open where rows stay open and are served in the best order."""
LOAD = {"low": 0.15, "medium": 0.4, "high": 0.7}
"""Requests per time in which one is served at the least."""

STEPS = 14
INVALID = -0.5
"""Reward of a policy whose reply is none of the choices. Its first choice is then taken, so that the others learn from
the episode as usual."""


@dataclass(frozen=True)
class Workload:
    """Traffic and what to optimise."""

    row_hits: str
    load: str
    goal: str


WORKLOADS = [Workload(*parts) for parts in itertools.product(LEVELS, LEVELS, GOALS)]


def is_held_out(workload: Workload) -> bool:
    """A Latin square of a third of the workloads: each level and each goal is in training and in evaluation."""
    return (LEVELS.index(workload.row_hits) + LEVELS.index(workload.load) + GOALS.index(workload.goal)) % 3 == 0


def latency_and_power(workload: Workload, design: Design) -> tuple[float, float]:
    """Mean latency in ns and power in mW of a controller: timings of DDR4 in round numbers, an M/M/1 queue for waiting,
    energies per access and per queue entry."""
    page, scheduler, queue, refresh = design
    load = LOAD[workload.load]
    entries = {"two": 2, "eight": 8, "twenty": 20, "sixty": 60}[queue]
    # reordering finds more open rows the more requests it sees
    order = {"order": 0.6, "rows": 1.0, "batch": 0.9, "reads": 0.8}[scheduler]
    seen = 1.0 if scheduler == "order" else 0.6 + 0.4 * min(1.0, load * math.log2(entries) / 2.5)
    kept = {"open": 1.0, "closed": 0.0, "timed": 0.8, "smart": 0.9}[page]
    hits = ROW_HITS[workload.row_hits] * order * seen * kept
    miss = {"open": 45.0, "closed": 30.0, "timed": 38.0, "smart": 34.0}[page]
    service = hits * 15.0 + (1 - hits) * miss
    stall = {"normal": 6.0, "early": 2.0 + 14.0 * load, "late": 1.0 + 20.0 * load**2, "bank": 3.0}[refresh]
    # requests wait; a short queue pushes back, a long one makes the oldest wait behind newer hits
    busy = min(0.95, load * (service + stall) / 36.0)
    waiting = service * busy / (1 - busy)
    full = busy ** (entries / 2) * 60.0
    unfair = {"order": 0.0, "rows": 0.10, "batch": 0.02, "reads": 0.04}[scheduler] * math.log2(entries) * load * 10
    gain = 3.0 if scheduler == "reads" else 0.0
    latency = service + stall + waiting + full + unfair - gain
    activations = load * (1 - hits) * 260.0
    standby = {"open": 26.0, "closed": 8.0, "timed": 16.0, "smart": 28.0}[page]
    logic = {"order": 1.0, "rows": 9.0, "batch": 12.0, "reads": 6.0}[scheduler] + 0.45 * entries
    refreshing = {"normal": 14.0, "early": 9.0, "late": 11.0, "bank": 22.0}[refresh]
    return latency, 40.0 + activations + standby + logic + refreshing


def objective(workload: Workload, design: Design) -> float:
    """The quantity that the goal minimises; for ``both`` the product, in the units of a geometric mean."""
    latency, power = latency_and_power(workload, design)
    return {"latency": latency, "power": power, "both": math.sqrt(latency * power)}[workload.goal]


DESIGNS: list[Design] = list(itertools.product(*GROUPS.values()))


@cache
def extremes(workload: Workload) -> tuple[float, float]:
    """The best and the worst objective of all designs, by exhaustive search."""
    found = [objective(workload, design) for design in DESIGNS]
    return min(found), max(found)


def score(workload: Workload, design: Design) -> float:
    """1 for the best design of a workload, 0 for the worst, in between by the logarithm of the objective. The scale
    differs by workload only by a factor and an offset, which GRPO's advantages do not see."""
    best, worst = extremes(workload)
    return math.log(worst / objective(workload, design)) / math.log(worst / best)


class MemoryController(rookery.Environment):
    """One turn per group, in their order; every policy reads the choices before its own."""

    deterministic = True

    def prompts(self, split: str) -> Iterable[dict[str, str]]:
        chosen = [workload for workload in WORKLOADS if is_held_out(workload) == (split == "eval")]
        rows = [{"row_hits": w.row_hits, "load": w.load, "goal": w.goal} for w in chosen]
        return rows * 2 if split == "eval" else rows  # a held-out workload is played with two seeds

    def reset(self, prompt: Any, seed: int) -> rookery.Step:
        self.workload = Workload(**prompt)
        self.design: list[str] = []
        self.wrong: dict[str, float] = {}
        traffic = f"hits {prompt['row_hits']}, load {prompt['load']}, goal {prompt['goal']}."
        opened = [system("Choose a number."), user("size, 1 to 4"), assistant("3")]
        return rookery.Step(messages=[*opened, user(f"{traffic} page, 1 to 4")], policy="page")

    def step(self, reply: rookery.Reply) -> rookery.Step:
        names = list(GROUPS)
        group = names[len(self.design)]
        choice = reply.text.strip()
        if choice not in NUMBERS:
            self.wrong[group] = INVALID
            choice = NUMBERS[0]
        self.design.append(GROUPS[group][int(choice) - 1])
        if len(self.design) < len(names):
            following = names[len(self.design)]
            return rookery.Step(messages=[user(f"{following}, 1 to 4")], policy=following)
        earned = score(self.workload, tuple(self.design))
        metrics = {"score": earned, "optimal": float(earned > 0.999), "valid": float(not self.wrong)}
        return rookery.Step(done=True, reward=earned, rewards=self.wrong, metrics=metrics)

    def best_constant(self, prompts: Sequence[Any]) -> dict[str, rookery.BestConstant]:
        """Each policy's choice of the best constant design, which earns this where the others choose theirs."""
        design, earned = best_constant([Workload(**prompt) for prompt in prompts])
        numbers = {group: NUMBERS[GROUPS[group].index(choice)] for group, choice in zip(GROUPS, design, strict=True)}
        return {
            group: rookery.BestConstant(reply=number, reward=earned, prompts=len(prompts))
            for group, number in numbers.items()
        }


# --- searches that call the simulator as often ------------------------------------------------------------------------


Simulator = Callable[[Workload, Design], float]
"""Scores a design: :func:`score`."""


def random_search(workload: Workload, calls: int, draw: Random, simulate: Simulator = score) -> float:
    """The best score of ``calls`` different designs drawn at random."""
    return max(simulate(workload, design) for design in draw.sample(DESIGNS, min(calls, len(DESIGNS))))


def hill_climbing(workload: Workload, calls: int, draw: Random, simulate: Simulator = score) -> float:
    """The best score of a climb by single changes, which begins again elsewhere at every summit."""
    best, left = 0.0, calls
    while left > 0:
        here = draw.choice(DESIGNS)
        height = simulate(workload, here)
        left -= 1
        best = max(best, height)
        steps = neighbours(here)
        draw.shuffle(steps)
        while steps and left > 0:
            there = steps.pop()
            left -= 1
            if (reached := simulate(workload, there)) > height:
                here, height = there, reached
                steps = neighbours(here)
                draw.shuffle(steps)
            best = max(best, height)
    return best


def neighbours(design: Design) -> list[Design]:
    """Designs that differ in one group."""
    changed = []
    for place, choices in enumerate(GROUPS.values()):
        for choice in choices:
            if choice != design[place]:
                changed.append((*design[:place], choice, *design[place + 1 :]))
    return changed


def searched(workloads: Sequence[Workload], calls: int, seeds: int = 20) -> dict[str, float]:
    """Mean scores of the searches with ``calls`` calls for each workload."""
    kinds: dict[str, Callable[[Workload, int, Random], float]] = {
        "random search": random_search,
        "hill climbing": hill_climbing,
    }
    found = {}
    for name, kind in kinds.items():
        scores = [kind(w, calls, Random(f"{name}:{n}:{w}")) for n in range(seeds) for w in workloads]
        found[name] = statistics.fmean(scores)
    return found


def best_constant(workloads: Sequence[Workload]) -> tuple[Design, float]:
    """The one design with the highest mean score."""
    scored = {d: statistics.fmean(score(w, d) for w in workloads) for d in DESIGNS}
    best = max(scored, key=scored.__getitem__)
    return best, scored[best]


# --- the job ----------------------------------------------------------------------------------------------------------


def job(steps: int) -> dict[str, Any]:
    """The job's fields except name and environment."""
    return {
        "policies": {
            name: {"rank": 8, "seed": number, "optimizer": {"lr": 5.0e-4}} for number, name in enumerate(GROUPS)
        },
        "algorithm": {"name": "grpo", "group_size": 8, "groups_per_step": 3, "max_staleness": 1},
        "sampling": {"temperature": 1.0, "max_tokens": 2},
        "evaluation": {"prompts": 18},
        "stop": {"steps": steps},
    }


def report(folder: Any, run: Learned, chosen: Mapping[str, Any]) -> bool:
    """Print and write everything; returns whether the design rose by more than two standard errors.
    Searches and constants that win are printed, too."""
    held_out = [workload for workload in WORKLOADS if is_held_out(workload)]
    training = [workload for workload in WORKLOADS if not is_held_out(workload)]
    calls = max(1, run.episodes // len(training))
    design, constant = best_constant(held_out)
    trained = {name: points[-1].metrics["score"] for name, points in run.curves.items()}
    final = statistics.fmean(trained.values())
    facts: dict[str, Any] = {
        "simulator calls": run.episodes,
        "calls for each training workload": calls,
        "policies on held-out workloads, one call each": round(final, 4),
        "best constant design": [*design, round(constant, 4)],
        "policies in training, last five steps": round(
            statistics.fmean(step["score"] for steps in run.training_metrics.values() for step in steps[-5:]), 4
        ),
        "equal calls on training workloads": {k: round(v, 4) for k, v in searched(training, calls).items()},
        "searches on held-out workloads": {
            f"{count} calls": {k: round(v, 4) for k, v in searched(held_out, count).items()}
            for count in (1, 4, 16, calls)
        },
        **chosen,
    }
    for name in GROUPS:
        print(learning.verdict(run, name, constant))
    for title, value in facts.items():
        print(f"{title}: {value}")
    first = statistics.fmean(points[0].metrics["score"] for points in run.curves.values())
    error = max((points[0].stderr ** 2 + points[-1].stderr ** 2) ** 0.5 for points in run.curves.values())
    learning.write_curves(
        folder, "Four policies choose a memory controller", run, {"best constant": constant, "optimum": 1.0}
    )
    command = "python examples/memory_controller.py"
    learning.write(folder, "memory-controller", command, {"memory-controller": run}, facts)
    return final - first > 2 * error


def main() -> int:
    given = learning.options(__doc__, STEPS, "each policy").parse_args()
    jobs: learning.Jobs = {"memory-controller": (MemoryController(), job(given.steps))}
    return learning.learn(
        "memory-controller", given.folder, jobs, lambda folder, runs, _: report(folder, runs["memory-controller"], {})
    )


if __name__ == "__main__":
    sys.exit(main())
