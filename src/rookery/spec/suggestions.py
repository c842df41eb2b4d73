"""Suggestions for names that a job does not have: those of other trainers, of other sections, and mistyped ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from rookery.errors import nearest
from rookery.spec.job import JobSpec
from rookery.spec.policy import TARGETS, PolicyAlgorithm, PolicySampling, PolicyStop

OTHERS = {
    "optimizer.lr": "learning_rate lr actor_lr",
    "optimizer.grad_clip": "max_grad_norm clip_grad gradient_clipping",
    "optimizer.beta1": "adam_beta1", "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_epsilon adam_eps",
    "optimizer.schedule": "lr_scheduler lr_scheduler_type scheduler",
    "optimizer.schedule.warmup_steps": "num_warmup_steps lr_warmup_steps warmup_ratio lr_warmup_steps_ratio",
    "rank": "r lora_r lora_rank", "alpha": "lora_alpha",
    "targets": "target_modules lora_target_modules modules",
    "warm_start": "adapter adapter_path peft_model resume_from init_from",
    "full": "full_finetune use_lora use_peft",
    "algorithm.group_size": "num_generations n rollout_n num_samples samples_per_prompt n_samples num_return_sequences",
    "algorithm.groups_per_step":
        "train_batch_size batch_size per_device_train_batch_size prompts_per_step gradient_accumulation_steps"
        " ppo_mini_batch_size generation_batch_size",
    "algorithm.kl_weight": "beta kl_coef kl_coeff kl_loss_coef init_kl_coef kl_beta use_kl_loss",
    "algorithm.loss.clip_low_threshold": "epsilon epsilon_low clip_ratio clip_ratio_low cliprange clip_eps",
    "algorithm.loss.clip_high_threshold": "epsilon_high clip_ratio_high",
    "algorithm.loss": "loss_type loss_fn policy_loss",
    "algorithm.name": "adv_estimator advantage_estimator scale_rewards",
    "algorithm.max_staleness": "max_off_policy_steps max_lag async_level num_iterations max_async_level",
    "sampling.max_tokens": "max_new_tokens max_completion_length max_response_length response_length max_length",
    "sampling.stop": "stop_strings stop_sequences stop_words",
    "stop.steps": "max_steps total_steps num_steps total_training_steps num_train_epochs epochs num_epochs",
    "stop.wall_time": "max_time timeout time_limit",
    "evaluation.every": "eval_steps eval_every test_freq eval_interval",
    "evaluation.prompts": "eval_size num_eval_prompts eval_samples val_batch_size",
    "checkpoints.keep_last": "save_total_limit max_ckpt_to_keep", "checkpoints.commit_every": "save_steps save_freq",
    "base_model": "model model_name model_name_or_path model_path model_id pretrained",
    "environment": "env reward_funcs reward_func reward_fn reward_function reward dataset train_dataset train_files",
    "environment.eval_path": "eval_dataset val_files test_files",
    "name": "run_name experiment_name job_name",
}  # fmt: skip
"""The names of fields in TRL, verl, PEFT, prime-rl and the Hugging Face trainer, by their path here; a path without a
section belongs to the policy."""

VALUES = {f"{target}_proj": target for target in TARGETS} | {
    "all": "all-linear", "all_linear": "all-linear", "attn": "attention", "ppo_clip": "ppo",
    "reinforce": "importance_sampling", "sft": "cross_entropy",
    "drgrpo": "dr_grpo", "dr-grpo": "dr_grpo", "constant_with_warmup": "warmup",
}  # fmt: skip
"""The names of a value in those frameworks."""

POLICY = "policies.main"
"""The policy of a job that names no other."""

OVERRIDES = (PolicyAlgorithm, PolicySampling, PolicyStop)
"""Parts whose fields are those of a section of the job, which is meant."""

_SECTIONS = {name.split(".")[0] for name in OTHERS} & JobSpec.model_fields.keys()


def _path(here: str) -> str:
    return here if here.split(".")[0] in _SECTIONS else f"{POLICY}.{here}"


KNOWN_AS = {name: _path(path) for path, names in OTHERS.items() for name in names.split()}
"""The path of a field, by another name."""


def field_hint(path: tuple[Any, ...], known: Sequence[str]) -> str:
    """ "did you mean …?" for the unknown field at ``path``, whose section has the ``known`` ones; empty without an
    idea."""
    name, section = str(path[-1]), ".".join(map(str, path[:-1]))
    near, others = nearest(name, known), fields_by_name().get(name, [])
    of_job = ".".join(map(str, path[-2:]))  # of the job's section, some of whose fields a policy may change
    candidates = [KNOWN_AS[name]] if name in KNOWN_AS else []
    candidates += [of_job] if of_job in others else [] if near else others
    if path[:1] == ("policies",) and len(path) > 1:
        candidates = [one.replace(POLICY, f"policies.{path[1]}", 1) for one in candidates]
    if not candidates:
        return near
    first = candidates[0]
    within, _, last = first.rpartition(".")
    if last in known and path[-2:-1] == (within,):
        return f"did you mean {last}?"
    return f"did you mean {first.removeprefix(f'{section}.') if section else first}?"


def value_hint(given: Any, allowed: Sequence[str]) -> str:
    """A hint at the nearest of the ``allowed`` texts for one that is none of them."""
    if not isinstance(given, str):
        return ""
    meant = VALUES.get(given)
    return f"did you mean {meant}?" if meant in allowed else nearest(given, allowed)


@cache
def fields_by_name() -> dict[str, list[str]]:
    """The paths of every field of a job, by its last part."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in _paths(JobSpec, ""):
        found[path.rsplit(".", 1)[-1]].append(path)
    return dict(found)


def _paths(model: type[BaseModel], before: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        path = f"{before}{name}"
        yield path
        inner = next((kind for kind in _models(field.annotation)), None)
        if inner is not None and inner not in OVERRIDES:
            yield from _paths(inner, f"{POLICY}." if path == "policies" else f"{path}.")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)
