"""OpenAI's graders: the reward of a reply by a template of its row.

A text of a grader may hold ``{{ item.path }}``, a field of the row besides its messages, ``{{ sample.output_text }}``
or ``{{ sample.output_json.path }}``, the reply and the reply read as JSON. A path that the reply does not have gives an
empty text; one that the row does not have is refused before the run.
"""

from __future__ import annotations

import ast
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import regex
from pydantic import Discriminator, Field, field_validator, model_validator

from rookery.bounds import LINE, Name
from rookery.environments.verifiers.grader_templates import Sample, Template, found, paths, rendered, sample_of
from rookery.environments.verifiers.running_graders import (
    AnyGraderType,
    GraderFailed,
    GraderTools,
    LabelModel,
    PythonGrader,
    ScoreModel,
)
from rookery.environments.verifiers.texts import composed
from rookery.spec.values import Rounded

GRADERS = 32
"""Graders in a ``multi``."""

FORMULA = 1_000
"""Characters of ``calculate_output``."""

COMPARED = 10_000
"""Characters at the beginning of two texts whose similarity is computed: its time grows with their product."""


class StringCheck(AnyGraderType):
    """1 where two texts compare as ``operation`` says, else 0."""

    type: Literal["string_check"]
    input: Template
    reference: Template
    operation: Literal["eq", "ne", "neq", "like", "ilike"]
    """`like`: the input contains the reference, which is not empty; `ilike` the same without regard to case."""

    def templates(self) -> list[str]:
        return [self.input, self.reference]

    def value(self, sample: Sample, item: Mapping[str, Any], tools: GraderTools) -> float:
        given, wanted = (composed(rendered(text, sample, item)) for text in (self.input, self.reference))
        match self.operation:
            case "eq":
                return float(given == wanted)
            case "ne" | "neq":
                return float(given != wanted)
            case _ if not wanted.strip():  # every text contains it
                return 0.0
            case "like":
                return float(wanted in given)
            case _:
                return float(wanted.casefold() in given.casefold())


class TextSimilarity(AnyGraderType):
    """How similar two texts are, from 0 to 1."""

    type: Literal["text_similarity"]
    input: Template
    reference: Template
    evaluation_metric: Literal[
        "fuzzy_match", "bleu", "gleu", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l"
    ]

    def templates(self) -> list[str]:
        return [self.input, self.reference]

    def value(self, sample: Sample, item: Mapping[str, Any], tools: GraderTools) -> float:
        given, wanted = (composed(rendered(text, sample, item)[:COMPARED]) for text in (self.input, self.reference))
        return similarity(self.evaluation_metric, given, wanted)


Part = Annotated[StringCheck | TextSimilarity | PythonGrader | ScoreModel | LabelModel, Discriminator("type")]


