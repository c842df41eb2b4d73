"""Tenants side by side on one worker: a slow one costs the others nothing but its own share, shares are equal, and many
jobs are no more than one. The shipped controller in virtual time (``tests/support/virtual.py``): no figure
depends on the machine."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from statistics import mean
from typing import Any

import pytest
from tests.support.peers import job_of
from tests.support.virtual import Played, play

ENVIRONMENTS = {"fast": 0.05, "slow": 5.0}
"""Seconds that a reset or a step takes: the slow one a hundred times as long."""

WARM_UP = 5.0
"""Seconds after which who was submitted first has no head start any more."""

BEGINNING = 20.0
"""Seconds in which a flood of jobs begins: all of their first prompts are computed."""


def job(name: str, environment: str = "fast", max_staleness: int = 0) -> dict[str, Any]:
    return job_of(
        name=name,
        environment={"id": environment, "step_timeout": "10m"},
        algorithm={"group_size": 4, "groups_per_step": 2, "max_staleness": max_staleness},
        sampling={"max_tokens": 16},
        stop={"steps": 100_000},
    )


FAST = [(f"tenant-{number}", job(f"fast-{number}")) for number in range(3)]


SECONDS = 80.0


@cache
def fast_alone() -> Played:
    return play(FAST, seconds=SECONDS, environments=ENVIRONMENTS)


def test_hundred_times_slower_environment_changes_other_step_times_by_less_than_a_tenth() -> None:
    alone = fast_alone()
    beside = play([*FAST, ("tortoise", job("slow", "slow"))], seconds=SECONDS, environments=ENVIRONMENTS)
    assert len(beside.commits["slow"]) >= 3, "the slow one trains too, and its work is in the figures"
    for _, wanted in FAST:
        before, after = alone.step_seconds(wanted["name"]), beside.step_seconds(wanted["name"])
        assert after < 1.10 * before, (wanted["name"], before, after)


def test_slow_tenant_costs_only_its_compute() -> None:
    """One that keeps groups in flight waits less and computes more. That much is taken from the others, and the little
    that decoding apart from them costs."""
    alone = fast_alone()
    slow = [*FAST, ("tortoise", job("slow", "slow", max_staleness=2))]
    beside = play(slow, seconds=SECONDS, environments=ENVIRONMENTS)
    own = beside.computed["slow"] / SECONDS
    assert 0.05 < own < 0.25
    for _, wanted in FAST:
        before, after = alone.step_seconds(wanted["name"], WARM_UP), beside.step_seconds(wanted["name"], WARM_UP)
        assert after * (1 - own) < 1.03 * before, (wanted["name"], before, after, own)


@pytest.mark.parametrize("rows", [64, 8])
def test_equal_work_gets_equal_shares_at_all_times(rows: int) -> None:
    """Also where they queue for the engine, which has rows for one group and a half."""
    jobs = [(f"tenant-{number}", job(f"job-{number}")) for number in range(5)]
    played = play(jobs, seconds=30, environments=ENVIRONMENTS, rows=rows)
    assert min(map(len, played.commits.values())) >= 10
    assert played.widest_gap() <= 1


def test_tenants_that_never_wait_get_equal_shares() -> None:
    """With groups always in flight the queue is never empty. The groups of a job's first three steps begin with the
    job, in an order that chance decides; after these steps nobody gets ahead."""
    jobs = [(f"tenant-{number}", job(f"job-{number}", max_staleness=2)) for number in range(4)]
    played = play(jobs, seconds=40, environments=ENVIRONMENTS, rows=8)
    assert min(map(len, played.commits.values())) >= 12
    assert played.widest_gap(max(times[2] for times in played.commits.values())) <= 1


def test_ten_jobs_of_one_tenant_get_one_share() -> None:
    one = [("alice", job("one", max_staleness=2))]
    equal = play([*one, ("bob", job("other", max_staleness=2))], seconds=60,
                 environments=ENVIRONMENTS, rows=8)  # fmt: skip
    many = [("bob", job(f"many-{number}", max_staleness=2)) for number in range(10)]
    crowd = play([*one, *many], seconds=60, environments=ENVIRONMENTS, rows=8)
    bobs = sum(seconds for name, seconds in crowd.computed.items() if name != "one")
    assert bobs < 1.25 * crowd.computed["one"], "ten jobs together get one tenant's share"
    assert crowd.step_seconds("one", WARM_UP) < 1.15 * equal.step_seconds("one", WARM_UP)
    steps = [len(times) for name, times in crowd.commits.items() if name != "one"]
    assert min(steps) >= 3
    assert max(steps) - min(steps) <= 1, "and share it equally"


@pytest.mark.parametrize(
    ("jobs", "requests"),
    [
        pytest.param((1, 150), (0, 0), id="150 jobs"),
        pytest.param((0, 0), (2_500, 10_000), id="10,000 generations", marks=pytest.mark.heavy),
    ],
)
def test_flood_of_one_tenant_costs_another_no_more_than_its_fair_share(
    jobs: tuple[int, int], requests: tuple[int, int]
) -> None:
    """The fair share is what remains beside work of the other tenant that keeps the worker busy all the time."""

    def step_seconds(jobs: int, requests: int) -> float:
        others = [("bob", job(f"other-{number}", max_staleness=2)) for number in range(jobs)]
        played = play([("alice", job("mine")), *others], seconds=40, environments=ENVIRONMENTS, flood=("bob", requests))
        return played.step_seconds("mine", BEGINNING)

    share, flooded = (step_seconds(*many) for many in zip(jobs, requests, strict=True))
    assert flooded < 1.15 * share


def test_same_run_gives_the_same_tokens() -> None:
    """The bound behind the figures above; and a neighbour changes no other tenant's text."""
    first, second = (play(FAST[:2], seconds=8, environments=ENVIRONMENTS, turns=2) for _ in range(2))
    assert first.commits == second.commits
    assert first.computed == second.computed
    assert first.episodes == second.episodes


def test_metrics_break_down_the_time_of_a_step() -> None:
    """On-policy, a step's time is what it waited for groups, its training and the commit before; an episode's is the
    queue, the generation and the environment."""
    rows = play(FAST[:1], seconds=20, environments=ENVIRONMENTS).metrics["fast-0"]
    assert len(rows) > 5
    for before, row in pairwise(rows):
        taken = before["seconds/commit"] + row["seconds/waiting"] + row["seconds/train"]
        assert taken == pytest.approx(row["time"] - before["time"], abs=1e-6)
        assert row["seconds/environment"] == pytest.approx(2 * ENVIRONMENTS["fast"]), "a reset and a step"
        assert row["seconds/queue"] == 0, "every episode has its row"
        episode = row["seconds/generation"] + row["seconds/environment"]
        assert row["seconds/generation"] > 0 and row["seconds/waiting"] == pytest.approx(episode, rel=0.05)
    crowd = [(f"tenant-{number}", job(f"job-{number}")) for number in range(6)]
    crowded = play(crowd, seconds=20, environments=ENVIRONMENTS, rows=4).metrics
    assert all(mean(row["seconds/queue"] for row in rows) > 0.1 for rows in crowded.values())
