"""A step's batch and its metrics: what an episode weighs, and what is averaged over what."""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.peers import job_of

from rookery import protocol
from rookery.algorithms.advantages import ADVANTAGES
from rookery.bounds import METRIC_LETTERS, METRICS
from rookery.controller.jobs.step import (
    CompleteGroup,
    StepAccumulator,
    describe,
    longest_episode,
    make_batch,
    metric_means,
    trainer_logprobs,
)
from rookery.controller.jobs.trajectory import EpisodeResult, Trajectory
from rookery.controller.training.shares import split_batch
from rookery.environments.builtins import BUILTINS
from rookery.spec.job import BUILTIN_TURNS, JobSpec
from rookery.spec.policy import LOSS_PARAMETERS

CONTEXT = 512


def spec(**changes: Any) -> JobSpec:
    return JobSpec.model_validate(job_of(**changes))


def episode(
    reward: float, lengths: list[int], metrics: dict[str, float] | None = None, first: int = 0
) -> EpisodeResult:
    """Trajectories with so many sampled tokens, which are numbered from ``first``, each with a prompt of its own."""
    trajectories, token = [], first
    for number, length in enumerate(lengths):
        made = Trajectory(prompt=[1, number + 1])
        for _ in range(length):
            made.append_action(protocol.TokenLog([token], [-1.0], [0]), "main")
            made.append_observation([0])
            token += 1
        trajectories.append(made)
    return EpisodeResult(trajectories, [], ["reply"], reward, metrics or {}, "done")


def group(*episodes: EpisodeResult) -> CompleteGroup:
    return CompleteGroup("g", 0, 0, 0, list(episodes))


def pulls(job: JobSpec, groups: list[CompleteGroup], batches: list[protocol.TrainingBatch]) -> dict[int, Any]:
    """By sampled token: (weight, weight · advantage) with the step's scale: what multiplies its KL term and its loss
    term. Tokens are unique."""
    scale = StepAccumulator(job, 0, groups).scale
    members = [member for batch in batches for unit in batch.groups for member in unit.members]
    return {
        token: (pytest.approx(scale * weight), pytest.approx(scale * weight * advantage))
        for member in members
        for token, weight, advantage in zip(member.tokens, member.weights, member.advantages, strict=True)
        if weight
    }


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[CompleteGroup], list[CompleteGroup]]:
    """Groups whose episodes have one trajectory each, and the same tokens in trajectories that are cut at random, some
    without a token."""
    rng, token = Random(draw(st.integers(0, 2**32))), 10
    whole, cut = [], []
    for _ in range(draw(st.integers(1, 3))):
        ones, others = [], []
        for _ in range(draw(st.integers(2, 4))):
            lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
            reward, metrics = rng.choice([0.0, 1.0, rng.gauss(0, 1)]), {"m": rng.random()} if rng.random() < 0.5 else {}
            ones.append(episode(reward, [sum(lengths)], metrics, token))
            others.append(episode(reward, lengths, metrics, token))
            token += sum(lengths)
        whole.append(group(*ones))
        cut.append(group(*others))
    return whole, cut


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("loss", ["aipo", "cross_entropy", "dro"])
@given(drawn=steps(), kl=st.sampled_from([0.0, 0.3]), parts=st.integers(1, 4))
def test_cutting_an_episode_changes_no_weight(
    name: str, loss: str, drawn: tuple[list[CompleteGroup], list[CompleteGroup]], kl: float, parts: int
) -> None:
    """Also with a KL penalty, in micro-batches, and divided among several trainers; nor does it change a metric."""
    whole, cut = drawn
    job = spec(algorithm={"name": name, "loss": loss, "kl_weight": 0.0 if loss == "cross_entropy" else kl})
    expected = pulls(job, whole, [make_batch(job, whole, CONTEXT)])
    assert pulls(job, cut, [make_batch(job, cut, CONTEXT)]) == expected
    assert pulls(job, cut, [make_batch(job, [one], CONTEXT) for one in cut]) == expected, "in micro-batches"
    assert pulls(job, cut, split_batch(make_batch(job, cut, CONTEXT), parts)) == expected, "in shares"
    assert describe(cut, 0) == describe(whole, 0)


