"""OpenAI's graders that run something: Python in the sandbox, or a model that judges."""

from __future__ import annotations

import ast
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from rookery.bounds import INTEGER, GivenModel, Line, Name
from rookery.environments.models import Ask, ModelQuestion
from rookery.environments.sandbox.sandbox import Program, ProgramLimits, Sandbox, SandboxError
from rookery.environments.verifiers.grader_templates import Sample, Template, rendered
from rookery.environments.verifiers.json_objects import objects
from rookery.environments.verifiers.parts import after_thoughts, opened_thought
from rookery.errors import UserError, short
from rookery.spec.values import unique_fields

SOURCE = 256 << 10
"""Characters of a Python grader, as in OpenAI's API."""

FUNCTION = "grade"
"""The function of a Python grader: ``grade(sample, item)``."""

PYTHON_LIMITS = ProgramLimits(seconds=10.0, memory=512 << 20)
"""The limits of one call: OpenAI's two minutes and 2 GB would stop a step whose replies are judged in turn."""

MESSAGES, LABELS = 32, 100
"""Messages and labels of a model grader."""

OBJECTS_TRIED = 32
"""Places of a model's answer where a JSON object may begin that are tried."""

ANSWER_TOKENS = 1024
"""Most tokens of a model's judgement; without ``max_completions_tokens`` a quarter of them."""


@dataclass
class GraderTools:
    """The context of graders, and the usage so far. One for each judged reply."""

    sandbox: Sandbox
    ask: Ask | None = None
    usage: dict[str, list[int]] = field(default_factory=dict)
    """By model, tokens read and written."""
    limits: ProgramLimits = PYTHON_LIMITS
    """Time and memory of a python grader."""


class GraderFailed(ValueError):
    """The grader gave no value, which counts as 0. ``kind`` is the name of the error in OpenAI's API."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class ModelSilent(UserError):
    """The model of a grader does not answer: the reply has no value."""


class AnyGraderType(GivenModel):
    """The interface of all graders."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Name = "grader"

    def templates(self) -> list[str]:
        return []


class PythonGrader(AnyGraderType):
    """The value of the function `grade(sample, item)` of a Python source, in the sandbox."""

    type: Literal["python"]
    source: Annotated[str, Field(max_length=SOURCE)]
    image_tag: None = None
    """Not supported: graders run with Python's standard library alone."""

    def value(self, sample: Sample, item: Mapping[str, Any], tools: GraderTools) -> float:
        text = sample["output_text"]
        given = {
            **sample, "choices": [{"message": {"role": "assistant", "content": text}}], "output_tools": [],
        }  # fmt: skip
        program = Program(self.source, path="grader.py", call=FUNCTION, arguments=[given, dict(item)])
        try:
            ran = tools.sandbox.run(program, tools.limits)
        except SandboxError as error:
            raise GraderFailed("python_grader_server_error", str(error)) from None
        if ran.status != "ok":
            raise GraderFailed("python_grader_runtime_error", f"the python grader failed: {ran.last_line}")
        return _finite(ran.value, "the python grader returned", "python_grader_runtime_error")


def check_source(source: str) -> None:
    """Raises ``ValueError`` for a Python grader that does not define ``grade(sample, item)``. Run it in a confined
    process: to compile a text can take much memory."""
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(source, "grader.py", "exec", dont_inherit=True)
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ValueError(f"source is no Python: {getattr(error, 'msg', error)}{line}") from None
    bound = [node for node in tree.body if _binds(node)]
    if not bound:
        raise ValueError(f"source does not define {FUNCTION}; write def {FUNCTION}(sample, item): ...")
    last = bound[-1]
    if isinstance(last, ast.AsyncFunctionDef):
        raise ValueError(f"source defines {FUNCTION} as async; write def {FUNCTION}(sample, item): ...")
    if isinstance(last, ast.FunctionDef) and not last.decorator_list and not _takes_two(last.args):
        raise ValueError(f"{FUNCTION} does not take two arguments; write def {FUNCTION}(sample, item): ...")


def _binds(node: ast.stmt) -> bool:
    """Whether a statement at the top of a module may give the grader's function its name."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name == FUNCTION
    if isinstance(node, ast.ClassDef):
        return False
    return any(
        (isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.name == FUNCTION)
        or (isinstance(part, ast.Name) and part.id == FUNCTION and isinstance(part.ctx, ast.Store))
        or (isinstance(part, ast.alias) and (part.asname or part.name) in (FUNCTION, "*"))
        for part in ast.walk(node)
    )


def _takes_two(arguments: ast.arguments) -> bool:
    given = len(arguments.posonlyargs) + len(arguments.args)
    required = given - len(arguments.defaults)
    keyword_only = any(default is None for default in arguments.kw_defaults)
    return required <= 2 and (given >= 2 or arguments.vararg is not None) and not keyword_only


def _finite(value: Any, subject: str, kind: str) -> float:
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        number = math.nan
    if not math.isfinite(number):
        raise GraderFailed(kind, f"{subject} {short(repr(value))}, not a finite number")
    return number


# --- models that judge ------------------------------------------------------------------------------------------------


class TextContent(GivenModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["input_text", "output_text"]
    text: Template


class GraderMessage(GivenModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["user", "assistant", "system", "developer"]
    content: Template | TextContent | Annotated[list[Template | TextContent], Field(min_length=1, max_length=MESSAGES)]
    type: Literal["message"] | None = None

    def texts(self) -> list[str]:
        parts = self.content if isinstance(self.content, list) else [self.content]
        return [part if isinstance(part, str) else part.text for part in parts]


class JudgeSampling(GivenModel):
    """How the judgement is sampled."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_completions_tokens: int | None = Field(None, ge=1, le=ANSWER_TOKENS)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=0, le=INTEGER)
    reasoning_effort: None = None


