"""Rows of datasets, as the service reads and checks them."""

from __future__ import annotations

import io
from typing import Any

from rookery.environments.jsonl import check_row
from rookery.environments.jsonl_rows import scan


def read_jsonl(content: bytes) -> list[dict[str, Any]]:
    """The rows of a JSONL file with this content. Raises :class:`~rookery.errors.UserError` for one that is refused."""
    return [row for _, row in scan(io.BytesIO(content), "dataset", check=check_row)]
