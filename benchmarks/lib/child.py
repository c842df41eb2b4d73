"""The child's end of a contender (``contender.py``): one JSON object per line in, one out.

Only the standard library is used: a peer's environment has no Rookery.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(about: dict[str, Any], run: Callable[..., dict[str, Any]]) -> None:
    """``about`` names versions; ``run(**task)`` is called for each line."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    print(json.dumps(about), file=out, flush=True)
    for line in sys.stdin:
        try:
            answer = run(**json.loads(line))
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        print(json.dumps(answer), file=out, flush=True)
