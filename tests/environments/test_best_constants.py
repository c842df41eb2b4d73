"""The fixed replies of an environment's ``best_constant``, as a host sends them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from rookery import BestConstant
from rookery.environments.best_constants import constants_by_policy
from rookery.environments.episodes import describe_error
from rookery.protocol import MOST_POLICIES


def best(reply: Any = "yes", reward: Any = 0.5, prompts: Any = 4) -> BestConstant:
    return BestConstant(reply=reply, reward=reward, prompts=prompts)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {}),
        ({}, {}),
        (best(), {"": best()}),
        ({"solver": best(), "judge": best("no", -1.0)}, {"solver": best(), "judge": best("no", -1.0)}),
        (best("yes", np.float32(0.5), np.int64(4)), {"": best()}),
        (best("yes", 1), {"": best("yes", 1.0)}),
        ({str(n): best() for n in range(MOST_POLICIES)}, {str(n): best() for n in range(MOST_POLICIES)}),
        (best("x" * 10_000), {"": best("x" * 199 + "…")}),
    ],
)
def test_constants_are_known_by_policy(given: Any, expected: Any) -> None:
    found = constants_by_policy(given)
    assert found == expected
    msgspec.msgpack.encode(found)


@pytest.mark.parametrize(
    "given",
    [
        "yes",
        ("yes", 0.5),
        [best()],
        {"solver": 0.5},
        {"solver": None},
        {1: best()},
        {str(n): best() for n in range(MOST_POLICIES + 1)},
        {"half\ud800": best()},
        best("half\ud800"),
        best(3),
        best(reward=float("nan")),
        best(reward=float("inf")),
        best(reward="much"),
        best(reward=None),
        best(prompts=-1),
        best(prompts=1.5),
    ],
)
def test_a_result_of_another_form_is_refused_in_one_line(given: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as refused:
        constants_by_policy(given)
    line = describe_error(refused.value)
    assert line.isprintable() and len(line) < 500
