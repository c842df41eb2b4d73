"""``RESULTS.md`` from the files in ``results/``: one page with what was measured, when, at which commit, on which
machine, the figure and its yardstick; the pictures; and the figures of pages elsewhere. No figure is typed. Repeats,
ranges and cells stay in the files. Results of another machine (``harness.LOCAL``) make a page of their own, and leave
the committed pages alone; of those in ``results/other`` the page has what the first machine did not measure."""

from __future__ import annotations

import itertools
import json
import re
import string
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.jobs import agentic_figures, serving
from benchmarks.lib import ages, pages
from benchmarks.lib.bars import JUDGED
from benchmarks.lib.harness import HERE, RESULTS, ROOT, WORK, Result, ResultFolders, Row, write_result
from benchmarks.lib.pages import VERDICT, markdown, number
from benchmarks.lib.plots import draw
from benchmarks.micro import speculation
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
    "jigsaw": r"regret|lengths double|like a GPU|uneven",
}
"""Verdicts that stay in the files while they are met: of parts, or of how a simulation was checked."""
MOST_LINES = 6
"""Of a measure on the page."""

AGAIN = {
    "chaos in virtual time: 1,000 workers, 200 jobs, 100,000 preemptions": "make chaos-at-scale",
    "the controller's time per event as workers and jobs grow": "make controller-scaling",
    "lost workers, restarts, joining workers, seeding": "make bench-preemption",
    "availability traces": "python -m benchmarks.scale.simulation",
    "any GPU": "make bench-gpu",
}
"""The measures without a figure, because their code changed since, and the commands that measure them."""

HEAD = """# Results

Made by `python -m benchmarks.lib.report` from `benchmarks/results/*.json`, which hold all repeats. Figures are medians,
ratios are within one run. Everything is SmolLM2-135M-Instruct in bf16 on two CPU cores, unless a line says otherwise.
*Measured on* gives the day, the commit and the machine; `+` means that files differed from that commit. A line says
what was true then: *code changed since* counts the later commits to the code that the measure measures (`git log
COMMIT..` lists them). A commit that is *not in this history* was measured before a rebase; there the count begins with
the commit that added the result. A measure has at most six lines: where it has more yardsticks, the last line sums up
the others. Met yardsticks of parts stay in the files; a yardstick that is not met is always here.
"""
SIMULATED = """
## Simulated

Virtual time, modelled workers. These lines compare policies with each other; they measure no machine.
"""
MISSING = """
## To be measured again

These have no figure here: they were never measured in this form, the code has changed since they were, or the machine
was not quiet.
"""
PICTURES = {
    "speed": "Compared with vLLM, PEFT and TRL",
    "agentic": "Small agentic jobs of many tenants",
    "tenants": "The same jobs, simulated, up to 256 tenants",
}

FIGURES: dict[str, Callable[..., Result]] = {
    "agentic": agentic_figures.figures,
    "seer": seer.figures,
    "serving": serving.figures,
    "speculation": speculation.figures,
    "tenants": tenants.figures,
}
"""The makers of rows, verdicts and tables of a measure's cells."""


def main() -> None:
    folders = ResultFolders()
    local = [read(path) for path in sorted(folders.local.glob("*.json"))] if not folders.publishes else []
    found, others = (local, []) if local else read_folder(folders.published)
    by_name = {result["name"]: result for result in found}
    plots = draw(by_name) if not local else {}
    path = (WORK if local else HERE) / "RESULTS.md"
    path.write_text(page([*found, *others], plots))
    for name in pages.PAGES if not local else ():
        pages.fill(ROOT / name, by_name, plots)
    print(f"wrote {path}: {len(found)} measures")


