from __future__ import annotations

from typing import Any

import pytest

from rookery.environments.builtins import find
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
