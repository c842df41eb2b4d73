"""Replies that repeat the question instead of its answer."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from rookery.environments.verifiers.echoes import repeats_question
from rookery.environments.verifiers.expressions import gold_latex
from rookery.environments.verifiers.verifiers import VERIFIERS

EQUAL: list[tuple[Any, str, str, bool]] = [
    ("What is 17 * 23?", "391", r"\boxed{17 \times 23}", True),
    ("What is 17 * 23?", "391", r"\boxed{(17)*(23)}", True),
    ("What is 17 * 23?", "391", "17*23", True),
    ("What is 17 * 23?", "391", "The answer is 17 * 23.", True),
    ("What is 17 * 23?", "391", r"It is $17 \cdot 23$", True),
    ("What is 17 * 23?", "391", r"\boxed{391}", False),
    ("What is 17 * 23?", "391", "17 * 23 = 391", False),
    ("What is 17 * 23?", "391", r"\boxed{17*23=391}", False),
    (
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "17*23?"}],
        "391",
        r"\boxed{17*23}",
        True,
    ),
    (r"Expand $(x-1)(x+1)$.", "x^2-1", r"\boxed{(x-1)(x+1)}", True),
    (r"Expand $(x-1)(x+1)$.", "x^2-1", r"\boxed{x^2-1}", False),
    (r"Factor $x^2-1$.", "(x-1)(x+1)", r"\boxed{x² - 1}", True),
    (r"Factor $x^2-1$.", "(x-1)(x+1)", r"\boxed{(x+1)(x-1)}", False),
    (r"Simplify $\sqrt{8}$", r"2\sqrt2", r"\boxed{√8}", True),
    ("Simplify 6/8", "3/4", r"\boxed{\frac{6}{8}}", True),
    ("Simplify 6/8", "3/4", r"\boxed{3/4}", False),
    ("Simplify 6:4", "3:2", r"\boxed{6:4}", True),
    ("Solve x+2=5", "x=3", r"\boxed{x+2=5}", True),
    ("Solve x+2=5", "x=3", r"\boxed{x=3}", False),
    ("Solve 2x > 6", "x>3", r"\boxed{2x>6}", True),
    (r"Compute $\int_0^1 x\,dx$", r"\frac12", r"\boxed{\int_0^1 x \,dx}", True),
    ("What is 5!?", "120", "5!", True),
    ("What is 2^{10}?", "1024", r"\boxed{2^10}", True),
    ("What is 10/2?", "5", r"\boxed{10/2}", True),
    ("What is 3 - 5?", "-2", "3-5", True),
    ("Heads has the probability 1/2. What is it?", "0.5", r"\boxed{1/2}", False),
    ("Which is 8: 2^3 or 3^2?", "2^3", r"\boxed{2^3}", False),
    ("Let S = n(n+1)/2. What is 1+...+n?", r"\frac{n(n+1)}{2}", r"\boxed{n(n+1)/2}", False),
    ("f(x)=2x. What is f(x)?", "2x", r"\boxed{f(x)=2x}", False),
    ("Tom has 5 apples.", "5", r"\boxed{5 apples}", False),
    ("Is f increasing or decreasing?", r"\text{increasing}", r"\boxed{increasing}", False),
    ("Is it acute or right-angled?", "right-angled", r"\boxed{\text{right-angled}}", False),
    (r"What is $\log_2 8$?", "3", r"\boxed{\log_2 8}", True),
    ("x = 5 and y = 6.", "5", r"\boxed{x=5}", False),
    ("It is -5 degrees.", "-5", r"\boxed{-5}", False),
    ("Between 3-5, which is the largest?", "5", r"\boxed{5}", False),
    (None, "391", r"\boxed{17*23}", False),
    ("Convert 5 km to meters.", "5000 m", r"\boxed{5\text{ km}}", True),
    ("Convert $5\\text{ km}$ to meters.", "5000 meters", r"\boxed{5 \text{ kilometers}}", True),
    ("Convert 5 km to meters.", "5000 m", "The answer is 5 km.", True),
    ("Convert 5 km to meters.", "5000 m", r"\boxed{5000\text{ m}}", False),
    ("Convert 5 km to meters.", "5000 m", r"\boxed{500000\text{ cm}}", False),
    ("Convert 15 km to meters, not 5 miles.", "5000 m", r"\boxed{5\text{ km}}", False),
    ("A rope has 5 m. How long is it?", "5 m", r"\boxed{5\text{ m}}", False),
    ("How many minutes are 2 hours?", "120 minutes", r"\boxed{2\text{ hours}}", True),
    ("How many minutes are 2 hours?", "120", r"\boxed{2\text{ hours}}", False),
]
"""A prompt, its answer, a reply of the same value, and whether it only repeats the prompt."""


@pytest.mark.parametrize(("prompt", "answer", "reply", "repeats"), EQUAL)
def test_a_reply_that_repeats_the_question_is_no_answer(prompt: Any, answer: str, reply: str, repeats: bool) -> None:
    row = {"messages" if isinstance(prompt, list) else "prompt": prompt}
    assert repeats_question(reply, gold_latex(answer, "answer"), row) is repeats


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="the math extra is not installed")
def test_the_verifier_of_mathematics_gives_nothing_for_the_question() -> None:
    """Which is equal to the answer, as a row without the prompt shows."""
    verifier = VERIFIERS["math"].model_validate({})
    for prompt, answer, question, solved in (
        ("What is 17 * 23?", "391", r"\boxed{17 \cdot 23}", r"\boxed{391}"),
        ("Factor $x^2-1$.", "(x-1)(x+1)", r"\boxed{x^2-1}", r"\boxed{(x+1)(x-1)}"),
        ("What is 17 * 23?", "391", r"<think>391</think> \boxed{17*23}", r"<think>17*23</think> \boxed{391}"),
    ):
        row = {"prompt": prompt, "answer": answer}
        assert verifier.score(question, {"answer": answer})[0] == 1
        assert verifier.score(question, row) == (0, {"right": 0, "unjudged": 0})
        assert verifier.score(solved, row)[0] == 1
