"""OpenAI's graders: values, templates, formulas, and what is refused."""

from __future__ import annotations

import contextlib
import json
import math
import time
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from rookery.environments.verifiers.graders import (
    PLACES,
    AnyGrader,
    calculated,
    check_item,
    check_templates,
    grade,
    similarity,
)

GRADERS: TypeAdapter[Any] = TypeAdapter(AnyGrader)


def string_check(**changes: Any) -> dict[str, Any]:
    plain = {"type": "string_check", "name": "s", "input": "{{ sample.output_text }}", "reference": "{{ item.answer }}"}
    return {**plain, "operation": "eq", **changes}


@pytest.mark.parametrize(
    ("operation", "text", "value"),
    [
        ("eq", "Yes", 1), ("eq", "yes", 0), ("ne", "No", 1), ("neq", "Yes", 0), ("like", "Oh Yes!", 1),
        ("like", "oh yes", 0), ("ilike", "oh yes", 1), ("ilike", "no", 0),
    ],
)  # fmt: skip
def test_texts_are_compared(operation: str, text: str, value: float) -> None:
    grader = GRADERS.validate_python(string_check(operation=operation))
    assert grade(grader, text, {"answer": "Yes"}).value == value


@pytest.mark.parametrize(
    ("template", "text", "item", "value"),
    [
        ("{{item.a.b[1]}}", "", {"a": {"b": [1, "x"]}}, "x"),
        ("{{ sample.output_json.n }}", '{"n": 3}', {}, "3"),
        ("{{ sample.output_json.n }}", "no JSON", {}, ""),
        ("a {{ item.n }} b {{item.m}}", "", {"n": 1, "m": [1]}, "a 1 b [1]"),
    ],
)
def test_templates_are_filled(template: str, text: str, item: dict[str, Any], value: str) -> None:
    grader = GRADERS.validate_python(string_check(input=template, reference=value))
    check_item(grader, item)
    assert grade(grader, text, item).value == 1


@pytest.mark.parametrize(
    "place", ["foo", "item", "sample.nothing", "item..a", "item.a b", "", "sample.output_tools[0]"]
)
def test_a_template_that_names_nothing_is_refused(place: str) -> None:
    with pytest.raises(ValueError, match="names nothing"):
        check_templates(GRADERS.validate_python(string_check(input="{{ " + place + " }}")))


def test_a_template_has_few_places() -> None:
    """Each may become as long as a reply."""
    check_templates(GRADERS.validate_python(string_check(input="{{ item.answer }}" * PLACES)))
    with pytest.raises(ValueError, match="more than"):
        check_templates(GRADERS.validate_python(string_check(input="{{ item.answer }}" * (PLACES + 1))))


def test_a_row_without_the_field_is_refused() -> None:
    with pytest.raises(ValueError, match=r"item\.answer, which the row does not have"):
        check_item(GRADERS.validate_python(string_check()), {"other": 1})


def multi(formula: str) -> dict[str, Any]:
    return {"type": "multi", "graders": {"a": string_check(), "b": string_check()}, "calculate_output": formula}


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("0.5*a + 0.25*b", 0.75), ("2^3", 8), ("-a^2", -1), ("max(a, b, 3) / min(4, 8)", 0.75), ("sqrt(4) + log(1)", 2),
        ("floor(1.5) + ceil(1.5) + abs(-1) + exp(0)", 5),
    ],
)  # fmt: skip
def test_formulas_are_calculated(formula: str, value: float) -> None:
    assert grade(GRADERS.validate_python(multi(formula)), "x", {"answer": "x"}).value == pytest.approx(value)


@pytest.mark.parametrize(
    "formula",
    ["a +", "c", "a.b", "__import__('os')", "a if b else 1", "sqrt(a, b)", "[a]", "'x'", "a(b)", "True", "(" * 200],
)
def test_what_is_no_formula_is_refused(formula: str) -> None:
    with pytest.raises(ValidationError):
        GRADERS.validate_python(multi(formula))


@pytest.mark.parametrize("formula", ["1/(a-a)", "9^9^9^9", "log(a-1)", "exp(10000)", "(0-a)^0.5"])
def test_a_formula_without_a_finite_value_earns_nothing(formula: str) -> None:
    graded = grade(GRADERS.validate_python(multi(formula)), "x", {"answer": "x"})
    assert graded.value == 0 and "no finite value" in graded.error
    with pytest.raises(ValueError, match="no finite value"):
        calculated(formula, {"a": 1.0, "b": 1.0})


@pytest.mark.parametrize(
    ("metric", "given", "wanted", "value"),
    [
        ("fuzzy_match", "hella", "hello", 0.8),
        ("rouge_1", "the cat sat", "the cat", 0.8),
        ("rouge_2", "the cat sat", "the cat", 2 / 3),
        ("rouge_l", "a b c d", "a x c d", 0.75),
        ("gleu", "the cat is here", "the cat is here", 1),
        ("bleu", "the the the the the the the", "the cat is on the mat", None),
    ],
)
def test_similarities_are_the_published_ones(metric: str, given: str, wanted: str, value: float | None) -> None:
    if value is None:  # Papineni's example: a clipped precision of 2/7; the higher orders are smoothed by one
        value = math.exp((math.log(2 / 7) + math.log(1 / 7) + math.log(1 / 6) + math.log(1 / 5)) / 4)
    assert similarity(metric, given, wanted) == pytest.approx(value)


@pytest.mark.parametrize("metric", ["fuzzy_match", "bleu", "gleu", "rouge_1", "rouge_5", "rouge_l"])
@pytest.mark.parametrize(("given", "wanted"), [("", ""), ("", "a"), ("a", ""), ("a", "a"), ("a b", "c d")])
def test_similarities_lie_between_nothing_and_all(metric: str, given: str, wanted: str) -> None:
    assert 0 <= similarity(metric, given, wanted) <= 1


HOSTILE = ["{{" + " " * 20_000, "{{" + "}" * 20_000, "{{ item." + "a" * 20_000]
PARTS = ["{", "{{", "{{ ", "{{a}", "{{\n}", "{{ {{}", "{{{ }", "{{item.a}}", "{{item.a[1]}} "]
HOSTILE += [part * (20_000 // len(part)) for part in PARTS]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:8]))
def test_long_templates_are_read_in_linear_time(text: str) -> None:
    grader = GRADERS.validate_python(string_check(input=text[:20_000]))
    began = time.process_time()
    with contextlib.suppress(ValueError):
        check_templates(grader)
    grade(grader, "{" * 20_000, {"a": "x", "answer": "y"})
    assert time.process_time() - began < 1  # cubic time takes hours


def test_a_template_that_grows_beyond_bounds_earns_nothing() -> None:
    grader = GRADERS.validate_python(string_check(input="{{sample.output_json}}" * 900))
    graded = grade(grader, json.dumps(["x" * 1_000_000]), {"answer": "y"})
    assert graded.value == 0 and "characters with its fields" in graded.error
