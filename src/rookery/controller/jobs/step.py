"""One optimizer step: its groups become training batches, and their gradients and metrics add up until the optimizer is
called. Pure.

The groups of a step are differentiated in micro-batches, as they become complete. The gradients add up in the trainer;
normalisation that depends on the whole step is applied by the optimizer step. So the step's gradient is the same sum
however its groups were divided. Nothing here is durable: the groups stay ready in the database until the step's commit
consumes them all at once, so a crash in between takes every micro-batch back.
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from rookery import protocol
from rookery.algorithms.advantages import advantages, has_variance, step_scale, token_weights
from rookery.algorithms.schedules import rate
from rookery.bounds import METRIC_LETTERS, METRICS
from rookery.controller.jobs.trajectory import EpisodeResult, Trajectory
from rookery.controller.training.policy_run import ForwardRequest
from rookery.spec.job import JobSpec

ANCHORED = ("dro",)
"""Losses with a gradient also where the advantage is 0: they are anchored to the sampling policy."""

LOGPROBS_RETURNED = 1 << 18
"""Tokens of a pass whose log-probabilities the trainer returns for readers: a frame of at most a megabyte."""

STAGES = ("queue", "generation", "environment")
"""The keys of :attr:`~rookery.controller.jobs.trajectory.EpisodeResult.seconds`."""


@dataclass(frozen=True)
class CompleteGroup:
    """The surviving episodes of one prompt."""

    id: str
    ordinal: int
    step: int
    """Optimizer step of the oldest version among its tokens."""
    min_version: int
    episodes: list[EpisodeResult]
    sampled: Mapping[int, int] = field(default_factory=dict)
    """Tokens by the optimizer step of the version that sampled them."""
    names: Sequence[str] = ()
    """The ids of the episodes."""

    @property
    def responses(self) -> int:
        """The number of its episodes."""
        return len(self.episodes)

    @property
    def rewards(self) -> list[float]:
        return [episode.reward for episode in self.episodes]

    @cached_property
    def lengths(self) -> list[int]:
        """Sampled tokens of each episode."""
        return [episode.num_action_tokens for episode in self.episodes]

    @property
    def has_variance(self) -> bool:
        """Whether the episodes' rewards differ."""
        return has_variance(self.rewards)


def longest_episode(spec: JobSpec, context: int) -> int:
    """The most tokens that the policy may sample in an episode of the job, with a context of ``context`` tokens."""
    name, _ = spec.policy
    return min(spec.environment.turns_of(name) * spec.sampling.max_tokens, context)


def make_batch(spec: JobSpec, groups: Sequence[CompleteGroup], context: int = sys.maxsize) -> protocol.TrainingBatch:
    """The training batch of some groups of a step, weighted up to the step's scale. All trajectories of an episode have
    the weight of the episode. A group whose rewards are all equal has no advantage: it counts in the normalisation, and
    is differentiated only where a KL penalty or the loss itself gives it a gradient. ``context`` is the model's."""
    return protocol.TrainingBatch(
        groups=[
            protocol.SharedPrefixGroup(prompt=list(prompt), members=[part.member() for part in parts])
            for group in groups
            for prompt, parts in _units(spec, group, context).items()
        ]
    )


class _Part(NamedTuple):
    """A trajectory that is differentiated."""

    episode: int
    """The number of its episode in the group."""
    ordinal: int
    """Its number in the episode."""
    trajectory: Trajectory
    score: float
    """The advantage of each of its tokens."""
    weight: float
    """The weight of each of its sampled tokens."""

    @property
    def weighted(self) -> int:
        """Tokens with a weight: those whose log-probabilities a trainer returns."""
        return self.trajectory.num_action_tokens if self.weight != 0.0 else 0

    def member(self) -> protocol.GroupMember:
        trajectory = self.trajectory
        return protocol.GroupMember(
            tokens=trajectory.tokens,
            logprobs=trajectory.logprobs,
            advantages=[self.score] * len(trajectory.tokens),
            weights=[self.weight if action else 0.0 for action in trajectory.mask],
        )


