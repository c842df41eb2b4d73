"""Warnings about a valid job spec: settings that are allowed and hardly meant. Pure.

A warning is one line: which field, what happens, what to do instead. A dry run shows the lines, and a submitted job has
them as events of kind ``warning``. Those about the prompts of a built-in environment are given the sizes of its splits.
"""

from __future__ import annotations

import math

from rookery.algorithms.schedules import rate
from rookery.environments.base import SplitSizes
from rookery.environments.messages import example_of, learned_of
from rookery.errors import UserError, count_of
from rookery.spec.job import FIRST_REPLIES, JobSpec
from rookery.tokenization.chat import Chat
from rookery.tokenization.demonstrations import check_written

NEGLIGIBLE_RATE = 1e-3
"""A share of ``lr`` at which a step counts as changing nothing: a whole job at it moves the weights as far as one step
in a thousand would."""

FORMS_SHOWN = 5
"""Sequences of roles that are refused one by one; more are likely of the same kind."""


def spec_warnings(spec: JobSpec) -> list[str]:
    """The warnings about ``spec``, none for most."""
    of_policies = [spec.of_policy(name) for name in spec.trained]
    lines = [
        line
        for mine in of_policies
        for line in (*schedule_warnings(mine), *length_warnings(mine), *evaluation_warnings(mine))
    ]
    return [*dict.fromkeys(lines), *reference_warnings(spec), *judge_warnings(spec), *frozen_warnings(spec)]


def reference_warnings(spec: JobSpec) -> list[str]:
    """Warnings of models to compare with that no policy is compared with."""
    if spec.algorithm.on_pairs:
        return []
    unused = [name for name in spec.trained if not spec.of_policy(name).algorithm.kl_weight]
    changes = {name: spec.policies[name].algorithm for name in unused}
    given = [f"policies.{name}." for name, own in changes.items() if own is not None and own.kl_reference is not None]
    if "kl_reference" in spec.algorithm.model_fields_set and len(unused) == len(spec.trained):
        given = ["", *given]
    return [
        f"{where}algorithm.kl_reference: no effect with kl_weight 0; give a kl_weight such as 0.01, or leave it out"
        for where in given
    ]


def evaluation_warnings(spec: JobSpec) -> list[str]:
    """Warnings of evaluations that never happen, or seldom."""
    every, versions = spec.evaluation.every, spec.checkpoints.commit_every
    if every and not spec.evaluation.prompts:
        return [f"evaluation.every: {every} without evaluation.prompts: nothing is evaluated; give evaluation.prompts"]
    if every % versions:
        return [
            f"evaluation.every: {every}: a version exists after every {count_of(versions, 'step')}"
            f" (checkpoints.commit_every), and only those after {count_of(math.lcm(every, versions), 'step')} and its"
            f" multiples are evaluated; give a multiple of {versions}"
        ]
    return []


def judge_warnings(spec: JobSpec) -> list[str]:
    """Warnings of verdicts that some episodes do not reach, or that reward the policy which gives them."""
    environment, lines = spec.environment, []
    judge = spec.policies[environment.judge] if environment.judge is not None else None
    if judge is not None and judge.train:
        lines.append(
            f"environment.verifier.policy: {environment.judge} trains, and its own verdict is its reward; give it"
            " train: false, such as {train: false, base: true}, or write an environment with rewards of its own"
        )
    if judge is not None and judge.follows is not None:
        lines.append(
            f"environment.verifier.policy: {environment.judge} follows {judge.follows.policy}, which its verdicts"
            " train: they change with what it learns; give it other weights, such as {train: false, base: true}"
        )
    if environment.id == "jsonl" and environment.turns < environment.longest:
        parts = {"the reply": 1, "calls of tools": environment.tool_calls, "the judge": environment.judge is not None}
        needed = " + ".join(f"{int(count)} for {part}" for part, count in parts.items() if count)
        lines.append(
            f"environment.max_turns: {environment.max_turns}: an episode may have {environment.longest} ({needed}), and"
            " one that is cut ends before its reply is judged, with reward 0"
        )
    return lines


def frozen_warnings(spec: JobSpec) -> list[str]:
    """Warnings of policies that do not train and never reply, or follow another one and are never swapped."""
    lines = [
        f"policies.{name}: it never replies: {spec.environment.id} names the first policy, and the judge of a verifier"
        " where there is one; leave it out, or write an environment that names it"
        for name in _silent(spec)
        if not spec.policies[name].train
    ]
    for name, policy in spec.policies.items():
        if (followed := policy.follows) is None:
            continue
        steps = spec.of_policy(followed.policy).stop.steps
        if steps is not None and followed.every >= steps:
            lines.append(
                f"policies.{name}.follows.every: {followed.every}, but {followed.policy} takes"
                f" {count_of(steps, 'step')}: it stays at version 0; give fewer than {steps}"
            )
    return lines


def judge_problems(spec: JobSpec) -> list[str]:
    """Why the verdicts of the job's verifier would never come."""
    if spec.environment.id == "jsonl" and spec.environment.judge is not None and spec.environment.max_turns < 2:
        return ["environment.max_turns: given 1, allowed: at least 2: one for the reply and one for the judge"]
    return []


def silent_problems(spec: JobSpec) -> list[str]:
    """Errors of policies that would wait without end for a first reply: the job's environment names others alone."""
    return [
        f"policies.{name}: it trains, but only the first policy, {next(iter(spec.policies))}, replies in"
        f" {spec.environment.id}; leave one of them out, or write an environment that names both"
        for name in _silent(spec)
        if spec.policies[name].train
    ]


