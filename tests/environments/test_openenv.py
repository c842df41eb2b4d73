from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.environments.builtins import find
from rookery.environments.openenv import fenced_texts
from rookery.errors import UserError


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "exactly one of url and urls"),
        ({"url": "http://8.8.8.8", "urls": ["http://8.8.8.8"], "resets": [{}]}, "exactly one of url and urls"),
        ({"url": "http://8.8.8.8"}, "exactly one of resets and split"),
        ({"url": "http://8.8.8.8", "resets": [{}], "split": "train"}, "exactly one of resets and split"),
        ({"url": "http://8.8.8.8", "resets": [{}], "template": "x"}, "template contains {observation}"),
        ({"url": "http://8.8.8.8", "resets": [3]}, "environment.resets.0"),
        ({"url": "ftp://8.8.8.8", "resets": [{}]}, "environment.url: given 'ftp://8.8.8.8'"),
        ({"url": "http://127.0.0.1:1", "resets": [{}]}, "environment.url: 127.0.0.1 is 127.0.0.1, which is not"),
        ({"urls": ["http://169.254.169.254"], "resets": [{}]}, "environment.urls.0: 169.254.169.254 is"),
        ({"url": "http://8.8.8.8", "resets": [{}], "color": 1}, "environment.color"),
    ],
)
def test_options_that_name_no_server_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        find("openenv").validate_options(options)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["```", "json", " ", "\t", "\n", "x", "`"]), max_size=14).map("".join))
def test_fenced_blocks_are_found_as_by_one_pattern(reply: str) -> None:
    assert fenced_texts(reply) == re.findall(r"(?s)```(?:json)?[ \t]*\n(.*?)\n[ \t]*```", reply)


@pytest.mark.parametrize("part", ["x```\n", "```\n\t", "```\t", "\n\t\t", "```json\n{}\n```\n", "`"])
def test_fenced_blocks_are_found_in_linear_time(part: str) -> None:
    began = time.process_time()
    fenced_texts(part * (200_000 // len(part)))
    assert time.process_time() - began < 2  # quadratic time takes a minute
