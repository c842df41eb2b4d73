"""A test does not depend on which thread or process is quicker: it waits for a state, and bounds the clock's time only
far above what a machine takes that is busy with others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

LEAST_SECONDS = 20.0
"""Of an upper bound. What is wrong takes longer, or has no end; else a test counts work, or moves a clock itself."""

CLOCKS = ("monotonic()", "perf_counter()")

REQUESTS = re.compile(r"httpx\.(get|post|put|patch|delete|head|options|request|stream|Client|AsyncClient)")
"""Calls of httpx, which waits five seconds for an answer unless it is given a time."""


def bounds(source: str) -> Iterator[tuple[int, float]]:
    """The line and the seconds of each upper bound on the clock's time that a text asserts as a number."""
    for node in ast.walk(ast.parse(source)) if any(clock in source for clock in CLOCKS) else ():
        for compared in ast.walk(node.test) if isinstance(node, ast.Assert) else ():
            if not isinstance(compared, ast.Compare):
                continue
            sides = [compared.left, *compared.comparators]
            for left, operator, right in zip(sides, compared.ops, sides[1:], strict=False):
                if isinstance(operator, ast.Gt | ast.GtE):
                    left, right = right, left
                passed = isinstance(left, ast.BinOp) and any(clock in ast.unparse(left) for clock in CLOCKS)
                if passed and not any(isinstance(part, ast.Name) for part in ast.walk(right)):
                    yield compared.lineno, float(eval(ast.unparse(right)))


def test_no_test_bounds_the_time_of_the_clock_closely() -> None:
    found = {
        f"{path.relative_to(TESTS)}:{line}: {seconds:g} s"
        for path in TESTS.rglob("*.py")
        for line, seconds in bounds(path.read_text(encoding="utf-8"))
        if seconds < LEAST_SECONDS
    }
    assert found == set()


def impatient(source: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each request that waits as long as httpx does by default, and of each wait for a time
    instead of an event of the page."""
    for node in ast.walk(ast.parse(source)) if "httpx." in source or "wait_for_timeout" in source else ():
        if isinstance(node, ast.Call):
            called, named = ast.unparse(node.func), {keyword.arg for keyword in node.keywords}
            short = REQUESTS.fullmatch(called) and not named & {"timeout", "transport", None}
            if short or called.endswith(".wait_for_timeout"):
                yield node.lineno, called


def test_no_test_takes_a_short_time_for_the_end_of_a_wait() -> None:
    found = {
        f"{path.relative_to(TESTS)}:{line}: {text}"
        for path in TESTS.rglob("*.py")
        for line, text in impatient(path.read_text(encoding="utf-8"))
    }
    assert found == set()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("httpx.get(url)", ["httpx.get"]),
        ("httpx.get(url, timeout=60)", []),
        ("with httpx.Client(base_url=url) as http: pass", ["httpx.Client"]),
        ("httpx.AsyncClient(transport=routes)", []),
        ("httpx.Client(**given)", []),
        ("page.wait_for_timeout(300)", ["page.wait_for_timeout"]),
    ],
)
def test_short_waits_are_found(line: str, text: list[str]) -> None:
    assert [found for _, found in impatient(line)] == text


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        ("assert time.monotonic() - began < 3 * 0.4 + 1", [2.2]),
        ("assert 5 > perf_counter() - began and done", [5.0]),
        ("assert 1.0 < time.monotonic() - began < 60", [60.0]),
        ("assert time.monotonic() - began >= 2", []),
        ("assert time.thread_time() - began < 1", []),
        ("assert time.monotonic() - began < HOLD_SECONDS / 2", []),
    ],
)
def test_upper_bounds_are_found(line: str, seconds: list[float]) -> None:
    assert [found for _, found in bounds(line)] == pytest.approx(seconds)
