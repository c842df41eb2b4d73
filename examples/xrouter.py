"""Route questions to simulated models of unlike accuracy and price: four jobs that weigh the cost differently.

Each job trains one router with the built-in ``xrouter`` environment (arXiv 2510.08439). The optimum is known from the
table of the models, and so is the best router that always calls the same model. The questions show no difficulty; the
operation gives it away. All routers start from one adapter that was fine-tuned on the form of a call, with each model
called equally often for each kind of question.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from rookery.client import Client, Job
from rookery.environments import xrouter
from rookery.environments.xrouter import DIFFICULTIES, XRouter, XRouterOptions
from rookery.examples import learning
from rookery.examples.charts import Line, line_chart
from rookery.examples.learning import Learned

WEIGHTS = (0.0, 0.5, 2.0, 5.0)
"""Weights of the cost, λ."""
HELD_OUT = 48
GROUPS = 12
"""Groups of a step, four of each difficulty."""
STEPS = 32
MAX_TOKENS = 6
SYSTEM, INSTRUCTION = "Route", "{question} ="

MODELS: dict[str, dict[str, Any]] = {
    "low": {"price": 0.02, "accuracy": [0.95, 0.05, 0.05]},
    "mid": {"price": 0.15, "accuracy": [0.95, 0.95, 0.05]},
    "top": {"price": 0.28, "accuracy": [0.95, 0.95, 0.95]},
}
"""Each difficulty has another model that is the cheapest good one. No model is good enough on average to be
preferred before the router tells the difficulties apart; that is how routers of other tables ended as constants."""

FORM = "form"
"""The job that teaches the form of a call. Without it a router finds the form by its reward, and with it the model of
its first right calls, mostly the one that is right most often: it calls that one for every question from then on, and
groups with one model alone have nothing to compare."""
FORM_STEPS, FORM_ROWS = 16, 18
"""Each row has another question; each step has each kind of question with each model twice."""
KL_WEIGHT = 0.25
"""Holds the shares of the models near the equal ones of the start until the router tells the difficulties apart: what
is good on average for all of them is learned first, and with less the shares of the others are gone by then."""


COST_CAP = 1.0
USELESS = COST_CAP / min(model["price"] for model in MODELS.values())
"""From this weight on no call earns anything."""


def environment(weight: float) -> dict[str, Any]:
    return {
        "id": "xrouter", "models": MODELS, "answer": "last", "turns": 1, "cost_weight": weight, "cost_cap": COST_CAP,
        "prompts": 480, "eval_prompts": HELD_OUT, "system": SYSTEM, "instruction": INSTRUCTION,
    }  # fmt: skip


def form_rows() -> list[dict[str, Any]]:
    """Training questions with a call of a model that does not depend on them: in nine questions in a row, each
    difficulty has each model once."""
    questions = list(XRouter(options(0.0)).prompts("train"))[: FORM_STEPS * FORM_ROWS]
    return [
        {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": INSTRUCTION.replace("{question}", question["question"])},
                {"role": "assistant", "content": f"call_{[*MODELS][number // len(DIFFICULTIES) % len(MODELS)]}()"},
            ]
        }
        for number, question in enumerate(questions)
    ]


def form() -> tuple[dict[str, Any], dict[str, Any]]:
    """The environment and the fields of the job that teaches the form."""
    fields = {
        "policies": {"main": {"rank": 16, "optimizer": {"lr": 5.0e-4}}},
        "algorithm": {"name": "sft", "batch_size": FORM_ROWS},
        "shuffle": False,
        "stop": {"steps": FORM_STEPS},
    }
    return {"id": "demonstrations", "rows": form_rows()}, fields


def options(weight: float) -> XRouterOptions:
    given = environment(weight)
    given.pop("id")
    return XRouterOptions.model_validate(given)


def job(steps: int, warm_up: int = 0) -> dict[str, Any]:
    """The job's fields except name and environment. ``warm_up``: steps over which the learning rate rises."""
    optimizer = {"lr": 2.0e-4, "schedule": {"name": "warmup", "warmup_steps": warm_up} if warm_up else "constant"}
    return {
        "policies": {"main": {"rank": 16, "optimizer": optimizer, "warm_start": {"job": FORM}}},
        "algorithm": {
            "name": "grpo", "group_size": 8, "groups_per_step": GROUPS, "max_staleness": 1, "kl_weight": KL_WEIGHT,
        },
        "sampling": {"temperature": 1.0, "max_tokens": MAX_TOKENS},
        "shuffle": False,  # each step has as many questions of each difficulty
        "evaluation": {"prompts": HELD_OUT},
        "stop": {"steps": steps},
    }  # fmt: skip


def yardsticks(weight: float, prompts: Sequence[Any]) -> dict[str, float]:
    """Expected rewards that are known from the table of the models."""
    chosen = options(weight)
    constant = xrouter.constant_routes(chosen, prompts)
    cheapest, *_, dearest = sorted(chosen.models, key=lambda name: chosen.models[name].price)
    return {
        "optimum": xrouter.optimum(chosen, prompts),
        "best constant": max(constant.values()),
        "cheapest": constant[cheapest],
        "dearest": constant[dearest],
        "random": statistics.fmean(constant.values()),
        "best threshold": xrouter.best_threshold(chosen, prompts),
    }


