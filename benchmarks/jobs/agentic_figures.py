"""The figures of the agentic cells: time saved, busy share, the bound, how many tenants fill the worker. Pure.

With T the seconds of a job alone at the crowd's staleness and C the worker's seconds in slices for it:

* *bound* of N tenants, from jobs alone and nothing of the crowd's run: the larger of T, and of N times the seconds that
  the longer of a job's two stages (decoding, training) takes alone. It is the makespan if the stages of different
  tenants overlap perfectly. A crowd that shares passes can take less than N times a stage alone.
* *saturation*: the N at which the worker is full. Predicted from a job alone: T/C. Measured: the most jobs per second
  that any crowd did, times T, as Little's law has it.
* *time saved*: 1 − makespan / (N times the seconds of a job alone), at the crowd's staleness, which is 2, and at 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.lib.bars import percent, shown
from benchmarks.lib.cells import Cell, table
from benchmarks.lib.harness import Result, Row, Verdict
from benchmarks.lib.intervals import paired
from benchmarks.lib.workload import COMPLETIONS

LATENCIES = (0.0, 0.5, 2.0, 8.0)
"""Seconds that the tool takes per turn."""
TOOL_SECONDS = 2.0
TENANTS = (1, 2, 4, 8, 16, 32)
ABLATED_TENANTS = 8
"""More than fill a worker of two cores; 32 would say the same in four times the time."""
STALENESS = (0, 2)
PROMPTS = 1
STEPS = 5
SOLO_JOBS = 2
ABLATIONS = {
    "one tenant per pass": f"passes of {COMPLETIONS} rows, as one tenant has",
    "global barrier": "a barrier between phases, and staleness 0",
    "staleness 0": "staleness 0",
}
"""The change of each arm, by the name of its cells."""

LANES_MOST = {1: 1.02, 8: 0.88, 32: 0.9}
"""The makespan on a worker with lanes over that on one that takes turns, at latency 0, by N; of one tenant at staleness
0, where the planner has nothing to gain."""
LANES_RUNS = {1: 5}
"""Runs of each for a seed, in alternation, where the difference is small; else one."""
LANES = ("turns", "auto")
LEAST_SAVED = 0.1
"""Of the time of one after another."""
LEAST_EFFICIENCY = 0.85
"""Of the bound's makespan."""
SATURATION_ERROR = 0.2


def figures(cells: Mapping[str, Cell]) -> Result:
    """The result: points by latency and N, ablations, verdicts."""
    result = Result("agentic", "Small agentic jobs of many tenants", "python -m benchmarks.jobs.agentic")
    found = points(cells)
    for latency in LATENCIES:
        for staleness in STALENESS:
            jobs = alone(cells, latency, staleness)
            if jobs:
                compute = statistics.median(job["decode"] + job["train"] for job in jobs)
                seconds = [job["seconds"] for job in jobs]
                note = f"of it {compute:.1f} s of the worker"
                result.rows.append(
                    Row(f"a job alone, staleness {staleness}, latency {latency:g} s", seconds, "s", note)
                )
    largest = {point["latency"]: point for point in found if point["tenants"] == TENANTS[-1]}
    for latency in LATENCIES:
        where = f"{TENANTS[-1]} tenants, latency {latency:g} s"
        point, gaps = largest.get(latency), lacks(found, latency)
        target = f"{where}: >= {LEAST_SAVED:.0%} less time than one after another"
        _judge(result, f"{target}, same staleness (2)", point, "saved_async", LEAST_SAVED, gaps)
        _judge(result, f"{target} at staleness 0", point, "saved", LEAST_SAVED, gaps)
        target = f"{where}: perfect overlap of stages measured alone, of the makespan >= {LEAST_EFFICIENCY:.0%}"
        _judge(result, target, point, "efficiency", LEAST_EFFICIENCY, f"{gaps}; shared passes could exceed 100%")
        _judge_saturation(result, cells, found, latency)
    _judge_lanes(result, cells)
    _judge_rewards(result, cells)
    result.notes.append(
        "At latency 0 a job alone keeps the worker busy, so many at once gain little: the gain is the time that a job"
        " would spend waiting for its tool."
    )
    head = ["latency, s", "tenants", "makespan, s", "bound, s", "bound / makespan", "busy", "busy over one alone",
            "time saved, same staleness", "over staleness 0", "tokens/s", "mean reward", "of the least tenant",
            "of the most", "runs"]  # fmt: skip
    keys = ("latency", "tenants", "makespan", "bound", "efficiency", "busy", "busy_gain", "saved_async", "saved",
            "rate", "reward", "reward_least", "reward_most", "runs")  # fmt: skip
    result.data["tables"] = [table("Makespan by tenants and latency", head, [[p[key] for key in keys] for p in found])]
    result.data["points"] = found
    bars = ablations(cells, found)
    if bars:
        title = f"{ABLATED_TENANTS} tenants at {TOOL_SECONDS:g} s without one part"
        rows = [[arm, makespan, ratio] for arm, makespan, ratio in bars]
        result.data["tables"].append(table(title, ["arm", "makespan, s", "over all parts"], rows))
    return result


