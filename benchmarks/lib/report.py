"""``RESULTS.md`` from the files in ``results/``: one page with what was measured, when, at which commit, on which
machine, the figure and its yardstick; the pictures; and the figures of pages elsewhere. No figure is typed. Repeats,
ranges and cells stay in the files. Results of another machine (``harness.LOCAL``) make a page of their own, and leave
the committed pages alone; of those in ``results/other`` the page has what the first machine did not measure."""

from __future__ import annotations

import json
import os
import re
import string
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.jobs import agentic_figures
from benchmarks.lib import pages
from benchmarks.lib.harness import HERE, LOCAL, PUBLISH, RESULTS, ROOT, WORK, Result, write_result
from benchmarks.lib.pages import VERDICT, markdown, number
from benchmarks.lib.plots import draw
from benchmarks.scale import seer, tenants

ORDER = (
    "generation", "speculation", "engines", "lanes", "multiplex", "training", "other_families", "grpo_step", "agentic",
    "serving", "machines_workers", "machines_ray", "machines_fsdp", "gpu", "tenants", "seer", "serving_simulation",
    "jigsaw",
)  # fmt: skip
"""The first measures; others follow by name, simulated ones last."""

ROWS = {
    "engines": ("native: a step", "vllm: a step"),
    "machines_workers": ("1 workers: 4 jobs", "4 workers: 4 jobs"),
    "machines_ray": ("its worker serves after", "rookery worker, started by hand, serves after"),
    "machines_fsdp": ("LoRA of rank 16, 1", "LoRA of rank 16, 2", "all parameters, 1", "all parameters, 2"),
}
"""Rows that the page shows too, by the beginning of their names: of results without a yardstick."""

HIDDEN = {
    "speculation": r"tokens per forward|budget",
    "agentic": r"fill the worker|at staleness 0|latency 0.5 s",
    "tenants": r"saturation|, staleness 0|latency 2 s",
    "callers": r"^C\d",
    "weights": r"^simulated|kill -9|the star|the trainer sends|one receiver of 5 MB",
    "xrouter": r"above constants|cost falls",
    "seer": r"short of memory|oracle|texts equal|rho 0|sigma 0|wrong estimate|draft|no fixed length",
    "serving_simulation": r"costs|saturated|freeze|candidate|without the cut",
    "jigsaw": r"regret|lengths double|inactive|constructed|assumed",
}
"""Verdicts that stay in the files: of parts, or of how a simulation was checked."""

AGAIN = {
    "chaos in virtual time: 1,000 workers, 200 jobs, 100,000 preemptions": "make chaos-at-scale",
    "the controller's time per event as workers and jobs grow": "make controller-scaling",
    "lost workers, restarts, joining workers, seeding": "make bench-preemption",
    "Tinker calls compared with SkyRL's server; log-probabilities of sampling and training": "make bench-tinker",
    "the Tinker cookbook's arithmetic": "make cookbook",
    "a verifier that begins slowly, next to its solver": "python examples/solver_verifier.py",
    "availability traces": "python -m benchmarks.scale.simulation",
    "a simulation with the shipped worker's I/O side": "python -m benchmarks.scale.shipped_worker",
    "any GPU": "make bench-gpu",
}
"""The measures without a figure, because their code changed since, and the commands that measure them."""

HEAD = """# Results

Made by `python -m benchmarks.lib.report` from `benchmarks/results/*.json`, which hold all repeats. Figures are medians,
ratios are within one run. Everything is SmolLM2-135M-Instruct in bf16 on two CPU cores, unless a line says otherwise.
*Measured on* gives the day, the commit and the machine. A line says what was true then: `git log COMMIT..` lists what
has changed since.
"""
SIMULATED = """
## Simulated

Virtual time, modelled workers. These lines compare policies with each other; they measure no machine.
"""
MISSING = """
## To be measured again

These have no figure here: the code has changed since they were measured, or the machine was not quiet.
"""
PICTURES = {
    "speed": "Compared with vLLM, PEFT and TRL",
    "agentic": "Small agentic jobs of many tenants",
    "tenants": "The same jobs, simulated, up to 256 tenants",
}

