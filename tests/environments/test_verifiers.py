"""Verifiers: what each is worth; no reply breaks one, no row that lacks something passes."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.processes import runs

from rookery.environments.verifiers import pool
from rookery.environments.verifiers.verifiers import VERIFIERS, Exact, Json, Math, Number, Regex
from rookery.errors import UserError


def reward(name: str, text: str, row: dict[str, Any], **options: Any) -> float:
    return VERIFIERS[name].model_validate(options).score(text, row)[0]


def test_exact() -> None:
    assert reward("exact", " Paris\n", {"answer": "Paris"}) == 1
    assert reward("exact", "paris", {"answer": "Paris"}) == 0
    assert reward("exact", "paris", {"answer": "Paris"}, ignore_case=True) == 1
    assert reward("exact", "5", {"answer": 5}) == 1
    assert reward("exact", "no", {"y": "yes"}, answer="y", right=2, wrong=-1) == -1


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
        ("0-42", {}, 1),  # a difference, not a negative number
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
    assert reward("number", "1,2", {"answer": 2}) == 1


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("9007199254740992", 9007199254740993, 0),  # the same float
        ("999999998000000000", "999999998000000001", 0),
        ("999999998000000001", "999999998000000001", 1),
        ("It is .5", 5, 0),
        ("It is .5", 0.5, 1),
        ("x = -.5", -0.5, 1),
        ("version 1.2.3", 3, 1),
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


def test_a_pattern_that_runs_away_is_stopped() -> None:
    verifier = Regex.model_validate({"pattern": r"(.*a){20}b"})
    verdict, metrics = verifier.score("a" * 300, {})
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
    assert reward("json", '{"answer": 5, "x": 1}', row, only=True) == 0
    fields = {"n": {"from": "answer", "weight": 3, "tolerance": 1}, "city": "city", "ok": {"equals": True}}
    verifier = Json.model_validate({"fields": fields, "valid": 0.5})
    verdict, metrics = verifier.score('{"n": 6, "city": "Oslo", "ok": 1}', row)
    assert verdict == pytest.approx(0.5 + 0.5 * 3 / 5)
    assert metrics == {"valid": 1, "right/n": 1, "right/city": 0, "right/ok": 0}  # 1 is not true
    nested = Json.model_validate({"fields": {"a": {"equals": {"b": [1, None]}}}, "valid": 0})
    assert nested.score('{"a": {"b": [1, null]}}', {})[0] == 1


needs_math = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="the math extra is not installed"
)


@needs_math
def test_math() -> None:
    verifier = VERIFIERS["math"].model_validate({})
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


def judge() -> Callable[[str, str], bool | None]:
    """Whether a reply equals an answer; None for an unjudged one. All calls share the processes."""
    verifier = Math()

    def same(reply: str, expected: str) -> bool | None:
        _, metrics = verifier.score(reply, {"answer": expected})
        return None if metrics["unjudged"] else bool(metrics["right"])

    return same


@needs_math
def test_replies_that_run_away_delay_no_other_and_cost_no_import(ours: Callable[[], set[int]]) -> None:
    same = judge()
    with ThreadPoolExecutor() as threads:
        late = threads.submit(same, RUNS_AWAY, "2")
        while not ours():
            time.sleep(0.01)
        assert same("2", "2") is True
        assert not late.done(), "the honest reply waited for the other"
        before = ours()
        assert late.result() is None
        many = threads.map(same, ["1", "2", "3", "4"], ["1", "1", "3", "3"])
        assert list(many) == [True, False, True, False]
        assert before <= ours() and len(ours()) <= pool.MAX_CHILDREN


@needs_math
def test_a_judge_that_nobody_asks_keeps_no_process(
    ours: Callable[[], set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is asked again without a reply being lost, whenever that is."""
    monkeypatch.setattr(pool, "IDLE_SECONDS", 0.05)
    same = judge()
    for wait in (0.0, 0.05):
        assert same("2", "2") is True
        time.sleep(wait)
    while ours():
        time.sleep(0.01)
    with pytest.raises(ValueError, match="no expression in the answer"):
        same("2", "")


@needs_math
@pytest.mark.parametrize("end", ["sys.exit()", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_no_process_outlives_the_one_that_asked(end: str) -> None:
    """Not even with a judgement under way."""
    program = f"""
import os, signal, sys, threading, time
from rookery.environments.verifiers.verifiers import Math
math = Math()
math.score("2", {{"answer": "2"}})
threading.Thread(target=math.score, args=({RUNS_AWAY!r}, {{"answer": "2"}}), daemon=True).start()
print(os.getpid(), flush=True)
sys.stdin.readline()
{end}
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        (child,) = children(int(process.stdout.readline()))
        (forked,) = children(child)
        process.stdin.write("\n")
    while any(map(runs, (child, forked))):
        time.sleep(0.01)


def test_math_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'rookery\[math\]'"):
        VERIFIERS["math"].model_validate({})


@settings(max_examples=150)
@given(text=st.one_of(st.text(max_size=80), st.text('{}[]",:0123456789.eE+-truefalsn ', max_size=80)))
def test_no_reply_breaks_a_verifier(text: str) -> None:
    row = {"answer": 5}
    for verifier in (Exact(), Number(), Number(where="any", found=0.1), Json(), Regex(pattern=r"(\d+)")):
        verdict, metrics = verifier.score(text, row)
        assert math.isfinite(verdict) and all(0 <= value <= 1 for value in metrics.values())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150)
@given(value=json_values)
def test_json_values_written_down_are_right(value: Any) -> None:
    row = {"answer": value}
    assert Json(valid=0.25).score(json.dumps({"answer": value}), row) == (1, {"valid": 1, "right/answer": 1})


def test_rows_that_cannot_be_judged_by_are_told() -> None:
    for options, row, message in [
        ({"name": "exact"}, {"prompt": "x"}, "no field 'answer'"),
        ({"name": "number"}, {"answer": "many"}, "'many', not a number"),
        ({"name": "number"}, {"answer": True}, "True, not a number"),
        ({"name": "regex", "pattern": "(.)"}, {}, "no field 'answer'"),
        ({"name": "json", "fields": {"a": "b"}}, {"answer": 1}, "no field 'b', which fields.a"),
    ]:
        with pytest.raises(ValueError, match=message):
            VERIFIERS[options["name"]].model_validate(options).check(row)
