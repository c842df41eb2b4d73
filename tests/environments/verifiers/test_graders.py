"""OpenAI's graders: values, templates, formulas, and what is refused."""

from __future__ import annotations

import contextlib
import json
import math
import time
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import TypeAdapter, ValidationError

from rookery.environments.builtins import find
from rookery.environments.models import ModelAnswer, ModelQuestion
from rookery.environments.sandbox.sandbox import ProgramLimits, Sandbox
from rookery.environments.verifiers import graders
from rookery.environments.verifiers.grader_templates import PLACEHOLDERS
from rookery.environments.verifiers.graders import (
    AnyGrader,
    Graded,
    calculated,
    check_item,
    check_templates,
    named_models,
    similarity,
)
from rookery.environments.verifiers.running_graders import GraderTools, ModelSilent, check_source
from rookery.environments.verifiers.verifiers import VERIFIERS
from rookery.errors import UserError

GRADERS: TypeAdapter[Any] = TypeAdapter(AnyGrader)


def grade(grader: Any, text: str, item: dict[str, Any]) -> Graded:
    """The value of a grader that runs nothing."""
    return graders.grade(grader, text, item, GraderTools(Sandbox()))


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
@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_texts_are_compared(operation: str, text: str, value: float, form: Literal["NFC", "NFD"]) -> None:
    grader = GRADERS.validate_python(string_check(operation=operation))
    assert grade(grader, unicodedata.normalize(form, text.replace("e", "é")), {"answer": "Yés"}).value == value


@pytest.mark.parametrize(
    ("template", "text", "item", "value"),
    [
        ("{{item.a.b[1]}}", "", {"a": {"b": [1, "x"]}}, "x"),
        ("{{ sample.output_json.n }}", '{"n": 3}', {}, "3"),
        ("{{ sample.output_json.n }}", "no JSON", {}, ""),
        ("{{ sample.output_json.n }}", '{"n": NaN}', {}, ""),
        ("{{ sample.output_json.n }}", '{"n": 4, "n": 3}', {}, ""),
        ("{{ sample.output_json.n }}", '{"n": [-1e999]}', {}, ""),
        ("{{ sample.output_json.n }}", r'{"n": "a", "m": "half \ud83d"}', {}, ""),
        ("{{ sample.output_json.n }}", r'{"n": "\ud83d\ude00"}', {}, "\U0001f600"),
        ("{{ sample.output_json.n }}", '{"n": 123456789012345678901234567890}', {}, "123456789012345678901234567890"),
        ("a {{ item.n }} b {{item.m}}", "", {"n": 1, "m": [1]}, "a 1 b [1]"),
    ],
)
def test_templates_are_filled(template: str, text: str, item: dict[str, Any], value: str) -> None:
    grader = GRADERS.validate_python(string_check(input=template, reference=value))
    check_item(grader, item)
    assert grade(grader, text, item).value == 1


@pytest.mark.parametrize(
    "placeholder",
    ["foo", "item", "sample.nothing", "item..a", "item.a b", "", "sample.output_tools[0]", "sample.output_text.a",
     "sample.output_text[0]"],
)  # fmt: skip
def test_a_template_that_names_nothing_is_refused(placeholder: str) -> None:
    with pytest.raises(ValueError, match="names nothing"):
        check_templates(GRADERS.validate_python(string_check(input="{{ " + placeholder + " }}")))


@pytest.mark.parametrize(
    "template", ["{{ item.answer", "{{{{ item.answer }}", "{% if item.a %}", "a {{ b {{item.answer}}"]
)
def test_a_template_that_is_not_closed_or_has_statements_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match=r"no \}\} closes|names nothing"):
        check_templates(GRADERS.validate_python(string_check(input=template)))


@pytest.mark.parametrize(
    "template", ['{"a": {"b": "{{item.answer}}"}}', "a } b }} c", "100% {x}", "% {{ item.answer }} %}"]
)
def test_other_braces_are_text(template: str) -> None:
    check_templates(GRADERS.validate_python(string_check(input=template)))


