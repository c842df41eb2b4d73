"""Verifiers: what each is worth; no reply breaks one, no row that lacks something passes."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from decimal import Decimal
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.support.draws import examples
from tests.support.processes import runs
from tests.support.waiting import until

from rookery.environments.builtins import find
from rookery.environments.verifiers import pool
from rookery.environments.verifiers.expressions import reply_latex
from rookery.environments.verifiers.parts import opened_thought
from rookery.environments.verifiers.texts import folded
from rookery.environments.verifiers.verifiers import VERIFIERS, Exact, Json, Number, Regex
from rookery.errors import UserError
from rookery.tokenization.written import THOUGHTS


def reward(name: str, text: str, row: dict[str, Any], **options: Any) -> float:
    return VERIFIERS[name].model_validate(options).score(text, row)[0]


def test_exact() -> None:
    assert reward("exact", " Paris\n", {"answer": "Paris"}) == 1
    assert reward("exact", "paris", {"answer": "Paris"}) == 0
    assert reward("exact", "paris", {"answer": "Paris"}, ignore_case=True) == 1
    assert reward("exact", "5", {"answer": 5}) == 1
    assert reward("exact", "no", {"y": "yes"}, answer="y", right=2, wrong=-1) == -1


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("12", 12.0, 1),
        ("12.0", 12, 1),
        ("12.5", 12, 0),
        ("1e-05", 1e-5, 1),
        ("0.00001", 1e-5, 1),
        ("10000000000000000", 1e16, 1),
        ("\N{MINUS SIGN}3", -3, 1),
        ("1,234", 1234, 1),
        ("12", "12.0", 0),  # a text is compared as a text
        ("null", "null", 1),
        ("caf\u00e9", "cafe\u0301", 1),
        ("cafe\u0301", "caf\u00e9", 1),
        ("cafe", "caf\u00e9", 0),
        ("New\N{NO-BREAK SPACE}York", "New York", 1),
        ("New  York", "New\N{NARROW NO-BREAK SPACE}York", 1),
        ("\ufeffNew York\u200b", "New York", 1),
        ("\N{ARABIC LETTER MARK}New York\N{RIGHT-TO-LEFT MARK}", "New York", 1),
        ("\N{HEAVY BLACK HEART}\ufe0f", "\N{HEAVY BLACK HEART}", 1),
        ("\N{HEAVY CHECK MARK}", "\N{HEAVY CHECK MARK}\ufe0e", 1),
        ("a\u034fb", "ab", 1),
        ("\N{HEAVY BLACK HEART}", "\N{BLACK HEART SUIT}", 0),
        ("NewYork", "New York", 0),
        ("\N{HANGUL SYLLABLE GAG}", "\u1100\u1161\u11a8", 1),
        ("\N{LATIN SMALL LIGATURE FI}", "fi", 0),
        ("paris", "Paris", 0),
        ("X\N{NON-BREAKING HYPHEN}ray", "X-ray", 1),
        ("X-ray", "X\N{HYPHEN}ray", 1),
        ("X\N{EN DASH}ray", "X-ray", 0),
    ],
)
@pytest.mark.parametrize("verifier", ["exact", "regex"])
def test_texts_are_compared_as_they_read(verifier: str, text: str, answer: Any, right: float) -> None:
    options = {"pattern": "^Answer: (.+)$"} if verifier == "regex" else {}
    reply = f"Answer:\N{NO-BREAK SPACE}{text}" if verifier == "regex" else text
    assert reward(verifier, reply, {"answer": answer}, **options) == right


@given(
    text=st.text(max_size=30),
    other=st.text(max_size=30),
    joint=st.sampled_from([" ", "\N{NO-BREAK SPACE}", "\n", "\t  "]),
)
def test_a_text_equals_its_other_spellings_and_nothing_else(text: str, other: str, joint: str) -> None:
    answer = f"a {text} b {other} c"
    row = {"answer": answer}
    decomposed = unicodedata.normalize("NFD", f"a {text} b {other} c".replace(" ", joint))
    assert reward("exact", f" {decomposed}\u200b\n", row) == 1
    assert reward("exact", answer + "d", row) == 0
    assert reward("exact", answer.upper(), {"answer": answer.lower()}, ignore_case=True) == (
        folded(answer.upper()) == folded(answer.lower())
    )


PARTS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"after": "</think>"}, "<think>4</think>5", "5"),
    ({"after": "</think>"}, "<think>4", None),
    ({"after": "</think>"}, "5", None),
    ({"after": "</think>"}, "4</think>", ""),
    ({"after": "</think>"}, "4</think>3</think>5", "5"),
    ({"tag": "answer"}, "4 <answer>5</answer> 6", "5"),
    ({"tag": "answer"}, "<answer>4</answer><answer>5</answer>", "5"),
    ({"tag": "answer"}, "<answer>4 <answer>5</answer>", "5"),
    ({"tag": "answer"}, "<answer>5</answer></answer>", "5"),
    ({"tag": "answer"}, "<answer>5</answer> <answer>4", "5"),
    ({"tag": "answer"}, "<answer>5", None),
    ({"tag": "answer"}, "5</answer>", None),
    ({"tag": "answer"}, "</answer>5<answer>", None),
    ({"tag": "answer"}, "<Answer>5</Answer>", None),
    ({"after": "</think>", "tag": "answer"}, "<answer>4</answer></think><answer>5</answer>", "5"),
    ({"after": "</think>", "tag": "answer"}, "<answer>5</answer></think>5", None),
]


@pytest.mark.parametrize(
    ("after", "reply", "part"),
    [
        ("Answer:", "<think>Answer: 4</think>Answer:5", "5"),
        ("Answer:", "Answer: 4 Answer:5", "5"),
        ("Answer:", "<think>Answer:5", None),
        ("Answer:", "<think>Answer:5</think>I do not know", None),
        ("Answer:", "Answer:5 <think>or", None),
        ("</think>", "<think>4</think>5", "5"),
        ("</think>", "<think>4</think>5<think>6", None),
        ("<|message|>", "<|channel|>analysis<|message|>4<|end|><|channel|>final<|message|>5", "5"),
        ("<|message|>", "<|channel|>analysis<|message|>5", None),
    ],
)
def test_a_marker_within_a_thought_does_not_count(after: str, reply: str, part: str | None) -> None:
    """Unless it ends the thought. A pattern sees the whole reply."""
    assert Exact.model_validate({"after": after}).part(reply) == part
    assert Regex.model_validate({"after": after, "pattern": "(.)"}).part(reply) == reply.rpartition(after)[2]


@pytest.mark.parametrize(("options", "reply", "part"), PARTS)
@pytest.mark.parametrize(
    ("verifier", "frame"),
    [({"name": "exact"}, "{}"), ({"name": "number"}, "{}"), ({"name": "regex", "pattern": r"(\d)"}, "{}"),
     ({"name": "json", "valid": 0}, '{{"answer": {}}}')],
)  # fmt: skip
def test_every_verifier_judges_only_the_part_asked_for(
    verifier: dict[str, Any], frame: str, options: dict[str, Any], reply: str, part: str | None
) -> None:
    judge = VERIFIERS[verifier["name"]].model_validate({**verifier, **options})
    if judge.name == "json":
        reply = "".join(frame.format(char) if char.isdigit() else char for char in reply)
    reward, metrics = judge.score(reply, {"answer": 5})
    assert reward == (part == "5")
    assert metrics["answered"] == (part is not None)


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("<think>4</think>5", 1),
        ("4</think>5", 1),  # the template opened it
        ("\n<think>4</think>\n5", 1),
        ("<think>4</think> 5 </think> 5", 1),
        ("<think>5", 0),
        ("<think>5</think>4", 0),
        ("<think>5</think>", 0),
        ("5", 1),
        ("Sure. <think>3 + 2, so 5", 0),
        ("5 <think>or not 5", 0),
        ("<think>4</think>5<think>", 0),
        ("<think>4</think>5 <think>5", 0),
        ("<think>4</think><think>5", 0),
        ("<think>4</think> <think>3</think> 5", 1),
        ("<think>4<think>3</think> 5", 1),
        ("Sure. <think>4</think> 5", 1),
        ("</think>5", 1),
        ("</think><think>5", 0),
    ],
)
def test_thinking_that_a_reply_marks_is_not_judged(reply: str, right: float) -> None:
    for name in ("exact", "number"):
        verifier = VERIFIERS[name].model_validate({})
        assert verifier.score(reply, {"answer": 5}) == verifier.score(reply, {"answer": 5}, reply + "!", [])
        assert verifier.score(reply, {"answer": 5})[0] == right
        special = [token for token in ("<think>", "</think>") if token in reply]
        shown = reply.replace("<think>", "").replace("</think>", "")
        assert verifier.score(shown, {"answer": 5}, reply, special)[0] == right
    whole = VERIFIERS["regex"].model_validate({"pattern": r"(?s)^<think>.*</think>(\d)$"})
    assert whole.score("<think>4</think>5", {"answer": 5})[0] == 1


MARKS = [
    *THOUGHTS,
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>"),
]


@pytest.mark.parametrize(("begin", "end"), MARKS)
def test_thoughts_of_every_family_are_not_judged(begin: str, end: str) -> None:
    """Whether the tokenizer declares the marks special or not, and where the template opens the thought."""
    tokens = re.findall(r"<[^<>]+>|\[/?THINK\]", begin + end)
    for reply, right in [
        (f"{begin}4{end}5", 1), (f"4{end}5", 1), (f"{begin}5{end}4", 0), (f"{begin}5", 0), (f"{begin}5{end}", 0),
        (f"{begin}4{end}5{begin}5", 0), (f"{begin}4{end}3{begin}6{end}5", 1),
    ]:  # fmt: skip
        shown = re.sub("|".join(map(re.escape, tokens)), "", reply)
        for name in ("exact", "number"):
            verifier = VERIFIERS[name].model_validate({})
            assert verifier.score(reply, {"answer": 5})[0] == right, reply
            assert verifier.score(shown, {"answer": 5}, reply, tokens)[0] == right, reply
    assert opened_thought(f"x{begin}") == begin.removesuffix("<|message|>") and not opened_thought(f"{begin}4{end}")


def test_a_reply_without_the_part_is_wrong_even_where_found_is_rewarded() -> None:
    for options in ({"name": "number"}, {"name": "regex", "pattern": r"(\d)"}):
        judge = VERIFIERS[options["name"]].model_validate({**options, "found": 0.5, "wrong": -1, "after": "</think>"})
        assert judge.score("so 4", {"answer": 5})[0] == -1
        assert judge.score("</think>so 4", {"answer": 5})[0] == 0.5


def similar(formula: str) -> dict[str, Any]:
    sides = {"input": "{{ sample.output_text }}", "reference": "5"}
    near = {"type": "text_similarity", "name": "n", "evaluation_metric": "fuzzy_match", **sides}
    return {"type": "multi", "graders": {"near": near}, "calculate_output": formula}


def check(operation: str, text: str, reference: str) -> dict[str, Any]:
    return {"type": "string_check", "name": "s", "operation": operation, "input": text, "reference": reference}


REPLY = "{{ sample.output_text }}"
EVERY_REPLY = [
    {"name": "grader", "grader": check("ne", REPLY, "I do not know")},
    {"name": "grader", "grader": check("neq", "4", REPLY)},
    {"name": "grader", "grader": check("eq", "{{ sample.output_json.n }}", "")},
    {"name": "grader", "grader": check("ne", "{{ sample.output_json.n }}", "3")},
    {"name": "grader", "grader": similar("1 - near")},
    {"name": "grader", "grader": similar("max(near, 0.5)")},
    {"name": "grader", "grader": similar("exp(-near)")},
    {"name": "exact"}, {"name": "exact", "ignore_case": True}, {"name": "number"}, {"name": "number", "where": "any"},
    {"name": "number", "where": "only"}, {"name": "number", "tolerance": 10}, {"name": "number", "found": 0.5},
    {"name": "json", "valid": 1}, {"name": "json", "fields": {"n": {"equals": None}}}, {"name": "judge", "policy": "p"},
    {"name": "sandbox"}, {"name": "math"}, {"name": "regex", "pattern": "", "after": "</think>"},
    {"name": "regex", "pattern": "(?s).*", "whole": True, "after": "</think>"},
    {"name": "regex", "pattern": "x*", "tag": "answer"},
]  # fmt: skip
"""Verifiers, most of which reward an empty reply, or any."""


@pytest.mark.parametrize("options", EVERY_REPLY, ids=json.dumps)
@pytest.mark.parametrize("reply", ["<think>5", "Sure. <think>5", "<think>4</think>5<think>5", '<think>{"answer": 5}'])
def test_a_reply_without_its_judged_part_earns_nothing(options: dict[str, Any], reply: str) -> None:
    if options["name"] == "math" and importlib.util.find_spec("math_verify") is None:
        pytest.skip("the math extra is not installed")
    row = {"answer": 5} if options["name"] != "sandbox" else {"tests": "x = f() if False else None"}
    marked = [options] if "after" in options or "tag" in options else [options, {**options, "tag": "answer"},
                                                                       {**options, "after": "</final>"}]  # fmt: skip
    for one in marked:
        said = "<think>5" if one.get("after") == "</think>" else reply
        verdict, metrics = VERIFIERS[options["name"]].model_validate(one).score(said, row)
        assert verdict == 0 and metrics.get("answered", 0.0) == 0.0
        assert metrics.get("right", metrics.get("grader", 0.0)) == 0.0


def test_a_grader_that_gives_an_empty_reply_less_than_nothing_still_does() -> None:
    judge = VERIFIERS["grader"].model_validate({"grader": similar("near - 1"), "tag": "answer"})
    assert judge.score("no tag", {}) == (-1.0, {"grader": -1.0, "near": 0.0, "unjudged": 0.0, "answered": 0.0})


def test_markers_that_are_special_tokens_are_seen_and_others_are_not_judged() -> None:
    raw, special = "<think>4</think><|final|>5<|extra|>", ["</think>", "<|final|>", "<|extra|>"]
    assert VERIFIERS["exact"].model_validate({"after": "</think>"}).part("<think>45", raw, special) == "5"
    for name in ("exact", "number"):
        judge = VERIFIERS[name].model_validate({"after": "<|final|>"})
        assert judge.score("<think>45", {"answer": 5}, raw, special)[0] == 1
        assert judge.score("<think>45", {"answer": 5})[0] == 0
    assert VERIFIERS["exact"].model_validate({}).score("5", {"answer": 5}, "5<|extra|>", ["<|extra|>"])[0] == 1


def test_the_enclosed_answer_is_the_part_that_is_judged() -> None:
    for options, _, _ in PARTS:
        judge = Exact.model_validate(options)
        assert judge.part(judge.enclose("5")) == "5"


@pytest.mark.parametrize("options", [{"after": ""}, {"tag": ""}, {"tag": "<answer>"}, {"tag": "a b"}])
def test_parts_that_no_reply_has_are_refused(options: dict[str, str]) -> None:
    for name in ("exact", "json"):
        with pytest.raises(ValidationError):
            VERIFIERS[name].model_validate(options)


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("12 + 30 = 42", {}, 1),
        ("42 it is, not 41", {}, 0),
        ("42 it is, not 41", {"where": "first"}, 1),
        ("41, 42, 43", {"where": "any"}, 1),
        ("The answer is 42", {"where": "only"}, 0),
        (" 42\n", {"where": "only"}, 1),
        ("42.0", {}, 1),
        ("42.4", {"tolerance": 0.5}, 1),
        ("0-42", {}, 0),  # a difference or a range: no number
        ("-42", {}, 0),
        ("41", {"found": 0.1}, 0.1),
        ("none", {"found": 0.1, "wrong": -1}, -1),
        ("1e999", {}, 0),
        ("4.2e1", {}, 1),
    ],
)
def test_number(text: str, options: dict[str, Any], expected: float) -> None:
    assert reward("number", text, {"answer": 42}, **options) == expected


def test_number_reads_thousands() -> None:
    assert reward("number", "It is 1,234,567.", {"answer": "1,234,567"}) == 1
    assert reward("number", "1,2", {"answer": 2}) == 0  # a decimal comma, or a list


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("9007199254740992", 9007199254740993, 0),  # the same float
        ("999999998000000000", "999999998000000001", 0),
        ("999999998000000001", "999999998000000001", 1),
        ("It is .5", 5, 0),
        ("It is .5", 0.5, 1),
        ("x = -.5", -0.5, 1),
        ("version 1.2.3", 3, 0),
        ("wait...7", 7, 1),
        ("x = \N{MINUS SIGN}3", 3, 0),
        ("x = \N{MINUS SIGN}3", -3, 1),
        ("-3", "\N{MINUS SIGN}3", 1),
        ("0.1", 0.1, 1),
        ("1e999", 1, 0),
        ("1e-999", 0, 0),
    ],
)
def test_every_digit_of_a_number_counts(text: str, answer: Any, right: float) -> None:
    assert reward("number", text, {"answer": answer}) == right


def test_numbers_of_any_size() -> None:
    assert reward("number", "1" * 400, {"answer": int("1" * 400)}) == 1
    assert reward("number", "1" * 400, {"answer": "1" * 399 + "2"}) == 0
    assert reward("number", "9" * 1_000_001, {"answer": 1}, tolerance=0.5) == 0
    with pytest.raises(ValueError, match="not a number"):
        reward("number", "1", {"answer": float("nan")})


def test_regex() -> None:
    assert reward("regex", "so: <a>7</a>", {"answer": 7}, pattern="<a>(.*?)</a>") == 1
    assert reward("regex", "so: <a>8</a>", {"answer": 7}, pattern="<a>(.*?)</a>", found=0.2) == 0.2
    assert reward("regex", "b=2 a=1", {"answer": 1}, pattern="b=(?P<b>.) a=(?P<a>.)", group="a") == 1
    assert reward("regex", "yes!", {}, pattern="^yes") == 1  # no group: the row plays no part
    assert reward("regex", "yes!", {}, pattern="yes", whole=True) == 0
    for space in (" ", "\N{NO-BREAK SPACE}", "\N{NARROW NO-BREAK SPACE}"):  # as French texts have it before a colon
        assert reward("regex", f"réponse{space}: 5", {"answer": 5}, pattern="réponse\N{NO-BREAK SPACE}: (.)") == 1
    assert reward("regex", "ab", {}, pattern="^a\N{ZERO WIDTH SPACE}b$") == 1
    for spelling in ("NFC", "NFD"):  # of the pattern; the other one of the reply
        pattern, reply = unicodedata.normalize(spelling, "^café$"), unicodedata.normalize("NFKD", "café")
        assert reward("regex", reply, {}, pattern=pattern) == 1


@pytest.mark.parametrize(
    "pattern",
    [r"\\mathbf{i}", r"x\^{e}", r"(?:foo){e<=1}", r"a{d}", r"(b{s})", r"{i}", r"a{ 2}", r"a{2}", r"a{2,}", r"a{,2}b",
     r"a{1,2}?b", r"[{e}]+", r"[]{e}]+", r"[^]{}]+", r"\{e\}", r"a\{i}", r"a{}", r"a{,}", r"\[{i}\]", r"[\]{i}]+",
     r"{{i}}"],
)  # fmt: skip
@settings(max_examples=examples(30))
@given(text=st.text(r"\{}[]^abdefiosx12, <=mthbf", max_size=12))
def test_patterns_have_pythons_syntax(pattern: str, text: str) -> None:
    """A brace that is no repetition is itself, as in LaTeX."""
    for reply in (text, pattern.replace("\\", ""), "", "a", "aab", "foo", "fo", "b", r"\mathbf{i}", r"\mathbf"):
        matched = Regex.model_validate({"pattern": pattern}).score(reply, {"answer": "a"})[1]["matched"]
        assert matched == bool(re.search(pattern, reply)), reply


def test_classes_of_letters_are_matched() -> None:
    assert Regex.model_validate({"pattern": r"^\p{L}+$"}).score("äß", {})[0] == 1


def test_a_pattern_that_runs_away_is_stopped() -> None:
    verifier = Regex.model_validate({"pattern": r"(.*a){20}b"})
    verdict, metrics = verifier.score("a" * 300, {"answer": "a"})
    assert (verdict, metrics["unjudged"]) == (0, 1)


def test_json() -> None:
    row = {"answer": 5, "city": "Rome"}
    assert reward("json", '{"answer": 5}', row) == 1
    assert reward("json", 'Sure:\n```json\n{"answer": 5.0}\n```', row) == 1
    assert reward("json", 'Sure: {"answer": 5}', row, strict=True) == 0
    assert reward("json", '{"answer": "5"}', row) == 0.3  # a text is no number
    assert reward("json", "{'answer': 5}", row) == 0
    assert reward("json", '{"answer": 5, "x": NaN}', row) == 0  # Python reads it, JSON it is not
    assert reward("json", '{"answer": -Infinity}, I mean {"answer": 5}', row) == 1
    assert reward("json", '{"answer": 1e999}', row) == 0  # as Infinity
    for twice in ('{"answer": 6, "answer": 5}', '{"answer": 5, "answer": 5}', '{"answer": 5, "x": {"b": 1, "b": 2}}'):
        assert reward("json", twice, row) == 0
    assert reward("json", '{"answer": 5, "x": 1}', row, only=True) == 0
    fields = {"n": {"from": "answer", "weight": 3, "tolerance": 1}, "city": "city", "ok": {"equals": True}}
    verifier = Json.model_validate({"fields": fields, "valid": 0.5})
    verdict, metrics = verifier.score('{"n": 6, "city": "Oslo", "ok": 1}', row)
    assert verdict == pytest.approx(0.5 + 0.5 * 3 / 5)
    assert metrics == {"valid": 1, "right/n": 1, "right/city": 0, "right/ok": 0}  # 1 is not true
    near = Json.model_validate({"fields": {"x": {"from": "answer", "tolerance": 0.1}}, "valid": 0})
    for number, right in (("1.1", 1), ("0.9", 1), ("1.1000001", 0), ("1" + "0" * 400, 0)):
        assert near.score(f'{{"x": {number}}}', {"answer": 1.0})[0] == right, "as number does"
    for weights in (
        [0.1] * 10,
        [0.1, 0.2, 0.3],
        [0.7, 0.1, 0.3],
        [1e-9, 1e9],
    ):  # a reply with every field right earns 1
        fields = {f"f{n}": {"equals": n, "weight": weight} for n, weight in enumerate(weights)}
        right = json.dumps({name: field["equals"] for name, field in fields.items()})
        assert {reward("json", right, {}, fields=fields, valid=valid) for valid in (0, 0.1, 0.3, 0.35, 0.7, 1)} == {1.0}
    nested = Json.model_validate({"fields": {"a": {"equals": {"b": [1, None]}}}, "valid": 0})
    assert nested.score('{"a": {"b": [1, null]}}', {})[0] == 1


@pytest.mark.parametrize(
    ("reply", "earned"),
    [
        ('{"work": {"answer": 5},}', 0),
        ('{"answer": 6, "steps": [{"answer": 5}', 0),
        ('{"answer": 5, "answer": 5, "x": {"answer": 5}}', 0),
        ('{"a": "}", "work": {"answer": 5},}', 0),
        (r'{"a": "\"}", "work": {"answer": 5},}', 0),
        ('{"a": {"b": {"answer": 5}}, x}', 0),
        ('{"x":' * 3000 + '{"answer": 5}', 0),
        ('{"a": "not closed}, {"answer": 5}', 1),
        ('{"work": {"answer": 6},} I mean {"answer": 5}', 1),
        ('The set {"a", "b"}, so {"answer": 5}', 1),
        ('{"a": "{", x} {"answer": 5}', 1),
        ('{"work": {"answer": 6}} {"answer": 5}', 0.3),
        ('[{"answer": 5}]', 1),
        ("{" * 20_000 + '"' + '\\"' * 20_000, 0),
    ],
)
def test_an_object_within_one_that_is_no_json_does_not_count(reply: str, earned: float) -> None:
    assert reward("json", reply, {"answer": 5}) == earned


needs_math = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="the math extra is not installed"
)


LONG_PARTS = ["not \\(", "\\(", "\\[", "not $", ": ", "A", " ", "1", "x*", "5 and ", "\\boxed{5}, "]


@pytest.mark.parametrize("part", LONG_PARTS)
def test_long_replies_are_written_in_linear_time(part: str) -> None:
    start = time.thread_time()
    reply_latex(part * 20_000)
    assert time.thread_time() - start < 1


@needs_math
def test_answers_that_math_verify_cannot_read_are_refused_with_their_row() -> None:
    verifier = MATH
    for answer in (None, True, [1], {}, "", "  ", "101_2", "12:30", "2024-01-02", "1.2.3", "5 million", "5th", "5 6",
                   "3\N{EN DASH}5", r"\boxed{}", "1/2/3", "x" * 20_000, "10_2", "0x1F", "2 hours 30 minutes",
                   "5 feet 3 inches", "3 quarters", "2 tenths", "10 choose 3", "5 squared"):  # fmt: skip
        with pytest.raises(ValueError, match=r"^answer is "):
            verifier.check({"answer": answer})
    readable = [{"answer": answer} for answer in (5, 1e308, r"\frac{1}{2}", "A", "x=5", r"\$5", "north")]
    assert verifier.first_unfit(readable) is None and verifier.first_unread(readable) is None
    for answer in ("?", "$$", r"\frac{1}", "((", "\N{PARTY POPPER}", "9^{9^{9^9}}!("):
        assert verifier.first_unfit([{"answer": answer}]) is None
        index, reason = verifier.first_unread([*readable, {"answer": answer}]) or (0, "")
        assert index == len(readable) and "in which math-verify finds no expression; write it in LaTeX" in reason


@needs_math
def test_reading_answers_is_bounded_in_time() -> None:
    rows = [{"answer": f"x+{number}"} for number in range(40)] + [{"answer": "?"}]
    index, _ = MATH.first_unread(rows) or (0, "")
    assert index == 40
    assert MATH.first_unread(rows, seconds=-1.0) is None
    with pytest.raises(ValueError, match=r'answer is "\?", in which math-verify finds no expression'):
        MATH.score("1", rows[-1])


@needs_math
def test_math_judges_only_the_part_asked_for() -> None:
    verifier = VERIFIERS["math"].model_validate({"after": "</think>"})
    assert verifier.score(r"<think>\boxed{4}</think> \boxed{5}", {"answer": 5})[0] == 1
    assert verifier.score(r"<think>could be \boxed{5}", {"answer": 5}) == (
        0,
        {"right": 0, "unjudged": 0, "answered": 0},
    )


@needs_math
@settings(max_examples=examples(60), deadline=None)
@given(text=st.text(max_size=60) | st.text(r"\boxed{}$()^_/0123456789.,-+ xe\N{EN DASH}½√", max_size=60))
def test_no_reply_breaks_math(text: str) -> None:
    for reply in (text, rf"\boxed{{{text}}}"):
        verdict, metrics = MATH.score(reply, {"answer": 5})
        assert verdict in (0, 1) and all(0 <= value <= 1 for value in metrics.values())


@needs_math
@settings(max_examples=examples(60), deadline=None)
@given(st.integers(-(10**25), 10**25) | st.floats(-1e20, 1e20).filter(lambda value: not 0 < abs(value) < 1e-12))
def test_a_number_as_the_answer_is_right_when_written_as_decimal(value: float) -> None:
    decimal = f"{Decimal(repr(value)):f}"
    assert MATH.score(rf"so \boxed{{{decimal}}}", {"answer": value})[0] == 1
    assert MATH.score(rf"so \boxed{{{Decimal(decimal) + 1:f}}}", {"answer": value})[0] == 0, repr(value)


@needs_math
def test_math() -> None:
    verifier = MATH
    assert verifier.score("I think it is 0.5", {"answer": r"\frac{1}{2}"})[0] == 1
    assert verifier.score(r"so \boxed{2\sqrt{2}}", {"answer": r"$\sqrt{8}$"})[0] == 1
    assert verifier.score("a line of words", {"answer": 3})[0] == 0
    # Its exact value is out of reach for any machine; the judge gives up and the next reply is judged again.
    assert verifier.score("$9^{9^{9^9}}$", {"answer": 2}) == (0, {"right": 0, "unjudged": 1})
    assert verifier.score("2", {"answer": 2})[0] == 1


RUNS_AWAY = "$9^{9^{9^9}}$"


def children(of: int) -> set[int]:
    """Processes that ``of`` started and has not heard the end of."""
    found: set[int] = set()
    for tasks in Path(f"/proc/{of}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends meanwhile
            found |= set(map(int, tasks.read_text().split()))
    return found


@pytest.fixture
def ours() -> Callable[[], set[int]]:
    """The child processes that the test has now."""
    before = children(os.getpid())
    return lambda: children(os.getpid()) - before


MATH = VERIFIERS["math"].model_validate({}) if importlib.util.find_spec("math_verify") else None


@needs_math
def test_replies_that_run_away_delay_no_other_and_cost_no_import(ours: Callable[[], set[int]]) -> None:
    with closing(pool.VerifierPool("math", limit=1.0, children=2)) as math, ThreadPoolExecutor() as threads:

        def same(reply: str, expected: str) -> bool:
            return bool(math.score({"reply": reply, "expected": expected}))

        assert list(threads.map(same, ["2", "3"], ["2", "2"])) == [True, False]
        before = ours()
        late = threads.submit(same, RUNS_AWAY, "2")
        until(late.running)
        assert same("2", "2") is True
        assert not late.done(), "the honest reply waited for the other"
        with pytest.raises(pool.VerifierTimeout):
            late.result()
        many = threads.map(same, ["1", "2", "3", "4"], ["1", "1", "3", "3"])
        assert list(many) == [True, False, True, False]
        assert len(before) == 2 and ours() == before


@needs_math
def test_an_unused_judge_keeps_no_process(ours: Callable[[], set[int]]) -> None:
    """It is asked again without a reply being lost, whenever that is."""
    math = pool.VerifierPool("math", idle_seconds=0.05)
    for _ in range(2):
        assert math.score({"answers": ["2", "?"]}) == [True, False]
        until(lambda: not ours())
    math.close()


@needs_math
@pytest.mark.parametrize("end", ["sys.exit()", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_no_process_outlives_the_one_that_asked(end: str) -> None:
    """Not even with a judgement under way."""
    program = f"""