@pytest.mark.parametrize("loss", ["aipo", "cross_entropy", "dro"])
@given(drawn=steps())
def test_returned_logprobs_are_those_of_the_tokens_with_a_weight(
    loss: str, drawn: tuple[list[CompleteGroup], list[CompleteGroup]]
) -> None:
    """The trainer returns, in the order of the batch, one number for each token that has a weight: here its token."""
    job = spec(algorithm={"loss": loss})
    groups = [
        replace(group, names=[f"{number}-{member}" for member in range(len(group.episodes))])
        for number, group in enumerate(drawn[1])
    ]
    members = [member for unit in make_batch(job, groups, CONTEXT).groups for member in unit.members]
    returned = [t for member in members for t, weight in zip(member.tokens, member.weights, strict=True) if weight]
    found = trainer_logprobs(job, groups, array("f", returned).tobytes(), CONTEXT)
    assert sum(map(len, found.values())) == protocol.LOGPROB_BYTES * len(returned)
    for group in groups:
        for name, one in zip(group.names, group.episodes, strict=True):
            sampled = [
                t for part in one.trajectories for t, action in zip(part.tokens, part.mask, strict=True) if action
            ]
            assert found.get(name, b"") in (b"", array("f", sampled).tobytes())
    assert trainer_logprobs(job, groups, array("f", [*returned, 1.0]).tobytes(), CONTEXT) == {}


def test_every_loss_is_weighed_alike() -> None:
    """The loss plays no part in the weights, except that cross_entropy leaves out the worse episodes."""
    groups = [group(episode(1, [2, 1], first=10), episode(0, [4], first=20))]
    found = {
        loss: pulls(job := spec(algorithm={"loss": loss}), groups, [make_batch(job, groups)])
        for loss in LOSS_PARAMETERS
    }
    chosen = found.pop("cross_entropy")
    assert all(one == found["aipo"] for one in found.values())
    assert set(chosen) == {10, 11, 12} < set(found["aipo"])


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "mean"])
def test_long_failures_in_several_trajectories_are_pulled_as_in_one(name: str) -> None:
    """Two good episodes of one turn, two bad ones of four turns: the mean over an episode's tokens, then over
    episodes."""
    whole = [group(*(episode(r, [n], first=100 * i) for i, (r, n) in enumerate([(1, 10), (1, 10), (0, 40), (0, 40)])))]
    split = [
        group(
            *(
                episode(r, n, first=100 * i)
                for i, (r, n) in enumerate([(1, [10]), (1, [10]), (0, [10] * 4), (0, [10] * 4)])
            )
        )
    ]
    job, found = spec(algorithm={"name": name}), []
    for groups in (whole, split):
        by_episode: Counter[int] = Counter()
        batch = make_batch(job, groups, CONTEXT)
        scale = StepAccumulator(job, 0, groups).scale
        for unit in batch.groups:
            for member in unit.members:
                pull = sum(w * a for w, a in zip(member.weights, member.advantages, strict=True))
                by_episode[max(member.tokens) // 100] += scale * pull  # type: ignore[assignment]
        found.append([by_episode[i] for i in range(4)])
    assert found[0] == pytest.approx(found[1])
    if name == "grpo":
        spread = statistics.stdev([1, 1, 0, 0])
        assert found[1] == pytest.approx([0.5 / spread / 4] * 2 + [-0.5 / spread / 4] * 2, rel=1e-5)


def test_an_episode_without_tokens_weighs_nothing_and_counts() -> None:
    groups = [group(episode(1, [0, 0]), episode(0, [3], first=10))]
    for name in sorted(ADVANTAGES):
        job = spec(algorithm={"name": name})
        batch = make_batch(job, groups)
        assert [len(unit.members) for unit in batch.groups] == [1]
        assert StepAccumulator(job, 0, groups).scale == pytest.approx(1 / 3 if name == "mean" else 1 / 2)


# --- the longest episode ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "max_tokens", "longest"),
    [
        ({"id": "jsonl", "rows": [], "verifier": "exact"}, 64, 64),
        ({"id": "jsonl", "rows": [], "verifier": "exact"}, 1000, CONTEXT),
        ({"id": "reasoning-gym", "task": "x", "max_turns": 5}, 64, 64),
        ({"id": "calculator"}, 64, 128),
        ({"id": "calculator", "max_turns": 1}, 64, 64),
        ({"id": "xrouter"}, 64, 192),
        ({"hosted": "task"}, 16, 128),
        ({"hosted": "task", "max_turns": 3}, 64, 192),
        ({"hosted": "task", "max_turns": 100}, 64, CONTEXT),
    ],
)
def test_dr_grpo_divides_by_the_longest_episode(environment: dict[str, Any], max_tokens: int, longest: int) -> None:
    job = spec(environment=environment, sampling__max_tokens=max_tokens, algorithm__name="dr_grpo")
    assert longest_episode(job, CONTEXT) == longest
    groups = [group(episode(1, [7], first=10), episode(0, [2, 3], first=20))]
    found = pulls(job, groups, [make_batch(job, groups, CONTEXT)])
    assert len(found) == 12 and all(weight == 1 / (2 * longest) for weight, _ in found.values())


