"""Plans for unlike machines (HetRL's idea): the search against enumeration and against simpler searches, and predicted
seconds against simulated ones of the shipped controller. Simulated: no model runs."""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

from benchmarks.lib.harness import Result, command

from rookery.scheduling.plan.predict import ROLES, Role, devices_of, plan_of, predict
from rookery.scheduling.plan.search import ALL_PARTS, SearchParts, search
from rookery.simulation.planned import simulate_plan
from rookery.spec.fleet import FleetSpec, JobDemand

SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0)
BUDGET_SHARE = 0.1
"""Of an enumeration's evaluations, for the search that is compared with it."""

SITES = ("east", "west")

ABLATION_BUDGET = 260
ABLATION_MACHINES = 24
BALANCED_FLEETS = 50
AS_GOOD = 1e-9
"""Two means or medians that differ by a smaller share are equal."""
RANK_CORRELATION = 0.8
WITHIN = 1.05


def machine(name: str, decode: float, train: float, preemptible: bool = False) -> dict[str, Any]:
    """So many times as fast as two cores with SmolLM2-135M (simulation/data/two-core-cpu-135m.json)."""
    return {
        "name": name, "preemptible": preemptible, "rows": 64, "cache_tokens": 140_000, "context": 2048,
        "decode": [[1, 0.0299 / decode], [8, 0.0348 / decode], [32, 0.0517 / decode], [64, 0.077 / decode]],
        "prefill_token": 0.00033 / decode, "prefill_slice": 512, "train_token": 0.00179 / train, "train_slice": 512,
        "optimizer": 0.1, "adapter_bytes": 10_000_000, "state_bytes": 59_000_000, "download": 1.1e8, "upload": 1.1e8,
        "load": 10, "latency": 0.01,
    }  # fmt: skip


def scattered(random: Random, count: int) -> FleetSpec:
    """A fleet at three sites with slow links, with unlike memory: no order of its machines leads to the best plan."""
    machines = []
    for i in range(count):
        one = machine(f"m{i}", random.choice(SPEEDS), random.choice(SPEEDS), i > 0 and random.random() < 0.2)
        one |= {"site": random.choice(("", *SITES)), "rows": random.choice((8, 64))}
        if random.random() < 0.5:
            total = random.choice((2e9, 3e9, 6e9, 12e9))
            one["memory"] = {"total": total, "base": 1e9, "cache_token": 23_040, "train_token": 1e6}
        machines.append(one)
    links = [
        {"between": ["", site], "bandwidth": random.choice((1e6, 5e6, 1e8)), "latency": random.choice((0.01, 0.5))}
        for site in SITES
    ]
    between = {"between": [*SITES], "bandwidth": 1e6, "latency": 0.1}
    return FleetSpec.model_validate({"machines": machines, "links": [*links, between]})


def fleet(random: Random, count: int) -> FleetSpec:
    return FleetSpec.model_validate(
        {
            "machines": [
                machine(f"m{i}", random.choice(SPEEDS), random.choice(SPEEDS), i > 0 and random.random() < 0.2)
                for i in range(count)
            ]
        }
    )


def jobs(random: Random) -> list[JobDemand]:
    """One to three, all alike in their texts, as the simulation wants them."""
    groups, micro = random.choice((2, 4)), random.choice((0, 8))
    return [
        JobDemand(
            name=f"job-{i}", group_size=8, groups_per_step=groups, prompt_tokens=48, median_tokens=90, sigma=0.6,
            max_tokens=384, environment=0.05, staleness=random.choice((0, 1, 2)), micro_batch=micro,
        )
        for i in range(random.choice((1, 2, 3)))
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200, help="fleets of five machines that are enumerated")
    parser.add_argument("--plans", type=int, default=50, help="plans that are simulated")
    parser.add_argument("--seeds", type=int, default=30, help="seeds of the ablation")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    result = Result("planning", "Plans for unlike machines, simulated", command(), simulated=True)
    _optimum(result, given.cases)
    _ablation(result, given.seeds)
    _balance(result)
    _correlation(result, given.plans)
    result.save()


def _optimum(result: Result, cases: int) -> None:
    random, ratios, spent, seconds = Random(1), [], [], []
    for case in range(cases):
        described, demands = fleet(random, 5), jobs(random)
        devices = devices_of(described)
        plans = [*product(ROLES, repeat=len(devices))]
        best = min(predict(described, devices, demands, roles).seconds for roles in plans)
        began = time.perf_counter()
        found = search(described, devices, demands, budget=int(BUDGET_SHARE * len(plans)), seed=case)
        seconds.append(time.perf_counter() - began)
        ratios.append(found.prediction.seconds / best)
        spent.append(found.evaluations / len(plans))
    near = sum(ratio <= WITHIN for ratio in ratios) / cases
    result.add("five machines: seconds of the plan over the optimum's", ratios, "x")
    result.add("evaluations over those of the enumeration", spent, "x")
    result.add("seconds of a search", seconds, "s")
    result.judge("within 5% of the optimum in >= 95% of cases", f"{near:.1%}", near >= 0.95, f"{cases} fleets")