def _units(spec: JobSpec, group: CompleteGroup, context: int) -> dict[tuple[int, ...], list[_Part]]:
    """The trajectories of a group that are differentiated, by prompt."""
    algorithm = spec.algorithm
    always = algorithm.kl_weight > 0 or algorithm.loss.name in ANCHORED
    scores = advantages(algorithm.name, group.rewards)
    weights = token_weights(algorithm.name, group.lengths, longest_episode(spec, context))
    units: dict[tuple[int, ...], list[_Part]] = {}
    for number, (episode, score, weight) in enumerate(zip(group.episodes, scores, weights, strict=True)):
        if algorithm.loss.name == "cross_entropy":
            weight *= max(score, 0.0)  # imitate only episodes better than their group
        for index, trajectory in enumerate(episode.trajectories):
            if trajectory.num_action_tokens and (score != 0.0 or always):
                units.setdefault(tuple(trajectory.prompt), []).append(_Part(number, index, trajectory, score, weight))
    return units


def trainer_logprobs(
    spec: JobSpec, groups: Sequence[CompleteGroup], returned: bytes, context: int = sys.maxsize
) -> dict[str, bytes]:
    """The trainer's log-probabilities of the sampled tokens by episode, float32: those that it ``returned`` for the
    batch of :func:`make_batch`. Empty where it returned others or none."""
    found: dict[str, dict[int, bytes]] = {}
    wanted: dict[str, int] = {}
    at = 0
    for group in groups:
        if len(group.names) != len(group.episodes):
            return {}
        for parts in _units(spec, group, context).values():
            for part in parts:
                name, end = group.names[part.episode], at + protocol.LOGPROB_BYTES * part.weighted
                found.setdefault(name, {})[part.ordinal] = returned[at:end]
                wanted[name] = protocol.LOGPROB_BYTES * group.episodes[part.episode].num_action_tokens
                at = end
    if at != len(returned):
        return {}
    joined = {name: b"".join(parts[index] for index in sorted(parts)) for name, parts in found.items()}
    return {name: logprobs for name, logprobs in joined.items() if logprobs and len(logprobs) == wanted[name]}


def describe(groups: Sequence[CompleteGroup], step: int) -> dict[str, float]:
    """A step's metrics that come from its groups: rewards and their components, lengths, staleness, the share of tokens
    by version lag, and the mean seconds of an episode in each stage."""
    episodes = [episode for group in groups for episode in group.episodes]
    rewards = [episode.reward for episode in episodes]
    lengths = [length for group in groups for length in group.lengths]
    lags: Counter[int] = Counter()
    for group in groups:
        lags.update({step - sampler: count for sampler, count in group.sampled.items()})
    row = {
        "reward": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "episodes": float(len(episodes)),
        "groups": float(len(groups)),
        "zero_variance_share": sum(not group.has_variance for group in groups) / len(groups),
        "length_mean": statistics.fmean(lengths),
        "length_max": float(max(lengths)),
        "turns_mean": statistics.fmean(len(episode.replies) for episode in episodes),
        "staleness_mean": statistics.fmean(step - group.step for group in groups),
        "staleness_max": float(max(step - group.step for group in groups)),
        "versions_mean": statistics.fmean(len(episode.versions) for episode in episodes),
        **{f"lag_share/{lag}": count / lags.total() for lag, count in sorted(lags.items())},
        **{f"seconds/{name}": statistics.fmean(o.seconds.get(name, 0.0) for o in episodes) for name in STAGES},
    }
    for name, (mean, count) in metric_means([episode.metrics for episode in episodes]).items():
        row[f"reward/{name}"], row[f"reward_episodes/{name}"] = mean, float(count)
    return row


def metric_means(metrics: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, int]]:
    """By name, the mean over the episodes that have the metric, and their number; ``metrics`` are those of each
    episode. Of more than :data:`~rookery.bounds.METRICS` names, or :data:`~rookery.bounds.METRIC_LETTERS` characters of
    names, those of the most episodes are kept: an environment can give each episode other ones. A value that is not a
    finite number is no value: where an episode has only such a one, it does not have the metric. The mean is NaN where
    no episode has it."""
    kept = _most_common(metrics)
    letters = itertools.accumulate(map(len, kept))
    fit = [name for name, total in zip(kept, letters, strict=True) if total <= METRIC_LETTERS]
    values: dict[str, list[float]] = {name: [] for name in sorted(fit)}
    for each in metrics:
        for name, value in each.items():
            if name in values and math.isfinite(value):
                values[name].append(value)
    return {name: (_mean(found), len(found)) for name, found in values.items()}


