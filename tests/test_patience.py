"""A test does not depend on which thread or process is quicker: it waits for a state, and bounds the clock's time only
far above what a machine takes that is busy with others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

LEAST_SECONDS = 20.0
"""Of an upper bound. What is wrong takes longer, or has no end; else a test counts work, or moves a clock itself."""

CLOCKS = ("monotonic()", "perf_counter()")


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
