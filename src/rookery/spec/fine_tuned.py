"""The names under which OpenAI's clients know the models of jobs: ``ft:BASE:TENANT:SUFFIX:ID[:ckpt-step-N]``."""

from __future__ import annotations

CHECKPOINT_OF = ":ckpt-step-"
"""Precedes the step in the name of a checkpoint."""

UNNAMED = "ft"
"""Name of a job whose model has no suffix."""


def fine_tuned_name(base_model: str, tenant: str, job: str, id: str, step: int | None = None) -> str:
    """The model of the job with this name and id, or its checkpoint after ``step``."""
    name = f"ft:{base_model}:{tenant}{_end(job, id)}"
    return name if step is None else f"{name}{CHECKPOINT_OF}{step}"


def is_name_of(model: str, base_model: str, job: str, id: str) -> bool:
    """Whether the job's model has this name, without a checkpoint. The tenant's part may be an earlier name of it."""
    start, end = f"ft:{base_model}:", _end(job, id)
    tenant = model[len(start) : -len(end)]
    return model == f"{start}{tenant}{end}" and tenant != "" and ":" not in tenant


def _end(job: str, id: str) -> str:
    return f":{job if job != UNNAMED else ''}:{id.removeprefix('job-')}"
