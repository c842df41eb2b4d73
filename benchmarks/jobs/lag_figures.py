"""What the lag study's runs say: means, spreads, differences with intervals, collapses. Pure.

A run has *collapsed* when it did not complete, or when its last held-out reward is below half of the best held-out
reward that it had had by then, or below what the untrained policy earned. Every comparison is shown, with its interval,
whether it found something or not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.lib.cells import Cell, table
from benchmarks.lib.harness import Result, Row, Verdict
from benchmarks.lib.intervals import CONFIDENCE, Interval, mean, welch

LAGS = (0, 2, 8)
COLLAPSED_SHARE = 0.5
LEAST_SEEDS = 3


@dataclass(frozen=True)
class Correction:
    """A way to account for lag: its name in tables, and the loss of a job."""

    name: str
    spec: dict[str, Any]


LOSSES = {
    "none": Correction("no correction", {"name": "cispo", "clip_low_threshold": 1.0, "clip_high_threshold": 1.0}),
    "aipo2": Correction("AIPO, rho 2", {"name": "aipo", "rho": 2.0}),
    "aipo10": Correction("AIPO, rho 10", {"name": "aipo", "rho": 10.0}),
    "ppo": Correction("PPO clip", {"name": "ppo", "clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
}
"""CISPO's weight clamp(r, 1, 1) is 1 whatever the ratio: −A·log p, the policy gradient as if the text were fresh."""


@dataclass(frozen=True)
class Arm:
    """One run."""

    loss: str
    lag: int
    seed: int

    @property
    def key(self) -> str:
        return f"{self.loss}/{self.lag}/{self.seed}"


def final(run: Cell) -> float | None:
    """The last held-out reward; None for a run that did not complete, or where no held-out episode ended."""
    return run["evaluations"][-1]["mean"] if run["state"] == "completed" and run["evaluations"] else None


def collapsed(run: Cell) -> bool:
    last = final(run)
    if last is None:
        return True
    means = [evaluation["mean"] for evaluation in run["evaluations"]]
    return last < COLLAPSED_SHARE * max(means) or last < means[0]


def of_arm(cells: Mapping[str, Cell], loss: str, lag: int) -> list[Cell]:
    """Its runs, by seed."""
    return sorted((c for c in cells.values() if (c["loss"], c["lag"]) == (loss, lag)), key=lambda run: run["seed"])


def finals(cells: Mapping[str, Cell], loss: str, lag: int) -> list[float]:
    """Of the runs that have one; collapsed runs that completed are among them."""
    return [value for run in of_arm(cells, loss, lag) if (value := final(run)) is not None]


def curve(runs: Sequence[Cell]) -> list[tuple[int, float, float]]:
    """(step, mean held-out reward over the runs, its standard error), for the steps that all runs were evaluated at."""
    if not runs:
        return []
    by_step = [{one["step"]: one["mean"] for one in run["evaluations"]} for run in runs]
    steps = sorted(set.intersection(*map(set, by_step)))
    found = []
    for step in steps:
        at = mean([of_run[step] for of_run in by_step])
        found.append((step, at.mean, 0.0 if math.isnan(at.error) else at.error))
    return found


def comparisons(cells: Mapping[str, Cell]) -> list[tuple[str, Interval]]:
    """Differences of mean final reward: each lag less lag 0 with the same loss, and each loss less no correction at the
    same lag."""
    found = []
    for loss, correction in LOSSES.items():
        fresh = finals(cells, loss, 0)
        for lag in LAGS[1:]:
            late = finals(cells, loss, lag)
            if fresh and late:
                found.append((f"{correction.name}: lag {lag} less lag 0", welch(fresh, late)))
    for lag in LAGS:
        plain = finals(cells, "none", lag)
        for loss, correction in LOSSES.items():
            corrected = finals(cells, loss, lag)
            if loss != "none" and plain and corrected:
                found.append((f"lag {lag}: {correction.name} less no correction", welch(plain, corrected)))
    return found