def routes(answers: Sequence[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """By difficulty, how often each model was called; ``answers`` are pairs of a difficulty and a reply."""
    found: dict[str, dict[str, int]] = {difficulty: {} for difficulty in DIFFICULTIES}
    for difficulty, reply in answers:
        call = re.findall(r"call_([a-z]+)\(", reply)
        name = call[-1] if call else "none"
        found[difficulty][name] = found[difficulty].get(name, 0) + 1
    return found


CHANGED: dict[str, dict[str, Any]] = {
    "without mid": {"low": {}, "top": {}},
    "top at the price of mid": {"low": {}, "mid": {}, "top": {"price": MODELS["mid"]["price"]}},
}
"""Pools that no router was trained on."""


def changed_pools(client: Client, jobs: dict[str, Job]) -> dict[str, Any]:
    """The expected reward of the router of λ = 2 on other pools, and how far it is below their optimum."""
    found: dict[str, Any] = {}
    for title, change in CHANGED.items():
        known = options(2.0)
        models = {name: known.models[name].model_copy(update=new) for name, new in change.items()}
        chosen = known.model_copy(update={"models": models})
        environment = XRouter(chosen)
        prompts = list(environment.prompts("eval"))
        router = learning.sampled(client, jobs["xrouter-2"].id, MAX_TOKENS)
        games = learning.play_all(environment, prompts, {"main": router})
        mean = statistics.fmean(game.metrics["expected"] for game in games)
        best = xrouter.optimum(chosen, prompts)
        found[title] = {"expected": round(mean, 4), "optimum": round(best, 4), "regret": round(best - mean, 4)}
    return {"changed pools, λ = 2": found}


def weight_of(text: str) -> float:
    """A weight of the cost. Raises ``ValueError``, or ``ArgumentTypeError`` for one with which nothing is learned."""
    weight = float(text)
    if not 0 <= weight < USELESS:
        raise argparse.ArgumentTypeError(f"given {text}, allowed: at least 0 and less than {USELESS:g}")
    return weight


def main() -> int:
    parser = learning.options(__doc__, STEPS, "each job")
    parser.add_argument("--weights", type=weight_of, nargs="+", default=list(WEIGHTS), help="weights of the cost, λ")
    parser.add_argument("--warm-up", type=int, default=0, help="steps over which the learning rate rises")
    given = parser.parse_args()
    jobs: learning.Jobs = {
        f"xrouter-{weight:g}": (environment(weight), job(given.steps, given.warm_up)) for weight in given.weights
    }
    return learning.learn(
        "xrouter", given.folder, jobs, lambda folder, runs, facts: report(folder, given.weights, runs, facts),
        changed_pools if "xrouter-2" in jobs else None, "charts: {folder}/pareto.svg and {folder}/curves.svg",
        {FORM: form()},
    )  # fmt: skip


def pareto(trade: dict[float, tuple[float, float]]) -> str:
    """A chart of the (cost, share of right answers) of each weight's router, next to those of single models."""
    models = options(0.0).models
    constants = [(model.price, statistics.fmean(model.accuracy)) for model in models.values()]
    places = sorted({*trade.values()})
    labels = ["λ " + ", ".join(f"{weight:g}" for weight in trade if trade[weight] == place) for place in places]
    return line_chart(
        "Accuracy and cost of trained routers", "cost per question", "share of right answers",
        [
            Line("trained routers", places, labels=labels),
            Line("one model always", constants, labels=list(models), joined=False),
        ],
    )  # fmt: skip


def report(folder: Any, weights: Sequence[float], runs: dict[str, Learned], facts: dict[str, Any]) -> bool:
    """Print and write everything; returns whether each router is above 0.9 of its optimum and above the baselines."""
    passed = True
    trade = []
    for weight in weights:
        run = runs[f"xrouter-{weight:g}"]
        prompts = [result["prompt"] for result in run.held_out["main"]]
        known = yardsticks(weight, prompts)
        first, last = (point.metrics for point in run.of("main"))
        answers = [(result["prompt"]["difficulty"], result["answer"]) for result in run.held_out["main"]]
        run.notes = {**{name: round(value, 4) for name, value in known.items()}, "routes": routes(answers)}
        share = last["expected"] / known["optimum"]
        better = all(last["expected"] > known[name] for name in ("best constant", "random", "best threshold"))
        passed &= share >= 0.9 and (better or weight == 0)  # at λ = 0 the dearest model is the optimum
        trade.append((last["cost"], last["right"]))
        print(
            f"λ = {weight:g}: expected reward {first['expected']:.3f} -> {last['expected']:.3f}"
            f" ({share:.0%} of the optimum {known['optimum']:.3f}; best constant {known['best constant']:.3f},"
            f" threshold {known['best threshold']:.3f}, random {known['random']:.3f});"
            f" right {last['right']:.3f}, cost {last['cost']:.4f}; routes {run.notes['routes']}"
        )
    for title, values in facts.items():
        print(f"{title}: {values}")
    (folder / "pareto.svg").write_text(pareto(dict(zip(weights, trade, strict=True))), encoding="utf-8")
    lines = []
    for weight in weights:
        run = runs[f"xrouter-{weight:g}"]
        best = run.notes["optimum"]
        steps = enumerate(run.training_metrics["main"])
        lines.append(Line(f"λ {weight:g}", [(number + 1, step["expected"] / best) for number, step in steps]))
    shown = line_chart("Routers while they train", "step", "expected reward / optimum", lines, {"optimum": 1.0})
    (folder / "curves.svg").write_text(shown, encoding="utf-8")
    learning.write(folder, "xrouter", "python examples/xrouter.py", runs, facts)
    return passed


if __name__ == "__main__":
    sys.exit(main())