import os, signal, sys, threading, time
from rookery.environments.verifiers.pool import VerifierPool
math = VerifierPool("math", limit=2.0)
math.score({{"reply": "2", "expected": "2"}})
threading.Thread(target=math.score, args=({{"reply": {RUNS_AWAY!r}, "expected": "2"}},), daemon=True).start()
print(os.getpid(), flush=True)
sys.stdin.readline()
{end}
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        (child,) = children(int(process.stdout.readline()))
        (forked,) = until(lambda: children(child))
        process.stdin.write("\n")
    until(lambda: not any(map(runs, (child, forked))))


def test_math_without_the_extra_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'rookery\[math\]'"):
        VERIFIERS["math"].model_validate({})


@settings(max_examples=examples(150))
@given(text=st.one_of(st.text(max_size=80), st.text('{}[]",:0123456789.eE+-truefalsn ', max_size=80)))
def test_no_reply_breaks_a_verifier(text: str) -> None:
    row = {"answer": 5}
    for verifier in (Exact(), Number(), Number(where="any", found=0.1), Json(), Regex(pattern=r"(\d+)")):
        for judge in (verifier, verifier.model_copy(update={"after": ":", "tag": "b"})):
            verdict, metrics = judge.score(text, row)
            assert math.isfinite(verdict) and all(0 <= value <= 1 for value in metrics.values())