def _most_common(metrics: Sequence[Mapping[str, float]]) -> list[str]:
    """The names of the most episodes, at most :data:`~rookery.bounds.METRICS`; of equals, the first by the alphabet.
    The names can be many (an environment may invent them) and everybody waits for the event loop, so that no key is
    computed for each."""
    having: Counter[str] = Counter()
    for each in metrics:
        having.update(each.keys())
    least = sorted(having.values(), reverse=True)[:METRICS][-1] if having else 0
    more = [name for name, count in having.items() if count > least]
    equal = heapq.nsmallest(METRICS - len(more), (name for name, count in having.items() if count == least))
    return sorted(more, key=lambda name: (-having[name], name)) + equal


def _mean(values: Sequence[float]) -> float:
    """NaN for none."""
    try:
        return statistics.fmean(values) if values else math.nan
    except OverflowError:  # the sum of finite numbers exceeds the largest float, their mean does not
        return math.fsum(value / len(values) for value in values)


def forward_backward(
    spec: JobSpec, groups: Sequence[CompleteGroup], context: int = sys.maxsize, *, logprobs: bool = True
) -> ForwardRequest:
    """The operation that adds the gradient of ``groups``, before :attr:`StepAccumulator.scale`; ``context`` as in
    :func:`make_batch`. ``logprobs``: ask for the trainer's log-probabilities, too, unless they are too many."""
    algorithm = spec.algorithm
    return ForwardRequest(
        batch=protocol.encode(make_batch(spec, groups, context)),
        loss=protocol.Loss(name=algorithm.loss.name, params=algorithm.loss.params),
        temperature=spec.sampling.temperature,
        kl_weight=algorithm.kl_weight,
        logprobs=logprobs and sum(sum(group.lengths) for group in groups) <= LOGPROBS_RETURNED,
    )


def adam(spec: JobSpec, step: int) -> protocol.Adam:
    """The optimizer's parameters for the step after ``step`` others."""
    optimizer = spec.policy[1].optimizer
    schedule = optimizer.schedule
    lr = rate(
        schedule.name,
        step,
        lr=optimizer.lr,
        warmup_steps=schedule.warmup_steps,
        total_steps=schedule.total_steps or spec.stop.steps,
        min_ratio=schedule.min_ratio,
        phi=schedule.phi,
    )
    return protocol.Adam(
        lr=lr, beta1=optimizer.beta1, beta2=optimizer.beta2, eps=optimizer.eps, weight_decay=optimizer.weight_decay,
        clip=optimizer.grad_clip,
    )  # fmt: skip


@dataclass
class StepAccumulator:
    """The step after ``number`` others."""

    spec: JobSpec
    number: int
    groups: list[CompleteGroup] = field(default_factory=list)
    """Groups taken for the step so far."""
    waiting_seconds: float = 0.0
    """Seconds for which the step waited for groups."""
    training_seconds: float = 0.0
    """Seconds for which the step waited for its trainer."""
    logprobs: dict[str, bytes] = field(default_factory=dict)
    """The trainer's log-probabilities of the whole step, as :func:`trainer_logprobs` returns them."""
    _sums: dict[str, float] = field(default_factory=dict)

    def describe(self) -> dict[str, float]:
        """The metrics of the step that come from what it trains on."""
        return describe(self.groups, self.number)

    @property
    def missing(self) -> int:
        """Groups that the step still lacks."""
        return self.spec.algorithm.groups_per_step - len(self.groups)

    @property
    def scale(self) -> float:
        """The factor of the summed gradient, once nothing is missing."""
        lengths = [length for group in self.groups for length in group.lengths]
        return step_scale(self.spec.algorithm.name, lengths)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the trainer's metrics of a micro-batch."""
        protocol.add_metrics(self._sums, metrics)

    def trainer_metrics(self) -> dict[str, float]:
        """The trainer's metrics of the whole step, with the loss scaled as the gradient is."""
        metrics = dict(self._sums)
        if "loss:sum" in metrics:
            metrics["loss:sum"] *= self.scale
        return metrics