@pytest.mark.parametrize(
    ("grader", "reads"),
    [
        ({"type": "string_check", "input": "{{ item.answer }}", "reference": "x", "operation": "eq"}, False),
        ({"type": "string_check", "input": "x", "reference": "{{ sample.output_json.a }}", "operation": "eq"}, True),
        ({"type": "text_similarity", "input": "a", "reference": "{{item.answer}}", "evaluation_metric": "bleu"}, False),
        ({"type": "score_model", "model": "m", "input": [{"role": "user", "content": "Is {{ item.a }} so?"}]}, False),
        ({"type": "score_model", "model": "m", "input": [{"role": "user", "content": "{{sample.output_text}}"}]}, True),
        ({"type": "multi", "calculate_output": "a + b", "graders": {
            name: {"type": "string_check", "input": text, "reference": "x", "operation": "eq"}
            for name, text in (("a", "{{ item.answer }}"), ("b", "{{ sample.output_text }}"))}}, True),
    ],
)  # fmt: skip
def test_a_grader_that_reads_nothing_of_the_reply_is_refused(grader: dict[str, Any], reads: bool) -> None:
    """Every reply would earn the same."""
    if reads:
        VERIFIERS["grader"].model_validate({"grader": grader})
        return
    with pytest.raises(ValidationError, match="reads nothing of the reply, so every reply would earn the same; name"):
        VERIFIERS["grader"].model_validate({"grader": grader})


def test_a_template_has_few_places() -> None:
    """Each may become as long as a reply."""
    check_templates(GRADERS.validate_python(string_check(input="{{ item.answer }}" * PLACEHOLDERS)))
    with pytest.raises(ValueError, match="more than"):
        check_templates(GRADERS.validate_python(string_check(input="{{ item.answer }}" * (PLACEHOLDERS + 1))))


def test_a_row_without_the_field_is_refused() -> None:
    with pytest.raises(ValueError, match=r"item\.answer, which the row does not have"):
        check_item(GRADERS.validate_python(string_check()), {"other": 1})


@pytest.mark.parametrize(
    ("written", "refused"),
    [("12345678.123456789012", True), ('"12345678.123456789012"', False), ("0.1", False), ("1e400", None)],
)
def test_a_number_that_loses_digits_as_a_text_is_refused(written: str, refused: bool | None, tmp_path: Path) -> None:
    (path := tmp_path / "rows.jsonl").write_text(f'{{"prompt": "a", "answer": {written}}}\n')
    options = {"path": str(path), "verifier": {"name": "grader", "grader": string_check()}}
    if refused is False:
        find("jsonl").validate_options(options)
        return
    line = rf"line 1: .*answer.* (is|given) {written}, .*(quote it|or a text)"
    with pytest.raises(UserError, match=line):
        find("jsonl").validate_options(options)


def multi(formula: str) -> dict[str, Any]:
    return {"type": "multi", "graders": {"a": string_check(), "b": string_check()}, "calculate_output": formula}


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("0.5*a + 0.25*b", 0.75), ("a*2^3", 8), ("-a^2", -1), ("max(a, b, 3) / min(4, 8)", 0.75),
        ("sqrt(4) + log(a)", 2),
        ("floor(1.5) + ceil(1.5) + abs(-1) + exp(a - 1)", 5),
    ],
)  # fmt: skip
def test_formulas_are_calculated(formula: str, value: float) -> None:
    assert grade(GRADERS.validate_python(multi(formula)), "x", {"answer": "x"}).value == pytest.approx(value)


@pytest.mark.parametrize(
    "formula",
    [
        "a +",
        "c",
        "a.b",
        "__import__('os')",
        "a if b else 1",
        "sqrt(a, b)",
        "[a]",
        "'x'",
        "a(b)",
        "True",
        "(" * 200,
        "1/0",
        "2",
    ],
)
def test_text_that_is_no_formula_is_refused(formula: str) -> None:
    with pytest.raises(ValidationError):
        GRADERS.validate_python(multi(formula))


