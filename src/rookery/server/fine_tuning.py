"""Objects of OpenAI's fine-tuning API, and what each means here: a file is a stored dataset, a fine-tuning job a job.

The API is that of openai-python 3.57, frozen: an argument that it has and this service does not is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rookery.bounds import SUFFIX, GivenModel, Line, SmallJson, mistake
from rookery.controller.views import NUMBER, JobView, VersionView
from rookery.environments.verifiers.graders import (
    GRADER_TYPES,
    AnyGrader,
    Graded,
    Multi,
    check_templates,
    named_models,
    single,
)
from rookery.environments.verifiers.running_graders import GraderTools, ModelGrader
from rookery.errors import NotFound
from rookery.server.openai import UnsupportedField
from rookery.server.responses import first_problem, named_steps
from rookery.spec.fine_tuned import UNNAMED, fine_tuned_name
from rookery.spec.policy import OptimizerSpec
from rookery.storage.models import EventRow, JobRow, StepRow, UploadRow

FILE, JOB, CHECKPOINT, EVENT = "file-", "ftjob-", "ftckpt_", "ftevent-"
"""Prefixes of ids."""

PURPOSE = "fine-tune"

STATUS = {
    "queued": "queued", "running": "running", "paused": "paused", "completed": "succeeded", "failed": "failed",
    "cancelled": "cancelled",
}  # fmt: skip

METHODS = {"sft": "supervised", "dpo": "dpo"}
"""By algorithm; others are reinforcement."""

EPOCHS = {"supervised": 3, "dpo": 1, "reinforcement": 1}
BATCH = {"supervised": 16, "dpo": 8, "reinforcement": 8}
"""The values that stand for ``auto``."""

HELD_OUT = 1000
"""Most rows of a validation file that are used, as in OpenAI's API."""

REPLY_TOKENS = 256
"""Longest reply of a reinforcement job: the API has no such argument."""

GROUP = 8
"""Replies to one prompt, times ``compute_multiplier``."""


class MissingObject(NotFound):
    """This tenant has nothing by the name that the argument ``param`` gives; in a list, nothing with the id of its
    ``after``."""

    code = "not_found"

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def not_listed(after: str) -> MissingObject:
    """The refusal of an ``after`` that is no id of its list."""
    return MissingObject(f"after: nothing in this list has the id {after[:80]!r}", "after")


def _chosen(value: Any) -> Any:
    """None for ``auto``."""
    return None if value == "auto" else value


AUTO = BeforeValidator(_chosen)


class _Arguments(GivenModel):
    model_config = ConfigDict(extra="forbid")


class Hyperparameters(_Arguments):
    batch_size: Annotated[int | None, Field(ge=1, le=4096), AUTO] = None
    learning_rate_multiplier: Annotated[float | None, Field(gt=0, le=1000), AUTO] = None
    n_epochs: Annotated[int | None, Field(ge=1, le=10_000), AUTO] = None


class DpoHyperparameters(Hyperparameters):
    beta: Annotated[float | None, Field(gt=0, le=100), AUTO] = None


class ReinforcementHyperparameters(Hyperparameters):
    compute_multiplier: Annotated[float | None, Field(gt=0, le=64), AUTO] = None
    eval_interval: Annotated[int | None, Field(ge=1, le=1_000_000), AUTO] = None
    eval_samples: Annotated[Literal[1] | None, AUTO] = None
    reasoning_effort: Literal["default"] | None = None


class Supervised(_Arguments):
    hyperparameters: Hyperparameters = Hyperparameters()


class Dpo(_Arguments):
    hyperparameters: DpoHyperparameters = DpoHyperparameters()


class Reinforcement(_Arguments):
    grader: SmallJson
    hyperparameters: ReinforcementHyperparameters = ReinforcementHyperparameters()


class Method(_Arguments):
    type: Literal["supervised", "dpo", "reinforcement"]
    supervised: Supervised | None = None
    dpo: Dpo | None = None
    reinforcement: Reinforcement | None = None


class JobCreate(_Arguments):
    """Arguments of a fine-tuning job."""

    model: Line
    training_file: Line
    validation_file: Line | None = None
    method: Method | None = None
    hyperparameters: Hyperparameters | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    suffix: Annotated[str, Field(pattern=SUFFIX, max_length=64)] | None = None
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None, max_length=16
    )
    integrations: SmallJson = None


class GraderValidate(_Arguments):
    grader: SmallJson


class GraderRun(_Arguments):
    grader: SmallJson
    model_sample: Annotated[str, Field(max_length=1 << 20)]
    item: SmallJson = None


class _GraderHolder(BaseModel):
    grader: AnyGrader