FIGURES: dict[str, Callable[..., Result]] = {
    "agentic": agentic_figures.figures,
    "seer": seer.figures,
    "tenants": tenants.figures,
}
"""The makers of rows, verdicts and tables of a measure's cells."""


def main() -> None:
    local = sorted(LOCAL.glob("*.json")) if not os.environ.get(PUBLISH) else []
    found = [read(path) for path in local or sorted(RESULTS.glob("*.json"))]
    others = [read(path) for path in sorted((RESULTS / "other").glob("*.json"))] if not local else []
    by_name = {result["name"]: result for result in found}
    plots = draw(by_name) if not local else {}
    path = (WORK if local else HERE) / "RESULTS.md"
    path.write_text(page([*found, *others], plots))
    for name in pages.PAGES if not local else ():
        pages.fill(ROOT / name, by_name, plots)
    print(f"wrote {path}: {len(found)} measures")


def page(found: list[dict[str, Any]], plots: dict[str, Path]) -> str:
    """The text of ``RESULTS.md``."""
    found = sorted(
        found, key=lambda r: (r["simulated"], ORDER.index(r["name"]) if r["name"] in ORDER else len(ORDER), r["name"])
    )
    machines: dict[str, str] = {}
    for result in found:
        machines.setdefault(result["machine"], string.ascii_uppercase[len(machines)])
    parts = [HEAD, *markdown(["", "machine"], [[letter, name] for name, letter in machines.items()])]
    for simulated, head in ((False, "\n## Measured\n"), (True, SIMULATED)):
        shown: set[tuple[str, str]] = set()
        lines = [line for one in found if one["simulated"] is simulated for line in lines_of(one, machines, shown)]
        parts += [head, *markdown(["measure", "yardstick", "figure", "", "measured on"], lines)]
        for name, title in PICTURES.items():
            if name in plots and (name == "tenants") is simulated:
                parts.append(f"\n![{title}]({plots[name].relative_to(HERE).as_posix()})")
    parts += [MISSING, *markdown(["measure", "command"], [[what, how and f"`{how}`"] for what, how in AGAIN.items()])]
    return "\n".join(parts) + "\n"


def read(path: Path) -> dict[str, Any]:
    """A result. Rows and verdicts that follow from cells are computed again, by the formulas as they are now."""
    result: dict[str, Any] = json.loads(path.read_text())
    if result["name"] in FIGURES:
        said = asdict(FIGURES[result["name"]](result["data"]["cells"]))
        kept = {name: result["data"][name] for name in ("plan", "cells")}
        made = {name: said[name] for name in ("title", "rows", "verdicts", "notes")}
        result |= {**made, "data": {**said["data"], **kept}}
        write_result(path, result)
    return result


def lines_of(result: dict[str, Any], machines: dict[str, str], shown: set[tuple[str, str]]) -> Iterable[list[str]]:
    """A line for every verdict that has a figure and is not in ``shown``, or for the rows of :data:`ROWS`."""
    origin = f"{result['date']}, {result['commit']}, {machines[result['machine']]}"
    name = f"[{result['name']}]({_file(result)})"
    for verdict in result["verdicts"]:
        key = (result["name"], verdict["target"])
        hidden = re.search(HIDDEN.get(result["name"], r"$^"), verdict["target"])
        if verdict["met"] is not None and not hidden and key not in shown:
            shown.add(key)
            why = VERDICT[verdict["met"]] + (f"; {verdict['why']}" if verdict["why"] else "")
            yield [name, verdict["target"], verdict["measured"], why, origin]
            name = ""
    for row in result["rows"] if result["name"] in ROWS else ():
        if row["what"].startswith(ROWS[result["name"]]):
            values = sorted(row["values"])
            figure = f"{number(values[len(values) // 2])} {row['unit']}"
            yield [name, row["what"], figure, row["note"], origin]
            name = ""


def _file(result: dict[str, Any]) -> str:
    path = RESULTS / f"{result['name']}.json"
    ours = path.exists() and json.loads(path.read_text())["machine"] == result["machine"]
    return f"results/{'' if ours else 'other/'}{result['name']}.json"


if __name__ == "__main__":
    main()