@pytest.mark.parametrize("formula", ["1/(a-a)", "a*9^9^9^9", "log(a-1)", "exp(10000*a)", "(0-a)^0.5"])
def test_a_formula_without_a_finite_value_earns_nothing(formula: str) -> None:
    graded = grade(GRADERS.validate_python(multi(formula)), "x", {"answer": "x"})
    assert graded.value == 0 and "no finite value" in graded.error
    for one, earned, unjudged in ((formula, 0, 1), ("a", 1, 0)):
        verifier = VERIFIERS["grader"].model_validate({"grader": multi(one)})
        reward, metrics = verifier.score("x", {"answer": "x"})
        assert (reward, metrics["unjudged"]) == (earned, unjudged)
    with pytest.raises(ValueError, match="no finite value"):
        calculated(formula, {"a": 1.0, "b": 1.0})


@pytest.mark.parametrize(
    ("metric", "given", "wanted", "value"),
    [
        ("fuzzy_match", "hella", "hello", 0.8),
        ("rouge_1", "the cat sat", "the cat", 0.8),
        ("rouge_2", "the cat sat", "the cat", 2 / 3),
        ("rouge_l", "a b c d", "a x c d", 0.75),
        ("rouge_1", "Hello, World!", "hello world", 1),
        ("rouge_1", "the cat sat.", "the cat", 0.8),
        ("rouge_2", "It is (very) good.", "it is very good", 1),
        ("rouge_l", "Paris.", "London.", 0),
        ("rouge_1", "की", "का", 0),
        ("rouge_2", "हिन्दी में लिखो", "हिन्दी में", 2 / 3),
        ("rouge_1", "?!", "!!", 0),
        ("rouge_1", "!!", "!!", 1),
        ("rouge_l", "!!", "word", 0),
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
    found = similarity(metric, given, wanted)
    assert 0 <= found <= 1
    if metric != "fuzzy_match":  # whose characters include the space
        assert found == float(given == wanted), "texts shorter than N words have nothing in common"


HOSTILE = ["{{" + " " * 20_000, "{{" + "}" * 20_000, "{{ item." + "a" * 20_000]
PARTS = ["{", "{{", "{{ ", "{{a}", "{{\n}", "{{ {{}", "{{{ }", "{{item.a}}", "{{item.a[1]}} "]
HOSTILE += [part * (20_000 // len(part)) for part in PARTS]


@pytest.mark.parametrize("operation", ["like", "ilike", "eq"])
@pytest.mark.parametrize("reference", ["{{item.answer}}", "", "{{sample.output_text}}", "is {{item.answer}}"])
def test_empty_reference_that_every_reply_contains_is_refused(operation: str, reference: str) -> None:
    grader = GRADERS.validate_python(string_check(operation=operation, reference=reference))
    if reference in ("{{item.answer}}", ""):
        with pytest.raises(ValueError, match="an empty reply equals" if operation == "eq" else "every reply contains"):
            check_item(grader, {"answer": ""})
    else:
        check_item(grader, {"answer": ""})


def test_a_similarity_to_an_empty_text_is_refused() -> None:
    similar = {**string_check(), "type": "text_similarity", "evaluation_metric": "rouge_l"}
    del similar["operation"]
    with pytest.raises(ValueError, match="a text of text_similarity is empty for the row, which an empty reply equals"):
        check_item(GRADERS.validate_python(similar), {"answer": ""})
    check_item(GRADERS.validate_python(similar), {"answer": "a"})
    with pytest.raises(ValueError, match="a text of text_similarity is empty for the row"):  # as a part
        check_item(GRADERS.validate_python({**multi("a"), "graders": {"a": similar}}), {"answer": ""})
    fields = string_check(input="{{ sample.output_json.middle_name }}")
    check_item(GRADERS.validate_python(fields), {"answer": ""})  # a field may be empty


@pytest.mark.parametrize("operation", ["like", "ilike"])
@pytest.mark.parametrize(("reply", "value"), [("", 0), (" ", 0), ("Rome", 1)])
def test_nothing_contains_an_empty_reply(operation: str, reply: str, value: float) -> None:
    sides = string_check(operation=operation, input="{{item.answer}}", reference="{{sample.output_text}}")
    assert grade(GRADERS.validate_python(sides), reply, {"answer": "Rome or Milan"}).value == value


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:8]))
def test_long_templates_are_read_in_linear_time(text: str) -> None:
    grader = GRADERS.validate_python(string_check(input=text[:20_000]))
    began = time.thread_time()
    with contextlib.suppress(ValueError):
        check_templates(grader)
    grade(grader, "{" * 20_000, {"a": "x", "answer": "y"})
    assert time.thread_time() - began < 1  # cubic time takes hours


def test_a_template_that_grows_beyond_bounds_earns_nothing() -> None:
    grader = GRADERS.validate_python(string_check(input="{{sample.output_json}}" * 900))
    graded = grade(grader, json.dumps(["x" * 1_000_000]), {"answer": "y"})
    assert graded.value == 0 and "characters with its fields" in graded.error


# --- Python -----------------------------------------------------------------------------------------------------------


def python(source: str) -> Any:
    return GRADERS.validate_python({"type": "python", "name": "p", "source": source})


@pytest.fixture(scope="module")
def tools() -> Iterator[GraderTools]:
    sandbox = Sandbox(confinements=1)
    yield GraderTools(sandbox)
    sandbox.close()


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("def grade(sample, item):\n return len(sample['output_text']) / item['most']", 0.5),
        ("def grade(sample, item):\n return sample['choices'][0]['message']['content'] == 'abc'", 1),
        ("def grade(sample, item):\n return sample['output_json'] is None", 1),
        ("grade = lambda sample, item: -2", -2),
        ("from json import dumps as grade\ngrade = lambda *both: 0.25", 0.25),
    ],
)
def test_python_gives_the_value(tools: GraderTools, source: str, value: float) -> None:
    check_source(source)
    graded = graders.grade(python(source), "abc", {"most": 6}, tools)
    assert graded.value == value and not graded.failures


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def grade(sample, item):\n return float('nan')", "returned nan"),
        ("def grade(sample, item):\n return float('inf')", "returned inf"),
        ("def grade(sample, item):\n return 10 ** 400", "not a finite number"),
        ("def grade(sample, item):\n return None", "returned None"),
        ("def grade(sample, item):\n return '1'", "returned '1'"),
        ("def grade(sample, item):\n return {1}", "TypeError"),
        ("def grade(sample, item):\n return item['absent']", "KeyError: 'absent'"),
        ("def grade(sample, item):\n while True: print('x' * 1000)", "more than the limit"),
        ("def grade(sample, item):\n while True: pass", "time limit"),
        ("def grade(sample, item):\n raise SystemExit(0)", "failed"),
        ("def grade(sample):\n return 1", "TypeError"),
        ("1 / 0\ndef grade(sample, item):\n return 1", "ZeroDivisionError"),
        ("x = 1", "no function 'grade'"),
    ],
)
def test_python_without_a_number_earns_nothing(tools: GraderTools, source: str, said: str) -> None:
    tools = replace(tools, limits=ProgramLimits(seconds=0.3, memory=128 << 20))
    graded = graders.grade(python(source), "abc", {}, tools)
    assert graded.value == 0 and said in graded.error and "\n" not in graded.error
    assert [failure.kind for failure in graded.failures] == ["python_grader_runtime_error"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("", "does not define grade"),
        ("def score(sample, item): return 1", "does not define grade"),
        ("class grade: pass", "does not define grade"),
        ("if True:\n x = 1", "does not define grade"),
        ("async def grade(sample, item): return 1", "as async"),
        ("def grade(sample): return 1", "two arguments"),
        ("def grade(a, b, c): return 1", "two arguments"),
        ("def grade(sample, item, *, more): return 1", "two arguments"),
        ("def grade(sample, item) return 1", "no Python"),
        ("def grade(sample, item):\n\treturn 1\n        x", "no Python"),
        ("-" * 100_000 + "1", "no Python"),
        ("x = '\0'", "no Python"),
    ],
)
def test_a_source_without_the_function_is_refused(source: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        check_source(source)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "source",
    [
        "def grade(sample, item): return 1",
        "def grade(sample, item, more=1): return 1",
        "def grade(*both): return 1",
        "try:\n import x\nexcept ImportError:\n def grade(sample, item): return 1",
        "from helpers import *",
        "def grade(sample): return 1\ndef grade(sample, item): return 1",
    ],
)
def test_a_source_with_the_function_is_taken(source: str) -> None:
    check_source(source)