@pytest.mark.parametrize(("more", "main"), [({}, 1), ({"tools": [{"tool": "calculator"}], "calls": 3}, 4)])
def test_a_judges_reply_is_none_of_the_policy_that_it_judges(more: dict[str, Any], main: int) -> None:
    rows = {"id": "jsonl", "rows": [], "verifier": {"name": "judge", "policy": "judge"}, **more}
    job = spec(environment=rows, policies={"main": {}, "judge": {}}, sampling__max_tokens=10)
    found = {name: longest_episode(job.of_policy(name), CONTEXT) for name in job.policies}
    assert found == {"main": 10 * main, "judge": 10}


def test_turns_are_known_for_every_builtin() -> None:
    without = {
        "openenv",
        "verifiers",
        "gymnasium",
        "textarena",
        "agent",
        "demonstrations",
        "preferences",
    }  # max_turns counts, or nothing is sampled
    assert set(BUILTIN_TURNS) == set(BUILTINS) - without


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_a_metric_is_averaged_over_the_episodes_that_have_it() -> None:
    row = describe(
        [
            group(episode(1, [3], {"math": 1.0, "both": 1.0}), episode(1, [3], {"math": 0.5, "both": math.nan})),
            group(episode(0, [3], {"code": 0.5, "both": -math.inf}), episode(0, [3], {"lost": math.nan})),
        ],
        0,
    )
    shown = {name: value for name, value in row.items() if name.startswith(("reward/", "reward_episodes/"))}
    assert math.isnan(shown.pop("reward/lost"))
    assert shown == {
        "reward/math": 0.75, "reward_episodes/math": 2.0, "reward/code": 0.5, "reward_episodes/code": 1.0,
        "reward/both": 1.0, "reward_episodes/both": 1.0, "reward_episodes/lost": 0.0,
    }  # fmt: skip
    assert row["reward"] == 0.5, "the reward is every episode's"


@given(st.lists(st.none() | st.floats(), min_size=2, max_size=9))
def test_a_mean_is_finite_wherever_a_value_is(values: list[float | None]) -> None:
    episodes = [episode(0, [1], {} if value is None else {"m": value}) for value in values]
    row = describe([group(*episodes)], 0)
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if any(value is not None for value in values):
        assert row["reward_episodes/m"] == len(finite)
        if finite:
            least, most = math.nextafter(min(finite), -math.inf), math.nextafter(max(finite), math.inf)
            assert least <= row["reward/m"] <= most and math.isfinite(row["reward/m"])
        else:
            assert math.isnan(row["reward/m"])
    else:
        assert "reward/m" not in row


def test_rewards_that_differ_by_rounding_are_equal() -> None:
    groups = [group(episode(0.1 + 0.2, [1]), episode(0.3, [1])), group(episode(1e-9, [1]), episode(0, [1]))]
    assert describe(groups, 0)["zero_variance_share"] == 0.5
    assert [one.has_variance for one in groups] == [False, True]
    assert make_batch(spec(), groups[:1]).groups == []


def test_names_of_metrics_are_bounded_and_the_commonest_are_kept() -> None:
    """Each episode of an environment may give other names."""
    metrics = [{"common": 1.0, **{f"{number}-{name}": 1.0 for name in range(99)}} for number in range(512)]
    began = time.thread_time()
    means = metric_means(metrics)
    assert time.thread_time() - began < 1, "the time grows with names + episodes, not with their product"
    assert len(means) == METRICS and means["common"] == (1.0, 512)
    long = [{f"{number:03}{'x' * 196}": 1.0 for number in range(first, 100)} for first in (0, 1)]
    assert [*metric_means(long)] == [name for name, _ in zip(long[1], range(METRIC_LETTERS // 199), strict=False)]


@given(st.lists(st.sets(st.integers(0, 3 * METRICS), min_size=METRICS), min_size=1, max_size=4))
def test_kept_names_of_metrics_are_those_of_the_most_episodes(having: list[set[int]]) -> None:
    metrics = [{f"{name:03}": 1.0 for name in names} for names in having]
    counts = Counter(name for each in metrics for name in each)
    wanted = sorted(counts, key=lambda name: (-counts[name], name))[:METRICS]
    assert {name: count for name, (_, count) in metric_means(metrics).items()} == {
        name: counts[name] for name in wanted
    }