@pytest.mark.parametrize("piece", ['{"a":', '{"', "{", '{"a":[', '{"a":1,', "[{"])
def test_a_json_reply_of_beginnings_is_judged_at_once(piece: str) -> None:
    began = time.thread_time()
    assert Json().score(piece * 20_000, {"answer": 5})[0] == 0
    assert time.thread_time() - began < 3
    assert Json().score("{ " * 20_000 + '{"answer": 5}', {"answer": 5})[0] == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(150))
@given(value=json_values)
def test_json_values_written_down_are_right(value: Any) -> None:
    row = {"answer": value}
    assert Json(valid=0.25).score(json.dumps({"answer": value}), row) == (1, {"valid": 1, "right/answer": 1})


def test_rows_without_a_usable_answer_are_reported() -> None:
    for options, row, message in [
        ({"name": "exact"}, {"prompt": "x"}, "no field 'answer'"),
        ({"name": "number"}, {"answer": "many"}, '"many", not a number'),
        ({"name": "number"}, {"answer": True}, "true, not a number"),
        ({"name": "regex", "pattern": "(.)"}, {}, "no field 'answer'"),
        ({"name": "json", "fields": {"a": "b"}}, {"answer": 1}, "no field 'b', which fields.a"),
        ({"name": "number"}, {"answer": "3/4"}, 'answer is "3/4", not a number; write it in digits'),
        ({"name": "number", "answer": "y"}, {"y": None}, "y is null, not a number"),
        ({"name": "exact"}, {"answer": None}, "answer is null, neither a text nor a number; write the text"),
        ({"name": "exact"}, {"answer": True}, "answer is true, neither"),
        ({"name": "exact"}, {"answer": ["yes", "y"]}, "neither a text nor a number"),
        ({"name": "exact"}, {"answer": {}}, "neither a text nor a number"),
        ({"name": "exact"}, {"answer": ""}, 'answer is "", which an empty reply equals'),
        ({"name": "exact"}, {"answer": "\N{NO-BREAK SPACE}\u200b"}, "which an empty reply equals"),
        ({"name": "exact"}, {"answer": float("inf")}, "neither a text nor a number"),
        ({"name": "regex", "pattern": "(.)"}, {"answer": None}, "answer is null, neither"),
        ({"name": "regex", "pattern": "(.*)"}, {"answer": ""}, "which an empty reply equals"),
    ]:
        with pytest.raises(ValueError, match=message):
            VERIFIERS[options["name"]].model_validate(options).check(row)
        with pytest.raises(ValueError, match=message):
            VERIFIERS[options["name"]].model_validate(options).score("a reply", row)