def figures(cells: Mapping[str, Cell]) -> Result:
    title = "Lag and its correction: final held-out reward"
    result = Result("lag_study", title, "python -m benchmarks.jobs.lag_study")
    rows: list[list[Any]] = []
    for lag in LAGS:
        for loss, correction in LOSSES.items():
            runs = of_arm(cells, loss, lag)
            if runs:
                rows.append(_arm_row(correction.name, lag, runs))
    found = comparisons(cells)
    told = [
        [what, one.difference, one.low, one.high, "nothing seen" if one.null else "differs"]
        for what, one in found
        if math.isfinite(one.low)
    ]
    result.data["tables"] = [
        table(
            "Final held-out reward by staleness and loss",
            ["staleness", "loss", "mean", "standard error", "spread of runs", "gain over untrained", "collapsed",
             "runs", "lag seen", "mean |log ratio|", "clipped"],
            rows,
        ),
        table(
            f"Differences of mean final reward, with {CONFIDENCE:.0%} intervals",
            ["difference", "mean", "from", "to", ""],
            told,
        ),
    ]  # fmt: skip
    untrained = [run["evaluations"][0]["mean"] for run in cells.values() if run["evaluations"]]
    if untrained:
        result.rows.append(Row("held-out reward of the untrained policy", untrained, "", "all runs: the same prompts"))
    _judge(result, cells)
    if told:
        count, differ = len(told), sum(row[-1] == "differs" for row in told)
        result.notes.append(
            f"{differ} of {count} intervals exclude 0; were there no difference anywhere, about"
            f" {(1 - CONFIDENCE) * count:.1f} would by chance. Nothing seen is no proof of no difference: it lies"
            " within the interval."
        )
    result.notes.append(
        "Collapsed: not completed, or the last held-out reward is below half of the run's own best, or below the"
        " untrained policy's. Intervals are Welch's, seeds taken as independent. Lag seen, |log ratio| (of the"
        " trainer's probability over the recorded one, per token) and the clipped share are means over a run's steps,"
        " then over runs."
    )
    return result


def _arm_row(name: str, lag: int, runs: Sequence[Cell]) -> list[Any]:
    values = [value for run in runs if (value := final(run)) is not None]
    gains = [value - run["evaluations"][0]["mean"] for run in runs if (value := final(run)) is not None]
    found = mean(values) if values else None
    return [
        lag,
        name,
        found.mean if found else None,
        found.error if found and found.count > 1 else None,
        statistics.stdev(values) if len(values) > 1 else None,
        statistics.fmean(gains) if gains else None,
        sum(map(collapsed, runs)),
        len(runs),
        *(_over_steps(runs, what) for what in ("staleness_mean", "logp_diff_mean")),
        None if name == LOSSES["none"].name else _over_steps(runs, "clipped_share"),  # its weight is 1 by clamping
    ]


def _over_steps(runs: Sequence[Cell], what: str) -> float | None:
    means = [
        statistics.fmean(values) for run in runs if (values := [step[what] for step in run["steps"] if what in step])
    ]
    return statistics.fmean(means) if means else None


def _judge(result: Result, cells: Mapping[str, Cell]) -> None:
    """The study is whole when every arm has its seeds: what it finds is no target."""
    sizes = [len(of_arm(cells, loss, lag)) for lag in LAGS for loss in LOSSES]
    target = f"staleness {', '.join(map(str, LAGS))} x {len(LOSSES)} losses, at least {LEAST_SEEDS} seeds"
    if not cells:
        result.verdicts.append(Verdict(target, "-", None))
        return
    lost = sum(map(collapsed, cells.values()))
    shown = f"{len(cells)} runs, at least {min(sizes)} of each, {lost} collapsed"
    result.verdicts.append(Verdict(target, shown, min(sizes) >= LEAST_SEEDS))