def read_grader(given: Any, where: str) -> Any:
    """The grader in ``given``. Raises :class:`UnsupportedField` that names ``where``."""
    for part, at in _parts(given, where):
        allowed = GRADER_TYPES if at == where else GRADER_TYPES[:-1]  # no multi in another
        known = ", ".join(allowed)
        if not isinstance(part, Mapping):
            raise UnsupportedField(f"{at}: give a grader, an object whose type is one of {known}", at)
        kind = part.get("type")
        if kind not in allowed:
            other = "missing" if kind is None else "not a text"
            line = f"{kind[:40]} graders do not run here" if isinstance(kind, str) else other
            raise UnsupportedField(f"{at}.type: {line}; give {known}", f"{at}.type")
    try:
        grader = _GraderHolder(grader=given).grader
        check_templates(grader)
        return grader
    except ValidationError as error:
        held = {"grader": given}
        first = first_problem(error.errors(include_url=False), held)
        path = ".".join([where, *named_steps(first["loc"], held, first["type"])[1:]])
        raise UnsupportedField(f"{path}: {mistake(first)}", path) from None
    except ValueError as error:
        raise UnsupportedField(f"{where}: {error}", where) from None


def _parts(given: Any, where: str) -> Iterator[tuple[Any, str]]:
    """A grader and those of which it consists, each with the name of the argument."""
    yield given, where
    parts = given.get("graders")
    for name, part in parts.items() if isinstance(parts, Mapping) else ():
        yield part, f"{where}.graders.{name}"


# --- files ------------------------------------------------------------------------------------------------------------


def file_object(row: UploadRow) -> dict[str, Any]:
    """A dataset as the API shows a file; one that was uploaded without a name has one of its hash."""
    return {
        "id": FILE + row.hash, "object": "file", "bytes": row.size, "created_at": int(row.created),
        "filename": row.name or f"{row.hash[:12]}.jsonl", "purpose": PURPOSE, "status": "processed",
    }  # fmt: skip


def dataset_of(file: str, param: str) -> str:
    """The hash of the dataset that a file is. Raises :class:`UnsupportedField`."""
    digest = file.removeprefix(FILE)
    if file == digest or re.fullmatch("[0-9a-f]{64}", digest) is None:
        raise UnsupportedField(f"{param}: no file {file[:80]!r}; give the id that POST /v1/files answered", param)
    return digest


# --- jobs -------------------------------------------------------------------------------------------------------------


def job_id(name: str) -> str:
    """The job that a fine-tuning job's id means. Raises :class:`NotFound`."""
    if not name.startswith(JOB):
        raise NotFound(f"no fine-tuning job {name[:80]!r}; give an id that begins with {JOB}")
    return "job-" + name.removeprefix(JOB)


def fine_tuning_id(job: str) -> str:
    return JOB + job.removeprefix("job-")


