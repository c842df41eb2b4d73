"""The fixed reply that earns most: figures of the examples, and a search over all replies made of the answers."""

from __future__ import annotations

import importlib.util
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.environments.builtins import BUILTINS
from rookery.environments.verifiers.constants import ROWS_SCORED, SHOWN, best_of, example
from rookery.environments.verifiers.verifiers import VERIFIERS
from rookery.examples import contacts

EXAMPLES = Path(__file__).parents[3] / "examples"


def constant(verifier: dict[str, Any], rows: list[dict[str, Any]]) -> tuple[str, float] | None:
    found = VERIFIERS[verifier["name"]].model_validate(verifier).best_constant(rows)
    return None if found is None else (found.reply, found.reward)


def answers(*values: Any) -> list[dict[str, Any]]:
    return [{"answer": value} for value in values]


def test_the_figures_of_the_examples() -> None:
    options = {"path": str(EXAMPLES / "sums.jsonl"), "eval_last": 64}
    sums = BUILTINS["jsonl"]({**options, "verifier": {"name": "number", "where": "only", "found": 0.1}})
    found = sums.best_constant(list(sums.prompts("eval")))
    assert found is not None and (found.reward, found.prompts) == (0.15625, 64)
    people = BUILTINS["jsonl"]({key: value for key, value in contacts.TASK.environment.items() if key != "id"})
    prompts = list(people.prompts("eval"))
    found = people.best_constant(prompts)
    assert found is not None and found.reward == pytest.approx(contacts.best_constant(prompts))
    assert people.best_constant([]) is None


@pytest.mark.parametrize(
    ("verifier", "rows", "expected"),
    [
        ({"name": "exact"}, answers("yes", "no", "yes"), ("yes", 2 / 3)),
        ({"name": "exact", "right": 2, "wrong": -1}, answers("a", "b"), ("a", 0.5)),
        ({"name": "exact", "right": -1, "wrong": 1}, answers("a", "a"), ("", 1)),
        ({"name": "exact"}, answers(12, 12.0, 3), ("12", 2 / 3)),
        ({"name": "exact", "after": "</think>", "tag": "a"}, answers("x"), ("</think><a>x</a>", 1)),
        ({"name": "number"}, answers(1e-5, 1e-5, 7), ("0.00001", 2 / 3)),
        ({"name": "number", "tolerance": 1}, answers(1, 2, 3, 9), ("2", 3 / 4)),
        ({"name": "number", "found": 0.5}, answers(1, 2, 3, 1), ("1", 3 / 4)),
        ({"name": "number", "where": "any"}, answers(1, 2, 3), ("1; 2; 3", 1)),
        ({"name": "regex", "pattern": r"^Answer: (\d+)$"}, answers(7, 7, "8"), ("Answer: 7", 2 / 3)),
        ({"name": "regex", "pattern": r"^Answer: (\d+)$", "found": 0.2}, answers(7, 7, "no"), ("Answer: 7", 2.2 / 3)),
        ({"name": "regex", "pattern": "yes"}, answers(1, 2), ("yes", 1)),
        ({"name": "regex", "pattern": r"(?=.*a)(.*)"}, answers("b", "b"), None),
        ({"name": "regex", "pattern": r"(\d)(\d)"}, answers(1), None),
        ({"name": "json", "valid": 0.2}, answers(5, 5.0, "5"), ('{"answer": 5}', 0.2 + 0.8 * 2 / 3)),
        ({"name": "json", "valid": 0, "fields": {"a": {"from": "answer", "tolerance": 1}}}, answers(1, 3, 9),
         ('{"a": 2.0}', 2 / 3)),
    ],
)  # fmt: skip
def test_constants_of_verifiers(verifier: dict[str, Any], rows: list[Any], expected: tuple[str, float] | None) -> None:
    found = constant(verifier, rows)
    assert found == (None if expected is None else (expected[0], pytest.approx(expected[1])))


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="the math extra is not installed")
def test_constant_of_mathematics() -> None:
    rows = answers(12, 12.0, r"\frac{1}{2}", r"$\frac{1}{2}$", r"\boxed{\frac{1}{2}}")
    assert constant({"name": "math"}, rows) == (r"\boxed{\frac{1}{2}}", 0.6)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
    st.sampled_from([0.0, 1.0, 1.5]),
    st.sampled_from(["last", "only", "first"]),
    st.sampled_from([None, 0.25]),
)
def test_no_other_number_earns_more(golds: list[int], tolerance: float, where: str, found: float | None) -> None:
    options = {"name": "number", "tolerance": tolerance, "where": where, "found": found}
    verifier, rows = VERIFIERS["number"].model_validate(options), answers(*golds)
    best = constant(options, rows)
    assert best is not None
    reached = [statistics.fmean(verifier.score(str(quarter / 4), row)[0] for row in rows) for quarter in range(-8, 32)]
    assert best[1] == pytest.approx(max(reached))
    assert best[1] == pytest.approx(statistics.fmean(verifier.score(best[0], row)[0] for row in rows))


@given(st.lists(st.text(max_size=5).filter(str.strip), min_size=1, max_size=8), st.booleans())
def test_the_reward_is_one_that_the_reply_earns(golds: list[str], ignore_case: bool) -> None:
    verifier = VERIFIERS["exact"].model_validate({"ignore_case": ignore_case})
    rows = [row for row in answers(*golds) if verifier.first_unfit([row]) is None]
    found = verifier.best_constant(rows)
    assert (found is None) == (not rows)
    if found is not None:
        assert found.reward == statistics.fmean(verifier.score(found.reply, row)[0] for row in rows) > 0


def test_many_rows_are_sampled_and_long_replies_shortened() -> None:
    found = VERIFIERS["exact"].model_validate({}).best_constant(answers(*["x" * 1000] * (3 * ROWS_SCORED)))
    assert found is not None
    assert (found.reward, found.prompts, len(found.reply)) == (1, ROWS_SCORED, SHOWN)
    assert VERIFIERS["json"].model_validate({}).best_constant(answers({"a": [1, None]})) is not None


def test_a_pattern_without_end_delays_no_other_check() -> None:
    pattern = r"^a*a*a*a*a*a*a*a*c?(b)$"
    verifier = VERIFIERS["regex"].model_validate({"pattern": pattern})
    rows = [{"answer": "a" * 200 + "c"}] * 100
    best_of(
        [*verifier.constants(rows), ""], rows, lambda reply, row: verifier.judge(reply, row)[0], verifier.enclose, 0.5
    )
    assert json.dumps(example(pattern, 1, "b")) == '"b"'
