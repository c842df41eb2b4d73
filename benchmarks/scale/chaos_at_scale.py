"""The shipped controller among a thousand workers that are preempted a hundred thousand times, in virtual time.

``python -m benchmarks.scale.chaos_at_scale [--seed N] [--workers N] [--jobs N] [--preemptions N] [--seeding]``. Ends
with the first violation of what must hold (``tests.chaos``), which names the seed and the events before it, else with a
table of what happened. Same seed, same event log.
"""

from __future__ import annotations

import argparse

from benchmarks.lib.harness import Result, command
from tests.chaos.faults import Plan
from tests.chaos.run import run_plan


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--preemptions", type=int, default=100_000)
    parser.add_argument("--seeding", action="store_true", help="trainers generate too")
    given = parser.parse_args()
    plan = Plan(
        seed=given.seed, workers=given.workers, jobs=given.jobs, preemptions=given.preemptions, seeding=given.seeding,
        tenants=min(20, given.jobs), hosts=8, lifetime=4.0, rebirth=1.5, operation=2.0, restart_every=60.0,
    )  # fmt: skip
    found = run_plan(plan)
    name = "chaos_at_scale" + ("_seeding" if given.seeding else "")
    result = Result(name, "Chaos at scale", command(), simulated=True)
    result.add("workers", [plan.workers], "")
    result.add("jobs at any time", [plan.jobs], "", f"{found.jobs} jobs in all, every one completed")
    result.add("preemptions", [found.preemptions], "", "processes killed, without power, or drained")
    result.add("violations", [0], "", "checked at every event")
    result.add("events checked", [found.events], "")
    result.add("versions committed", [found.versions], "", "each verified when it was committed")
    result.add("tokens received", [found.tokens], "")
    for kind, count in found.counts.items():
        result.add(kind, [count], "", "" if kind.startswith("fault") else "events")
    result.add("simulated time", [found.virtual_seconds], "s")
    result.add("real time", [found.real_seconds], "s")
    result.notes.append(f"Seed {plan.seed}, event log {found.digest}.")
    result.data = found.table()
    result.judge(
        "1,000 workers, 200 jobs, 100,000 preemptions without a violation",
        f"{plan.workers:,}, {plan.jobs:,}, {found.preemptions:,}: none",
        True if plan.workers >= 1000 and plan.jobs >= 200 and found.preemptions >= 100_000 else None,
    )
    result.save()


if __name__ == "__main__":
    main()
