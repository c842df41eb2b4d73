"""Mistakes made in the controller on purpose, and which invariant of the simulated chaos noticed each, how soon.

``python -m benchmarks.scale.chaos_mutations``. The mistakes are those of ``tests/chaos/mutations.py``, whose test asks
that each is noticed.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.lib.harness import Result, command
from tests.chaos.events import Violation
from tests.chaos.mutations import MUTATIONS, Mutation, applied
from tests.chaos.run import run_plan
from tests.chaos.test_simulated import SMALL, TRIES


def noticed(mutation: Mutation) -> tuple[int, Violation] | None:
    """The seed that noticed, and what."""
    for seed in range(1, TRIES + 1):
        with applied(mutation):
            try:
                run_plan(replace(SMALL, seed=seed, **mutation.plan))
            except Violation as violation:
                return seed, violation
    return None


def main() -> None:
    result = Result("chaos_mutations", "Mistakes that the chaos notices", command(), simulated=True)
    missed = []
    for mutation in MUTATIONS:
        found = noticed(mutation)
        if found is None:
            missed.append(mutation.name)
            continue
        seed, violation = found
        note = f"{violation.invariant}: {violation.text[:110]} (seed {seed})"
        result.add(mutation.name, [violation.events], "events", note)
    result.judge("every mistake is noticed", f"{len(MUTATIONS) - len(missed)} of {len(MUTATIONS)}", not missed)
    result.notes.append("Events of the run up to the violation; all runs before it, of lower seeds, passed.")
    result.save()


if __name__ == "__main__":
    main()
