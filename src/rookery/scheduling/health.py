"""Whether a job is healthy: alarms about what is wrong, and advice where nothing is. Pure functions over stored series.

An alarm says what is wrong, why that is so, and what to do. Advice is about speed and settings; it is given only where
no alarm is, since tuning a broken run is wasted. In a job with several policies, each is judged by its own steps,
replies and evaluations.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeGuard

from rookery.errors import count_of
from rookery.spec.job import JobSpec

Row = Mapping[str, Any]

ADVICE_STEPS = 3
"""Steps in a row that must agree before advice or an alarm is given: a single one may be chance."""

LOGP_DIFF_LIMIT = 0.06
"""Nats per token at staleness 0 above which engine and trainer disagree: bf16 alone stays below."""

RATIO_RANGE = (0.5, 2.0)
"""Mean ratios outside of it: the policy has moved far from the one that sampled."""

ENTROPY_FLOOR = 0.02
"""Nats per token below which every reply is the same."""

WAITING_TIMES = 5.0
"""A step that waits this many times as long as it trains is bound by its rollouts."""

STALL_TIMES = 6.0
"""A step that is this many times older than the job's median step is late: steps of one job differ by less."""

STALL_SECONDS = 30.0
"""Nothing younger counts as stalled: a person does not notice."""

EPISODES_READ = 50
"""Newest episodes that are looked at: enough that the shares below are no chance."""

FEWEST_EPISODES = 16
"""With fewer, a share says nothing."""

TRUNCATED_SHARE = 0.2
"""Above it, the longest reply decides about the reward, not the policy."""

FAILED_SHARE = 0.1
"""Above it, the environment fails by more than bad luck; half of this is common with flaky tools."""

STALE_SHARE = 0.1
"""Of the groups that were begun. What is dropped was paid for."""

EMPTY_SHARE = 0.05
"""Of the episodes that earned more than the least. A reward for saying nothing is a fault of the verifier."""


@dataclass(frozen=True)
class RecentEpisode:
    """An episode that has ended, as far as alarms need it."""

    failed: bool
    reward: float | None
    replies: Sequence[str]
    finishes: Sequence[str]
    """Why each reply ended."""
    error: str = ""
    speakers: Sequence[str] = ()
    """The policy of each reply."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """The reward of each policy that replied."""


@dataclass(frozen=True, kw_only=True)
class JobHealth:
    """The figures of a job at the time ``now``; series are oldest first."""

    now: float
    state: str
    rows: Sequence[Row]
    episodes: Sequence[RecentEpisode] = ()
    counters: Mapping[str, int]
    """With several policies each has its own ``groups_dropped_stale/POLICY``."""
    evaluations: Sequence[Row] = ()
    """``mean`` (None where every episode failed), ``version`` and ``constant`` (the best constant reply's ``reward``
    and ``reply``) of each."""
    group_size: int = 1
    waits_for: str = ""
    policies: Sequence[str] = ()
    """The policies that train, where there are several in the job."""
    max_tokens: Mapping[str, int] = field(default_factory=dict)
    """By policy, the most tokens of a reply."""


@dataclass(frozen=True)
class Alarm:
    name: str
    problem: str
    """The fault, with its figures."""
    remedy: str
    """The advice."""
    policy: str = ""
    """Whose it is, where the job has several policies; empty where it is the whole job's."""


def alarms(job: JobHealth) -> list[Alarm]:
    """Everything that is wrong with the job and its policies."""
    found = [alarm for check in JOB_CHECKS for alarm in check(job)]
    for name in job.policies or ("",):
        part = of_policy(job, name) if name else job
        found += [replace(alarm, policy=name) for check in POLICY_CHECKS for alarm in check(part)]
    return found


def of_policy(job: JobHealth, policy: str) -> JobHealth:
    """The job as one of its several policies sees it: its steps, evaluations, replies and rewards."""
    stale = "groups_dropped_stale"
    return replace(
        job,
        rows=_rows_of(job.rows, policy),
        evaluations=[row for row in job.evaluations if row.get("policy") == policy],
        episodes=[_episode_of(episode, policy) for episode in job.episodes if policy in episode.speakers],
        counters={**job.counters, stale: job.counters.get(f"{stale}/{policy}", 0)},
        max_tokens={name: most for name, most in job.max_tokens.items() if name == policy},
    )


