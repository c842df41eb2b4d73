"""Measures of hours, in pieces: every finished piece (a *cell*) is written at once, and a second start goes on with
what is missing.

The cells lie in the result's own file, so rows, verdicts and tables are always those of the cells that are there. Cells
of another machine or of another plan are never mixed with new ones. Another machine's stay where they are
(``harness.ResultFolders``); with those of another plan the start is refused, unless `--discard` drops them. Each cell
has its day and its commit; the result has those of the oldest, and a note names the others.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.lib.harness import Result, ResultFolders, commit

Cell = dict[str, Any]
"""The figures of one piece: JSON."""


class Cells:
    """``figures(cells)`` makes the result from whatever cells there are, also from none."""

    def __init__(
        self,
        figures: Callable[[Mapping[str, Cell]], Result],
        plan: Mapping[str, Any],
        *,
        discard: bool = False,
        folders: ResultFolders | None = None,
    ) -> None:
        """``plan`` holds what all cells share, as JSON. ``discard`` drops the cells there. The result is in
        ``folders``, or the repository's. Raises ``SystemExit`` where cells are kept and of another plan."""
        self._figures = figures
        self._plan = dict(plan)
        self._folders = folders or ResultFolders()
        self._path = self._folders.path(figures({}).name)
        self.cells: dict[str, Cell] = {}
        stored = self._stored()
        if stored is not None and not discard:
            there, here = stored["data"]["plan"], json.loads(json.dumps(self._plan))
            if there != here:
                told = f"{self._path.name} has cells of another plan: {there}, not {here}"
                raise SystemExit(f"{told}; --discard drops them")
            self.cells = {
                key: {"date": stored["date"], "commit": stored["commit"], **cell}
                for key, cell in stored["data"]["cells"].items()
            }
        else:
            self.result().save(self._folders)  # a run that continues from here is held to this plan

    def _stored(self) -> dict[str, Any] | None:
        """This machine's cells, if there are any."""
        if not self._path.exists():
            return None
        content: dict[str, Any] = json.loads(self._path.read_text())
        return content if content["machine"] == self._folders.machine else None

    def measure(self, key: str, run: Callable[[], Cell]) -> Cell:
        """The cell ``key``: as it is stored, or measured now and stored."""
        if key not in self.cells:
            print(f"{key} …", flush=True)
            began = time.perf_counter()
            cell = run()
            self.put(key, {**cell, "took": time.perf_counter() - began})
        return self.cells[key]

    def put(self, key: str, cell: Cell) -> None:
        """Store a cell; ``took``, if it is there, is how many seconds it took."""
        self.cells[key] = {**cell, "date": time.strftime("%Y-%m-%d"), "commit": commit()}
        self.result().save(self._folders)
        print(f"{key}: {cell['took']:.0f} s" if "took" in cell else key, flush=True)

    def result(self) -> Result:
        """Of the cells so far."""
        result = self._figures(self.cells)
        result.data |= {"plan": self._plan, "cells": self.cells}
        if self.cells:
            result.date, result.commit = next((cell["date"], cell["commit"]) for cell in self.cells.values())
        later = Counter(cell["commit"] for cell in self.cells.values() if cell["commit"] != result.commit)
        if later:
            named = ", ".join(f"{number} of {commit}" for commit, number in later.items())
            result.notes.append(f"Of the {len(self.cells)} cells, {named}; the others of {result.commit}.")
        return result

    def tell(self) -> None:
        """Print what the cells say."""
        result = self.result()
        for line in (*result.rows, *result.verdicts, *result.notes):
            print(f"  {line}")


def table(title: str, head: list[str], rows: list[list[Any]]) -> dict[str, Any]:
    """A table for :attr:`Result.data` ``["tables"]``: cells are numbers, texts, or None for what was not measured."""
    return {"title": title, "head": head, "rows": rows}
