"""``RESULTS.md`` from the files in ``results/``: one section per measure, verdicts first. No figure is typed."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from harness import HERE, RESULTS

ORDER = ("generation", "training", "grpo_step", "memory", "service_floor", "tinker_latency", "preemption")
"""What comes first; the others follow by name, simulated ones last."""

HEAD = """# Results

Made by `python benchmarks/report.py` from `benchmarks/results/*.json`. Every figure is the median of the stated
repeats, with their range; ratios are within one run. Simulated figures stand apart and say so.
"""

WORDS = {True: "met", False: "**not met**", None: "not measured"}


def main() -> None:
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    found.sort(key=lambda r: (r["simulated"], ORDER.index(r["name"]) if r["name"] in ORDER else len(ORDER), r["name"]))
    parts = [HEAD, "## Targets\n", *_table(["measure", "target", "measured", ""], _verdicts(found))]
    for result in found:
        parts += _section(result)
    (HERE / "RESULTS.md").write_text("\n".join(parts) + "\n")
    print(f"wrote {Path('benchmarks') / 'RESULTS.md'}: {len(found)} measures")


def _verdicts(found: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [result["name"], v["target"], v["measured"], f"{WORDS[v['met']]}{'; ' + v['why'] if v['why'] else ''}"]
        for result in found
        for v in result["verdicts"]
    ]


def _section(result: dict[str, Any]) -> list[str]:
    label = "Simulated: " if result["simulated"] else ""
    versions = ", ".join(f"{name} {number}" for name, number in sorted(result["versions"].items()))
    parts = [f"\n## {label}{result['title']}\n", f"`{result['command']}` on {result['machine']}; {versions}.\n"]
    rows = []
    for row in result["rows"]:
        values = row["values"]
        spread = f"{_number(min(values))} to {_number(max(values))}" if len(values) > 1 else ""
        rows.append(
            [row["what"], f"{_number(statistics.median(values))} {row['unit']}", spread, str(len(values)), row["note"]]
        )
    parts += _table(["what", "median", "range", "runs", ""], rows)
    parts += [f"\n{note}" for note in result["notes"]]
    return parts


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    main()