@dataclass(frozen=True)
class Start:
    """A version of a policy from which a job starts: ``about`` are the settings of the policy in its job."""

    job: str
    policy: str
    version: int
    base_model: str
    about: Mapping[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a policy that starts from it. Raises :class:`UnsupportedField`."""
        if self.about.get("full"):
            raise UnsupportedField("model: all of its parameters were trained; give a LoRA's or a base model", "model")
        same = {name: self.about[name] for name in ("rank", "alpha", "targets")}
        return {**same, "warm_start": {"job": self.job, "policy": self.policy, "version": self.version}}


def job_of(given: JobCreate, start: Start | None = None) -> dict[str, Any]:
    """The job that a request asks for, where ``start`` is the fine-tuned model that its ``model`` names. Raises
    :class:`UnsupportedField`."""
    if given.integrations:
        raise UnsupportedField(
            "integrations: the metrics of a job go to the service's sinks; leave it out", "integrations"
        )
    method = given.method or Method(type="supervised", supervised=Supervised(hyperparameters=_plain(given)))
    if given.method is not None and given.hyperparameters is not None:
        raise UnsupportedField("hyperparameters: they stand in method; leave it out", "hyperparameters")
    for name in ("supervised", "dpo", "reinforcement"):
        if name != method.type and getattr(method, name) is not None:
            raise UnsupportedField(f"method.{name}: given with type {method.type}; leave it out", f"method.{name}")
    kind = method.type
    chosen = getattr(method, kind)
    if chosen is None and kind == "reinforcement":
        raise UnsupportedField("method.reinforcement: missing; it has the grader", "method.reinforcement")
    numbers: Any = chosen.hyperparameters if chosen is not None else DpoHyperparameters()
    environment: dict[str, Any] = {"dataset": dataset_of(given.training_file, "training_file")}
    evaluation: dict[str, Any] = {}
    if given.validation_file is not None:
        environment["eval_dataset"] = dataset_of(given.validation_file, "validation_file")
        evaluation = {"prompts": HELD_OUT}
    batch = _or(numbers.batch_size, BATCH[kind])
    job: dict[str, Any] = {
        "name": given.suffix or UNNAMED, "base_model": given.model if start is None else start.base_model,
        "environment": environment, "evaluation": evaluation,
        "stop": {"epochs": _or(numbers.n_epochs, EPOCHS[kind])}, "seed": given.seed or 0,
        "metadata": given.metadata or {},
        "policies": {
            "main": {
                "optimizer": {"lr": OptimizerSpec().lr * float(_or(numbers.learning_rate_multiplier, 1.0))},
                **(start.settings if start is not None else {}),
            }
        },
    }  # fmt: skip
    if kind == "supervised":
        environment["id"], job["algorithm"] = "demonstrations", {"name": "sft", "batch_size": batch}
    elif kind == "dpo":
        environment["id"] = "preferences"
        job["algorithm"] = {"name": "dpo", "batch_size": batch, "beta": _or(numbers.beta, 0.1)}
    else:
        grader = read_grader(chosen.grader, "method.reinforcement.grader")
        environment |= {"id": "jsonl", "verifier": {"name": "grader", "grader": grader.model_dump(mode="json")}}
        group = max(2, round(GROUP * float(_or(numbers.compute_multiplier, 1.0))))
        job["algorithm"] = {"name": "grpo", "group_size": group, "groups_per_step": batch}
        job["sampling"] = {"max_tokens": REPLY_TOKENS}
        if evaluation:
            evaluation["every"] = _or(numbers.eval_interval, 0)
        elif numbers.eval_interval is not None:
            where = "method.reinforcement.hyperparameters.eval_interval"
            raise UnsupportedField(f"{where}: needs a validation_file; give one, or leave this out", where)
    return job


def _plain(given: JobCreate) -> Hyperparameters:
    return given.hyperparameters or Hyperparameters()


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def is_fine_tuning(spec: Mapping[str, Any]) -> bool:
    """Whether the API has a form for a stored job."""
    environment = spec["environment"]
    verifier = environment.get("verifier")
    graded = isinstance(verifier, Mapping) and verifier.get("name") == "grader"
    return environment.get("dataset") is not None and (spec["algorithm"]["name"] in METHODS or graded)


def model_name(job: JobView | JobRow, tenant: str, step: int | None = None) -> str:
    """The name under which the model of a job of this ``tenant``, or its checkpoint after ``step``, answers at
    ``/v1``."""
    return fine_tuned_name(job.spec["base_model"], tenant, job.name, job.id, step)


def fine_tuning_job(view: JobView, trained_tokens: int | None) -> dict[str, Any]:
    spec = view.spec
    environment, algorithm = spec["environment"], spec["algorithm"]
    kind = METHODS.get(algorithm["name"], "reinforcement")
    lr = next(iter(spec["policies"].values()))["optimizer"]["lr"]
    numbers: dict[str, Any] = {
        "n_epochs": int(spec["stop"].get("epochs") or 1),
        "batch_size": algorithm.get("batch_size") or algorithm["groups_per_step"],
        "learning_rate_multiplier": lr / OptimizerSpec().lr,
    }
    method: dict[str, Any] = {"hyperparameters": dict(numbers)}
    if kind == "dpo":
        method["hyperparameters"]["beta"] = algorithm["beta"]
    if kind == "reinforcement":
        method["grader"] = environment["verifier"]["grader"]
        method["hyperparameters"]["compute_multiplier"] = algorithm["group_size"] / GROUP
    held_out = environment.get("eval_dataset")
    error = {"code": "job_failed", "message": view.reason, "param": None} if view.state == "failed" else None
    return {
        "id": fine_tuning_id(view.id), "object": "fine_tuning.job", "created_at": int(view.created),
        "model": view.base_model, "organization_id": view.tenant, "status": STATUS.get(view.state, view.state),
        "seed": spec["seed"], "training_file": FILE + str(environment["dataset"]),
        "validation_file": FILE + str(held_out) if held_out else None,
        "hyperparameters": {} if kind == "reinforcement" else numbers, "method": {"type": kind, kind: method},
        "result_files": [], "error": error, "finished_at": int(view.finished) or None, "estimated_finish": None,
        "fine_tuned_model": model_name(view, view.tenant) if view.state == "completed" else None,
        "trained_tokens": trained_tokens, "integrations": [], "metadata": spec.get("metadata") or {},
    }  # fmt: skip


def step_event(view: JobView, step: StepRow) -> dict[str, Any]:
    """The event of a committed step."""
    row = step.metrics
    shown = {"reward": "train mean reward", "loss": "training loss"}
    texts = [f"{text}={row[name]:.3f}" for name, text in shown.items() if row.get(name) is not None]
    data = {"step": row["step"], "total_steps": view.steps, "train_loss": row.get("loss")}
    if row.get("reward") is not None:
        data["train_mean_reward"] = row["reward"]
    total = f"/{view.steps}" if view.steps else ""
    return {
        "id": f"{EVENT}{view.id.removeprefix('job-')}-s{row['step']}", "object": "fine_tuning.job.event",
        "created_at": int(step.time), "level": "info", "message": f"Step {row['step']}{total}, {', '.join(texts)}",
        "type": "metrics", "data": data,
    }  # fmt: skip


def line_event(view: JobView, line: EventRow) -> dict[str, Any]:
    """The event of a line in the job's log."""
    level = "warn" if line.kind in ("warning", "no_signal") else "error" if line.text.startswith("failed") else "info"
    return {
        "id": f"{EVENT}{view.id.removeprefix('job-')}-e{line.id}", "object": "fine_tuning.job.event",
        "created_at": int(line.time), "level": level, "message": line.text, "type": "message",
        "data": {"kind": line.kind},
    }  # fmt: skip


def event_number(view: JobView, id: str) -> tuple[str, int]:
    """The kind that an event's id names, ``s`` for a step and ``e`` for a line, and its number. Raises
    :class:`MissingObject`."""
    found = re.fullmatch(rf"{EVENT}{view.id.removeprefix('job-')}-([se])({NUMBER.pattern})", id)
    if found is None:
        raise not_listed(id)
    return found[1], int(found[2])


def checkpoint(view: JobView, version: VersionView, loss: float | None) -> dict[str, Any]:
    metrics = version.metrics
    found = {"step": version.step, "train_loss": metrics.get("loss"), "valid_loss": loss, "full_valid_loss": loss}
    if metrics.get("reward") is not None:
        found["train_mean_reward"] = metrics["reward"]
        found["full_valid_mean_reward"] = version.evaluation
    return {
        "id": f"{CHECKPOINT}{view.id.removeprefix('job-')}-{version.version}",
        "object": "fine_tuning.job.checkpoint", "created_at": int(version.created),
        "fine_tuned_model_checkpoint": model_name(view, view.tenant, version.step),
        "fine_tuning_job_id": fine_tuning_id(view.id), "step_number": version.step,
        "metrics": {name: value for name, value in found.items() if value is not None},
    }  # fmt: skip


def checkpoint_version(view: JobView, id: str) -> int:
    """The version that a checkpoint's id names; a number of no version for another text."""
    number = id.removeprefix(f"{CHECKPOINT}{view.id.removeprefix('job-')}-")
    return int(number) if number != id and NUMBER.fullmatch(number) else 0


ERRORS = (
    "formula_parse_error", "invalid_variable_error", "model_grader_parse_error", "model_grader_refusal_error",
    "model_grader_server_error", "other_error", "python_grader_runtime_error", "python_grader_server_error",
    "sample_parse_error", "truncated_observation_error", "unresponsive_reward_error",
)  # fmt: skip


def grader_run(
    grader: Any, graded: Graded, tools: GraderTools, seconds: float, missing: str, silent: str
) -> dict[str, Any]:
    """The response of a trial of a grader: ``missing`` names a field that the item does not have, ``silent`` says why a
    model did not answer."""
    kinds = {failure.kind: str(failure) for failure in graded.failures}
    other = bool(graded.error) and not kinds
    errors: dict[str, Any] = {name: name in kinds for name in ERRORS}
    errors |= {
        "model_grader_server_error": bool(silent), "model_grader_server_error_details": silent or None,
        "python_grader_runtime_error_details": kinds.get("python_grader_runtime_error"),
        "python_grader_server_error_type": kinds.get("python_grader_server_error"),
        "formula_parse_error": bool(other and graded.parts), "other_error": bool(other and not graded.parts),
        "invalid_variable_error": bool(missing),
    }  # fmt: skip
    scores = graded.parts if isinstance(grader, Multi) else {grader.name: graded.value}
    models = [part.model for part in single(grader) if isinstance(part, ModelGrader)]
    usage = {
        model: {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        for model, (read, written) in tools.usage.items()
    }
    total = sum(one["total_tokens"] for one in usage.values())
    return {
        "reward": graded.value, "sub_rewards": graded.parts, "model_grader_token_usage_per_model": usage,
        "metadata": {
            "name": grader.name, "type": grader.type, "execution_time": seconds, "scores": scores,
            "token_usage": total or None, "sampled_model_name": models[0] if models else None, "errors": errors,
        },
    }  # fmt: skip


def grader_models(given: Any) -> list[str]:
    """The models that a grader names."""
    return named_models({"grader": given})


def page_of(rows: Sequence[dict[str, Any]], limit: int, *, ends: bool = False) -> dict[str, Any]:
    """The page with the first ``limit`` of ``rows``, of which one more shows that others follow."""
    data = rows[:limit]
    page: dict[str, Any] = {"object": "list", "data": data, "has_more": limit < len(rows)}
    if ends:
        page |= {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return page
