"""``RESULTS.md`` from the files in ``results/``: one section per measure, verdicts first; the pictures, and the figures
of pages elsewhere. No figure is typed. Results of another machine (``harness.LOCAL``) make a page of their own, beside
them, and leave the committed pages alone; those kept in ``results/other`` stand at the end."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.jobs import agentic_figures, asynchrony_figures, curve_figures, lag_figures
from benchmarks.lib import pages
from benchmarks.lib.harness import HERE, LOCAL, PUBLISH, RESULTS, ROOT, WORK, write_result
from benchmarks.lib.pages import VERDICT, markdown
from benchmarks.lib.plots import draw

ORDER = (
    "generation", "speculation", "multiplex", "spinning", "training", "grpo_step", "curve", "agentic", "asynchrony",
    "lag_study", "memory", "service_floor", "tinker_latency", "preemption_kills", "preemption_training",
    "preemption_overhead", "preemption_joining", "preemption_restart", "seeding", "serving", "gpu",
)  # fmt: skip
"""What comes first; the others follow by name, simulated ones last."""

HEADER = ["measure", "target", "measured", ""]
HEAD = """# Results

Made by `python -m benchmarks.lib.report` from `benchmarks/results/*.json`. Every figure is the median of the stated
repeats, with their range; ratios are within one run. Simulated figures stand apart and say so.
"""

OTHERS = """
# Other machines

What was measured on another machine than the one above, for the cells that are missing there.
"""

UNMEASURED_GPU = """
## GPU

Not measured yet: no machine with a GPU was at hand. `python -m benchmarks.micro.gpu` on one checks Rookery there
against float32 on the CPU, measures it beside transformers and PEFT, and this section is made from what it writes.
"""


FIGURES = {
    "curve": curve_figures.figures,
    "agentic": agentic_figures.figures,
    "asynchrony": asynchrony_figures.figures,
    "lag_study": lag_figures.figures,
}
"""What makes rows, verdicts and tables of a measure's cells."""


def main() -> None:
    local = sorted(LOCAL.glob("*.json")) if not os.environ.get(PUBLISH) else []
    found = [_read(path) for path in local or sorted(RESULTS.glob("*.json"))]
    found.sort(key=lambda r: (r["simulated"], ORDER.index(r["name"]) if r["name"] in ORDER else len(ORDER), r["name"]))
    by_name = {result["name"]: result for result in found}
    plots = draw(by_name) if not local else {}
    parts = [HEAD, "## Targets\n", *markdown(HEADER, _verdicts(found))]
    for result in found:
        parts += _section(result, plots.get(result["name"]))
    if "gpu" not in by_name and not local:
        parts.append(UNMEASURED_GPU)
    others = [_read(path) for path in sorted((RESULTS / "other").glob("*.json"))] if not local else []
    parts += [OTHERS, *markdown(HEADER, _verdicts(others))] if others else []
    for result in others:
        parts += _section(result, None)
    path = (WORK if local else HERE) / "RESULTS.md"
    path.write_text("\n".join(parts) + "\n")
    for page in pages.PAGES if not local else ():
        pages.fill(ROOT / page, by_name, plots)
    print(f"wrote {path}: {len(found)} measures")


def _read(path: Path) -> dict[str, Any]:
    """A result. What is said of cells is said anew, and written down, by the formulas as they are now."""
    result: dict[str, Any] = json.loads(path.read_text())
    if result["name"] in FIGURES:
        said = asdict(FIGURES[result["name"]](result["data"]["cells"]))
        kept = {name: result["data"][name] for name in ("plan", "cells")}
        told = {name: said[name] for name in ("title", "rows", "verdicts", "notes")}
        result |= {**told, "data": {**said["data"], **kept}}
        write_result(path, result)
    return result


def _verdicts(found: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [result["name"], v["target"], v["measured"], f"{VERDICT[v['met']]}{'; ' + v['why'] if v['why'] else ''}"]
        for result in found
        for v in result["verdicts"]
    ]


def _section(result: dict[str, Any], plot: Path | None) -> list[str]:
    label = "Simulated: " if result["simulated"] else ""
    versions = ", ".join(f"{name} {release}" for name, release in sorted(result["versions"].items()))
    parts = [f"\n## {label}{result['title']}\n", f"`{result['command']}` on {result['machine']}; {versions}.\n"]
    if plot is not None:
        parts.append(f"![{result['title']}]({plot.relative_to(HERE).as_posix()})\n")
    if result["rows"]:
        parts += pages.medians(result)
    parts += [f"\n{lines}" for lines in [*pages.tables(result), *result["notes"]]]
    return parts


if __name__ == "__main__":
    main()
