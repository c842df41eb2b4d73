"""Alarms: each thing that is wrong raises its own, and a healthy job none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rookery.scheduling.health import (
    EPISODES_READ,
    FEWEST_EPISODES,
    JOB_CHECKS,
    POLICY_CHECKS,
    STALL_SECONDS,
    STALL_TIMES,
    JobHealth,
    RecentEpisode,
    advice_lines,
    alarms,
    several,
)


def row(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "time": 10.0 * step, "reward": 0.5, "zero_variance_share": 0.2, "staleness_max": 0,
            "logp_diff_mean": 0.01, **values}  # fmt: skip


def episode(number: int, **values: Any) -> RecentEpisode:
    return replace(RecentEpisode(False, float(number % 2), ["an answer"], ["stop"]), **values)


HEALTHY = JobHealth(
    now=105.0, state="running", rows=[row(step) for step in range(11)],
    episodes=[episode(number) for number in range(EPISODES_READ)],
    counters={"episodes": 800, "groups_dropped_stale": 2},
    evaluations=[{"version": 0, "mean": 0.1}, {"version": 9, "mean": 0.6, "constant": {"reward": 0.5, "reply": "4"}}],
    group_size=8,
)  # fmt: skip

STEPS = range(11)

WRONG: dict[str, dict[str, Any]] = {
    "stalled": {"now": 100 + STALL_TIMES * 10 + 1},
    "dead reward": {"rows": [row(step, zero_variance_share=1.0 if step > 7 else 0.0) for step in STEPS]},
    "truncated replies": {"episodes": [episode(n, finishes=["length" if n % 4 == 0 else "stop"]) for n in range(40)]},
    "stale groups": {"counters": {"episodes": 800, "groups_dropped_stale": 20}},
    "rewarded silence": {"episodes": [episode(n, replies=[" " if n % 4 == 1 else "x"]) for n in range(40)]},
    "failing episodes": {
        "episodes": [episode(n, failed=n % 5 == 0, reward=None if n % 5 == 0 else 1.0, error="boom") for n in range(40)]
    },
    "log-probability gap": {"rows": [row(step, logp_diff_mean=0.2) for step in STEPS]},
    "failed evaluation": {
        "evaluations": [{"version": 9, "mean": None, "constant": {"reward": 0.5, "reply": "4"}}],
    },
    "a constant answer earns as much": {
        "evaluations": [{"version": 9, "mean": 0.5, "constant": {"reward": 0.5, "reply": "4"}}]
    },
}


def test_healthy_job_raises_no_alarm() -> None:
    assert alarms(HEALTHY) == []


@pytest.mark.parametrize("name", WRONG)
def test_each_fault_raises_its_alarm_and_no_other(name: str) -> None:
    (found,) = alarms(replace(HEALTHY, **WRONG[name]))
    assert found.name == name and found.problem and found.remedy


def test_every_check_has_a_case() -> None:
    assert len(WRONG) == len(JOB_CHECKS) + len(POLICY_CHECKS)


@pytest.mark.parametrize("state", ["queued", "paused", "completed", "failed", "cancelled"])
def test_only_a_running_job_is_stalled(state: str) -> None:
    assert alarms(replace(HEALTHY, state=state, now=1e9)) == []


def test_stall_is_measured_against_the_jobs_median() -> None:
    slow = [row(step, time=1000.0 * step) for step in STEPS]
    assert alarms(replace(HEALTHY, rows=slow, now=10_000 + STALL_TIMES * 1000 - 1)) == []
    quick = [row(step, time=0.1 * step) for step in STEPS]
    assert alarms(replace(HEALTHY, rows=quick, now=1 + STALL_SECONDS - 1)) == [], "nobody notices so short a pause"
    assert [one.name for one in alarms(replace(HEALTHY, rows=quick, now=2 + STALL_SECONDS))] == ["stalled"]


def test_few_episodes_and_missing_values_raise_nothing() -> None:
    few = [episode(0, failed=True, reward=None)] * (FEWEST_EPISODES - 1)
    nothing = [{"step": 1}, {"step": 2, "time": None, "logp_diff_mean": float("nan"), "staleness_max": 0}]
    assert alarms(replace(HEALTHY, rows=[], episodes=few, counters={}, evaluations=[])) == []
    assert alarms(replace(HEALTHY, rows=nothing * 3, episodes=[], counters={}, evaluations=[])) == []
    unknown = [{"version": 0, "mean": 0.0, "constant": {"reward": 1.0, "reply": "x"}}]
    assert alarms(replace(HEALTHY, evaluations=unknown)) == [], "version 0 has not learned anything yet"


# --- several policies -------------------------------------------------------------------------------------------------

NAMES = ("good", "bad")


def of_both(name: str) -> dict[str, Any]:
    """A job of two policies in which ``bad`` alone has the fault of this name."""
    wrong, stale = {**vars(HEALTHY), **WRONG[name]}, "groups_dropped_stale"
    parts = {"good": vars(HEALTHY), "bad": wrong}
    rows = [{**row, "policy": policy} for policy, job in parts.items() for row in job["rows"]]
    episodes = [
        RecentEpisode(
            two.failed, 0.0, [*one.replies, *two.replies], [*one.finishes, *two.finishes], two.error,
            speakers=NAMES, rewards={"good": one.reward, "bad": two.reward},
        )
        for one, two in zip(HEALTHY.episodes, wrong["episodes"], strict=False)
    ]  # fmt: skip
    dropped = {policy: job["counters"][stale] for policy, job in parts.items()}
    return {
        "now": wrong["now"], "rows": sorted(rows, key=lambda row: row["time"]), "episodes": episodes,
        "counters": {"episodes": 800, stale: sum(dropped.values()), **{f"{stale}/{p}": n for p, n in dropped.items()}},
        "evaluations": [{**row, "policy": policy} for policy, job in parts.items() for row in job["evaluations"]],
        "policies": NAMES,
    }  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_fault_of_one_policy_of_several_is_raised_under_its_name(name: str) -> None:
    (found,) = alarms(replace(HEALTHY, **of_both(name)))
    whole = name in ("stalled", "failing episodes")
    assert (found.name, found.policy) == (name, "" if whole else "bad")


def test_advice_of_several_policies_is_by_the_steps_and_sampling_of_each() -> None:
    rows = [row(step, policy=name, turns_mean=1, length_max=4) for step in STEPS for name in ("solver", "verifier")]
    policies = {"solver": {}, "verifier": {"sampling": {"max_tokens": 4}}, "judge": {"train": False}}
    (line,) = advice_lines(rows, {"sampling": {"max_tokens": 8}, "policies": policies})
    assert line.startswith("verifier: length_max 4")
    assert advice_lines(rows, {"sampling": {"max_tokens": 4}})[0].startswith("length_max 4")
    alone = {"main": {"sampling": {"max_tokens": 8}}}
    assert advice_lines([row(step, turns_mean=1, length_max=6) for step in STEPS], {
        "sampling": {"max_tokens": 4}, "policies": alone,
    }) == []  # fmt: skip


def test_steps_without_a_name_are_of_the_only_policy_that_trains() -> None:
    spec = {"sampling": {"max_tokens": 4}, "policies": {"judge": {"train": False}, "main": {}}}
    rows = [row(step, zero_variance_share=1.0, turns_mean=1, length_max=4) for step in STEPS]
    (found,) = alarms(replace(HEALTHY, policies=several(spec), rows=rows, episodes=[], evaluations=[]))
    assert (found.name, found.policy) == ("dead reward", "main")
    (line,) = advice_lines(rows, spec)
    assert line.startswith("main: length_max 4")
