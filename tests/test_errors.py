"""Texts of errors and other lines for users."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from rookery.errors import count_of


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 steps"), (1, "1 step"), (1.0, "1 step"), (2, "2 steps"), (1.5, "1.5 steps")]
)
def test_one_thing_has_the_singular(count: float, shown: str) -> None:
    assert count_of(count, "step") == shown


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (("reply",), "2 replies"),
        (("key",), "2 keys"),
        (("batch",), "2 batches"),
        (("row is", "rows are"), "2 rows are"),
    ],
)
def test_several_things_have_the_plural(given: tuple[str, ...], shown: str) -> None:
    assert count_of(2, *given) == shown and count_of(math.inf, *given) == shown.replace("2", "inf")
    assert count_of(1234, "token", form=",") == "1,234 tokens"


def test_lines_for_which_standard_error_has_no_room_are_left_out() -> None:
    program = "from rookery.errors import to_stderr; to_stderr('one', ValueError('two')); print('continued')"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("continued\n", "one\ntwo\n")
    with open("/dev/full", "w", encoding="ascii") as full:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True, check=True)
    assert done.stdout == "continued\n"
