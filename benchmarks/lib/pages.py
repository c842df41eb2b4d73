"""Figures in pages: what stands between two marks comes from the results, and is never typed.

    <!-- results: generation -->
    …
    <!-- end of results -->

A test compares what stands there with the results' files, so a page cannot say anything else than was measured."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.harness import MET, ROOT

PAGES = ("benchmarks/studies/speed.md",)
MARKED = re.compile(r"(<!-- results: (\w+) -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)
NOTHING = "Not measured yet."
VERDICT = MET | {False: f"**{MET[False]}**"}


def fill(page: Path, results: Mapping[str, dict[str, Any]], plots: Mapping[str, Path]) -> None:
    """Write what the results say between the page's marks."""
    page.write_text(filled(page, results, plots), encoding="utf-8")


def filled(page: Path, results: Mapping[str, dict[str, Any]], plots: Mapping[str, Path]) -> str:
    """The page as :func:`fill` writes it."""

    def block(match: re.Match[str]) -> str:
        inner = section(page, results.get(match[2]), plots.get(match[2]))
        return f"{match[1]}\n{inner}\n\n{match[4]}"

    return MARKED.sub(block, page.read_text(encoding="utf-8"))


def section(page: Path, result: dict[str, Any] | None, plot: Path | None) -> str:
    """A result's tables, notes and picture as text of ``page``."""
    if result is None:
        return NOTHING
    parts = [f"`{result['command']}` on {result['machine']}."]
    if plot is not None:
        up = "../" * len(page.resolve().relative_to(ROOT).parent.parts)
        parts.append(f"![{result['title']}]({up}{plot.resolve().relative_to(ROOT).as_posix()})")
    parts += ["\n".join(medians(result))] if result["rows"] else []
    parts += tables(result)
    if result["verdicts"]:
        told = [[v["target"], v["measured"], VERDICT[v["met"]], v["why"]] for v in result["verdicts"]]
        parts.append("\n".join(markdown(["expected", "measured", "", ""], told)))
    return "\n\n".join([*parts, *result["notes"]])


def medians(result: dict[str, Any]) -> list[str]:
    """The lines of the table of its rows: medians, ranges, runs."""
    cells = []
    for row in result["rows"]:
        values = row["values"]
        spread = f"{number(min(values))} to {number(max(values))}" if len(values) > 1 else ""
        median = f"{number(statistics.median(values))} {row['unit']}"
        cells.append([row["what"], median, spread, str(len(values)), row["note"]])
    return markdown(["what", "median", "range", "runs", ""], cells)


def tables(result: dict[str, Any]) -> list[str]:
    """The tables that a result holds beside its rows."""
    return [
        f"**{one['title']}**\n\n"
        + "\n".join(markdown(one["head"], [[shown(value) for value in row] for row in one["rows"]]))
        for one in result["data"].get("tables", ())
        if one["rows"]
    ]


def shown(value: float | str | None) -> str:
    """A table's cell."""
    if value is None:
        return ""
    return value if isinstance(value, str) else number(value)


def number(value: float) -> str:
    """Three digits, or all of a large number."""
    return f"{value:,.0f}" if abs(value) >= 1000 or isinstance(value, int) else f"{value:.3g}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table's lines."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in head) + " |", "|" + " --- |" * len(head)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