def _episode_of(episode: RecentEpisode, policy: str) -> RecentEpisode:
    mine = [index for index, speaker in enumerate(episode.speakers) if speaker == policy]
    return replace(
        episode,
        reward=episode.rewards.get(policy),
        replies=[episode.replies[index] for index in mine],
        finishes=[episode.finishes[index] for index in mine if index < len(episode.finishes)],
    )


def stalled(job: JobHealth) -> Iterator[Alarm]:
    times = [row["time"] for row in job.rows if known(row.get("time"))]
    gaps = [later - earlier for earlier, later in pairwise(times) if later > earlier]
    if job.state != "running" or len(gaps) < ADVICE_STEPS:
        return
    median, age = statistics.median(gaps), job.now - times[-1]
    if age > max(STALL_SECONDS, STALL_TIMES * median):
        waits = f"; it waits for: {job.waits_for}" if job.waits_for else ""
        yield Alarm(
            "stalled",
            f"the last step is {age:.0f} s old, the median step takes {median:.1f} s{waits}",
            "look at what it waits for: workers, the environment, or the trainer",
        )


def without_signal(row: Row) -> bool:
    """Whether all rewards were equal within each group of a step: nothing is learned from it."""
    return row.get("zero_variance_share") == 1.0


def no_signal(rows: Sequence[Row], max_tokens: int | None) -> Alarm | None:
    """The alarm about the newest of these steps of one policy, if none of them has a signal; ``max_tokens``: the most
    tokens that its replies may have."""
    last = rows[-ADVICE_STEPS:]
    if len(last) < ADVICE_STEPS or not all(map(without_signal, last)):
        return None
    first, newest = (row.get("policy_step", row["step"]) for row in (last[0], last[-1]))
    rewards = [row["reward"] for row in last if known(row.get("reward"))]
    low, high = (f"{bound(rewards):.4g}" if rewards else "unknown" for bound in (min, max))
    lengths = [row["length_max"] for row in last if known(row.get("length_max"))]
    longest = (
        f" (longest: {count_of(round(max(lengths)), 'token')}, sampling.max_tokens: {max_tokens})" if lengths else ""
    )
    return Alarm(
        "dead reward",
        f"steps {first} to {newest}: all rewards were equal within every group (mean reward"
        f" {low if low == high else f'{low} to {high}'})",
        "the rewards teach nothing. The usual reasons: (1) the verifier does not find the answer: the replies have"
        f" another form, or end before it{longest}; read some with rookery jobs episodes. (2) The prompts are too hard"
        " or too easy for the model: give other prompts, or partial credit. (3) The replies of a group hardly differ:"
        " raise sampling.temperature or algorithm.group_size",
    )


