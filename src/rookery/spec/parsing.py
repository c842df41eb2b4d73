"""Parsing of jobs: the fields of a job into a :class:`~rookery.spec.job.JobSpec`, or one line per mistake.

A line names the field's path, the given value, and what is allowed. All mistakes of a job are reported at once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rookery.bounds import mistake
from rookery.errors import UserError, count_of, nearest, short, single_line
from rookery.spec import values
from rookery.spec.job import JobSpec
from rookery.spec.policy import PolicySpec
from rookery.spec.suggestions import field_hint, value_hint

UNSUPPORTED_SAMPLING = ("top_p", "top_k", "min_p")
"""Sampling options that a trainer cannot reproduce exactly, which losses with ratios need."""

MAX_PROBLEMS = 100
"""Most mistakes that are reported one by one."""


EXAMPLES = {
    "name": "name: my-job",
    "base_model": "base_model: smollm2-135m-instruct",
    "environment": "environment: {id: jsonl, path: rows.jsonl, verifier: exact}",
    "stop": "stop: {steps: 100}",
    "environment.verifier": "verifier: exact",
}
"""An example of each field that a job may lack by mistake."""

_QUOTED = re.compile(r"'([^']*)'")


class SpecError(UserError):
    """A refused job; ``problems`` has one line per mistake."""

    status = 422

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("the job is refused: " + "; ".join(problems))


def known_fields(root: type[BaseModel], path: Sequence[int | str]) -> list[str]:
    """Field names allowed at ``path`` of a ``root``, such as a job (the last part is the unknown one)."""
    model: Any = root
    for part in path[:-1]:
        if isinstance(part, int):  # of a list, whose items' model is already known
            continue
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return []
        if part in model.model_fields:
            annotation: Any = model.model_fields[part].annotation
            inner = [a for a in getattr(annotation, "__args__", ()) if isinstance(a, type) and issubclass(a, BaseModel)]
            model = inner[-1] if inner else annotation
        elif not (model is JobSpec or path[0] == "policies"):
            return []
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def problem_line(error: ErrorDetails, path: str, known: Sequence[str], hint: str = "") -> str:
    """One mistake found by pydantic as a line: the field's path, the given value, what is allowed. ``path`` is empty
    for the whole; ``known`` are the fields that exist there; ``hint`` says which one is meant."""
    return single_line(_problem(error, short(path), known, hint))


def _problem(error: ErrorDetails, path: str, known: Sequence[str], hint: str) -> str:
    if error["type"] == "extra_forbidden":
        name = str(error["loc"][-1])
        if name in UNSUPPORTED_SAMPLING:
            reason = "a trainer cannot reproduce it exactly; use sampling.temperature"
            return f"{path}: {name} is not supported: {reason}"
        hint = hint or nearest(name, known) or ("allowed: " + ", ".join(known) if known else "no such field")
        return f"{path}: unknown field; {hint}"
    if error["type"] == "missing":
        return f"{path}: missing" + (f"; such as {EXAMPLES[path]}" if path in EXAMPLES else "")
    message = mistake(error)
    message = re.sub(r"^(Input|String|List|Dictionary) should (be )?", "", message)
    message = re.sub(r"[0-9]{21,}", lambda digits: f"{float(digits[0]):g}", message)  # a bound such as float32's
    message = re.sub(r" after validation, not \w+$", "", message)  # of a list or a mapping with too many items
    message = re.sub(r"^a valid string$", "a text, in quotes", message)
    message = re.sub(r"a valid dictionary or instance of \w+|a valid dictionary", "a mapping of fields", message)
    if error["type"] == "value_error" and isinstance(error["input"], dict):
        return f"{path}: {message}" if path else message
    meant = value_hint(error["input"], _QUOTED.findall(message)) if error["type"] == "literal_error" else ""
    return f"{path}: given {values.escaped(error['input'])}, allowed: {message}" + (f"; {meant}" if meant else "")


def _job_problem(error: ErrorDetails) -> str:
    path, known = ".".join(str(part) for part in error["loc"]), known_fields(JobSpec, error["loc"])
    hint = field_hint(error["loc"], known) if error["type"] == "extra_forbidden" else ""
    return problem_line(error, path, known, hint)


OF_DIGITS = "a name of digits alone; add a letter: JavaScript sorts such names, and the order of policies matters"


def parse_job(data: Any) -> JobSpec:
    """The job in ``data`` (what YAML or JSON gave). Raises :class:`SpecError` naming every mistake at once."""
    if not isinstance(data, dict):
        raise SpecError([f"job: given {type(data).__name__}, allowed: a mapping of fields (name, base_model, …)"])
    if problems := list(islice(values.problems(data), MAX_PROBLEMS)):
        raise SpecError(problems)
    try:
        spec = JobSpec.model_validate(data)
    except ValidationError as error:
        if error.error_count() > MAX_PROBLEMS:
            raise SpecError([f"job: {count_of(error.error_count(), 'field')} are wrong or unknown"]) from None
        raise SpecError([_job_problem(detail) for detail in error.errors(include_url=False)]) from None
    problems = [f"policies.{name}: {line}" for name in spec.policies if (line := _name_problem(name, spec))]
    problems += [
        f"policies.{name}.warm_start.{field}: given {values.escaped(getattr(policy.warm_start, field))}, allowed: with"
        " job alone; leave it out"
        for name, policy in spec.policies.items()
        for field in _unused_of_start(policy)
    ]
    if problems:
        raise SpecError(problems)
    return spec


def request_hash(request: Any) -> str:
    """The hash of a request in JSON. The order of its fields makes no difference."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def _name_problem(name: str, spec: JobSpec) -> str:
    """Why no policy of a new job is called so; empty if one may be."""
    if name.isdigit():
        return OF_DIGITS
    alike = next(other for other in spec.policies if other.lower() == name.lower())
    return f"differs from {alike} in case alone; give one of them another name" if alike != name else ""


def _unused_of_start(policy: PolicySpec) -> list[str]:
    """The fields of its warm start that say which weights of a job it takes, where it takes those of a folder."""
    start = policy.warm_start
    if start is None or start.job is not None:
        return []
    return [name for name in ("policy", "version") if getattr(start, name) != type(start).model_fields[name].default]