def _silent(spec: JobSpec) -> list[str]:
    """The policies that never reply, as far as that shows: the job's environment names others alone."""
    return [name for name in spec.policies if name not in replying(spec)]


def replying(spec: JobSpec) -> list[str]:
    """The policies that may reply: of some built-in environments the first one, and the judge of a verifier."""
    named = (next(iter(spec.policies)), spec.environment.judge)
    return [name for name in spec.policies if name in named or spec.environment.id not in FIRST_REPLIES]


def split_problems(spec: JobSpec, sizes: SplitSizes | None) -> list[str]:
    """Why the job could not be evaluated on the splits of its environment."""
    if sizes is None or sizes.held_out or not spec.evaluation.prompts:
        return []
    given = f"evaluation.prompts: given {spec.evaluation.prompts}, but the environment holds no prompts out"
    return [f"{given}; give {sizes.held_out_by}, or leave evaluation out"]


def form_problems(chat: Chat, sizes: SplitSizes, model: str) -> list[str]:
    """The rows whose roles, or calls of tools, the chat template of ``model`` refuses, or of which it leaves something
    out, a line each. Blocks."""
    lines = []
    for form, where in sizes.forms:
        messages, tools = example_of(form)
        try:
            check_written(chat, messages, learned_of(form), tools)
        except UserError as error:
            lines.append(f"environment: {where}: {model}: {str(error)[:300]}; give messages that it takes")
    return lines[:FORMS_SHOWN]


def split_warnings(spec: JobSpec, sizes: SplitSizes | None) -> list[str]:
    """Warnings of held-out prompts that are training prompts, are fewer than asked for, or are not used."""
    if sizes is None:
        return []
    lines, asked = [], spec.evaluation.prompts
    if sizes.repeated:
        lines.append(
            f"environment: {sizes.repeated} of {count_of(sizes.held_out, 'held-out row')} have the prompt of a training"
            " row: their reward shows what was learned by heart; remove them from one of the two"
        )
    if asked > sizes.held_out > 0:
        lines.append(f"evaluation.prompts: {asked}, but only {sizes.held_out} are held out; all of them are taken")
    if sizes.asked and not asked:
        lines.append(
            f"environment: {count_of(sizes.held_out, 'row is', 'rows are')} held out and never used; give"
            f" evaluation.prompts, such as {sizes.held_out}"
        )
    return lines


def length_warnings(spec: JobSpec) -> list[str]:
    """A warning of ``dr_grpo`` where nobody said how long an episode may be."""
    environment = spec.environment
    if spec.algorithm.name != "dr_grpo" or "max_turns" in environment.model_fields_set or environment.hosted is None:
        return []
    return [
        f"environment.max_turns: absent: dr_grpo divides by {count_of(environment.max_turns, 'reply')} of"
        f" sampling.max_tokens {spec.sampling.max_tokens}; give max_turns the most replies that an episode takes, 1 for"
        " one reply"
    ]


def schedule_warnings(spec: JobSpec) -> list[str]:
    """Warnings of a learning rate that never reaches ``lr``, is (almost) zero before the job ends, or is still high at
    its end; and of fields of the schedule that have no effect."""
    name, policy = spec.policy
    optimizer, steps = policy.optimizer, spec.stop.steps
    schedule = optimizer.schedule
    where, warmup, floor = f"policies.{name}.optimizer.schedule", schedule.warmup_steps, schedule.min_ratio
    total = schedule.total_steps or steps
    decays = schedule.name in ("linear", "cosine", "uba")

    def share(step: int) -> float:
        """The rate of a step (from 0) as a share of ``lr``."""
        return rate(
            schedule.name, step, lr=1.0, warmup_steps=warmup, total_steps=total, min_ratio=floor, phi=schedule.phi
        )

    lines = []
    if steps is not None and steps <= warmup:
        lines.append(
            f"{where}.warmup_steps: {warmup} of stop.steps {steps}: the rate never reaches lr, it ends at"
            f" {_percent(share(steps - 1))} of it; give fewer warmup_steps"
        )
    elif decays and total is not None and total <= warmup:
        lines.append(
            f"{where}.total_steps: {total}, of which the warm-up takes {warmup}: the rate falls to"
            f" {_percent(floor)} of lr in the step after the warm-up; give total_steps above warmup_steps"
        )
    if decays and total is not None and (steps is None or steps > total):
        last = max(total, warmup + 1)  # the first step, from 0, with the schedule's lowest rate
        if floor < NEGLIGIBLE_RATE and (steps is None or last < steps):
            after = f"{last + 1} of stop.steps {steps}" if steps is not None else f"{last + 1}, and stop has no steps"
            lines.append(
                f"{where}.total_steps: {total}: the rate is {_percent(floor)} of lr from step {after}, so nothing is"
                " learned from there on; give total_steps as many steps as the job takes, or a min_ratio"
            )
    if decays and steps is not None and warmup < steps < (total or 0):
        lines.append(
            f"{where}.total_steps: {total}, above stop.steps {steps}: the job ends at"
            f" {_percent(share(steps - 1))} of lr; leave total_steps out to end at the lowest rate"
        )
    idle = {
        "warmup_steps": schedule.name == "warmup" and warmup == 0,
        "total_steps": not decays and schedule.total_steps is not None,
        "min_ratio": not decays and floor > 0,
        "phi": schedule.name != "uba" and schedule.phi != 1.0,
    }
    for field, is_idle in idle.items():
        if is_idle and field == "warmup_steps":
            lines.append(f"{where}.warmup_steps: 0: warmup without steps is constant; give warmup_steps")
        elif is_idle:
            lines.append(f"{where}.{field}: no effect with {schedule.name}; leave it out, or name another schedule")
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