# --- models -----------------------------------------------------------------------------------------------------------


def score_model(**changes: Any) -> dict[str, Any]:
    said = [{"role": "developer", "content": "Judge."}, {"role": "user", "content": "{{ sample.output_text }}?"}]
    return {"type": "score_model", "name": "m", "model": "judge", "input": said, **changes}


def label_model(**changes: Any) -> dict[str, Any]:
    labels = {"labels": ["good", "bad"], "passing_labels": ["good"]}
    return {**score_model(), "type": "label_model", **labels, **changes}


def asked(grader: dict[str, Any], answer: str) -> tuple[Graded, ModelQuestion]:
    questions = []

    def ask(question: ModelQuestion) -> ModelAnswer:
        questions.append(question)
        return ModelAnswer(answer, 7, 3)

    tools = GraderTools(Sandbox(), ask)
    graded = graders.grade(GRADERS.validate_python(grader), "A reply", {}, tools)
    assert tools.usage == {"judge": [7, 3]}
    return graded, questions[0]


@pytest.mark.parametrize(
    ("grader", "answer", "value"),
    [
        (score_model(), '{"result": 0.5}', 0.5),
        (score_model(), 'Well: {"steps": [{"a": 1}], "result": 1} so', 1),
        (score_model(), '<think>{"result": 0}</think>{"result": 1}', 1),
        (score_model(), '{"result": 1} so {"result": 1.0}', 1),
        (score_model(), '{"steps": [{"a": "it never closed <think>"}], "result": 1}', 1),
        (score_model(), '<think>a</think>{"steps": [{"a": "a second <think>"}], "result": 1}', 1),
        (score_model(), '{"result": 7}', 1),
        (score_model(range=[-1, 10]), '{"result": 7}', 7),
        (score_model(range=[-1, 10]), '{"result": -3}', -1),
        (label_model(), '{"label": "good"}', 1),
        (label_model(), '{"label": "bad"}', 0),
    ],
)
def test_a_model_gives_the_value(grader: dict[str, Any], answer: str, value: float) -> None:
    graded, question = asked(grader, answer)
    assert graded.value == value and not graded.failures
    assert [one["role"] for one in question.messages] == ["system", "user"]
    assert question.messages[1]["content"] == "A reply?" and json.loads(question.schema)["required"]