LONG = "12345678.123456789012"


@pytest.mark.parametrize(
    ("verifier", "row", "refused"),
    [
        ("exact", f'"answer": {LONG}', True),
        ("number", f'"answer": {LONG}', True),
        ({"name": "regex", "pattern": "(.*)"}, f'"answer": {LONG}', True),
        ({"name": "number", "answer": "y"}, f'"y": {LONG}', True),
        ({"name": "number", "tolerance": 1e-15}, f'"answer": {LONG}', True),
        ({"name": "number", "tolerance": 0.01}, f'"answer": {LONG}', False),
        ("json", f'"answer": {LONG}', False),  # the reply is read as JSON too
        ("number", f'"answer": 1, "weight": {LONG}', False),
        ({"name": "regex", "pattern": "x"}, f'"answer": {LONG}', False),
        ("number", '"answer": 0.10000000000000001', False),
        ("number", f'"answer": "{LONG}"', False),
    ],
)
def test_an_answer_that_loses_digits_is_refused_where_it_is_compared(
    verifier: Any, row: str, refused: bool, tmp_path: Path
) -> None:
    (path := tmp_path / "rows.jsonl").write_text(f'{{"prompt": "-", "answer": 1}}\n{{"prompt": "a", {row}}}\n')
    if refused:
        if "y" in row[:3]:
            path.write_text(f'{{"prompt": "-", "y": 1}}\n{{"prompt": "a", {row}}}\n')
        line = rf"line 2: (answer|y) is {LONG}, which would become 12345678\.12345679 in this row; quote it"
        with pytest.raises(UserError, match=line):
            find("jsonl").validate_options({"path": str(path), "verifier": verifier})
    else:
        find("jsonl").validate_options({"path": str(path), "verifier": verifier})


def test_a_pattern_is_compiled_once_however_many_others_are_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One may take two seconds, and the jobs of all tenants share a host."""
    compiled, compile = list[str](), regex.compile

    def counted(pattern: str) -> Any:
        compiled.append(pattern)
        return compile(pattern)

    monkeypatch.setattr(regex, "compile", counted)
    patterns = [f"x{number}$" for number in range(300)]
    judges = [Regex(pattern=pattern) for pattern in patterns]
    for _ in range(2):
        assert [judge.judge(f"x{number}", {})[0] for number, judge in enumerate(judges)] == [1.0] * 300
    assert compiled == patterns