class Multi(AnyGraderType):
    """A formula over the values of other graders."""

    type: Literal["multi"]
    graders: Annotated[dict[Name, Part], Field(min_length=1, max_length=GRADERS)]
    calculate_output: Annotated[str, Field(min_length=1, max_length=FORMULA)]
    """`+ - * / ^`, and `min max abs floor ceil exp sqrt log`, over the names of the graders."""

    @field_validator("graders")
    @classmethod
    def _names(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if not name.isidentifier() or name in FUNCTIONS:
                raise ValueError(f"the grader {name!r} has no name that calculate_output can use; give letters and _")
        return value

    @model_validator(mode="after")
    def _calculable(self) -> Multi:
        calculated(self.calculate_output, dict.fromkeys(self.graders, 0.5), check=True)
        return self

    def templates(self) -> list[str]:
        return [text for part in self.graders.values() for text in part.templates()]


OneGrader = StringCheck | TextSimilarity | PythonGrader | ScoreModel | LabelModel | Multi
AnyGrader = Annotated[OneGrader, Discriminator("type")]
GRADER_TYPES = ("string_check", "text_similarity", "python", "score_model", "label_model", "multi")
"""Graders that run here; the last one consists of the others."""


@dataclass(frozen=True)
class Graded:
    """The value of a grader, and those of its parts by name. ``error`` is empty, or why it, or one of its parts, has no
    value."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    error: str = ""
    failures: tuple[GraderFailed, ...] = ()
    """The errors of Python and of models, which count as 0 in a formula; the reply earns no more."""


def grade(grader: OneGrader, text: str | None, item: Mapping[str, Any], tools: GraderTools) -> Graded:
    """The value of a reply; ``item`` is its row. A reply without the judged part, None, earns nothing, or less where an
    empty one does. Raises :class:`~rookery.environments.verifiers.running_graders.ModelSilent` where a model does not
    answer."""
    sample = sample_of(text or "")
    parts: dict[str, float] = {}
    failures: list[GraderFailed] = []

    def value_of(part: Any) -> float:
        try:
            return float(part.value(sample, item, tools))
        except GraderFailed as failure:
            failures.append(failure)
            return 0.0

    error = ""
    try:
        if isinstance(grader, Multi):
            for name, part in grader.graders.items():
                parts[name] = value_of(part)
            value = calculated(grader.calculate_output, parts)
        else:
            value = value_of(grader)
    except ValueError as raised:
        value, error = 0.0, str(raised)
    if failures:
        value = min(0.0, value)
    if text is None:
        value, parts = min(0.0, value), {name: min(0.0, part) for name, part in parts.items()}
    return Graded(value, parts, error or "; ".join(map(str, failures)), tuple(failures))


def single(grader: OneGrader) -> list[Any]:
    """The graders of which a grader consists."""
    return list(grader.graders.values()) if isinstance(grader, Multi) else [grader]


def named_models(verifier: Any) -> list[str]:
    """The models that a verifier's options name, as far as they have the form of a grader."""
    grader = verifier.get("grader") if isinstance(verifier, Mapping) else None
    if not isinstance(grader, Mapping):
        return []
    parts = grader.get("graders")
    every = [grader, *(parts.values() if isinstance(parts, Mapping) else ())][: GRADERS + 1]
    found = [one.get("model") for one in every if isinstance(one, Mapping)]
    return list(dict.fromkeys(model for model in found if isinstance(model, str) and 0 < len(model) <= LINE))


def check_item(grader: OneGrader, item: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` for a row without a field that a template names, or with a number there that loses digits
    as a text."""
    for template in grader.templates():
        for path in paths(template):
            root, *steps = path
            value = found(item, steps) if root == "item" else ""
            shown = "item" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
            if value is None:
                raise ValueError(f"the grader names {shown}, which the row does not have")
            if isinstance(value, Rounded):
                raise ValueError(f"{shown} is {value.loss}")
    for one in single(grader):
        contains = isinstance(one, StringCheck) and one.operation in ("like", "ilike")
        if contains and _is_empty(one.reference, item):
            raise ValueError("the reference of string_check is empty for the row: every reply contains it")
        if isinstance(one, TextSimilarity) or (isinstance(one, StringCheck) and one.operation == "eq"):
            for side, other in ((one.input, one.reference), (one.reference, one.input)):
                replied = paths(other) == [["sample", "output_text"]] and not rendered(other, {}, item)
                if replied and _is_empty(side, item):
                    raise ValueError(f"a text of {one.type} is empty for the row, which an empty reply equals")


def _is_empty(template: str, item: Mapping[str, Any]) -> bool:
    """Whether a template that names only the row gives no text for it."""
    return all(root == "item" for root, *_ in paths(template)) and not rendered(template, {}, item)


def check_templates(grader: OneGrader) -> None:
    """Raises ``ValueError`` for a template that names nothing known."""
    for template in grader.templates():
        paths(template)


def reads_reply(grader: OneGrader) -> bool:
    """Whether a part of a grader reads the reply: without one, every reply to a row earns the same."""
    return any(
        isinstance(one, PythonGrader)
        or any(root == "sample" for template in one.templates() for root, *_ in paths(template))
        for one in single(grader)
    )


# --- formulas ---------------------------------------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min, "max": max, "abs": abs, "floor": math.floor, "ceil": math.ceil, "exp": math.exp, "sqrt": math.sqrt,
    "log": math.log,
}  # fmt: skip

_OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: math.pow,
}  # fmt: skip


def calculated(formula: str, values: Mapping[str, float], *, check: bool = False) -> float:
    """The value of a formula. Raises ``ValueError`` for one that is none, and for a result that is not a finite number,
    unless only the form is to be ``check``-ed."""
    try:
        tree = ast.parse(formula.strip().replace("^", "**"), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"calculate_output is no formula: {formula[:60]!r}") from None

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return float(number)
            case ast.Name(id=name) if name in values:
                return float(values[name])
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -value(inner)
            case ast.UnaryOp(op=ast.UAdd(), operand=inner):
                return value(inner)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                first, second = value(left), value(right)
                return _tried(lambda: _OPERATORS[type(op)](first, second))
            case ast.Call(func=ast.Name(id=name), args=[_, *_] as given, keywords=[]) if name in FUNCTIONS:
                numbers = [value(one) for one in given]
                if name in ("min", "max"):
                    return max(numbers) if name == "max" else min(numbers)
                if len(numbers) != 1:
                    raise ValueError(f"calculate_output: {name} takes one number")
                return _tried(lambda: float(FUNCTIONS[name](numbers[0])))
        shown = ast.unparse(node)[:60]
        raise ValueError(f"calculate_output: {shown!r} is neither a grader of {', '.join(values)} nor allowed")

    def _tried(work: Callable[[], float]) -> float:
        try:
            return float(work())
        except (ArithmeticError, ValueError):
            if check:
                return 1.0
            raise ValueError("calculate_output has no finite value") from None

    try:
        result = value(tree)
    except (RecursionError, OverflowError):
        raise ValueError("calculate_output is too large; make it shorter") from None
    if check and not any(isinstance(node, ast.Name) and node.id in values for node in ast.walk(tree)):
        raise ValueError(f"calculate_output names no grader of {', '.join(values)}: every reply would get the same")
    if not math.isfinite(result) and not check:
        raise ValueError("calculate_output has no finite value")
    return result


# --- similarity -------------------------------------------------------------------------------------------------------


_WORD = regex.compile(r"[\p{L}\p{M}\p{N}]+")
"""A word of ROUGE, as its authors' program and the library ``rouge-score`` divide English texts: letters with their
marks, of which scripts as Devanagari make vowels, and digits."""


def similarity(metric: str, given: str, wanted: str) -> float:
    """The similarity of two texts, from 0 to 1. ``fuzzy_match`` is twice the length of the longest common subsequence
    of characters over the length of both texts (RapidFuzz's ``ratio``); ``rouge_N`` and ``rouge_l`` are F1 over words
    without punctuation (Lin 2004), ``bleu`` the sentence's with add-one smoothing (Papineni et al. 2002; Lin and Och
    2004), ``gleu`` that of Wu et al. 2016, both over words as white space divides them."""
    if metric == "fuzzy_match":
        both = len(given) + len(wanted)
        return 2 * _common(given, wanted) / both if both else 1.0
    words, other = given.lower().split(), wanted.lower().split()
    if metric.startswith("rouge_") and (spelt := _WORD.findall(wanted.lower())):  # else it is punctuation alone
        words, other = _WORD.findall(given.lower()), spelt
    if metric == "rouge_l":
        return _f1(_common(words, other), len(words), len(other))
    if metric.startswith("rouge_"):
        n = int(metric[-1])
        mine, theirs = _grams(words, n), _grams(other, n)
        if not mine and not theirs:  # both are shorter: nothing can be counted
            return float(words == other)
        return _f1((mine & theirs).total(), mine.total(), theirs.total())
    counts = [(_grams(words, n), _grams(other, n)) for n in range(1, 5)]
    if metric == "gleu":
        shared = sum((mine & theirs).total() for mine, theirs in counts)
        most = max(sum(mine.total() for mine, _ in counts), sum(theirs.total() for _, theirs in counts))
        return shared / most if most else float(words == other)
    if not words or not other or not (counts[0][0] & counts[0][1]):
        return float(words == other)
    smooth = [0, 1, 1, 1]
    logs = [
        math.log(((mine & theirs).total() + extra) / (mine.total() + extra))
        for (mine, theirs), extra in zip(counts, smooth, strict=True)
    ]
    brevity = min(0.0, 1 - len(other) / len(words))
    return math.exp(brevity + sum(logs) / len(logs))


def _grams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[at : at + n]) for at in range(len(words) - n + 1))


def _f1(shared: int, mine: int, theirs: int) -> float:
    return 2 * shared / (mine + theirs) if mine + theirs else 1.0


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence, by bits of one integer (Hyyrö 2004)."""
    positions: dict[str, int] = {}
    for at, one in enumerate(first):
        positions[one] = positions.get(one, 0) | 1 << at
    every = (1 << len(first)) - 1
    row = every
    for one in second:
        found = row & positions.get(one, 0)
        row = ((row + found) | (row - found)) & every
    return len(first) - row.bit_count()