def _ablation(result: Result, seeds: int) -> None:
    arms = {
        "all parts": ALL_PARTS,
        "without halving": SearchParts(halving=False),
        "without exchanges": SearchParts(swaps=False),
        "without climbing": SearchParts(climb=False),
        "random choices alone": SearchParts(halving=False, swaps=False, climb=False),
    }
    found: dict[str, list[float]] = {name: [] for name in arms}
    for seed in range(seeds):
        random = Random(1000 + seed)
        described, demands = scattered(random, ABLATION_MACHINES), jobs(random)
        devices = devices_of(described)
        reached = {
            name: search(described, devices, demands, budget=ABLATION_BUDGET + 3 * len(devices), seed=seed, parts=arm)
            for name, arm in arms.items()
        }
        best = min(one.prediction.seconds for one in reached.values())
        for name, one in reached.items():
            found[name].append(one.prediction.seconds / best)
    for name, ratios in found.items():
        worst = f"1 in 10 above {statistics.quantiles(ratios, n=10)[-1]:.2f}"
        result.add(f"{ABLATION_MACHINES} machines, {name}: seconds over the best arm's", ratios, "x", worst)
    averages = {name: (statistics.fmean(ratios), statistics.median(ratios)) for name, ratios in found.items()}
    whole = averages.pop("all parts")
    for name, less in averages.items():
        figures = " and ".join(f"{one:.3f} against {other:.3f} x" for one, other in zip(whole, less, strict=True))
        as_good = all(one <= other * (1 + AS_GOOD) for one, other in zip(whole, less, strict=True))
        result.judge(
            f"the search with all parts is as good as {name}, by mean and median", figures, as_good,
            f"of the best arm's seconds; {seeds} fleets of three sites",
        )  # fmt: skip


def _balance(result: Result) -> None:
    """Episodes shared by speed against equal numbers for all that generate, on the plans that the search finds."""
    found: dict[str, list[float]] = {}
    for name, staleness in (("on-policy", 0), ("staleness 2", 2)):
        random, found[name] = Random(4), []
        for seed in range(BALANCED_FLEETS):
            described = fleet(random, 5)
            demands = [one.model_copy(update={"staleness": staleness, "micro_batch": 0}) for one in jobs(random)]
            devices = devices_of(described)
            roles = search(described, devices, demands, budget=int(BUDGET_SHARE * len(ROLES) ** 5), seed=seed).roles
            by_speed, equal = (predict(described, devices, demands, roles, balanced=b).seconds for b in (True, False))
            found[name].append(1 - by_speed / equal)
        result.add(f"{name}: share of a round that sharing by speed saves", found[name], "of 1", "predicted")
    on_policy, later = (statistics.median(shares) for shares in found.values())
    result.judge(
        "sharing by speed saves time on-policy, and next to nothing with staleness 2 (HetRL's figures)",
        f"{on_policy:.0%} and {later:.0%}", on_policy > 0 and later < 0.02,
        f"predicted, medians of {BALANCED_FLEETS} fleets of five machines",
    )  # fmt: skip


def _correlation(result: Result, plans: int) -> None:
    random = Random(3)
    predicted: list[float] = []
    simulated: list[float] = []
    while len(predicted) < plans:
        described, demands = fleet(random, random.choice((2, 3, 4))), jobs(random)
        devices = devices_of(described)
        roles: list[Role] = [random.choice(ROLES) for _ in devices]
        expected = predict(described, devices, demands, roles)
        if expected.problem:
            continue
        predicted.append(expected.seconds)
        simulated.append(simulate_plan(plan_of(described, devices, demands, expected)))
    errors = [abs(p / s - 1) for p, s in zip(predicted, simulated, strict=True)]
    rho = statistics.correlation(ranks(predicted), ranks(simulated))
    result.add("error of the predicted seconds against the simulated ones", errors, "of 1")
    result.judge(
        "predicted and simulated seconds: rank correlation (Spearman) >= 0.8",
        f"{rho:.2f}",
        rho >= RANK_CORRELATION,
        f"{plans} random plans",
    )


def ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0.0] * len(values)
    for rank, i in enumerate(order):
        ranks[i] = float(rank)
    return ranks


if __name__ == "__main__":
    main()
