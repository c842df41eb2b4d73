"""From complete groups to what is differentiated: advantages, weights, one copy of every shared prompt. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rookery import protocol
from rookery.algorithms.advantages import advantages, step_scale, token_weights
from rookery.controller.jobs.trajectory import EpisodeResult
from rookery.spec.job import JobSpec

ANCHORED = ("dro",)
"""Losses that pull towards who sampled a token, or away, also where its advantage is 0."""

STAGES = ("queue", "generation", "environment")
"""Where an episode's time goes (:attr:`~rookery.controller.jobs.trajectory.Outcome.seconds`)."""


@dataclass(frozen=True)
class CompleteGroup:
    """The surviving episodes of one prompt."""

    id: str
    ordinal: int
    step: int
    """Optimizer step of the oldest version among its tokens."""
    min_version: int
    outcomes: list[EpisodeResult]
    sampled: Mapping[int, int] = field(default_factory=dict)
    """Tokens by the optimizer step of the version that sampled them."""

    @property
    def rewards(self) -> list[float]:
        return [outcome.reward for outcome in self.outcomes]


def build(spec: JobSpec, groups: Sequence[CompleteGroup]) -> protocol.TrainingBatch:
    """The training batch of these groups of a step, weighed up to the step's :func:`scale`. A group whose rewards are
    all equal has no advantage: it counts in the normalisation, and is differentiated only where a KL penalty or the
    loss itself gives it a gradient."""
    algorithm = spec.algorithm
    always = algorithm.kl_weight > 0 or algorithm.loss.name in ANCHORED
    all_trajectories = [t for group in groups for outcome in group.outcomes for t in outcome.trajectories]
    longest = spec.sampling.max_tokens * spec.environment.max_turns
    weights = iter(token_weights(algorithm.name, [t.num_action_tokens for t in all_trajectories], longest))
    units = []
    for group in groups:
        scores = advantages(algorithm.name, group.rewards)
        members: dict[tuple[int, ...], list[protocol.GroupMember]] = {}
        for outcome, score in zip(group.outcomes, scores, strict=True):
            for trajectory in outcome.trajectories:
                weight = next(weights)
                if algorithm.loss.name == "cross_entropy":
                    weight *= max(score, 0.0)  # imitation of what was better than its group
                if trajectory.num_action_tokens and (score != 0.0 or always):
                    members.setdefault(tuple(trajectory.prompt), []).append(
                        protocol.GroupMember(
                            tokens=trajectory.tokens,
                            logprobs=trajectory.logprobs,
                            advantages=[score] * len(trajectory.tokens),
                            weights=[weight if own else 0.0 for own in trajectory.mask],
                        )
                    )
        units += [protocol.SharedPrefixGroup(prompt=list(prompt), members=tails) for prompt, tails in members.items()]
    return protocol.TrainingBatch(groups=units)


def scale(spec: JobSpec, groups: Sequence[CompleteGroup]) -> float:
    """What the summed gradient of a step on ``groups`` is multiplied with."""
    lengths = [t.num_action_tokens for group in groups for outcome in group.outcomes for t in outcome.trajectories]
    return step_scale(spec.algorithm.name, lengths)


def describe(groups: Sequence[CompleteGroup], step: int) -> dict[str, float]:
    """A step's figures that come from its groups: rewards and their parts, lengths, staleness, which versions sampled,
    and how long a mean episode was in which stage."""
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    rewards = [outcome.reward for outcome in outcomes]
    lengths = [outcome.num_action_tokens for outcome in outcomes]
    lags: Counter[int] = Counter()
    for group in groups:
        lags.update({step - sampler: count for sampler, count in group.sampled.items()})
    row = {
        "reward": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "episodes": float(len(outcomes)),
        "groups": float(len(groups)),
        "groups_no_variance_share": sum(len(set(group.rewards)) == 1 for group in groups) / len(groups),
        "length_mean": statistics.fmean(lengths),
        "length_max": float(max(lengths)),
        "turns_mean": statistics.fmean(len(outcome.replies) for outcome in outcomes),
        "staleness_mean": statistics.fmean(step - group.step for group in groups),
        "staleness_max": float(max(step - group.step for group in groups)),
        "versions_mean": statistics.fmean(len(outcome.versions) for outcome in outcomes),
        **{f"lag_share/{lag}": count / lags.total() for lag, count in sorted(lags.items())},
        **{f"seconds/{name}": statistics.fmean(o.seconds.get(name, 0.0) for o in outcomes) for name in STAGES},
    }
    names = sorted({name for outcome in outcomes for name in outcome.metrics})
    for name in names:
        values = [outcome.metrics.get(name, 0.0) for outcome in outcomes]
        row[f"reward/{name}"] = sum(values) / len(values)  # plainly: these may be infinite, where fmean raises
    return row