@pytest.mark.parametrize(
    ("grader", "answer"),
    [
        (score_model(), "very good"), (score_model(), '{"result": "0.5"}'),
        (score_model(), '{"result": true}'), (score_model(), '{"result": 0, "result": 1}'),
        (label_model(), '{"label": "bad", "label": "good"}'),
        (score_model(), '{"result": NaN}'),
        (score_model(), '{"score": 1}'), (score_model(), ""), (score_model(), '{"result": 1e999}'),
        (score_model(), '{"steps": [{"result": 1}, {"result": 1}'), (score_model(), '{"steps": [{"result": 1}],}'),
        (score_model(), '<think>{"result": 1}'), (score_model(), '{"result": 1} <think>or'),
        (label_model(), '<think>no</think>{"label": "good"}<think>'),
        (score_model(), "[" * 5000), (score_model(), '{"a":' * 5000), (label_model(), '{"label": "fine"}'),
        (label_model(), '{"label": ["good"]}'), (label_model(), '{"label": null}'),
        (label_model(), 'It says {"label": "good"}, so {"label": "bad"}'),
    ],
)  # fmt: skip
def test_an_answer_in_another_form_earns_nothing(grader: dict[str, Any], answer: str) -> None:
    graded, _ = asked(grader, answer)
    assert graded.value == 0 and "\n" not in graded.error
    assert [failure.kind for failure in graded.failures] == ["model_grader_parse_error"]


