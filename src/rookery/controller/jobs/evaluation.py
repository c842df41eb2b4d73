"""Evaluation of one version on held-out prompts, with the job's sampling parameters.

The job's first evaluation fixes the prompts and stores them, so every version answers the same ones. The sampling noise
depends on the prompt's number alone, so two versions differ only by their weights.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from rookery.aio import TaskGroup
from rookery.controller.jobs.episode import Episode, EpisodeFailed
from rookery.controller.jobs.job_context import HeldOut, JobContext, JobPolicy
from rookery.controller.jobs.trajectory import derive_seed
from rookery.controller.rollout.request import GenerationFailed
from rookery.errors import count_of, short
from rookery.protocol import BestConstant
from rookery.spec import values
from rookery.spec.job import AGENT
from rookery.storage.repositories.versions import (
    EVALUATIONS_AT_ONCE,
    add_counted_evaluation,
    first_evaluation,
    trim_evaluations,
)

ATTEMPT_LETTERS = 8
"""Letters of an attempt in the name of a held-out episode that a program opens."""


class EvalResult(msgspec.Struct):
    """The result of one prompt. ``error`` is empty for an episode that succeeded."""

    prompt: Any
    reward: float = 0.0
    answer: str = ""
    """The policy's replies, joined by newlines."""
    metrics: dict[str, float] = {}
    error: str = ""


def summarise(results: list[EvalResult]) -> tuple[float, float]:
    """``(mean reward, its standard error)`` of the episodes that succeeded; NaN where there is none. A single episode
    has no error."""
    rewards = [result.reward for result in results if not result.error]
    spread = statistics.stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else math.nan
    return (statistics.fmean(rewards) if rewards else math.nan), spread


async def evaluate(job: JobContext, policy: JobPolicy, version: int) -> None:
    """Evaluate ``version`` of one of the job's policies and store the result."""
    store, evaluation, progress = job.controller.store, job.spec.evaluation, job.progress
    assert policy.versions is not None
    start = {name: 0 for name, other in job.policies.items() if other.about.follows is not None}
    versions = {**job.newest(), **start, policy.name: version}
    with job.using(versions):  # until its score is known: it may be the best
        prompts, constants = await held_out_prompts(job)
        constant = constants.get(policy.name)
        slots = asyncio.Semaphore(job.controller.settings.limits.job_episodes)
        async with TaskGroup() as tasks:
            runs = [
                tasks.create_task(_run(job, policy, versions, number, prompt, slots))
                for number, prompt in enumerate(prompts)
            ]
        results = [run.result() for run in runs]
        mean, stderr = summarise(results)
        failed = [result.error for result in results if result.error]
        counted = progress.of_policy(policy.name, {"evaluation_failures": len(failed)})
        whose = job.whose(policy)
        answered = len(results) - len(failed)
        figures: dict[str, Any] = {
            "policy": policy.versions.row.id,
            "version": version,
            "prompts": answered,
            "mean": mean if answered else 0.0,  # the table holds no NaN
            "stderr": 0.0 if math.isnan(stderr) else stderr,
            "results": {
                "split": "eval",
                "seed": evaluation.seed,
                "held_out": msgspec.to_builtins(results),
                "constant": msgspec.to_builtins(constant),
                "constants": msgspec.to_builtins(constants),
            },
            "created": job.controller.clock.time(),
        }
        row = await progress.count(counted, lambda counters: store.write(add_counted_evaluation, counters, **figures))
        keep = job.controller.settings.server.trajectory_keep
        while await store.write(trim_evaluations, job.row.id, keep) == EVALUATIONS_AT_ONCE:
            pass  # writes of others come between
        policy.versions.evaluated(version, row.rank)
        if not answered:
            text = f"{whose}version {version}: all {count_of(len(results), 'held-out episode')} failed: {failed[0]}"
            await progress.add_event("evaluation", text)
            return
        spread = "" if math.isnan(stderr) else f" ± {stderr:.3f}"
        text = f"{whose}version {version}: mean reward {mean:.3f}{spread} on {count_of(answered, 'prompt')}"
        if constant is not None:
            text += f"; the best constant reply earns {constant.reward:.3f}"
        if failed:
            (reason, count), *others = Counter(failed).most_common()
            kinds = f", {count} of them: " if others else ": "
            text += (
                f"; {len(failed)} of {count_of(len(results), 'episode')} failed and do not count{kinds}{short(reason)}"
            )
        await progress.add_event("evaluation", text)


async def held_out_prompts(job: JobContext) -> HeldOut:
    """The held-out prompts, at every call the same: those of the job's first evaluation, or those that were asked for
    first while none is stored, since an endless split may give others each time; and by policy the fixed reply that
    earns most on them."""
    first = await job.controller.store.read(first_evaluation, job.row.tenant, job.row.id)
    if first is not None:
        job.progress.held_out = None
        constants = msgspec.convert(first.results.get("constants", {}), dict[str, BestConstant])
        return [values.encode(result["prompt"]) for result in first.results["held_out"]], constants
    if job.progress.held_out is None:
        job.progress.held_out = asyncio.create_task(_ask_held_out(job))
    return await job.progress.held_out


async def _ask_held_out(job: JobContext) -> HeldOut:
    """The prompts that the environment gives now, and by policy the fixed reply that earns most on them."""
    evaluation = job.spec.evaluation
    hosts, count = job.controller.rooms.hosts, evaluation.prompts
    answer = await hosts.split(job.environment, "eval", 0, count, seed=evaluation.seed, shuffle=False)
    if answer.note:
        await job.progress.add_event("warning", answer.note)
    names, seed = list(job.policies), evaluation.seed
    constants = await hosts.best_constants(job.environment, names, "eval", count, seed=seed, shuffle=False)
    return answer.prompts, constants


async def _run(
    job: JobContext,
    policy: JobPolicy,
    versions: Mapping[str, int],
    number: int,
    prompt: bytes,
    slots: asyncio.Semaphore,
) -> EvalResult:
    """The result for ``policy``; one without a reply of it counts as failed."""
    seed = derive_seed(job.spec.seed, "evaluation", job.spec.evaluation.seed, number)
    name = f"{job.row.id}-e{versions[policy.name]}-{number}"
    if job.spec.several_policies:
        name += f"-{policy.name}"
    opened = job.spec.environment.id == AGENT
    if opened:  # another program may have an earlier attempt, whose end is not that of this one
        name += f"-{job.controller.ids.new('attempt')[-ATTEMPT_LETTERS:]}"
    episode = Episode(job, name, job.refs(versions), prompt, seed, environment_seed=seed)
    shown = values.decode(prompt)
    try:
        async with slots:
            result = await episode.run()
        part = result.of(policy.name)
        if part is None:
            raise EpisodeFailed(f"the policy {policy.name} has no reply in the episode")
        episode.end()
    except (EpisodeFailed, GenerationFailed) as error:
        episode.end(str(error))
        return EvalResult(shown, error=str(error))
    finally:
        episode.close()
        episode.leave()
        if opened:  # nobody takes its calls up
            job.controller.rooms.rollouts.close_episode(job.row.id, name)
    return EvalResult(shown, part.reward, "\n".join(result.replies), result.metrics)