def alone(cells: Mapping[str, Cell], latency: float, staleness: int, seed: int | None = None) -> list[dict[str, Any]]:
    """The solo jobs, of one run or of all."""
    return [
        job
        for key, cell in cells.items()
        if key.startswith("solo/") and (cell["latency"], cell["staleness"]) == (latency, staleness)
        if seed in (None, cell["seed"])
        for job in cell["jobs"]
    ]


def points(cells: Mapping[str, Cell]) -> list[dict[str, Any]]:
    """By latency, then by N: medians over the runs, of ratios too, each within one run."""
    found = []
    for latency in LATENCIES:
        for count in TENANTS:
            runs = [
                run
                for key, cell in cells.items()
                if key.startswith(f"crowd/{latency:g}/{count}/") and (run := _run(cells, cell)) is not None
            ]
            if runs:
                values = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
                found.append({"latency": latency, "tenants": count, **values, "runs": len(runs)})
    return found


def _run(cells: Mapping[str, Cell], cell: Cell) -> dict[str, float] | None:
    count, makespan = len(cell["jobs"]), cell["makespan"]
    sync, later = (alone(cells, cell["latency"], staleness, cell["seed"]) for staleness in STALENESS)
    if not sync or not later:
        return None
    compute = cell["decode"] + cell["train"]
    longer = max(_mean(job[stage] for job in later) for stage in ("decode", "train"))
    least = max(count * longer, _mean(job["seconds"] for job in later))
    seconds = {staleness: _mean(job["seconds"] for job in jobs) for staleness, jobs in ((0, sync), (2, later))}
    idle = _mean(_computes(sync)) / seconds[0]
    rewards = [_mean(job["rewards"]) for job in cell["jobs"]]
    return {
        "makespan": makespan,
        "bound": least,
        "efficiency": least / makespan,
        "busy": compute / makespan,
        "busy_gain": compute / makespan / idle,
        "saved": 1 - makespan / (count * seconds[0]),
        "saved_async": 1 - makespan / (count * seconds[2]),
        "rate": sum(job["length_mean"] for job in cell["jobs"]) * COMPLETIONS * PROMPTS * STEPS / makespan,
        "reward": _mean(rewards),
        "reward_least": min(rewards),
        "reward_most": max(rewards),
    }


