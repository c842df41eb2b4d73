"""Full-text search in a corpus of a tenant, for the tool ``search``: a JSONL file of texts, ranked by BM25.

The corpus is indexed and asked in a child process (:mod:`rookery.environments.search_process`) that writes nothing and
opens nothing once the index is built.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rookery.environments.jsonl_rows import scan
from rookery.environments.messages import shown
from rookery.environments.verifiers.pool import VerifierPool
from rookery.environments.verifiers.texts import is_blank
from rookery.errors import UserError, installs

CORPUS_BYTES, CORPUS_TEXTS = 64 << 20, 200_000
"""Largest corpus: its index is held in memory, about ten times as large, by each job that uses it."""

QUERY = 1_000
"""Characters of a query."""

TEXT_FIELDS = ("title", "text")
"""Fields of a row that are searched and shown."""


def require_search() -> None:
    """Raises :class:`UserError` where the library is not installed."""
    if importlib.util.find_spec("bm25s") is None:
        raise UserError(f"tool search: needs the search extra; run: {installs('search')}")


def check_text(row: Any, where: str) -> None:
    """Raises :class:`UserError` unless ``row`` is one of a corpus."""
    if not isinstance(row, dict):
        raise UserError(f'{where} is {type(row).__name__}, not an object; write {{"text": …}}')
    text, title = row.get("text"), row.get("title", "")
    if not isinstance(text, str) or is_blank(text):
        raise UserError(f"{where}: text is {shown(text)}; give a text that is not empty")
    if not isinstance(title, str):
        raise UserError(f"{where}: title is {shown(title)}; give a text")


def texts_of(path: Path) -> Iterator[str]:
    """The texts of a corpus, each with its title. Raises :class:`UserError` as ``scan`` does, and for a corpus that is
    too large."""
    size = path.stat().st_size
    if size > CORPUS_BYTES:
        raise UserError(f"tool search: index: it has {size} bytes, allowed: at most {CORPUS_BYTES}; give a smaller one")
    with path.open("rb") as file:
        for _, row in scan(file, "tool search: index", rows=CORPUS_TEXTS, check=check_text):
            yield "\n".join(row[name] for name in TEXT_FIELDS if row.get(name))


class SearchIndex:
    """A corpus that is searched. Thread-safe; blocks."""

    def __init__(self, path: str) -> None:
        """Nothing starts before the first query."""
        self._pool = VerifierPool("search", path, module="rookery.environments.search_process", children=1)

    def find(self, query: str, most: int) -> list[str]:
        """At most so many texts with a word of the query, the best first. Raises as
        :meth:`~rookery.environments.verifiers.pool.VerifierPool.score` does."""
        found: list[str] = self._pool.score({"query": query[:QUERY], "most": most})
        return found
