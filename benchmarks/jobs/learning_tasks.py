"""Keeps what a run of a learning task measured: ``python -m benchmarks.jobs.learning_tasks FOLDER...``.

A folder is the output of ``examples/xrouter.py``, ``memory_controller.py``, ``solver_verifier.py`` or ``word_game.py``.
Its figures become a result, its charts go to ``plots/``. Day and commit are those of the run.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.lib.harness import Result, ResultFolders, versions, write_result
from benchmarks.lib.plots import FOLDER

STANDARD_ERRORS = 2.0
"""A gain beyond this many standard errors counts as learning."""


def curve_rows(result: Result, run: dict[str, Any], label: str = "") -> None:
    for policy, points in run["curves"].items():
        for point in (points[0], points[-1]):
            what = f"{label}{policy}, version {point['version']}: reward on held-out prompts"
            result.add(what, [point["mean"]], "", f"± {point['stderr']:.3f}")
    result.add(
        f"{label}sampled", [run["tokens"]], "tokens", f"{run['episodes']} training episodes, {run['seconds']:.0f} s"
    )


def judge_policy(result: Result, run: dict[str, Any], policy: str, constant: float) -> None:
    """Whether a policy gained, and whether it is above the best constant reply."""
    first, last = run["curves"][policy][0], run["curves"][policy][-1]
    error = (first["stderr"] ** 2 + last["stderr"] ** 2) ** 0.5
    gain = last["mean"] - first["mean"]
    result.judge(f"{policy} gains over 2 standard errors", f"{gain:+.3f} ± {error:.3f}", gain > STANDARD_ERRORS * error)
    above = last["mean"] > constant
    result.judge(f"{policy} above the best constant reply", f"{last['mean']:.3f}, constant {constant:.3f}", above)


def judge_seconds(result: Result, run: dict[str, Any]) -> None:
    result.judge("the whole job within ten minutes", f"{run['seconds']:.0f} s", run["seconds"] <= 600)


def solver_verifier(result: Result, found: dict[str, Any]) -> None:
    run = found["runs"]["solver-verifier"]
    curve_rows(result, run)
    for policy in ("solver", "verifier"):
        judge_policy(result, run, policy, found["facts"][f"best constant, {policy}"])
    judge_seconds(result, run)


def word_game(result: Result, found: dict[str, Any]) -> None:
    run = found["runs"]["word-game"]
    curve_rows(result, run)
    judge_policy(result, run, "player", found["facts"]["best constant"][1])
    judge_seconds(result, run)


def memory_controller(result: Result, found: dict[str, Any]) -> None:
    run, facts = found["runs"]["memory-controller"], found["facts"]
    curve_rows(result, run)
    policies = facts["policies on held-out workloads, one call each"]
    start = sum(points[0]["metrics"]["score"] for points in run["curves"].values()) / len(run["curves"])
    error = max((p[0]["stderr"] ** 2 + p[-1]["stderr"] ** 2) ** 0.5 for p in run["curves"].values())
    shown = f"{start:.3f} to {policies:.3f} ± {error:.3f}; optimum 1"
    result.judge("held-out score rises over 2 standard errors", shown, policies - start > STANDARD_ERRORS * error)
    constant = facts["best constant design"][-1]
    result.judge("above the best constant design", f"{policies:.3f}, constant {constant:.3f}", policies > constant)
    calls = facts["calls for each training workload"]
    trained = facts["policies in training, last five steps"]
    for name, score in facts["equal calls on training workloads"].items():
        result.judge(
            f"above {name} at equal simulator calls ({calls} each)", f"{trained:.3f}, {score:.3f}", trained > score
        )
    for name, score in facts["searches on held-out workloads"]["1 calls"].items():
        result.judge(
            f"above {name} with one call on held-out workloads", f"{policies:.3f}, {score:.3f}", policies > score
        )


def xrouter(result: Result, found: dict[str, Any]) -> None:
    costs = []
    for name, run in found["runs"].items():
        curve_rows(result, run, f"{name}: ")
        last, notes = run["curves"]["main"][-1]["metrics"], run["notes"]
        costs.append(last["cost"])
        share = last["expected"] / notes["optimum"]
        result.judge(f"{name}: >= 0.9 of the optimum", f"{share:.2f}", share >= 0.9)
        if notes["optimum"] > notes["best constant"] + 1e-9:
            best = max(notes[name] for name in ("best constant", "best threshold", "random"))
            shown = f"{last['expected']:.3f}, baselines {best:.3f}"
            result.judge(f"{name}: above constants, thresholds, random", shown, last["expected"] > best)
    falling = all(later < sooner for sooner, later in pairwise(costs))
    result.judge("cost falls as its weight rises", ", ".join(f"{cost:.4f}" for cost in costs), falling)


TASKS: dict[str, Callable[[Result, dict[str, Any]], None]] = {
    "solver-verifier": solver_verifier,
    "word-game": word_game,
    "memory-controller": memory_controller,
    "xrouter": xrouter,
}


def keep(folder: Path, folders: ResultFolders | None = None, plots: Path = FOLDER) -> None:
    """Write the result of a run to ``folders``, or the repository's, and its charts to ``plots``."""
    found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    name = found["task"].replace("-", "_")
    result = Result(name, f"The learning task {found['task']}", found["command"])
    TASKS[found["task"]](result, found)
    result.data = {"facts": found["facts"], "runs": found["runs"]}
    folders = folders or ResultFolders()
    result.machine, result.versions = folders.machine, versions("torch", "rookery")
    result.date, result.commit = found["date"], found["commit"]
    write_result(folders.path(name), asdict(result))
    for chart in sorted(folder.glob("*.svg")):
        shutil.copy(chart, plots / f"{name}_{chart.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="output folders of examples")
    for folder in parser.parse_args().folders:
        keep(folder)


if __name__ == "__main__":
    main()
