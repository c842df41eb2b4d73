"""Simulated: what ``rookery simulate --out FOLDER`` wrote into these folders, as rows beside the measured ones."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.lib.harness import Result, command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="each with a results.json")
    result = Result("simulation", "rookery simulate: the shipped controller on availability traces", command())
    result.simulated = True
    for folder in parser.parse_args().folders:
        found = json.loads((folder / "results.json").read_text())
        scenario, profile, trace = found["scenario"], found["profile"], found["trace"]
        where = f"{profile['name']} ({profile['label']}), {trace['name']}"
        result.notes.append(
            f"{where}: {trace['seconds'] / 3600:g} h, {trace['mean']:.1f} instances on average, discount"
            f" {scenario['discount']:.0%}, seed {scenario['seed']}, event log {found['event_log'][:16]}…"
        )
        for mode in found["modes"]:
            even = mode["break_even_discount"]
            note = f"{mode['tokens_per_price']:,.0f} tokens per price unit" + (
                f", pays from a discount of {even:.0%}" if even is not None else ""
            )
            result.add(f"{where}: {mode['mode']}", [mode["tokens_per_second"]], "trained tokens/s", note)
    result.save()


if __name__ == "__main__":
    main()
