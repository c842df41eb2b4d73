"""The shipped controller among workers that fail in every way, in virtual time; and that this notices mistakes.
``make chaos-at-scale`` has the long run: a thousand workers, two hundred jobs, a hundred thousand preemptions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.chaos.events import Violation
from tests.chaos.faults import Plan
from tests.chaos.mutations import MUTATIONS, Mutation, applied
from tests.chaos.run import ChaosResult, run_plan

SMALL = Plan(seed=0, workers=12, jobs=4, preemptions=100)
TRIES = 8
"""Seeds within which a mistake must be noticed; most are by the first."""


@pytest.mark.parametrize(
    ("seed", "changes"),
    [
        (1, {"preemptions": 60}),
        pytest.param(1, {"workers": 20, "jobs": 6, "preemptions": 150}, marks=pytest.mark.heavy),
        pytest.param(2, {"seeding": True}, marks=pytest.mark.heavy),
        (3, {"commit_deaths": 0.3, "database_failures": 0.01, "phase_deaths": 0.1}),
        pytest.param(4, {"half_opens": 0.05, "freezes": 0.02, "slow_latency": 4.0}, marks=pytest.mark.heavy),
        pytest.param(25, {"lifetime": 8.0, "restart_every": 20.0}, marks=pytest.mark.heavy),
    ],
    ids=["mixed", "many", "seeding", "commits", "silence", "restarts"],
)
def test_promises_hold_under_faults(seed: int, changes: dict[str, Any]) -> None:
    plan = replace(SMALL, seed=seed, **changes)
    found = run_plan(plan)
    assert found.preemptions >= plan.preemptions
    assert found.versions > found.jobs >= plan.jobs
    assert met(found), found.counts


def met(found: ChaosResult) -> bool:
    """The run had the faults that it is for."""
    wanted = ("fault kill", "fault break", "fault half-open", "fault freeze", "late", "lost", "committed", "retired")
    return all(found.counts.get(kind) for kind in wanted)


def test_same_seed_gives_the_same_events() -> None:
    plan = replace(SMALL, seed=6, workers=8, jobs=2, preemptions=20)
    first, again, other = run_plan(plan), run_plan(plan), run_plan(replace(plan, seed=7))
    assert (first.digest, first.events, first.virtual_seconds) == (again.digest, again.events, again.virtual_seconds)
    assert first.digest != other.digest


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_names_text_of_the_source(mutation: Mutation) -> None:
    with applied(mutation):
        pass


@pytest.mark.heavy
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_mutation_is_noticed(mutation: Mutation) -> None:
    for seed in range(1, TRIES + 1):
        with applied(mutation):
            try:
                run_plan(replace(SMALL, seed=seed, **mutation.plan))
            except Violation as violation:
                assert violation.invariant in mutation.caught, violation
                assert f"seed {seed}" in str(violation)
                assert "last events:" in str(violation)
                return
    pytest.fail(f"nobody noticed: {mutation.name}")