def ablations(cells: Mapping[str, Cell], found: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(arm, median makespan, ratio to that with all parts)."""
    bars = []
    for point in found:
        if (point["latency"], point["tenants"]) == (TOOL_SECONDS, ABLATED_TENANTS):
            for arm, change in ABLATIONS.items():
                runs = [cell["makespan"] for key, cell in cells.items() if key.startswith(f"ablation/{arm}/")]
                if runs:
                    makespan = statistics.median(runs)
                    bars.append((change, makespan, makespan / point["makespan"]))
    return bars


def saturation(cells: Mapping[str, Cell], found: list[dict[str, Any]], latency: float) -> tuple[float, float] | None:
    """(predicted, measured) number of tenants that fill the worker; None where no job was measured alone, or the worker
    was not full at the largest N."""
    jobs = alone(cells, latency, STALENESS[-1])
    curve = [point for point in found if point["latency"] == latency]
    if not jobs or not curve or curve[-1]["tenants"] < TENANTS[-1]:
        return None
    seconds = _mean(job["seconds"] for job in jobs)
    return seconds / _mean(_computes(jobs)), max(p["tenants"] / p["makespan"] for p in curve) * seconds


def lacks(found: list[dict[str, Any]], latency: float) -> str:
    """The seeds of the largest N, and the smaller N without a measurement."""
    runs = {point["tenants"]: point["runs"] for point in found if point["latency"] == latency}
    seeds = runs.get(TENANTS[-1], 0)
    absent = [str(count) for count in TENANTS if count not in runs]
    without = f"; no run of {', '.join(absent)} tenants" if absent else ""
    return f"{seeds} seed{'s' * (seeds != 1)}{without}"


def _judge(result: Result, target: str, point: dict[str, Any] | None, name: str, least: float, why: str) -> None:
    if point is None:
        result.verdicts.append(Verdict(target, "-", None))
        return
    measured = f"{shown(point[name], least, percent)}; makespan {point['makespan']:.0f} s"
    result.verdicts.append(Verdict(target, measured, point[name] >= least, why))


def _judge_lanes(result: Result, cells: Mapping[str, Cell]) -> None:
    """Tenants at latency 0 on a worker that trains beside decoding as planned, compared with turns, by medians."""
    for count, most in LANES_MOST.items():
        who = f"{count} tenants" if count > 1 else "one tenant, staleness 0"
        target = f"{who}, latency 0 s: makespan with lanes <= {most:g} of turns"
        by_run = [
            {key.rpartition("/")[2]: cell for key, cell in cells.items() if key.startswith(f"lanes/{lanes}/{count}/")}
            for lanes in LANES
        ]
        pairs = [(cell, by_run[1][run]) for run, cell in by_run[0].items() if run in by_run[1]]
        if not pairs:
            result.verdicts.append(Verdict(target, "-", None, "with --lanes"))
            continue
        turns, planned = (statistics.median(cell["makespan"] for cell in arm) for arm in zip(*pairs, strict=True))
        why = f"{len(pairs)} run{'s' * (len(pairs) != 1)} of each"
        ran = [cell["beside"] for _, cell in pairs if "beside" in cell]
        if ran:
            why += f"; lanes ran {statistics.median(ran):.1f} of {planned:.1f} s"
        result.verdicts.append(Verdict(target, f"{planned / turns:.2f}", planned / turns <= most, why))


def _judge_saturation(result: Result, cells: Mapping[str, Cell], found: list[dict[str, Any]], latency: float) -> None:
    pair = saturation(cells, found, latency)
    if pair is not None:
        target = f"latency {latency:g} s: tenants that fill the worker, predicted within {SATURATION_ERROR:.0%}"
        shown = f"{pair[0]:.1f} predicted, {pair[1]:.1f} measured"
        result.verdicts.append(Verdict(target, shown, abs(pair[0] / pair[1] - 1) <= SATURATION_ERROR))


def _judge_rewards(result: Result, cells: Mapping[str, Cell]) -> None:
    """Each seed's mean reward in the crowd of all tenants less the same job's alone, at the crowd's staleness."""
    single = {
        job["seed"]: _mean(job["rewards"])
        for latency in LATENCIES
        for job in alone(cells, latency, STALENESS[-1])
    }  # fmt: skip
    differences: dict[int, list[float]] = {}
    for key, cell in cells.items():
        for job in cell["jobs"] if key.startswith("crowd/") else ():
            if job["seed"] in single:
                differences.setdefault(job["seed"], []).append(_mean(job["rewards"]) - single[job["seed"]])
    target = "rewards per tenant equal within noise, at least 3 seeds"
    if len(differences) < 3:
        result.verdicts.append(Verdict(target, "-", None))
        return
    found = paired([_mean(values) for values in differences.values()])
    shown = f"{found.difference:+.4f} in a crowd, 95% interval {found.low:+.4f} to {found.high:+.4f}"
    result.verdicts.append(Verdict(target, shown, found.null, f"{len(differences)} seeds"))


def _computes(jobs: list[dict[str, Any]]) -> list[float]:
    return [job["decode"] + job["train"] for job in jobs]


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
