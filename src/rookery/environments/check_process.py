"""The confined process that checks environments and datasets, started by :mod:`rookery.environments.checks`."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rookery.environments.builtins import find
from rookery.environments.demonstrations import count_rows
from rookery.environments.jsonl import IndexedRows, RowFiles
from rookery.environments.rules import EnvironmentRules
from rookery.environments.verifiers.pool import serve
from rookery.errors import UserError

LOW_PRIORITY = 10
"""Niceness of checks: somebody waits for them, but not at every step."""


def prepare() -> Callable[..., dict[str, Any]]:
    """The function that answers the questions. What it needs was imported before the process is confined."""
    EnvironmentRules.from_argument(sys.argv[3]).apply()

    def work(what: str, id: str, options: dict[str, Any]) -> Any:
        match what:
            case "count":
                return count_rows(Path(options["path"]), options["row_bytes"], options["rows"])
            case "options":
                find(id).check({name: value for name, value in options.items() if value is not None})
            case "rows":
                sizes = find(id).validate_options(options)
                return asdict(sizes) if sizes is not None else None
            case "index":
                built = find(id)(options)
                assert isinstance(built, RowFiles)
                return {
                    field: base64.b64encode(rows.offsets.tobytes()).decode()
                    for field, rows in built.sources.items()
                    if isinstance(rows, IndexedRows)
                }
        return None

    def answer(what: str, options: dict[str, Any], id: str = "") -> dict[str, Any]:
        try:
            return {"result": work(what, id, options)}
        except UserError as error:
            return {"refused": str(error)}

    return answer


if __name__ == "__main__":
    serve(prepare, one_question=True, niceness=LOW_PRIORITY)