class ModelGrader(AnyGraderType):
    """A grader whose value a model gives."""

    model: Annotated[Line, Field(min_length=1)]
    """A base model of the service, one of your jobs (`JOB`, `JOB@VERSION`, `ft:…`), or a name of `ROOKERY_JUDGES`."""
    input: Annotated[list[GraderMessage], Field(min_length=1, max_length=MESSAGES)]

    def templates(self) -> list[str]:
        return [text for message in self.input for text in message.texts()]

    def answer(
        self, sample: Sample, item: Mapping[str, Any], tools: GraderTools, field: str, schema: Mapping[str, Any],
        sampling: JudgeSampling,
    ) -> Any:  # fmt: skip
        """The value of ``field`` in the model's answer. Raises :class:`GraderFailed` for an answer without it, and
        :class:`ModelSilent`."""
        roles = {"developer": "system"}
        messages = [
            {
                "role": roles.get(message.role, message.role),
                "content": "\n".join(rendered(text, sample, item) for text in message.texts()),
            }
            for message in self.input
        ]
        asked = {"type": "object", "properties": {field: schema}, "required": [field], "additionalProperties": False}
        question = ModelQuestion(
            self.model, messages, json.dumps(asked), sampling.max_completions_tokens or ANSWER_TOKENS // 4,
            sampling.temperature or 0.0, sampling.top_p or 1.0, sampling.seed or 0,
        )  # fmt: skip
        if tools.ask is None:
            raise ModelSilent(f"the model {short(self.model)} cannot be asked here")
        try:
            answer = tools.ask(question)
        except UserError as error:
            raise ModelSilent(str(error)) from None
        used = tools.usage.setdefault(self.model, [0, 0])
        used[0], used[1] = used[0] + answer.prompt_tokens, used[1] + answer.tokens
        value = _field_of(after_thoughts(answer.text), field)
        if value is None:
            raise GraderFailed(
                "model_grader_parse_error",
                f"the model answered {short(repr(answer.text))}, not JSON with the field {field}",
            )
        return value


class ScoreModel(ModelGrader):
    """The number that a model gives, within a range."""

    type: Literal["score_model"]
    range: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    """The least and the greatest value, `[0, 1]`; others are moved to it."""
    sampling_params: JudgeSampling | None = None

    @field_validator("range")
    @classmethod
    def _ordered(cls, value: list[float] | None) -> list[float] | None:
        if value is not None and not value[0] < value[1]:
            raise ValueError(f"the first number is less than the second; given {value}")
        return value

    def value(self, sample: Sample, item: Mapping[str, Any], tools: GraderTools) -> float:
        sampling = self.sampling_params or JudgeSampling()
        given = self.answer(sample, item, tools, "result", {"type": "number"}, sampling)
        if isinstance(given, bool):
            reason = f"the model gave the score {json.dumps(given)}, not a number"
            raise GraderFailed("model_grader_parse_error", reason)
        number = _finite(given, "the model gave the score", "model_grader_parse_error")
        low, high = self.range or (0.0, 1.0)
        return min(high, max(low, number))


class LabelModel(ModelGrader):
    """1 where the label that a model chooses is one of the passing ones, else 0."""

    type: Literal["label_model"]
    labels: Annotated[list[Name], Field(min_length=1, max_length=LABELS)]
    passing_labels: Annotated[list[Name], Field(min_length=1, max_length=LABELS)]

    @model_validator(mode="after")
    def _known(self) -> LabelModel:
        if unknown := [label for label in self.passing_labels if label not in self.labels]:
            raise ValueError(f"passing_labels: {short(repr(unknown[0]))} is none of the labels")
        return self

    def value(self, sample: Sample, item: Mapping[str, Any], tools: GraderTools) -> float:
        schema = {"type": "string", "enum": list(dict.fromkeys(self.labels))}
        label = self.answer(sample, item, tools, "label", schema, JudgeSampling())
        if label not in self.labels:
            raise GraderFailed(
                "model_grader_parse_error",
                f"the model gave the label {short(repr(label))}, which is none of the labels",
            )
        return float(label in self.passing_labels)


def _field_of(text: str, field: str) -> Any:
    """The value of a field in the JSON objects of a text that have it; None without one, where they differ, of which
    one may be quoted from the reply, and where thinking begins outside the first, which has no end."""
    every = objects(text, json.JSONDecoder(object_pairs_hook=unique_fields), OBJECTS_TRIED)
    having = [(found[field], start, end) for found, start, end in every if field in found]
    if not having or any(value != having[0][0] for value, _, _ in having):
        return None
    value, start, end = having[0]
    return None if opened_thought(text[:start] + text[end:]) else value