def read_folder(published: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The results in a folder; and those in its folder ``other``, which the page adds to them."""
    found, others = sorted(published.glob("*.json")), sorted((published / "other").glob("*.json"))
    return [read(path) for path in found], [read(path) for path in others]


def page(found: list[dict[str, Any]], plots: dict[str, Path], published: Path = RESULTS) -> str:
    """The text of ``RESULTS.md``; ``published``: the folder of the results."""
    found = sorted(
        found, key=lambda r: (r["simulated"], ORDER.index(r["name"]) if r["name"] in ORDER else len(ORDER), r["name"])
    )
    machines: dict[str, str] = {}
    for result in found:
        machines.setdefault(result["machine"], string.ascii_uppercase[len(machines)])
    parts = [HEAD, *markdown(["", "machine"], [[letter, name] for name, letter in machines.items()])]
    shown: set[tuple[str, str]] = set()
    for simulated, head in ((False, "\n## Measured\n"), (True, SIMULATED)):
        chosen = [one for one in found if one["simulated"] is simulated]
        lines = [line for one in chosen for line in lines_of(one, machines, shown, published)]
        parts += [head, *markdown(["measure", "yardstick", "figure", "", "measured on"], lines)]
        for name, title in PICTURES.items():
            if name in plots and (name == "tenants") is simulated:
                parts.append(f"\n![{title}]({plots[name].relative_to(HERE).as_posix()})")
    again = [[measure, f"`{how}`"] for measure, how in (*unmeasured(found, shown).items(), *AGAIN.items())]
    parts += [MISSING, *markdown(["measure", "command"], again)]
    return "\n".join(parts) + "\n"


def read(path: Path) -> dict[str, Any]:
    """A result. Rows and verdicts that follow from cells, and verdicts that follow from rows, are computed again, by
    the formulas and bars as they are now."""
    result: dict[str, Any] = json.loads(path.read_text())
    before = json.dumps(result)
    if result["name"] in FIGURES:
        made = asdict(FIGURES[result["name"]](result["data"]["cells"]))
        kept = {name: result["data"][name] for name in ("plan", "cells")}
        result |= {name: made[name] for name in ("title", "rows", "verdicts", "notes")}
        result |= {"data": {**made["data"], **kept}}
    elif result["name"] in JUDGED:
        rows = {row["what"]: Row(**row) for row in result["rows"]}
        result["verdicts"] = [asdict(verdict) for verdict in JUDGED[result["name"]](rows)]
    if json.dumps(result) != before:
        write_result(path, result)
    return result


def lines_of(
    result: dict[str, Any], machines: dict[str, str], shown: set[tuple[str, str]], published: Path = RESULTS
) -> list[list[str]]:
    """A line for every verdict that has a figure and is not in ``shown``, and for the rows of :data:`ROWS`: at most
    :data:`MOST_LINES`, of which the last sums up the others. A verdict that is not met is always there."""
    found: list[tuple[bool, list[str]]] = []
    for verdict in result["verdicts"]:
        key = (result["name"], verdict["target"])
        if verdict["met"] is not None and key not in shown and not hidden(result["name"], verdict):
            shown.add(key)
            why = VERDICT[verdict["met"]] + (f"; {verdict['why']}" if verdict["why"] else "")
            found.append((verdict["met"], [verdict["target"], verdict["measured"], why]))
    for row in result["rows"] if result["name"] in ROWS else ():
        if row["what"].startswith(ROWS[result["name"]]):
            values = sorted(row["values"])
            figure = f"{number(values[len(values) // 2])} {row['unit']}"
            found.append((True, [row["what"], figure, row["note"]]))
    origin = f"{result['date']}, {ages.commit_of(result)}, {machines[result['machine']]}{ages.changed(result)}"
    names = itertools.chain([f"[{result['name']}]({_file(result, published)})"], itertools.repeat(""))
    return [[name, *line, origin] for name, line in zip(names, _few(found), strict=False)]


def hidden(name: str, verdict: dict[str, Any]) -> bool:
    """Whether a verdict stays in the file: never one that is not met."""
    return verdict["met"] is not False and bool(re.search(HIDDEN.get(name, r"$^"), verdict["target"]))


def _few(found: list[tuple[bool, list[str]]]) -> list[list[str]]:
    """The lines, or the first that are not met, then those that are, and one of all others."""
    if len(found) <= MOST_LINES:
        return [line for _, line in found]
    first = sorted(range(len(found)), key=lambda index: found[index][0])[: MOST_LINES - 1]
    rest = [found[index] for index in range(len(found)) if index not in first]
    met = sum(fine for fine, _ in rest)
    told = "; ".join(f"{target}: {figure}" + " (not met)" * (not fine) for fine, (target, figure, _) in rest)
    outcome = VERDICT[True] if met == len(rest) else f"{met} met, {len(rest) - met} **not met**"
    last = [f"{len(rest)} more", told, outcome]
    return [*(found[index][1] for index in sorted(first)), last]


def unmeasured(found: list[dict[str, Any]], shown: set[tuple[str, str]]) -> dict[str, str]:
    """The commands of the yardsticks that no result has a figure for, by measure and yardsticks."""
    lacking: dict[str, list[str]] = {}
    commands: dict[str, str] = {}
    for result in found:
        name = result["name"]
        for verdict in result["verdicts"]:
            if verdict["met"] is None and (name, verdict["target"]) not in shown and not hidden(name, verdict):
                shown.add((name, verdict["target"]))
                why = f" ({verdict['why']})" if verdict["why"] else ""
                lacking.setdefault(name, []).append(verdict["target"] + why)
                commands[name] = " ".join(result["command"].split()[:3])
    return {f"{name}: {'; '.join(targets)}": commands[name] for name, targets in lacking.items()}


def _file(result: dict[str, Any], published: Path) -> str:
    path = published / f"{result['name']}.json"
    ours = path.exists() and json.loads(path.read_text())["machine"] == result["machine"]
    return f"results/{'' if ours else 'other/'}{result['name']}.json"


if __name__ == "__main__":
    main()