class NoSignal:
    """Sees every committed step of a job; one line for its log for each run of steps without a signal."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._runs: dict[str, list[Row]] = {}
        """By policy, the steps of the present run, at most one more than cause a line."""

    def add(self, policy: str, row: Row) -> str:
        """The line that the metrics of a further step of ``policy`` cause, or an empty text."""
        run = self._runs.setdefault(policy, [])
        if not without_signal(row):
            run.clear()
        elif len(run) <= ADVICE_STEPS:
            run.append(row)
        return self._line(policy) if len(run) == ADVICE_STEPS else ""

    def present(self) -> Iterator[str]:
        """The lines of the present runs that caused one."""
        return (self._line(policy) for policy, run in self._runs.items() if len(run) >= ADVICE_STEPS)

    def _line(self, policy: str) -> str:
        alarm = no_signal(self._runs[policy][:ADVICE_STEPS], self._spec.of_policy(policy).sampling.max_tokens)
        assert alarm is not None
        name = f"{policy}: " if self._spec.several_trained else ""
        return f"{name}{alarm.problem}, so {alarm.remedy}"


def dead_reward(job: JobHealth) -> Iterator[Alarm]:
    if (found := no_signal(job.rows, next(iter(job.max_tokens.values()), None))) is not None:
        yield found


def truncated(job: JobHealth) -> Iterator[Alarm]:
    ends = [end for episode in job.episodes for end in episode.finishes]
    share = _share(ends, lambda end: end == "length")
    if share > TRUNCATED_SHARE:
        yield Alarm(
            "truncated replies",
            f"{share:.0%} of the newest {count_of(len(ends), 'reply')} were cut at sampling.max_tokens",
            "raise sampling.max_tokens, or ask for shorter replies",
        )


def stale_groups(job: JobHealth) -> Iterator[Alarm]:
    dropped = job.counters.get("groups_dropped_stale", 0)
    begun = dropped + job.counters.get("episodes", 0) / max(1, job.group_size)
    if dropped and begun >= FEWEST_EPISODES and dropped / begun > STALE_SHARE:
        yield Alarm(
            "stale groups",
            f"{count_of(dropped, 'group was', 'groups were')} dropped as too old, {dropped / begun:.0%} of those begun",
            "raise algorithm.max_staleness, or lower the number of groups in flight",
        )


def empty_successes(job: JobHealth) -> Iterator[Alarm]:
    rewards = [episode.reward for episode in job.episodes if known(episode.reward)]
    if not rewards or min(rewards) == max(rewards):
        return
    good = [one for one in job.episodes if known(one.reward) and one.reward > min(rewards)]
    share = _share(good, lambda one: bool(one.replies) and not one.replies[-1].strip())
    if share > EMPTY_SHARE:
        yield Alarm(
            "rewarded silence",
            f"{share:.0%} of the newest episodes with a good reward end with an empty reply",
            "make the verifier refuse empty replies",
        )


def failing_environment(job: JobHealth) -> Iterator[Alarm]:
    share = _share(job.episodes, lambda one: one.failed)
    if share > FAILED_SHARE:
        errors = [one.error for one in job.episodes if one.failed]
        common = statistics.mode(errors)
        yield Alarm(
            "failing episodes",
            f"{share:.0%} of the newest {count_of(len(job.episodes), 'episode')} failed, most often with: {common}",
            "read the failed episodes and repair the environment",
        )


def logprob_gap(job: JobHealth) -> Iterator[Alarm]:
    last = [row for row in job.rows[-ADVICE_STEPS:] if row.get("staleness_max") == 0]
    gaps = [row["logp_diff_mean"] for row in last if known(row.get("logp_diff_mean"))]
    if len(gaps) == ADVICE_STEPS and min(gaps) > LOGP_DIFF_LIMIT:
        yield Alarm(
            "log-probability gap",
            f"engine and trainer differ by {gaps[-1]:.3f} nats per token at staleness 0; {LOGP_DIFF_LIMIT} is the most"
            " that bf16 explains",
            "compare an episode's token strip; a worker's kernels may be wrong: report it",
        )


def failed_evaluation(job: JobHealth) -> Iterator[Alarm]:
    later = [row for row in job.evaluations if row["version"] > 0]
    if later and later[-1]["mean"] is None:
        yield Alarm(
            "failed evaluation",
            f"every held-out episode of version {later[-1]['version']} failed, so it has no held-out reward",
            "read their errors in the evaluation and repair the environment; a job that is resumed evaluates again",
        )


def constant_answer(job: JobHealth) -> Iterator[Alarm]:
    later = [row for row in job.evaluations if row["version"] > 0 and row["mean"] is not None]
    constant = later[-1].get("constant") if later else None
    if constant and later[-1]["mean"] <= constant["reward"]:
        yield Alarm(
            "a constant answer earns as much",
            f"version {later[-1]['version']} earns {later[-1]['mean']:.3f} on held-out prompts, the fixed reply"
            f" {constant['reply']!r} earns {constant['reward']:.3f}",
            "the policy has learned nothing about the prompts yet: train longer, or make the reward depend on them",
        )


JOB_CHECKS: tuple[Callable[[JobHealth], Iterator[Alarm]], ...] = (stalled, failing_environment)
"""Checks of the job as a whole."""

POLICY_CHECKS: tuple[Callable[[JobHealth], Iterator[Alarm]], ...] = (
    dead_reward, truncated, stale_groups, empty_successes, logprob_gap, failed_evaluation, constant_answer,
)  # fmt: skip
"""Checks of each policy."""


def _share(values: Sequence[Any], test: Callable[[Any], bool]) -> float:
    """The share of values that pass; 0 where they are too few to tell."""
    return sum(map(test, values)) / len(values) if len(values) >= FEWEST_EPISODES else 0.0


def known(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def several(spec: Mapping[str, Any]) -> list[str]:
    """The policies of a stored job that train, where it has more than one policy; of a job with one, none."""
    policies = spec.get("policies") or {}
    return [name for name, about in policies.items() if about.get("train", True)] if len(policies) > 1 else []


def policy_of(row: Row, spec: Mapping[str, Any]) -> str:
    """The policy that took a step of a stored job, where the job has several. A row names it where several train."""
    return row.get("policy") or next(iter(several(spec)), "")


def max_tokens_of(spec: Mapping[str, Any], policy: str = "") -> int | None:
    """The most tokens of a reply of a policy of a stored job, by default of its first."""
    policies = spec.get("policies") or {}
    own = policies.get(policy or next(iter(policies), ""), {}).get("sampling") or {}
    most = own.get("max_tokens") or spec.get("sampling", {}).get("max_tokens")
    return None if most is None else int(most)


def _rows_of(rows: Sequence[Row], policy: str) -> list[Row]:
    """The steps of one of several policies; one whose row names none is of the only one that trains."""
    return [row for row in rows if row.get("policy", policy) == policy]


def advice_lines(rows: Sequence[Row], spec: Mapping[str, Any]) -> list[str]:
    """The advice about each policy of a job, under its name where there are several."""
    names = several(spec)
    if not names:
        return list(advice(rows, spec).values())
    by_policy = {name: _rows_of(rows, name) for name in names}
    return [f"{name}: {line}" for name, mine in by_policy.items() for line in advice(mine, spec, name).values()]


def advice(rows: Sequence[Row], spec: Mapping[str, Any], policy: str = "") -> dict[str, str]:
    """The findings in the newest steps of a job with one policy, or of one of several, by metric: the table of
    ``docs/quickstart.md``."""
    last, found = rows[-1:], rows[-ADVICE_STEPS:]
    given: dict[str, str] = {}
    if last and last[0].get("skipped"):
        given["skipped"] = "skipped 1: loss or gradient was not finite, the step was not applied; lower optimizer.lr"
    if len(found) < ADVICE_STEPS:
        return given

    def all_of(metric: str, test: Callable[[float], bool]) -> bool:
        return all(known(row.get(metric)) and test(row[metric]) for row in found)

    most = max_tokens_of(spec, policy)
    if most is not None and all(row.get("turns_mean") == 1 and row.get("length_max", 0) >= most for row in found):
        given["length_max"] = (
            f"length_max {most}: replies are cut at sampling.max_tokens; raise it or ask for shorter replies"
        )
    if all_of("entropy", lambda value: 0 <= value < ENTROPY_FLOOR):
        given["entropy"] = (
            f"entropy below {ENTROPY_FLOOR}: every reply is the same; lower optimizer.lr, or add kl_weight"
        )
    if all_of("staleness_max", lambda value: value == 0) and all_of("logp_diff_mean", lambda v: v > LOGP_DIFF_LIMIT):
        given["logp_diff_mean"] = (
            f"logp_diff_mean above {LOGP_DIFF_LIMIT} at staleness 0: engine and trainer disagree; report it"
        )
    low, high = RATIO_RANGE
    if all_of("ratio", lambda value: not low <= value <= high):
        given["ratio"] = "ratio far from 1: lower algorithm.max_staleness or optimizer.lr"
    if all(row.get("seconds/waiting", 0.0) > WAITING_TIMES * (row.get("seconds/train") or math.inf) for row in found):
        given["seconds/waiting"] = (
            f"seconds/waiting over {WAITING_TIMES:g} times seconds/train: rollouts are the bottleneck; raise"
            " algorithm.max_staleness, or add workers"
        )
    return given
