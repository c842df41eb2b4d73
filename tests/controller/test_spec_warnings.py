"""Warnings about job specs that are allowed and hardly meant."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.peers import Service, job_of

from rookery.algorithms.schedules import rate
from rookery.controller.spec_warnings import (
    judge_problems,
    judge_warnings,
    silent_problems,
    spec_warnings,
    split_problems,
    split_warnings,
)
from rookery.environments.base import SplitSizes
from rookery.spec.job import JobSpec
from rookery.spec.parsing import SpecError

SCHEDULE = "policies.main.optimizer.schedule"


def spec(schedule: Any, **stop: Any) -> JobSpec:
    return JobSpec.model_validate(job_of(policies={"main": {"optimizer": {"schedule": schedule}}}, stop=stop))


@pytest.mark.parametrize(
    ("schedule", "stop", "expected"),
    [
        ({"name": "cosine", "warmup_steps": 10}, {"steps": 6}, ["warmup_steps: 10 of stop.steps 6", "54.5% of it"]),
        ({"name": "warmup", "warmup_steps": 6}, {"steps": 6}, ["warmup_steps: 6 of stop.steps 6", "85.7% of it"]),
        ({"name": "constant", "warmup_steps": 9}, {"steps": 6, "reward": 1}, ["warmup_steps: 9 of stop.steps 6"]),
        ({"name": "linear", "total_steps": 3}, {"steps": 6}, ["total_steps: 3", "0% of lr from step 4 of stop"]),
        ({"name": "uba", "total_steps": 3}, {"reward": 1}, ["0% of lr from step 4, and stop has no steps"]),
        ({"name": "cosine", "total_steps": 5}, {"wall_time": "1h"}, ["from step 6, and stop has no steps"]),
        ({"name": "cosine", "total_steps": 5, "min_ratio": 1e-6}, {"steps": 9}, ["0.0001% of lr from step 6"]),
        ({"name": "linear", "warmup_steps": 4, "total_steps": 4}, {"steps": 9},
         ["total_steps: 4, of which the warm-up takes 4", "0% of lr from step 6 of stop.steps 9"]),
        ({"name": "linear", "warmup_steps": 4, "total_steps": 4, "min_ratio": 0.5}, {"steps": 9},
         ["falls to 50% of lr in the step after the warm-up"]),
        ({"name": "linear", "total_steps": 100}, {"steps": 10}, ["above stop.steps 10: the job ends at 91% of lr"]),
        ({"name": "warmup"}, {"steps": 6}, ["warmup_steps: 0: warmup without steps is constant"]),
        ({"name": "constant", "total_steps": 3}, {"steps": 6}, ["total_steps: no effect with constant"]),
        ({"name": "warmup", "warmup_steps": 2, "min_ratio": 0.1}, {"steps": 6}, ["min_ratio: no effect with warmup"]),
        ({"name": "cosine", "phi": 2.0}, {"steps": 6}, ["phi: no effect with cosine"]),
    ],
)  # fmt: skip
def test_schedules_that_are_hardly_meant(schedule: dict[str, Any], stop: dict[str, Any], expected: list[str]) -> None:
    lines = spec_warnings(spec(schedule, **stop))
    assert all(line.startswith(f"{SCHEDULE}.") for line in lines)
    for part in expected:
        assert any(part in line for line in lines), (part, lines)
    assert len(lines) == (2 if len(expected) > 1 and schedule.get("total_steps") == 4 else 1), lines


@pytest.mark.parametrize(
    ("schedule", "stop"),
    [
        ("constant", {"steps": 6}),
        ("constant", {"reward": 1}),
        ("cosine", {"steps": 6}),
        ({"name": "cosine", "warmup_steps": 2}, {"steps": 6}),
        ({"name": "uba", "phi": 2.0}, {"steps": 6}),
        ({"name": "linear", "total_steps": 6}, {"steps": 6}),
        ({"name": "linear", "total_steps": 3, "min_ratio": 0.1}, {"steps": 6}),
        ({"name": "linear", "total_steps": 30, "min_ratio": 0.1}, {"tokens": 1000}),
        ({"name": "warmup", "warmup_steps": 3}, {"tokens": 1000}),
        ({"name": "cosine"}, {"steps": 1}),
    ],
)
def test_usual_schedules_have_no_warning(schedule: Any, stop: dict[str, Any]) -> None:
    assert spec_warnings(spec(schedule, **stop)) == []


@given(
    st.sampled_from(["constant", "linear", "cosine", "warmup", "uba"]), st.integers(0, 12),
    st.none() | st.integers(1, 12), st.integers(1, 12), st.sampled_from([0.0, 1e-9, 0.1, 1.0]),
)  # fmt: skip
def test_every_rate_of_zero_and_every_unfinished_warm_up_has_a_warning(
    name: str, warmup: int, total: int | None, steps: int, floor: float
) -> None:
    """Compared with the rates that the steps get."""
    job = spec({"name": name, "warmup_steps": warmup, "total_steps": total, "min_ratio": floor}, steps=steps)
    lines = spec_warnings(job)
    parameters: dict[str, Any] = {"warmup_steps": warmup, "total_steps": total or steps, "min_ratio": floor, "phi": 1.0}
    rates = [rate(name, step, lr=1.0, **parameters) for step in range(steps)]
    idle = [step + 1 for step, value in enumerate(rates) if value < 1e-6]
    found = [line for line in lines if "nothing is learned" in line]
    assert bool(found) == bool(idle)
    if idle:
        assert f"from step {idle[0]} of stop.steps {steps}" in found[0]
        assert idle == list(range(idle[0], steps + 1))
    assert any("never reaches lr" in line for line in lines) == (max(rates) < 1.0)


def test_dr_grpo_asks_for_the_turns_of_a_hosted_environment() -> None:
    lines = spec_warnings(JobSpec.model_validate(job_of(algorithm__name="dr_grpo")))
    assert lines == [
        "environment.max_turns: absent: dr_grpo divides by 8 replies of sampling.max_tokens 8; give max_turns the most"
        " replies that an episode takes, 1 for one reply"
    ]
    for changes in (
        {"algorithm__name": "dr_grpo", "environment__max_turns": 8},
        {"algorithm__name": "dr_grpo", "environment": {"id": "jsonl", "rows": [], "verifier": "exact"}},
        {"algorithm__name": "grpo"},
    ):
        assert spec_warnings(JobSpec.model_validate(job_of(**changes))) == []


async def test_warnings_are_in_the_dry_run_and_once_in_the_events(service: Service) -> None:
    await service.host().join()
    job = job_of(policies__main__optimizer__schedule={"name": "linear", "total_steps": 1})
    plan = await service.controller.dry_run("alice", job)
    assert len(plan.warnings) == 1
    for _ in range(2):
        view, _ = await service.controller.submit("alice", job, "once")
    events = await service.controller.queries.events("alice", view.id)
    assert [event.text for event in events if event.kind == "warning"] == plan.warnings
    assert (await service.controller.dry_run("alice", job_of())).warnings == []


def evaluated(**changes: Any) -> JobSpec:
    return JobSpec.model_validate(job_of(**changes))


@pytest.mark.parametrize(
    ("evaluation", "commit_every", "says"),
    [
        ({"every": 5}, 1, "evaluation.every: 5 without evaluation.prompts: nothing is evaluated"),
        ({"every": 5, "prompts": 2}, 3, "only those after 15 steps and its multiples are evaluated; give a multiple"),
        ({"every": 6, "prompts": 2}, 3, ""),
        ({"prompts": 2}, 3, ""),
    ],
)
def test_evaluations_that_never_happen(evaluation: dict[str, Any], commit_every: int, says: str) -> None:
    given = evaluated(evaluation=evaluation, checkpoints={"commit_every": commit_every}, algorithm__max_staleness=2)
    lines = spec_warnings(given)
    assert says in lines[0] if says else not lines


@pytest.mark.parametrize(
    ("sizes", "asked", "problem", "warning"),
    [
        (
            SplitSizes(9, 0, held_out_by="environment.x"),
            2,
            "given 2, but the environment holds no prompts out; give en",
            "",
        ),
        (SplitSizes(9, 0, held_out_by="environment.x"), 0, "", ""),
        (SplitSizes(9, 4, held_out_by="environment.x"), 4, "", ""),
        (SplitSizes(9, 4, held_out_by="environment.x"), 5, "", "evaluation.prompts: 5, but only 4 are held out"),
        (SplitSizes(9, 4, held_out_by="environment.x"), 0, "", ""),
        (SplitSizes(9, 4, asked=True), 0, "", "4 rows are held out and never used; give evaluation.prompts"),
        (SplitSizes(9, 4, repeated=3, asked=True), 4, "", "3 of 4 held-out rows have the prompt of a training row"),
        (None, 4, "", ""),
    ],
)
def test_splits_that_an_evaluation_cannot_use(sizes: SplitSizes | None, asked: int, problem: str, warning: str) -> None:
    given = evaluated(evaluation={"prompts": asked})
    problems, warnings = split_problems(given, sizes), split_warnings(given, sizes)
    assert problem in problems[0] if problem else not problems
    assert warning in warnings[0] and len(warnings) == 1 if warning else not warnings


@pytest.mark.parametrize(
    ("job", "a", "b", "expected"),
    [
        ({"kl_reference": "base"}, {}, {}, [""]),
        ({"kl_reference": "base"}, {"kl_weight": 0.1}, {}, []),
        ({"kl_reference": "base", "kl_weight": 0.1}, {}, {"kl_weight": 0}, []),
        ({"kl_reference": "base", "kl_weight": 0.1}, {"kl_weight": 0}, {"kl_weight": 0}, [""]),
        ({}, {"kl_reference": "base"}, {"kl_reference": "base", "kl_weight": 0.1}, ["policies.a."]),
        ({"kl_reference": "base"}, {"kl_reference": "base"}, {}, ["", "policies.a."]),
    ],
)
def test_a_reference_that_no_policy_is_compared_with(
    job: dict[str, Any], a: dict[str, Any], b: dict[str, Any], expected: list[str]
) -> None:
    policies = {name: {"algorithm": own} if own else {} for name, own in (("a", a), ("b", b))}
    given = job_of(policies=policies, **{f"algorithm__{field}": value for field, value in job.items()})
    lines = [line for line in spec_warnings(JobSpec.model_validate(given)) if "kl_reference" in line]
    assert [line.partition("algorithm.kl_reference: no effect")[0] for line in lines] == expected


JUDGED: dict[str, Any] = {"verifier": {"name": "judge", "policy": "j"}}
TOOLS: dict[str, Any] = {"verifier": "number", "tools": [{"tool": "python"}]}
FROZEN: dict[str, Any] = {"train": False, "base": True}


@pytest.mark.parametrize(
    ("options", "judge", "expected"),
    [
        ({"verifier": "number", "max_turns": 1}, FROZEN, []),
        (JUDGED, FROZEN, []),
        ({**JUDGED, "max_turns": 2}, FROZEN, []),
        (
            {**JUDGED, "max_turns": 1},
            FROZEN,
            ["max_turns: 1: an episode may have 2 (1 for the reply + 1 for"],
        ),
        (TOOLS, FROZEN, []),
        (
            {**TOOLS, "calls": 8},
            FROZEN,
            ["max_turns: 8: an episode may have 9 (1 for the reply + 8 for"],
        ),
        ({**TOOLS, **JUDGED, "max_turns": 5}, FROZEN, ["an episode may have 6 (1 for the reply + 4 for calls"]),
        (
            JUDGED,
            {},
            ["environment.verifier.policy: j trains, and its own verdict is its reward;"],
        ),
        ({**JUDGED, "max_turns": 1}, {}, ["verifier.policy: j trains", "an episode may have 2"]),
        (
            JUDGED,
            {"train": False, "follows": {"policy": "a", "every": 1}},
            ["environment.verifier.policy: j follows a, which its verdicts train: they change with what it learns;"],
        ),
    ],
)
def test_a_verdict_comes_and_rewards_the_other_policies(
    options: dict[str, Any], judge: dict[str, Any], expected: list[str]
) -> None:
    environment = {"id": "jsonl", "rows": [{"prompt": "1+1?", "answer": 2}], **options}
    job = JobSpec.model_validate(job_of(policies={"a": {}, "j": judge}) | {"environment": environment})
    lines = judge_warnings(job)
    assert bool(judge_problems(job)) == (job.environment.judge is not None and job.environment.max_turns == 1)
    assert len(lines) == len(expected) and all(part in line for part, line in zip(expected, lines, strict=True))


@pytest.mark.parametrize(
    ("every", "stop", "never"),
    [(5, {"steps": 6}, False), (6, {"steps": 6}, True), (99, {"reward": 1}, False), (2**63 - 1, {"steps": 6}, True)],
)
def test_a_follower_that_is_never_swapped_is_named(every: int, stop: dict[str, Any], never: bool) -> None:
    policies = {"a": {}, "b": {"train": False, "follows": {"policy": "a", "every": every}}}
    lines = spec_warnings(JobSpec.model_validate(job_of(policies=policies, stop=stop)))
    says = f"policies.b.follows.every: {every}, but a takes 6 steps: it stays at version 0; give fewer than 6"
    assert lines == ([says] if never else [])


@pytest.mark.parametrize(
    ("environment", "policies", "silent"),
    [
        ({"id": "calculator"}, {"a": {}}, []),
        ({"id": "calculator"}, {"a": {}, "b": {}, "c": FROZEN, "d": {}}, ["b", "d"]),
        ({"id": "xrouter"}, {"a": FROZEN, "b": {}}, ["b"]),
        ({"id": "jsonl", "rows": [{"prompt": "1+1?", "answer": 2}], **JUDGED}, {"a": {}, "j": {}, "b": {}}, ["b"]),
        ({"hosted": "task"}, {"a": {}, "b": {}}, []),
        ({"id": "agent"}, {"a": {}, "b": {}}, []),
        ({"id": "verifiers"}, {"a": {}, "b": {}}, []),
    ],
)
def test_a_policy_that_no_step_names_is_named(
    environment: dict[str, Any], policies: dict[str, Any], silent: list[str]
) -> None:
    lines = silent_problems(JobSpec.model_validate(job_of(policies=policies) | {"environment": environment}))
    assert [line.split(":")[0] for line in lines] == [f"policies.{name}" for name in silent]


@pytest.mark.parametrize(
    ("environment", "frozen", "named"),
    [
        ({"id": "calculator"}, FROZEN, True),
        ({"id": "xrouter"}, {"train": False, "follows": {"policy": "a", "every": 1}}, True),
        ({"id": "jsonl", "rows": [{"prompt": "1+1?", "answer": 2}], "verifier": "number"}, FROZEN, True),
        ({"id": "jsonl", "rows": [{"prompt": "1+1?", "answer": 2}], **JUDGED}, FROZEN, False),
        ({"hosted": "task"}, FROZEN, False),
        ({"id": "agent"}, FROZEN, False),
    ],
)
def test_a_frozen_policy_that_never_replies_is_named(
    environment: dict[str, Any], frozen: dict[str, Any], named: bool
) -> None:
    job = JobSpec.model_validate(job_of(policies={"a": {}, "j": frozen}) | {"environment": environment})
    lines = [line for line in spec_warnings(job) if line.startswith("policies.j: it never replies: ")]
    assert len(lines) == named and not silent_problems(job)


async def test_a_policy_that_no_step_names_is_refused_at_submission(service: Service) -> None:
    job = job_of(policies={"a": {}, "b": {}}) | {"environment": {"id": "calculator"}}
    with pytest.raises(SpecError, match=r"policies\.b: it trains, but only the first policy, a, replies in calculator"):
        await service.controller.submit("alice", job)


async def test_a_verdict_that_never_comes_is_refused_at_submission(service: Service) -> None:
    environment = {"id": "jsonl", "rows": [{"prompt": "1+1?"}], **JUDGED, "max_turns": 1}
    with pytest.raises(SpecError, match=r"environment\.max_turns: given 1, allowed: at least 2"):
        await service.controller.submit("alice", job_of(policies={"a": {}, "j": FROZEN}) | {"environment": environment})
