"""Held-out prompts, answered by one version with the job's own sampling.

The prompts are fixed by the job's first evaluation and stored with it, so every version answers the same ones; the
sampling noise depends on the prompt's number alone, so two versions differ by what they learned.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import msgspec

from rookery import protocol
from rookery.aio import TaskGroup
from rookery.controller.jobs.episode import EpisodeFailed
from rookery.controller.jobs.episode_factory import Episodes
from rookery.controller.rollout.scheduler import GenerationFailed


class EvalResult(msgspec.Struct):
    """One prompt's result. ``error`` is empty for an episode that ended well."""

    prompt: Any
    reward: float = 0.0
    answer: str = ""
    """The policy's replies, joined by newlines."""
    metrics: dict[str, float] = {}
    error: str = ""


def summarise(results: list[EvalResult]) -> tuple[float, float]:
    """``(mean reward, its standard error)`` of the episodes that ended well; NaN mean where there is none."""
    rewards = [result.reward for result in results if not result.error]
    if not rewards:
        return math.nan, math.nan
    spread = statistics.stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else 0.0
    return statistics.fmean(rewards), spread


async def evaluate(job: Episodes, version: int) -> None:
    """Evaluate ``version`` of the job whose episodes these are, and store the result."""
    world, spec = job.world, job.spec
    with job.policy.pinned(version) as ref:  # until its score is known: it may be the best
        prompts = await held_out_prompts(job)
        async with TaskGroup() as episodes:
            runs = [
                episodes.create_task(_one(job, version, ref, number, prompt)) for number, prompt in enumerate(prompts)
            ]
        results = [run.result() for run in runs]
        mean, spread = summarise(results)
        failed = [result.error for result in results if result.error]
        job.progress.counters["evaluation_failures"] += len(failed)
        if math.isnan(mean):
            await job.progress.say(
                "evaluation", f"version {version}: all {len(results)} held-out episodes failed: {failed[0]}"
            )
            return
        answered = len(results) - len(failed)
        await world.store.add_evaluation(
            policy=job.policy.row.id,
            version=version,
            prompts=answered,
            mean=mean,
            stderr=spread,
            results={"split": "eval", "seed": spec.evaluation.seed, "held_out": msgspec.to_builtins(results)},
            created=world.clock.time(),
        )
        job.policy.evaluated(version, mean)
        await job.progress.say(
            "evaluation", f"version {version}: mean reward {mean:.3f} ± {spread:.3f} on {answered} prompts"
        )


async def held_out_prompts(job: Episodes) -> list[bytes]:
    """The same at every call: those of the first evaluation where there was one."""
    world, evaluation = job.world, job.spec.evaluation
    earlier = await world.store.evaluations(job.row.tenant, job.row.id)
    if earlier:
        return [msgspec.json.encode(result["prompt"]) for result in earlier[0].results["held_out"]]
    return await job.prompts("eval", 0, evaluation.prompts, seed=evaluation.seed, shuffle=False)


async def _one(job: Episodes, version: int, ref: protocol.AdapterRef, number: int, prompt: bytes) -> EvalResult:
    episode = job.episode(
        id=f"{job.row.id}-e{version}-{number}",
        ref=ref,
        prompt=prompt,
        seed=job.seed("evaluation", job.spec.evaluation.seed, number),
        environment_seed=job.seed("evaluation", job.spec.evaluation.seed, number),
    )
    shown = msgspec.json.decode(prompt)
    try:
        outcome = await episode.run()
    except (EpisodeFailed, GenerationFailed) as error:
        return EvalResult(shown, error=str(error))
    finally:
        episode.close()
    return EvalResult(shown, outcome.reward, "\n".join(outcome.replies), outcome.metrics)