def test_a_silent_model_gives_no_value() -> None:
    def ask(question: ModelQuestion) -> ModelAnswer:
        raise UserError("judge: it does not answer")

    parts = {"a": string_check(), "b": score_model()}
    for grader in (score_model(), {"type": "multi", "graders": parts, "calculate_output": "a + b"}):
        for tools in (GraderTools(Sandbox(), ask), GraderTools(Sandbox())):
            with pytest.raises(ModelSilent):
                graders.grade(GRADERS.validate_python(grader), "A reply", {"answer": ""}, tools)


@pytest.mark.parametrize(
    "grader",
    [
        score_model(range=[1, 0]), score_model(range=[0]), score_model(range=[0, math.nan]), score_model(model=""),
        score_model(input=[]), score_model(input=[{"role": "user", "content": []}]),
        score_model(input=[{"role": "user", "content": {"type": "input_image", "image_url": "x"}}]),
        score_model(sampling_params={"reasoning_effort": "low"}), label_model(labels=[]),
        label_model(passing_labels=["other"]), label_model(passing_labels=[]),
        {"type": "python", "name": "p", "source": "", "image_tag": "2025"},
    ],
)  # fmt: skip
def test_a_grader_that_cannot_run_is_refused(grader: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GRADERS.validate_python(grader)


def test_the_parts_of_a_formula_may_run() -> None:
    parts = {"near": score_model(), "kind": label_model(model="other"), "same": string_check()}
    grader = {"type": "multi", "graders": parts, "calculate_output": "near + 2 * kind"}
    replies = {"judge": '{"result": 0.5}', "other": '{"label": "good"}'}
    tools = GraderTools(Sandbox(), lambda question: ModelAnswer(replies[question.model]))
    graded = graders.grade(GRADERS.validate_python(grader), "A reply", {"answer": ""}, tools)
    assert graded.value == 2.5 and graded.parts == {"near": 0.5, "kind": 1, "same": 0}
    assert named_models({"name": "grader", "grader": grader}) == ["judge", "other"]


@pytest.mark.parametrize(
    ("formula", "earned"), [("1 - near", 0), ("max(same, near)", 0), ("same", 0), ("near - 1", -1), ("near", 0)]
)
def test_a_reply_earns_nothing_by_a_part_without_a_value(formula: str, earned: float) -> None:
    parts = {"near": score_model(), "same": {**string_check(), "operation": "ne"}}
    verifier = VERIFIERS["grader"].model_validate(
        {"grader": {"type": "multi", "graders": parts, "calculate_output": formula}}
    )
    silent: Any = verifier
    reward, metrics = silent.asking(lambda question: ModelAnswer("very good")).score("A reply", {"answer": ""})
    assert (reward, metrics["unjudged"], metrics["near"]) == (earned, 1.0, 0.0)


@pytest.mark.parametrize("verifier", [None, "math", {"grader": 1}, {"grader": {"graders": [1], "model": 3}}])
def test_options_of_another_form_name_no_model(verifier: Any) -> None:
    assert named_models(verifier) == []
